"""The backend "cpdhpc" of torch.distributed under mpirun, beside gloo: each call, each dtype."""

import gc
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

import cpdhpc.torch  # makes the backend known
from cpdhpc.torch.backend import channel as channels
from cpdhpc.torch.backend import programs
from cpdhpc.torch.backend.board import LEFT, SLOTS
from cpdhpc.torch.backend.progress import engine

assert cpdhpc.torch

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
OTHERS = (torch.int16, torch.bool, torch.complex64, torch.complex128)
TINY = (torch.float8_e4m3fn, torch.float8_e5m2)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
EVERY = (*FLOATS, *INTEGERS, *OTHERS, *TINY, *UNSIGNED)
SIZES = (0, 1, 7, 1000, 20_000, 300_001)  # with the words, whole, in chunks, in several pieces


@pytest.fixture(scope="module", autouse=True)
def gloo() -> Iterator[dist.ProcessGroup]:
    """torch's processes over MPI by the three lines of the page, and a group of gloo's beside."""
    dist.init_process_group("cpdhpc", init_method="mpi://", timeout=timedelta(seconds=300))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield dist.new_group(backend="gloo")
    torch.set_num_threads(threads)
    dist.destroy_process_group()


@pytest.fixture(params=["node", "near", "far"])
def near(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Calls in the memory of the node; or by messages, as between nodes; or between many ranks."""
    channel = dist.group.WORLD.channel
    board = channel.board
    if request.param != "node":
        monkeypatch.setattr(channel, "board", None)
    if request.param == "far":
        monkeypatch.setattr(channels, "NEAR", 1)
        monkeypatch.setattr(programs, "NEAR", 1)
    yield str(request.param)
    if request.param != "node" and board is not None:  # its slots had other calls meanwhile
        last = next(channel._calls)
        for number in range(max(1, last - SLOTS + 1), last + 1):
            board.mark(number, LEFT)


def values(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers, whose sums each dtype holds; the same for a seed on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 4, (size,), generator=generator)
    if dtype.is_complex:
        return torch.complex(whole.double(), whole.flip(0).double()).to(dtype)
    return whole.to(dtype)


def mine(size: int, dtype: torch.dtype) -> torch.Tensor:
    return values(size, dtype, dist.get_rank())


def of_all(size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(size, dtype, rank) for rank in range(dist.get_world_size())]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    if not one.numel():
        return True
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def gathered(x: torch.Tensor, root: int) -> torch.Tensor | None:
    """All ranks' tensors on a root, by a call that torch has since 2.15."""
    here = dist.get_rank() == root
    whole = torch.empty(x.numel() * dist.get_world_size() if here else 0, dtype=x.dtype)
    options = dist.GatherOptions()
    options.rootRank = root
    dist.group.WORLD.gather_single(whole, x, options).wait()
    return whole if here else None


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_what_moves_values_moves_each_dtype(dtype: torch.dtype, near: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for size in SIZES:
        x, every = mine(size, dtype), of_all(size, dtype)
        for root in range(ranks):
            got = x.clone()
            dist.broadcast(got, root)
            assert same(got, every[root]), (size, root)
        outs = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(outs, x)
        assert all(map(same, outs, every)), size
        whole = torch.empty(size * ranks, dtype=dtype)
        dist.all_gather_into_tensor(whole, x)
        assert same(whole, torch.cat(every)), size
        last = ranks - 1
        there = [torch.empty_like(x) for _ in range(ranks)] if rank == last else None
        dist.gather(x, there, dst=last)
        assert there is None or all(map(same, there, every)), size
        at_once = gathered(x, last)
        assert at_once is None or same(at_once, torch.cat(every)), size
        got = torch.empty_like(x)
        dist.scatter(got, every if rank == last else None, src=last)
        assert same(got, x), size
        outs = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_to_all(outs, [(every[rank]) for _ in range(ranks)])
        assert all(map(same, outs, every)), size


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("segments", [1, programs.AHEAD, 2 * programs.AHEAD + 1])
def test_sizes_around_those_of_segments(segments: int, more: int, near: str) -> None:
    """As many segments as are under way at a time, or a value less or more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = segments * programs.SEGMENT_BYTES * max(1, ranks - 1) + more
    every = [torch.arange(r, r + size).remainder(61).to(torch.uint8) for r in range(ranks)]
    total, mean = sum(every[1:], every[0]), sum(each.int() for each in every) // ranks
    for root in range(ranks):
        x, sums = every[rank].clone(), every[rank].clone()
        works = [dist.broadcast(x, root, async_op=True), dist.reduce(sums, root, async_op=True)]
        for work in works[::-1]:
            work.wait()
        assert same(x, every[root]) and (rank != root or same(sums, total)), root
    x = every[rank].int()
    dist.all_reduce(x, ReduceOp.AVG)
    assert same(x, mean.int())
    counts = [size // (r + 1) for r in range(ranks)]
    share = torch.empty(counts[rank], dtype=torch.uint8)
    wholes = [torch.cat([each[:count] for count in counts]) for each in every]
    dist.reduce_scatter(share, list(wholes[rank].split(counts)))
    assert same(share, total[: counts[rank]])
    got = torch.empty(ranks * counts[rank], dtype=torch.uint8)
    dist.all_to_all_single(got, wholes[rank], [counts[rank]] * ranks, counts)
    assert same(got, torch.cat([each[: counts[rank]] for each in every]))


REDUCTIONS = {
    "SUM": lambda xs: sum(xs[1:], xs[0]),
    "PRODUCT": lambda xs: torch.stack(xs).prod(0),
    "MIN": lambda xs: torch.stack(xs).amin(0),
    "MAX": lambda xs: torch.stack(xs).amax(0),
    "BAND": lambda xs: _folded(torch.bitwise_and, xs),
    "BOR": lambda xs: _folded(torch.bitwise_or, xs),
    "BXOR": lambda xs: _folded(torch.bitwise_xor, xs),
    "AVG": lambda xs: _mean(sum(xs[1:], xs[0]), len(xs)),
}


def _mean(total: torch.Tensor, count: int) -> torch.Tensor:
    """Of complex numbers, both parts rounded once."""
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / count)
    return total / count


def _folded(function: Callable[..., torch.Tensor], xs: list[torch.Tensor]) -> torch.Tensor:
    total = xs[0]
    for each in xs[1:]:
        total = function(total, each)
    return total


def expected(name: str, xs: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The reduction, calculated in a wide dtype."""
    if name in ("BAND", "BOR", "BXOR"):
        wide = torch.int64 if dtype != torch.bool else torch.bool
    else:
        wide = torch.complex128 if dtype.is_complex else torch.float64
    total = REDUCTIONS[name]([x.to(wide) for x in xs])
    if name == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
        total = total.trunc()
    return total.to(dtype)


def allowed(name: str, dtype: torch.dtype) -> bool:
    real = dtype.is_floating_point or dtype.is_complex
    if name in ("BAND", "BOR", "BXOR"):
        return not real
    if dtype.is_complex:  # torch itself refuses the others
        return name in ("SUM", "AVG")
    return name != "AVG" or dtype != torch.bool


@pytest.mark.parametrize("name", REDUCTIONS)
def test_each_reduction_of_each_dtype(name: str, near: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    op = getattr(ReduceOp, name)
    for dtype in (each for each in EVERY if allowed(name, each)):
        for size in SIZES:
            every = of_all(size * ranks, dtype)
            want = expected(name, every, dtype)
            got = every[rank].clone()
            dist.all_reduce(got, op)
            assert same(got, want), (dtype, size)
            given = every[rank].clone()
            dist.reduce(given, ranks - 1, op)
            assert same(given, want if rank == ranks - 1 else every[rank]), (dtype, size)
            share, given = torch.empty(size, dtype=dtype), every[rank].clone()
            dist.reduce_scatter_tensor(share, given, op)
            assert same(share, want[rank * size : (rank + 1) * size]), (dtype, size)
            assert same(given, every[rank]), "what is given stays as it is"
            share = torch.empty(size, dtype=dtype)
            dist.reduce_scatter(share, list(given.split(size)) if size else [given] * ranks, op)
            assert same(share, want[rank * size : (rank + 1) * size]), (dtype, size)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_the_same_bits_as_gloo(dtype: torch.dtype, gloo: dist.ProcessGroup) -> None:
    """Two ranks' sums have no order; those of more are of whole numbers, that are exact."""
    for size in SIZES[1:]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = mine(size, dtype)
        if dtype.is_floating_point and dist.get_world_size() == 2:
            x = torch.randn(size, generator=generator).to(dtype)
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            ours, theirs = x.clone(), x.clone()
            dist.all_reduce(ours, op)
            dist.all_reduce(theirs, op, group=gloo)
            assert same(ours, theirs), (size, op)


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_order_and_mean_of_unsigned_numbers(dtype: torch.dtype, near: str) -> None:
    """Of numbers on both sides of the largest signed one, by NumPy."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = np.dtype(str(dtype).removeprefix("torch."))
    random, most = np.random.default_rng(1), np.iinfo(kind).max
    for shape in ((), (7,), (20_001,)):
        every = [random.integers(0, most, shape, kind, endpoint=True) for _ in range(ranks)]
        wants = {
            ReduceOp.MIN: np.min(every, axis=0),
            ReduceOp.MAX: np.max(every, axis=0),
            ReduceOp.AVG: np.sum(every, axis=0, dtype=kind) // kind.type(ranks),
        }
        for op, want in wants.items():
            got = torch.from_numpy(np.array(every[rank], kind))
            dist.all_reduce(got, op)
            assert np.array_equal(got.numpy(), want), (op, shape)


def test_a_mean_and_a_sum_of_multiples() -> None:
    ranks = dist.get_world_size()
    x = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [ranks * (ranks - 1) / 4] * 5


def test_every_rank_has_the_same_bits() -> None:
    torch.manual_seed(dist.get_rank())
    for size in (10, 3_000, 200_000):
        x = torch.randn(size)
        dist.all_reduce(x)
        outs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(outs, x)
        assert all(same(each, x) for each in outs)


def test_several_tensors_in_one_call(near: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    xs = [mine(size, dtype) for size in (3, 5_000, 0) for dtype in (torch.float32, torch.int64)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    for x, size in zip(xs, (3, 3, 5_000, 5_000, 0, 0), strict=True):
        assert same(x, expected("SUM", of_all(size, x.dtype), x.dtype))
    ins = [mine(size, torch.float32) for size in (3, 5_000)]
    outs = [torch.empty(len(x) * ranks) for x in ins]
    with dist._coalescing_manager():
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x)
    for out, x in zip(outs, ins, strict=True):
        assert same(out, torch.cat(of_all(len(x), torch.float32)))
    shares = [torch.empty_like(x) for x in ins]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, x in zip(shares, outs, strict=True):
            dist.reduce_scatter_tensor(out, x)
    manager.wait()
    for share, out in zip(shares, outs, strict=True):
        assert same(share, out.chunk(ranks)[rank] * ranks)


def test_lengths_that_differ(near: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    outs = [torch.empty(3 * r + 1) for r in range(ranks)]
    dist.all_gather(outs, torch.full((3 * rank + 1,), float(rank)))
    assert [each.tolist() for each in outs] == [[float(r)] * (3 * r + 1) for r in range(ranks)]
    ins = [torch.full((2 * r + 1,), float(rank)) for r in range(ranks)]
    share = torch.empty(2 * rank + 1)
    dist.reduce_scatter(share, ins)
    assert share.tolist() == [ranks * (ranks - 1) / 2] * (2 * rank + 1)
    rows = [r + rank for r in range(ranks)]  # to rank r
    given = torch.arange(sum(rows) * 2.0).reshape(-1, 2) + 100 * rank
    got = torch.empty(sum(r + rank for r in range(ranks)), 2)
    dist.all_to_all_single(got, given, rows, rows)
    start = 0
    for source, count in enumerate(rows):
        first = sum(source + r for r in range(rank))
        want = torch.arange(2.0 * first, 2.0 * (first + count)).reshape(-1, 2) + 100 * source
        assert same(got[start : start + count], want)
        start += count


def test_tensors_that_are_not_contiguous() -> None:
    ranks = dist.get_world_size()
    x = torch.arange(12.0).reshape(3, 4).T
    dist.all_reduce(x)
    assert same(x.contiguous(), torch.arange(12.0).reshape(3, 4).T.contiguous() * ranks)
    whole = torch.zeros(2 * ranks, 3).T
    dist.all_gather(list(whole.T.contiguous().chunk(ranks)), torch.ones(2, 3))
    got = torch.zeros(4, 6)[:, ::2]
    dist.broadcast(got if dist.get_rank() else torch.ones(4, 6)[:, ::2], 0)
    assert dist.get_rank() == 0 or got.sum() == 12


def test_messages_between_two_ranks() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for size in (0, 3, 100_000):
        x, got = torch.full((size,), float(rank)), torch.empty(size)
        ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert (got == before).all()
    # tags come in another order
    sends = [dist.isend(torch.tensor([float(tag)]), after, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        got = torch.empty(1)
        dist.recv(got, before, tag=tag)
        assert got.item() == tag
    for work in sends:
        work.wait()
    if rank == 0:
        found = set()
        for _ in range(ranks - 1):
            source = dist.recv(got)
            assert got.item() == source
            found.add(source)
        assert found == set(range(1, ranks))
    else:
        dist.send(torch.tensor([float(rank)]), 0)


def test_objects() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(ranks)]
    objects = [1, "two"] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [1, "two"]
    out: list[Any] = [None]
    dist.scatter_object_list(out, list(range(ranks)) if rank == 0 else None, 0)
    assert out == [rank]


def test_work_proceeds_while_nobody_waits_for_it() -> None:
    xs = [torch.ones(1_000_000) for _ in range(3)]
    futures = [dist.all_reduce(x, async_op=True).get_future() for x in xs]
    end_s = time.monotonic() + 100
    while not all(future.done() for future in futures) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert all(future.done() for future in futures)
    assert all((x == dist.get_world_size()).all() for x in xs)
    assert all(future.wait()[0] is not None for future in futures)


def test_a_callback_may_wait_for_another_call() -> None:
    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        other = dist.all_reduce(future.value()[0], async_op=True).get_future()
        return other.wait()[0]

    first = [dist.all_reduce(torch.ones(10), async_op=True).get_future() for _ in range(1)]
    ranks = dist.get_world_size()
    assert [each.then(again).wait()[0].item() for each in first] == [ranks**2]


def refused(call: Callable[[], Any]) -> str:
    """The words of the error of a call; all ranks have one."""
    with pytest.raises(RuntimeError) as caught:
        call()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, str(caught.value))  # the group goes on
    assert len(set(found)) == 1, found
    return str(caught.value)


def test_equal_rows_of_one_rank_among_others(near: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for least in (2, 3000):
        table = [[least + 3 * i * j for j in range(ranks)] for i in range(ranks)]
        rows = table[rank]
        given = torch.cat([torch.full((n,), 10.0 * rank + to) for to, n in enumerate(rows)])
        got = torch.zeros(sum(rows))
        dist.all_to_all_single(got, given, *([] if rank == 0 else [rows, rows]))
        want = [torch.full((n,), 10.0 * source + rank) for source, n in enumerate(rows)]
        assert torch.equal(got, torch.cat(want))


def test_calls_that_differ_are_an_error_on_all_ranks(near: str) -> None:
    rank = dist.get_rank()
    words = refused(lambda: dist.all_reduce(torch.ones(3 + rank % 2)))
    assert "all_reduce SUM float32[3] on rank 0, all_reduce SUM float32[4] on rank 1" in words
    words = refused(lambda: dist.broadcast(torch.ones(3, dtype=FLOATS[rank % 2]), 0))
    assert "broadcast from rank 0 float32[3] on rank 0" in words
    assert "broadcast from rank 0 float64[3] on rank 1" in words
    words = refused(lambda: dist.all_reduce(torch.ones(3)) if rank else dist.barrier())
    assert "barrier on rank 0, all_reduce SUM float32[3] on rank 1" in words
    words = refused(lambda: dist.broadcast(torch.ones(3), rank % 2))
    assert "broadcast from rank 0" in words
    words = refused(lambda: dist.all_reduce(torch.ones(3) if rank else torch.ones(3).to_sparse()))
    assert "SUM sparse float32[3] of 1 sparse axes on rank 0, all_reduce SUM float32[3]" in words
    for rows in (1, 3000, 200_000):
        x = torch.ones((rows + rank % 2) * dist.get_world_size())
        words = refused(lambda: dist.all_to_all_single(torch.empty_like(x), x))  # noqa: B023
        assert f"rank 0 sends {4 * rows} bytes to rank 1, which expects {4 * rows + 4}" in words
    op = ReduceOp.MIN if rank else ReduceOp.MAX
    assert "all_reduce MAX" in refused(lambda: dist.all_reduce(torch.ones(3), op))


def test_what_one_rank_refuses_all_raise(near: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last = ranks - 1
    out = torch.empty(5 + (rank == last))
    words = refused(lambda: dist.all_gather_into_tensor(out, torch.ones(5)))
    assert "_all_gather_base: output_tensor is float32[5]" in words
    assert f"must have the dtype and {ranks} times the elements of input_tensor" in words
    words = refused(lambda: dist.all_reduce(torch.ones(2, dtype=torch.float32), ReduceOp.BAND))
    assert "BAND of torch.float32" in words
    counts = [1] * ranks
    if rank == last:
        counts[0] = 2
    given = torch.ones(sum(counts))
    words = refused(lambda: dist.all_to_all_single(torch.empty(ranks), given, [1] * ranks, counts))
    assert f"rank {last} sends 8 bytes to rank 0, which expects 4" in words


def test_a_message_of_another_length_is_an_error() -> None:
    rank = dist.get_rank()
    for size in (2, 4):
        if rank == 0:
            dist.send(torch.ones(3), 1)
        elif rank == 1:
            with pytest.raises(RuntimeError, match=r"recv from rank 0 float32\[.\]: the message"):
                dist.recv(torch.ones(size), 0)


@pytest.mark.parametrize(
    ("sent", "room"), [(8, 4), (1100, 1000), (300_000, 4), (1_000_000, 999_999)]
)
def test_a_long_message_leaves_the_memory_after_the_tensor(sent: int, room: int) -> None:
    """Open MPI itself writes messages of 4 KiB or more beyond the end."""
    rank, whole = dist.get_rank(), torch.zeros(1_000_000)
    if rank == 0:
        dist.send(torch.ones(sent), 1)
        dist.send(torch.full((3,), 2.0), 1)
    elif rank == 1:
        with pytest.raises(RuntimeError, match=f"has {4 * sent} bytes: must have {4 * room}"):
            dist.recv(whole[:room], 0)
        assert not whole.any()
        dist.recv(whole[:3], 0)
        assert whole.sum() == 6


def test_receives_take_messages_in_the_order_of_their_calls() -> None:
    """Waited for in another order, from one rank and from any, of lengths that decide nothing."""
    rank = dist.get_rank()
    for size in (3, 3000, 300_000):
        if rank == 0:
            xs = [torch.full((size,), float(i)) for i in range(6)]
            for work in [dist.isend(x, 1, tag=i % 2) for i, x in enumerate(xs)]:
                work.wait()
        elif rank == 1:
            xs = [torch.zeros(size) for _ in range(6)]
            froms = [0, None, None, 0, 0, None]
            works = [
                dist.irecv(x, source, tag=i % 2)
                for i, (x, source) in enumerate(zip(xs, froms, strict=True))
            ]
            for work in works[::-1]:
                work.wait()
            assert [x[-1].item() for x in xs] == [0, 1, 2, 3, 4, 5]


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"all_reduce SUM float32\[3\]: timeout after 1.0 s"):
            dist.all_reduce(torch.ones(3), group=group)
        with pytest.raises(RuntimeError, match=r"waiting for rank 1"):
            dist.recv(torch.ones(3), 1, group=group)
        future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        with pytest.raises(RuntimeError, match="timeout after"):
            future.wait()
    dist.barrier()
    dist.destroy_process_group(group)


def test_groups() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    turned = dist.new_group(list(range(ranks))[::-1])
    assert dist.get_world_size(turned) == ranks
    for part in ([0], [0, 1], list(range(1, ranks))):
        group = dist.new_group(part)
        if rank in part:
            x = torch.ones(4)
            dist.all_reduce(x, group=group)
            assert (x == len(part)).all()
            dist.destroy_process_group(group)
    mesh = dist.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("one", "all"))
    x = torch.ones(2)
    dist.all_reduce(x, group=mesh.get_group("all"))
    assert x[0] == ranks
    dist.destroy_process_group(turned)


def test_groups_that_come_and_go_leave_nothing() -> None:
    def some(count: int) -> None:
        for _ in range(count):
            group = dist.new_group()
            x = torch.ones(4)
            dist.all_reduce(x, group=group)
            dist.destroy_process_group(group)
        gc.collect()

    def held() -> tuple[int, int]:
        """Open files, and communicators of groups."""
        channels = [each for each in gc.get_objects() if type(each).__name__ == "Channel"]
        return len(list(Path("/proc/self/fd").iterdir())), len(channels)

    some(5)
    before = held()
    some(200)
    assert held() == before
    assert not engine().under_way


def test_the_profiler_shows_calls() -> None:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 4))
        dist.barrier()
    events = [each for each in profile.events() if each.name == "cpdhpc:all_reduce"]
    assert len(events) == 1 and events[0].is_async and events[0].input_shapes == [[3, 4]]

"""The backend "cpdhpc": what programs may give to calls, and how calls, groups and threads end."""

import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

import cpdhpc.torch
from cpdhpc.torch.backend import group as groups
from cpdhpc.torch.backend.board import SLOTS, VALUES_BYTES
from cpdhpc.torch.backend.programs import TURNS_BYTES, WHOLE_BYTES
from cpdhpc.torch.backend.progress import engine

LARGE = 300_000  # elements, whose sum takes several messages
LIMIT = timedelta(seconds=300)


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    dist.init_process_group("cpdhpc", init_method="mpi://", timeout=LIMIT)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


@pytest.fixture
def hasty() -> Iterator[Any]:
    """A group whose calls wait for one second."""
    group = dist.new_group()
    group.set_timeout(timedelta(seconds=1))
    yield group
    dist.barrier()
    dist.destroy_process_group(group)


def each(value: Callable[[int], float]) -> list[float]:
    return [value(rank) for rank in range(dist.get_world_size())]


def to(root: int) -> dist.GatherOptions:
    options = dist.GatherOptions()
    options.rootRank = root
    return options


def mine() -> torch.Tensor:
    return torch.full((2,), float(dist.get_rank()))


FORMS: dict[str, Callable[[Any, torch.Tensor, list[torch.Tensor]], Any]] = {
    "allreduce": lambda g, x, xs: g.allreduce(x),
    "allreduce of a list": lambda g, x, xs: g.allreduce([x], ReduceOp.SUM),
    "allreduce, op": lambda g, x, xs: g.allreduce(x, ReduceOp.MAX),
    "allreduce by name": lambda g, x, xs: g.allreduce(tensor=x, op=ReduceOp.MAX, timeout=LIMIT),
    "allreduce, op, timeout": lambda g, x, xs: g.allreduce(x, ReduceOp.MAX, LIMIT),
    "broadcast": lambda g, x, xs: g.broadcast(x, 1),
    "broadcast by name": lambda g, x, xs: g.broadcast(tensor=x, root=1),
    "reduce": lambda g, x, xs: g.reduce(x, 0, ReduceOp.MAX),
    "allgather": lambda g, x, xs: g.allgather(xs, x),
    "gather": lambda g, x, xs: g.gather(xs if g.rank() == 0 else [], x, 0),
    "scatter": lambda g, x, xs: g.scatter(x, xs if g.rank() == 1 else [], 1),
    "reduce_scatter": lambda g, x, xs: g.reduce_scatter(x, xs, ReduceOp.SUM),
    "barrier": lambda g, x, xs: g.barrier(LIMIT),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_groups_methods_take_the_forms_of_torchs_types(name: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, xs = mine(), [torch.full((2,), 10.0 * rank + r) for r in range(ranks)]
    FORMS[name](dist.group.WORLD, x, xs).wait()
    total = ranks * (ranks - 1) / 2
    wanted = {
        "allreduce": total, "allreduce of a list": total, "broadcast": 1.0,
        "broadcast by name": 1.0, "reduce": rank or ranks - 1.0, "scatter": 10.0 + rank,
        "reduce_scatter": 10 * total + ranks * rank, "barrier": rank,
    }  # fmt: skip
    moved = name in ("allgather", "gather")
    assert x.tolist() == [wanted.get(name, rank if moved else ranks - 1)] * 2
    if name == "allgather" or (name == "gather" and rank == 0):
        assert [t[0].item() for t in xs] == list(range(ranks))


@pytest.mark.parametrize("size", [10, LARGE])
def test_tensors_of_inference_mode(size: int) -> None:
    ranks = dist.get_world_size()
    with torch.inference_mode():
        x, table = torch.ones(size), torch.ones(2, size).T
        whole, row = torch.zeros(size * ranks), torch.ones(size)
        works = [dist.all_reduce(x, async_op=True), dist.all_reduce(table, async_op=True)]
        works.append(dist.all_gather_single(whole, row, async_op=True))
        end_s = time.monotonic() + 100
        while engine().under_way and time.monotonic() < end_s:  # the thread moves them on
            time.sleep(0.001)
        for work in works:
            work.wait()
        assert (x == ranks).all() and (table == ranks).all() and (whole == 1).all()
    dist.all_reduce(x)  # outside
    assert (x == ranks**2).all()


def test_torch_learns_that_a_group_has_none_of_the_rarer_abilities() -> None:
    """It asks the group, or its backend for a device; each release of torch asks for more."""
    group = dist.group.WORLD
    backend, asked = torch._C._distributed_c10d.Backend, re.compile("_?supports_")
    names = [name for name in dir(backend) if asked.match(name)]
    assert "supports_coalescing" in names
    device = torch.device("cpu")
    for each in (group, group._get_backend(device)):
        answers = {name: getattr(each, name, None) for name in names}
        answers["supports_tensor_alloc"] = each.supports_tensor_alloc(device)
        assert not any(answer is not False for answer in answers.values()), answers


def test_scratch_memory_is_the_hosts_whatever_the_default_device_is() -> None:
    x = torch.ones(LARGE)
    with torch.device("meta"):
        dist.all_reduce(x)
        dist.all_to_all(
            list(torch.empty_like(x).chunk(dist.get_world_size())),
            list(x.chunk(dist.get_world_size())),
        )
    assert (x == dist.get_world_size()).all()


def test_values_that_torch_has_negated_lazily() -> None:
    x = torch.tensor([1 + 2j]).conj().imag
    assert x.is_neg() and x.is_contiguous()
    outs = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, x)
    assert [out.item() for out in outs] == each(lambda _: -2.0)
    dist.all_reduce(x)
    assert x.item() == -2.0 * dist.get_world_size()


@pytest.mark.parametrize("size", [3, LARGE])
def test_outputs_that_lie_in_inputs(size: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for place in range(ranks):
        x = torch.arange(1.0 * size * ranks)
        wanted = (x * ranks).chunk(ranks)[rank].clone()
        out = x[place * size : (place + 1) * size]
        dist.reduce_scatter_single(out, x)
        assert torch.equal(out, wanted)
        whole = torch.zeros(size * ranks)
        part = whole[place * size : (place + 1) * size].fill_(rank)
        dist.all_gather_single(whole, part)
        every = torch.arange(float(ranks)).repeat_interleave(size)
        assert torch.equal(whole, every)
        whole.zero_()
        part.fill_(rank)
        dist.group.WORLD.gather_single(whole, part, to(0)).wait()
        assert rank or torch.equal(whole, every)
    x = torch.arange(1.0 * size * ranks) + rank
    wanted = torch.cat(
        [torch.arange(1.0 * size * ranks).chunk(ranks)[rank] + r for r in range(ranks)]
    )
    dist.all_to_all_single(x, x)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("size", [10, LARGE])
def test_outputs_that_autograd_tracks_before_their_calls_end(size: int) -> None:
    """As those of functional collectives, which return before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    if rank:
        dist.barrier()  # rank 0 has begun its calls, which cannot end yet
    x = torch.ones(ranks, ranks, size)
    outs = [torch.ones(ranks, size), *torch.full((4, ranks, size), float(rank == 1)).unbind()]
    outs = [out.clone() for out in outs]
    with torch.no_grad():
        works = [
            dist.all_reduce(outs[0], group=group, async_op=True),
            dist.broadcast(outs[1], 1, group=group, async_op=True),
            dist.all_gather_single(outs[2], x[0, 0], group=group, async_op=True),
            dist.reduce_scatter_single(outs[3], x, group=group, async_op=True),
            dist.all_to_all_single(outs[4], x[0], group=group, async_op=True),
        ]
    for out in outs:
        out.requires_grad_()
    if not rank:
        dist.barrier()
    for work in works:
        work.wait()
    assert [set(out.flatten().tolist()) for out in outs] == [{ranks}, {1}, {1}, {ranks}, {1}]
    dist.destroy_process_group(group)


ONE_RANK: dict[str, Callable[[], Any]] = {
    "all_reduce: list index out of range": lambda: dist.group.WORLD.allreduce([]).wait(),
    "all_reduce: Cannot copy out of meta": lambda: dist.all_reduce(torch.ones(3, device="meta")),
    "all_reduce: output of shape .3. has": lambda: dist.all_reduce(torch.ones(1).expand(3)),
    "broadcast: unsupported memory format": lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
    "gather: gather_tensor is float32.5.: must have": lambda: dist.group.WORLD.gather_single(
        torch.ones(5), torch.ones(5), to(dist.get_rank())
    ).wait(),
    "all_to_all: output has 0 rows": lambda: dist.all_to_all_single(
        torch.tensor(0.0), torch.tensor(0.0)
    ),
}


@pytest.mark.parametrize("words", ONE_RANK)
def test_whatever_one_rank_cannot_do_all_raise(words: str) -> None:
    last = dist.get_world_size() - 1
    with pytest.raises(RuntimeError, match=f"rank {last} . {words}"):
        ONE_RANK[words]() if dist.get_rank() == last else dist.all_reduce(torch.ones(3))


def test_a_late_call_leaves_no_memory_that_messages_write(hasty: Any) -> None:
    """What it was given, and its scratch memory, live on: a later message may still come."""
    before = len(engine().abandoned)
    if dist.get_rank() == 0:
        for size in (10, LARGE, 10 * LARGE):
            with pytest.raises(RuntimeError, match=r"timeout after 1.0 s"):
                dist.all_reduce(torch.ones(size), group=hasty)
        kept = engine().abandoned[before:]
        assert len(kept) == 3 and all(program.gi_frame is not None for _, program, _ in kept)


def test_a_receive_that_was_late_takes_no_message_of_the_next_one(hasty: Any) -> None:
    x = torch.zeros(3)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"recv from rank 1 float32.3.: timeout after 1.0 s"):
            dist.recv(x, 1, group=hasty)
        dist.barrier()
        dist.recv(x, 1, group=hasty)
        assert x.tolist() == [1, 1, 1]
    else:
        dist.barrier()
        if dist.get_rank() == 1:
            dist.send(torch.ones(3), 0, group=hasty)


def test_setting_wires_ends_if_a_rank_does_not_come_or_makes_another_call(hasty: Any) -> None:
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"set_wires: timeout after 1.0 s of waiting for"):
            cpdhpc.torch.set_wires(hasty, all_reduce="e4m3")
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"set_wires on rank 0, all_reduce SUM float32\[3\]"):
        if dist.get_rank() == 0:
            cpdhpc.torch.set_wires(all_reduce="e4m3")
        else:
            dist.all_reduce(torch.ones(3))


def test_packed_calls_that_are_late_end_those_after_them_too(hasty: Any) -> None:
    cpdhpc.torch.set_wires(hasty, all_reduce="e4m3")
    if dist.get_rank() == 0:
        works = [dist.all_reduce(torch.ones(LARGE), group=hasty, async_op=True) for _ in range(2)]
        for work in works:
            with pytest.raises(RuntimeError, match=r"timeout after 1.0 s of waiting for rank 1"):
                work.wait()


def test_a_packed_call_that_differs_lets_the_next_one_have_its_turn() -> None:
    group = dist.new_group()
    cpdhpc.torch.set_wires(group, all_reduce="e4m3")
    works = [
        dist.all_reduce(torch.ones(LARGE + (i == 0) * dist.get_rank()), group=group, async_op=True)
        for i in range(3)
    ]
    with pytest.raises(RuntimeError, match=r"call .*:2 of the process group differs"):
        works[0].wait()
    for work in works[1:]:
        work.wait()
        assert (work.result()[0] == dist.get_world_size()).all()
    dist.destroy_process_group(group)


def test_calls_under_way_end_before_their_group_does() -> None:
    group, x = dist.new_group(), torch.ones(LARGE)
    work = dist.all_reduce(x, group=group, async_op=True)
    dist.destroy_process_group(group)
    work.wait()
    assert (x == dist.get_world_size()).all()
    with pytest.raises(RuntimeError, match="the process group was destroyed"):
        group.allreduce([x]).wait()


def test_a_call_that_nobody_else_makes_ends_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SETTLE_S", 0.5)
    group = dist.new_group()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(LARGE), group=group, async_op=True)
    dist.destroy_process_group(group)
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"all_reduce SUM .*: the process group was destroyed"
        ):
            work.wait()


def _calls() -> None:
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        raise SystemExit(7 if "this process was made by fork" in str(error) else 1) from None


def test_a_process_made_by_fork_cannot_call() -> None:
    """Loaders of data make such ones; the others go on."""
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    child = multiprocessing.get_context("fork").Process(target=_calls)
    child.start()
    child.join(300)
    assert child.exitcode == 7
    work.wait()
    assert (work.result()[0] == dist.get_world_size()).all()


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Do something in threads at once; raise what any of them raised."""
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_with_a_group_each() -> None:
    mine = [dist.new_group() for _ in range(3)]

    def work(number: int) -> None:
        for turn in range(60):
            x = torch.full((10 if turn % 3 else 100_000,), float(number))
            dist.all_reduce(x, group=mine[number])
            assert (x == number * dist.get_world_size()).all()

    in_threads(work, len(mine))
    for group in mine:
        dist.destroy_process_group(group)


def test_threads_of_one_group_make_calls_of_their_own() -> None:
    def work(_: int) -> None:
        for _ in range(100):
            x = torch.ones(10)
            dist.all_reduce(x)
            assert (x == dist.get_world_size()).all()

    in_threads(work, 3)


def test_any_number_of_callbacks_may_wait_for_calls() -> None:
    def again(_: Any) -> float:
        return float(dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0])

    futures = [dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(100)]
    found = [future.then(again) for future in futures]
    assert [future.wait() for future in found] == [dist.get_world_size()] * 100


@pytest.mark.parametrize("size", [4, 300_000])
def test_the_future_of_an_ended_call_is_done(size: int) -> None:
    found = []
    for early in [True, False] * 50:
        work = dist.all_reduce(torch.ones(size), async_op=True)
        future = work.get_future() if early else None
        work.wait()
        future = future or work.get_future()
        found.append(future.done() and future.value()[0][0].item() == dist.get_world_size())
    assert all(found)


def test_small_calls_of_one_node_need_no_message() -> None:
    """Their words and values go through memory of the node, also many at a time."""
    channel = dist.group.WORLD.channel
    assert channel.board is not None
    ranks, xs = dist.get_world_size(), [torch.full((100,), float(i)) for i in range(50)]
    for work in [dist.all_reduce(x, async_op=True) for x in xs][::-1]:
        work.wait()
    assert all((x == i * ranks).all() for i, x in enumerate(xs))


TURNS = ("VALUES_BYTES", "part", "WHOLE_BYTES", "TURNS_BYTES")


@pytest.mark.parametrize("of", TURNS)
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_sizes_around_those_of_turns(of: str, more: int) -> None:
    """Values in the memory of the node, as many as fit into a turn, or one less or more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = VALUES_BYTES // ranks // 64 * 64
    bounds = dict(zip(TURNS, (VALUES_BYTES, part, WHOLE_BYTES, TURNS_BYTES), strict=True))
    count = bounds[of] + more
    every = [torch.arange(r, r + count * ranks).remainder(61).to(torch.uint8) for r in range(ranks)]
    mine, total = every[rank], sum(every[1:], every[0])
    x, share = mine[:count].clone(), torch.empty(count, dtype=torch.uint8)
    wholes = [torch.empty_like(mine) for _ in range(2)]
    works = [
        dist.all_reduce(x, async_op=True),
        dist.reduce_scatter_single(share, mine, async_op=True),
        dist.all_gather_single(wholes[0], mine[:count], async_op=True),
        dist.all_to_all_single(wholes[1], mine, async_op=True),
    ]
    root = torch.empty_like(mine) if rank else mine
    dist.broadcast(root, 0)
    for work in works[::-1]:
        work.wait()
    assert torch.equal(x, total[:count]) and torch.equal(share, total.chunk(ranks)[rank])
    assert torch.equal(wholes[0], torch.cat([each[:count] for each in every]))
    assert torch.equal(wholes[1], torch.cat([each.chunk(ranks)[rank] for each in every]))
    assert torch.equal(root, every[0])


def test_a_group_goes_on_after_calls_that_were_late(hasty: Any) -> None:
    """Others find what was told, of as many calls as have a place; later calls have theirs."""
    calls = [lambda: dist.all_reduce(torch.ones(3), group=hasty) for _ in range(SLOTS + 2)]
    here = dist.get_rank() == 0
    if not here:
        dist.barrier()
    for number, call in enumerate(calls):
        if here or number >= SLOTS:
            with pytest.raises(RuntimeError, match=r"timeout after 1.0 s of waiting for rank"):
                call()
        else:
            call()
    if here:
        dist.barrier()
    dist.barrier()
    dist.all_reduce(x := torch.ones(3), group=hasty)
    assert (x == dist.get_world_size()).all()

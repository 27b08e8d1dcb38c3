"""Buckets of gradients, and their reduction in a thread while backward goes on."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_checkpoint import Stop
from training import ROWS, model_bytes, mpirun, run_job, small_data, small_job

from cpdhpc.comm import Bucket, Loopback, NonFiniteGradient, World
from cpdhpc.compress import LowBit, Mean, NoCompression
from cpdhpc.config import ConfigError, UserError
from cpdhpc.train import GradientReducer
from cpdhpc.train.job import Job
from cpdhpc.train.loop import run
from cpdhpc.train.parts import split_bucket
from cpdhpc.train.progress import Display
from cpdhpc.train.reducer import part_seed
from cpdhpc.train.setup import Files, Training, prepare
from cpdhpc.train.signals import Caught, Interrupted

SIZES_MIB = (25.0, 0.005, 1e-6)  # all layers in one bucket, some, and one in each
AGGREGATORS = {
    name: {k: v for k, v in row.items() if k != "aggregator"} for name, row in ROWS.items()
}


@dataclass(frozen=True)
class Noted(NoCompression):
    """Notes which layers it is given, in which thread; fails at a layer if told to."""

    fails_at: str = ""

    def aggregate(self, world: Any, flats: Any, bucket: Bucket, state: Any, **how: Any) -> Mean:
        state.setdefault("calls", []).append(bucket.names)
        state.setdefault("threads", set()).add(threading.current_thread().name.split("_")[0])
        if self.fails_at in bucket.names:
            raise OSError(f"at {self.fails_at}")
        return super().aggregate(world, flats, bucket, state, **how)


def model_of(seed: int = 0) -> torch.nn.Sequential:
    """1,507 parameters in eight tensors."""
    torch.manual_seed(seed)
    sizes = (8, 16, 64, 4, 3)
    return torch.nn.Sequential(*map(torch.nn.Linear, sizes, sizes[1:]))


def backward(model: torch.nn.Module, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(step)
    model.zero_grad()
    model(torch.randn(5, 8, generator=generator)).square().sum().backward()


def gradients(model: torch.nn.Module) -> list[bytes]:
    return [b"" if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]


def layout(bucket_mib: float, align: int = 1) -> list[tuple[str, ...]]:
    whole = Bucket(("a", "b", "c", "d"), ((2, 3), (100,), (), (50,)), align)
    parts = split_bucket(whole, bucket_mib)
    flat = np.arange(whole.size, dtype=np.float32)
    for part in parts:
        views = part.bucket.views(flat[part.start : part.stop])
        for view, expected in zip(views, whole.views(flat)[part.layers.start :], strict=False):
            assert np.array_equal(view, expected)
    return [part.bucket.names for part in parts]


@pytest.mark.parametrize("align", [1, 1024])
def test_buckets_hold_the_last_layers_first(align: int) -> None:
    kib4 = 4 / 2**20  # of one value
    assert layout(25.0, align) == [("a", "b", "c", "d")]
    assert layout(151 * kib4, align) == [("b", "c", "d"), ("a",)]
    assert layout(150 * kib4, align) == [("c", "d"), ("a", "b")]
    assert layout(6 * kib4, align) == [("d",), ("c",), ("b",), ("a",)]
    assert layout(1e-9, align) == [("d",), ("c",), ("b",), ("a",)]


@pytest.mark.parametrize("bucket_mib", [0.0, -1.0, math.nan])
def test_buckets_have_a_size(bucket_mib: float) -> None:
    with pytest.raises(ValueError, match=r"bucket_mib=.*: should be above 0"):
        GradientReducer(model_of(), Loopback(), bucket_mib=bucket_mib)


@pytest.mark.parametrize("row", AGGREGATORS)
@pytest.mark.parametrize("bucket_mib", SIZES_MIB)
def test_overlap_changes_no_bit(row: str, bucket_mib: float) -> None:
    found = []
    for overlap in (False, True):
        model = model_of()
        reducer = GradientReducer(
            model,
            Loopback(),
            ROWS[row]["aggregator"],
            seed=3,
            bucket_mib=bucket_mib,
            overlap=overlap,
            **AGGREGATORS[row],
        )
        with reducer:
            means = []
            for step in range(2):
                backward(model, step)
                means.append(reducer.reduce())
        shifts = [None if mean.shifts is None else mean.shifts.tolist() for mean in means]
        found.append((gradients(model), [mean.flat.tobytes() for mean in means], shifts))
    assert len(reducer.parts) == {25.0: 1, 0.005: 2, 1e-6: 8}[bucket_mib]
    assert found[0] == found[1]


def test_buckets_change_no_bit_where_nothing_depends_on_them() -> None:
    """One rank, rounding to nearest: a value's code depends on its tile alone."""
    found = []
    for bucket_mib in SIZES_MIB:
        model = model_of()
        backward(model)
        mean = GradientReducer(
            model, Loopback(), LowBit(wire="e4m3", scaling="aps"), bucket_mib=bucket_mib
        ).reduce()
        assert mean.shifts is not None
        found.append((gradients(model), mean.flat.tobytes(), mean.shifts.tolist()))
    assert found[0] == found[1] == found[2]


def test_random_bits_differ_between_buckets() -> None:
    """Two equal layers are rounded alike if and only if they are given the same stream."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    reducer = GradientReducer(
        model, Loopback(), "lowbit", wire="e3m0", rounding="stochastic", bucket_mib=1e-6
    )
    values = torch.linspace(0.1, 1, 64 * 64).reshape(64, 64)
    for parameter in model.parameters():
        parameter.grad = values.clone()
    reducer.reduce()
    first, second = gradients(model)
    assert first != second
    assert part_seed(5, 0) == 5  # one bucket: the bits of a model without buckets
    assert len({part_seed(5, index) for index in range(100)}) == 100


def test_buckets_are_reduced_in_order_in_one_thread_whatever_comes_first() -> None:
    model = model_of()
    reducer = GradientReducer(model, Loopback(), Noted(), bucket_mib=1e-6, overlap=True)
    names = [name for name, _ in model.named_parameters()]
    backward(model)
    reducer.reduce()
    assert reducer.state["calls"] == [(name,) for name in reversed(names)]
    assert reducer.state["threads"] == {"cpdhpc-reduce"}
    for layer in (model[3], model[0], model[2]):  # model[1] gets no gradient
        layer.zero_grad()
        layer(torch.ones(1, layer.in_features)).sum().backward()
    model[1].zero_grad()
    reducer.reduce()
    assert reducer.state["calls"] == 2 * [(name,) for name in reversed(names)]
    assert not torch.any(model[1].weight.grad)  # counts as zero
    assert torch.equal(model[2].weight.grad, torch.ones(4, 64))
    assert active() == 1
    reducer.close()
    assert active() == 0


def active() -> int:
    """Number of threads that reduce."""
    return sum(thread.name.startswith("cpdhpc-reduce") for thread in threading.enumerate())


def test_the_first_bucket_is_reduced_while_backward_goes_on() -> None:
    model, begun = model_of(), threading.Event()

    @dataclass(frozen=True)
    class Begins(Noted):
        def aggregate(self, *args: Any, **how: Any) -> Mean:
            begun.set()
            return super().aggregate(*args, **how)

    seen = []
    # This hook is called first: it waits, within backward, for the thread to have begun.
    model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(begun.wait(10)))
    with GradientReducer(model, Loopback(), Begins(), bucket_mib=0.001, overlap=True) as reducer:
        backward(model)
        reducer.reduce()
    assert seen == [True]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layer", ["3.weight", "1.bias", "0.weight"])
def test_an_error_in_a_bucket_is_raised_and_the_next_step_goes_well(
    layer: str, overlap: bool
) -> None:
    model = model_of()
    reducer = GradientReducer(
        model, Loopback(), Noted(fails_at=layer), bucket_mib=1e-6, overlap=overlap
    )
    with reducer:
        for _ in range(2):
            reducer.state.clear()
            backward(model)
            before = gradients(model)
            with pytest.raises(OSError, match=f"at {layer}"):
                reducer.reduce()
            assert gradients(model) == before
            assert reducer.state["calls"][-1] == (layer,)  # none after it, on any rank
        reducer.aggregator = Noted()
        reducer.reduce()
        assert gradients(model) == before  # the mean over one rank


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_in_the_second_bucket(overlap: bool) -> None:
    model = model_of()
    reducer = GradientReducer(model, Loopback(), bucket_mib=1e-6, overlap=overlap)
    model[3].weight.register_hook(lambda gradient: gradient * math.nan)
    with reducer:
        backward(model)
        before = gradients(model)
        with pytest.raises(NonFiniteGradient, match=r"'3\.weight' on rank 0"):
            reducer.reduce()
    assert gradients(model) == before


def test_the_end_of_the_job_within_the_thread_is_not_lost() -> None:
    """World ends the job by SystemExit where MPI_Abort returns."""

    @dataclass(frozen=True)
    class Aborts(NoCompression):
        def aggregate(self, world: Any, *args: Any, **how: Any) -> Mean:
            world.abort("too late")

    model = model_of()
    with GradientReducer(model, Loopback(), Aborts(), overlap=True) as reducer:
        backward(model)
        with pytest.raises(SystemExit):
            reducer.reduce()


def test_a_second_backward_before_reduce_is_refused() -> None:
    model = model_of()
    with GradientReducer(model, Loopback(), overlap=True) as reducer:
        backward(model)
        with pytest.raises(RuntimeError, match=r"'3\.(weight|bias)' has a second gradient"):
            backward(model)
        reducer.reduce()
        backward(model)


def test_gradients_that_were_set_by_hand_are_reduced_too() -> None:
    model = model_of()
    with GradientReducer(model, Loopback(), overlap=True) as reducer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        reducer.reduce()
        assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)


def test_a_closed_reducer_lets_go_of_the_model() -> None:
    model = model_of()
    reducer = GradientReducer(model, Loopback(), overlap=True)
    reducer.close()
    reducer.close()
    backward(model)
    backward(model)
    assert active() == 0
    with pytest.raises(RuntimeError, match="reducer is closed"):
        reducer.reduce()


def test_an_error_leaves_the_block_at_once_while_a_bucket_is_under_way() -> None:
    model, go_on = model_of(), threading.Event()

    @dataclass(frozen=True)
    class Waits(NoCompression):
        def aggregate(self, *args: Any, **how: Any) -> Mean:
            assert go_on.wait(10)
            return super().aggregate(*args, **how)

    reducer = GradientReducer(model, Loopback(), Waits(), bucket_mib=1e-6, overlap=True)
    with pytest.raises(KeyError, match="of the user"), reducer:
        backward(model)
        raise KeyError("of the user")
    go_on.set()


def test_overlap_needs_one_rank_a_process_and_a_thread_level() -> None:
    with pytest.raises(UserError, match="virtual_ranks=2: should be 1"):
        GradientReducer(model_of(), Loopback(2), overlap=True)
    world = World()
    assert world.thread_level in ("serialized", "multiple")
    GradientReducer(model_of(), world, overlap=True).close()
    for level in ("single", "funneled"):
        world.thread_level = level
        GradientReducer(model_of(), world).close()
        with pytest.raises(UserError, match=f"level '{level}'.*mpi4py.rc.thread_level"):
            GradientReducer(model_of(), world, overlap=True)
    world.free()


def test_the_world_belongs_to_the_thread_until_reduce() -> None:
    model, world = model_of(), World()
    with GradientReducer(model, world, overlap=True) as reducer:
        backward(model)
        for call in (world.barrier, lambda: world.gather(0), lambda: world.max(np.zeros(1))):
            with pytest.raises(RuntimeError, match=r"another thread: call reduce\(\) first"):
                call()
        reducer.reduce()
        assert world.gather(5) == [5]
    world.free()


@pytest.mark.parametrize("row", ROWS)
def test_jobs_train_to_the_same_bits(tmp_path: Path, row: str) -> None:
    found = []
    for overlap in (False, True):
        directory = tmp_path / str(overlap)
        directory.mkdir()
        train = {"bucket_mib": 0.001, "overlap": overlap}
        done = run_job(small_job(gradient=ROWS[row], train=train), Loopback(), directory)
        layers = done.record.arrays()["layers"]
        found.append(
            (model_bytes(done.files.checkpoint), [array.tobytes() for array in layers.values()])
        )
    assert len(done.reducer.parts) > 1
    assert done.record.layers == [name for name, _ in done.model.named_parameters()]
    assert found[0] == found[1]
    assert active() == 0


def test_interrupted_and_resumed_is_undisturbed_with_and_without_overlap(tmp_path: Path) -> None:
    """Stopped in the middle of an epoch with overlap, and ended without it, which is allowed."""
    found = []
    for after in (None, 3):
        directory = tmp_path / str(after)
        directory.mkdir()
        job = small_job(gradient=ROWS["stochastic"], train={"bucket_mib": 0.001, "overlap": True})
        if after:
            training, caught = prepared(job, directory), Caught()
            with pytest.raises(Interrupted):
                run(training, caught, Stop(caught, after))
            job = small_job(gradient=ROWS["stochastic"], train={"bucket_mib": 0.001})
        training = prepared(job, directory)
        training.resume()
        assert training.iteration == (4 if after else 0)
        run(training, Caught(), Display(False, 1))
        found.append(model_bytes(training.files.checkpoint))
    assert found[0] == found[1]


def prepared(job: Job, directory: Path) -> Training:
    return prepare(job, Loopback(), small_data(), Files.of(directory, job))


LOOP = """
import time, torch, cpdhpc
world = cpdhpc.World(timeout_s=0.8)
model = torch.nn.Linear(64, 10)
reducer = cpdhpc.train.GradientReducer(model, world, "lowbit", bucket_mib=0.001, overlap=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    time.sleep(40 if step == 2 and world.rank == 1 else 0)
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    reducer.reduce()
    optimizer.step()
    print("step", step, flush=True)
"""


def test_a_plain_loop_goes_on_until_a_rank_does_not_come() -> None:
    done = mpirun(2, "-m", "mpi4py", "-c", LOOP)
    assert done.returncode != 0
    assert [done.stdout.count(f"step {step}") for step in range(3)] == [2, 2, 0], done.stderr
    assert re.search(r"rank 0 \| allreduce ring: arguments: waited .* s for rank 1\n", done.stderr)


def test_a_job_says_that_overlap_needs_one_rank() -> None:
    with pytest.raises(ConfigError, match="train: overlap=true needs virtual_ranks=1"):
        small_job(train={"overlap": True, "virtual_ranks": 2})

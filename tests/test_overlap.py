"""Gradients are reduced in a thread while backward goes on, to the same bits."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from reducing import AGGREGATORS, SIZES_MIB, Noted, active, backward, gradients, model_of
from training import ROWS, Stop, model_bytes, run_job, small_data, small_job

from cpdhpc.compress.base import Mean
from cpdhpc.lab.signals import Caught, Interrupted
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.setup import prepare
from cpdhpc.lab.train.training import Training
from cpdhpc.ops.common import SLICE_NS, take_short_slices
from cpdhpc.torch.overlap import PAUSE_S, reducing_thread
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ending import Timeout
from cpdhpc.world.ranks import Loopback


@every("row", AGGREGATORS)
@every("bucket_mib", SIZES_MIB)
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
        shifts = [{k: v.tolist() for k, v in mean.layers.items()} for mean in means]
        found.append((gradients(model), [mean.flat.tobytes() for mean in means], shifts))
    assert len(reducer.parts) == {25.0: 1, 0.005: 2, 1e-6: 8}[bucket_mib]
    assert found[0] == found[1]


def test_buckets_are_reduced_in_order_in_one_thread_whatever_comes_first() -> None:
    model = model_of()
    noted = Noted()
    reducer = GradientReducer(model, Loopback(), noted, bucket_mib=1e-6, overlap=True)
    names = [name for name, _ in model.named_parameters()]
    backward(model)
    reducer.reduce()
    assert noted.calls == [(name,) for name in reversed(names)]
    assert noted.threads == {"cpdhpc-reduce"}
    for layer in (model[3], model[0], model[2]):  # model[1] gets no gradient
        layer.zero_grad()
        layer(torch.ones(1, layer.in_features)).sum().backward()
    model[1].zero_grad()
    reducer.reduce()
    assert noted.calls == 2 * [(name,) for name in reversed(names)]
    assert model[1].weight.grad is None  # as on all other ranks
    assert torch.equal(model[2].weight.grad, torch.ones(4, 64))
    assert active() == 1
    reducer.close()
    assert active() == 0


def test_the_first_bucket_is_reduced_while_backward_goes_on() -> None:
    model, begun = model_of(), threading.Event()

    @dataclass(frozen=True)
    class Begins(Noted):
        def aggregate(self, *args: Any, **how: Any) -> Mean:
            begun.set()
            return super().aggregate(*args, **how)

    seen = []
    # This hook is called first: it waits, within backward, for the thread to have begun.
    model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(begun.wait(1800)))
    with GradientReducer(model, Loopback(), Begins(), bucket_mib=0.001, overlap=True) as reducer:
        backward(model)
        reducer.reduce()
    assert seen == [True]


@pytest.mark.parametrize("nodes", [(0,), (0, 1)])  # of others than this rank in the second case
def test_the_thread_sleeps_between_looks_while_backward_computes_and_not_afterwards(
    nodes: tuple[int, ...],
) -> None:
    model, world, begun, found = model_of(), Loopback(), threading.Event(), []
    world.nodes = nodes
    expected_s = PAUSE_S if len(nodes) > 1 else 0.0

    @dataclass(frozen=True)
    class Asks(Noted):
        def aggregate(self, gradients: Any, bucket: Any, context: Any) -> Mean:
            if not begun.is_set():
                found.append(context.world.pause_s)
            begun.set()
            return Mean(gradients[0].copy())

    model[0].weight.register_post_accumulate_grad_hook(lambda _: found.append(begun.wait(1800)))
    with GradientReducer(model, world, Asks(), bucket_mib=0.001, overlap=True) as reducer:
        backward(model)
        found.append(world.pause_s)
        reducer.reduce()
    assert found == [expected_s, True, expected_s] and world.pause_s == 0


def test_the_thread_has_short_time_slices_where_linux_gives_them() -> None:
    """/proc tells what the scheduler has; this thread keeps its own."""

    def slice_ns() -> list[int]:
        lines = Path("/proc/thread-self/sched").read_text().splitlines()
        return [int(line.split()[-1]) for line in lines if line.startswith("se.slice")]

    def short() -> tuple[bool, list[int]]:
        return take_short_slices(), slice_ns()

    try:
        before = slice_ns()
    except OSError:
        pytest.skip("no /proc/thread-self/sched")
    with ThreadPoolExecutor(1) as other:
        taken, after = other.submit(short).result()
    if not (taken and before):
        pytest.skip("Linux before 6.12 has no slices of threads")
    assert after == [SLICE_NS] and slice_ns() == before
    for nodes, expected in (((0,), before), ((0, 1), [SLICE_NS])):
        world = Loopback()
        world.nodes = nodes
        with reducing_thread(world) as thread:
            assert thread.submit(slice_ns).result() == expected


def test_a_wait_looks_no_more_often_than_its_pauses_allow() -> None:
    class Silent:
        """Stands for MPI, and for a communicator with no message."""

        ANY_SOURCE = 0

        def Iprobe(self, *_: object) -> bool:
            return False

    looks = list[float]()

    def done() -> bool:
        looks.append(time.monotonic())
        return len(looks) == 20

    pauses_s = [0.005]
    timeout = Timeout(Silent(), Silent(), 1, 1800.0, pytest.fail, lambda: None, lambda: pauses_s[0])
    timeout.wait(done, lambda waited_s, absent: [])
    gaps_s = np.diff(looks)
    assert gaps_s[1:].min() >= 0.005  # the first two looks come one after the other
    looks.clear()
    pauses_s[0] = 0.0
    timeout.wait(done, lambda waited_s, absent: [])
    assert np.diff(looks).min() < 0.005


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

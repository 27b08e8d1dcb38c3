"""Overlap on real ranks: the same bits, the same errors on all, one order of collectives."""

import time
from argparse import ArgumentParser
from typing import Any

import numpy as np
import pytest
import torch
from reducing import gradients
from verdicts import together

from cpdhpc.collectives import recorded
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Segment, configured
from cpdhpc.compress.base import Aggregator, Mean
from cpdhpc.compress.lowbit import LowBit
from cpdhpc.compress.none import NoCompression
from cpdhpc.config import UserError
from cpdhpc.lab.bench import overlap as bench_overlap
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.mpi import World

AGGREGATORS: dict[str, Aggregator] = {
    "float32": NoCompression(),
    "mpi": NoCompression(algorithm="mpi"),
    "tile": LowBit(wire="e4m3"),
    "aps": LowBit(wire="e5m2", scaling="aps", algorithm="direct"),
    "stochastic": LowBit(wire="e3m0", rounding="stochastic", algorithm="tree"),
    "nvfp4": LowBit(wire="nvfp4"),
}


class Fails(NoCompression):
    """Fails on all ranks at the layer "1.bias"."""

    def aggregate(self, gradients: Any, bucket: Any, context: Any) -> Mean:
        mean = super().aggregate(gradients, bucket, context)
        if "1.bias" in bucket.names:
            raise OSError("at 1.bias")
        return mean


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    sizes = (8, 64, 48, 4)
    return torch.nn.Sequential(*map(torch.nn.Linear, sizes, sizes[1:]))


def backward(model: torch.nn.Module, seed: int, skip: bool = False) -> None:
    """skip: go around the middle layer, which then gets no gradient."""
    model.zero_grad()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    y = model[2](model[0](x)[:, :48]) if skip else model(x)
    y.square().sum().backward()


@pytest.mark.two_ranks
@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("bucket_mib", [25.0, 0.014, 1e-6])
def test_overlap_changes_no_bit(world: World, name: str, bucket_mib: float) -> None:
    """In the second step, the last rank has no gradient of the middle layer."""
    found = []
    last = world.process == world.processes - 1
    for overlap in (False, True):
        model, steps = model_of(), []
        how: dict[str, Any] = {"bucket_mib": bucket_mib, "overlap": overlap}
        with GradientReducer(model, world, AGGREGATORS[name], seed=1, **how) as reducer:
            for step in range(3):
                backward(model, 10 * step + world.process, skip=last and step == 1)
                reducer.reduce()
                steps.append(gradients(model))
        found.append(steps)
    parts = {25.0: 1, 0.014: 2, 1e-6: 6}[bucket_mib]
    alike = world.gather(found[0]) == [found[0]] * world.processes
    together(world, found[0] == found[1], alike, len(reducer.parts) == parts)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_nan_on_one_rank_in_the_second_bucket(world: World, name: str) -> None:
    model, last = model_of(), world.processes - 1
    raised = []
    with GradientReducer(model, world, AGGREGATORS[name], bucket_mib=1e-6, overlap=True) as reducer:
        for step in range(3):
            backward_with_nan(model, step, nan=world.process == last and step < 2)
            before = gradients(model)
            try:
                reducer.reduce()
            except NonFiniteGradient as error:
                raised.append((error.segments, error.ranks, gradients(model) == before))
    finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    together(world, raised == 2 * [(("2.weight",), (last,), True)], finite)


def backward_with_nan(model: torch.nn.Module, seed: int, nan: bool) -> None:
    """As backward, with a NaN in the gradient of the second tensor from the end."""
    hook = model[2].weight.register_hook(lambda g: g * torch.nan if nan else g)
    backward(model, seed)
    hook.remove()


def test_an_aggregator_that_raises_does_so_on_all(world: World) -> None:
    model, said = model_of(), []
    with GradientReducer(model, world, Fails(), bucket_mib=1e-6, overlap=True) as reducer:
        for step in range(3):
            reducer.aggregator = Fails() if step < 2 else NoCompression()
            backward(model, step)
            try:
                reducer.reduce()
            except OSError as error:
                said.append(str(error))
        alike = world.gather(gradients(model))
    together(world, said == 2 * ["at 1.bias"], alike == [alike[0]] * world.processes)


def test_a_thread_level_too_low_on_one_rank_is_an_error_on_all(world: World) -> None:
    level, last = world.thread_level, world.process == world.processes - 1
    try:
        world.thread_level = "funneled" if last else level
        said = ""
        GradientReducer(model_of(), world, overlap=True)
    except UserError as error:
        said = str(error)
    finally:
        world.thread_level = level
    together(world, "thread level 'funneled'" in said)


def test_the_world_belongs_to_the_thread_until_reduce(world: World) -> None:
    model, said = model_of(), ""
    with GradientReducer(model, world, overlap=True) as reducer:
        backward(model, 0)
        try:
            world.max(np.zeros(1, np.int64))
        except RuntimeError as error:
            said = str(error)
        reducer.reduce()
    together(world, "call reduce() first" in said)


def test_a_list_that_waits_looks_no_more_often_than_the_pauses_allow(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank is late: the others sleep, and look once after each pause."""
    pause_s, looks = 0.01, []
    resume = recorded._cpu.resume_list

    def counted(*given: Any) -> int:
        looks.append(given[1])
        return resume(*given)

    method, x = configured(Allreduce, wire="raw", algorithm="ring"), np.ones(5000, np.float32)
    results = [method.run(world, [x]).arrays[0] for _ in range(2)]  # the second one records
    monkeypatch.setattr(recorded._cpu, "resume_list", counted)
    world.pause_s, late = pause_s, world.process == world.processes - 1 > 0
    world.barrier()
    begun_s = time.monotonic()
    if late:
        time.sleep(0.3)
    results += method.reduce(world, [x], None, (Segment("x", 0, x.size),), 0).arrays
    took_s, world.pause_s = time.monotonic() - begun_s, 0.0
    few = len(looks) <= 2 + took_s / pause_s  # one at once, then each behind a pause
    waited = late or world.processes == 1 or len(looks) > 0
    exact = all(np.array_equal(each, world.processes * x) for each in results)
    together(world, few, waited, set(looks) <= {0}, exact)


JOB = """
model = { name = "mlp", hidden = [24] }
train = { batch = 24, bucket_mib = 0.001 }
gradient = { aggregator = "lowbit", wire = "e4m3" }
"""


def test_the_benchmark_compares_weights_on_all_ranks(world, tmp_path, monkeypatch, capsys):
    """And a weight that differs on the last rank alone is an error on all."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    parser = ArgumentParser()
    bench_overlap.add_arguments(parser)
    arguments = parser.parse_args([str(path), "--repeats", "2"])
    arguments.timeout = None
    bench_overlap.run(arguments, world)
    out = world.gather(capsys.readouterr().out)
    lines = [line for line in out[0].splitlines() if line[0] != "#"]
    together(world, len(lines) == 1 and lines[0].startswith("  job "), not any(out[1:]))

    def step(training):
        right(training)
        if training.job.train.overlap and world.rank == world.ranks - 1:
            next(training.model.parameters()).data[0, 0] += 1e-6

    right = bench_overlap._step
    monkeypatch.setattr(bench_overlap, "_step", step)
    with pytest.raises(ArithmeticError, match="job-s0: weights differ over ranks, with it"):
        bench_overlap.run(arguments, world)

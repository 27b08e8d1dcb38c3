"""Training steps with and without overlap of reduction and backward, and the cost of each alone.

The rows of a job file are measured in their order. Each step takes the same batch, as `cpdhpc
train` would; nothing is written. "compute" is forward, backward and the optimizer without any
message, "reduce" the mean of gradients that are ready. "in turn" is a step without overlap,
"overlapped" one with it. No step is shorter than the longer of compute and reduce, and none with
overlap shorter than the bound, as the first bucket waits for the backward of the last layers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...collectives.checks import NonFiniteGradient
from ...config import UserError
from ...methods import suggest
from ...ops import set_kernel_threads
from ...ops.tensors import await_device, values_of
from ...world.mpi import World
from ...world.ranks import Ranks
from ..kinds import flags, printing, timing
from ..settings import add_settings, options, settings_of
from ..signals import Caught
from ..train.checkpoint import Files
from ..train.command import Trainer, check_jobs
from ..train.job import Job, load
from ..train.samples import Dataset, StreamedData, shard, taken
from ..train.setup import own_threads, prepare
from ..train.step import backward
from ..train.training import Training
from .throughput import LATE

COMPUTE, REDUCE, IN_TURN, OVERLAPPED = CASES = "compute", "reduce", "in turn", "overlapped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add = options(parser)
    add("file FILE.toml", "a job of train", Path)
    add_settings(
        parser, "replace a value of the file, for example train.batch=120; may be repeated"
    )
    add("--rows NAME,...", "rows of the file (default: all)", flags.names(str))
    flags.add_repeats(parser, 10, 2, "steps")


def run(arguments: argparse.Namespace, world: World) -> None:
    """Measure each row, and print its line. Collective. Raises UserError on all processes."""
    jobs = world.agreed(lambda: _jobs(arguments))
    check_jobs(world, jobs, "bench overlap: jobs")
    trainer = Trainer(world, Caught(), quiet=True)
    machine = printing.machine_line(world)
    forms = {"row": f"<{max(len(job.name) for job in jobs)}"} | FORMS
    for number, job in enumerate(jobs):
        data, ranks = trainer.data_of(job), trainer.world_of(job)
        with _both(job, ranks, data) as (plain, overlapped):
            try:
                _check(ranks, plain, overlapped)
                times = _timed(ranks, plain, overlapped, arguments)
            except NonFiniteGradient as error:  # on all processes
                raise UserError(f"{job.id}: {error}") from None
            lines = printing.table(forms, [_row(job.name, times)])
            above = printing.comments([machine, *_above(plain)])
            printing.say(world, lines[-1:] if number else [*above, *lines])


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    """Return the first run of each row of --rows. Raises UserError."""
    rows: dict[str, Job] = {}
    for job in load(arguments.file, settings_of(arguments)):
        rows.setdefault(job.name, job)
    names = list(rows) if arguments.rows is None else arguments.rows
    if not names:
        raise UserError("--rows ,: names no row")
    for name in names:
        if name not in rows:
            raise UserError(f"--rows {name}: {suggest(name, rows)}")
        check_plain(rows[name], "to be overlapped")
    return [rows[name] for name in names]


def check_plain(job: Job, why: str) -> None:
    """Raise UserError unless each process averages the gradient of a whole model in each step."""
    train, rule = job.train, job.update
    needed = {  # key -> its value, the only value that is allowed
        "train.virtual_ranks": (train.virtual_ranks, 1),
        "train.image_grid": (train.image_grid, (1, 1)),
        "stages.count": (job.stages.count, 1),
        "adversarial.epsilon": (job.adversarial.epsilon, 0),
        "update.name": (rule.name, "allreduce"),
    }
    for key, (value, must) in needed.items():
        if value != must:
            raise UserError(f"{job.id}: {key}={value!r}: must be {must!r}, {why}")


@contextmanager
def _both(job: Job, world: Ranks, data: Dataset | StreamedData) -> Iterator[list[Training]]:
    """Yield the run of a job without and with overlap, both at their beginning. Collective."""
    with ExitStack() as reducers:
        runs = []
        for overlap in (False, True):
            section = job.train.model_copy(update={"overlap": overlap})
            each = job.model_copy(update={"train": section})
            runs.append(prepare(each, world, data, Files.of(Path(), each)))
            reducers.enter_context(runs[-1].reducer)
            runs[-1].reducer.epoch = LATE  # all warming up of a method is over
        yield runs


def _step(training: Training) -> None:
    training.train_on(_batch(training), 0)


def _batch(training: Training) -> np.ndarray:
    return np.arange(training.job.train.batch) % training.samples


def _check(world: Ranks, *trainings: Training) -> None:
    """Raise ArithmeticError on all ranks unless a step ends with identical bits. Collective.

    On GPUs only ranks are compared, as sums of torch's kernels may have another order in each call.
    """
    found = []
    for training in trainings:
        _step(training)
        whole = hashlib.sha256()
        for parameter in training.model.parameters():
            whole.update(values_of(parameter).tobytes())
        found.append(whole.digest())
    everyone = world.gather(found, "bench overlap")
    job, device = trainings[0].job.id, trainings[0].reducer.device
    for kind, each in zip(("without", "with"), zip(*everyone, strict=True), strict=True):
        if len({*each}) > 1:
            raise ArithmeticError(f"bench overlap: {job}: weights differ over ranks, {kind} it")
    if device.type == "cpu" and any(plain != overlapped for plain, overlapped in everyone):
        raise ArithmeticError(f"bench overlap: {job}: weights differ with overlap and without")


class Backward:
    """Forward, backward and optimizer alone, with the times at which gradients are ready.

    ready_s: a list for each call: times of buckets since its start, then that of backward's end
    """

    def __init__(self, training: Training) -> None:
        self._training, self.ready_s = training, list[list[float]]()
        share = shard(_batch(training), training.world.ranks, training.world.rank)
        self._samples = taken(training.train, share, 0, training.reducer.device)
        self._done: dict[int, float] | None = None
        parts = training.reducer.parts
        self._count = len(parts)
        for index, layer in ((i, layer) for i, part in enumerate(parts) for layer in part.layers):
            parameter = training.reducer.parameters[layer]
            hook = partial(self._record, index)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _record(self, index: int, _: object) -> None:
        if self._done is not None:
            await_device(self._training.reducer.device)
            self._done[index] = time.perf_counter()

    def run(self) -> None:
        """Compute a step without any message."""
        ready: dict[int, float] = {}
        self._done = ready
        training, start = self._training, time.perf_counter()
        backward(training.model, training.optimizer, *self._samples, training.loss)
        await_device(training.reducer.device)
        end, self._done = time.perf_counter(), None
        done = [ready.get(i, end) - start for i in range(self._count)]
        self.ready_s.append([*done, end - start])
        training.optimizer.step()


def bound_s(
    ready_s: Sequence[float], shares: Sequence[float], compute_s: float, reduce_s: float
) -> float:
    """Return the least time of an overlapped step if the reduction does not slow down computing.

    Buckets are reduced one after the other once their gradients are ready; then the optimizer runs.
    ready_s: times of buckets, then of backward's end; shares: of buckets in all bytes
    """
    at = 0.0
    for ready, share in zip(ready_s, shares, strict=False):
        at = max(at, ready) + share * reduce_s
    return max(at, ready_s[-1]) + compute_s - ready_s[-1]


@dataclass(frozen=True)
class StepTimes:
    """times_s: of the slowest process, float64[repeats], by case; bound_s: see bound_s."""

    times_s: Mapping[str, timing.Times]
    bound_s: float


def _timed(
    world: Ranks, plain: Training, overlapped: Training, arguments: argparse.Namespace
) -> StepTimes:
    """Return the times of the cases, measured in turns. Collective."""
    threads = own_threads(world, plain.job.train.threads)
    alone = Backward(plain)
    cases: dict[str, Callable[[], object]] = {
        COMPUTE: alone.run,
        REDUCE: plain.reducer.reduce,
        IN_TURN: partial(_step, plain),
        OVERLAPPED: partial(_step, overlapped),
    }
    device = plain.reducer.device
    cases = {name: partial(until_done, device, case) for name, case in cases.items()}

    def before(name: str) -> None:
        set_kernel_threads(1 if name == OVERLAPPED else threads)

    repeats, warmup = arguments.repeats, arguments.warmup
    times_s = timing.slowest(world, cases, repeats, warmup, before)
    ready = np.array(world.gather(alone.ready_s, "bench overlap"))[:, warmup:]
    ready_s = np.median(ready.max(axis=0), axis=0).tolist()
    sizes = [part.stop - part.start for part in plain.reducer.parts]
    shares = [size / sum(sizes) for size in sizes]
    medians = (float(np.median(times_s[name])) for name in (COMPUTE, REDUCE))
    return StepTimes(times_s, bound_s(ready_s, shares, *medians))


def until_done(device: Any, case: Callable[[], object]) -> None:
    """Call the case, and wait until its device is done."""
    case()
    await_device(device)


FORMS = {
    **dict.fromkeys(CASES, "10.1f"),
    **{"fastest": "8.1f", "slowest": "8.1f", "bound": "7.1f", "gain": "5.2f"},
    **{"/ bound": "8.2f", "/ longer": "9.2f"},
}


def _above(training: Training) -> list[str]:
    """Return the comments above the table."""
    job, parameters = training.job, sum(p.numel() for p in training.reducer.parameters)
    cores, on_gpu = len(os.sched_getaffinity(0)), job.train.device == "gpu"
    return [
        f"{parameters:,} parameters in {len(training.reducer.parts)} buckets, batch "
        f"{job.train.batch}; a rank has {training.provenance['torch_threads']} thread(s) of torch "
        f"on {cores} core(s)",
        "ms, medians of the slowest rank, the cases in turns; weights checked: identical bits on "
        + ("all ranks" if on_gpu else "all ranks, with overlap and without"),
        "bound: buckets reduced one after the other once their gradients are ready, while "
        "computing continues at full speed",
        "in turn, overlapped: whole steps, samples included; fastest, slowest: overlapped",
        "gain: in turn / overlapped; / bound, / longer: overlapped over the bound, and over the "
        "longer of compute and reduce",
    ]


def _row(name: str, found: StepTimes) -> list[object]:
    """Return the cells of a row; fastest, slowest: of the overlapped steps."""
    ms = {case: timing.ms(each) for case, each in found.times_s.items()}
    medians = {case: each[0] for case, each in ms.items()}
    last, bound_ms = medians[OVERLAPPED], 1e3 * found.bound_s
    longer_ms = max(medians[COMPUTE], medians[REDUCE])
    ratios = medians[IN_TURN] / last, last / bound_ms, last / longer_ms
    return [name, *medians.values(), *ms[OVERLAPPED][1:], bound_ms, *ratios]

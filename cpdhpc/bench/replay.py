"""Recorded gradients averaged by a method, without training: bytes, errors, and where time goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from ..compress.base import Aggregator, Array, Context
from ..compress.bucket import Bucket
from ..compress.state import State
from ..train.gradients import Gradients
from ..world.ranks import Ranks
from .traffic import LATE

REST = "rest"
PHASES = ("select", "encode", "travel", "decode", REST)
PACKAGE = Path(__file__).parent.parent
TRAVELS = tuple(str(PACKAGE / place) for place in ("collectives", "world"))
CODES = tuple(str(PACKAGE / place) for place in ("compress", "ops"))
BEGINNINGS = {  # of the names of functions in CODES -> the phase that they and what they call are
    "select": ("select", "kth", "chosen", "largest", "positions"),
    "encode": ("encode", "pack", "codes"),
    "decode": ("decode", "unpack", "scatter"),
}


@dataclass(frozen=True)
class Replayed:
    """What a method did with the gradients of some iterations.

    sent_bytes: float64[ranks], messages of an iteration, the mean over iterations
    collective_bytes: what a process hands to MPI's own collectives, for all its ranks together
    time_s: of an iteration, the median over iterations of the slowest process
    shares: of the processor time, by phase
    error: ||mean - exact|| / ||exact||, and cosine between them: medians over iterations
    sum_error: that error of the sums over all iterations, where what waits has arrived or not
    nonzero_share: of the mean's values; sent_share: of a rank's, NaN where the method tells none
    """

    sent_bytes: Array
    collective_bytes: float
    time_s: float
    shares: dict[str, float]
    error: float
    cosine: float
    sum_error: float
    nonzero_share: float
    sent_share: float


def replay(world: Ranks, method: Aggregator, recorded: Sequence[Gradients]) -> Replayed:
    """Return what a method does with the gradients of the first world.ranks ranks. Collective.

    Nothing is kept from training: the memory is empty at first, and the epoch is late, so that no
    method warms up. The last gradients come once more, with the profile. Raises as the method does.
    """
    names = tuple(recorded[0].layers)
    shapes = tuple(values.shape[1:] for values in recorded[0].layers.values())
    bucket = Bucket(names, shapes, method.align)
    method.check_layers(names)
    rows = [
        [bucket.flatten([v[rank] for v in each.layers.values()]) for rank in range(world.ranks)]
        for each in recorded
    ]
    exact = [np.asarray(np.mean(each, axis=0, dtype=np.float64)) for each in rows]
    profile = Profile()
    state = State(world.hosted, world.ranks)
    times, sent, collective, means, told = [], [], [], [], []
    for number, each in enumerate([*rows, rows[-1]]):
        hosted = each[world.hosted.start : world.hosted.stop]
        scale = recorded[0].loss_scale
        context = Context(world, state, 0, LATE + number, float(LATE), scale)
        world.barrier("bench")
        before, start_s = world.bytes_sent.copy(), time.perf_counter()
        given = world.collective_bytes
        if number == len(rows):
            with profile.running():
                method.aggregate(hosted, bucket, context)
            break
        mean = method.aggregate(hosted, bucket, context)
        times.append(time.perf_counter() - start_s)
        sent.append(world.bytes_sent - before)
        collective.append(world.collective_bytes - given)
        means.append(mean.flat.astype(np.float64))
        told.append(mean.layers.get("sent_share"))
    everyone = world.gather((times, sent, profile.time_s, collective), "bench")
    total_s = {phase: sum(each[2][phase] for each in everyone) for phase in PHASES}
    spent_s = sum(total_s.values())
    sizes = [stop - start for _, start, stop in bucket.segments]
    return Replayed(
        np.concatenate([np.mean(each[1], axis=0) for each in everyone]),
        float(np.max([np.mean(each[3]) for each in everyone])),
        float(np.median(np.max([each[0] for each in everyone], axis=0))),
        {phase: each_s / spent_s for phase, each_s in total_s.items()},
        float(np.median([_error(a, b) for a, b in zip(means, exact, strict=True)])),
        float(np.median([_cosine(a, b) for a, b in zip(means, exact, strict=True)])),
        _error(np.sum(means, axis=0), np.sum(exact, axis=0)),
        float(np.mean([np.count_nonzero(mean) / sum(sizes) for mean in means])),
        float(np.mean([np.nan if x is None else np.average(x, weights=sizes) for x in told])),
    )


def _error(found: Array, exact: Array) -> float:
    return _ratio(np.linalg.norm(found - exact), np.linalg.norm(exact))


def _cosine(found: Array, exact: Array) -> float:
    return _ratio(found @ exact, np.linalg.norm(found) * np.linalg.norm(exact))


def _ratio(a: Any, b: Any) -> float:
    return float(a / b) if b else float("nan")


class Profile:
    """The processor time of each phase in this thread, by the functions that are at work.

    A function belongs to the phase that its name begins with, see BEGINNINGS, or of messages where
    it is of TRAVELS; else to that of its caller. Calls of Python functions take longer by it.
    """

    def __init__(self) -> None:
        self.time_s = dict.fromkeys(PHASES, 0.0)
        self._known: dict[CodeType, str | None] = {}
        self._stack: list[str] = []
        self._since_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile the block."""
        self._stack, self._since_s = [REST], time.thread_time()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._lap()

    def _lap(self) -> None:
        now_s = time.thread_time()
        self.time_s[self._stack[-1]] += now_s - self._since_s
        self._since_s = now_s

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in self._known:
                self._known[code] = phase_of(code.co_filename, code.co_name)
            self._lap()
            self._stack.append(self._known[code] or self._stack[-1])
        elif event == "return" and len(self._stack) > 1:
            self._lap()
            self._stack.pop()


def phase_of(file: str, name: str) -> str | None:
    """Return the phase of a function; None for that of its caller."""
    if file.startswith(TRAVELS):
        return "travel"
    if not file.startswith(CODES):
        return None
    bare = name.lstrip("_")
    return next((phase for phase, begins in BEGINNINGS.items() if bare.startswith(begins)), None)


Make = Callable[[], Sequence[Gradients]]
TRAINED, RECORDED, SAMPLES = 20, 4, 8  # steps before, steps that are recorded, samples of a rank


def of_digits(ranks: int) -> list[Gradients]:
    """Return gradients of scikit-learn's digits, of a small LeNet after some steps.

    The first r of the ranks are those of a run on r ranks, but for the steps before.
    """
    from ..config import validate
    from ..train.data import epoch_order
    from ..train.job import Job
    from ..train.output import Files
    from ..train.setup import prepare
    from ..world.ranks import Loopback

    train = {"batch": SAMPLES * ranks, "threads": 1, "learning_rate": 0.05}
    raw = {"name": "digits", "model": {"name": "lenet"}, "train": train}
    job = validate(Job, raw, "bench compress")
    training = prepare(job, Loopback(ranks), job.data.load(), Files(Path(), Path()))
    found, batch = [], job.train.batch
    for number in range(TRAINED + RECORDED):
        order = epoch_order(training.samples, job.seed, number)
        training.train_on(np.resize(order, batch), 0)
        if number >= TRAINED:
            bucket, flats = training.reducer.bucket, training.reducer.flats
            rows = zip(*(bucket.views(flat) for flat in flats), strict=True)
            layers = {name: np.stack(row) for name, row in zip(bucket.names, rows, strict=True)}
            found.append(Gradients(number, ranks, layers, "digits, LeNet"))
    return found

"""What a method does to recorded gradients; its time, in collectives and by phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...collectives import sparse
from ...collectives.allreduce import Allreduce
from ...collectives.sparse import allgather, broadcast, neighbours
from ...compress.base import Aggregator, Array, Context, Mean
from ...compress.bucket import Bucket, State
from ...ops import to_host
from ...world.ranks import Ranks
from ..train.gradients import Gradients
from .harness import on_device, whole
from .traffic import LATE

Result = TypeVar("Result")
SETTLED = 2  # iterations after which all that is made once has been made
COLLECTIVES = (allgather, broadcast, neighbours, sparse.sum, Allreduce.run)
REST = "rest"
PHASES = ("select", "encode", "travel", "decode", REST)
PACKAGE = Path(__file__).parents[2]
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
    time_s: of an iteration, with a barrier before each collective
    travel_s, local_s: of it, in collectives, each from its barrier on, so that nobody waits for one
        who computes yet; processor time of all else. Medians over iterations of the slowest process
    shares: of the processor time, by phase
    error: ||mean - exact|| / ||exact||, and cosine between them: medians over iterations
    sum_error: that error of the sums over all iterations, where what waits has arrived or not
    nonzero_share: of the mean's values; sent_share: of a rank's, NaN where the method tells none
    """

    sent_bytes: Array
    collective_bytes: float
    time_s: float
    travel_s: float
    local_s: float
    shares: dict[str, float]
    error: float
    cosine: float
    sum_error: float
    nonzero_share: float
    sent_share: float


def replay(
    world: Ranks, method: Aggregator, recorded: Sequence[Gradients], device: str = "cpu"
) -> Replayed:
    """Return what a method does with the gradients of the first world.ranks ranks. Collective.

    Nothing is kept from training: the memory is empty at first, and the epoch is late, so that no
    method warms up. The first gradients are averaged before, with a memory of their own, so that no
    figure has what is set up once; the last ones come again, with the profile. Raises as the method
    does.
    device: where the gradients are; times are until the GPU is done, processor times are the host's
    """
    names = tuple(recorded[0].layers)
    shapes = tuple(values.shape[1:] for values in recorded[0].layers.values())
    bucket = Bucket(names, shapes, method.align)
    method.check_layers(names)
    rows = [
        [
            on_device(bucket.flatten([v[rank] for v in each.layers.values()]), device)
            for rank in world.hosted
        ]
        for each in recorded
    ]
    exact = [_exact(each, bucket, world.ranks) for each in recorded]
    scale, profile, clock = recorded[0].loss_scale, Profile(), Clock(world)

    def averages() -> Iterator[Callable[[], Mean]]:
        state = State(world.hosted, world.ranks)
        for number, hosted in enumerate([*rows, rows[-1]]):
            context = Context(world, state, 0, LATE + number, float(LATE), scale)
            yield whole(partial(method.aggregate, hosted, bucket, context), hosted[0])

    for average in islice(averages(), SETTLED):
        average()
    spent, sent, collective, means, told = [], [], [], [], []
    *calls, last = averages()
    with clock.watching():
        for average in calls:
            world.barrier("bench")
            before, given = world.bytes_sent.copy(), world.collective_bytes
            mean, took = clock.run(average)
            spent.append(took)
            sent.append(world.bytes_sent - before)
            collective.append(world.collective_bytes - given)
            means.append(to_host(mean.flat).astype(np.float64))
            told.append(mean.layers.get("sent_share"))
    with profile.running():
        last()
    everyone = world.gather((spent, sent, profile.time_s, collective), "bench")
    took_s = Spent(*np.median(np.max([each[0] for each in everyone], axis=0), axis=0).tolist())
    total_s = {phase: sum(each[2][phase] for each in everyone) for phase in PHASES}
    spent_s = sum(total_s.values())
    sizes = [stop - start for _, start, stop in bucket.segments]
    return Replayed(
        np.concatenate([np.mean(each[1], axis=0) for each in everyone]),
        float(np.max([np.mean(each[3]) for each in everyone])),
        *took_s,
        {phase: each_s / spent_s for phase, each_s in total_s.items()},
        float(np.median([_error(a, b) for a, b in zip(means, exact, strict=True)])),
        float(np.median([_cosine(a, b) for a, b in zip(means, exact, strict=True)])),
        _error(np.sum(means, axis=0), np.sum(exact, axis=0)),
        float(np.mean([np.count_nonzero(mean) / sum(sizes) for mean in means])),
        float(np.mean([np.nan if x is None else np.average(x, weights=sizes) for x in told])),
    )


def _exact(recorded: Gradients, bucket: Bucket, ranks: int) -> Array:
    """Return the mean of the gradients of the first ranks, float64[bucket.size]."""
    total = np.zeros(bucket.size)
    for rank in range(ranks):
        total += bucket.flatten([values[rank] for values in recorded.layers.values()])
    return total / ranks


def _error(found: Array, exact: Array) -> float:
    return _ratio(np.linalg.norm(found - exact), np.linalg.norm(exact))


def _cosine(found: Array, exact: Array) -> float:
    return _ratio(found @ exact, np.linalg.norm(found) * np.linalg.norm(exact))


def _ratio(a: Any, b: Any) -> float:
    return float(a / b) if b else float("nan")


class Spent(NamedTuple):
    """The time of a call on this process; what travel_s and local_s are part of."""

    time_s: float
    travel_s: float
    local_s: float


class Clock:
    """The time of a call, that of its collectives, and the processor time of all else in it.

    Each collective begins at a barrier, whose wait is the call's alone. Ranks that share cores
    compute one after another, and who is done first would wait in his next collective: the barrier
    takes this wait out of it, so what is left is the messages'. An all-reduce encodes, adds and
    decodes while its messages travel: that is in its time.
    """

    def __init__(self, world: Ranks) -> None:
        self._world, self._depth = world, 0
        self._travel_s = self._local_s = self._since_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the collectives of calls in the block, by whatever name a module has them."""
        timed = {each: self._timed(each) for each in COLLECTIVES}
        found: list[tuple[Any, str, Any]] = [(Allreduce, "run", Allreduce.run)]
        for module in list(sys.modules.values()):
            names = list(getattr(module, "__dict__", {}).items())
            found += [(module, k, v) for k, v in names if type(v) is FunctionType and v in timed]
        own = {name: getattr(self._world, name) for name in ("max", "gather", "agree")}
        for place, name, collective in found:
            setattr(place, name, timed[collective])
        vars(self._world).update({name: self._timed(method) for name, method in own.items()})
        try:
            yield
        finally:
            for place, name, collective in found:
                setattr(place, name, collective)
            for name in own:
                del vars(self._world)[name]

    def run(self, call: Callable[[], Result]) -> tuple[Result, Spent]:
        """Return what a call returns, and what it took. All processes call the same collectives."""
        self._depth, self._travel_s, self._local_s = 0, 0.0, 0.0
        start_s, self._since_s = time.perf_counter(), time.thread_time()
        result = call()
        local_s = self._local_s + time.thread_time() - self._since_s
        return result, Spent(time.perf_counter() - start_s, self._travel_s, local_s)

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def run(*given: Any, **named: Any) -> Any:
            if self._depth:
                return collective(*given, **named)
            self._local_s += time.thread_time() - self._since_s
            self._world.barrier("bench")
            self._depth, start_s = 1, time.perf_counter()
            try:
                return collective(*given, **named)
            finally:
                self._travel_s += time.perf_counter() - start_s
                self._depth, self._since_s = 0, time.thread_time()

        return run


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


TRAINED, RECORDED, SAMPLES = 20, 4, 8  # steps before, steps that are recorded, samples of a rank


def of_digits(ranks: int) -> list[Gradients]:
    """Return gradients of scikit-learn's digits, of a small LeNet after some steps.

    The first r of the ranks are those of a run on r ranks, but for the steps before.
    """
    from ...config import validate
    from ...world.ranks import Loopback
    from ..train.checkpoint import Files
    from ..train.job import Job
    from ..train.samples import epoch_order
    from ..train.setup import prepare

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

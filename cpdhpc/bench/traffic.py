"""What a method asks of the network, counted once; and what it does to recorded gradients.

What an aggregator asks of the network: counted once, and its time on any number of ranks.

A method is run on a few virtual ranks, and the collectives that it calls are written down with the
bytes that a rank gives to each. Their times follow from the costs that the collectives have by
construction. So a new row of COMPRESSORS needs nothing here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from ..collectives import sparse
from ..collectives.allreduce import Allreduce
from ..collectives.method import Machine
from ..collectives.predict import predict
from ..collectives.sparse import DTYPES, GATHERED_BYTES, allgather, broadcast, neighbours
from ..compress.base import Aggregator, Array, Context
from ..compress.bucket import Bucket, State, split_bucket
from ..ops import to_host
from ..train.gradients import Gradients
from ..world.ranks import Loopback, Ranks
from .accuracy import contributions
from .harness import on_device, whole

RANKS = 4  # virtual ones that a method is run on
WARMUP = 1  # iterations before the one that is counted, so that residuals are not empty
LATE = 1_000_000  # epoch and first iteration: all warming up of a method is over
FACTORS = [1 << i for i in range(10)]  # by which large layers are made smaller
LEAST_VALUES, LEAST_ROWS = 1 << 13, 16  # that they keep


class Call(NamedTuple):
    """A collective; size_bytes: what one of RANKS gives, the mean over them.

    method, values: of an all-reduce; divided: all ranks together give as much however many they are
    """

    name: str
    size_bytes: float
    method: Allreduce | None = None
    values: float = 0.0
    divided: bool = False


class CountedRanks(Loopback):
    """Virtual ranks in one process that write down which collectives they are asked for."""

    def __init__(self, virtual_ranks: int) -> None:
        super().__init__(virtual_ranks)
        self.calls: list[Call] = []
        self.account = self._take_down
        self._neighbours: int | None = None  # the call of neighbours that goes on
        self._before_bytes = 0  # sent before it

    def max(self, values: Array, what: str = "max") -> Array:
        """Return a copy. An all-reduce's own agreements are in its prediction."""
        if not what.startswith("allreduce"):
            self.calls.append(Call("agreement", values.nbytes))
        return super().max(values, what)

    def _take_down(self, name: str, arguments: Mapping[str, Any], numbers: Sequence[int]) -> None:
        self.close()
        if name == "allreduce":
            method = Allreduce(**{field.name: arguments[field.name] for field in fields(Allreduce)})
            n = prod(arguments["x.shape"])
            self.calls.append(Call(name, method.payloads.size_bytes(n), method, n))
            return
        self.calls.append(Call(name, self._given_bytes(name, arguments, numbers)))

    def _given_bytes(
        self, name: str, arguments: Mapping[str, Any], numbers: Sequence[int]
    ) -> float:
        """Return what a rank gives to a collective of cpdhpc.collectives.sparse."""
        if name == "allgather":
            return sum(numbers) / self.ranks * np.dtype(arguments["dtype"]).itemsize
        if name == "broadcast":
            length, dtype = numbers
            return length * np.dtype(DTYPES[dtype]).itemsize
        if name == "sum":
            return prod(arguments["shape"]) * np.dtype(arguments["dtype"]).itemsize
        assert name == "neighbours", name
        self._neighbours, self._before_bytes = len(self.calls), int(self.bytes_sent.sum())
        return 0  # until it is over: see close

    def close(self) -> None:
        """Give a call of neighbours that is over what it has sent."""
        if self._neighbours is not None:
            sent = int(self.bytes_sent.sum()) - self._before_bytes
            self.calls[self._neighbours] = Call("neighbours", sent / self.ranks)
            self._neighbours = None


class Cost(NamedTuple):
    """Of a collective: messages and bytes one after another, and bytes that leave a rank (mean)."""

    messages: int
    path_bytes: float
    sent_bytes: float


def _gathered(ranks: int, size: float) -> Cost:
    return Cost((ranks - 1).bit_length(), (ranks - 1) * size, (ranks - 1) * size)


def _summed(ranks: int, size: float) -> Cost:
    if size <= GATHERED_BYTES:
        return _gathered(ranks, size)
    both = 2 * (ranks - 1) / ranks * size
    return Cost(ranks - 1 + (ranks - 1).bit_length(), both, both)


def _spread(ranks: int, size: float) -> Cost:
    depth = (ranks - 1).bit_length()
    return Cost(depth, depth * size, (ranks - 1) / ranks * size)


def _to_all(ranks: int, size: float) -> Cost:
    """Of neighbours, where each rank gives every other one a part; size: as of RANKS ranks."""
    sent = size * RANKS / (RANKS - 1) * (ranks - 1) / ranks
    return Cost(ranks - 1 + (ranks - 1).bit_length(), sent, sent)


COSTS: dict[str, Callable[[int, float], Cost]] = {  # as collectives.sparse has it
    "agreement": lambda ranks, size: _spread(ranks, size)._replace(sent_bytes=0.0),
    "allgather": _gathered,
    "sum": _summed,
    "broadcast": _spread,
    "neighbours": _to_all,
}


def price(
    machine: Machine, call: Call, ranks: int, algorithms: Sequence[str]
) -> tuple[float, float]:
    """Return the time in s of a collective on so many ranks, and the bytes that leave a rank.

    algorithms: of which an all-reduce takes the one that is predicted to be fastest
    """
    if ranks == 1:
        return 0.0, 0.0
    if call.method is not None:
        ways = [replace(call.method, algorithm=name) for name in algorithms]
        nodes, n = tuple(range(ranks)), round(call.values)
        found = min(predict(machine, way, nodes, n) for way in ways)
        return found.time_s, found.wire_bytes
    size = call.size_bytes * (RANKS / ranks if call.divided else 1.0)
    cost = COSTS[call.name](ranks, size)
    call_s, step_s = machine.call_s, machine.step_s
    if call.name == "agreement":  # of MPI's own: no step of ours
        call_s, step_s = 0.0, 0.0
    message_s, byte_s = machine.alpha_s + step_s, machine.beta_s + 2 * machine.host_s
    return call_s + cost.messages * message_s + cost.path_bytes * byte_s, cost.sent_bytes


def count_calls(method: Aggregator, bucket: Bucket, ranks: int = RANKS) -> list[Call]:
    """Return the collectives of an iteration in which a method averages a bucket's gradients.

    They are alike for any number of ranks. The gradients are random, of magnitudes that spread over
    many binades.
    """
    world = CountedRanks(ranks)
    state = State(world.hosted, ranks)
    for step in range(WARMUP + 1):
        world.calls.clear()
        flats = contributions(ranks, bucket.size, seed=step)
        context = Context(world, state, iteration=LATE + step, epoch=float(LATE))
        method.aggregate(flats, bucket, context)
    world.close()
    return world.calls


def calls_of(method: Aggregator, bucket: Bucket, bucket_mib: float) -> list[Call]:
    """Return the collectives of an iteration, of all the buckets that a reducer makes.

    Large layers are not run as they are: rows, which are output units, are left out. What a method
    sends is linear in rows, so two sizes give the whole; a bucket whose calls differ between the
    two is run in full.
    """
    found: list[Call] = []
    for part in split_bucket(Bucket(bucket.names, bucket.shapes, method.align), bucket_mib):
        factor = min(FACTORS, key=lambda f: _shrunk(part.bucket, f, 2).size)
        whole = _shrunk(part.bucket, factor, 1)
        calls = _marked(method, whole)
        more = count_calls(method, _shrunk(part.bucket, factor, 2)) if factor > 1 else calls
        if _kinds(calls) != _kinds(more):
            factor, calls = 1, _marked(method, part.bucket)
            more = calls
        found += [_extended(a, b, factor) for a, b in zip(calls, more, strict=True)]
    return found


def _marked(method: Aggregator, bucket: Bucket) -> list[Call]:
    """Return the calls of a bucket, divided where half as many ranks would give twice as much."""
    calls, few = count_calls(method, bucket), count_calls(method, bucket, RANKS // 2)
    if _kinds(calls) != _kinds(few):
        return calls
    return [
        a._replace(divided=a.name == "allgather" and b.size_bytes > 2**0.5 * a.size_bytes)
        for a, b in zip(calls, few, strict=True)
    ]


def _kinds(calls: Sequence[Call]) -> list[tuple[str, Allreduce | None]]:
    return [(call.name, call.method) for call in calls]


def _shrunk(bucket: Bucket, factor: int, times: int) -> Bucket:
    """Return a bucket whose large layers have times / factor of their rows."""
    shapes = []
    for shape in bucket.shapes:
        rows, columns = shape[0], prod(shape[1:])
        if rows >= LEAST_ROWS * factor and rows * columns >= LEAST_VALUES * factor > LEAST_VALUES:
            rows = times * -(-rows // factor)
        shapes.append((rows, *shape[1:]))
    return Bucket(bucket.names, tuple(shapes), bucket.align)


def _extended(small: Call, large: Call, factor: int) -> Call:
    """Return the call of the whole, from those of a part of its rows and of twice as many."""
    size, values = (
        getattr(small, name) + (factor - 1) * (getattr(large, name) - getattr(small, name))
        for name in ("size_bytes", "values")
    )
    return small._replace(size_bytes=size, values=values)


COLLECTIVES = (allgather, broadcast, neighbours, sparse.sum, Allreduce.run)
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
    travel_s, local_s: in collectives, each from a barrier on, so that nobody waits for one who
        computes yet; processor time of all else: medians over iterations of the slowest process
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
    method warms up. All gradients come once more, by the clock of collectives, and the last ones
    again, with the profile. Raises as the method does.
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
    profile, clocks = Profile(), [Clock(world) for _ in rows]
    state = State(world.hosted, world.ranks)
    times, sent, collective, means, told = [], [], [], [], []
    watches: list[Clock | Profile | None] = [*[None] * len(rows), *clocks, profile]
    for number, (hosted, watch) in enumerate(zip([*rows, *rows, rows[-1]], watches, strict=True)):
        scale = recorded[0].loss_scale
        context = Context(world, state, 0, LATE + number, float(LATE), scale)
        world.barrier("bench")
        before, start_s = world.bytes_sent.copy(), time.perf_counter()
        given = world.collective_bytes
        average = whole(partial(method.aggregate, hosted, bucket, context), hosted[0])
        if watch is not None:
            with watch.running():
                average()
            continue
        mean = average()
        times.append(time.perf_counter() - start_s)
        sent.append(world.bytes_sent - before)
        collective.append(world.collective_bytes - given)
        means.append(to_host(mean.flat).astype(np.float64))
        told.append(mean.layers.get("sent_share"))
    apart = [(each.travel_s, each.local_s) for each in clocks]
    everyone = world.gather((times, sent, profile.time_s, collective, apart), "bench")
    travel_s, local_s = np.median(np.max([each[4] for each in everyone], axis=0), axis=0)
    total_s = {phase: sum(each[2][phase] for each in everyone) for phase in PHASES}
    spent_s = sum(total_s.values())
    sizes = [stop - start for _, start, stop in bucket.segments]
    return Replayed(
        np.concatenate([np.mean(each[1], axis=0) for each in everyone]),
        float(np.max([np.mean(each[3]) for each in everyone])),
        float(np.median(np.max([each[0] for each in everyone], axis=0))),
        float(travel_s),
        float(local_s),
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


class Clock:
    """The time of collectives, each from a barrier on; processor time of all else in this thread.

    Ranks that share cores compute one after another, and who is done first would wait in his next
    collective: the barrier takes this wait away, so what is left is the messages'. An all-reduce
    encodes, adds and decodes while its messages travel: that is in its time.
    """

    def __init__(self, world: Ranks) -> None:
        self.travel_s = self.local_s = 0.0
        self._world, self._depth, self._since_s, self._start_s = world, 0, 0.0, 0.0
        methods = (getattr(type(world), name) for name in ("max", "gather", "agree"))
        self._codes = {each.__code__ for each in (*COLLECTIVES, *methods)}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the block, in which all processes call the same collectives. Collective."""
        self._depth, self._since_s = 0, time.thread_time()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.local_s += time.thread_time() - self._since_s

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code not in self._codes or event not in ("call", "return"):
            return
        self._depth += 1 if event == "call" else -1
        if event == "call" and self._depth == 1:
            self.local_s += time.thread_time() - self._since_s
            self._world.barrier("bench")
            self._start_s = time.perf_counter()
        elif event == "return" and self._depth == 0:
            self.travel_s += time.perf_counter() - self._start_s
            self._since_s = time.thread_time()


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

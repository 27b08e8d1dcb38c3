"""Calls that are timed in turns over ranks; messages; points of benchmarks for study files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...collectives.engine import carrier_of
from ...config import Raw
from ...ops import on_gpu
from ...world.ranks import Ranks, Wait
from ..study_data import Case, Factors
from .base import Call, Kind, Measure

if TYPE_CHECKING:
    from .place import JobRanks

Name = TypeVar("Name")
Floats = NDArray[np.float64]
Times = Floats
Before = Callable[[Name], object]


def interleave_ranks(
    world: Ranks,
    cases: Mapping[Name, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    prepare: Before[Name] = lambda name: None,
) -> dict[Name, Times]:
    """Return the seconds of each call on each process, float64[warmup + repeats, processes].

    Collective. All processes meet at a barrier before each call, after prepare, which is not timed.
    The cases take turns so that a drift of the machine's speed affects all of them.
    """
    own_s = np.empty((warmup + repeats, len(cases)))
    for row in own_s:
        for i, (name, run) in enumerate(cases.items()):
            prepare(name)
            world.barrier("bench")
            start_s = time.perf_counter()
            run()
            row[i] = time.perf_counter() - start_s
    everyone = np.stack(world.gather(own_s, "bench"), axis=2)
    return {name: everyone[:, i] for i, name in enumerate(cases)}


def slowest(
    world: Ranks,
    cases: Mapping[Name, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    prepare: Before[Name] = lambda name: None,
) -> dict[Name, Times]:
    """Return the seconds of each call after the warm-up, of the slowest process, float64[repeats].

    Collective. Arguments are those of interleave_ranks.
    """
    times_s = interleave_ranks(world, cases, repeats, warmup, prepare)
    return {name: each[warmup:].max(axis=1) for name, each in times_s.items()}


def often(run: Callable[[], object], count: int) -> Callable[[], None]:
    """Return so many calls as one."""

    def calls() -> None:
        for _ in range(count):
            run()

    return calls


def ms(times_s: Times) -> tuple[float, float, float]:
    """Return median, least and greatest in milliseconds."""
    return 1e3 * float(np.median(times_s)), 1e3 * float(times_s.min()), 1e3 * float(times_s.max())


def on_device(x: NDArray[Any], device: str) -> Any:
    """Return x, or its copy on CuPy's current GPU."""
    if device == "cpu":
        return x
    from ...ops import gpu_runtime

    return gpu_runtime.to_device(x)


def whole(run: Callable[[], object], like: Any) -> Callable[[], Any]:
    """Return a call as it is timed: with GPU arrays it ends when the GPU is done."""
    if not on_gpu(like):
        return run
    from ...ops import gpu_runtime

    return gpu_runtime.finished(run)


@dataclass(frozen=True)
class BenchPoint:
    """A case of a benchmark. factors, outcomes: as in studies of the benchmark's kind.

    times_s: float64[warmup + repeats, processes]
    """

    factors: Factors
    outcomes: Mapping[str, float | int | str]
    times_s: Times

    def slowest_s(self, warmup: int) -> Times:
        """Return the times of the slowest rank after so many warm-up calls."""
        times: Times = self.times_s[warmup:].max(axis=1)
        return times

    def median_s(self, warmup: int) -> float:
        """Return the median of the slowest rank's times."""
        return float(np.median(self.slowest_s(warmup)))


@dataclass(frozen=True)
class BenchmarkResult:
    """The result of a benchmark: points of a study of a kind; study.batch writes its file.

    cores: text of own_cores
    """

    benchmark: str
    kind: str
    points: Sequence[BenchPoint]
    warmup: int
    cores: str = ""


@dataclass(frozen=True)
class Benchmark:
    """What a kind asks of its study, for cases of no study. See base.MeasuredStudy."""

    measure: Measure = field(default_factory=Measure)
    job: Raw = field(default_factory=dict)


@contextmanager
def opened(
    kind: Kind, place: JobRanks, cases: Sequence[Factors], check: bool = True
) -> Iterator[list[Call]]:
    """Yield the calls of all cases, checked unless check is False. Collective.

    kind: whose repeats are calls; cases: the factors of each, as Kind.used returns them
    Raises what Kind.measure raises, on all ranks.
    """
    world, study, calls = place.world, Benchmark(), kind.measure
    assert not isinstance(calls, type), "its repeats are calls"
    nodes = len(set(world.nodes))
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                calls(study, Case("", each, nodes, world.ranks // nodes), place, check)
            )
            for each in cases
        ]


def measure(
    kind: Kind,
    place: JobRanks,
    cases: Sequence[Factors],
    repeats: int,
    warmup: int,
    check: bool = True,
) -> list[BenchPoint]:
    """Check cases, time them in turns, and return a point for each. Collective.

    Arguments and errors are those of opened; warmup: calls before the repeats that count
    """
    with opened(kind, place, cases, check) as made:
        times = interleave_ranks(
            place.world,
            {i: call.run for i, call in enumerate(made)},
            repeats,
            warmup,
            lambda i: made[i].prepare(),
        )
    return [
        BenchPoint({**case, **call.chosen}, call.outcomes, times[i])
        for i, (case, call) in enumerate(zip(cases, made, strict=True))
    ]


PING_BYTES = [1 << i for i in range(3, 22, 3)]  # 8 B to 2 MiB


def ping_pong(
    world: Ranks, sizes: Sequence[int] = PING_BYTES, repeats: int = 10, warmup: int = 2
) -> tuple[float, float]:
    """Return seconds per message and per byte between the first and the last process. Collective.

    sizes: of the messages, in bytes
    """
    return line(sizes, message_times(world, (0, world.processes - 1), sizes, repeats, warmup))


def link_s(place: JobRanks) -> float:
    """Return the time of a byte on a node's link, by a ping-pong; 0 if there is one node.

    Collective. It is found once for a place, unless the place has it.
    """
    if place.link_s is None:
        place.link_s = ping_pong(place.world)[1] if len(set(place.world.nodes)) > 1 else 0.0
    return place.link_s


def message_times(
    world: Ranks,
    ends: tuple[int, int],
    sizes: Sequence[int] = PING_BYTES,
    repeats: int = 10,
    warmup: int = 2,
    device: str = "cpu",
) -> list[float]:
    """Return seconds of a message of each size between two processes, medians. Collective.

    It is half the time of a message there and back, polled as in the all-reduce.
    sizes: in bytes; device: of the memory of the messages
    """
    first, last = ends
    other = {first: last, last: first}.get(world.process)

    def bounce(size: int) -> Callable[[], None]:
        ball, caught = (on_device(np.zeros(size, np.uint8), device) for _ in range(2))
        carrier = carrier_of(world, ball)

        def send() -> None:
            requests = carrier.isend(world.process, other or 0, ball)
            world.wait_any([Wait(requests, world.process, "ping-pong: waited {:.1f} s to send")])

        def receive() -> None:
            requests = carrier.irecv(other or 0, world.process, caught)
            world.wait_any([Wait(requests, world.process, "ping-pong: waited {:.1f} s")])

        calls = (send, receive) if world.process == first else (receive, send)

        def both() -> None:
            for call in calls if other is not None else ():
                call()

        return both

    times = interleave_ranks(world, {size: bounce(size) for size in sizes}, repeats, warmup)
    return [float(np.median(times[size][warmup:, first])) / 2 for size in sizes]


def nonnegative(a: Floats, b: Floats) -> Floats:
    """Return the x >= 0 with which a @ x is nearest to b; columns of a may have any units."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(a).max(axis=0), np.finfo(float).tiny)
    return nnls(a / scale, b)[0] / scale


def line(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """Return (a, b), not negative, of times_s = a + b * sizes, the least squares of the ratios."""
    weight = 1 / np.array(times_s)
    a = np.stack([weight, weight * np.array(sizes, np.float64)], axis=1)
    first, second = nonnegative(a, np.ones(len(weight))).tolist()
    return first, second


FURTHER = {  # factors of benchmarks that studies do not have: long name
    "chosen": "algorithm that auto has chosen",
    "setting": "name of a plan",
    "shape": "cells of the domain along each axis",
    "procs": "ranks along each axis",
    "widths": "cells around the box of a rank, below:above where they differ",
    "trail": "further axes, not split",
}

"""Predicted time of an all-reduce, the algorithm that is predicted to be fastest, and the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats import TILE, tiles
from .kept import is_small
from .machine import DEFAULT, Machine, as_machine
from .method import AUTO, Method
from .scaling import Segment
from .schedule import SCHEDULES, Schedule
from .step import Layout
from .timed import Spent, timed
from .walk import Walk

PIECES = 4  # that are walked at least
PROGRAMS = 1 << 13  # up to so many, pieces times ranks, more are walked: up to WINDOWS windows
WINDOWS = 4
SHORTENED = 5  # lengths of a step that the fit tries
ALL_RANKS = 8  # up to here all ranks are walked even where one can stand for all


class Prediction(NamedTuple):
    """time_s of a call; wire_bytes: that leave a rank, the mean over ranks.

    walked: the number of ranks whose steps were walked: all, or one that stands for all
    """

    time_s: float
    wire_bytes: int
    walked: int


class Sample(NamedTuple):
    """A measured call: time_s of an all-reduce of n values on ranks of these nodes."""

    method: Method
    nodes: tuple[int, ...]
    n: int
    time_s: float


def predict(machine: Machine, method: Method, nodes: tuple[int, ...], n: int) -> Prediction:
    """Return the predicted time of method's all-reduce of n values per rank.

    nodes: the node of each rank, numbered in the order of first ranks: hier's steps depend on it
    Source: alpha-beta-gamma model of Thakur, Rabenseifner, Gropp: IJHPCA 19(1), 2005, walked step
    by step. Not in it: contention of links, ranks that share a processor, kahan's subtractions.
    Raises ValueError for algorithm "mpi", whose steps are the library's, for "auto",
    and for exact sums.
    """
    if method.algorithm not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ValueError(f"predict: algorithm={method.algorithm!r}: known are {known}")
    if method.exact:
        raise ValueError("predict: accumulate='exact': messages that widen are not modelled")
    if is_small(method, len(nodes), n):  # a kept tape: its steps are messages and kernels alone
        machine = replace(machine, step_s=0.0)
    schedule = SCHEDULES[method.algorithm]
    one = len(nodes) > ALL_RANKS and _all_alike(schedule, nodes)
    walk, pieces, share = _walk(machine, method, nodes, n, one)
    ends_s = walk.run()
    time_s = max(ends_s)
    if pieces > len(ends_s):
        time_s += (pieces - len(ends_s)) * _period_s(walk, ends_s)
    sent = sum(rank.bytes_sent for rank in walk.ranks) / len(walk.ranks)
    return Prediction(
        time_s=_before_s(machine, method, len(nodes), n) + time_s,
        wire_bytes=round(sent * share * pieces / len(ends_s)),
        walked=len(walk.ranks),
    )


def _period_s(walk: Walk, ends_s: Sequence[float]) -> float:
    """Return how long each further piece takes: what the busiest processor or port needs for one.

    Or the time between the ends of the last ones, where that is longer: as a window that is full.
    """
    half = len(ends_s) // 2
    between_s = (ends_s[-1] - ends_s[half - 1]) / (len(ends_s) - half)
    busy_s = max(max(rank.busy_s) for rank in walk.ranks) / len(ends_s)
    return max(between_s, busy_s)


def _before_s(machine: Machine, method: Method, ranks: int, n: int) -> float:
    """Return the time of the call itself: comparing the arguments, for aps the largest values."""
    aps = method.fmt is not None and method.parsed_scaling.kind == "aps"
    agreement_s = (ranks - 1).bit_length() * machine.alpha_s
    return machine.call_s + (1 + aps) * agreement_s + aps * machine.copy_s * 4 * n


def _walk(
    machine: Machine, method: Method, nodes: tuple[int, ...], n: int, one: bool
) -> tuple[Walk, int, float]:
    """Return the walk of the first pieces, how many there are, and the share that is data.

    Where one rank stands for all, every chunk is as large as the largest: in whole tiles.
    """
    chunks = SCHEDULES[method.algorithm].chunks(Layout(nodes))
    padded = chunks * TILE * -(-tiles(n) // chunks) if one and chunks > 1 else n
    memory = np.zeros(padded, np.float32)  # never touched: a promise of memory, no more
    shifts = [] if method.fmt is None or method.parsed_scaling.kind == "tile" else [0]
    segments = [Segment("x", 0, padded)][: len(shifts)]
    plan = method.plan(nodes, memory, segments, (shifts, shifts), 0)
    spent, wire = Spent(), plan.wire
    share = wire.size_bytes(n) / max(1, wire.size_bytes(padded))
    if padded > n and n < TILE:  # then a message is no tile either
        machine = replace(
            machine, beta_s=machine.beta_s * wire.size_bytes(n) / wire.size_bytes(TILE)
        )
    pieces = plan.pieces(padded)
    most = min(WINDOWS * plan.schedule.window(len(nodes)), PROGRAMS // (1 if one else len(nodes)))
    walked = pieces[: max(PIECES, most)]
    walk = Walk(
        machine, replace(plan, wire=timed(wire, machine, spent)), spent, walked, memory, one, share
    )
    return walk, len(pieces), share


@lru_cache(maxsize=64)
def _all_alike(schedule: Schedule, nodes: tuple[int, ...]) -> bool:
    """Whether every rank sends and receives in every step, of the same kinds and numbers.

    Then all clocks are equal, and one rank stands for all. A few ranks are looked at.
    """
    ranks = len(nodes)
    looked_at = sorted({0, 1, 2, ranks // 3, ranks // 2, ranks - 2, ranks - 1} & {*range(ranks)})
    first = None
    for rank in looked_at:
        steps = list(schedule.steps(rank, Layout(nodes)))
        if any(step.send_to is None or step.recv_from is None for step in steps):
            return False
        kinds = [(step.kind, len(step.send_chunks), len(step.recv_chunks)) for step in steps]
        first = kinds if first is None else first
        if kinds != first:
            return False
    return True


@lru_cache(maxsize=1024)
def choose(method: Method, nodes: tuple[int, ...], n: int) -> Method:
    """Return a method of algorithm "auto" with the algorithm that is predicted to be fastest.

    A function of its arguments alone, so the same on all ranks; ties go to the first in SCHEDULES.
    """
    machine = as_machine(method.machine)
    found: dict[str, Method] = {}
    for name, schedule in SCHEDULES.items():
        if method.accumulate is None or method.accumulate in schedule.accumulates:
            found[name] = replace(method, algorithm=name)
    if method.algorithm != AUTO or not found:
        raise ValueError(f"choose: {method}: nothing to choose from")
    return min(found.values(), key=lambda each: predict(machine, each, nodes, n).time_s)


def solve(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the x >= 0 with which a @ x is nearest to b, in least squares.

    Some of the unknowns are zero and the others solve the problem without bounds: all subsets are
    tried, as there are few unknowns.
    """
    columns = range(a.shape[1])
    best, least = np.zeros(a.shape[1]), float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for free in map(list, combinations(columns, size)):
            x = np.zeros(a.shape[1])
            x[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            rest = a @ x - b
            if (x >= 0).all() and float(rest @ rest) < least:
                best, least = x, float(rest @ rest)
    return best


def line(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """Return (a, b), not negative, of times_s = a + b * sizes, the least squares of the ratios."""
    weight = 1 / np.array(times_s)
    a = np.stack([weight, weight * np.array(sizes, np.float64)], axis=1)
    scale = a.max(axis=0)  # columns of one size: lstsq takes much smaller ones for zero
    first, second = (solve(a / scale, np.ones(len(weight))) / scale).tolist()
    return first, second


def fit(
    machine: Machine, samples: Sequence[Sample], fields: Sequence[str], rounds: int = 8
) -> Machine:
    """Return machine with such values of fields that the predictions come near to the samples.

    Least squares of the relative errors, none negative, by Gauss and Newton; a prediction is
    piecewise linear in every field, so a step that makes the errors larger is shortened, and the
    better one is taken of what is reached from machine and from DEFAULT.
    """
    measured = np.array([sample.time_s for sample in samples])

    def at(values: npt.NDArray[np.float64]) -> Machine:
        return replace(machine, **dict(zip(fields, values.tolist(), strict=True)))

    def relative(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return _predictions(at(values), samples) / measured

    def misfit(values: npt.NDArray[np.float64]) -> float:
        return float(((relative(values) - 1) ** 2).sum())

    def descend(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        for _ in range(rounds):
            base, steps = relative(values), np.diag(np.maximum(values * 1e-3, 1e-12))
            slopes = [(relative(values + step) - base) / step.max() for step in steps]
            a = np.stack(slopes, axis=1)
            scale = np.maximum(np.abs(a).max(axis=0), np.finfo(float).tiny)
            target = solve(a / scale, 1 - (base - a @ values)) / scale
            tries = [values + (target - values) / 2**halvings for halvings in range(SHORTENED)]
            values = min([values, *tries], key=misfit)
        return values

    starts = [np.array([getattr(each, name) for name in fields]) for each in (machine, DEFAULT)]
    return at(min(map(descend, starts), key=misfit))


def _predictions(machine: Machine, samples: Sequence[Sample]) -> npt.NDArray[np.float64]:
    return np.array([predict(machine, s.method, s.nodes, s.n).time_s for s in samples])

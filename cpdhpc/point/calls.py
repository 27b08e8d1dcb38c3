"""Measuring of calls: visits with warm-ups and repeats, until the median is known well enough."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..bench.cores import own_cores
from ..bench.harness import interleave_ranks
from ..signals import Caught
from ..study.case import Case
from ..study.result import Result
from ..study.spec import Measure
from ..study.statistics import Array, is_enough
from .measuring import Measuring
from .place import Place

Outcomes = dict[str, float | int | str]


@dataclass
class Call:
    """Something to time. prepare: done before each call, and not timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    outcomes: Outcomes = field(default_factory=dict)


class Calls(Measuring):
    """A case whose repeats are calls that all ranks do together."""

    def __init__(self, case: Case, measure: Measure, directory: Path) -> None:
        super().__init__(case, measure, directory)
        self.times_s = np.empty((0, 3))
        self.is_warmup = np.empty(0, np.uint8)
        self.spent_s = 0.0
        self.outcomes: Outcomes = {}

    @abstractmethod
    def call(self, place: Place, check: bool) -> AbstractContextManager[Call]:
        """Make the call ready; with check, first see that it does what it should. Collective."""

    @property
    def counted(self) -> Array:
        """Times of the repeats that count, of the slowest rank, float64[n]."""
        times: Array = self.times_s[self.is_warmup == 0, 0]
        return times

    def visit(self, place: Place, caught: Caught) -> None:
        """Make the call ready and time it a few times. Collective."""
        world, measure = place.world, self.measure
        left = measure.max_repeats - len(self.counted)
        with own_cores(world) as cores:
            place.cores = cores
            with self.call(place, check=not len(self.times_s)) as call:
                repeats, began_s = min(measure.block, left), time.perf_counter()
                times_s = interleave_ranks(
                    world, {0: call.run}, repeats, measure.warmup, lambda _: call.prepare()
                )[0]
                spent_ns = np.array([int((time.perf_counter() - began_s) * 1e9)])
        self.outcomes |= call.outcomes
        over_ranks = (times_s.max(axis=1), times_s.min(axis=1), times_s.mean(axis=1))
        self.times_s = np.concatenate([self.times_s, np.stack(over_ranks, axis=1)])
        flags = (np.arange(len(times_s)) < measure.warmup).astype(np.uint8)
        self.is_warmup = np.concatenate([self.is_warmup, flags])
        self.spent_s += float(world.max(spent_ns)[0]) / 1e9
        self.done = self._is_done()  # the same on all ranks, as all it looks at is

    def _is_done(self) -> bool:
        measure, counted = self.measure, self.counted
        if len(counted) >= measure.max_repeats or self.spent_s >= measure.max_time_s:
            return True
        return len(counted) >= measure.min_repeats and is_enough(
            counted, measure.confidence, measure.relative
        )

    def result(self, place: Place) -> Result:
        """Return the times of all repeats."""
        return Result(self.times_s, self.is_warmup, self.outcomes, place.environment())

"""Points that differ in nothing but the seed, taken together, and the series they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..statistics import median_interval, ratio_intervals
from .naming import in_order
from .study_file import Point, StudyFile, Value

Array = npt.NDArray[Any]
SEEDS = ("seed",)


class Estimate(NamedTuple):
    """A quantity and the ends of its interval, NaN where there is none."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """Return the quantity in another unit."""
        return Estimate(*(factor * each for each in self))

    def inverse(self, of: float) -> Estimate:
        """Return of / quantity, as a rate is of a time."""
        return Estimate(of / self.value, of / self.high, of / self.low)


UNKNOWN = Estimate(nan, nan, nan)


def ratio(one: Array, other: Array, level: float) -> Estimate:
    """Return median of one / median of other; the interval holds with the level or more.

    one, other: float64[samples], s
    """
    longest = max(len(one), len(other))
    times = np.full((2, longest), np.nan)
    times[0, : len(one)], times[1, : len(other)] = one, other
    found = ratio_intervals(times, np.array([-1, 0]), level)
    return Estimate(*(float(column[1]) for column in found))


@dataclass(frozen=True)
class Pool:
    """Points that differ only in seeds, or a single point.

    factors: of all of them, without the seed; base: what the speed-up is relative to
    """

    factors: Mapping[str, Value]
    points: tuple[Point, ...]
    base_points: tuple[Point, ...]
    level: float

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.points[0].ranks

    @cached_property
    def samples_s(self) -> Array:
        """float64[repeats], times of all points, without warm-ups."""
        return np.concatenate([point.times_s for point in self.points])

    @cached_property
    def time_s(self) -> Estimate:
        """Median time and its interval."""
        return _median(self.samples_s, self.level)

    @cached_property
    def base_s(self) -> Estimate:
        """Time of the base."""
        return _median(self._base_samples_s, self.level) if self.base_points else UNKNOWN

    @property
    def _base_samples_s(self) -> Array:
        return np.concatenate([point.times_s for point in self.base_points])

    @property
    def is_base(self) -> bool:
        """Whether this is what others are relative to."""
        return {p.index for p in self.points} == {p.index for p in self.base_points}

    @cached_property
    def speedup(self) -> Estimate:
        """Ratio of times, by the ratio of work that the file has."""
        if not self.base_points:
            return UNKNOWN
        if self.is_base:
            return Estimate(1.0, 1.0, 1.0)
        first = self.points[0].summary
        work = first["speedup"] * first["median_s"] / self.base_points[0].summary["median_s"]
        return ratio(self._base_samples_s, self.samples_s, self.level).scaled(work)

    @property
    def efficiency(self) -> Estimate:
        """Speed-up by that of the ideal."""
        if not self.base_points:
            return UNKNOWN
        first = self.points[0].summary
        return self.speedup.scaled(first["efficiency"] / first["speedup"])

    def outcome(self, name: str) -> Array:
        """float64[seeds], an outcome of each point; NaN where there is none."""
        return np.array([point.outcomes.get(name, nan) for point in self.points], float)

    def mean(self, name: str) -> float:
        """Mean of an outcome over seeds, NaN where a seed has none."""
        return float(self.outcome(name).mean())


def _median(samples: Array, level: float) -> Estimate:
    if not len(samples):
        return UNKNOWN
    return Estimate(float(np.median(samples)), *median_interval(samples, level))


def pools(file: StudyFile) -> list[Pool]:
    """Return the points of a study taken together over seeds, in the order of their factors."""
    by_key: dict[tuple[Any, ...], list[Point]] = {}
    for point in file.points:
        by_key.setdefault(_key(point.factors, SEEDS), []).append(point)
    found = [_pool(file, members) for members in by_key.values()]
    names = in_order(name for pool in found for name in pool.factors)
    first = {  # order of appearance for names, of size for numbers
        name: list(dict.fromkeys(pool.factors.get(name, "") for pool in found)) for name in names
    }
    return sorted(
        found, key=lambda pool: [_order(pool.factors.get(n, ""), first[n]) for n in names]
    )


def _pool(file: StudyFile, members: list[Point]) -> Pool:
    factors = {k: v for k, v in members[0].factors.items() if k not in SEEDS}
    bases = dict.fromkeys(point.base for point in members if point.base >= 0)
    return Pool(factors, tuple(members), tuple(file.points[i] for i in bases), file.level)


def _key(factors: Mapping[str, Value], without: Iterable[str]) -> tuple[Any, ...]:
    return tuple(sorted((k, v) for k, v in factors.items() if k not in without))


def _order(value: Value, seen: list[Value]) -> float:
    return seen.index(value) if isinstance(value, str) else float(value)


def finite(values: Iterable[float]) -> list[float]:
    """Return those that are numbers."""
    return [value for value in values if isfinite(value)]

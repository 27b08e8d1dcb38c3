"""Points that differ in nothing but the seed, taken together, and the series they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..statistics import median_interval
from . import text
from .study_file import PLACES, Point, StudyFile, Value

Array = npt.NDArray[Any]
SEEDS = ("seed", "train.seed", "train.seeds")
SAID = {  # factor -> value -> what a label says of it
    "gradient.aggregator": {"none": "float32", "lowbit": ""},
    "aggregator": {"none": "float32", "lowbit": ""},
}


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


def ratio(one: Estimate, other: Estimate) -> Estimate:
    """Return one / other; the interval holds the quotients of all values in both intervals."""
    return Estimate(one.value / other.value, one.low / other.high, one.high / other.low)


def apart(one: Estimate, other: Estimate) -> bool:
    """Return whether both have intervals and these do not overlap."""
    return one.high < other.low or other.high < one.low


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
    def time_s(self) -> Estimate:
        """Median time and its interval: as stored, or of all samples of the seeds together."""
        return _time(self.points, self.level)

    @property
    def repeats(self) -> int:
        """Number of samples, without warm-ups."""
        return sum(int(point.summary["n"]) for point in self.points)

    @cached_property
    def base_s(self) -> Estimate:
        """Time of the base."""
        return _time(self.base_points, self.level) if self.base_points else UNKNOWN

    @property
    def is_base(self) -> bool:
        """Whether this is what others are relative to."""
        return {p.index for p in self.points} == {p.index for p in self.base_points}

    @cached_property
    def speedup(self) -> Estimate:
        """Speed-up, of seeds together by the rule that each of them has in the file."""
        if not self.base_points:
            return UNKNOWN
        first, base = self.points[0], self.base_points[0]
        stored = first.summary
        if len(self.points) == 1:
            ends = (stored.get(f"speedup_{end}", nan) for end in ("low", "high"))
            return Estimate(stored["speedup"], *ends)
        rule = stored["speedup"] * stored["median_s"] / base.summary["median_s"]
        return ratio(self.base_s, self.time_s).scaled(rule)

    @property
    def efficiency(self) -> Estimate:
        """Efficiency: the speed-up by that of the ideal."""
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


def _time(points: Sequence[Point], level: float) -> Estimate:
    if len(points) == 1:
        found = points[0].summary
        return Estimate(found["median_s"], found["ci_low_s"], found["ci_high_s"])
    samples = np.concatenate([point.times_s for point in points])
    return Estimate(float(np.median(samples)), *median_interval(samples, level))


def pools(file: StudyFile) -> list[Pool]:
    """Return the points of a study taken together over seeds, in the order of their factors."""
    by_key: dict[tuple[Any, ...], list[Point]] = {}
    for point in file.points:
        by_key.setdefault(_key(point.factors, SEEDS), []).append(point)
    found = [_pool(file, members) for members in by_key.values()]
    names = list(dict.fromkeys(name for pool in found for name in pool.factors))
    first = {  # order of appearance for names, of size for numbers
        name: list(dict.fromkeys(pool.factors.get(name, "") for pool in found)) for name in names
    }
    return sorted(found, key=lambda pool: [_order(pool.factors.get(n, ""), first[n]) for n in names])


def _pool(file: StudyFile, members: list[Point]) -> Pool:
    factors = {k: v for k, v in members[0].factors.items() if k not in SEEDS}
    bases = dict.fromkeys(point.base for point in members if point.base >= 0)
    return Pool(factors, tuple(members), tuple(file.points[i] for i in bases), file.level)


def _key(factors: Mapping[str, Value], without: Iterable[str]) -> tuple[Any, ...]:
    return tuple(sorted((k, v) for k, v in factors.items() if k not in without))


def _order(value: Value, seen: list[Value]) -> float:
    return seen.index(value) if isinstance(value, str) else float(value)


def series(of: Iterable[Pool]) -> list[list[Pool]]:
    """Return pools that have one base, from few ranks to many; those without one by themselves."""
    found: dict[Any, list[Pool]] = {}
    for pool in of:
        key = tuple(point.index for point in pool.base_points) or ("alone", id(pool))
        found.setdefault(key, []).append(pool)
    return [sorted(members, key=lambda pool: pool.ranks) for members in found.values()]


def varying(of: Sequence[Pool], without: Iterable[str] = PLACES) -> list[str]:
    """Return the factors that are not the same in all pools."""
    names = dict.fromkeys(name for pool in of for name in pool.factors)
    return [
        name
        for name in names
        if name not in without and len({pool.factors.get(name) for pool in of}) > 1
    ]


def label(factors: Mapping[str, Value], names: Iterable[str]) -> str:
    """Return the values of factors as a name for people, without those that are not used."""
    words = [said(name, factors[name]) for name in names if name in factors]
    return " ".join(word for word in words if word)


def said(name: str, value: Value) -> str:
    """Return a factor's value for people."""
    if name in SAID and value in SAID[name]:
        return SAID[name][str(value)]
    if isinstance(value, str):
        return value
    if name.endswith("bytes"):
        return text.size(value)
    return f"{name.rpartition('.')[2]} {text.digits(value) if isinstance(value, float) else value}"


def finite(values: Iterable[float]) -> list[float]:
    """Return those that are numbers."""
    return [value for value in values if isfinite(value)]

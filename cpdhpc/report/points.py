"""Points that differ only in the seed taken together, their series, and what all are called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..study.statistics import median_interval, ratio_intervals
from ..study.study_file import PLACES, Point, Stored, StudyFile
from . import units
from .figures import LIBRARIES, Join, Look, Series, looks

Factors = Mapping[str, Stored]
ORDER = (  # of factors in names, of columns and rows
    "nodes",
    "ppn",
    "ranks",
    "size_bytes",
    "operation",
    "format",
    "algorithm",
    "wire",
    "value_scaling",
    "accumulate",
    "gradient.aggregator",
    "gradient.wire",
    "gradient.scaling",
)
HEADINGS = {"size_bytes": "size", "value_scaling": "scaling", "gradient.aggregator": "gradients"}
COUNTED = {"ranks": "rank", "nodes": "node"}
DERIVED = ("accumulate", "gradient.accumulate")  # said only where other factors leave it open
SAID = {  # factor: value: what a name says of it
    "gradient.aggregator": {"none": "float32", "lowbit": ""},
}


def in_order(names: Iterable[str]) -> list[str]:
    """Return names, each once, the well-known ones first."""
    found = list(dict.fromkeys(names))
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def varying(of: Sequence[Factors], without: Iterable[str] = PLACES) -> list[str]:
    """Return the factors that are not the same in all, without those that others decide."""
    names = [
        name
        for name in in_order(name for factors in of for name in factors)
        if name not in without and len({factors.get(name) for factors in of}) > 1
    ]
    return [name for name in names if name not in DERIVED or not _decided(name, names, of)]


def _decided(name: str, names: Sequence[str], of: Sequence[Factors]) -> bool:
    others = [other for other in names if other not in DERIVED]
    rest = {tuple(factors.get(other) for other in others) for factors in of}
    all_of = {tuple(factors.get(other) for other in (*others, name)) for factors in of}
    return len(rest) == len(all_of)


def constant(of: Sequence[Factors], without: Iterable[str] = ()) -> dict[str, Stored]:
    """Return the factors that are the same in all."""
    names = in_order(name for factors in of for name in factors)
    return {
        name: of[0][name]
        for name in names
        if name not in without and len({factors.get(name) for factors in of}) == 1
    }


def is_number(name: str, of: Iterable[Factors]) -> bool:
    """Return whether no value of a factor is a word."""
    return not any(isinstance(factors.get(name), str) for factors in of)


def label(factors: Factors, names: Iterable[str]) -> str:
    """Return the values of factors as a name for people, without those that are not used."""
    used = [name for name in names if name in factors]
    words = [said(name, factors[name]) for name in used if isinstance(factors[name], str)]
    numbers = [said(name, factors[name]) for name in used if not isinstance(factors[name], str)]
    return ", ".join([*numbers, " ".join(filter(None, words))]).removesuffix(", ")


def said(name: str, value: Stored) -> str:
    """Return a factor's value for people, numbers with what they are of."""
    if name in COUNTED:
        return units.count(int(value), COUNTED[name])
    bare = cell(name, value)
    if isinstance(value, str) or name.endswith("bytes"):
        return bare
    return f"{heading(name)} {bare}"


def cell(name: str, value: Stored) -> str:
    """Return a factor's value below its heading."""
    if isinstance(value, str):
        return SAID.get(name, {}).get(value, value)
    if name.endswith("bytes"):
        return units.size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def heading(name: str) -> str:
    """Return what a factor is called at the head of a column."""
    return HEADINGS.get(name, name.rpartition(".")[2].replace("_", " "))


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

    factors: Mapping[str, Stored]
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


def _key(factors: Mapping[str, Stored], without: Iterable[str]) -> tuple[Any, ...]:
    return tuple(sorted((k, v) for k, v in factors.items() if k not in without))


def _order(value: Stored, seen: list[Stored]) -> float:
    return seen.index(value) if isinstance(value, str) else float(value)


def finite(values: Iterable[float]) -> list[float]:
    """Return those that are numbers."""
    return [value for value in values if isfinite(value)]


ROWS, WIDEST = 5, 4  # of panels in a figure
APART, REACH = 0.06, 0.28  # of a doubling: series beside one another, and all at a place
FOREIGN = ("mpi", "gloo")  # algorithms that are not ours


@dataclass(frozen=True)
class Line:
    """Pools that are drawn as one series."""

    name: str
    look: Look
    pools: Sequence[Pool]


@dataclass(frozen=True)
class Dealt:
    """The lines of each panel, by the panel's title; columns: of their grid."""

    panels: dict[str, list[Line]]
    columns: int

    def figures(self, name: str) -> list[tuple[str, Dealt]]:
        """Return what goes into each figure, with its name: numbered where there are several."""
        items, most = list(self.panels.items()), ROWS * self.columns
        parts = [dict(items[i : i + most]) for i in range(0, len(items), most)]
        return [
            (f"{name}_{number}" if len(parts) > 1 else name, Dealt(part, self.columns))
            for number, part in enumerate(parts, 1)
        ]


@dataclass(frozen=True)
class Layout:
    """panels, lines: factors that name panels and lines; looks: of each line's name.

    free: factors that are not the same in a series
    """

    panels: Sequence[str]
    lines: Sequence[str]
    looks: dict[str, Look]
    free: Collection[str]

    @classmethod
    def of(cls, file: StudyFile, pools: Sequence[Pool], apart: Sequence[str]) -> Layout:
        """Return the layout of a study's figures.

        apart: words that have panels of their own; numbers always have
        """
        factors = [pool.factors for pool in pools]
        hidden = {*PLACES, *file.weak} - ({"ppn"} if _tells_apart(pools) else set())
        free = hidden if file.over == "ranks" else {file.over}
        names = varying(factors, hidden | free)
        panels = [n for n in names if n in apart or is_number(n, factors)]
        lines = [n for n in names if n not in panels]
        own = looks(label(each, lines) for each in factors if not is_foreign(each))
        foreign = dict.fromkeys(label(each, lines) for each in factors if is_foreign(each))
        return cls(panels, lines, own | dict(zip(foreign, LIBRARIES, strict=False)), free)

    def series(self, pools: Iterable[Pool]) -> list[list[Pool]]:
        """Return pools that differ only in what is free, from few ranks and little work to much."""
        return _grouped(pools, self.free)

    @property
    def heading(self) -> str:
        """What lines are called at the head of a column."""
        if len(self.lines) == 1:
            return heading(self.lines[0])
        return "gradients" if any(n.startswith("gradient.") for n in self.lines) else "method"

    def line(self, pools: Sequence[Pool]) -> Line:
        """Return pools that differ only in what is on the x axis."""
        name = label(pools[0].factors, self.lines)
        return Line(name, self.looks[name], pools)

    def deal(self, groups: Iterable[Sequence[Pool]], without: Iterable[str] = ()) -> Dealt:
        """Return groups of pools by panel. without: factors that name no panel here."""
        groups = list(groups)
        alone = any(len({pool.ranks for pool in group}) == 1 for group in groups)
        ranks = ["ranks"] if alone and len({group[0].ranks for group in groups}) > 1 else []
        names = [*ranks, *(name for name in self.panels if name not in without)]
        found: dict[str, list[Line]] = {}
        inner = set()
        for group in groups:
            title = label(group[0].factors, names)
            found.setdefault(title, []).append(self.line(group))
            inner.add(label(group[0].factors, names[1:]))
        by_rows = names[:1] == ["size_bytes"] and 1 < len(inner) <= WIDEST
        even = 2 if len(found) == 4 else 3
        return Dealt(found, len(inner) if by_rows else even)


def _tells_apart(pools: Sequence[Pool]) -> bool:
    """Return whether it takes the ranks per node to tell points of equal ranks apart."""
    return any(len(group) > 1 for group in _grouped(pools, ("nodes", "ppn")))


def _grouped(pools: Iterable[Pool], free: Collection[str]) -> list[list[Pool]]:
    found: dict[Any, list[Pool]] = {}
    for pool in pools:
        key = frozenset((k, v) for k, v in pool.factors.items() if k not in free)
        found.setdefault(key, []).append(pool)
    return [sorted(group, key=lambda pool: pool.ranks) for group in found.values()]


def is_foreign(factors: Factors) -> bool:
    """Return whether an all-reduce is another library's."""
    return factors.get("algorithm") in FOREIGN


def drawn(
    line: Line,
    x: Callable[[Pool], float],
    y: Callable[[Pool], Estimate],
    join: Join,
    shift: float = 1.0,
) -> Series:
    """Return a series of pools; shift: factor of x."""
    values = [y(pool) for pool in line.pools]
    return Series(
        line.name,
        line.look,
        [shift * x(pool) for pool in line.pools],
        [each.value for each in values],
        [each.low for each in values],
        [each.high for each in values],
        join,
    )


def side_by_side(index: int, count: int) -> float:
    """Return the factor by which a series is moved aside on a logarithmic axis."""
    step = min(APART, REACH / count)
    return float(2 ** (step * (index - (count - 1) / 2)))

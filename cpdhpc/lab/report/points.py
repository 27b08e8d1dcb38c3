"""Points grouped over seeds, their series, and the names of points and series."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite, nan
from typing import Any, NamedTuple

import numpy as np

from ...methods import BASELINES, MEMCPY
from ..study_data import SHAPE, Array, Factors, Value, but, grouped
from ..study_data.statistics import median_interval, ratio_intervals
from ..study_data.study_file import Point, StudyFile
from . import units
from .figures import LIBRARIES, Join, Series, Style, styles
from .tables import Column

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
DERIVED = ("accumulate", "gradient.accumulate")  # named only if other factors leave it open
SAID = {  # factor: value: its name
    "gradient.aggregator": {"none": "float32"}
}
WIRE = "gradient.wire"
IN_WIRE = {"gradient.aggregator": "lowbit"}  # factor: value that a wire implies


def in_order(names: Iterable[str]) -> list[str]:
    """Return names, each once, the well-known ones first."""
    found = list(dict.fromkeys(names))
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def varying(of: Sequence[Factors], without: Iterable[str] = SHAPE) -> list[str]:
    """Return the factors that are not the same in all, without those that others decide."""
    names = [
        name
        for name in in_order(name for factors in of for name in factors)
        if name not in without and len({factors.get(name) for factors in of}) > 1
    ]
    others = [name for name in names if name not in DERIVED]
    return [name for name in names if name not in DERIVED or not decided(name, others, of)]


def decided(name: str, others: Sequence[str], of: Sequence[Factors]) -> bool:
    """Return whether other factors leave a factor no choice, in any of these points."""
    rest = {tuple(factors.get(other) for other in others) for factors in of}
    all_of = {tuple(factors.get(other) for other in (*others, name)) for factors in of}
    return len(rest) == len(all_of)


def constant(of: Sequence[Factors], without: Iterable[str] = ()) -> dict[str, Value]:
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
    words = [
        said(name, factors[name])
        for name in used
        if isinstance(factors[name], str)
        and not (factors[name] == IN_WIRE.get(name) and WIRE in used)
    ]
    numbers = [said(name, factors[name]) for name in used if not isinstance(factors[name], str)]
    return ", ".join([*numbers, " ".join(filter(None, words))]).removesuffix(", ")


def said(name: str, value: Value) -> str:
    """Return a factor's value for people, numbers with the name of the factor."""
    if name in COUNTED:
        return units.count(int(value), COUNTED[name])
    bare = cell(name, value)
    if isinstance(value, str) or name.endswith("bytes"):
        return bare
    return f"{heading(name)} {bare}"


def cell(name: str, value: Value) -> str:
    """Return a factor's value below its heading."""
    if isinstance(value, str):
        return SAID.get(name, {}).get(value, value)
    if name.endswith("bytes"):
        return units.size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def heading(name: str) -> str:
    return HEADINGS.get(name, name.rpartition(".")[2].replace("_", " "))


SEEDS = ("seed",)


def quotient(one: float, other: float) -> float:
    """Return one / other, NaN if other is 0: the ratio is then unknown, not infinite."""
    return one / other if other else nan


class Estimate(NamedTuple):
    """A quantity and the ends of its interval, NaN for none."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """Return the quantity in another unit."""
        return Estimate(*(factor * each for each in self))

    def inverse(self, of: float) -> Estimate:
        """Return of / quantity, as a rate is of a time."""
        return Estimate(*(quotient(of, each) for each in (self.value, self.high, self.low)))


UNKNOWN = Estimate(nan, nan, nan)


def ratio(one: Array, other: Array, level: float) -> Estimate:
    """Return median of one / median of other; the interval holds with the level or more.

    one, other: float64[samples], s. NaN if a median or an end to divide by is 0.
    """
    longest = max(len(one), len(other))
    times = np.full((2, longest), np.nan)
    times[0, : len(one)], times[1, : len(other)] = one, other
    found = ratio_intervals(times, np.array([-1, 0]), level)
    return Estimate(*(float(c[1]) if isfinite(c[1]) else nan for c in found))


@dataclass(frozen=True)
class SeedGroup:
    """Points that differ only in seeds, or a single point.

    factors: of all of them, without the seed; base: the points that the speed-up is relative to
    """

    factors: Factors
    points: tuple[Point, ...]
    base_points: tuple[Point, ...]
    level: float

    @property
    def ranks(self) -> int:
        return self.points[0].ranks

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(self.factors.get(name, 0)) for name in SHAPE)

    @cached_property
    def samples_s(self) -> Array:
        """float64[repeats], times of all points, without warm-ups."""
        return np.concatenate([point.times_s for point in self.points])

    @cached_property
    def time_s(self) -> Estimate:
        return median(self.samples_s, self.level)

    @cached_property
    def base_s(self) -> Estimate:
        return median(self._base_samples_s, self.level) if self.base_points else UNKNOWN

    @property
    def _base_samples_s(self) -> Array:
        return np.concatenate([point.times_s for point in self.base_points])

    @property
    def is_base(self) -> bool:
        return {p.index for p in self.points} == {p.index for p in self.base_points}

    @cached_property
    def speedup(self) -> Estimate:
        """Ratio of times, by the ratio of work that the file has."""
        if not self.base_points:
            return UNKNOWN
        if self.is_base:
            return Estimate(1.0, 1.0, 1.0)
        first = self.points[0].summary
        base_s = self.base_points[0].summary["median_s"]
        work = quotient(first["speedup"] * first["median_s"], base_s)
        return ratio(self._base_samples_s, self.samples_s, self.level).scaled(work)

    @property
    def efficiency(self) -> Estimate:
        """Speed-up by that of the ideal."""
        return self.speedup.scaled(1 / self.ideal)

    @property
    def ideal(self) -> float:
        """Speed-up at an efficiency of 1: the ratio of ranks; NaN without a base."""
        return self.ranks / self.base_points[0].ranks if self.base_points else nan

    def metric_samples(self, name: str) -> Array:
        """float64[samples], a metric of a program in all points, without warm-ups."""
        found = [point.metrics[name] for point in self.points if name in point.metrics]
        return np.concatenate(found) if found else np.empty(0)

    def metric(self, name: str) -> Estimate:
        """Median of a metric of a program and its interval, unknown without samples."""
        return median(self.metric_samples(name), self.level)

    def outcome(self, name: str) -> Array:
        """float64[seeds], an outcome of each point; NaN for none."""
        return np.array([point.outcomes.get(name, nan) for point in self.points], float)

    def mean(self, name: str) -> float:
        """Mean of an outcome over seeds, NaN if a seed has none."""
        return float(self.outcome(name).mean())

    def exact(self, name: str) -> Estimate:
        """Mean of an outcome that is no sample and has no interval."""
        return Estimate(self.mean(name), nan, nan)


def but_for_gradient(factors: Factors) -> frozenset[Any]:
    """Return the factors but those of gradients: a key for points that differ in these only."""
    return frozenset((k, v) for k, v in factors.items() if not k.startswith("gradient."))


def times_as_fast(base: SeedGroup | None, group: SeedGroup) -> str:
    """Return how many times as fast as a base points are, with the interval; "-" without a base."""
    if base is None or base is group:
        return units.NONE
    return units.with_interval(*ratio(base.samples_s, group.samples_s, group.level))


def timing(file: StudyFile, what: str = "median") -> list[Column[SeedGroup]]:
    """Return the columns of repeats, energy if it is known, the median time and its interval."""
    energy = any(point.outcomes.get("energy_j", nan) >= 0 for point in file.points)
    return [
        Column("repeats", lambda g: str(len(g.samples_s))),
        *([Column("energy\nJ", lambda g: units.digits(g.mean("energy_j")))] if energy else []),
        Column(what, lambda g: units.time(g.time_s.value)),
        Column(
            f"{file.percent} CI",
            lambda g: units.time_interval(g.time_s.low, g.time_s.high, g.time_s.value),
        ),
    ]


def of_factors(
    names: Iterable[str], groups: Sequence[SeedGroup], missing: str = units.NONE
) -> list[Column[SeedGroup]]:
    def value(name: str, group: SeedGroup) -> str:
        return cell(name, group.factors[name]) if name in group.factors else missing

    factors = [group.factors for group in groups]
    return [Column(heading(name), partial(value, name), is_number(name, factors)) for name in names]


def median(samples: Array, level: float) -> Estimate:
    """Return the median of samples and its interval, unknown without a sample."""
    if not len(samples):
        return UNKNOWN
    return Estimate(float(np.median(samples)), *median_interval(samples, level))


def seed_groups(file: StudyFile) -> list[SeedGroup]:
    """Return the points of a study taken together over seeds, in the order of their factors."""
    alike = grouped(file.points, lambda point: but(point.factors, SEEDS))
    found = [_seed_group(file, members) for members in alike.values()]
    names = in_order(name for group in found for name in group.factors)
    first = {  # order of appearance for names, of size for numbers
        name: list(dict.fromkeys(group.factors.get(name, "") for group in found)) for name in names
    }
    return sorted(
        found, key=lambda group: [_order(group.factors.get(n, ""), first[n]) for n in names]
    )


def _seed_group(file: StudyFile, members: list[Point]) -> SeedGroup:
    factors = {k: v for k, v in members[0].factors.items() if k not in SEEDS}
    bases = dict.fromkeys(point.base for point in members if point.base >= 0)
    return SeedGroup(factors, tuple(members), tuple(file.points[i] for i in bases), file.level)


def _order(value: Value, seen: list[Value]) -> float:
    return seen.index(value) if isinstance(value, str) else float(value)


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if isfinite(value)]


WIDEST = 4  # panels beside one another
APART, REACH = 0.06, 0.28  # of a doubling: series beside one another, and all at a place


@dataclass(frozen=True)
class Line:
    """Points that are drawn as one series."""

    name: str
    style: Style
    groups: Sequence[SeedGroup]


@dataclass(frozen=True)
class Panels:
    """The lines of each panel, by the panel's title; columns: of their grid."""

    lines: dict[str, list[Line]]
    columns: int

    @property
    def groups(self) -> list[SeedGroup]:
        return [group for lines in self.lines.values() for line in lines for group in line.groups]


@dataclass(frozen=True)
class Facets:
    """panels, lines: factors that name panels and lines; styles: of each line's name.

    free: factors that are not the same in a series
    every: all points of the study, as those that others are compared with may not be chosen
    """

    panels: Sequence[str]
    lines: Sequence[str]
    styles: dict[str, Style]
    free: Collection[str]
    every: Sequence[SeedGroup] = ()

    @classmethod
    def of(cls, file: StudyFile, groups: Sequence[SeedGroup], apart: Sequence[str]) -> Facets:
        """Return the layout of a study's figures.

        apart: words that have panels of their own; numbers have that words do not decide
        """
        factors = [group.factors for group in groups]
        hidden = {*SHAPE, *file.weak} - ({"ppn"} if tells_apart(groups) else set())
        free = hidden if file.over == "ranks" else {file.over}
        names = varying(factors, hidden | free)
        words = [n for n in names if not is_number(n, factors)]
        # A number that words leave no choice, as each optimizer's rate, stands beside the words.
        numbers = {n for n in names if is_number(n, factors) and not decided(n, words, factors)}
        panels = [n for n in names if n in apart or n in numbers]
        return cls.named(panels, [n for n in names if n not in panels], free, factors)

    @classmethod
    def named(
        cls,
        panels: Sequence[str],
        lines: Sequence[str],
        free: Collection[str],
        factors: Sequence[Factors],
    ) -> Facets:
        """Return a layout from the factors that name panels and lines, of points with factors."""
        baselines = dict.fromkeys(label(each, lines) for each in factors if is_baseline(each))
        known = dict(zip(baselines, LIBRARIES, strict=False))
        names = [label(each, lines) for each in factors if not is_baseline(each)]
        names += [name for name in baselines if name not in known]
        return cls(panels, lines, styles(names) | known, free)

    def series(self, groups: Iterable[SeedGroup]) -> list[list[SeedGroup]]:
        """Return points that differ only in free factors, in order of ranks and work."""
        return _grouped(groups, self.free)

    @property
    def heading(self) -> str:
        if len(self.lines) == 1:
            return heading(self.lines[0])
        return "gradients" if any(n.startswith("gradient.") for n in self.lines) else "method"

    def line(self, groups: Sequence[SeedGroup]) -> Line:
        """Return the line of groups that differ only in the factor of the x axis."""
        name = label(groups[0].factors, self.lines)
        return Line(name, self.styles[name], groups)

    def names(self, groups: Sequence[SeedGroup]) -> list[Column[SeedGroup]]:
        """Return the column with the names of lines; none if no line has a name."""
        if not any(self.line([group]).name for group in groups):
            return []
        return [Column(self.heading, lambda g: self.line([g]).name or units.NONE, numbers=False)]

    def arrange(self, series: Iterable[Sequence[SeedGroup]], without: Iterable[str] = ()) -> Panels:
        """Return series by panel. without: factors that name no panel here."""
        series = list(series)
        alone = any(len({group.ranks for group in each}) == 1 for each in series)
        several = alone and len({each[0].ranks for each in series}) > 1
        ranks = ["ranks"] if several and "ranks" not in (*self.panels, *self.lines) else []
        names = [*ranks, *(name for name in self.panels if name not in without)]
        found = grouped(series, lambda each: label(each[0].factors, names))
        inner = {label(each[0].factors, names[1:]) for each in series}
        by_rows = names[:1] == ["size_bytes"] and 1 < len(inner) <= WIDEST
        even = 2 if len(found) == 4 else 3
        lines = {title: list(map(self.line, each)) for title, each in found.items()}
        return Panels(lines, len(inner) if by_rows else even)


def tells_apart(groups: Sequence[SeedGroup]) -> bool:
    """Return whether it takes the ranks per node to tell points of equal ranks apart."""
    return any(len(each) > 1 for each in _grouped(groups, ("nodes", "ppn")))


def _grouped(groups: Iterable[SeedGroup], free: Collection[str]) -> list[list[SeedGroup]]:
    found = grouped(groups, lambda group: but(group.factors, free)).values()
    return [sorted(each, key=lambda group: group.ranks) for each in found]


def is_baseline(factors: Factors) -> bool:
    """Return whether an all-reduce is another library's, or a copy."""
    return factors.get("algorithm") in (*BASELINES, MEMCPY)


def drawn(
    line: Line,
    x: Callable[[SeedGroup], float],
    y: Callable[[SeedGroup], Estimate],
    join: Join,
    shift: float = 1.0,
) -> Series:
    """Return a series of groups; shift: factor of x."""
    values = [y(group) for group in line.groups]
    return Series(
        line.name,
        line.style,
        [shift * x(group) for group in line.groups],
        [each.value for each in values],
        [each.low for each in values],
        [each.high for each in values],
        join,
        aside=shift,
    )


def side_by_side(index: int, count: int) -> float:
    """Return the factor by which a series is moved aside on a logarithmic axis."""
    step = min(APART, REACH / count)
    return float(2 ** (step * (index - (count - 1) / 2)))

"""What users choose of a study's figures: points, axes, series and panels, by names of factors."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from ...config import ConfigError, parse_bytes, suggest
from ..study_data.factors import SHAPE, Factors, Value
from ..study_data.study_file import OUTCOMES, ReportError, StudyFile
from . import units
from .figures import Axis, Chart, Join, Series, panels_with, spread
from .points import (
    Estimate,
    Layout,
    Line,
    SeedGroup,
    decided,
    drawn,
    heading,
    in_order,
    is_number,
    said,
    side_by_side,
    tells_apart,
    varying,
)
from .scaling import THROUGHPUT, throughput
from .tables import Section

SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
MOST = 24  # series of a panel: more cannot be told apart


@dataclass(frozen=True)
class Choice:
    """Options of report; by, panel: names of factors; where: as "ranks<=8" or "wire=raw,e4m3"."""

    x: str = ""
    y: str = ""
    by: Sequence[str] = ()
    panel: Sequence[str] = ()
    where: Sequence[str] = ()

    @property
    def draws(self) -> bool:
        """Whether figures are chosen, in place of the usual ones."""
        return bool(self.x or self.y or self.by or self.panel)

    def select(self, groups: Sequence[SeedGroup]) -> list[SeedGroup]:
        """Return the points that are asked for. Raises ReportError, also where there is none."""
        test = self.test(groups)
        found = [group for group in groups if test(group.factors)]
        if not found:
            raise ReportError(f"--where {' --where '.join(self.where)}: no point is left")
        return found

    def test(self, groups: Sequence[SeedGroup]) -> Callable[[Factors], bool]:
        """Return whether where takes what has some factors. Raises ReportError as condition."""
        tests = [condition(text, [group.factors for group in groups]) for text in self.where]
        return lambda factors: all(test(factors) for test in tests)


ALL = Choice()


def condition(
    text: str, of: Sequence[Factors], source: str = "--where"
) -> Callable[[Factors], bool]:
    """Return the test that a comparison says, of points that have these factors.

    source: where it is from, with which errors begin. A point that lacks the factor fails it.
    Raises ReportError for a name or a value that none has.
    """
    parts = re.fullmatch(r"\s*([\w.]+)\s*(<=|>=|!=|=|<|>)\s*(.*\S)\s*", text)
    if parts is None:
        raise ReportError(f"{source} {text}: should be NAME=VALUE,..., or with {' '.join(SIGNS)}")
    name, sign, given = parts.groups()
    _check(source, [name], of)
    there = list(dict.fromkeys(factors[name] for factors in of if name in factors))
    values = [_value(f"{source} {text}", name, word, there) for word in given.split(",")]
    for value in values:
        if sign in ("=", "!=") and value not in there:
            raise ReportError(f"{source} {text}: {name} is {_words(name, there)}")
    compared, any_or_all = SIGNS[sign], all if sign == "!=" else any

    def test(factors: Factors) -> bool:
        return name in factors and any_or_all(compared(factors[name], v) for v in values)

    return test


def _words(name: str, values: Iterable[Value]) -> str:
    shown = list(values)
    return ", ".join(map(str, shown[:20])) + (", ..." if len(shown) > 20 else "")


def _value(said_by: str, name: str, word: str, there: Sequence[Value]) -> Value:
    """Return what a word of an option says, of the type that the factor has."""
    if any(isinstance(value, str) for value in there):
        return word
    try:
        return parse_bytes(word) if name.endswith("bytes") else float(word)
    except (ConfigError, ValueError):
        raise ReportError(f"{said_by}: {word} is no number, as {name} is") from None


def _check(option: str, names: Iterable[str], of: Sequence[Factors]) -> None:
    known = in_order(name for factors in of for name in factors)
    for name in names:
        if name not in known:
            raise ReportError(
                f"{option} {name}: is no factor of this study: {suggest(name, known)}"
            )


def chosen(file: StudyFile, groups: Sequence[SeedGroup], choice: Choice) -> Section:
    """Return the section of what is chosen. Raises ReportError for names that are not there."""
    factors = [group.factors for group in groups]
    x = choice.x or file.over
    for option, names in (("--x", [x]), ("--by", choice.by), ("--panel", choice.panel)):
        _check(option, names, factors)
    there = [group for group in groups if x in group.factors]
    layout = _layout(file, there, choice, x)
    alike = [sorted(each, key=lambda g: _order(g, x)) for each in layout.series(there)]
    panels = layout.arrange(alike, without=[x])
    widest = max(len(lines) for lines in panels.lines.values())
    if widest > MOST:
        raise ReportError(
            f"--by: {widest} series in a panel, {MOST} at most: --where takes fewer points, "
            f"--panel parts them, by {' or '.join(layout.lines)}"
        )
    y, value = _quantity(file, choice.y or "time", groups)
    bars = any(isfinite(value(group).low) for group in there)
    notes = [f"Medians of the slowest rank's times{f'; bars: {file.percent} CI' * bars}."]
    if choice.y in OUTCOMES:  # counted or computed, without an interval
        notes = ["Means over seeds."] if any(len(group.points) > 1 for group in there) else []
    names = [] if is_number(x, factors) else [str(group.factors[x]) for group in there]
    places = list(dict.fromkeys(names))

    def place(group: SeedGroup) -> float:
        found = group.factors[x]
        return float(places.index(str(found)) if places else found)

    def series(lines: Sequence[Line]) -> list[Series]:
        beside = [side_by_side(i, len(lines)) if x in SHAPE else 1.0 for i in range(len(lines))]
        join: Join = "none" if places else "guide" if x in SHAPE else "line"
        return [
            drawn(line, place, value, join, shift)
            for line, shift in zip(lines, beside, strict=True)
        ]

    what = y.partition(" / ")[0]
    return Section(
        "Chosen",
        charts=[
            Chart(
                f"{choice.y or 'time'}_by_{x}".replace(".", "_"),
                f"{file.name}: {what} by {heading(x)}",
                notes,
                f"{what.capitalize()} by {heading(x)}.",
                panels_with(
                    {title: series(lines) for title, lines in panels.lines.items()},
                    _axis(x, sorted({place(group) for group in there}), places),
                    lambda values: spread(y, values, "log", 10),
                ),
                panels.columns,
            )
        ],
    )


def _layout(file: StudyFile, groups: Sequence[SeedGroup], choice: Choice, x: str) -> Layout:
    """Return the layout; what varies and is not named parts panels, or series where panels are.

    So no series has two points at a place. What others decide parts nothing.
    """
    factors = [group.factors for group in groups]
    free = {x} | ({*SHAPE, *file.weak} if x in SHAPE else set(file.weak))
    free -= {*choice.by, *choice.panel} - {x}
    names = varying(factors, {*SHAPE, *free})
    shape = ["ppn"] if tells_apart(groups) else []
    shape = shape if x in SHAPE else ["ranks", *shape]
    left = [n for n in (*shape, *names) if n not in (x, *choice.by, *choice.panel)]
    left = [n for n in left if len({f.get(n) for f in factors}) > 1]
    for name in reversed(left):
        others = [n for n in (x, *choice.by, *choice.panel, *left) if n != name]
        if decided(name, others, factors):
            left.remove(name)
            free.add(name)
    words = [] if choice.by or choice.panel else [n for n in left if not is_number(n, factors)]
    to_lines = left if choice.panel else words
    lines = [*choice.by, *to_lines]
    panels = [*choice.panel, *(n for n in left if n not in to_lines)]
    return Layout.named(panels, lines, {*free, *SHAPE} - {*panels, *lines}, factors)


def _order(group: SeedGroup, x: str) -> float:
    value = group.factors.get(x, 0)
    return 0.0 if isinstance(value, str) else float(value)


def _axis(x: str, places: Sequence[float], names: Sequence[str]) -> Axis:
    if names:
        return Axis(heading(x), names=[said(x, name) or name for name in names])
    if min(places) <= 0:
        return Axis(heading(x))
    return Axis(heading(x), "size" if x.endswith("bytes") else "log2", ticks=places)


CALLED = {"error": "relative error"}  # outcomes by another name than theirs


def _quantity(
    file: StudyFile, name: str, groups: Sequence[SeedGroup]
) -> tuple[str, Callable[[SeedGroup], Estimate]]:
    """Return what is on the y axis: its label, and its value for a point."""
    scale, unit = units.time_unit(median(group.time_s.value for group in groups))
    table: dict[str, tuple[str, Callable[[SeedGroup], Estimate]]] = {
        "time": (f"time / {unit}", lambda g: g.time_s.scaled(1 / scale)),
    }
    if file.scaling == THROUGHPUT:
        rate, of_point = throughput(file)
        table[THROUGHPUT] = f"throughput / ({rate})", of_point
    else:
        table["speedup"] = "speed-up", lambda g: g.speedup
        table["efficiency"] = "efficiency / %", lambda g: g.efficiency.scaled(100)
    for outcome, (kind, _, of) in OUTCOMES.items():
        if kind is not str and any(isfinite(g.mean(outcome)) for g in groups):
            said_as = CALLED.get(outcome, outcome.removesuffix("_s").replace("_", " "))
            label = said_as if of == "1" else f"{said_as} / {of}"
            table[outcome] = label, lambda g, outcome=outcome: g.exact(outcome)  # type: ignore[misc]
    if name not in table:
        raise ReportError(f"--y {name}: is not measured in this study: {suggest(name, table)}")
    return table[name]

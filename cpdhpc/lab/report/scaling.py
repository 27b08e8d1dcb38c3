"""Figures of studies over ranks, or over factors that users choose."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, isnan, nan
from statistics import median
from typing import Any

from ...config import ConfigError, parse_bytes, suggest
from ..study_data import SHAPE, Factors, Value, grouped
from ..study_data.study_file import OUTCOMES, ReportError, StudyFile
from . import units
from .figures import BOUND, IDEAL, Axis, Chart, Join, Scale, Series, Style, panels_with, spread
from .fits import Fit, fit, isoefficiency, law_table
from .points import (
    Estimate,
    Facets,
    Line,
    Panels,
    SeedGroup,
    decided,
    drawn,
    heading,
    in_order,
    is_number,
    label,
    of_factors,
    said,
    side_by_side,
    tells_apart,
    timing,
    varying,
)
from .tables import Column, Section, Table, tabulate


def scaling(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> list[Section]:
    """Return the section, none if no series has points at two places."""
    panels = panels_over(file, groups, layout)
    if panels is None:
        return []
    lines = [line for found in panels.lines.values() for line in found]
    drawn = charts(file, panels, _drawn(file, panels))
    tables = [_table(file, groups, layout)]
    if file.scaling == THROUGHPUT:
        return [Section("Throughput", tables=tables, charts=drawn)]
    fits = [found for found in (fit(file, line) for line in lines) if found]
    tables += [law_table(file, layout, fits)] if fits else []
    title = f"{file.scaling.capitalize()} scaling"
    return [Section(title, tables=tables, charts=drawn), *isoefficiency(file, groups)]


def panels_over(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> Panels | None:
    """Return the panels of the series that have points at several places; None without any."""
    over = file.over
    found = [each for each in layout.series(groups) if len({g.factors[over] for g in each}) > 1]
    return layout.arrange(found, without=[over]) if found else None


def _table(file: StudyFile, groups: Sequence[SeedGroup], layout: Facets) -> Table:
    """Return the table of throughputs, or of speed-ups."""
    _, *times = timing(file)
    over = [file.over] if file.over != "ranks" else []  # which has a column in any case
    columns: list[Column[SeedGroup]] = [
        *of_factors([*over, *layout.panels, *file.weak], groups),
        *layout.names(groups),
        Column("ranks", lambda g: str(g.ranks)),
        *times,
    ]
    if file.scaling == THROUGHPUT:
        unit, rate = throughput(file)
        columns += [
            Column(f"throughput\n{unit}", lambda g: units.digits(rate(g).value)),
            Column(f"{file.percent} CI", lambda g: units.interval(*rate(g)[1:])),
        ]
        title, caption = "Throughput", f"Throughput: {heading(file.over)} / time. "
    else:
        columns += [
            Column("speed-up", lambda g: units.digits(g.speedup.value)),
            Column(
                f"{file.percent} CI",
                lambda g: units.NONE if g.is_base else units.interval(*g.speedup[1:]),
            ),
            Column("effi-\nciency %", lambda g: units.digits(100 * g.efficiency.value)),
            Column("baseline", _base, numbers=False),
        ]
        title, caption = "Scaling", f"{GAIN[file.scaling]} Baseline: {file.base_rule}; its time is "
        caption += f"in the last column. {_weak(file)}"
    caption += f"Times: median of {file.times}."
    if title == "Scaling":
        caption += " A speed-up's interval includes those of both medians."
    ordered = [group for each in layout.series(groups) for group in each]
    return tabulate(title, columns, ordered, caption)


THROUGHPUT = "throughput"
RATES = {  # work: unit of its throughput, and how much of it that is
    "size_bytes": ("GB/s", 1e9),
    "train.batch": ("samples/s", 1.0),
}


def throughput(file: StudyFile) -> tuple[str, Callable[[SeedGroup], Estimate]]:
    """Return the unit of work by time, and its value for a point."""
    work = str(file.attributes["work"])
    unit, one = RATES.get(work, (f"{heading(work)}/s", 1.0))

    def value(group: SeedGroup) -> Estimate:
        return group.time_s.inverse(float(group.factors[work]) / one)

    return unit, value


def _base(group: SeedGroup) -> str:
    if not group.base_points:
        return "none"
    return f"{units.count(group.base_points[0].ranks, 'rank')}, {units.time(group.base_s.value)}"


GAIN = {
    "strong": "Speed-up: time of the baseline / time; efficiency: speed-up / ratio of ranks.",
    "weak": "Speed-up: work per time / the baseline's; efficiency: speed-up / ratio of ranks.",
}


def _weak(file: StudyFile) -> str:
    return "".join(f"Per rank: {said(k, v)}. " for k, v in file.weak.items())


@dataclass(frozen=True)
class Quantity:
    """A quantity to draw; reference: of comparison, with the name in said, "" for none.

    note: how it comes about, "" for medians of times
    fit: of a series, the law fitted to it, if there is one
    """

    name: str
    axis: str
    value: Callable[[SeedGroup], Estimate]
    reference: Callable[[SeedGroup], float]
    scale: Callable[[str, Sequence[float]], Axis]
    style: Style = IDEAL
    said: str = "ideal"
    note: str = ""
    fit: Callable[[Line], Fit | None] = lambda line: None


def charts(file: StudyFile, panels: Panels, quantities: Sequence[Quantity]) -> list[Chart]:
    """Return the figures of some quantities over ranks, or over the study's other factor."""
    return [_chart(file, panels, quantity) for quantity in quantities]


def _drawn(file: StudyFile, panels: Panels) -> list[Quantity]:
    """Return the quantities that a study's figures show over ranks."""
    known = _known(file, panels.groups)
    time = known.pop("time")
    if not _grows(panels.groups):  # then it is the same as the speed-up
        known.pop("efficiency", None)
    if any(g.mean("energy_j") > 0 for g in panels.groups):
        known["energy"] = Quantity(
            "energy",
            "energy of a repeat / J",
            lambda g: g.exact("energy_j"),
            lambda g: nan,
            from_zero,
            said="",
            note="Of all nodes: means over repeats",
        )
    return [*known.values(), *([time] if file.scaling == "weak" else [])]


def _grows(groups: Iterable[SeedGroup]) -> bool:
    return any(g.base_points and g.base_points[0].ranks < g.ranks for g in groups)


def _known(file: StudyFile, groups: Sequence[SeedGroup]) -> dict[str, Quantity]:
    """Return the time, and the throughput, or the speed-up and the efficiency, by name."""
    scale, unit = units.time_unit(median(group.time_s.value for group in groups))
    found = [
        Quantity(
            "time",
            f"time / {unit}",
            lambda g: g.time_s.scaled(1 / scale),
            lambda g: g.mean("bound_s") / scale,
            from_zero,
            BOUND,
            "bound",
        )
    ]
    if file.scaling == THROUGHPUT:
        rate, value = throughput(file)
        axis = f"throughput / ({rate})"
        found.append(Quantity(THROUGHPUT, axis, value, lambda g: nan, from_zero, said=""))
    else:
        said = "ideal" if _grows(groups) else "baseline"
        found += [
            Quantity(
                "speedup",
                "speed-up",
                lambda g: g.speedup,
                lambda g: g.ideal,
                doublings,
                said=said,
                fit=partial(fit, file),
            ),
            Quantity(
                "efficiency",
                "efficiency / %",
                lambda g: g.efficiency.scaled(100),
                lambda g: 100.0 if g.base_points else nan,
                from_zero,
            ),
        ]
    return {each.name: each for each in found}


def doublings(name: str, values: Sequence[float]) -> Axis:
    """Return a logarithmic axis to base 2, if values are far enough apart."""
    return spread(name, values, "log2", 1.9)


def from_zero(name: str, values: Sequence[float]) -> Axis:
    """Return an axis that begins at 0, unless values are very far apart."""
    return spread(name, values, "log", 30)


def _chart(file: StudyFile, panels: Panels, quantity: Quantity) -> Chart:
    what = quantity.axis.partition(" /")[0]
    by = "by size" if file.scaling == THROUGHPUT else f"{file.scaling} scaling"
    relative = quantity.style is IDEAL and quantity.said
    base = f" Baseline: {_bases(file, panels.groups)}." if relative else ""
    has_bars = any(isfinite(quantity.value(group).low) for group in panels.groups)
    bars = f", bars: {file.percent} CI" if has_bars else ""
    return Chart(
        quantity.name,
        f"{file.name}: {what}, {by}",
        [f"{_weak(file)}{quantity.note or f'Medians of {file.times}'}{bars}.{base}"],
        f"{what.capitalize()} over {heading(file.over)}. "
        + (GUIDE if file.over == "ranks" else ""),
        panels_with(
            {title: _series(lines, quantity, file.over) for title, lines in panels.lines.items()},
            _places(panels, file.over),
            partial(quantity.scale, quantity.axis),
        ),
        panels.columns,
    )


def _places(panels: Panels, over: str) -> Axis:
    scale: Scale = "size" if over.endswith("bytes") else "log2"
    ticks = sorted({float(group.factors[over]) for group in panels.groups})
    return Axis(heading(over), scale, ticks=ticks)


def _bases(file: StudyFile, groups: Sequence[SeedGroup]) -> str:
    """Return the base, or the common part of the bases of all points."""
    bases = {_base(group) for group in groups}
    ranks = {base.partition(",")[0] for base in bases}
    if len(bases) == 1:
        return bases.pop()
    return f"{ranks.pop() if len(ranks) == 1 else file.base_rule}; times: in the table"


GUIDE = (
    "Dotted lines lead the eye only: nothing was measured between the points, and points at the "
    "same number of ranks are drawn side by side. Thin lines are the law, if it fits."
)


def _series(lines: Sequence[Line], quantity: Quantity, over: str) -> list[Series]:
    def place(group: SeedGroup) -> float:
        return float(group.factors[over])

    if over != "ranks":
        return [drawn(line, place, quantity.value, "line") for line in lines]
    count = len(lines)
    shown = [
        drawn(line, place, quantity.value, "guide", side_by_side(i, count))
        for i, line in enumerate(lines)
    ]
    shown += [found.series() for found in map(quantity.fit, lines) if found and found.fits]
    references = {
        tuple((place(group), quantity.reference(group)) for group in line.groups)
        for line in lines
        if quantity.said
    }
    for points in sorted(references):
        x, y = zip(*points, strict=True)
        if not any(map(isnan, y)):
            shown.append(Series(quantity.said, quantity.style, x, y))
    return shown


SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
MOST = 24  # series of a panel: more cannot be distinguished


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
        """Return the points that are asked for. Raises ReportError, also if there is none."""
        test = self.test(groups)
        found = [group for group in groups if test(group.factors)]
        if not found:
            raise ReportError(f"--where {' --where '.join(self.where)}: no point is left")
        return found

    def test(self, groups: Sequence[SeedGroup]) -> Callable[[Factors], bool]:
        """Return a function: do factors meet all conditions? Raises ReportError as condition."""
        tests = [condition(text, [group.factors for group in groups]) for text in self.where]
        return lambda factors: all(test(factors) for test in tests)


ALL = Choice()


def condition(
    text: str, of: Sequence[Factors], source: str = "--where"
) -> Callable[[Factors], bool]:
    """Return the test that a comparison says, of points that have these factors.

    source: option or file, with which errors begin. A point that lacks the factor fails it.
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
    """Return the value of a word of an option, of the factor's type."""
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
    """Return the section of the chosen figure. Raises ReportError for unknown names."""
    factors = [group.factors for group in groups]
    x = choice.x or file.over
    for option, names in (("--x", [x]), ("--by", choice.by), ("--panel", choice.panel)):
        _check(option, names, factors)
    there = [group for group in groups if x in group.factors]
    names = [] if is_number(x, factors) else [str(group.factors[x]) for group in there]
    names = list(dict.fromkeys(names))

    def place(group: SeedGroup) -> float:
        found = group.factors[x]
        return float(names.index(str(found)) if names else found)

    layout = _layout(file, there, choice, x)
    panels = layout.arrange((sorted(s, key=place) for s in layout.series(there)), without=[x])
    widest = max(len(lines) for lines in panels.lines.values())
    if widest > MOST:
        raise ReportError(
            f"--by: {widest} series in a panel, {MOST} at most: --where takes fewer points, "
            f"--panel parts them, by {' or '.join(layout.lines)}"
        )
    y, value = _quantity(file, choice.y or "time", groups)
    bars = any(isfinite(value(group).low) for group in there)
    of = choice.y if choice.y in file.metrics else file.times
    notes = [f"Medians of {of}{f'; bars: {file.percent} CI' * bars}."]
    if choice.y in OUTCOMES and choice.y not in file.metrics:  # counted, without an interval
        notes = ["Means over seeds."] * any(len(group.points) > 1 for group in there)
    notes += _further(layout, there)
    join: Join = "none" if names else "guide" if x in SHAPE else "line"
    series = {}
    for title, lines in panels.lines.items():
        beside = [side_by_side(i, len(lines)) if x in SHAPE else 1.0 for i in range(len(lines))]
        pairs = zip(lines, beside, strict=True)
        series[title] = [drawn(line, place, value, join, shift) for line, shift in pairs]
    what, places = y.partition(" / ")[0], sorted({place(group) for group in there})
    chart = Chart(
        f"{choice.y or 'time'}_by_{x}".replace(".", "_"),
        f"{file.name}: {what} by {heading(x)}",
        notes,
        f"{what.capitalize()} by {heading(x)}.",
        panels_with(series, _axis(x, places, names), partial(spread, y, scale="log", apart=10)),
        panels.columns,
    )
    return Section("Chosen", charts=[chart])


def _further(layout: Facets, groups: Sequence[SeedGroup]) -> list[str]:
    """Return a note for each word that is not in the names of series, but that these decide."""
    of, notes = [group.factors for group in groups], []
    lines = grouped(of, lambda factors: label(factors, layout.lines))
    for name in varying(of, {*SHAPE, *layout.panels, *layout.lines}):
        words = {line: str(some[0].get(name, "")) for line, some in lines.items()}
        by_word = grouped(words, words.__getitem__).items()
        told = [f"{word} for {', '.join(some)}" for word, some in by_word if word]
        if len(told) > 1 and not is_number(name, of) and decided(name, layout.lines, of):
            notes.append(f"{heading(name).capitalize()}: {'; '.join(told)}.")
    return notes


def _layout(file: StudyFile, groups: Sequence[SeedGroup], choice: Choice, x: str) -> Facets:
    """Return the layout; factors not named separate panels, or series if panels are named.

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
    return Facets.named(panels, lines, {*free, *SHAPE} - {*panels, *lines}, factors)


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
    """Return the label of the y axis, and the function from a point to its value."""
    table = {key: (each.axis, each.value) for key, each in _known(file, groups).items()}
    for outcome, (kind, _, of) in OUTCOMES.items():
        if kind is not str and any(isfinite(g.mean(outcome)) for g in groups):
            said_as = CALLED.get(outcome, outcome.removesuffix("_s").replace("_", " "))
            label = said_as if of == "1" else f"{said_as} / {of}"
            table[outcome] = label, partial(SeedGroup.exact, name=outcome)
    for metric, row in file.metrics.items():
        label = metric if row["unit"] == "1" else f"{metric} / {row['unit']}"
        table[metric] = label, partial(SeedGroup.metric, name=metric)
    if name not in table:
        raise ReportError(f"--y {name}: is not measured in this study: {suggest(name, table)}")
    return table[name]

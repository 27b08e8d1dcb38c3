"""Scaling: speed-up and efficiency over ranks, with the laws that are fitted to them.

Where sizes are compared at equal ranks, the throughput in place of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite, isnan, nan
from statistics import median

from ..study_data.study_file import StudyFile
from . import units
from .figures import BOUND, IDEAL, Axis, Chart, Scale, Series, Style, panels_with, spread
from .laws import Fit, fit, isoefficiency, law_table
from .points import (
    Estimate,
    Layout,
    Line,
    Panels,
    SeedGroup,
    drawn,
    heading,
    of_factors,
    said,
    side_by_side,
    timing,
)
from .tables import Column, Section, Table, tabulate


def scaling(file: StudyFile, groups: Sequence[SeedGroup], layout: Layout) -> list[Section]:
    """Return the section, none where no series has points at two places."""
    panels = panels_over(file, groups, layout)
    if panels is None:
        return []
    lines = [line for found in panels.lines.values() for line in found]
    drawn = charts(file, panels, _quantities(file, panels))
    if file.scaling == THROUGHPUT:
        return [Section("Throughput", tables=[_rates(file, groups, layout)], charts=drawn)]
    fits = [found for found in (fit(file, line) for line in lines) if found]
    return [
        Section(
            f"{file.scaling.capitalize()} scaling",
            tables=[
                _table(file, groups, layout),
                *([law_table(file, layout, fits)] if fits else []),
            ],
            charts=drawn,
        ),
        *isoefficiency(file, groups),
    ]


def panels_over(file: StudyFile, groups: Sequence[SeedGroup], layout: Layout) -> Panels | None:
    """Return the panels of the series that have points at several places; None without any."""
    over = file.over
    found = [each for each in layout.series(groups) if len({g.factors[over] for g in each}) > 1]
    return layout.arrange(found, without=[over]) if found else None


def _table(file: StudyFile, groups: Sequence[SeedGroup], layout: Layout) -> Table:
    def interval(group: SeedGroup) -> str:
        speedup = group.speedup
        return units.NONE if group.is_base else units.interval(speedup.low, speedup.high)

    columns: list[Column[SeedGroup]] = [
        *_places_and_times(file, groups, layout),
        Column("speed-up", lambda g: units.digits(g.speedup.value)),
        Column(f"{file.percent} CI", interval),
        Column("effi-\nciency %", lambda g: units.digits(100 * g.efficiency.value)),
        Column("base", _base, numbers=False),
    ]
    ordered = [group for each in layout.series(groups) for group in each]
    return tabulate("Scaling", columns, ordered, _caption(file))


def _places_and_times(
    file: StudyFile, groups: Sequence[SeedGroup], layout: Layout
) -> list[Column[SeedGroup]]:
    """Return the columns of what points are, and of their times."""
    _, *times = timing(file)
    over = [file.over] if file.over != "ranks" else []  # which has a column in any case
    return [
        *of_factors([*over, *layout.panels, *file.weak], groups),
        *layout.names(groups),
        Column("ranks", lambda g: str(g.ranks)),
        *times,
    ]


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


def _rates(file: StudyFile, groups: Sequence[SeedGroup], layout: Layout) -> Table:
    unit, value = throughput(file)

    def interval(group: SeedGroup) -> str:
        return units.interval(value(group).low, value(group).high)

    columns: list[Column[SeedGroup]] = [
        *_places_and_times(file, groups, layout),
        Column(f"throughput\n{unit}", lambda g: units.digits(value(g).value)),
        Column(f"{file.percent} CI", interval),
    ]
    ordered = [group for each in layout.series(groups) for group in each]
    caption = f"Throughput: {heading(file.over)} / time. Times: median of the slowest rank's."
    return tabulate("Throughput", columns, ordered, caption)


def _throughput(file: StudyFile) -> Quantity:
    unit, value = throughput(file)
    return Quantity(THROUGHPUT, f"throughput / ({unit})", value, lambda g: nan, from_zero, said="")


def _base(group: SeedGroup) -> str:
    if not group.base_points:
        return "none"
    return f"{units.count(group.base_points[0].ranks, 'rank')}, {units.time(group.base_s.value)}"


GAIN = {
    "strong": "Speed-up: time of the base / time; efficiency: speed-up / ratio of ranks.",
    "weak": "Speed-up: work per time / that of the base; efficiency: speed-up / ratio of ranks.",
}


def _caption(file: StudyFile) -> str:
    return (
        f"{GAIN[file.scaling]} Base: {file.base_rule}; its absolute time is in the last column. "
        + _weak(file)
        + "Times: median of the slowest rank's. The interval of a speed-up takes in both medians'."
    )


def _weak(file: StudyFile) -> str:
    return "".join(f"Per rank: {said(k, v)}. " for k, v in file.weak.items())


@dataclass(frozen=True)
class Quantity:
    """What is drawn; reference: what it is compared with, called as said, "" if not.

    note: how it comes about; fit: of a series, the law fitted to it, if there is one
    """

    name: str
    axis: str
    value: Callable[[SeedGroup], Estimate]
    reference: Callable[[SeedGroup], float]
    scale: Callable[[str, Sequence[float]], Axis]
    style: Style = IDEAL
    said: str = "ideal"
    note: str = "Medians of the slowest rank's times"
    fit: Callable[[Line], Fit | None] = lambda line: None


def charts(file: StudyFile, panels: Panels, quantities: Sequence[Quantity]) -> list[Chart]:
    """Return the figures of some quantities over ranks, or what else the study has there."""
    return [_chart(file, panels, quantity) for quantity in quantities]


def _quantities(file: StudyFile, panels: Panels) -> list[Quantity]:
    grows = any(g.base_points and g.base_points[0].ranks < g.ranks for g in panels.groups)
    speedup = Quantity(
        "speedup",
        "speed-up",
        lambda g: g.speedup,
        lambda g: g.ideal,
        doublings,
        said="ideal" if grows else "base",
        fit=partial(fit, file),
    )
    found = [_throughput(file) if file.scaling == THROUGHPUT else speedup]
    if grows and file.scaling != THROUGHPUT:  # otherwise it is the same
        found.append(
            Quantity(
                "efficiency",
                "efficiency / %",
                lambda g: g.efficiency.scaled(100),
                lambda g: 100.0 if g.base_points else nan,
                from_zero,
            )
        )
    if any(g.mean("energy_j") > 0 for g in panels.groups):
        found.append(
            Quantity(
                "energy",
                "energy of a repeat / J",
                lambda g: g.exact("energy_j"),
                lambda g: nan,
                from_zero,
                said="",
                note="Of all nodes: means over repeats",
            )
        )
    return found + ([_time(panels)] if file.scaling == "weak" else [])


def _time(panels: Panels) -> Quantity:
    scale, unit = units.time_unit(median(group.time_s.value for group in panels.groups))
    return Quantity(
        "time",
        f"time / {unit}",
        lambda group: group.time_s.scaled(1 / scale),
        lambda group: group.mean("bound_s") / scale,
        from_zero,
        BOUND,
        "bound",
    )


def doublings(name: str, values: Sequence[float]) -> Axis:
    """Return a logarithmic axis to base 2, where values are far enough apart."""
    return spread(name, values, "log2", 1.9)


def from_zero(name: str, values: Sequence[float]) -> Axis:
    """Return an axis that begins at 0, unless values are very far apart."""
    return spread(name, values, "log", 30)


def _chart(file: StudyFile, panels: Panels, quantity: Quantity) -> Chart:
    what = quantity.axis.partition(" /")[0]
    by = "by size" if file.scaling == THROUGHPUT else f"{file.scaling} scaling"
    relative = quantity.style is IDEAL and quantity.said
    base = f" Base: {_bases(file, panels.groups)}." if relative else ""
    has_bars = any(isfinite(quantity.value(group).low) for group in panels.groups)
    bars = f", bars: {file.percent} CI" if has_bars else ""
    return Chart(
        quantity.name,
        f"{file.name}: {what}, {by}",
        [f"{_weak(file)}{quantity.note}{bars}.{base}"],
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
    """Return the base, or what the bases of all points have in common."""
    bases = {_base(group) for group in groups}
    ranks = {base.partition(",")[0] for base in bases}
    if len(bases) == 1:
        return bases.pop()
    return f"{ranks.pop() if len(ranks) == 1 else file.base_rule}; times: in the table"


GUIDE = (
    "Dotted lines lead the eye only: nothing was measured between the points, and points at the "
    "same number of ranks are drawn side by side. Thin lines are the law, where it fits."
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

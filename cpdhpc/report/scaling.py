"""Speed-up and efficiency over ranks, or over the work where throughput is what scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from statistics import median

from ..study.study_file import StudyFile
from . import units
from .figures import BOUND, IDEAL, Axis, Chart, Look, Scale, Series, panels_with, spread
from .points import (
    Dealt,
    Estimate,
    Layout,
    Line,
    Pool,
    cell,
    drawn,
    heading,
    is_number,
    said,
    side_by_side,
)
from .tables import Column, Section, Table


def scaling(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> list[Section]:
    """Return the section, none where no series has points at two places."""
    dealt = dealt_over(file, pools, layout)
    if dealt is None:
        return []
    return [
        Section(
            f"{file.scaling.capitalize()} scaling",
            tables=[_table(file, pools, layout)],
            charts=charts(file, dealt, _kinds(file, dealt)),
        )
    ]


def dealt_over(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> Dealt | None:
    """Return the panels of the series that have points at several places; None without any."""
    over = file.over
    found = [
        each for each in layout.series(pools) if len({pool.factors[over] for pool in each}) > 1
    ]
    return layout.deal(found, without=[over]) if found else None


def _table(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> Table:
    names = [*layout.panels, *file.weak]
    factors = [pool.factors for pool in pools]
    columns = [
        *(Column(heading(name), is_number(name, factors)) for name in names),
        Column(layout.heading, numbers=False),
        Column("ranks"),
        Column("median"),
        Column(f"{file.percent} CI"),
        Column("speed-up"),
        Column(f"{file.percent} CI"),
        Column("effi-\nciency %"),
        Column("base", numbers=False),
    ]
    rows = [_row(pool, names, layout) for each in layout.series(pools) for pool in each]
    return Table("Scaling", columns, rows, _caption(file))


def _row(pool: Pool, names: Sequence[str], layout: Layout) -> list[str]:
    time = pool.time_s
    return [
        *(cell(name, pool.factors[name]) if name in pool.factors else units.NONE for name in names),
        layout.line([pool]).name or units.NONE,
        str(pool.ranks),
        units.time(time.value),
        units.time_interval(time.low, time.high, time.value),
        units.digits(pool.speedup.value),
        units.NONE if pool.is_base else units.interval(pool.speedup.low, pool.speedup.high),
        units.digits(100 * pool.efficiency.value),
        _base(pool),
    ]


def _base(pool: Pool) -> str:
    if not pool.base_points:
        return "none"
    ranks = pool.base_points[0].ranks
    return f"{units.count(ranks, 'rank')}, {units.time(pool.base_s.value)}"


GAIN = {
    "strong": "Speed-up: time of the base / time; efficiency: speed-up / ratio of ranks.",
    "weak": "Speed-up: work per time / that of the base; efficiency: speed-up / ratio of ranks.",
    "throughput": "Speed-up and efficiency: work per time / that of the base.",
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
class Kind:
    """A quantity that is drawn; reference: what it is compared with, called as said, "" if not."""

    name: str
    axis: str
    quantity: Callable[[Pool], Estimate]
    reference: Callable[[Pool], float]
    scale: Callable[[str, Sequence[float]], Axis]
    look: Look = IDEAL
    said: str = "ideal"


def charts(file: StudyFile, dealt: Dealt, kinds: Sequence[Kind]) -> list[Chart]:
    """Return the figures of some quantities over ranks, or what else the study has there."""
    return [
        _chart(file, part, kind, name) for kind in kinds for name, part in dealt.figures(kind.name)
    ]


def _kinds(file: StudyFile, dealt: Dealt) -> list[Kind]:
    pools = [pool for lines in dealt.panels.values() for line in lines for pool in line.pools]
    grows = any(pool.base_points and pool.base_points[0].ranks < pool.ranks for pool in pools)
    ideal = "ideal" if grows else "base"
    kinds = [Kind("speedup", "speed-up", _speedup, _ideal_speedup, doublings, said=ideal)]
    if grows:  # otherwise it is the same
        kinds.append(
            Kind("efficiency", "efficiency / %", _efficiency, _ideal_efficiency, from_zero)
        )
    if file.scaling == "weak":
        kinds.append(_time_kind(dealt))
    return kinds


def _speedup(pool: Pool) -> Estimate:
    return pool.speedup


def _efficiency(pool: Pool) -> Estimate:
    return pool.efficiency.scaled(100)


def _ideal_speedup(pool: Pool) -> float:
    return pool.speedup.value / pool.efficiency.value


def _ideal_efficiency(pool: Pool) -> float:
    return 100.0 if pool.base_points else nan


def _time_kind(dealt: Dealt) -> Kind:
    pools = [pool for lines in dealt.panels.values() for line in lines for pool in line.pools]
    scale, unit = units.time_unit(median(pool.time_s.value for pool in pools))
    return Kind(
        "time",
        f"time / {unit}",
        lambda pool: pool.time_s.scaled(1 / scale),
        lambda pool: pool.mean("bound_s") / scale,
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


def _chart(file: StudyFile, dealt: Dealt, kind: Kind, name: str) -> Chart:
    what = kind.axis.partition(" /")[0]
    pools = [pool for lines in dealt.panels.values() for line in lines for pool in line.pools]
    base = f" Base: {_bases(file, pools)}." if kind.look is IDEAL and kind.said else ""
    return Chart(
        name,
        f"{file.name}: {what}, {file.scaling} scaling",
        [f"{_weak(file)}Medians of the slowest rank's times, bars: {file.percent} CI.{base}"],
        f"{what.capitalize()} over {heading(file.over)}. "
        + (GUIDE if file.over == "ranks" else ""),
        panels_with(
            {title: _series(lines, kind, file.over) for title, lines in dealt.panels.items()},
            _places(dealt, file.over),
            partial(kind.scale, kind.axis),
        ),
        dealt.columns,
    )


def _places(dealt: Dealt, over: str) -> Axis:
    pools = [pool for lines in dealt.panels.values() for line in lines for pool in line.pools]
    scale: Scale = "size" if over.endswith("bytes") else "log2"
    return Axis(heading(over), scale, ticks=sorted({float(pool.factors[over]) for pool in pools}))


def _bases(file: StudyFile, pools: Sequence[Pool]) -> str:
    """Return the base, or what the bases of all pools have in common."""
    bases = {_base(pool) for pool in pools}
    ranks = {base.partition(",")[0] for base in bases}
    if len(bases) == 1:
        return bases.pop()
    return f"{ranks.pop() if len(ranks) == 1 else file.base_rule}; times: in the table"


GUIDE = (
    "Dotted lines lead the eye only: nothing was measured between the points, and points at the "
    "same number of ranks are drawn side by side."
)


def _series(lines: Sequence[Line], kind: Kind, over: str) -> list[Series]:
    def place(pool: Pool) -> float:
        return float(pool.factors[over])

    if over != "ranks":
        return [drawn(line, place, kind.quantity, "line") for line in lines]
    count = len(lines)
    shown = [
        drawn(line, place, kind.quantity, "guide", side_by_side(i, count))
        for i, line in enumerate(lines)
    ]
    references = {
        tuple((place(p), kind.reference(p)) for p in line.pools) for line in lines if kind.said
    }
    for points in sorted(references):
        x, y = zip(*points, strict=True)
        if not any(map(isnan, y)):
            shown.append(Series(kind.said, kind.look, x, y))
    return shown

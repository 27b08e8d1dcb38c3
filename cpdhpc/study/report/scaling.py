"""Speed-up and efficiency over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median

from . import text
from .chart import Chart
from .deal import Dealt, Line, deal, drawn, numbered, side_by_side
from .look import BOUND, IDEAL, Look
from .axis import Axis, spread
from .panel import Panel
from .series import Series
from .pool import Estimate, Pool, label, series, varying
from .study_file import PLACES, StudyFile
from .table import Column, Section, Table


def scaling(file: StudyFile, pools: Sequence[Pool], apart: Sequence[str]) -> list[Section]:
    """Return the section, none where no series has two numbers of ranks.

    apart: the factors that have panels of their own
    """
    found = [each for each in series(pools) if len({pool.ranks for pool in each}) > 1]
    if not found:
        return []
    names = varying(pools, {*PLACES, *file.weak})
    dealt = deal(found, [n for n in names if n in apart], [n for n in names if n not in apart])
    title = f"{file.scaling.capitalize()} scaling"
    return [Section(title, tables=[_table(file, pools, names)], charts=_charts(file, dealt))]


def _table(file: StudyFile, pools: Sequence[Pool], names: Sequence[str]) -> Table:
    percent = f"{100 * file.level:g} %"
    columns = [
        *(Column(name.rpartition(".")[2].replace("_", "\n"), numbers=False) for name in names),
        *(Column(name.replace("_", "\n")) for name in file.weak),
        Column("ranks"),
        Column("median"),
        Column(f"{percent} CI"),
        Column("speed-up"),
        Column(f"{percent} CI"),
        Column("effi-\nciency %"),
        Column("base", numbers=False),
    ]
    rows = [_row(file, pool, names) for each in series(pools) for pool in each]
    return Table("Scaling", columns, rows, _caption(file))


def _row(file: StudyFile, pool: Pool, names: Sequence[str]) -> list[str]:
    time = pool.time_s
    return [
        *(label(pool.factors, [name]) or text.NONE for name in names),
        *(label(pool.factors, [name]) or text.NONE for name in file.weak),
        str(pool.ranks),
        text.time(time.value),
        text.time_interval(time.low, time.high, time.value),
        text.digits(pool.speedup.value),
        text.NONE if pool.is_base else text.interval(pool.speedup.low, pool.speedup.high),
        text.digits(100 * pool.efficiency.value),
        _base(pool),
    ]


def _base(pool: Pool) -> str:
    if not pool.base_points:
        return "none"
    ranks = pool.base_points[0].ranks
    return f"{text.count(ranks, 'rank')}, {text.time(pool.base_s.value)}"


def base_rule(file: StudyFile) -> str:
    """Return what speed-up is relative to, in words."""
    return str(file.rules.get("base_rule", file.rules.get("base", "the base of each series")))


def _caption(file: StudyFile) -> str:
    weak = ", ".join(f"{name} = {value} a rank" for name, value in file.weak.items())
    return (
        "Median of the times of the slowest rank, without warm-ups. "
        f"Base of the speed-up: {base_rule(file)}; its absolute time is in the last column. "
        + (f"Weak scaling: {weak}. " if weak else "")
        + "Intervals of a speed-up hold the quotients of all values in both intervals."
    )


def _charts(file: StudyFile, dealt: Dealt) -> list[Chart]:
    kinds = [
        Kind("speedup", "speed-up", lambda pool: pool.speedup, _ideal_speedup, _doublings),
        Kind("efficiency", "efficiency / %", _efficiency, _ideal_efficiency, _from_zero),
    ]
    if file.scaling == "weak":
        kinds.append(_time_kind(dealt))
    return [
        _chart(file, part, kind, numbered(kind.name, index, len(dealt.parts())))
        for kind in kinds
        for index, part in enumerate(dealt.parts())
    ]


@dataclass(frozen=True)
class Kind:
    """A quantity that is drawn over ranks; reference: what it is compared with, by ranks."""

    name: str
    axis: str
    quantity: Callable[[Pool], Estimate]
    reference: Callable[[Pool], float]
    scale: Callable[[str, Sequence[float]], Axis]
    look: Look = IDEAL
    said: str = "ideal"


def _efficiency(pool: Pool) -> Estimate:
    return pool.efficiency.scaled(100)


def _ideal_speedup(pool: Pool) -> float:
    return pool.speedup.value / pool.efficiency.value


def _ideal_efficiency(pool: Pool) -> float:
    return 100.0 if pool.base_points else nan


def _time_kind(dealt: Dealt) -> Kind:
    pools = [pool for lines in dealt.panels.values() for line in lines for pool in line.pools]
    scale, unit = text.time_unit(median(pool.time_s.value for pool in pools))
    return Kind(
        "time",
        f"time / {unit}",
        lambda pool: pool.time_s.scaled(1 / scale),
        lambda pool: pool.mean("bound_s") / scale,
        _from_zero,
        BOUND,
        "bound",
    )


def _chart(file: StudyFile, dealt: Dealt, kind: Kind, name: str) -> Chart:
    what = kind.axis.partition(" /")[0]
    firsts = [line.pools[0] for lines in dealt.panels.values() for line in lines]
    bases = sorted({_base(pool) for pool in firsts})
    base = bases[0] if len(bases) == 1 else f"{base_rule(file)}; its times are in the table"
    return Chart(
        name,
        f"{file.name}: {what}, {file.scaling} scaling",
        [f"Median of the slowest rank's times; bars: {100 * file.level:g} % CI. Base: {base}."],
        f"{what.capitalize()} over ranks. Dotted lines lead the eye only: nothing was measured "
        "between the points, and points at the same number of ranks are drawn side by side.",
        [_panel(title, lines, kind) for title, lines in dealt.panels.items()],
    )


def _panel(title: str, lines: Sequence[Line], kind: Kind) -> Panel:
    count = len(lines)
    shown = [
        drawn(line, lambda pool: pool.ranks, kind.quantity, "guide", side_by_side(i, count))
        for i, line in enumerate(lines)
    ]
    references = {
        tuple((pool.ranks, kind.reference(pool)) for pool in line.pools) for line in lines
    }
    for points in sorted(references):
        x, y = zip(*points, strict=True)
        if not any(map(isnan, y)):
            shown.append(Series(kind.said, kind.look, x, y))
    ticks = sorted({pool.ranks for line in lines for pool in line.pools})
    values = [value for each in shown for value in each.y]
    return Panel(title, Axis("ranks", "log2", ticks=ticks), kind.scale(kind.axis, values), shown)


def _doublings(name: str, values: Sequence[float]) -> Axis:
    return spread(name, values, "log2", 1.9)


def _from_zero(name: str, values: Sequence[float]) -> Axis:
    return spread(name, values, "log", 30)

"""All-reduces: time and bus bandwidth by size, beside the libraries' own and the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median

from ..study.study_file import PLACES, StudyFile
from . import units
from .figures import BOUND, LIBRARIES, Axis, Chart, Series, panels_with, spread
from .points import (
    UNKNOWN,
    Dealt,
    Estimate,
    Layout,
    Line,
    Pool,
    drawn,
    finite,
    heading,
    is_foreign,
    label,
    ratio,
    varying,
)
from .tables import Column, Section, Table

GIGA = 1e9
BASELINE = "mpi"
PANELS = ("size_bytes", "wire", "value_scaling")
METHOD = ("algorithm", "wire", "value_scaling", "accumulate")


def sections(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> list[Section]:
    """Return what is shown of a study of all-reduces, besides its scaling."""
    charts = [
        chart
        for shape in dict.fromkeys(_shape(pool) for pool in pools)
        for chart in _charts(file, [pool for pool in pools if _shape(pool) == shape], layout)
    ]
    return [Section("All-reduce by size", tables=[_table(file, pools)], charts=charts)]


def _shape(pool: Pool) -> tuple[int, ...]:
    return tuple(int(pool.factors.get(name, 0)) for name in PLACES)


def _size(pool: Pool) -> float:
    return float(pool.factors["size_bytes"])


def _share(pool: Pool) -> float:
    """Return 2 (p - 1) / p, the least share of the data that leaves a rank; as in nccl-tests."""
    return 2 * (pool.ranks - 1) / pool.ranks


def bus_bandwidth(pool: Pool, time: Estimate) -> Estimate:
    """Return 2 (p - 1) / p size / time in GB/s, unknown for a single rank."""
    moved = _share(pool) * _size(pool) / GIGA
    return time.inverse(moved) if moved else UNKNOWN


def bound(pool: Pool) -> Estimate:
    """Return the least possible time, which has no interval."""
    return Estimate(pool.mean("bound_s"), nan, nan)


def _table(file: StudyFile, pools: Sequence[Pool]) -> Table:
    differing = varying([pool.factors for pool in pools])
    names = [name for name in METHOD if name in differing or name == "algorithm"]
    columns = [
        Column("ranks"),
        Column("size"),
        *(Column(heading(name), numbers=False) for name in names),
        Column("n"),
        Column("median"),
        Column(f"{file.percent} CI"),
        Column("busbw\nGB/s"),
        Column("times as\nfast as mpi"),
        Column("bound"),
        Column("time by\nbound"),
        Column("relative\nerror"),
    ]
    base = {(_shape(p), _size(p)): p for p in pools if p.factors["algorithm"] == BASELINE}
    return Table("All-reduce", columns, [_row(p, names, base) for p in pools], CAPTION)


CAPTION = (
    "Median of the slowest rank's times; n: repeats without warm-ups. busbw: 2 (p - 1) / p size / "
    "median, of p ranks. mpi: MPI_Allreduce of float32 in the same study, at the same size and "
    "ranks; in brackets the interval, which takes in both medians'. Bound: the bytes that a rank "
    "must send, at the rate of a ping-pong in the same job. Error: in the Euclidean norm."
)


def _row(
    pool: Pool, names: Sequence[str], base: dict[tuple[tuple[int, ...], float], Pool]
) -> list[str]:
    time, least = pool.time_s, pool.mean("bound_s")
    other = base.get((_shape(pool), _size(pool)))
    return [
        str(pool.ranks),
        units.size(_size(pool)),
        *(str(pool.factors.get(name, units.NONE)) for name in names),
        str(len(pool.samples_s)),
        units.time(time.value),
        units.time_interval(time.low, time.high, time.value),
        units.digits(bus_bandwidth(pool, time).value),
        _beside(other, pool) if other and other is not pool else units.NONE,
        units.time(least),
        units.digits(time.value / least) if least else units.NONE,
        units.digits(pool.mean("error"), 2),
    ]


def _beside(other: Pool, pool: Pool) -> str:
    return units.with_interval(*ratio(other.samples_s, pool.samples_s, pool.level))


@dataclass(frozen=True)
class Kind:
    """A quantity that is drawn by size, a function of a pool and a time of it."""

    name: str
    axis: str
    quantity: Callable[[Pool, Estimate], Estimate]


def _charts(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> list[Chart]:
    """Return the figures of one shape, none where it has a single size."""
    if len({_size(pool) for pool in pools}) < 2:
        return []
    scale, unit = units.time_unit(median(pool.time_s.value for pool in pools))
    kinds = [Kind("time", f"time / {unit}", lambda _, time: time.scaled(1 / scale))]
    if pools[0].ranks > 1:
        kinds.append(Kind("bandwidth", "bus bandwidth / (GB/s)", bus_bandwidth))
    groups = _methods(pools)
    foreign = [
        Line(label(group[0].factors, METHOD[:2]), look, group)
        for look, group in zip(LIBRARIES, filter(_foreign, groups), strict=False)
    ]
    own = [group for group in groups if not _foreign(group)]
    dealt = layout.deal(own or groups, without=["size_bytes"])
    where = "x".join(map(str, _shape(pools[0])[:2]))
    return [
        _chart(file, kind, part, foreign if own else [], name)
        for kind in kinds
        for name, part in dealt.figures(f"{kind.name}_by_size_{where}")
    ]


def _foreign(group: Sequence[Pool]) -> bool:
    return is_foreign(group[0].factors)


def _methods(pools: Sequence[Pool]) -> list[list[Pool]]:
    """Return pools of one method together, by size."""
    found: dict[tuple[str, ...], list[Pool]] = {}
    for pool in pools:
        found.setdefault(tuple(str(pool.factors.get(n, "")) for n in METHOD), []).append(pool)
    return [sorted(group, key=_size) for group in found.values()]


def _chart(file: StudyFile, kind: Kind, dealt: Dealt, foreign: Sequence[Line], name: str) -> Chart:
    what = kind.axis.partition(" /")[0]
    pools = [pool for lines in dealt.panels.values() for line in lines for pool in line.pools]
    known = bool(finite(pool.mean("bound_s") for pool in pools))
    bounds = BOUNDED if known else "No bound: the bandwidth of this machine was not measured."
    shape = _shape(pools[0])
    where = f"{units.count(shape[2], 'rank')} on {units.count(shape[0], 'node')}"
    beside = f" {' and '.join(line.name for line in foreign)} in every panel." if foreign else ""
    return Chart(
        name,
        f"{file.name}: {what} of all-reduces by size, {where}",
        [f"Medians of the slowest rank's times, bars: {file.percent} CI.{beside} {bounds}"],
        f"{what.capitalize()} by size on {where}.",
        panels_with(
            {
                title: _series([*lines, *foreign], len(lines), kind)
                for title, lines in dealt.panels.items()
            },
            Axis("float32 data of a rank", "size", ticks=sorted({_size(pool) for pool in pools})),
            lambda values: spread(kind.axis, values, "log", 10),
        ),
        dealt.columns,
    )


BOUNDED = "Bound: the bytes that a rank must send, at the rate of a ping-pong in the same job."


def _series(lines: Sequence[Line], own: int, kind: Kind) -> list[Series]:
    """Return lines and the bound; own: how many of the lines the bound is of."""

    def shown(pool: Pool) -> Estimate:
        return kind.quantity(pool, pool.time_s)

    found = [drawn(line, _size, shown, "line") for line in lines]
    known = [p for line in lines[:own] for p in line.pools if not isnan(p.mean("bound_s"))]
    least = {_size(p): kind.quantity(p, bound(p)).value for p in known}
    if least:
        found.append(Series("bound", BOUND, sorted(least), [least[size] for size in sorted(least)]))
    return found

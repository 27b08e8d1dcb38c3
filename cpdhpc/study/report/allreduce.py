"""All-reduces: time and bus bandwidth by size, beside the libraries' own and the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median

from . import text
from .axis import Axis, spread
from .chart import Chart
from .deal import Dealt, Line, deal, drawn, numbered
from .look import BOUND, GREY, Look
from .panel import Panel
from .pool import UNKNOWN, Estimate, Pool, finite, label, ratio, varying
from .series import Series
from .study_file import PLACES, StudyFile
from .table import Column, Section, Table

GIGA = 1e9
BASELINE = "mpi"
LIBRARIES = (BASELINE, "gloo")  # drawn in every panel
LIBRARY_LOOKS = (Look(GREY, "x"), Look(GREY, "+", (0, (6, 2))), Look(GREY, "1", (0, (2, 2))))
PANELS = ("size_bytes", "wire", "value_scaling")
METHOD = ("algorithm", "wire", "value_scaling", "accumulate")


def sections(file: StudyFile, pools: Sequence[Pool]) -> list[Section]:
    """Return what is shown of a study of all-reduces, besides its scaling."""
    charts = [
        chart
        for shape in dict.fromkeys(_shape(pool) for pool in pools)
        for chart in _charts(file, [pool for pool in pools if _shape(pool) == shape])
    ]
    return [Section("All-reduce by size", tables=[_table(file, pools)], charts=charts)]


def _shape(pool: Pool) -> tuple[int, ...]:
    return tuple(int(pool.factors.get(name, 0)) for name in PLACES)


def _size(pool: Pool) -> float:
    return float(pool.factors["size_bytes"])


def _share(pool: Pool) -> float:
    """Return 2 (p - 1) / p: the least part of the data that leaves a rank of p, as in nccl-tests."""
    return 2 * (pool.ranks - 1) / pool.ranks


def bus_bandwidth(pool: Pool, time: Estimate) -> Estimate:
    """Return 2 (p - 1) / p size / time in GB/s, unknown for a single rank."""
    moved = _share(pool) * _size(pool) / GIGA
    return time.inverse(moved) if moved else UNKNOWN


def bound(pool: Pool) -> Estimate:
    """Return the least possible time, which has no interval."""
    return Estimate(pool.mean("bound_s"), nan, nan)


def _table(file: StudyFile, pools: Sequence[Pool]) -> Table:
    percent = f"{100 * file.level:g} %"
    names = [name for name in METHOD if name in varying(pools) or name == "algorithm"]
    columns = [
        Column("ranks"),
        Column("size"),
        *(Column(name.replace("_", "\n"), numbers=False) for name in names),
        Column("n"),
        Column("median"),
        Column(f"{percent} CI"),
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
    "ranks; in brackets the quotients of all values in both intervals. Bound: the bytes over the "
    "bandwidth measured on this machine. Error: in the Euclidean norm; it is no random quantity."
)


def _row(
    pool: Pool, names: Sequence[str], base: dict[tuple[tuple[int, ...], float], Pool]
) -> list[str]:
    time, least = pool.time_s, pool.mean("bound_s")
    other = base.get((_shape(pool), _size(pool)))
    return [
        str(pool.ranks),
        text.size(_size(pool)),
        *(label(pool.factors, [name]) or text.NONE for name in names),
        str(pool.repeats),
        text.time(time.value),
        text.time_interval(time.low, time.high, time.value),
        text.digits(bus_bandwidth(pool, time).value),
        _beside(ratio(other.time_s, time)) if other and other is not pool else text.NONE,
        text.time(least),
        text.digits(time.value / least) if least else text.NONE,
        text.digits(pool.mean("error"), 2),
    ]


def _beside(times: Estimate) -> str:
    known = not isnan(times.low)
    return text.digits(times.value) + (f" ({text.interval(*times[1:])})" if known else "")


@dataclass(frozen=True)
class Kind:
    """A quantity that is drawn by size. said: what its bound is called."""

    name: str
    axis: str
    quantity: Callable[[Pool, Estimate], Estimate]
    said: str


def _charts(file: StudyFile, pools: Sequence[Pool]) -> list[Chart]:
    """Return the figures of one shape, none where it has a single size."""
    if len({_size(pool) for pool in pools}) < 2:
        return []
    ranks = pools[0].ranks
    scale, unit = text.time_unit(median(pool.time_s.value for pool in pools))
    kinds = [Kind("time", f"time / {unit}", lambda _, time: time.scaled(1 / scale), "bound")]
    if ranks > 1:
        kinds.append(Kind("bandwidth", "bus bandwidth / (GB/s)", bus_bandwidth, "bound"))
    library, own = _parts(pools)
    return [
        _chart(file, pools, kind, part, library, numbered(name, index, len(own.parts())))
        for kind in kinds
        for name in [f"{kind.name}_by_size_" + "x".join(map(str, _shape(pools[0])[:2]))]
        for index, part in enumerate(own.parts())
    ]


def _parts(pools: Sequence[Pool]) -> tuple[list[Line], Dealt]:
    """Return the lines of the libraries, which are in every panel, and the others by panel."""
    by_method: dict[tuple[str, ...], list[Pool]] = {}
    for pool in pools:
        method = tuple(str(pool.factors.get(name, "")) for name in METHOD)
        by_method.setdefault(method, []).append(pool)
    groups = [sorted(group, key=_size) for group in by_method.values()]
    known = [group for group in groups if group[0].factors["algorithm"] in LIBRARIES]
    library = [
        Line(label(group[0].factors, METHOD[:2]), look, group)
        for look, group in zip(LIBRARY_LOOKS, known, strict=False)
    ]
    own = [group for group in groups if group not in known]
    names = varying([group[0] for group in own]) if own else []
    panels = [name for name in names if name in PANELS]
    return library, deal(own or known, panels, [n for n in names if n not in PANELS])


def _chart(
    file: StudyFile,
    pools: Sequence[Pool],
    kind: Kind,
    dealt: Dealt,
    library: Sequence[Line],
    name: str,
) -> Chart:
    what = kind.axis.partition(" /")[0]
    known = bool(finite(pool.mean("bound_s") for pool in pools))
    bounds = (
        "Bound: the bytes over the bandwidth measured on this machine."
        if known
        else "No bound: the bandwidth of this machine was not measured."
    )
    shape = _shape(pools[0])
    where = f"{text.count(shape[2], 'rank')} on {text.count(shape[0], 'node')}"
    return Chart(
        name,
        f"{file.name}: {what} of all-reduces by size, {where}",
        [f"Median of the slowest rank's times; bars: {100 * file.level:g} % CI. {bounds}"],
        f"{what.capitalize()} by size on {where}, a panel a wire.",
        [_panel(title, [*library, *lines], kind) for title, lines in dealt.panels.items()],
    )


def _panel(title: str, lines: Sequence[Line], kind: Kind) -> Panel:
    def shown(pool: Pool) -> Estimate:
        return kind.quantity(pool, pool.time_s)

    found = [drawn(line, _size, shown, "line") for line in lines]
    own = [pool for line in lines for pool in line.pools if pool.factors["algorithm"] != BASELINE]
    least: dict[float, Pool] = {}
    for pool in own or [pool for line in lines for pool in line.pools]:
        size = _size(pool)
        if not isnan(bound(pool).value) and (
            size not in least or bound(pool).value < bound(least[size]).value
        ):
            least[size] = pool
    if least:
        sizes = sorted(least)
        values = [kind.quantity(least[size], bound(least[size])).value for size in sizes]
        found.append(Series(kind.said, BOUND, sizes, values))
    ticks = sorted({_size(pool) for line in lines for pool in line.pools})
    values = [value for series in found for value in series.y]
    size = Axis("float32 data of a rank", "size", ticks=ticks)
    return Panel(title, size, spread(kind.axis, values, "log", 10), found)

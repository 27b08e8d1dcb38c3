"""Studies of the codec: rates by format and operation, beside memcpy."""

from __future__ import annotations

from collections.abc import Sequence

from ..study.study_file import StudyFile
from . import units
from .figures import IDEAL, Axis, Chart, Look, Panel, Series, looks
from .points import Estimate, Layout, Pool, label, ratio
from .tables import Column, Section, Table

GIGA = 1e9
BASELINE = "memcpy"
PANELS = ("operation",)
APART = 0.1  # of a row: operations below one another


def sections(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> list[Section]:
    """Return what is shown of a study of the codec, besides its scaling."""
    places: dict[str, list[Pool]] = {}
    for pool in pools:
        places.setdefault(_place(pool), []).append(pool)
    drawn = looks(str(pool.factors["operation"]) for pool in pools if not _is_base(pool))
    panels = [_panel(place, group, drawn) for place, group in places.items()]
    chart = Chart(
        "rate_by_format",
        f"{file.name}: rate of the codec",
        [f"float32 data of all ranks / median time of the slowest; bars: {file.percent} CI."],
        "Rate by format, with memcpy of the same data on as many ranks.",
        [panel for panel in panels if panel.rows],
        columns=2,
    )
    return [Section("Codec", tables=[_table(file, pools)], charts=[chart] if chart.panels else [])]


def _place(pool: Pool) -> str:
    return label(pool.factors, ("size_bytes", "ranks"))


def _is_base(pool: Pool) -> bool:
    return pool.factors["operation"] == BASELINE


def _rate(pool: Pool) -> Estimate:
    """Return bytes of float32 of all ranks by the time, GB/s."""
    return pool.time_s.inverse(float(pool.factors["size_bytes"]) / GIGA)


def _panel(place: str, pools: Sequence[Pool], drawn: dict[str, Look]) -> Panel:
    own = [pool for pool in pools if not _is_base(pool)]
    rows = list(dict.fromkeys(str(pool.factors["format"]) for pool in own))
    series = []
    for index, (name, look) in enumerate(drawn.items()):
        aside = APART * (index - (len(drawn) - 1) / 2)
        group = [pool for pool in own if pool.factors["operation"] == name]
        rates = [_rate(pool) for pool in group]
        at = [aside + rows.index(str(pool.factors["format"])) for pool in group]
        x, low, high = (list(column) for column in zip(*rates, strict=True)) if rates else ([],) * 3
        series.append(Series(name, look, x, at, join="none", x_low=low, x_high=high))
    for pool in pools:
        if _is_base(pool):
            rate = _rate(pool).value
            series.append(Series(BASELINE, IDEAL, [rate, rate], [-0.6, len(rows) - 0.4]))
    return Panel(place, Axis("rate / (GB/s)", limits=(0, None)), Axis(""), series, rows=rows)


def _table(file: StudyFile, pools: Sequence[Pool]) -> Table:
    columns = [
        Column("ranks"),
        Column("size"),
        Column("operation", numbers=False),
        Column("format", numbers=False),
        Column("n"),
        Column("median"),
        Column(f"{file.percent} CI"),
        Column("rate\nGB/s"),
        Column("of memcpy's"),
    ]
    base = {_place(pool): pool for pool in pools if _is_base(pool)}
    return Table("Codec", columns, [_row(pool, base.get(_place(pool))) for pool in pools], CAPTION)


CAPTION = (
    "Rate: float32 data of all ranks / median time of the slowest. Of memcpy's: of the same data "
    "on as many ranks in this study; in brackets the interval, which takes in both medians'."
)


def _row(pool: Pool, base: Pool | None) -> list[str]:
    time = pool.time_s
    beside = units.NONE
    if base is not None and base is not pool:
        times = ratio(base.samples_s, pool.samples_s, pool.level)
        beside = units.with_interval(*times)
    return [
        str(pool.ranks),
        units.size(float(pool.factors["size_bytes"])),
        str(pool.factors["operation"]),
        str(pool.factors.get("format", units.NONE)),
        str(len(pool.samples_s)),
        units.time(time.value),
        units.time_interval(time.low, time.high, time.value),
        units.digits(_rate(pool).value),
        beside,
    ]

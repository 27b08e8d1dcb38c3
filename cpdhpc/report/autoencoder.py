"""Studies of the autoencoder: rate of arithmetic, share of exchanges and bytes by ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from ..study.study_file import StudyFile
from . import units
from .points import Estimate, Layout, Pool, cell, heading
from .scaling import Kind, charts, dealt_over, doublings, from_zero
from .tables import Column, Section, Table

GIGA = 1e9
PANELS = ("maps",)
CAPTION = (
    "Parameters: of all ranks. Rate: 10 FLOP a parameter and image, in matrix products, over the "
    "median time. In exchanges: median over iterations of the time of the rank with most, waits "
    "for slower ranks included, over the median time. Plan: bytes that leave the rank which sends "
    "most in an iteration, as its plans say beforehand. Sent: what was counted."
)


def sections(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> list[Section]:
    """Return what is shown of a study of the autoencoder, besides its scaling."""
    names = [name for name in layout.panels if name != "maps"]
    columns = [
        Column("ranks"),
        *(Column(heading(name)) for name in names),
        Column("maps"),
        Column("parameters"),
        Column("batch"),
        Column("n"),
        Column("median"),
        Column(f"{file.percent} CI"),
        Column("rate\nGFLOP/s"),
        Column("in exchanges"),
        Column("plan"),
        Column("sent"),
    ]
    table = Table("Autoencoder", columns, [_row(pool, names) for pool in pools], CAPTION)
    dealt = dealt_over(file, pools, layout)
    drawn = [] if dealt is None else charts(file, dealt, KINDS)
    return [Section("Autoencoder", tables=[table], charts=drawn)]


def _row(pool: Pool, names: Sequence[str]) -> list[str]:
    time = pool.time_s
    return [
        str(pool.ranks),
        *(cell(name, pool.factors[name]) for name in names),
        str(pool.factors["maps"]),
        f"{pool.mean('payload_bytes') / 4:,.0f}",
        str(pool.factors["batch"]),
        str(len(pool.samples_s)),
        units.time(time.value),
        units.time_interval(time.low, time.high, time.value),
        units.digits(_rate(pool).value),
        f"{_share(pool).value:.1f}%",
        units.size(pool.mean("plan_bytes")),
        units.size(pool.mean("wire_bytes")),
    ]


def _rate(pool: Pool) -> Estimate:
    """Return GFLOP/s of all ranks."""
    return pool.time_s.inverse(pool.mean("flop") / GIGA)


def _share(pool: Pool) -> Estimate:
    """Return the share of exchanges in the time of an iteration, in %."""
    return Estimate(100 * pool.mean("exchange_s") / pool.time_s.value, nan, nan)


def _ideal_rate(pool: Pool) -> float:
    """Return the rate with the base's rate a rank."""
    return _rate(pool).value / pool.efficiency.value


KINDS = (
    Kind("rate", "rate / GFLOP/s", _rate, _ideal_rate, doublings),
    Kind("exchanges", "in exchanges / %", _share, lambda pool: nan, from_zero, said=""),
)

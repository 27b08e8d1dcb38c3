"""Studies of the autoencoder: rate of arithmetic, share of exchanges and bytes by ranks."""

from __future__ import annotations

from collections.abc import Sequence

from . import text
from .deal import Layout
from .pool import Pool
from .study_file import StudyFile
from .table import Column, Section, Table

GIGA = 1e9
PANELS = ("maps",)
CAPTION = (
    "Parameters: of all ranks. Rate: 10 FLOP a parameter and image, in matrix products, over the "
    "median time. In exchanges: median over iterations of the time of the rank with most, waits "
    "for slower ranks included, over the median time. Sent: by the rank that sends most, an "
    "iteration."
)


def sections(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> list[Section]:
    """Return what is shown of a study of the autoencoder, besides its scaling."""
    columns = [
        Column("ranks"),
        Column("maps"),
        Column("parameters"),
        Column("batch"),
        Column("n"),
        Column("median"),
        Column(f"{file.percent} CI"),
        Column("rate\nGFLOP/s"),
        Column("in exchanges"),
        Column("sent"),
    ]
    return [Section("Autoencoder", tables=[Table("Autoencoder", columns, _rows(pools), CAPTION)])]


def _rows(pools: Sequence[Pool]) -> list[list[str]]:
    return [_row(pool) for pool in pools]


def _row(pool: Pool) -> list[str]:
    time = pool.time_s
    return [
        str(pool.ranks),
        str(pool.factors["maps"]),
        f"{pool.mean('payload_bytes') / 4:,.0f}",
        str(pool.factors["batch"]),
        str(len(pool.samples_s)),
        text.time(time.value),
        text.time_interval(time.low, time.high, time.value),
        text.digits(pool.mean("flop") / time.value / GIGA),
        f"{pool.mean('exchange_s') / time.value:.1%}",
        text.size(pool.mean("wire_bytes")),
    ]

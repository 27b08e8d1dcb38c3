"""Studies of halos: rates of exchanges, beside the fastest of MPI's ways with datatypes."""

from __future__ import annotations

from collections.abc import Sequence

from ..study.study_file import StudyFile
from . import units
from .points import Layout, Pool, ratio
from .tables import Column, Section, Table

GIGA = 1e9
PANELS = ("way", "transfer")
BY_DATATYPES = ("subarray", "subarray, persistent", "alltoallw")
APART = ("way", "wire")  # factors in which a baseline may differ
WORDS = ("split", "boundary", "dtype", "wire", "transfer", "way")
NAMES = ("rows", "columns", "values", "halo", *WORDS)  # shown where they differ
CAPTION = (
    "Sent: on the wire, by the rank that sends most, a call. Rate: bytes of its cells over the "
    "median time. Times as fast: as the fastest of subarray, persistent and alltoallw, which send "
    "the same cells raw, in this study; in brackets the interval, which takes in both medians'."
)


def sections(file: StudyFile, pools: Sequence[Pool], layout: Layout) -> list[Section]:
    """Return what is shown of a study of halos, besides its scaling."""
    names = [name for name in NAMES if len({pool.factors[name] for pool in pools}) > 1]
    columns = [
        Column("ranks"),
        *(Column(name, numbers=name not in WORDS) for name in names),
        Column("n"),
        Column("median"),
        Column(f"{file.percent} CI"),
        Column("sent"),
        Column("rate\nGB/s"),
        Column("times as fast"),
    ]
    rows = [_row(pool, _base(pool, pools), names) for pool in pools]
    return [Section("Halos", tables=[Table("Halos", columns, rows, CAPTION)])]


def _base(pool: Pool, pools: Sequence[Pool]) -> Pool | None:
    """Return the fastest of MPI's ways on the same cells, None where there is none."""

    def same(other: Pool) -> bool:
        return {k: v for k, v in other.factors.items() if k not in APART} == {
            k: v for k, v in pool.factors.items() if k not in APART
        }

    found = [each for each in pools if each.factors["way"] in BY_DATATYPES and same(each)]
    return min(found, key=lambda each: each.time_s.value, default=None)


def _row(pool: Pool, base: Pool | None, names: Sequence[str]) -> list[str]:
    of, time = pool.factors, pool.time_s
    sent_bytes, beside = pool.mean("payload_bytes"), units.NONE
    if sent_bytes and base is not None and base is not pool:
        beside = units.with_interval(*ratio(base.samples_s, pool.samples_s, pool.level))
    return [
        str(pool.ranks),
        *(str(of[name]) for name in names),
        str(len(pool.samples_s)),
        units.time(time.value),
        units.time_interval(time.low, time.high, time.value),
        units.size(pool.mean("wire_bytes")) if sent_bytes else units.NONE,
        units.digits(sent_bytes / time.value / GIGA) if sent_bytes else units.NONE,
        beside,
    ]

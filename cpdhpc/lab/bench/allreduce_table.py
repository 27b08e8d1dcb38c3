"""Tables of all-reduces: in the columns of nccl-tests, of the OSU benchmarks, and in short.

algbw is size / time; busbw is algbw times 2 (p - 1) / p, which for the least traffic possible is
the rate of a rank's link; wirebw is the bytes that left the rank that sent most / time.
GB/s are 1e9 byte/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...collectives.allreduce import Allreduce
from ..report import units
from .allreduce_cases import TimedCase
from .harness import Times, comments

GIGA = 1e9


class Row(NamedTuple):
    """A case at a size: times_s float64[repeats, processes], bound_s, predicted_s or nan."""

    size_bytes: int
    case: TimedCase
    times_s: Times
    bound_s: float
    predicted_s: float

    def median_s(self, warmup: int) -> float:
        """Return the median of the slowest rank's times."""
        return float(np.median(self.times_s[warmup:].max(axis=1)))


class Beside(NamedTuple):
    """What a row is shown beside: ranks, calls that do not count, medians of mpi and memcpy."""

    ranks: int
    warmup: int
    mpi_s: float
    copy_s: float


class Column(NamedTuple):
    """A column of the table: two lines of heading, characters, the text of a row."""

    over: str
    unit: str
    width: int
    text: Callable[[Row, Beside], str]


def _slowest_us(row: Row, of: Beside) -> Times:
    return 1e6 * row.times_s[of.warmup :].max(axis=1)


def _rate(size_bytes: float, row: Row, of: Beside) -> str:
    return f"{size_bytes / row.median_s(of.warmup) / GIGA:.2f}"


def _bus_bytes(row: Row, of: Beside) -> float:
    return row.size_bytes * 2 * (of.ranks - 1) / of.ranks


def _by_prediction(text: Callable[[Row, Beside], str]) -> Callable[[Row, Beside], str]:
    return lambda row, of: "-" if np.isnan(row.predicted_s) else text(row, of)


NAME = Column("", "algorithm", 13, lambda row, of: row.case.name)
CALL = Column("", "call", 8, lambda row, of: row.case.call)
TYPE = Column("", "wire", 6, lambda row, of: row.case.wire)
SCALING = Column("", "scaling", 9, lambda row, of: row.case.scaling)
ACCUMULATE = Column("", "accumulate", 10, lambda row, of: row.case.accumulate)
TIME = Column("time", "(us)", 10, lambda row, of: f"{1e6 * row.median_s(of.warmup):.1f}")
ALGBW = Column("algbw", "(GB/s)", 7, lambda row, of: _rate(row.size_bytes, row, of))
BESIDE = [
    Column("", "error", 8, lambda row, of: f"{row.case.error:.1e}" if row.case.is_sum else "-"),
    Column("", "x mpi", 6, lambda row, of: f"{of.mpi_s / row.median_s(of.warmup):.2f}"),
    Column("/", "memcpy", 6, lambda row, of: f"{row.median_s(of.warmup) / of.copy_s:.2f}"),
    Column("/", "bound", 6, lambda row, of: f"{row.median_s(of.warmup) / row.bound_s:.2f}"),
]
PREDICTED = Column(
    "predicted", "(us)", 10, _by_prediction(lambda row, of: f"{1e6 * row.predicted_s:.1f}")
)
PREDICTION = Column(
    "predicted",
    "/ time",
    9,
    _by_prediction(lambda row, of: f"{row.predicted_s / row.median_s(of.warmup):.2f}"),
)
ALL = [
    Column("size", "(B)", 11, lambda row, of: str(row.size_bytes)),
    Column("", "count", 11, lambda row, of: str(row.size_bytes // 4)),
    *(NAME, CALL, TYPE, SCALING, ACCUMULATE, TIME),
    Column("min", "(us)", 10, lambda row, of: f"{_slowest_us(row, of).min():.1f}"),
    Column("max", "(us)", 10, lambda row, of: f"{_slowest_us(row, of).max():.1f}"),
    ALGBW,
    Column("busbw", "(GB/s)", 7, lambda row, of: _rate(_bus_bytes(row, of), row, of)),
    Column(
        "wirebw",
        "(GB/s)",
        7,
        lambda row, of: _rate(row.case.wire_bytes, row, of) if row.case.method else "-",
    ),
    *BESIDE,
]
SHORT = [
    Column("", "size", 9, lambda row, of: units.size(row.size_bytes)),
    *(NAME, TYPE, CALL, TIME, ALGBW, *BESIDE),
]


def columns_of(arguments: argparse.Namespace, methods: Sequence[Allreduce]) -> list[Column]:
    """Return the columns of the table; without --all only those that tell rows apart."""
    with_prediction = arguments.predict is not None
    if arguments.all:
        return [*ALL, *([PREDICTED, PREDICTION] if with_prediction else [])]
    of = [(m.wire, m.algorithm) for m in methods]
    scaled = len({*zip(of, (m.scaling for m in methods), strict=True)}) > len({*of})
    added = len({*zip(of, (m.accumulate for m in methods), strict=True)}) > len({*of})
    further = [*([SCALING] if scaled else []), *([ACCUMULATE] if added else [])]
    return [*SHORT[:3], *further, *SHORT[3:], *([PREDICTION] if with_prediction else [])]


def heading(
    where: str,
    cores: str,
    arguments: argparse.Namespace,
    skipped: Sequence[str],
    columns: Sequence[Column],
) -> list[str]:
    """Return the lines above the table."""
    rates = "algbw: size / time"
    if arguments.all:
        rates += "; busbw: 2 (p - 1) / p of it; wirebw: bytes that left a rank / time"
    lines = [
        f"all-reduce of float32, sum, out of place: {where}",
        cores,
        f"time: the slowest rank from a barrier; {arguments.repeats} calls after "
        f"{arguments.warmup} warm-ups, cases in turns; GB/s: 1e9 byte/s",
        f"{rates}; error: relative, Euclidean norm",
        "x mpi: how many times as fast as MPI_Allreduce (mpi); / memcpy: of the array by all ranks "
        "at once; by medians, as all ratios",
        "/ bound: the longer of memcpy and 2 (N - 1) / N of the bytes on the wire over the link of "
        "each of N nodes",
        *([] if arguments.all else [FASTEST]),
        *(f"left out: {text}" for text in skipped),
    ]
    names = [" ".join(f"{getattr(each, name):>{each.width}}" for each in columns)
             for name in ("over", "unit")]  # fmt: skip
    return [*comments(lines), *(f"# {text}" for text in names)]


FASTEST = "of each method the call whose median is the least; --all shows all calls and columns"


def lines(
    rows: Sequence[Row], columns: Sequence[Column], ranks: int, arguments: argparse.Namespace
) -> list[str]:
    """Return the lines of the table; rows: of a size, mpi and memcpy first; time is the median."""
    warmup = arguments.warmup
    beside = Beside(ranks, warmup, *(each.median_s(warmup) for each in rows[:2]))
    shown = rows if arguments.all else fastest(rows, warmup)
    return [
        "  " + " ".join(f"{each.text(row, beside):>{each.width}}" for each in columns)
        for row in shown
    ]


def fastest(rows: Sequence[Row], warmup: int) -> list[Row]:
    """Return the row with the least median of those that differ only in the call."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        of = row.case
        alike.setdefault((of.name, of.wire, of.scaling, of.accumulate), []).append(row)
    return [min(each, key=lambda row: row.median_s(warmup)) for each in alike.values()]


def latency_heading(where: str, cores: str, rows: Sequence[Row], whole: bool) -> list[str]:
    """Return the lines above the table; rows: of a size; whole: least and greatest latencies too.

    A row has one column, or a group of three.
    """
    names = [row.case.algorithm for row in rows[:2]]
    calls = [row.case.call for row in rows[2:]]
    told = [
        f"all-reduce of float32, sum: {where}",
        cores,
        "Avg: mean over ranks of the mean over calls; Min, Max: over ranks; a barrier before; "
        "mpi: MPI_Allreduce; memcpy: of the array by all ranks at once",
        "/memcpy, /bound: of the best of ours, by medians over calls of the slowest rank, as in "
        "files; bound: the longer of memcpy and 2 (N - 1) / N of the bytes over a node's link",
    ]
    if not whole:
        told.append("us, Avg; of ours the tree in float32, by how it is called")
        heads = "".join(f"{each:>11}" for each in (*names, *calls))
        return [*comments(told), f"{'# Size(B)':<10}{heads}{'/memcpy':>9}{'/bound':>8}"]
    names += [f"tree, raw, {call}" for call in calls]
    latency = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)")
    columns = " ".join(f"{each:>15}" for each in latency * len(rows))
    return [
        *comments(told),
        f"#{'':<9} " + " ".join(f"{each:>47}" for each in names),
        f"{'# Size(B)':<10} {columns}{'/memcpy':>9}{'/bound':>9}{'Iterations':>12}",
    ]


def latency_line(rows: Sequence[Row], warmup: int, whole: bool) -> str:
    """Return a row of the table, of the rows of a size; whole: as in latency_heading."""
    by_rank = [1e6 * row.times_s[warmup:].mean(axis=0) for row in rows]
    best_s = min(row.median_s(warmup) for row in rows[2:])
    ratios = best_s / rows[1].median_s(warmup), best_s / rows[1].bound_s
    size = rows[0].size_bytes
    if not whole:
        means = "".join(f"{each.mean():>11.2f}" for each in by_rank)
        return f"{size:<10}{means}{ratios[0]:>9.2f}{ratios[1]:>8.2f}"
    cells = [cell for each in by_rank for cell in (each.mean(), each.min(), each.max())]
    figures = " ".join(f"{cell:>15.2f}" for cell in cells)
    shown = "".join(f"{ratio:>9.2f}" for ratio in ratios)
    return f"{size:<10} {figures}{shown}{len(rows[0].times_s) - warmup:>12}"

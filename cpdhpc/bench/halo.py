"""Benchmark of halo exchanges beside MPI's own ways, on the same arrays.

Ours and MPI's work in an array that holds the halo around the rank's own cells; "copied" is ours
with the cells elsewhere, which are copied too. subarray: Isend and Irecv of subarray datatypes, as
they are and by persistent requests; alltoallw: MPI_Neighbor_alltoallw of them; packed: slices of
NumPy copied to buffers and back. What accumulates adds the halos to the cells that they show.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import UserError
from ..darray.layout import balanced_grid
from ..darray.plan import WindowPlan
from ..darray.show import add_options, given, spec_of
from ..methods import suggest
from ..world.cores import own_cores
from ..world.mpi import World
from ..world.ranks import Ranks
from . import halo_overlap
from .halo_cases import (
    ACCUMULATE,
    COPIED,
    EXCHANGE,
    MPI_TYPES,
    OURS,
    WAYS,
    HaloCase,
    Run,
    Setting,
    open_cases,
)
from .harness import (
    Measured,
    Point,
    Times,
    check_out,
    check_positive,
    check_whole,
    interleave_ranks,
    known,
    machine_line,
    parse_names,
    together,
)

GIGA = 1e9
OPERATIONS = EXCHANGE, ACCUMULATE
ALL_WAYS = OURS, COPIED, *WAYS
SAMPLE_S = 1e-3  # the least that a sample should take
MOST_CALLS = 500  # of a sample
TRIED = 10  # calls of a sample that says how many fill one


class Usual(NamedTuple):
    """A setting for any number of ranks.

    block: cells of a rank; axes: that are split, evenly where there are several
    """

    text: str
    block: tuple[int, ...]
    axes: tuple[int, ...]
    halo: list[int]
    trail: tuple[int, ...] = ()
    boundary: str = "none"


USUAL = {
    "rows": Usual("images, batch innermost, by rows", (100, 200), (0,), [10, 0], (96,)),
    "columns": Usual("the same by columns", (200, 100), (1,), [0, 10], (96,)),
    "nchw": Usual("batch first, by columns", (96, 2, 200, 100), (3,), [0, 0, 0, 5]),
    "cube": Usual("a block of 64^3, by its last axis", (64, 64, 64), (2,), [0, 0, 1]),
    "small": Usual("a block of 16^3, by its middle axis", (16, 16, 16), (1,), [0, 1, 0]),
    "torus": Usual("a periodic grid, corners", (256, 256), (0, 1), [1, 1], boundary="wrap"),
}


class Row(NamedTuple):
    """A case of a setting: times_s float64[warmup + repeats, processes], of one call."""

    setting: Setting
    case: HaloCase
    size_bytes: int
    calls: int
    times_s: Times

    def slowest(self, warmup: int) -> Times:
        """Return the times of the slowest rank, without warm-ups."""
        times: Times = self.times_s[warmup:].max(axis=1)
        return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    usual_text = "; ".join(f"{name}: {of.text}" for name, of in USUAL.items())
    parser.add_argument("--usual", default=",".join(USUAL), help=f"of {usual_text}")
    parser.add_argument(
        "--operations", default=EXCHANGE, help=f"of {','.join(OPERATIONS)} (default {EXCHANGE})"
    )
    ways_text = f"of {'; '.join(ALL_WAYS)}, parted by semicolons (default all)"
    parser.add_argument("--ways", default="; ".join(ALL_WAYS), help=ways_text)
    add_options(parser)
    parser.add_argument("--repeats", type=int, default=31, help="samples of each (default 31)")
    parser.add_argument("--warmup", type=int, default=3, help="samples before (default 3)")
    parser.add_argument(
        "--calls", type=int, default=0, help="calls of a sample (default: as fill a millisecond)"
    )
    halo_overlap.add_arguments(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.h5", help="write every sample, for report"
    )


def settings_of(arguments: argparse.Namespace, ranks: int) -> list[Setting]:
    """Return what is to be measured: the usual, or the one of --shape. Raises UserError."""
    options = given(arguments)
    if "shape" in options:
        procs = [ranks] + [1] * (len(options["shape"]) - 1)
        raw = {"procs": procs, "boundary": "none", "halo": 1} | options
        found = [Setting("given", spec_of(raw, "bench halo"))]
    else:
        names = parse_names("--usual", arguments.usual, known(USUAL))
        found = [usual(name, ranks, options) for name in names]
    for setting in found:
        planned = setting.spec.geometry().layout.ranks
        if planned != ranks:
            raise UserError(f"--procs: is for {planned} ranks, here are {ranks}")
    return found


def usual(name: str, ranks: int, options: dict[str, Any]) -> Setting:
    """Return a usual setting for so many ranks, some of its keys replaced.

    Raises ConfigError where they do not fit.
    """
    of = USUAL[name]
    procs = [1] * len(of.block)
    for axis, n in zip(of.axes, balanced_grid(ranks, len(of.axes)), strict=True):
        procs[axis] = n
    raw = {
        "shape": [n * p for n, p in zip(of.block, procs, strict=True)],
        "procs": procs,
        "halo": of.halo,
        "boundary": of.boundary,
        "trail": list(of.trail),
    }
    return Setting(name, spec_of(raw | options, f"bench halo: {name}"))


def ways_of(text: str) -> list[str]:
    """Return the ways that are named. Raises UserError."""
    names = [name.strip() for name in text.split(";")]
    unknown = [name for name in names if name not in ALL_WAYS]
    if unknown:
        raise UserError(f"--ways {unknown[0]}: {suggest(unknown[0], ALL_WAYS)}")
    return names


def run(arguments: argparse.Namespace, world: World) -> Measured:
    """Check and time every case, and print a table. Collective."""
    check_positive(arguments, "repeats")
    check_whole(arguments, "warmup", "calls")
    settings = settings_of(arguments, world.ranks)
    operations = parse_names("--operations", arguments.operations, known(OPERATIONS))
    ways = ways_of(arguments.ways)
    together(world, lambda: check_out(arguments.out, world))
    rows: list[Row] = []
    with own_cores(world) as cores:
        where = machine_line(world)
        if world.process == 0:
            print("\n".join(heading(where, cores, arguments)), flush=True)
        for setting in settings:
            if arguments.overlap:
                halo_overlap.measure(world, setting, arguments)
            else:
                rows += measure(world, setting, arguments, operations, ways)
    return Measured("halo", "halo", [point(row) for row in rows], arguments.warmup, cores)


def measure(
    world: World,
    setting: Setting,
    arguments: argparse.Namespace,
    operations: Sequence[str],
    ways: Sequence[str],
) -> list[Row]:
    """Return the rows of a setting, and print them. Collective."""
    with setting.plan(world) as plan:
        size_bytes = max(world.gather(setting.sent_bytes(plan), "bench halo"))
        if world.process == 0:
            print("\n".join(about(setting, plan, size_bytes)), flush=True)
        rows: list[Row] = []
        for operation in operations:  # each by itself: sums grow, and exchanges copy them
            with open_cases(world, setting, plan, [operation], ways) as cases:
                calls, times = time_cases(world, cases, arguments) if cases else (0, [])
            rows += [
                Row(setting, case, size_bytes, calls, times_s)
                for case, times_s in zip(cases, times, strict=True)
            ]
    if world.process == 0:
        for row in rows:
            print(line(row, rows, arguments.warmup), flush=True)
    return rows


def time_cases(
    world: Ranks, cases: Sequence[HaloCase], arguments: argparse.Namespace
) -> tuple[int, list[Times]]:
    """Return the calls of a sample, and the seconds of a call, of each case. Collective.

    All cases have as many calls, so that a start that ranks do not make together, which is the
    price of one, weighs as little on each.
    """

    def timed(calls: int, repeats: int, warmup: int) -> list[Times]:
        samples = {i: partial(repeated, case.run, calls) for i, case in enumerate(cases)}
        times = interleave_ranks(world, samples, repeats, warmup)
        return [each / calls for each in times.values()]

    calls = arguments.calls
    if not calls:
        tried = [times_s[1:].max(axis=1) for times_s in timed(TRIED, 3, 1)]
        fastest_s = min(float(np.median(each)) for each in tried)
        calls = min(MOST_CALLS, 1 + int(SAMPLE_S / fastest_s))
    return calls, timed(calls, arguments.repeats, arguments.warmup)


def repeated(run: Run, calls: int) -> None:
    """Call so many times."""
    for _ in range(calls):
        run()


def heading(where: str, cores: str, arguments: argparse.Namespace) -> list[str]:
    """Return the lines above the tables."""
    lines = [
        f"halo exchange: {where}",
        cores,
        f"time: of a call, the slowest rank, median of {arguments.repeats} samples of many calls "
        f"after {arguments.warmup} warm-ups, cases in turns",
        "GB/s: 1e9 byte/s of cells that leave the rank that sends most",
        "x MPI: how many times as fast as the fastest of subarray, persistent, alltoallw",
    ]
    return [f"# {text}" for text in lines]


def about(setting: Setting, plan: WindowPlan, size_bytes: int) -> list[str]:
    """Return what is said of a setting."""
    return [
        "#",
        f"# {setting}: {size_bytes} bytes a rank, in runs of {_run_bytes(setting, plan)}",
        f"# {'operation':>10} {'way':>21} {'time (us)':>10} {'min':>9} {'max':>9} {'GB/s':>7} "
        f"{'x MPI':>6} {'calls':>6}",
    ]


def _run_bytes(setting: Setting, plan: WindowPlan) -> int:
    """Return the bytes that lie together in the window, of the first piece; 0 of none."""
    pieces = [piece for message in plan.recvs for piece in message.pieces]
    if not pieces:
        return 0
    run_bytes, shape = setting.cell_bytes, pieces[0].target.shape
    for n, extent in zip(reversed(shape), reversed(plan.window.shape), strict=True):
        run_bytes *= n
        if n != extent:
            break
    return run_bytes


def line(row: Row, rows: Sequence[Row], warmup: int) -> str:
    """Return a row of the table."""
    case, times_s = row.case, row.slowest(warmup)
    time_s = float(np.median(times_s))
    by_mpi = [
        each.slowest(warmup)
        for each in rows
        if each.case.way in MPI_TYPES and each.case.operation == case.operation
    ]
    best = min(by_mpi, key=np.median, default=None)
    beside = "-" if best is None else f"{np.median(best / times_s):.2f}"
    return (
        f"  {case.operation:>10} {case.way:>21} {1e6 * time_s:>10.2f} "
        f"{1e6 * times_s.min():>9.2f} {1e6 * times_s.max():>9.2f} "
        f"{row.size_bytes / time_s / GIGA:>7.2f} {beside:>6} {row.calls:>6}"
    )


def point(row: Row) -> Point:
    """Return a point of a study of halos."""
    spec, sent_bytes = row.setting.spec, float(row.size_bytes)
    factors = {
        "setting": row.setting.name,
        "widths": _text(spec.halo),
        **{key: _text(getattr(spec, key)) for key in ("shape", "procs", "trail")},
        **{key: _text(getattr(spec, key)) for key in ("boundary", "dtype", "wire")},
        "transfer": row.case.operation,
        "way": row.case.way,
    }
    outcomes = {"payload_bytes": sent_bytes}
    if spec.wire == "raw":
        outcomes["wire_bytes"] = sent_bytes
    return Point(factors, outcomes, row.times_s)


def _text(value: Any) -> str:
    """Return 1,0:2 of [1, [0, 2]]."""
    if not isinstance(value, list):
        return str(value)
    return ",".join(":".join(map(str, n)) if isinstance(n, list) else str(n) for n in value)

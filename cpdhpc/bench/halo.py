"""Benchmark of halo exchanges beside MPI's own ways, on the same arrays.

Ours and MPI's work in an array that holds the halo around the rank's own cells; "copied" is ours
with the cells elsewhere, which are copied too. subarray: Isend and Irecv of subarray datatypes, as
they are and by persistent requests; alltoallw: MPI_Neighbor_alltoallw of them; packed: slices of
NumPy copied to buffers and back. What accumulates adds the halos to the cells that they show.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config import UserError
from ..darray.plan import WindowPlan
from ..darray.show import add_options, given, spec_of
from ..world.cores import own_cores
from ..world.mpi import World
from ..world.ranks import Ranks
from . import halo_overlap
from .baselines import WAYS
from .halo_cases import (
    ACCUMULATE,
    COPIED,
    EXCHANGE,
    OURS,
    USUAL,
    Case,
    Setting,
    open_cases,
    run_bytes,
    sent_bytes,
    usual,
)
from .harness import (
    Times,
    check_out,
    check_positive,
    check_whole,
    interleave_ranks,
    machine_line,
    parse_names,
    together,
    write_samples,
)

GIGA = 1e9
OPERATIONS = EXCHANGE, ACCUMULATE
ALL_WAYS = OURS, COPIED, *WAYS
SAMPLE_S = 1e-3  # the least that a sample should take
MOST_CALLS = 500  # of a sample
TRIED = 10  # calls of a sample that says how many fill one


class Row(NamedTuple):
    """A case of a setting: times_s float64[repeats, processes], of one call."""

    setting: Setting
    case: Case
    size_bytes: int
    calls: int
    times_s: Times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument(
        "--usual",
        default=",".join(USUAL),
        help="of " + "; ".join(f"{name}: {of.text}" for name, of in USUAL.items()),
    )
    parser.add_argument(
        "--operations", default=EXCHANGE, help=f"of {','.join(OPERATIONS)} (default {EXCHANGE})"
    )
    parser.add_argument(
        "--ways",
        default="all",
        help=f"of {'; '.join(ALL_WAYS)}, parted by semicolons (default all)",
    )
    add_options(parser, filters=False)
    parser.add_argument("--repeats", type=int, default=31, help="samples of each (default 31)")
    parser.add_argument("--warmup", type=int, default=3, help="samples before (default 3)")
    parser.add_argument(
        "--calls", type=int, default=0, help="calls of a sample (default: as fill a millisecond)"
    )
    halo_overlap.add_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE.h5", help="write every sample")


def settings_of(arguments: argparse.Namespace, ranks: int) -> list[Setting]:
    """Return what is to be measured: the usual, or the one of --shape. Raises UserError."""
    laid_over = given(arguments)
    if "shape" in laid_over:
        laid_over.setdefault("procs", [ranks] + [1] * (len(laid_over["shape"]) - 1))
        laid_over.setdefault("boundary", "none")
        laid_over.setdefault("halo", 1)
        found = [Setting("given", spec_of(laid_over, "bench halo"))]
    else:
        names = parse_names("--usual", arguments.usual, USUAL.__getitem__)
        found = [usual(name, ranks, laid_over) for name in names]
    for setting in found:
        planned = setting.spec.geometry().layout.ranks
        if planned != ranks:
            raise UserError(f"--procs: is for {planned} ranks, here are {ranks}")
    return found


def ways_of(text: str) -> list[str]:
    """Return the ways that are named. Raises UserError."""
    names = [name.strip() for name in text.split(";")]
    unknown = [name for name in names if name not in (*ALL_WAYS, "all")]
    if unknown:
        raise UserError(f"--ways {unknown[0]}: known are {'; '.join(ALL_WAYS)}, all")
    return list(ALL_WAYS) if "all" in names else names


def run(arguments: argparse.Namespace, world: World) -> None:
    """Check and time every case, and print a table. Collective."""
    check_positive(arguments, "repeats")
    check_whole(arguments, "warmup", "calls")
    settings = settings_of(arguments, world.ranks)
    operations = parse_names("--operations", arguments.operations,
                             dict.fromkeys(OPERATIONS).__getitem__)  # fmt: skip
    ways = ways_of(arguments.ways)
    together(world, lambda: check_out(arguments.out))
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
    if rows:
        times = [row.times_s for row in rows]
        write_samples(arguments.out, world, "halo", columns(rows), times, arguments.warmup)


def measure(
    world: World,
    setting: Setting,
    arguments: argparse.Namespace,
    operations: Sequence[str],
    ways: Sequence[str],
) -> list[Row]:
    """Return the rows of a setting, and print them. Collective."""
    with setting.plan(world) as plan:
        size_bytes = max(world.gather(sent_bytes(plan, setting.spec), "bench halo"))
        lines = about(setting, plan, size_bytes)
        if world.process == 0:
            print("\n".join(lines), flush=True)
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
    world: Ranks, cases: Sequence[Case], arguments: argparse.Namespace
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


def repeated(run: Callable[[], object], calls: int) -> None:
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
    spec = setting.spec
    trail = f" x {spec.trail}" if spec.trail else ""
    cell_bytes = np.dtype(spec.dtype).itemsize * int(np.prod(spec.trail, dtype=np.int64))
    pieces = [piece for message in plan.recvs for piece in message.pieces]
    runs = run_bytes(plan, pieces, cell_bytes)
    return [
        "#",
        f"# {setting.name}: {spec.shape}{trail} {spec.dtype} over {spec.procs}, halo {spec.halo}, "
        f"boundary {spec.boundary}, wire {spec.wire}: {size_bytes} bytes a rank, in runs of {runs}",
        f"# {'operation':>10} {'way':>21} {'time (us)':>10} {'min':>9} {'max':>9} {'GB/s':>7} "
        f"{'x MPI':>6} {'calls':>6}",
    ]


def line(row: Row, rows: Sequence[Row], warmup: int) -> str:
    """Return a row of the table."""
    times_s = slowest(row, warmup)
    time_s = float(np.median(times_s))
    base = best(rows, row.case.operation, warmup)
    beside = "-" if base is None else f"{np.median(slowest(base, warmup) / times_s):.2f}"
    return (
        f"  {row.case.operation:>10} {row.case.way:>21} {1e6 * time_s:>10.2f} "
        f"{1e6 * times_s.min():>9.2f} {1e6 * times_s.max():>9.2f} "
        f"{row.size_bytes / time_s / GIGA:>7.2f} {beside:>6} {row.calls:>6}"
    )


def slowest(row: Row, warmup: int) -> Times:
    """Return the times of the slowest rank, without warm-ups."""
    times: Times = row.times_s[warmup:].max(axis=1)
    return times


def best(rows: Sequence[Row], operation: str, warmup: int) -> Row | None:
    """Return the fastest of MPI's ways with datatypes; None where there is none."""
    found = [row for row in rows if row.case.is_mpi_types and row.case.operation == operation]
    return min(found, key=lambda row: float(np.median(slowest(row, warmup))), default=None)


def columns(rows: Sequence[Row]) -> Mapping[str, list[str] | list[int]]:
    """Return the factors of the rows for a file."""
    specs = [row.setting.spec for row in rows]
    return {
        "setting": [row.setting.name for row in rows],
        "shape": [_text(spec.shape) for spec in specs],
        "procs": [_text(spec.procs or []) for spec in specs],
        "halo": [_text([spec.halo] if isinstance(spec.halo, int) else spec.halo) for spec in specs],
        "boundary": [
            spec.boundary if isinstance(spec.boundary, str) else ",".join(spec.boundary)
            for spec in specs
        ],
        "dtype": [spec.dtype for spec in specs],
        "trail": [_text(spec.trail) for spec in specs],
        "wire": [spec.wire for spec in specs],
        "transfer": [row.case.operation for row in rows],
        "way": [row.case.way for row in rows],
        "sent_bytes": [row.size_bytes for row in rows],
        "calls": [row.calls for row in rows],
    }


def _text(numbers: Sequence[int | list[int]]) -> str:
    return ",".join(":".join(map(str, n)) if isinstance(n, list) else str(n) for n in numbers)

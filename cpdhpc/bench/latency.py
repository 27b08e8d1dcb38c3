"""Benchmark of small all-reduces beside MPI_Allreduce, in the columns of the OSU benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..collectives.allreduce import Allreduce
from ..methods import MEMCPY
from ..world.cores import own_cores
from ..world.ranks import Ranks
from .allreduce import Row, add_beside, measure, parse_beside, points
from .harness import (
    Measured,
    add_device,
    check_out,
    check_positive,
    check_whole,
    machine_line,
    parse_sizes,
    take_device,
    together,
)

METHOD = Allreduce("raw", "tree")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("--sizes", default="8:4MiB:x4", help="bytes of float32 (default 8:4MiB:x4)")
    add_device(parser)
    add_beside(parser)
    parser.add_argument("--repeats", type=int, default=200, help="timed calls (default 200)")
    parser.add_argument("--warmup", type=int, default=20, help="calls before (default 20)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.h5", help="write every sample, for report"
    )


def run(arguments: argparse.Namespace, world: Ranks) -> Measured:
    """Check and time all calls at every size, and print a table. Collective."""
    check_positive(arguments, "repeats")
    check_whole(arguments, "warmup")
    sizes = parse_sizes(arguments.sizes)
    together(world, lambda: check_out(arguments.out, world))
    rows: list[Row] = []
    with own_cores(world) as cores:
        taken = take_device(arguments, world)
        beside, skipped = parse_beside(arguments, world, sizes)
        asked = beside._replace(methods=[METHOD], baselines=["mpi", MEMCPY])
        said = [each for each in (machine_line(world), taken, *skipped) if each]
        for size_bytes in sizes:
            found = measure(world, arguments, size_bytes, asked)
            if world.process == 0:
                lines = [] if rows else heading("; ".join(said), cores, found)
                print("\n".join([*lines, line(found, arguments.warmup)]), flush=True)
            rows += found
    return Measured("latency", "allreduce", points(rows), arguments.warmup, cores)


def heading(where: str, cores: str, rows: Sequence[Row]) -> list[str]:
    """Return the lines above the table; rows: of a size, a group of columns each."""
    names = [row.case.algorithm for row in rows[:2]]
    names += [f"tree, raw, {row.case.call}" for row in rows[2:]]
    latency = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)")
    columns = " ".join(f"{each:>15}" for each in latency * len(rows))
    return [
        f"# all-reduce of float32, sum: {where}",
        f"# {cores}",
        "# Avg: mean over ranks of the mean over calls; Min, Max: over ranks; a barrier before; "
        "mpi: MPI_Allreduce; memcpy: of the array by all ranks at once",
        "# /memcpy, /bound: of the best of ours, by medians over calls of the slowest rank, as in "
        "files; bound: the longer of memcpy and 2 (N - 1) / N of the bytes over a node's link",
        f"#{'':<9} " + " ".join(f"{each:>47}" for each in names),
        f"{'# Size(B)':<10} {columns}{'/memcpy':>9}{'/bound':>9}{'Iterations':>12}",
    ]


def line(rows: Sequence[Row], warmup: int) -> str:
    """Return a row of the table, of the rows of a size."""
    cells = []
    for row in rows:
        by_rank = 1e6 * row.times_s[warmup:].mean(axis=0)
        cells += [by_rank.mean(), by_rank.min(), by_rank.max()]
    figures = " ".join(f"{cell:>15.2f}" for cell in cells)
    best_s = min(row.median_s(warmup) for row in rows[2:])
    ratios = best_s / rows[1].median_s(warmup), best_s / rows[1].bound_s
    shown = "".join(f"{ratio:>9.2f}" for ratio in ratios)
    return f"{rows[0].size_bytes:<10} {figures}{shown}{len(rows[0].times_s) - warmup:>12}"

"""Benchmark of small all-reduces beside MPI_Allreduce, in the columns of the OSU benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..collectives.allreduce import Allreduce
from ..world.cores import own_cores
from ..world.ranks import Ranks
from .allreduce import Row, cases_of_size, points
from .harness import (
    Measured,
    Times,
    add_device,
    check_out,
    check_positive,
    check_whole,
    interleave_ranks,
    machine_line,
    parse_sizes,
    take_device,
    together,
    whole,
)

METHOD = Allreduce("raw", "tree")
COLUMNS = ("MPI_Allreduce", "tree, raw", "tree, raw, prepared")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("--sizes", default="8:4MiB:x4", help="bytes of float32 (default 8:4MiB:x4)")
    add_device(parser)
    parser.add_argument("--repeats", type=int, default=200, help="timed calls (default 200)")
    parser.add_argument("--warmup", type=int, default=20, help="calls before (default 20)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.h5", help="write every sample, for report"
    )


def run(arguments: argparse.Namespace, world: Ranks) -> Measured:
    """Check and time all three at every size, and print a table. Collective."""
    check_positive(arguments, "repeats")
    check_whole(arguments, "warmup")
    sizes = parse_sizes(arguments.sizes)
    together(world, lambda: check_out(arguments.out, world))
    rows: list[Row] = []
    with own_cores(world) as cores:
        taken = take_device(arguments, world)
        where = "; ".join(filter(None, [machine_line(world), taken]))
        if world.process == 0:
            print("\n".join(heading(where, cores)), flush=True)
        for size_bytes in sizes:
            rows += measure(world, size_bytes, arguments)
    return Measured("latency", "allreduce", points(rows), arguments.warmup, cores)


def measure(world: Ranks, size_bytes: int, arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of a size, and print them as one. Collective."""
    cases = cases_of_size(world, size_bytes, [METHOD], ["mpi"], arguments.device)
    called = cases[-1]
    with METHOD.prepare(world, [called.data.x], [called.out]) as prepared:
        cases.append(
            replace(called, algorithm="tree prepared", run=whole(prepared.run, called.out))
        )
        cases[-1].check(world)
        runs = {case.algorithm: case.run for case in cases}
        times = interleave_ranks(world, runs, arguments.repeats, arguments.warmup)
    if world.process == 0:
        timed = [each[arguments.warmup :] for each in times.values()]
        print(line(size_bytes, timed), flush=True)
    return [Row(size_bytes, case, times[case.algorithm], np.nan) for case in cases]


def heading(where: str, cores: str) -> list[str]:
    """Return the lines above the table."""
    latency = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)")
    names = " ".join(f"{each:>15}" for each in latency * len(COLUMNS))
    return [
        f"# all-reduce of float32, sum: {where}",
        f"# {cores}",
        "# Avg: mean over ranks of the mean over calls; Min, Max: over ranks; a barrier before",
        f"#{'':<9} " + " ".join(f"{each:>47}" for each in COLUMNS),
        f"{'# Size(B)':<10} {names}{'Iterations':>12}",
    ]


def line(size_bytes: int, times: Sequence[Times]) -> str:
    """Return a row of the table. times: float64[repeats, processes] of each of COLUMNS."""
    cells = []
    for each in times:
        by_rank = 1e6 * each.mean(axis=0)
        cells += [by_rank.mean(), by_rank.min(), by_rank.max()]
    figures = " ".join(f"{cell:>15.2f}" for cell in cells)
    return f"{size_bytes:<10} {figures}{len(times[0]):>12}"

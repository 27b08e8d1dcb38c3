"""Benchmark of small all-reduces beside MPI_Allreduce, in the columns of the OSU benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ..comm import Allreduce, Ranks
from .allreduce import Row, columns
from .cases import cases_of_size
from .harness import Times, interleave_ranks
from .options import check_out, check_positive, machine_line, parse_sizes, together
from .samples import write_samples

SUMMARY = "latency of small all-reduces, tree beside MPI_Allreduce; under mpirun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument(
        "--sizes", default="8:16KiB:x2", help="bytes of float32 (default 8:16KiB:x2)"
    )
    parser.add_argument("--repeats", type=int, default=200, help="timed calls (default 200)")
    parser.add_argument("--warmup", type=int, default=20, help="calls before (default 20)")
    parser.add_argument("--out", type=Path, metavar="FILE.h5", help="write every sample")


def run(arguments: argparse.Namespace, world: Ranks) -> None:
    """Check and time both at every size, and print a table. Collective."""
    check_positive(arguments, "repeats")
    sizes = parse_sizes(arguments.sizes)
    together(world, lambda: check_out(arguments.out))
    machine = machine_line(world)
    if world.rank == 0:
        print("\n".join(heading(machine, arguments)), flush=True)
    rows = []
    for size_bytes in sizes:
        mpi, tree = cases_of_size(world, size_bytes, [Allreduce("raw", "tree")], ["mpi"])
        cases = {"mpi": mpi.run, "tree": tree.run}
        times = interleave_ranks(world, cases, arguments.repeats, arguments.warmup)
        rows += [Row(size_bytes, case, times[case.algorithm], np.nan) for case in (mpi, tree)]
        if world.rank == 0:
            timed = {name: each[arguments.warmup :] for name, each in times.items()}
            print(line(size_bytes, timed, arguments.repeats), flush=True)
    write_samples(
        arguments.out, world, "latency", columns(rows), [r.times_s for r in rows], arguments.warmup
    )


def heading(machine: str, arguments: argparse.Namespace) -> list[str]:
    """Return the lines above the table."""
    latency = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)")
    return [
        f"# all-reduce of float32, sum: {machine}",
        "# Avg: mean over ranks of the mean over calls; Min, Max: over ranks; a barrier before each",
        f"#{'':<9} {'MPI_Allreduce':>47} {'tree, raw':>47}",
        f"{'# Size(B)':<10} "
        + " ".join(f"{each:>15}" for each in latency * 2)
        + f"{'Iterations':>12}",
    ]


def line(size_bytes: int, times: dict[str, Times], repeats: int) -> str:
    """Return a row of the table. times: float64[repeats, processes] of mpi and tree."""
    cells = []
    for each in times.values():
        by_rank = 1e6 * each.mean(axis=0)
        cells += [by_rank.mean(), by_rank.min(), by_rank.max()]
    return f"{size_bytes:<10} " + " ".join(f"{cell:>15.2f}" for cell in cells) + f"{repeats:>12}"

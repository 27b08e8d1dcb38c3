"""Benchmark of all-reduces beside other libraries' and memcpy, in the columns of nccl-tests.

algbw is size / time; busbw is algbw times 2 (p - 1) / p, which for the least traffic possible is
the rate of a rank's link; wirebw is the bytes that left the rank that sent most / time.
GB/s are 1e9 byte/s. bench latency has small all-reduces, in the columns of the OSU benchmarks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..collectives.allreduce import Allreduce
from ..collectives.method import AUTO, Machine, parse_scaling, read_machine
from ..collectives.predict import predict
from ..collectives.rank_program import ACCUMULATES
from ..collectives.recorded import empty_shared
from ..collectives.schedules import SCHEDULES
from ..config import UserError, among
from ..formats import MICROSCALING, wire_scaling
from ..methods import BASELINE_DEVICES, MEMCPY, SCALINGS
from ..ops import on_gpu
from ..ops.payloads import parse_wire
from ..world.cores import own_cores
from ..world.ranks import Ranks
from .allreduce_cases import (
    BASELINES,
    CALLS,
    Array,
    TimedCase,
    bound_s,
    cases_of_size,
    group_of,
    library_of,
    missing,
    wire_bytes,
)
from .harness import (
    Measured,
    Point,
    Times,
    add_device,
    add_samples,
    check_options,
    check_out,
    interleave_ranks,
    machine_line,
    parse_names,
    parse_sizes,
    ping_pong,
    take_device,
)

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


class Asked(NamedTuple):
    """What to measure at every size.

    lent: as in cases_of_size; link_s: of a byte on a node's link; machine: for predictions
    """

    methods: Sequence[Allreduce]
    baselines: Sequence[str]
    calls: Sequence[str]
    lent: Array | None
    link_s: float
    machine: Machine | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add_choices(parser)
    add_device(parser)
    add_beside(parser)
    parser.add_argument(
        "--baselines",
        metavar="NAME,...",
        help=f"of {','.join(BASELINES)} (default: those that can run)",
    )
    add_samples(parser, 9, 2)
    parser.add_argument(
        "--predict", type=Path, metavar="MACHINE.toml", help="show predictions; used by auto"
    )


def add_beside(parser: argparse.ArgumentParser) -> None:
    """Add the options of how all-reduces are called, and of the bound beside their times."""
    parser.add_argument(
        "--calls",
        metavar="NAME,...",
        help="plain; prepared; shared: prepared, with arrays of empty_shared where ranks of a node "
        "share memory; graphs: prepared, as CUDA graphs (default: those that the device knows)",
    )
    parser.add_argument(
        "--link",
        type=float,
        metavar="GBIT",
        help="rate of a node's link each way, 1e9 bit/s, for the bound (default: by a ping-pong); "
        "bound: the longer of memcpy, of the array by all ranks at once, and of 2 (N - 1) / N of "
        "the bytes on the wire at that rate, N nodes",
    )


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which all-reduces."""
    parser.add_argument(
        "--sizes",
        default="64KiB:16MiB:x16",
        metavar="SIZE,...",
        help="bytes of float32: 1MiB,16MiB or first:last:xFACTOR",
    )
    parser.add_argument(
        "--algorithms",
        default="ring,tree,direct",
        metavar="NAME,...",
        help=f"of {','.join(SCHEDULES)},{AUTO}",
    )
    parser.add_argument(
        "--wires", default="raw,e4m3", metavar="NAME,...", help="raw, formats, mxfp4"
    )
    parser.add_argument(
        "--scalings", default="tile", metavar="NAME,...", help=f"of {','.join(SCALINGS)}"
    )
    parser.add_argument(
        "--accumulate",
        default="default",
        metavar="NAME,...",
        help=f"of {','.join(ACCUMULATES)},default: the algorithm's own",
    )


def parse_methods(
    arguments: argparse.Namespace, machine: Machine | None
) -> tuple[list[Allreduce], list[str]]:
    """Return the methods that the options name, and what does not go together.

    Raises UserError for unknown names, or where nothing goes together.
    """
    algorithms = parse_names("--algorithms", arguments.algorithms, among((*SCHEDULES, AUTO)))
    wires = parse_names("--wires", arguments.wires, parse_wire)
    scalings = parse_names("--scalings", arguments.scalings, lambda s: parse_scaling(s, None))
    ways = parse_names("--accumulate", arguments.accumulate, among((*ACCUMULATES, "default")))
    methods, skipped = dict[Allreduce, None](), []
    for algorithm, wire, scaling, way in product(algorithms, wires, scalings, ways):
        raw = wire == "raw"  # which neither scaling nor rounding touches
        scaling = wire_scaling(wire) if raw or wire in MICROSCALING else scaling
        options = (scaling, None if raw or way == "default" else way)
        try:
            methods[Allreduce(wire, algorithm, *options, machine=machine)] = None
        except ValueError as error:
            skipped.append(str(error).removeprefix("allreduce: "))
    if not methods:
        raise UserError(f"bench: nothing to do: {'; '.join(skipped) or 'no names are given'}")
    return list(methods), skipped


def parse_baselines(
    world: Ranks, text: str | None, device: str
) -> tuple[list[str], dict[str, str]]:
    """Return the baselines to run, mpi and memcpy first, and why others are left out. Collective.

    Raises UserError where text names one that cannot run.
    """
    asked = None if text is None else parse_names("--baselines", text, among(BASELINES))
    why = {}
    for library, devices in BASELINE_DEVICES.items():
        reason = missing(world, library) if device in devices else f"takes no {device} arrays"
        if reason:
            why[library] = reason
    for name in asked or ():
        if library_of(name) in why:
            raise UserError(f"--baselines {name}: {why[library_of(name)]}")
    wanted = BASELINES if asked is None else {"mpi", MEMCPY, *asked}
    found = [name for name in BASELINES if name in wanted and library_of(name) not in why]
    told = why if device == "gpu" else {name: why[name] for name in why if name != "nccl"}
    return found, told if asked is None else {}


def parse_beside(
    arguments: argparse.Namespace, world: Ranks, sizes: Sequence[int]
) -> tuple[Asked, list[str]]:
    """Return what add_beside's options ask for, and what is left out. Collective."""
    device = arguments.device
    calls = [name for name, devices in CALLS.items() if device in devices]
    asked = calls
    if arguments.calls is not None:
        asked = parse_names("--calls", arguments.calls, among(CALLS))
    calls = [name for name in asked if name in calls]
    if not asked:
        raise UserError(f"--calls {arguments.calls}: no names are given")
    if not calls:
        raise UserError(f"--calls {arguments.calls}: none of them takes {device} arrays")
    skipped = [f"{name}: takes no {device} arrays" for name in asked if name not in calls]
    if arguments.link is not None and not 0 < arguments.link < np.inf:
        raise UserError(f"--link {arguments.link:g}: must be above 0")
    if "shared" in calls and world.shared() is None:
        calls.remove("shared")
        skipped.append("shared: the arrays are in no memory that processes of a node share")
    lent = empty_shared(world, (3, -(-max(sizes) // 64) * 16)) if "shared" in calls else None
    link_s = 0.0
    if len(set(world.nodes)) > 1:
        link_s = ping_pong(world)[1] if arguments.link is None else 8 / GIGA / arguments.link
    return Asked([], [], calls, lent, link_s), skipped


def run(arguments: argparse.Namespace, world: Ranks) -> Measured:
    """Check and time every case at every size, and print a table. Collective."""
    check_options(arguments, 1, "repeats")
    check_options(arguments, 0, "warmup")
    sizes = parse_sizes(arguments.sizes)
    machine = None
    if arguments.predict is not None:
        machine = world.agreed(lambda: read_machine(arguments.predict)).machine
    methods, skipped = parse_methods(arguments, machine)
    where = take_device(arguments, world)
    baselines, why = parse_baselines(world, arguments.baselines, arguments.device)
    skipped += [f"{library}: {reason}" for library, reason in why.items()]
    world.agreed(lambda: check_out(arguments.out, world))
    with own_cores(world) as cores, group_of(world, baselines):
        beside, further = parse_beside(arguments, world, sizes)
        asked = beside._replace(methods=methods, baselines=baselines, machine=machine)
        header = heading(machine_line(world), cores, arguments, skipped + further, machine)
        header += [f"# {where}"] if where else []
        if world.process == 0:
            print("\n".join(header), flush=True)
        rows = []
        for size_bytes in sizes:
            found = measure(world, arguments, size_bytes, asked)
            if world.process == 0:
                lines = (line(row, found, world.ranks, arguments.warmup, machine) for row in found)
                print("\n".join(lines), flush=True)
            rows += found
    return Measured("allreduce", "allreduce", points(rows), arguments.warmup, cores)


def measure(
    world: Ranks, arguments: argparse.Namespace, size_bytes: int, asked: Asked
) -> list[Row]:
    """Return the rows of a size, MPI_Allreduce and memcpy first. Collective."""
    cases = cases_of_size(
        world, size_bytes, asked.methods, asked.baselines, arguments.device, asked.calls, asked.lent
    )
    times = interleave_ranks(
        world,
        {i: case.run for i, case in enumerate(cases)},
        arguments.repeats,
        arguments.warmup,
        lambda i: cases[i].prepare(),
    )
    copies_s = times[asked.baselines.index(MEMCPY)][arguments.warmup :].max(axis=1)
    for case in cases:
        case.free()
    return [
        Row(
            size_bytes,
            case,
            times[i],
            bound_s(world, wire_bytes(case), float(np.median(copies_s)), asked.link_s),
            predicted_s(asked.machine, case, world),
        )
        for i, case in enumerate(cases)
    ]


def predicted_s(machine: Machine | None, case: TimedCase, world: Ranks) -> float:
    """Return the predicted time of a plain call, nan for others or where there is no machine."""
    if machine is None or case.method is None or case.call != "plain":
        return np.nan
    method = Allreduce(case.method.wire, case.chosen, case.method.scaling, case.method.accumulate)
    return predict(machine, method, world.nodes, case.out.size).time_s


def heading(
    where: str,
    cores: str,
    arguments: argparse.Namespace,
    skipped: Sequence[str],
    machine: Machine | None,
) -> list[str]:
    """Return the lines above the table."""
    lines = [
        f"all-reduce of float32, sum, out of place: {where}",
        cores,
        f"time: the slowest rank from a barrier; {arguments.repeats} calls after "
        f"{arguments.warmup} warm-ups, cases in turns; GB/s: 1e9 byte/s",
        "busbw: 2 (p - 1) / p of size / time; wirebw: bytes that left a rank / time; "
        "error: relative, Euclidean norm",
        "x mpi: how many times as fast as MPI_Allreduce (mpi); / memcpy: of the array by all ranks "
        "at once; by medians, as all ratios",
        "/ bound: the longer of memcpy and 2 (N - 1) / N of the bytes on the wire over the link of "
        "each of N nodes",
        *(f"left out: {text}" for text in skipped),
        f"{'size':>11} {'':>11} {'':>13} {'':>8} {'':>6} {'':>9} {'':>10} {'time':>10} {'min':>10} "
        f"{'max':>10} {'algbw':>7} {'busbw':>7} {'wirebw':>7} {'':>8} {'':>6} {'/':>6} {'/':>6}"
        + (f" {'predicted':>10} {'predicted':>9}" if machine else ""),
        f"{'(B)':>11} {'count':>11} {'algorithm':>13} {'call':>8} {'wire':>6} {'scaling':>9} "
        f"{'accumulate':>10} {'(us)':>10} {'(us)':>10} {'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7} "
        f"{'(GB/s)':>7} {'error':>8} {'x mpi':>6} {'memcpy':>6} {'bound':>6}"
        + (f" {'(us)':>10} {'/ time':>9}" if machine else ""),
    ]
    return [f"# {text}" for text in lines]


def line(row: Row, rows: Sequence[Row], ranks: int, warmup: int, machine: Machine | None) -> str:
    """Return a row of the table, of those of its size, mpi and memcpy first; time is the median."""
    case, size = row.case, row.size_bytes
    times_s = row.times_s[warmup:].max(axis=1)
    time_s, mpi_s, copy_s = (each.median_s(warmup) for each in (row, *rows[:2]))
    bus_bytes = size * 2 * (ranks - 1) / ranks
    wire = f"{case.wire_bytes / time_s / GIGA:>7.2f}" if case.method else f"{'-':>7}"
    error = f"{case.error:>8.1e}" if case.is_sum else f"{'-':>8}"
    text = (
        f"  {size:>11} {size // 4:>11} {case.name:>13} {case.call:>8} {case.wire:>6} "
        f"{case.scaling:>9} "
        f"{case.accumulate:>10} {1e6 * time_s:>10.1f} {1e6 * times_s.min():>10.1f} "
        f"{1e6 * times_s.max():>10.1f} {size / time_s / GIGA:>7.2f} "
        f"{bus_bytes / time_s / GIGA:>7.2f} {wire} {error} "
        f"{mpi_s / time_s:>6.2f} {time_s / copy_s:>6.2f} "
        f"{time_s / row.bound_s:>6.2f}"
    )
    if machine is None:
        return text
    if np.isnan(row.predicted_s):
        return text + f" {'-':>10} {'-':>9}"
    return text + f" {1e6 * row.predicted_s:>10.1f} {row.predicted_s / time_s:>9.2f}"


def points(rows: Sequence[Row]) -> list[Point]:
    """Return the points of a study of all-reduces."""
    return [Point(_factors(row), _outcomes(row), row.times_s) for row in rows]


def _factors(row: Row) -> dict[str, int | str]:
    case = row.case
    found: dict[str, int | str] = {
        "size_bytes": row.size_bytes,
        "algorithm": case.algorithm,
        "wire": case.wire,
    }
    if on_gpu(case.out):
        found["device"] = "gpu"
    if case.algorithm == AUTO:
        found["chosen"] = case.chosen
    if case.method is not None:
        found["call"] = case.call
    if case.method is None or case.method.fmt is None:
        return found
    return found | {"value_scaling": case.scaling, "accumulate": case.accumulate}


def _outcomes(row: Row) -> dict[str, float]:
    found = {
        "error": row.case.error,
        "wire_bytes": row.case.wire_bytes,
        "payload_bytes": float(row.size_bytes),
        "bound_s": row.bound_s,
    }
    return found if np.isnan(row.predicted_s) else found | {"predicted_s": row.predicted_s}


LATENCY = Allreduce("raw", "tree")  # of small arrays, the fastest


def add_latency(parser: argparse.ArgumentParser) -> None:
    """Add the options of bench latency."""
    parser.add_argument("--sizes", default="8:4MiB:x4", metavar="SIZE,...", help="bytes of float32")
    add_device(parser)
    add_beside(parser)
    add_samples(parser, 200, 20)


def run_latency(arguments: argparse.Namespace, world: Ranks) -> Measured:
    """Check and time small all-reduces beside MPI_Allreduce, in the columns of OSU. Collective."""
    check_options(arguments, 1, "repeats")
    check_options(arguments, 0, "warmup")
    sizes = parse_sizes(arguments.sizes)
    world.agreed(lambda: check_out(arguments.out, world))
    rows: list[Row] = []
    with own_cores(world) as cores:
        taken = take_device(arguments, world)
        beside, skipped = parse_beside(arguments, world, sizes)
        asked = beside._replace(methods=[LATENCY], baselines=["mpi", MEMCPY])
        said = [each for each in (machine_line(world), taken, *skipped) if each]
        for size_bytes in sizes:
            found = measure(world, arguments, size_bytes, asked)
            if world.process == 0:
                lines = [] if rows else latency_heading("; ".join(said), cores, found)
                print("\n".join([*lines, latency_line(found, arguments.warmup)]), flush=True)
            rows += found
    return Measured("latency", "allreduce", points(rows), arguments.warmup, cores)


def latency_heading(where: str, cores: str, rows: Sequence[Row]) -> list[str]:
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


def latency_line(rows: Sequence[Row], warmup: int) -> str:
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

"""Benchmark of all-reduces, beside those of other libraries and memcpy.

Cases are those of studies of kind allreduce. With --all the columns are those of nccl-tests. For
small all-reduces use bench latency; with --all its columns are those of the OSU benchmarks. GB/s
are 1e9 byte/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ...collectives.allreduce import Allreduce
from ...collectives.collective import Collective
from ...collectives.method import AUTO, Machine, parse_scaling, read_machine
from ...collectives.rank_program import ACCUMULATES
from ...collectives.schedules import SCHEDULES
from ...config import UserError, among
from ...formats import IN_BLOCKS, wire_scaling
from ...methods import BASELINE_DEVICES, COLLECTIVES, MEMCPY, SCALINGS, SUMMING
from ...methods import BASELINES as LIBRARIES
from ...ops.payloads import parse_wire
from ...world.cores import own_cores
from ...world.ranks import Ranks
from ..kinds import flags, printing, timing
from ..kinds.allreduce import (
    ALL_REDUCE,
    ALLREDUCE,
    CALLS,
    PLAIN,
    PREPARED,
    TITLES,
    factors_of,
    share,
)
from ..kinds.allreduce_cases import BASELINES, bound_s, group_of, library_of, missing, wire_bytes
from ..kinds.place import JobRanks
from ..report import units
from ..settings import options
from ..study_data import Factors, Value

GIGA = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add_choices(parser)
    flags.add_device(parser)
    add_beside(parser)
    add = options(parser)
    add(
        "--collective NAME",
        f"allreduce, or {','.join(COLLECTIVES)}, beside MPI's own; sizes are of the whole array",
        ALL_REDUCE,
        type=flags.named(among((ALL_REDUCE, *COLLECTIVES))),
    )
    add(
        "--baselines NAME,...",
        f"baselines: {','.join(BASELINES)} (default: all that can run)",
        flags.names(among(BASELINES)),
    )
    flags.add_repeats(parser, 9, 2, out=True)
    add_all(parser, "every call of each method, and the columns of nccl-tests")
    add(
        "--predict MACHINE.toml",
        "file of bench fit: show its predictions, and choose for auto by them",
        Path,
    )


def add_all(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option that shows all that was measured."""
    options(parser)("--all", f"print {what}; files have all of it")


def add_beside(parser: argparse.ArgumentParser) -> None:
    """Add the options of how all-reduces are called, and of the bound beside their times."""
    add = options(parser)
    add(
        "--calls NAME,...",
        "plain; prepared; shared: prepared, with arrays of empty_shared, which ranks of a node "
        "share; graphs: prepared, as CUDA graphs (default: all that the device has)",
        flags.names(among(CALLS)),
    )
    add(
        "--link GBIT",
        "rate of a node's link each way, 1e9 bit/s, for the bound (default: by a ping-pong). The "
        "bound is the longer of a memcpy of the array by all ranks at once, and of 2 (N - 1) / N "
        "of the bytes on the wire at that rate, for N nodes",
        flags.above_0(),
    )


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose all-reduces."""
    add, names = options(parser), flags.names
    sizes = "bytes of float32: 1MiB,16MiB or first:last:xFACTOR"
    add("--sizes SIZE,...", sizes, "64KiB:16MiB:x16", type=flags.sizes)
    add(
        "--algorithms NAME,...",
        f"{','.join(SCHEDULES)}, or {AUTO}: the fastest whose error does not grow with the ranks",
        "ring,tree,direct",
        type=names(among((*SCHEDULES, AUTO))),
    )
    wires = "raw, names of formats, mxfp4"
    add("--wires NAME,...", wires, "raw,e4m3", type=names(parse_wire))
    scalings = f"scalings: {','.join(SCALINGS)}"
    add("--scalings NAME,...", scalings, "tile", type=names(lambda s: parse_scaling(s, None)))
    add(
        "--accumulate NAME,...",
        f"{','.join(ACCUMULATES)}, or default: that of the algorithm",
        "default",
        type=names(among((*ACCUMULATES, "default"))),
    )


def parse_methods(
    given: argparse.Namespace, machine: Machine | None
) -> tuple[list[Any], list[str]]:
    """Return the methods that the options name, and why other combinations are left out.

    Raises UserError if no combination is possible.
    """
    methods, skipped = dict[Any, None](), []
    name = getattr(given, "collective", ALL_REDUCE)
    of = Allreduce if name == ALL_REDUCE else partial(Collective, collective=name)
    every = product(given.algorithms, given.wires, given.scalings, given.accumulate)
    for algorithm, wire, scaling, way in every:
        raw = wire == "raw"  # without scaling and rounding
        scaling = wire_scaling(wire) if raw or wire in IN_BLOCKS else scaling
        accumulate = None if raw or way == "default" else way
        try:
            methods[of(wire, algorithm, scaling, accumulate, machine=machine)] = None
        except ValueError as error:
            skipped.append(str(error).removeprefix(f"{name}: "))
    if not methods:
        why = "; ".join(dict.fromkeys(skipped)) or "no names are given"
        raise UserError(f"bench: nothing to do: {why}")
    return list(methods), skipped


def parse_baselines(
    world: Ranks, asked: Sequence[str] | None, device: str
) -> tuple[list[str], dict[str, str]]:
    """Return the baselines to run, mpi and memcpy first, and why others are left out. Collective.

    Raises UserError if asked names one that cannot run.
    """
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
    if device == "cpu":
        why.pop("nccl", None)  # nobody expects it there
    return found, why if asked is None else {}


def parse_calls(given: argparse.Namespace, world: Ranks) -> tuple[list[str], list[str]]:
    """Return the ways of calling in --calls, and why others are left out. Collective.

    Raises UserError if none is left.
    """
    asked = given.calls
    if asked is None:
        asked = [name for name, devices in CALLS.items() if given.device in devices]
    calls = [name for name in asked if given.device in CALLS[name]]
    if not calls:
        why = f"none of them takes {given.device} arrays" if asked else "no names are given"
        raise UserError(f"--calls {','.join(asked) or ','}: {why}")
    skipped = [f"{name}: takes no {given.device} arrays" for name in asked if name not in calls]
    if "shared" in calls and world.shared() is None:
        calls.remove("shared")
        skipped.append("shared: the arrays are in no memory that processes of a node share")
    return calls, skipped


def place_of(given: argparse.Namespace, world: Any, machine: Machine | None = None) -> JobRanks:
    """Return the ranks, whose link has the rate of --link. Collective."""
    place = JobRanks(world, None, given.oversubscribe_gpus, machine)
    if given.link is not None and len(set(world.nodes)) > 1:
        place.link_s = 8 / GIGA / given.link
    return place


def run(given: argparse.Namespace, world: Ranks) -> timing.BenchmarkResult:
    """Check and time every case at every size, and print a table. Collective."""
    machine, name = None, given.collective
    if given.predict is not None:
        machine = world.agreed(lambda: read_machine(given.predict)).machine
    if name != ALL_REDUCE:
        _check_collective(given)
    methods, skipped = parse_methods(given, machine)
    of_gpus = flags.take_device(given, world)
    baselines, why = ["mpi", MEMCPY], dict[str, str]()
    if name == ALL_REDUCE:
        baselines, why = parse_baselines(world, given.baselines, given.device)
    skipped += [f"{library}: {reason}" for library, reason in why.items()]
    world.agreed(lambda: flags.check_out(given.out, world))
    with own_cores(world) as cores, group_of(world, baselines):
        calls, further = parse_calls(given, world)
        place, points = place_of(given, world, machine), list[timing.BenchPoint]()
        columns = columns_of(given, methods)

        def rows() -> Iterator[list[object]]:
            for size_bytes in given.sizes:
                cases = cases_of(size_bytes, methods, baselines, calls, given.device)
                found = measured(place, given, cases)
                points.extend(found)
                beside = [each.median_s(given.warmup) for each in found[:2]]
                for row in found if given.all else fastest(found, given.warmup):
                    shown = cells(row, world.ranks, given.warmup, *beside)
                    yield [shown[column] for column in columns]

        head = "; ".join(filter(None, [printing.machine_line(world), of_gpus]))
        forms = {column: FORMS[column] for column in columns}
        printing.show(world, above(head, cores, given, skipped + further), forms, rows())
    return timing.BenchmarkResult("allreduce", "allreduce", points, given.warmup, cores)


def _check_collective(given: argparse.Namespace) -> None:
    """Raise UserError for options of all-reduces alone; choose the calls of other collectives."""
    if given.baselines is not None:
        raise UserError("--baselines: is of all-reduces: others have MPI's own and memcpy beside")
    known = PLAIN, PREPARED
    text = ",".join(known if given.calls is None else given.calls)
    try:
        given.calls = flags.names(among(known))(text)
    except UserError as error:
        raise UserError(f"--calls {error}") from None


def cases_of(
    size_bytes: int,
    methods: Sequence[Any],
    baselines: Sequence[str],
    calls: Sequence[str],
    device: str,
) -> list[Factors]:
    """Return the factors of the cases of a size, baselines first; methods: see parse_methods."""
    common: dict[str, Value] = {"size_bytes": size_bytes}
    if isinstance(methods[0], Collective):
        common["collective"] = methods[0].collective
    if device == "gpu":
        common["device"] = device
    found: list[Factors] = []
    for library, _, wire in (name.partition("-") for name in baselines):
        found.append(common | {"algorithm": library, "wire": wire or "raw"})
    for call, method in product(calls, methods):
        found.append(common | factors_of(method) | {"call": call})
    return found


def measured(
    place: JobRanks, given: argparse.Namespace, cases: Sequence[Factors]
) -> list[timing.BenchPoint]:
    """Return the points of the cases of a size, MPI's own and memcpy first. Collective.

    The bound of all-reduces takes the time of memcpy in the same turns.
    """
    points = timing.measure(ALLREDUCE, place, cases, given.repeats, given.warmup)
    if "collective" in cases[0]:
        return points
    copy_s = points[1].median_s(given.warmup)
    link_s = timing.link_s(place)
    bounds_s = (bound_s(place.world, wire_bytes(case), copy_s, link_s) for case in cases)
    return [
        replace(point, outcomes={**point.outcomes, "bound_s": each_s})
        for point, each_s in zip(points, bounds_s, strict=True)
    ]


US, GBS, RATIO = "9.1f", "6.2f", "6.2f"
FORMS = {  # heading -> form
    **{"size\n(B)": "11", "count": "11", "size": "8", "algorithm": "13", "call": "8"},
    **{"wire": "6", "scaling": "9", "accumulate": "10"},
    **{"time\n(us)": US, "min\n(us)": US, "max\n(us)": US},
    **{"algbw\n(GB/s)": GBS, "busbw\n(GB/s)": GBS, "wirebw\n(GB/s)": GBS, "error": "8.1e"},
    **{"x mpi": RATIO, "/\nmemcpy": RATIO, "/\nbound": RATIO},
    **{"predicted\n(us)": US, "predicted\n/ time": RATIO},
}
ALL = [name for name in FORMS if name != "size" and not name.startswith("predicted")]
SHORT = "size", "algorithm", "wire", "call", "time\n(us)", "algbw\n(GB/s)", *ALL[-4:]
FASTEST = "of each method the call whose median is the least; --all shows all calls and columns"


def columns_of(given: argparse.Namespace, methods: Sequence[Any]) -> list[str]:
    """Return the columns of the table; without --all only those in which rows differ."""
    predicted = [name for name in FORMS if given.predict is not None and "predicted" in name]
    if given.all:
        return [*ALL, *predicted]
    of = [(m.wire, m.algorithm) for m in methods]
    scaled = len({*zip(of, (m.scaling for m in methods), strict=True)}) > len({*of})
    added = len({*zip(of, (m.accumulate for m in methods), strict=True)}) > len({*of})
    further = ["scaling"] * scaled + ["accumulate"] * added
    return [*SHORT[:3], *further, *SHORT[3:], *predicted[1:]]


def cells(
    row: timing.BenchPoint, ranks: int, warmup: int, mpi_s: float, copy_s: float
) -> dict[str, object]:
    """Return the cells of a row by heading; mpi_s, copy_s: medians of mpi and memcpy."""
    of, times_s = row.factors, row.slowest_s(warmup)
    outcomes = {name: float(each) for name, each in row.outcomes.items()}
    size, error, bound, predicted, sent = (
        outcomes.get(name, np.nan)
        for name in ("payload_bytes", "error", "bound_s", "predicted_s", "wire_bytes")
    )
    time_s, name = float(np.median(times_s)), str(of.get("collective", ALL_REDUCE))
    summed = _summed(of)
    scaling = of.get("value_scaling", "none" if summed == "requantise" else "-")  # of a library
    return {
        "size\n(B)": of["size_bytes"],
        "count": int(of["size_bytes"]) // 4,
        "size": units.size(size),
        "algorithm": f"{of['algorithm']}" + (f"({of['chosen']})" if "chosen" in of else ""),
        "wire": of["wire"],
        "scaling": scaling,
        "accumulate": summed,
        "call": of.get("call", "-"),
        "time\n(us)": 1e6 * time_s,
        "min\n(us)": 1e6 * float(times_s.min()),
        "max\n(us)": 1e6 * float(times_s.max()),
        "algbw\n(GB/s)": size / time_s / GIGA,
        "busbw\n(GB/s)": size * share(name, ranks) / time_s / GIGA,
        "wirebw\n(GB/s)": sent / time_s / GIGA,
        "error": error,
        "x mpi": mpi_s / time_s,
        "/\nmemcpy": time_s / copy_s,
        "/\nbound": time_s / bound,
        "predicted\n(us)": 1e6 * predicted,
        "predicted\n/ time": predicted / time_s,
    }


def _summed(of: Factors) -> str:
    """Return the way to keep partial sums."""
    algorithm, wire = str(of["algorithm"]), str(of["wire"])
    if "collective" in of or algorithm == MEMCPY:
        default = "-"
    elif algorithm in LIBRARIES:
        default = LIBRARIES[algorithm][wire]
    else:
        default = "float32" if wire == "raw" else "default"  # that of the chosen algorithm
    return str(of.get("accumulate", default))


def above(
    machine: str, cores: str, given: argparse.Namespace, skipped: Sequence[str]
) -> Iterator[str]:
    """Yield the comments above the table."""
    name = given.collective
    own = "MPI_Allreduce" if name == ALL_REDUCE else "MPI's own"
    adds = ", sum" if name in (ALL_REDUCE, *SUMMING) else ""
    least = "2 (p - 1) / p" if name == ALL_REDUCE else "the least share that leaves a rank"
    rates = f"; busbw: {least} of it; wirebw: bytes that left a rank / time" if given.all else ""
    yield f"{TITLES[name].lower()} of float32{adds}, out of place: {machine}"
    yield cores
    yield (
        f"time: the slowest rank from a barrier; {given.repeats} calls after {given.warmup} "
        "warm-ups, cases in turns; GB/s: 1e9 byte/s"
    )
    yield f"algbw: size / time{rates}; error: relative, Euclidean norm"
    yield (
        f"x mpi: how many times as fast as {own} (mpi); / memcpy: of the array by all ranks "
        "at once; all ratios are of medians"
    )
    yield (
        "/ bound: the longer of memcpy and 2 (N - 1) / N of the bytes on the wire over the link of "
        "each of N nodes; of all-reduces"
    )
    yield "" if given.all else FASTEST
    yield from (f"left out: {text}" for text in skipped)


def fastest(rows: Sequence[timing.BenchPoint], warmup: int) -> list[timing.BenchPoint]:
    """Return the row with the least median of those that differ only in the call."""
    same: dict[frozenset[Any], list[timing.BenchPoint]] = {}
    for row in rows:
        of = frozenset(item for item in row.factors.items() if item[0] != "call")
        same.setdefault(of, []).append(row)
    return [min(each, key=lambda row: row.median_s(warmup)) for each in same.values()]


LATENCY = Allreduce("raw", "tree")  # the fastest for small arrays


def add_latency(parser: argparse.ArgumentParser) -> None:
    """Add the options of bench latency."""
    options(parser)("--sizes SIZE,...", "bytes of float32", "8:4MiB:x4", type=flags.sizes)
    flags.add_device(parser)
    add_beside(parser)
    flags.add_repeats(parser, 200, 20, out=True)
    add_all(parser, "least and greatest latencies too, in the columns of the OSU benchmarks")


def run_latency(given: argparse.Namespace, world: Ranks) -> timing.BenchmarkResult:
    """Check and time small all-reduces beside MPI_Allreduce, in the columns of OSU. Collective."""
    world.agreed(lambda: flags.check_out(given.out, world))
    points: list[timing.BenchPoint] = []
    with own_cores(world) as cores:
        of_gpus = flags.take_device(given, world)
        calls, skipped = parse_calls(given, world)
        place, beside = place_of(given, world), ["mpi", MEMCPY]

        def rows() -> Iterator[list[object]]:
            for size_bytes in given.sizes:
                cases = cases_of(size_bytes, [LATENCY], beside, calls, given.device)
                found = measured(place, given, cases)
                points.extend(found)
                yield latency_cells(found, given.warmup, given.all)

        head = [printing.machine_line(world), of_gpus, *skipped]
        comments = [
            f"all-reduce of float32, sum: {'; '.join(filter(None, head))}",
            cores,
            "Avg: mean over ranks of the mean over calls; Min, Max: over ranks; a barrier before; "
            "mpi: MPI_Allreduce; memcpy: of the array by all ranks at once",
            "/memcpy, /bound: of the best of ours, by medians over calls of the slowest rank, as "
            "in files; bound: the longer of memcpy and 2 (N - 1) / N of the bytes over a node's "
            "link",
            "" if given.all else "us, Avg; ours is the tree in float32, called in these ways",
        ]
        forms = latency_forms(beside, calls, given.all)
        printing.show(world, comments, forms, rows())
    return timing.BenchmarkResult("latency", "allreduce", points, given.warmup, cores)


def latency_forms(beside: Sequence[str], calls: Sequence[str], whole: bool) -> dict[str, str]:
    """Return the columns of the table; whole: least and greatest latencies of each, too."""
    names = [*beside, *(f"tree, raw, {call}" if whole else call for call in calls)]
    forms = dict.fromkeys(names, "10.2f")
    if whole:
        each = [f"{name}\n{what} Latency(us)" for name in names for what in ("Avg", "Min", "Max")]
        forms = dict.fromkeys(each, "15.2f")
    ratios = {"/memcpy": "8.2f", "/bound": "7.2f"}
    return {"Size(B)": "<8", **forms, **ratios, **({"Iterations": "11"} if whole else {})}


def latency_cells(rows: Sequence[timing.BenchPoint], warmup: int, whole: bool) -> list[object]:
    """Return the row of a size, of its points; whole: as in latency_forms."""
    by_rank = [1e6 * row.times_s[warmup:].mean(axis=0) for row in rows]
    best_s = min(row.median_s(warmup) for row in rows[2:])
    bound = float(rows[1].outcomes.get("bound_s", np.nan))
    ratios = best_s / rows[1].median_s(warmup), best_s / bound
    size = str(rows[0].factors["size_bytes"])
    if not whole:
        return [size, *(each.mean() for each in by_rank), *ratios]
    latencies = [cell for each in by_rank for cell in (each.mean(), each.min(), each.max())]
    return [size, *latencies, *ratios, len(rows[0].times_s) - warmup]

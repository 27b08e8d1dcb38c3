"""Benchmark of all-reduces, beside those of other libraries and memcpy.

Cases are those of studies of kind allreduce. With --all the columns are those of nccl-tests. For
small all-reduces use bench latency; with --all its columns are those of the OSU benchmarks. GB/s
are 1e9 byte/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
from ..kinds.allreduce import ALL_REDUCE, ALLREDUCE, CALLS, PLAIN, PREPARED, TITLES, share
from ..kinds.allreduce_cases import (
    BASELINES,
    bound_s,
    group_of,
    library_of,
    missing,
    wire_bytes,
)
from ..kinds.harness import (
    Measured,
    Point,
    Times,
    add_device,
    add_samples,
    check_options,
    check_out,
    comments,
    machine_line,
    parse_names,
    parse_sizes,
    take_device,
)
from ..kinds.place import Place
from ..kinds.sweep import measure
from ..report import units
from ..settings import options
from ..study_data import Factors, Value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add_choices(parser)
    add_device(parser)
    add_beside(parser)
    add = options(parser)
    add(
        "--collective NAME",
        f"allreduce, or {','.join(COLLECTIVES)}, beside MPI's own; sizes are of the whole array",
        ALL_REDUCE,
    )
    add("--baselines NAME,...", f"baselines: {','.join(BASELINES)} (default: all that can run)")
    add_samples(parser, 9, 2)
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
    )
    add(
        "--link GBIT",
        "rate of a node's link each way, 1e9 bit/s, for the bound (default: by a ping-pong). The "
        "bound is the longer of a memcpy of the array by all ranks at once, and of 2 (N - 1) / N "
        "of the bytes on the wire at that rate, for N nodes",
        float,
    )


def add_choices(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose all-reduces."""
    add = options(parser)
    add("--sizes SIZE,...", "bytes of float32: 1MiB,16MiB or first:last:xFACTOR", "64KiB:16MiB:x16")
    add(
        "--algorithms NAME,...",
        f"{','.join(SCHEDULES)}, or {AUTO}: the fastest whose error does not grow with the ranks",
        "ring,tree,direct",
    )
    add("--wires NAME,...", "raw, names of formats, mxfp4", "raw,e4m3")
    add("--scalings NAME,...", f"scalings: {','.join(SCALINGS)}", "tile")
    add(
        "--accumulate NAME,...",
        f"{','.join(ACCUMULATES)}, or default: that of the algorithm",
        "default",
    )


def parse_methods(
    arguments: argparse.Namespace, machine: Machine | None
) -> tuple[list[Allreduce], list[str]]:
    """Return the methods that the options name, and why other combinations are left out.

    Raises UserError for unknown names, or if no combination is possible.
    """
    algorithms = parse_names("--algorithms", arguments.algorithms, among((*SCHEDULES, AUTO)))
    wires = parse_names("--wires", arguments.wires, parse_wire)
    scalings = parse_names("--scalings", arguments.scalings, lambda s: parse_scaling(s, None))
    ways = parse_names("--accumulate", arguments.accumulate, among((*ACCUMULATES, "default")))
    methods, skipped = dict[Any, None](), []
    name = getattr(arguments, "collective", ALL_REDUCE)
    of = Allreduce if name == ALL_REDUCE else partial(Collective, collective=name)
    for algorithm, wire, scaling, way in product(algorithms, wires, scalings, ways):
        raw = wire == "raw"  # without scaling and rounding
        scaling = wire_scaling(wire) if raw or wire in IN_BLOCKS else scaling
        options = (scaling, None if raw or way == "default" else way)
        try:
            methods[of(wire, algorithm, *options, machine=machine)] = None
        except ValueError as error:
            skipped.append(str(error).removeprefix(f"{name}: "))
    if not methods:
        why = "; ".join(dict.fromkeys(skipped)) or "no names are given"
        raise UserError(f"bench: nothing to do: {why}")
    return list(methods), skipped


def parse_baselines(
    world: Ranks, text: str | None, device: str
) -> tuple[list[str], dict[str, str]]:
    """Return the baselines to run, mpi and memcpy first, and why others are left out. Collective.

    Raises UserError if text names one that cannot run.
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
    if device == "cpu":
        why.pop("nccl", None)  # nobody expects it there
    return found, why if asked is None else {}


def parse_calls(arguments: argparse.Namespace, world: Ranks) -> tuple[list[str], list[str]]:
    """Return the ways of calling in --calls, and why others are left out. Collective.

    Raises UserError if none is left, or for a wrong --link.
    """
    device = arguments.device
    asked = [name for name, devices in CALLS.items() if device in devices]
    if arguments.calls is not None:
        asked = parse_names("--calls", arguments.calls, among(CALLS))
    calls = [name for name in asked if device in CALLS[name]]
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
    return calls, skipped


def place_of(arguments: argparse.Namespace, world: Any, machine: Machine | None = None) -> Place:
    """Return the ranks, whose link has the rate of --link. Collective."""
    place = Place(world, None, arguments.oversubscribe_gpus, machine)
    if arguments.link is not None and len(set(world.nodes)) > 1:
        place.link_s = 8 / GIGA / arguments.link
    return place


def run(arguments: argparse.Namespace, world: Ranks) -> Measured:
    """Check and time every case at every size, and print a table. Collective."""
    check_options(arguments, 1, "repeats")
    check_options(arguments, 0, "warmup")
    sizes = parse_sizes(arguments.sizes)
    machine = None
    if arguments.predict is not None:
        machine = world.agreed(lambda: read_machine(arguments.predict)).machine
    name = arguments.collective
    world.agreed(lambda: parse_names("--collective", name, among((ALL_REDUCE, *COLLECTIVES))))
    if name != ALL_REDUCE:
        _check_collective(arguments)
    methods, skipped = parse_methods(arguments, machine)
    of_gpus = take_device(arguments, world)
    baselines, why = parse_baselines(world, arguments.baselines, arguments.device)
    if name != ALL_REDUCE:
        baselines, why = ["mpi", MEMCPY], {}
    skipped += [f"{library}: {reason}" for library, reason in why.items()]
    world.agreed(lambda: check_out(arguments.out, world))
    with own_cores(world) as cores, group_of(world, baselines):
        calls, further = parse_calls(arguments, world)
        place = place_of(arguments, world, machine)
        columns = columns_of(arguments, methods)
        machine_and_gpus = "; ".join(filter(None, [machine_line(world), of_gpus]))
        header = heading(machine_and_gpus, cores, arguments, skipped + further, columns)
        if world.process == 0:
            print("\n".join(header), flush=True)
        rows = []
        for size_bytes in sizes:
            cases = cases_of(size_bytes, methods, baselines, calls, arguments.device)
            found = measured(place, arguments, cases)
            if world.process == 0:
                print("\n".join(lines(found, columns, world.ranks, arguments)), flush=True)
            rows += found
    return Measured("allreduce", "allreduce", rows, arguments.warmup, cores)


def _check_collective(arguments: argparse.Namespace) -> None:
    """Raise UserError for options of all-reduces alone; choose the calls of other collectives."""
    if arguments.baselines is not None:
        raise UserError("--baselines: is of all-reduces: others have MPI's own and memcpy beside")
    known = PLAIN, PREPARED
    text = ",".join(known) if arguments.calls is None else arguments.calls
    arguments.calls = ",".join(parse_names("--calls", text, among(known)))


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


def factors_of(method: Any) -> dict[str, Value]:
    """Return the factors of a method: of class Allreduce, or Collective."""
    found: dict[str, Value] = {"algorithm": method.algorithm, "wire": str(method.wire)}
    if method.fmt is None:
        return found
    found["value_scaling"] = method.scaling or method.parsed_scaling.kind
    if method.algorithm == AUTO:
        return found | ({"accumulate": method.accumulate} if method.accumulate else {})
    sums = not isinstance(method, Collective) or method.share.sums
    return found | ({"accumulate": method.accumulating} if sums else {})


def measured(place: Place, arguments: argparse.Namespace, cases: Sequence[Factors]) -> list[Point]:
    """Return the points of the cases of a size, MPI's own and memcpy first. Collective.

    The bound of all-reduces takes the time of memcpy in the same turns.
    """
    points = measure(ALLREDUCE, place, cases, arguments.repeats, arguments.warmup)
    if "collective" in cases[0]:
        return points
    copy_s = points[1].median_s(arguments.warmup)
    link_s = place.link_s
    bounds_s = (bound_s(place.world, wire_bytes(case), copy_s, link_s) for case in cases)
    return [
        replace(point, outcomes={**point.outcomes, "bound_s": each_s})
        for point, each_s in zip(points, bounds_s, strict=True)
    ]


LATENCY = Allreduce("raw", "tree")  # the fastest for small arrays


def add_latency(parser: argparse.ArgumentParser) -> None:
    """Add the options of bench latency."""
    options(parser)("--sizes SIZE,...", "bytes of float32", "8:4MiB:x4")
    add_device(parser)
    add_beside(parser)
    add_samples(parser, 200, 20)
    add_all(parser, "least and greatest latencies too, in the columns of the OSU benchmarks")


def run_latency(arguments: argparse.Namespace, world: Ranks) -> Measured:
    """Check and time small all-reduces beside MPI_Allreduce, in the columns of OSU. Collective."""
    check_options(arguments, 1, "repeats")
    check_options(arguments, 0, "warmup")
    sizes = parse_sizes(arguments.sizes)
    world.agreed(lambda: check_out(arguments.out, world))
    rows: list[Point] = []
    with own_cores(world) as cores:
        of_gpus = take_device(arguments, world)
        calls, skipped = parse_calls(arguments, world)
        place = place_of(arguments, world)
        about = [each for each in (machine_line(world), of_gpus, *skipped) if each]
        for size_bytes in sizes:
            cases = cases_of(size_bytes, [LATENCY], ["mpi", MEMCPY], calls, arguments.device)
            found = measured(place, arguments, cases)
            if world.process == 0:
                above = latency_heading("; ".join(about), cores, found, arguments.all)
                last = latency_line(found, arguments.warmup, arguments.all)
                print("\n".join([*([] if rows else above), last]), flush=True)
            rows += found
    return Measured("latency", "allreduce", rows, arguments.warmup, cores)


GIGA = 1e9


class Beside(NamedTuple):
    """Common numbers of the rows: ranks, warm-up calls, medians of mpi and memcpy."""

    ranks: int
    warmup: int
    mpi_s: float
    copy_s: float


class Column(NamedTuple):
    """A column of the table: two lines of heading, characters, the text of a row."""

    over: str
    unit: str
    width: int
    text: Callable[[Point, Beside], str]


def _of_factor(name: str) -> Callable[[Point, Beside], str]:
    return lambda row, of: str(row.factors.get(name, "-"))


def _name(row: Point) -> str:
    """Return the algorithm, and in brackets the choice of auto."""
    algorithm = str(row.factors["algorithm"])
    return f"{algorithm}({row.factors['chosen']})" if "chosen" in row.factors else algorithm


def _scaling(row: Point) -> str:
    default = "none" if _summed(row) == "requantise" else "-"  # of a library
    return str(row.factors.get("value_scaling", default))


def _summed(row: Point) -> str:
    """Return the way to keep partial sums."""
    algorithm, wire = str(row.factors["algorithm"]), str(row.factors["wire"])
    if "collective" in row.factors or algorithm == MEMCPY:
        default = "-"
    elif algorithm in LIBRARIES:
        default = LIBRARIES[algorithm][wire]
    else:
        default = "float32" if wire == "raw" else "default"  # that of the chosen algorithm
    return str(row.factors.get("accumulate", default))


def _outcome(row: Point, name: str) -> float:
    return float(row.outcomes.get(name, np.nan))


def _known(value: float, form: str) -> str:
    return "-" if np.isnan(value) else f"{value:{form}}"


def _rate(size_bytes: float, row: Point, of: Beside) -> str:
    return _known(size_bytes / row.median_s(of.warmup) / GIGA, ".2f")


def _bus_bytes(row: Point, of: Beside) -> float:
    size_bytes, name = _outcome(row, "payload_bytes"), row.factors.get("collective", ALL_REDUCE)
    return size_bytes * share(str(name), of.ranks)


def _time_us(of_times: Callable[[Times], float]) -> Callable[[Point, Beside], str]:
    return lambda row, of: f"{1e6 * of_times(row.slowest_s(of.warmup)):.1f}"


NAME = Column("", "algorithm", 13, lambda row, of: _name(row))
CALL = Column("", "call", 8, _of_factor("call"))
TYPE = Column("", "wire", 6, _of_factor("wire"))
SCALING = Column("", "scaling", 9, lambda row, of: _scaling(row))
ACCUMULATE = Column("", "accumulate", 10, lambda row, of: _summed(row))
TIME = Column("time", "(us)", 10, _time_us(lambda times: float(np.median(times))))
ALGBW = Column("algbw", "(GB/s)", 7, lambda row, of: _rate(_outcome(row, "payload_bytes"), row, of))
BESIDE = [
    Column("", "error", 8, lambda row, of: _known(_outcome(row, "error"), ".1e")),
    Column("", "x mpi", 6, lambda row, of: f"{of.mpi_s / row.median_s(of.warmup):.2f}"),
    Column("/", "memcpy", 6, lambda row, of: f"{row.median_s(of.warmup) / of.copy_s:.2f}"),
    Column(
        "/",
        "bound",
        6,
        lambda row, of: _known(row.median_s(of.warmup) / _outcome(row, "bound_s"), ".2f"),
    ),
]
PREDICTED = Column(
    "predicted", "(us)", 10, lambda row, of: _known(1e6 * _outcome(row, "predicted_s"), ".1f")
)
PREDICTION = Column(
    "predicted",
    "/ time",
    9,
    lambda row, of: _known(_outcome(row, "predicted_s") / row.median_s(of.warmup), ".2f"),
)
ALL = [
    Column("size", "(B)", 11, _of_factor("size_bytes")),
    Column("", "count", 11, lambda row, of: str(int(row.factors["size_bytes"]) // 4)),
    *(NAME, CALL, TYPE, SCALING, ACCUMULATE, TIME),
    Column("min", "(us)", 10, _time_us(np.min)),
    Column("max", "(us)", 10, _time_us(np.max)),
    ALGBW,
    Column("busbw", "(GB/s)", 7, lambda row, of: _rate(_bus_bytes(row, of), row, of)),
    Column("wirebw", "(GB/s)", 7, lambda row, of: _rate(_outcome(row, "wire_bytes"), row, of)),
    *BESIDE,
]
SHORT = [
    Column("", "size", 9, lambda row, of: units.size(_outcome(row, "payload_bytes"))),
    *(NAME, TYPE, CALL, TIME, ALGBW, *BESIDE),
]


def columns_of(arguments: argparse.Namespace, methods: Sequence[Allreduce]) -> list[Column]:
    """Return the columns of the table; without --all only those in which rows differ."""
    with_prediction = arguments.predict is not None
    if arguments.all:
        return [*ALL, *([PREDICTED, PREDICTION] if with_prediction else [])]
    of = [(m.wire, m.algorithm) for m in methods]
    scaled = len({*zip(of, (m.scaling for m in methods), strict=True)}) > len({*of})
    added = len({*zip(of, (m.accumulate for m in methods), strict=True)}) > len({*of})
    further = [*([SCALING] if scaled else []), *([ACCUMULATE] if added else [])]
    return [*SHORT[:3], *further, *SHORT[3:], *([PREDICTION] if with_prediction else [])]


def heading(
    machine: str,
    cores: str,
    arguments: argparse.Namespace,
    skipped: Sequence[str],
    columns: Sequence[Column],
) -> list[str]:
    """Return the lines above the table."""
    name, rates = getattr(arguments, "collective", ALL_REDUCE), "algbw: size / time"
    own = "MPI_Allreduce" if name == ALL_REDUCE else "MPI's own"
    adds = ", sum" if name in (ALL_REDUCE, *SUMMING) else ""
    if arguments.all:
        least = "2 (p - 1) / p" if name == ALL_REDUCE else "the least share that leaves a rank"
        rates += f"; busbw: {least} of it; wirebw: bytes that left a rank / time"
    lines = [
        f"{TITLES[name].lower()} of float32{adds}, out of place: {machine}",
        cores,
        f"time: the slowest rank from a barrier; {arguments.repeats} calls after "
        f"{arguments.warmup} warm-ups, cases in turns; GB/s: 1e9 byte/s",
        f"{rates}; error: relative, Euclidean norm",
        f"x mpi: how many times as fast as {own} (mpi); / memcpy: of the array by all ranks "
        "at once; all ratios are of medians",
        "/ bound: the longer of memcpy and 2 (N - 1) / N of the bytes on the wire over the link of "
        "each of N nodes; of all-reduces",
        *([] if arguments.all else [FASTEST]),
        *(f"left out: {text}" for text in skipped),
    ]
    names = [" ".join(f"{getattr(each, name):>{each.width}}" for each in columns)
             for name in ("over", "unit")]  # fmt: skip
    return [*comments(lines), *(f"# {text}" for text in names)]


FASTEST = "of each method the call whose median is the least; --all shows all calls and columns"


def lines(
    rows: Sequence[Point], columns: Sequence[Column], ranks: int, arguments: argparse.Namespace
) -> list[str]:
    """Return the lines of the table; rows: of a size, mpi and memcpy first; time is the median."""
    warmup = arguments.warmup
    beside = Beside(ranks, warmup, *(each.median_s(warmup) for each in rows[:2]))
    shown = rows if arguments.all else fastest(rows, warmup)
    return [
        "  " + " ".join(f"{each.text(row, beside):>{each.width}}" for each in columns)
        for row in shown
    ]


def fastest(rows: Sequence[Point], warmup: int) -> list[Point]:
    """Return the row with the least median of those that differ only in the call."""
    same: dict[frozenset[Any], list[Point]] = {}
    for row in rows:
        of = frozenset(item for item in row.factors.items() if item[0] != "call")
        same.setdefault(of, []).append(row)
    return [min(each, key=lambda row: row.median_s(warmup)) for each in same.values()]


def latency_heading(machine: str, cores: str, rows: Sequence[Point], whole: bool) -> list[str]:
    """Return the lines above the table; rows: of a size; whole: least and greatest latencies too.

    A row has one column, or a group of three.
    """
    names = [str(row.factors["algorithm"]) for row in rows[:2]]
    calls = [str(row.factors["call"]) for row in rows[2:]]
    above = [
        f"all-reduce of float32, sum: {machine}",
        cores,
        "Avg: mean over ranks of the mean over calls; Min, Max: over ranks; a barrier before; "
        "mpi: MPI_Allreduce; memcpy: of the array by all ranks at once",
        "/memcpy, /bound: of the best of ours, by medians over calls of the slowest rank, as in "
        "files; bound: the longer of memcpy and 2 (N - 1) / N of the bytes over a node's link",
    ]
    if not whole:
        above.append("us, Avg; ours is the tree in float32, called in these ways")
        heads = "".join(f"{each:>11}" for each in (*names, *calls))
        return [*comments(above), f"{'# Size(B)':<10}{heads}{'/memcpy':>9}{'/bound':>8}"]
    names += [f"tree, raw, {call}" for call in calls]
    latency = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)")
    columns = " ".join(f"{each:>15}" for each in latency * len(rows))
    return [
        *comments(above),
        f"#{'':<9} " + " ".join(f"{each:>47}" for each in names),
        f"{'# Size(B)':<10} {columns}{'/memcpy':>9}{'/bound':>9}{'Iterations':>12}",
    ]


def latency_line(rows: Sequence[Point], warmup: int, whole: bool) -> str:
    """Return a row of the table, of the rows of a size; whole: as in latency_heading."""
    by_rank = [1e6 * row.times_s[warmup:].mean(axis=0) for row in rows]
    best_s = min(row.median_s(warmup) for row in rows[2:])
    ratios = best_s / rows[1].median_s(warmup), best_s / _outcome(rows[1], "bound_s")
    size = rows[0].factors["size_bytes"]
    if not whole:
        means = "".join(f"{each.mean():>11.2f}" for each in by_rank)
        return f"{size:<10}{means}{ratios[0]:>9.2f}{ratios[1]:>8.2f}"
    cells = [cell for each in by_rank for cell in (each.mean(), each.min(), each.max())]
    figures = " ".join(f"{cell:>15.2f}" for cell in cells)
    shown = "".join(f"{ratio:>9.2f}" for ratio in ratios)
    return f"{size:<10} {figures}{shown}{len(rows[0].times_s) - warmup:>12}"

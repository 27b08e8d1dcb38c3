"""Time halo exchanges beside MPI's own ways, on the same arrays.

cpdhpc and MPI exchange in an array that holds the halo around the rank's own cells; "copied" is
cpdhpc with the cells in another array, which are copied too. subarray: Isend and Irecv of subarray
datatypes, plain and by persistent requests; alltoallw: MPI_Neighbor_alltoallw of them; packed:
slices of NumPy copied to buffers and back. accumulate adds the halos to the cells that they show.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...config import UserError, among
from ...darray.layout import balanced_grid
from ...darray.plan import WindowPlan
from ...world.cores import own_cores
from ...world.mpi import World
from ...world.ranks import Ranks
from ..darray_show import add_options, given, spec_of
from ..kinds import flags, halo_cases, printing, timing
from ..kinds.halo import HALO
from ..kinds.place import JobRanks
from ..settings import options
from .stencil import add_overlap, measure_overlap

GIGA = 1e9
OPERATIONS = halo_cases.EXCHANGE, halo_cases.ACCUMULATE
ALL_WAYS = halo_cases.OURS, halo_cases.COPIED, *halo_cases.WAYS
SAMPLE_S = 1e-3  # a sample should take as long at least
MOST_CALLS = 500  # of a sample
TRIED = 10  # calls of the sample that decides how many follow
COLUMNS = {
    **{"operation": "10", "way": "21", "time (us)": "10.2f", "min": "9.2f", "max": "9.2f"},
    **{"GB/s": "7.2f", "x MPI": "6.2f", "calls": "6"},
}


class Usual(NamedTuple):
    """A setting for any number of ranks.

    block: cells of a rank; axes: those that are split, several of them evenly
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    usual_text = "; ".join(f"{name}: {of.text}" for name, of in USUAL.items())
    add, names = options(parser), flags.names
    add("--usual NAME,...", f"cases: {usual_text}", ",".join(USUAL), type=names(among(USUAL)))
    operations = f"operations: {','.join(OPERATIONS)}"
    add("--operations NAME,...", operations, halo_cases.EXCHANGE, type=names(among(OPERATIONS)))
    ways = names(among(ALL_WAYS), ";")
    add("--ways NAME;...", "ways, separated by semicolons", "; ".join(ALL_WAYS), type=ways)
    add_options(parser)
    calls = "calls of a sample (default: as many as fill a millisecond)"
    add("--calls N", calls, 0, type=flags.at_least(0))
    flags.add_device(parser)
    add_overlap(parser)
    flags.add_repeats(parser, 31, 3, "samples", out=True)


def settings_of(arguments: argparse.Namespace, ranks: int) -> list[halo_cases.Setting]:
    """Return the settings to measure: usual ones, or that of --shape. Raises UserError."""
    options = given(arguments)
    if "shape" in options:
        procs = [ranks] + [1] * (len(options["shape"]) - 1)
        raw = {"procs": procs, "boundary": "none", "halo": 1} | options
        found = [halo_cases.Setting("given", spec_of(raw, "bench halo"))]
    else:
        found = [usual(name, ranks, options) for name in arguments.usual]
    for setting in found:
        planned = setting.spec.geometry().layout.ranks
        if planned != ranks:
            raise UserError(f"--procs: is for {planned} ranks, here are {ranks}")
    return found


def usual(name: str, ranks: int, options: dict[str, Any]) -> halo_cases.Setting:
    """Return a usual setting for so many ranks, some of its keys replaced.

    Raises ConfigError if they do not fit.
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
    return halo_cases.Setting(name, spec_of(raw | options, f"bench halo: {name}"))


def run(arguments: argparse.Namespace, world: World) -> timing.BenchmarkResult:
    """Check and time every case, and print a table. Collective."""
    settings = settings_of(arguments, world.ranks)
    if not (arguments.operations and arguments.ways):
        raise UserError("--operations, --ways: no names are given")
    if arguments.overlap and arguments.device == "gpu":
        raise UserError("--overlap: its computation is NumPy's: goes with --device cpu only")
    of_gpus = flags.take_device(arguments, world)
    world.agreed(lambda: flags.check_out(arguments.out, world))
    place = JobRanks(world, None, arguments.oversubscribe_gpus)
    points: list[timing.BenchPoint] = []
    with own_cores(world) as cores:
        head = [
            f"halo exchange: {printing.machine_line(world)}",
            cores,
            of_gpus,
            f"time: of a call, the slowest rank, median of {arguments.repeats} samples of many "
            f"calls after {arguments.warmup} warm-ups, cases in turns",
            "GB/s: 1e9 byte/s of cells that leave the rank that sends most",
            "x MPI: how many times as fast as the fastest of subarray, persistent, alltoallw "
            "in each sample, median over samples: not the ratio of the medians shown",
        ]
        printing.say(world, printing.comments(head))
        for setting in settings:
            if arguments.overlap:
                measure_overlap(world, setting, arguments)
                continue
            with setting.plan(world) as plan:
                size_bytes = max(world.gather(setting.sent_bytes(plan), "bench halo"))
                ways = halo_cases.possible_ways(world, plan, arguments.ways, arguments.device)
                runs = f"in runs of {_run_bytes(setting, plan)}"
            above = f"{setting}: {size_bytes} bytes a rank, {runs}"
            printing.say(world, ["#"])
            printing.show(world, [above], COLUMNS, _rows(place, setting, arguments, ways, points))
    return timing.BenchmarkResult("halo", "halo", points, arguments.warmup, cores)


def _rows(
    place: JobRanks,
    setting: halo_cases.Setting,
    arguments: argparse.Namespace,
    ways: Sequence[str],
    points: list[timing.BenchPoint],
) -> Iterator[list[object]]:
    """Yield the rows of a setting, and append their points. Collective."""
    device = {"device": "gpu"} if arguments.device == "gpu" else {}
    for operation in arguments.operations if ways else ():
        if operation == halo_cases.ACCUMULATE and not halo_cases.has_sums(setting.spec):
            continue
        of = setting.factors | device | {"transfer": operation}
        cases = [of | {"way": way} for way in ways]
        with timing.opened(HALO, place, cases) as made:
            calls, times = time_cases(place.world, [call.run for call in made], arguments)
        found = [
            timing.BenchPoint(case, call.outcomes, times_s)
            for case, call, times_s in zip(cases, made, times, strict=True)
        ]
        points += found
        yield from ([*line(point, found, arguments.warmup), calls] for point in found)


def time_cases(
    world: Ranks, runs: Sequence[halo_cases.Run], arguments: argparse.Namespace
) -> tuple[int, list[timing.Times]]:
    """Return the calls of a sample, and the seconds of a call, of each case. Collective.

    All cases have as many calls, so that the time between the starts of ranks, which is part of a
    sample, has the same small weight in each.
    """

    def timed(calls: int, repeats: int, warmup: int) -> list[timing.Times]:
        samples = {i: timing.often(run, calls) for i, run in enumerate(runs)}
        times = timing.interleave_ranks(world, samples, repeats, warmup)
        return [each / calls for each in times.values()]

    calls = arguments.calls
    if not calls:
        tried = [times_s[1:].max(axis=1) for times_s in timed(TRIED, 3, 1)]
        fastest_s = min(float(np.median(each)) for each in tried)
        calls = min(MOST_CALLS, 1 + int(SAMPLE_S / fastest_s))
    return calls, timed(calls, arguments.repeats, arguments.warmup)


def _run_bytes(setting: halo_cases.Setting, plan: WindowPlan) -> int:
    """Return the contiguous bytes of the first piece in the window; 0 if there is none."""
    pieces = [piece for message in plan.recvs for piece in message.pieces]
    if not pieces:
        return 0
    run_bytes, shape = setting.cell_bytes, pieces[0].target.shape
    for n, extent in zip(reversed(shape), reversed(plan.window.shape), strict=True):
        run_bytes *= n
        if n != extent:
            break
    return run_bytes


def line(
    point: timing.BenchPoint, points: Sequence[timing.BenchPoint], warmup: int
) -> list[object]:
    """Return the cells of COLUMNS but calls; points: of the same transfer."""
    times_s = point.slowest_s(warmup)
    by_mpi = [
        each.slowest_s(warmup) for each in points if each.factors["way"] in halo_cases.MPI_TYPES
    ]
    best = min(by_mpi, key=np.median, default=np.array(np.nan))
    times_us = (1e3 * each for each in timing.ms(times_s))
    rate = float(point.outcomes["payload_bytes"]) / float(np.median(times_s)) / GIGA
    of = point.factors
    return [of["transfer"], of["way"], *times_us, rate, float(np.median(best / times_s))]

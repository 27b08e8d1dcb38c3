"""Benchmark of the codec: float32 to packed codes and back, beside memcpy on one core.

And of the operations of sparse methods: to find the largest values, take them out, add and pack
them. Cases are those of studies of kind codec. Rates are in GB/s (1e9 byte/s) of float32: 4 n bytes
over the median time for any width and any number of selected values, so that columns compare with
memcpy's of the same run (4 n bytes copied).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...config import UserError, among
from ...formats import MICROSCALING, Cast
from ...methods import CODEC_OPERATIONS, MEMCPY, SPARSE_OPERATIONS
from ...ops import cpu
from ...world.ranks import Loopback
from ..kinds import flags, printing, timing
from ..kinds.codec import CODEC
from ..kinds.codec_cases import CHECKED, check_against_reference, format_of
from ..kinds.place import JobRanks
from ..provenance import processor
from ..settings import options
from ..study_data import Factors, Value

DEFAULT_FORMATS = "e1m1,e3m0,e3m2,e4m3,e5m2,fp16"
DEFAULT_OPERATIONS = "encode,encode tile,stochastic,decode,decode_add,hop,hop tile"
WARMUP = 1
MOST_THREADS = 1024
MOST_MIB = 1 << 20  # of the host's memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    flags.add_device(parser)
    add, names = options(parser), flags.names
    below = flags.above_0(MOST_MIB - 1, f" and below {MOST_MIB}")
    add("--mib MIB", "size of the array of float32", 64, type=below)
    add("--formats NAME,...", "formats", DEFAULT_FORMATS, type=names(format_of))
    share = flags.above_0(1, " and at most 1")
    add("--density SHARE", "share of values that sparse methods select", 0.01, type=share)
    operations = f"operations: {', '.join(CODEC_OPERATIONS)}"
    known = names(among(CODEC_OPERATIONS))
    add("--operations NAME,...", operations, DEFAULT_OPERATIONS, type=known)
    add("--threads N,...", "threads of the CPU", "1", type=flags.counts)
    add(
        "--clones NAME,...",
        f"loops of the CPU: {', '.join(cpu.clones())}; default: {cpu.clone()}",
        names(among(cpu.clones())),
    )
    flags.add_repeats(parser, 9, calls="calls of each case", out=True)


class CpuLoops(NamedTuple):
    """Loops of the CPU, by the processors that they were compiled for, and their threads."""

    clone: str
    threads: int


def run(given: argparse.Namespace) -> timing.BenchmarkResult:
    """Check and time the operations for each format, and print a table."""
    _check_options(given)
    ways = [CpuLoops(*each) for each in product(given.clones or [cpu.clone()], given.threads)]
    world: Any = Loopback()
    if of_gpu := flags.take_device(given, world):
        print(of_gpu)
    print(f"codec on {processor()}, {os.cpu_count()} cores")
    print(f"{given.mib:g} MiB of float32, median of {given.repeats}, GB/s of float32")
    place, points = JobRanks(world, None, given.oversubscribe_gpus), list[timing.BenchPoint]()

    def timed(operations: Sequence[tuple[str, Factors]]) -> list[timing.BenchPoint]:
        found = _timed(place, given, ways, operations)
        points.extend(found[1 if points else 0 :])  # memcpy once, which is beside each format
        return found

    def rows() -> Iterator[list[object]]:
        for name in given.formats:
            cast = Cast(format_of(name))
            _check(cast, [way.clone for way in ways], given.device)
            found = timed([(each, {"format": name}) for each in given.operations])
            for way in ways:
                yield [name, cast.fmt.bits, *way, *_cells(found, [MEMCPY, *given.operations], way)]

    forms = {"format": "8", "bits": "4", "clone": "9", "threads": "7"}
    printing.show(world, [], forms | dict.fromkeys([MEMCPY, *given.operations], "11"), rows())
    if given.device == "cpu":
        found = timed([(each, {"density": given.density}) for each in SPARSE_OPERATIONS])
        print(f"the largest values, a share of {given.density:g}: GB/s of all of them")
        heads = {f"{way.clone}\n{way.threads}": "11" for way in ways}
        operations = (MEMCPY, *SPARSE_OPERATIONS)
        by_way = [_cells(found, operations, way) for way in ways]
        lines = zip(operations, *by_way, strict=True)
        printing.show(world, [], {"clone\nthreads": "16"} | heads, lines)
    return timing.BenchmarkResult("codec", "codec", points, WARMUP)


def _check_options(given: argparse.Namespace) -> None:
    """Raise UserError for options that do not go together."""
    flags.check_out(given.out, Loopback())
    strange = [each for each in given.operations if not each.endswith(" block32")]
    for name in MICROSCALING.keys() & set(given.formats) if strange else ():
        raise UserError(f"--operations {strange[0]}: {name} has those of block32")
    if max(given.threads) > MOST_THREADS:
        raise UserError(f"--threads {max(given.threads)}: must be up to {MOST_THREADS}")
    if given.device == "gpu" and given.threads != [1]:
        threads = ",".join(map(str, given.threads))
        raise UserError(f"--threads {threads}: is of the CPU: must be 1 with --device gpu")
    if given.device == "gpu" and given.clones:
        raise UserError(f"--clones {given.clones[0]}: is of the CPU: not with --device gpu")


def _check(cast: Cast, clones: Sequence[str], device: str) -> None:
    """Compare some values with the specification, in the loops of each clone."""
    normal = np.random.default_rng(0).standard_normal(CHECKED).astype(np.float32)
    before = cpu.clone()
    try:
        for clone in clones:
            cpu.use_clone(clone)
            check_against_reference(timing.on_device(normal, device), cast)
    finally:
        cpu.use_clone(before)


def _timed(
    place: JobRanks,
    given: argparse.Namespace,
    ways: Sequence[CpuLoops],
    operations: Sequence[tuple[str, Factors]],
) -> list[timing.BenchPoint]:
    """Return the points of memcpy, in one way, and of some operations in all ways, in turns."""
    common: dict[str, Value] = {"size_bytes": 4 * max(1, int(given.mib * 2**20 / 4))}
    if given.device == "gpu":
        common["device"] = "gpu"

    def case(operation: str, way: CpuLoops, further: Factors) -> Factors:
        clone = {"clone": way.clone} if given.clones else {}
        return {**common, "operation": operation, "threads": way.threads, **clone, **further}

    cases = [case(MEMCPY, ways[0], {})]
    cases += [case(name, way, further) for way in ways for name, further in operations]
    return timing.measure(CODEC, place, cases, given.repeats, WARMUP, check=False)


def _cells(points: Sequence[timing.BenchPoint], names: Sequence[str], way: CpuLoops) -> list[str]:
    """Return the rate of each operation in a way, with its ratio to memcpy's."""
    rates = {
        point.factors["operation"]: float(point.factors["size_bytes"])
        / point.median_s(WARMUP)
        / 1e9
        for point in points
        if _way(point) == way or point.factors["operation"] == MEMCPY
    }
    ratios = {n: "" if n == MEMCPY else f" {rates[n] / rates[MEMCPY]:.2f}x" for n in names}
    return [f"{rates[n]:.1f}{ratios[n]}" for n in names]


def _way(point: timing.BenchPoint) -> CpuLoops:
    return CpuLoops(str(point.factors.get("clone", cpu.clone())), int(point.factors["threads"]))

"""Benchmark of the codec: float32 to packed codes and back, beside memcpy on one core.

And of the operations of sparse methods: to find the largest values, take them out, add and pack
them. Cases are those of studies of kind codec. Rates are in GB/s (1e9 byte/s) of float32: 4 n bytes
over the median time for any width and any number of selected values, so that columns compare with
memcpy's of the same run (4 n bytes copied).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...config import UserError, among
from ...formats import MICROSCALING, Cast
from ...methods import CODEC_OPERATIONS, MEMCPY, SPARSE_OPERATIONS
from ...ops import cpu
from ...world.ranks import Loopback
from ..kinds.codec import CODEC
from ..kinds.codec_cases import CHECKED, check_against_reference, format_of
from ..kinds.harness import (
    Measured,
    Point,
    add_device,
    add_samples,
    check_options,
    check_out,
    on_device,
    parse_counts,
    parse_names,
    take_device,
)
from ..kinds.place import Place
from ..kinds.sweep import measure
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
    add_device(parser)
    add = options(parser)
    add("--mib MIB", "size of the array of float32", 64, type=float)
    add("--formats NAME,...", "formats", DEFAULT_FORMATS)
    add("--density SHARE", "share of values that sparse methods select", 0.01)
    add("--operations NAME,...", f"operations: {', '.join(CODEC_OPERATIONS)}", DEFAULT_OPERATIONS)
    add("--threads N,...", "threads of the CPU", "1")
    add(
        "--clones NAME,...",
        f"loops of the CPU: {', '.join(cpu.clones())}; default: {cpu.clone()}",
    )
    add_samples(parser, 9, calls="calls of each case")


class Way(NamedTuple):
    """Loops of the CPU, by the processors that they were compiled for, and their threads."""

    clone: str
    threads: int


def run(args: argparse.Namespace) -> Measured:
    """Check and time the operations for each format, and print a table."""
    names, chosen, ways = _checked(args)
    world: Any = Loopback()
    n = max(1, int(args.mib * 2**20 / 4))
    of_gpu = take_device(args, world)
    if of_gpu:
        print(of_gpu)
    print(f"codec on {processor()}, {os.cpu_count()} cores")
    print(f"{args.mib:g} MiB of float32, median of {args.repeats}, GB/s of float32")
    place, points = Place(world, None, args.oversubscribe_gpus), list[Point]()
    common: dict[str, Value] = {"size_bytes": 4 * n}
    if args.device == "gpu":
        common["device"] = "gpu"
    print(f"{'format':>8} {'bits':>4} {'clone':>9} {'threads':>7} {'memcpy':>11} "
          + " ".join(f"{each:>{max(11, len(each))}}" for each in chosen))  # fmt: skip
    for name in names:
        cast = Cast(format_of(name))
        _check(cast, [way.clone for way in ways], args.device)
        found = _timed(place, args, common, ways, [(each, {"format": name}) for each in chosen])
        for way in ways:
            cells = " ".join(_cells(found, [MEMCPY, *chosen], way))
            print(f"{name:>8} {cast.fmt.bits:>4} {way.clone:>9} {way.threads:>7} {cells}")
        points += found[1 if points else 0 :]  # memcpy once, which is beside each format
    if args.device == "cpu":
        some: Factors = {"density": args.density}
        found = _timed(place, args, common, ways, [(each, some) for each in SPARSE_OPERATIONS])
        print(f"the largest values, a share of {args.density:g}: GB/s of all of them")
        print(f"{'clone':>16} " + " ".join(f"{way.clone:>11}" for way in ways))
        print(f"{'threads':>16} " + " ".join(f"{way.threads:>11}" for way in ways))
        for name in (MEMCPY, *SPARSE_OPERATIONS):
            shown = (_cells(found, [name], way)[0].strip() for way in ways)
            print(f"{name:>16} " + " ".join(f"{cell:>11}" for cell in shown))
        points += found[1:]
    return Measured("codec", "codec", points, WARMUP)


def _checked(args: argparse.Namespace) -> tuple[list[str], list[str], list[Way]]:
    """Return formats, operations and ways. Raises UserError for wrong options."""
    check_options(args, 1, "repeats")
    if not 0 < args.mib < MOST_MIB:
        raise UserError(f"--mib {args.mib:g}: must be above 0 and below {MOST_MIB}")
    if not 0 < args.density <= 1:
        raise UserError(f"--density {args.density:g}: must be above 0 and at most 1")
    check_out(args.out, Loopback())
    names = parse_names("--formats", args.formats, format_of)
    chosen = parse_names("--operations", args.operations, among(CODEC_OPERATIONS))
    for name in MICROSCALING.keys() & set(names):
        if strange := [each for each in chosen if not each.endswith(" block32")]:
            raise UserError(f"--operations {strange[0]}: {name} has those of block32")
    counts = parse_counts("--threads", args.threads)
    clones = parse_names("--clones", args.clones or cpu.clone(), among(cpu.clones()))
    if max(counts) > MOST_THREADS:
        raise UserError(f"--threads {args.threads}: must be up to {MOST_THREADS}")
    if args.device == "gpu" and counts != [1]:
        raise UserError(f"--threads {args.threads}: is of the CPU: must be 1 with --device gpu")
    if args.device == "gpu" and args.clones:
        raise UserError(f"--clones {args.clones}: is of the CPU: not with --device gpu")
    return names, chosen, [Way(*each) for each in product(clones, counts)]


def _check(cast: Cast, clones: Sequence[str], device: str) -> None:
    """Compare some values with the specification, in the loops of each clone."""
    normal = np.random.default_rng(0).standard_normal(CHECKED).astype(np.float32)
    before = cpu.clone()
    try:
        for clone in clones:
            cpu.use_clone(clone)
            check_against_reference(on_device(normal, device), cast)
    finally:
        cpu.use_clone(before)


def _timed(
    place: Place,
    args: argparse.Namespace,
    common: Factors,
    ways: Sequence[Way],
    operations: Sequence[tuple[str, Factors]],
) -> list[Point]:
    """Return the points of memcpy, in one way, and of some operations in all ways, in turns."""

    def case(operation: str, way: Way, further: Factors) -> Factors:
        clone = {"clone": way.clone} if args.clones else {}
        return {**common, "operation": operation, "threads": way.threads, **clone, **further}

    cases = [case(MEMCPY, ways[0], {})]
    cases += [case(name, way, further) for way in ways for name, further in operations]
    return measure(CODEC, place, cases, args.repeats, WARMUP, check=False)


def _cells(points: Sequence[Point], names: Sequence[str], way: Way) -> list[str]:
    """Return the rate of each operation in a way, with its ratio to memcpy's."""
    rates = {
        point.factors["operation"]: float(point.factors["size_bytes"])
        / point.median_s(WARMUP)
        / 1e9
        for point in points
        if _way(point) == way or point.factors["operation"] == MEMCPY
    }
    ratios = {n: "" if n == MEMCPY else f" {rates[n] / rates[MEMCPY]:.2f}x" for n in names}
    return [f"{f'{rates[n]:.1f}{ratios[n]}':>{max(11, len(n))}}" for n in names]


def _way(point: Point) -> Way:
    return Way(str(point.factors.get("clone", cpu.clone())), int(point.factors["threads"]))

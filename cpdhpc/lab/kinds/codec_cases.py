"""Benchmark of the codec: float32 to packed codes and back, beside memcpy on one core.

And of what sparse methods do: to find the largest values, take them out, add them, pack them.
Rates are in GB/s (1e9 byte/s) of float32: 4 n bytes over the median time, whatever the width and
however few of the n values are touched, so that the columns compare with memcpy's of the same run
(4 n bytes copied).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...compress.payload import decode_sparse, encode_sparse
from ...config import UserError, among
from ...formats import (
    MICROSCALING,
    SHARED,
    Cast,
    Format,
    Microscaling,
    packed_bytes,
    parse_format,
    shift_count,
    tiles,
)
from ...methods import CODEC_OPERATIONS, MEMCPY
from ...ops import backend_of, cpu, reference, set_kernel_threads, to_host
from ...world.ranks import Loopback
from ..provenance import processor
from ..settings import options
from .harness import (
    Measured,
    Point,
    Times,
    add_device,
    add_samples,
    check_options,
    check_out,
    interleave,
    on_device,
    parse_counts,
    parse_names,
    take_device,
    whole,
)

Array = Any  # NumPy's, or CuPy's
Way = tuple[str, int]  # which loops, on how many threads

DEFAULT_FORMATS = "e1m1,e3m0,e3m2,e4m3,e5m2,fp16"
DEFAULT_OPERATIONS = "encode,encode tile,stochastic,decode,decode_add,hop,hop tile"
WARMUP = 1
MOST_THREADS = 1024
MOST_MIB = 1 << 20  # of the host's memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add_device(parser)
    add = options(parser)
    add("--mib MIB", "of float32", 64, type=float)
    add("--formats NAME,...", "formats", DEFAULT_FORMATS)
    add("--density SHARE", "selected", 0.01)
    add("--operations NAME,...", f"of {', '.join(CODEC_OPERATIONS)}", DEFAULT_OPERATIONS)
    add("--threads N,...", "of the CPU", "1")
    add(
        "--clones NAME,...",
        f"loops of the CPU, of {', '.join(cpu.clones())}; without: {cpu.clone()}",
    )
    add_samples(parser, 9, calls="calls of each case")


def format_of(name: str) -> Format:
    """Return the format of a name; those of Microscaling too. Raises ValueError for another."""
    return MICROSCALING.get(name) or parse_format(name)


def scalings_of(fmt: Format) -> dict[str, int]:
    """Return the scalings that a format goes with, of SHARED."""
    return {"block32": SHARED["block32"]} if isinstance(fmt, Microscaling) else SHARED


def check_against_reference(x: Array, cast: Cast) -> None:
    """Raise ArithmeticError unless the first tiles come out as the specification says.

    x: NumPy's, or CuPy's for the operations on GPUs
    """
    for scaling, shared in scalings_of(cast.fmt).items():
        results = []
        for ops, head in ((backend_of(x), x[:5000]), (reference, to_host(x[:5000]))):
            words = zeros(head, packed_bytes(head.size, cast.fmt.bits))
            shifts = zeros(head, shift_count(head.size, shared))
            hop, hop_shifts = np.zeros_like(words), np.zeros_like(shifts)
            ops.encode_tiles(head, cast, words, shifts, fit=True)
            ops.decode_add_encode_tiles(words, shifts, cast, head, hop, hop_shifts, fit=True)
            results.append(np.concatenate([*map(to_host, (words, shifts, hop, hop_shifts))]))
        if not np.array_equal(results[0], results[1]):
            name = cast.fmt.name
            raise ArithmeticError(f"bench codec: {name}, {scaling}: differs from ops.reference")


def zeros(like: Array, size: int) -> Array:
    """Return uint8[size] where an array is."""
    return np.zeros_like(like, shape=(size,), dtype=np.uint8)


def operations(x: Array, cast: Cast) -> dict[str, Callable[[], object]]:
    """Return the operations on x, as the all-reduce uses them, by name; memcpy beside them.

    decode_add goes into its accumulator.
    """
    out, total, hop_words = (
        np.zeros_like(x),
        np.zeros_like(x),
        zeros(x, packed_bytes(x.size, cast.fmt.bits)),
    )
    found: dict[str, Callable[[], object]] = {MEMCPY: lambda: np.copyto(out, x)}
    if not isinstance(cast.fmt, Microscaling):
        found |= _given(x, cast, hop_words, out, total)
    for scaling, shared in scalings_of(cast.fmt).items():
        found |= _fitted(scaling, shared, x, cast, hop_words, total)
    return {name: whole(found[name], x) for name in (MEMCPY, *CODEC_OPERATIONS) if name in found}


def _given(
    x: Array, cast: Cast, hop_words: Array, out: Array, total: Array
) -> dict[str, Callable[[], object]]:
    """The operations with shifts that are given."""
    fmt, ops = cast.fmt, backend_of(x)
    words, shifts = zeros(x, packed_bytes(x.size, fmt.bits)), zeros(x, tiles(x.size))
    shifts[...] = 127
    fixed = shifts.copy()
    stochastic = Cast(fmt, "stochastic")
    ops.encode_tiles(x, cast, words, shifts)
    return {
        "encode": lambda: ops.encode_tiles(x, cast, words, fixed),
        "stochastic": lambda: ops.encode_tiles(x, stochastic, hop_words, fixed),
        "decode": lambda: ops.decode_tiles(words, shifts, fmt, out),
        "decode_add": lambda: ops.decode_add_tiles(words, shifts, fmt, total, total),
        "hop": lambda: ops.decode_add_encode_tiles(words, shifts, cast, x, hop_words, fixed),
    }


def _fitted(
    scaling: str, shared: int, x: Array, cast: Cast, hop_words: Array, total: Array
) -> dict[str, Callable[[], object]]:
    """The operations with shifts that are chosen on the way, as many values share one."""
    words, shifts = np.zeros_like(hop_words), zeros(x, shift_count(x.size, shared))
    hop_shifts, ops = np.zeros_like(shifts), backend_of(x)
    ops.encode_tiles(x, cast, words, shifts, fit=True)
    return {
        f"encode {scaling}": lambda: ops.encode_tiles(x, cast, words, shifts, fit=True),
        f"decode_add {scaling}": lambda: ops.decode_add_tiles(
            words, shifts, cast.fmt, total, total
        ),
        f"hop {scaling}": lambda: ops.decode_add_encode_tiles(
            words, shifts, cast, x, hop_words, hop_shifts, fit=True
        ),
    }


ONE_PASS = "one pass"  # each value is read once, and little done: no selection takes less


def sparse_operations(x: NDArray[np.float32], density: float) -> dict[str, Callable[[], object]]:
    """Return the operations of sparse methods on a share of x, by name; memcpy beside them.

    Raises ArithmeticError unless the first values are selected as the specification says.
    """
    n, k, head = x.size, max(1, round(density * x.size)), x[:5000]
    few = max(1, round(density * head.size))
    if not np.array_equal(cpu.select_magnitude(head, few), reference.select_magnitude(head, few)):
        raise ArithmeticError("bench codec: select_magnitude: differs from ops.reference")
    indices = cpu.select_magnitude(x, k)
    values = cpu.gather(x, indices)
    threshold, total = float(np.abs(values).min()), np.zeros_like(x)
    payload = encode_sparse(indices, values, n)
    return {
        MEMCPY: lambda: np.copyto(total, x),
        ONE_PASS: lambda: cpu.amax_tiles(x),
        "kth_magnitude": lambda: cpu.kth_magnitude(x, k),
        "select_magnitude": lambda: cpu.select_magnitude(x, k),
        "select_above": lambda: cpu.select_above(x, threshold),
        "gather": lambda: cpu.gather(x, indices),
        "scatter_add": lambda: cpu.scatter_add(total, indices, values),
        "clear": lambda: cpu.clear(total, indices),
        "encode_sparse": lambda: encode_sparse(indices, values, n),
        "decode_sparse": lambda: decode_sparse(payload, n),
    }


def run(args: argparse.Namespace) -> Measured:
    """Check and time the operations for each format, and print a table."""
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
    n = max(1, int(args.mib * 2**20 / 4))
    where = take_device(args, Loopback())
    if where:
        print(where)
    normal = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    x = on_device(normal, args.device)
    print(f"codec on {processor()}, {os.cpu_count()} cores")
    print(f"{args.mib:g} MiB of float32, median of {args.repeats}, GB/s of float32")
    ways, before = [(clone, count) for clone in clones for count in counts], cpu.clone()
    try:
        found = _codecs(x, names, chosen, ways, args.repeats)
        if args.device == "cpu":
            found |= _selections(x, args, ways)
    finally:
        cpu.use_clone(before)
    points = []
    for (name, operation, (clone, count)), times in found.items():
        factors: dict[str, int | str] = {"size_bytes": 4 * n, "operation": operation}
        factors["threads"] = count
        if args.clones:
            factors["clone"] = clone
        if name and operation != MEMCPY:
            factors["format"] = name
        if operation != MEMCPY or name == names[0]:  # it is measured beside each format
            points.append(Point(factors, {"payload_bytes": 4.0 * n}, times[:, None]))
    return Measured("codec", "codec", points, WARMUP)


def _codecs(
    x: Array, names: Sequence[str], chosen: Sequence[str], ways: Sequence[Way], repeats: int
) -> dict[tuple[str, str, Way], Times]:
    """Time the codec for each format and way, and print a row of each."""
    heads = f"{'format':>8} {'bits':>4} {'clone':>9} {'threads':>7} {'memcpy':>11} "
    print(heads + " ".join(f"{c:>{max(11, len(c))}}" for c in chosen))
    found: dict[tuple[str, str, Way], Times] = {}
    for name in names:
        cast = Cast(format_of(name))
        for clone, _ in ways:
            cpu.use_clone(clone)
            check_against_reference(x, cast)
        runs = operations(x, cast)
        samples = _samples({each: runs[each] for each in (MEMCPY, *chosen)}, ways, repeats)
        for way in ways:
            cells = " ".join(_cells(samples, [MEMCPY, *chosen], way, x.nbytes))
            print(f"{name:>8} {cast.fmt.bits:>4} {way[0]:>9} {way[1]:>7} {cells}")
        found |= {(name, *case): times for case, times in samples.items()}
    return found


def _selections(
    x: NDArray[np.float32], args: argparse.Namespace, ways: Sequence[Way]
) -> dict[tuple[str, str, Way], Times]:
    """Time the sparse operations for each way, and print a row of each operation."""
    cases = sparse_operations(x, args.density)
    samples = _samples(cases, ways, args.repeats)
    print(f"the largest values, a share of {args.density:g}: GB/s of all of them")
    print(f"{'clone':>16} " + " ".join(f"{clone:>11}" for clone, _ in ways))
    print(f"{'threads':>16} " + " ".join(f"{count:>11}" for _, count in ways))
    for name in cases:
        cells = (_cells(samples, [name], way, x.nbytes)[0].strip() for way in ways)
        print(f"{name:>16} " + " ".join(f"{cell:>11}" for cell in cells))
    return {("", *case): times for case, times in samples.items()}


def _samples(
    cases: dict[str, Callable[[], object]], ways: Sequence[Way], repeats: int
) -> dict[tuple[str, Way], Times]:
    """The times of each case in each way, all taking turns; memcpy, which has none, once."""
    runs = {
        (name, way): run
        for way in ways
        for name, run in cases.items()
        if name != MEMCPY or way == ways[0]
    }

    def prepare(case: tuple[str, Way]) -> None:
        clone, count = case[1]
        cpu.use_clone(clone)
        set_kernel_threads(count)

    return interleave(runs, repeats, WARMUP, prepare)


def _cells(
    samples: dict[tuple[str, Way], Times], names: Sequence[str], way: Way, size_bytes: int
) -> list[str]:
    """Return the rate of each operation in a way, with its ratio to memcpy's."""
    rates = {
        case: size_bytes / float(np.median(times[WARMUP:])) / 1e9
        for (case, taken), times in samples.items()
        if taken == way or case == MEMCPY
    }
    ratios = {c: "" if c == MEMCPY else f" {rates[c] / rates[MEMCPY]:.2f}x" for c in names}
    return [f"{f'{rates[c]:.1f}{ratios[c]}':>{max(11, len(c))}}" for c in names]

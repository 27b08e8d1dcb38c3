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
from ...formats import SHARED, Cast, packed_bytes, parse_format, shift_count, tiles
from ...methods import CODEC_OPERATIONS, MEMCPY
from ...ops import backend_of, cpu, reference, set_kernel_threads, to_host
from ...world.ranks import Loopback
from ..provenance import processor
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

DEFAULT_FORMATS = "e1m1,e3m0,e3m2,e4m3,e5m2,fp16"
DEFAULT_OPERATIONS = "encode,encode tile,stochastic,decode,decode_add,hop,hop tile"
WARMUP = 1
MOST_THREADS = 1024
MOST_MIB = 1 << 20  # of the host's memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    add_device(parser)
    parser.add_argument("--mib", type=float, default=64, metavar="MIB", help="of float32")
    parser.add_argument("--formats", default=DEFAULT_FORMATS, metavar="NAME,...", help="formats")
    parser.add_argument("--density", type=float, default=0.01, metavar="SHARE", help="selected")
    parser.add_argument(
        "--operations",
        default=DEFAULT_OPERATIONS,
        metavar="NAME,...",
        help=f"of {', '.join(CODEC_OPERATIONS)}",
    )
    parser.add_argument("--threads", default="1", metavar="N,...", help="of the CPU")
    add_samples(parser, 9, calls="calls of each case")


def check_against_reference(x: Array, cast: Cast) -> None:
    """Raise ArithmeticError unless the first tiles come out as the specification says.

    x: NumPy's, or CuPy's for the operations on GPUs
    """
    for scaling, shared in SHARED.items():
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
    fmt, ops = cast.fmt, backend_of(x)
    words, shifts = zeros(x, packed_bytes(x.size, fmt.bits)), zeros(x, tiles(x.size))
    shifts[...] = 127
    hop_words, fixed = np.zeros_like(words), shifts.copy()
    out, total = np.zeros_like(x), np.zeros_like(x)
    stochastic = Cast(fmt, "stochastic")
    ops.encode_tiles(x, cast, words, shifts)
    found: dict[str, Callable[[], object]] = {
        MEMCPY: lambda: np.copyto(out, x),
        "encode": lambda: ops.encode_tiles(x, cast, words, fixed),
        "stochastic": lambda: ops.encode_tiles(x, stochastic, hop_words, fixed),
        "decode": lambda: ops.decode_tiles(words, shifts, fmt, out),
        "decode_add": lambda: ops.decode_add_tiles(words, shifts, fmt, total, total),
        "hop": lambda: ops.decode_add_encode_tiles(words, shifts, cast, x, hop_words, fixed),
    }
    for scaling, shared in SHARED.items():
        found |= _fitted(scaling, shared, x, cast, hop_words, total)
    return {name: whole(found[name], x) for name in (MEMCPY, *CODEC_OPERATIONS)}


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
    names = parse_names("--formats", args.formats, parse_format)
    chosen = parse_names("--operations", args.operations, among(CODEC_OPERATIONS))
    counts = parse_counts("--threads", args.threads)
    if max(counts) > MOST_THREADS:
        raise UserError(f"--threads {args.threads}: must be up to {MOST_THREADS}")
    if args.device == "gpu" and counts != [1]:
        raise UserError(f"--threads {args.threads}: is of the CPU: must be 1 with --device gpu")
    n = max(1, int(args.mib * 2**20 / 4))
    where = take_device(args, Loopback())
    if where:
        print(where)
    normal = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    x = on_device(normal, args.device)
    print(f"codec on {processor()}, {os.cpu_count()} cores, clone {cpu.clone()}")
    print(f"{args.mib:g} MiB of float32, median of {args.repeats}, GB/s of float32")
    found = _codecs(x, names, chosen, counts, args.repeats)
    if args.device == "cpu":
        found |= _selections(x, args, counts)
    points = []
    for (name, operation, count), times in found.items():
        factors: dict[str, int | str] = {"size_bytes": 4 * n, "operation": operation}
        factors["threads"] = count
        if name and operation != MEMCPY:
            factors["format"] = name
        if operation != MEMCPY or name == names[0]:  # it is measured beside each format
            points.append(Point(factors, {"payload_bytes": 4.0 * n}, times[:, None]))
    return Measured("codec", "codec", points, WARMUP)


def _codecs(
    x: Array, names: Sequence[str], chosen: Sequence[str], counts: Sequence[int], repeats: int
) -> dict[tuple[str, str, int], Times]:
    """Time the codec for each format and number of threads, and print a row of each."""
    heads = f"{'format':>8} {'bits':>4} {'threads':>7} {'memcpy':>11} "
    print(heads + " ".join(f"{c:>{max(11, len(c))}}" for c in chosen))
    found: dict[tuple[str, str, int], Times] = {}
    for name in names:
        cast = Cast(parse_format(name))
        check_against_reference(x, cast)
        runs = operations(x, cast)
        samples = _samples({each: runs[each] for each in (MEMCPY, *chosen)}, counts, repeats)
        for count in counts:
            cells = " ".join(_cells(samples, [MEMCPY, *chosen], count, x.nbytes))
            print(f"{name:>8} {cast.fmt.bits:>4} {count:>7} {cells}")
        found |= {(name, *case): times for case, times in samples.items()}
    return found


def _selections(
    x: NDArray[np.float32], args: argparse.Namespace, counts: Sequence[int]
) -> dict[tuple[str, str, int], Times]:
    """Time the sparse operations for each number of threads, and print a row of each operation."""
    cases = sparse_operations(x, args.density)
    samples = _samples(cases, counts, args.repeats)
    print(f"the largest values, a share of {args.density:g}: GB/s of all of them")
    print(f"{'threads':>16} " + " ".join(f"{count:>11}" for count in counts))
    for name in cases:
        cells = (_cells(samples, [name], count, x.nbytes)[0].strip() for count in counts)
        print(f"{name:>16} " + " ".join(f"{cell:>11}" for cell in cells))
    return {("", *case): times for case, times in samples.items()}


def _samples(
    cases: dict[str, Callable[[], object]], counts: Sequence[int], repeats: int
) -> dict[tuple[str, int], Times]:
    """The times of each case on each number of threads, all taking turns; memcpy on one alone."""
    runs = {
        (name, count): run
        for count in counts
        for name, run in cases.items()
        if name != MEMCPY or count == counts[0]
    }
    return interleave(runs, repeats, WARMUP, lambda case: set_kernel_threads(case[1]))


def _cells(
    samples: dict[tuple[str, int], Times], names: Sequence[str], count: int, size_bytes: int
) -> list[str]:
    """Return the rate of each operation on so many threads, with its ratio to memcpy's on one."""
    rates = {
        case: size_bytes / float(np.median(times[WARMUP:])) / 1e9
        for (case, threads), times in samples.items()
        if threads == count or case == MEMCPY
    }
    ratios = {c: "" if c == MEMCPY else f" {rates[c] / rates[MEMCPY]:.2f}x" for c in names}
    return [f"{f'{rates[c]:.1f}{ratios[c]}':>{max(11, len(c))}}" for c in names]

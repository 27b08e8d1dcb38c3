"""Benchmark of the codec: float32 to packed codes and back, beside memcpy on one core.

Rates are in GB/s (1e9 byte/s) of float32: 4 n bytes over the median time, whatever the width,
so that the columns compare with memcpy's of the same run (4 n bytes copied).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..config import UserError
from ..formats import Cast, packed_bytes, parse_format, tiles
from ..methods import CODEC_OPERATIONS, MEMCPY
from ..ops import cpu, reference, set_kernel_threads
from ..provenance import processor
from ..world.ranks import Loopback
from .harness import (
    Measured,
    Point,
    Times,
    check_out,
    check_positive,
    interleave,
    parse_counts,
    parse_names,
)

DEFAULT_FORMATS = "e1m1,e3m0,e3m2,e4m3,e5m2,fp16"
WARMUP = 1
MOST_MIB = 1 << 20  # of the host's memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("--mib", type=float, default=64, help="MiB of float32 (default 64)")
    parser.add_argument("--formats", default=DEFAULT_FORMATS, help="comma-separated names")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls of each case")
    parser.add_argument(
        "--threads", default="1", help="numbers of threads, comma-separated (default 1)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.h5", help="write every sample, for report"
    )


def check_against_reference(x: NDArray[np.float32], cast: Cast) -> None:
    """Raise ArithmeticError unless the first tiles come out as the specification says."""
    head = x[:5000]
    results = []
    for ops in (cpu, reference):
        words = np.zeros(packed_bytes(head.size, cast.fmt.bits), np.uint8)
        shifts = np.zeros(tiles(head.size), np.uint8)
        hop, hop_shifts = np.zeros_like(words), np.zeros_like(shifts)
        ops.encode_tiles(head, cast, words, shifts, fit=True)
        ops.decode_add_encode_tiles(words, shifts, cast, head, hop, hop_shifts, fit=True)
        results.append(np.concatenate([words, shifts, hop, hop_shifts]))
    if not np.array_equal(results[0], results[1]):
        raise ArithmeticError(f"bench codec: {cast.fmt.name}: differs from ops.reference")


def operations(x: NDArray[np.float32], cast: Cast) -> dict[str, Callable[[], object]]:
    """Return the operations on x, as the all-reduce uses them, by name; memcpy beside them.

    decode_add goes into its accumulator.
    """
    fmt = cast.fmt
    words = np.zeros(packed_bytes(x.size, fmt.bits), np.uint8)
    shifts = np.full(tiles(x.size), 127, np.uint8)
    tile_words, tile_shifts = np.zeros_like(words), np.zeros_like(shifts)
    hop_words, hop_shifts = np.zeros_like(words), np.zeros_like(shifts)
    fixed = shifts.copy()
    out, total = np.zeros_like(x), np.zeros_like(x)
    stochastic = Cast(fmt, "stochastic")
    cpu.encode_tiles(x, cast, tile_words, tile_shifts, fit=True)
    cpu.encode_tiles(x, cast, words, shifts)
    runs = (
        lambda: cpu.encode_tiles(x, cast, words, fixed),
        lambda: cpu.encode_tiles(x, cast, tile_words, tile_shifts, fit=True),
        lambda: cpu.encode_tiles(x, stochastic, hop_words, fixed),
        lambda: cpu.decode_tiles(words, shifts, fmt, out),
        lambda: cpu.decode_add_tiles(words, shifts, fmt, total, total),
        lambda: cpu.decode_add_encode_tiles(words, shifts, cast, x, hop_words, fixed),
        lambda: cpu.decode_add_encode_tiles(
            tile_words, tile_shifts, cast, x, hop_words, hop_shifts, fit=True
        ),
    )
    return {MEMCPY: lambda: np.copyto(out, x), **dict(zip(CODEC_OPERATIONS, runs, strict=True))}


def run(args: argparse.Namespace) -> Measured:
    """Check and time the operations for each format, and print a table."""
    check_positive(args, "repeats")
    if not 0 < args.mib < MOST_MIB:
        raise UserError(f"--mib {args.mib:g}: must be above 0 and below {MOST_MIB}")
    check_out(args.out, Loopback())
    names = parse_names("--formats", args.formats, parse_format)
    counts = parse_counts("--threads", args.threads)
    n = max(1, int(args.mib * 2**20 / 4))
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    print(f"codec on {processor()}, {os.cpu_count()} cores, clone {cpu.clone()}")
    print(f"{args.mib:g} MiB of float32, median of {args.repeats}, GB/s of float32")
    heads = f"{'format':>8} {'bits':>4} {'threads':>7} {'memcpy':>11} "
    print(heads + " ".join(f"{c:>11}" for c in CODEC_OPERATIONS))
    found: dict[tuple[str, str, int], Times] = {}
    for name in names:
        cast = Cast(parse_format(name))
        check_against_reference(x, cast)
        samples = _samples(operations(x, cast), counts, args.repeats)
        for count in counts:
            print(_line(name, count, samples, 4 * n))
        found |= {(name, *case): times for case, times in samples.items()}
    points = []
    for (name, operation, count), times in found.items():
        factors: dict[str, int | str] = {"size_bytes": 4 * n, "operation": operation}
        factors |= {"threads": count} if operation == MEMCPY else {"threads": count, "format": name}
        if operation != MEMCPY or name == names[0]:
            points.append(Point(factors, {"payload_bytes": 4.0 * n}, times[:, None]))
    return Measured("codec", "codec", points, WARMUP)


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


def _line(name: str, count: int, samples: dict[tuple[str, int], Times], size_bytes: int) -> str:
    """A row of the table."""
    rates = {
        case: size_bytes / float(np.median(times[WARMUP:])) / 1e9
        for (case, threads), times in samples.items()
        if threads == count or case == MEMCPY
    }
    memcpy = rates[MEMCPY]
    cells = " ".join(f"{rates[c]:>5.1f} {rates[c] / memcpy:.2f}x" for c in CODEC_OPERATIONS)
    return f"{name:>8} {parse_format(name).bits:>4} {count:>7} {memcpy:>11.1f} {cells}"

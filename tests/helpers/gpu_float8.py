"""Are the GPU's own conversions of 8 bits those of the specification, and how fast? On a real GPU.

    python tests/helpers/gpu_float8.py [--every N]

encodes float32 numbers, all 2**32 of them or every N-th, by the kernels for one cast, which convert
by the GPU itself where it can (sm_90 and later), and by those for all casts, which never do, and
compares the bytes; decodes all codes with all shifts both ways, and adds. Then it prints rates
beside a copy on the device. Exit status 1 where a bit differs.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import cupy
import numpy as np

from cpdhpc.formats import SHIFT_BIAS, TILE, Cast, parse_format, tiles
from cpdhpc.ops import gpu, gpu_runtime

FORMATS = ("e4m3", "e4m3fn", "e5m2")
PIECE = 1 << 26  # values at once
SHIFTS = (0, 7, -30, 100)
REPEATS = 20


def both_ways(run: Callable[[], list[Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of what kernels for one cast make, and those for all casts."""
    own = run()
    with patch.object(gpu_runtime, "_codec_kernel", _kernel_for_all):
        return list(zip(own, run(), strict=True))


def _kernel_for_all(name: str, fixed: Any, device: int) -> Any:
    return gpu_runtime._kernel(name, device)


def encoded(x: Any, cast: Cast, shift: int | None) -> list[Any]:
    """Return words and shifts of x with a shift for all tiles, or with chosen ones."""
    words = cupy.zeros(tiles(x.size) * 128 * cast.fmt.bits, np.uint8)
    shifts = cupy.full(tiles(x.size), (shift or 0) + SHIFT_BIAS, np.uint8)
    gpu.encode_tiles(x, cast, words, shifts, fit=shift is None)
    return [words, shifts]


def different(pairs: list[tuple[Any, Any]]) -> int:
    """Return how many bytes of results differ."""
    return sum(int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in pairs)


def encodes(cast: Cast, every: int) -> int:
    """Return how many bytes differ of all floats, in order, so that tiles stay inside or do not."""
    count, wrong = (1 << 32) // every, 0
    for start in range(0, count, PIECE):
        places = cupy.arange(start, min(start + PIECE, count), dtype=np.uint64)
        x = (places * np.uint64(every) + np.uint64(start % every)).astype(np.uint32)
        x = x.view(np.float32)
        for shift in (None, *SHIFTS):
            wrong += different(both_ways(lambda x=x, s=shift: encoded(x, cast, s)))
    return wrong


def decodes(cast: Cast) -> int:
    """Return how many bytes differ of codes with all shifts, 255 too, alone and in sums."""
    fmt = cast.fmt
    codes = cupy.tile(cupy.arange(256, dtype=np.uint8), 4 * 512)
    codes[codes.size // 2 :] %= np.uint8(fmt.max_code + 1)  # tiles without infinity and NaN
    shifts = cupy.tile(cupy.arange(256, dtype=np.uint8), 2)
    n = codes.size
    x = cupy.asarray(np.random.default_rng(1).normal(size=n).astype(np.float32))

    def run() -> list[Any]:
        alone, total = cupy.empty(n, np.float32), cupy.empty(n, np.float32)
        count = gpu.decode_tiles(codes, shifts, fmt, alone)
        gpu.decode_add_tiles(codes, shifts, fmt, x, total)
        words, own = cupy.zeros(n, np.uint8), shifts.copy()
        gpu.decode_add_encode_tiles(codes, shifts, cast, x, words, own, fit=True)
        return [alone, total, words, own, count.reshape(1)]

    return different(both_ways(run))


def rates(cast: Cast, n: int = 1 << 28) -> dict[str, tuple[float, float]]:
    """Return GB/s of each operation and its share of a copy's, n values."""
    x, out = cupy.random.standard_normal(n, dtype=np.float32), cupy.empty(n, np.float32)
    words, shifts = encoded(x, cast, None)
    other, fmt = [words.copy(), shifts.copy()], cast.fmt
    code = fmt.bits / 8 + 1 / TILE
    operations: dict[str, tuple[float, Callable[[], Any]]] = {
        "copy": (8, lambda: cupy.copyto(out, x)),
        "encode": (4 + code, lambda: gpu.encode_tiles(x, cast, *other, fit=True)),
        "decode": (4 + code, lambda: gpu.decode_tiles(words, shifts, fmt, out)),
        "decode_add": (8 + code, lambda: gpu.decode_add_tiles(words, shifts, fmt, x, out)),
        "hop": (
            4 + 2 * code,
            lambda: gpu.decode_add_encode_tiles(words, shifts, cast, x, *other, fit=True),
        ),
    }
    found: dict[str, tuple[float, float]] = {}
    for name, (value_bytes, run) in operations.items():
        times = []
        for _ in range(REPEATS):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
        rate = value_bytes * n / float(np.median(times[3:])) / 1e9
        found[name] = rate, rate / found["copy"][0] if found else 1.0
    return found


def main() -> int:
    """Print what differs, and rates; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take every N-th of the 2**32 floats")
    every = parser.parse_args().every
    print(gpu_runtime.device_name(), "compute capability", cupy.cuda.Device().compute_capability)
    wrong = 0
    for name in FORMATS:
        cast = Cast(parse_format(name))
        bad = encodes(cast, every), decodes(cast)
        wrong += sum(bad)
        print(f"{name}: bytes that differ: encode {bad[0]}, decode, sums and hops {bad[1]}")
    for name in ("e4m3", "e5m2", "e2m1fn", "bf16"):
        shown = rates(Cast(parse_format(name)))
        print(name, ", ".join(f"{k} {r:.0f} GB/s ({s:.0%})" for k, (r, s) in shown.items()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

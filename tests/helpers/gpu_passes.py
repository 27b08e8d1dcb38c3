"""Rates of the array operations on CuPy's current GPU, beside a copy of as many values.

    python tests/helpers/gpu_passes.py [--values N]

Each is timed as a method of averaging calls it: with what it waits for, and with the copies to the
host that it makes. "least" is what must be read and written, in copies.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import cupy
import numpy as np

from cpdhpc.formats import Cast, parse_format, tiles
from cpdhpc.ops import gpu

REPEATS = 9
COPIED = 8  # bytes that a copy moves for each value


def time_s(run: Callable[[], object]) -> float:
    """Return the median time of a call, the GPU's work included."""
    found = []
    for repeat in range(2 + REPEATS):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        run()
        cupy.cuda.Device().synchronize()
        if repeat >= 2:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def passes(n: int) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield a name, the bytes that must move for each value, and a call, of n values."""
    random = cupy.random.RandomState(1)
    x, y = (random.standard_normal(n, dtype=np.float32) for _ in range(2))
    out, k = cupy.empty_like(x), n // 100
    sizes = np.array([64, 64 * 64 * 9, 128 * 128 * 9, 512 * 512 * 9, 512] * 12)  # of layers
    ends = (np.cumsum(sizes) * (n / sizes.sum())).astype(np.int64)
    ends[-1] = n
    each, starts = np.ones(ends.size, np.float32), np.append(0, ends[:-1])
    side = int(np.sqrt(n))
    m, rows = x[: side * side].reshape(side, side), y[: 2 * side].reshape(2, side)
    wide = x.reshape(1024, -1)
    indices = gpu.select_magnitude(x, k)
    taken = gpu.gather(x, indices)
    codes, widths = gpu.encode(x, Cast(parse_format("e4m3"))), np.full(tiles(n), 8, np.uint8)
    stream = gpu.pack_stream(codes, widths)
    yield "add", 12, lambda: gpu.add(x, y, out)
    yield "divide", 8, lambda: gpu.divide(x, np.float32(3), out)
    yield "amax_tiles", 4, lambda: gpu.amax_tiles(x)
    yield "square_sum", 4, lambda: gpu.square_sum(x)
    yield "run_sums", 4, lambda: gpu.run_sums(x, starts, "magnitude")
    yield "row_sums", 4, lambda: gpu.row_sums(wide)
    yield "multiply_runs", 12, lambda: gpu.multiply_runs(x, each, ends, out)  # and its largest
    yield "divide_runs", 8, lambda: gpu.divide_runs(x, each, ends, out)
    yield "run_maxima", 4, lambda: gpu.run_maxima(x, ends)
    yield "accumulate", 12, lambda: gpu.accumulate(x, y, out)
    yield "encode_bins", 12, lambda: gpu.encode_bins(x, y, out, 0.5, 500)
    yield "chunk_leaders", 4, lambda: gpu.chunk_leaders(x, 500)
    yield "kth_magnitude", 4, lambda: gpu.kth_magnitude(x, k)
    yield "select_magnitude", 4, lambda: gpu.select_magnitude(x, k)
    yield "select_above", 4, lambda: gpu.select_above(x, 2.5)
    yield "gather", 0.12, lambda: gpu.gather(x, indices)
    yield "scatter_add", 0.12, lambda: gpu.scatter_add(out, indices, taken)
    yield "pack_stream", 5, lambda: gpu.pack_stream(codes, widths)
    yield "unpack_stream", 5, lambda: gpu.unpack_stream(stream, widths, n)
    yield "row_products", 4, lambda: gpu.row_products(m, rows)
    yield "column_products", 4, lambda: gpu.column_products(m, rows)
    yield "outer", 8, lambda: gpu.outer(rows, rows, out[: m.size].reshape(m.shape))
    signs = gpu.encode_signs(wide)
    yield "encode_signs", 4, lambda: gpu.encode_signs(wide)
    yield "decode_signs", 4, lambda: gpu.decode_signs(*([s] for s in signs[:2]), wide, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 26, metavar="N", help="(2^26)")
    n = parser.parse_args().values // 1024 * 1024
    x = cupy.ones(n, np.float32)
    target = cupy.empty_like(x)
    copy_s = time_s(lambda: gpu.copy(target, x))
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    print(f"# {name}, {n:,} values, median of {REPEATS}; a copy: {copy_s * 1e3:.3f} ms")
    print(f"{'# operation':<20}{'ms':>9}{'copies':>9}{'least':>9}")
    for operation, moved, run in passes(n):
        taken_s = time_s(run)
        print(f"{operation:<20}{taken_s * 1e3:9.3f}{taken_s / copy_s:9.2f}{moved / COPIED:9.2f}")


if __name__ == "__main__":
    main()

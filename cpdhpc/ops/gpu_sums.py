"""Sums and products in NumPy's order of additions on CuPy arrays; a part of ops.gpu.

The GPU sums up to 128 values a thread, the leaves of NumPy's tree; the tree's upper part, a 64th of
the bytes, is summed on the CPU.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from .cpu import Term
from .gpu_runtime import check, element_blocks, launch, to_host

Array = Any  # cupy.ndarray
HostArray = np.ndarray[Any, np.dtype[Any]]

VALUE, MAGNITUDES, SQUARES = range(3)  # as kernels/cuda_sums.h numbers them
LEAF = 128  # values that NumPy sums without halving them
BUFFER = 8192  # values that NumPy makes float64 at once; it adds those sums one after another


def _pairwise(x: Array, starts: HostArray, stops: HostArray, of: int, center: float) -> HostArray:
    """Return the sum of each part of float32[n]: int64[parts] to NumPy's float64[parts]."""
    sizes, halved = stops - starts, list[HostArray]()
    while (is_long := sizes > LEAF).any():
        counts = 1 + is_long
        half = np.where(is_long, sizes // 2 // 8 * 8, sizes)
        second = (np.cumsum(counts) - 1)[is_long]
        rest = (sizes - half)[is_long]
        starts, sizes = np.repeat(starts, counts), np.repeat(half, counts)
        starts[second] += half[is_long]
        sizes[second] = rest
        halved.append(is_long)
    found = cupy.empty(starts.size, np.float64)
    leaves = (cupy.asarray(starts), cupy.asarray(sizes), np.int64(starts.size), found)
    launch("leaf_sums", element_blocks(starts.size), np.int32(of), np.float64(center), x, *leaves)
    sums = to_host(found)
    for is_long in reversed(halved):
        first = np.cumsum(1 + is_long) - (1 + is_long)
        joined = sums[first]
        joined[is_long] += sums[first[is_long] + 1]
        sums = joined
    return np.asarray(sums)


def row_sums(x: Array) -> HostArray:
    """Return the sum of each row: float32[rows, columns] to NumPy's float64[rows]."""
    check("x", x, np.float32)
    rows, columns = x.shape
    if not columns:
        return np.zeros(rows)
    begins = np.arange(0, columns, BUFFER)
    starts = (np.arange(rows)[:, None] * columns + begins).ravel()
    stops = starts + np.tile(np.minimum(columns - begins, BUFFER), rows)
    parts = _pairwise(x.reshape(-1), starts, stops, VALUE, 0.0).reshape(rows, -1)
    total = parts[:, 0].copy()
    for part in parts[:, 1:].T:
        total += part
    return total


def run_sums(x: Array, starts: HostArray, of: Term) -> HostArray:
    """Return the sum of magnitudes or squares of each run: float32[n], int64[runs] to float64.

    NumPy's reduceat adds to the first term the sum of the others.
    """
    check("x", x, np.float32)
    first = to_host(x[cupy.asarray(starts)]).astype(np.float64)
    if of == "magnitude":
        kind, sums = MAGNITUDES, np.abs(first)
    else:
        kind, sums = SQUARES, np.square(first)
    sums += _pairwise(x, starts + 1, np.append(starts[1:], x.size), kind, 0.0)
    return np.asarray(sums)


def square_sum(x: Array, center: float = 0.0) -> float:
    """Return the sum of squares of x - center, float32[n]."""
    check("x", x, np.float32)
    if not x.size:
        return 0.0
    ends = np.array([0]), np.array([x.size])
    return float(_pairwise(x.reshape(-1), *ends, SQUARES, center)[0])


def multiply_runs(x: Array, each: HostArray, ends: HostArray, out: Array, start: int = 0) -> None:
    """Write x times its runs' numbers into out; see ops.cpu."""
    _runs("multiply_runs", x, each, ends, out, start)


def divide_runs(x: Array, each: HostArray, ends: HostArray, out: Array, start: int = 0) -> None:
    """Write x over its runs' numbers into out; see ops.cpu."""
    _runs("divide_runs", x, each, ends, out, start)


def _runs(name: str, x: Array, each: HostArray, ends: HostArray, out: Array, start: int) -> None:
    check("x", x, np.float32)
    check("out", out, np.float32, x.size)
    runs = (cupy.asarray(each), cupy.asarray(ends - start), np.int64(ends.size))
    launch(name, element_blocks(x.size), x, np.int64(x.size), *runs, out)


def row_products(m: Array, rows: Array) -> Array:
    """Return the product of m with each of some rows: float32[n, k], [r, k] to [r, n]."""
    return _products("row_products", m, rows, 1, 0)


def column_products(m: Array, rows: Array) -> Array:
    """Return the product of m, transposed, with each of some rows: [n, k], [r, n] to [r, k]."""
    return _products("column_products", m, rows, 0, 1)


def _products(name: str, m: Array, rows: Array, summed: int, kept: int) -> Array:
    check("m", m, np.float32)
    check("rows", rows, np.float32, len(rows) * m.shape[summed])
    out = cupy.empty((len(rows), m.shape[kept]), np.float32)
    sizes = (np.int64(m.shape[0]), np.int64(m.shape[1]))
    launch(name, element_blocks(out.size), m, *sizes, rows, np.int64(len(rows)), out)
    return out


def add_outer(total: Array, firsts: Array, seconds: Array) -> None:
    """Add the products of columns and rows to a matrix: float32[n, k], [r, n], [r, k]."""
    n, columns = total.shape
    check("total", total, np.float32)
    check("firsts", firsts, np.float32, len(firsts) * n)
    check("seconds", seconds, np.float32, len(firsts) * columns)
    sizes = (np.int64(n), np.int64(columns))
    count = np.int64(len(firsts))
    launch("add_outer", element_blocks(total.size), total, *sizes, firsts, seconds, count)

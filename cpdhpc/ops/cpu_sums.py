"""Sums and products whose order of additions is NumPy's; a part of ops.cpu, as of the GPU's.

Sums are in float64 and add in pairs: halves of halves, down to 128 values, of which eight are
summed side by side. np.einsum's products are in float32: sums over columns have four sums side by
side, those over rows are in the order of rows. On x86-64, that is: NumPy on other processors fuses
products into sums.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

__all__ = [
    "add_outer",
    "column_products",
    "divide_runs",
    "multiply_runs",
    "row_products",
    "row_sums",
    "run_sums",
    "square_sum",
]

Array = np.ndarray[Any, np.dtype[Any]]
Term = Literal["magnitude", "square"]

BLOCK_VALUES = 1 << 15  # whose float64 fit in a core's cache


def row_sums(x: Array) -> Array:
    """Return the sum of each row: float32[rows, columns] to float64[rows]."""
    return np.asarray(x.sum(axis=1, dtype=np.float64))


def run_sums(x: Array, starts: Array, of: Term) -> Array:
    """Return the sum of magnitudes or squares of each run: float32[n], int64[runs] to float64."""
    terms = np.abs(x) if of == "magnitude" else np.square(x, dtype=np.float64)
    return np.add.reduceat(terms, starts, dtype=np.float64)


def square_sum(x: Array, center: float = 0.0) -> float:
    """Return the sum of squares of x - center, float32[n], without arrays as long as x."""

    def squares(start: int, stop: int) -> float:
        if stop - start <= BLOCK_VALUES:
            difference = x[start:stop] - np.float64(center)
            difference *= difference
            return float(difference.sum())
        half = (stop - start) // 2
        middle = start + half - half % 8  # as NumPy halves a whole array
        return squares(start, middle) + squares(middle, stop)

    return squares(0, x.size)


def multiply_runs(x: Array, each: Array, ends: Array, out: Array, start: int = 0) -> None:
    """Write x times its runs' numbers into out: runs of float32[runs] end at ends, int64[runs].

    start: the place of x, float32[n], in what the runs are of
    """
    np.multiply(x, _spread(each, ends, start, start + x.size), out=out)


def divide_runs(x: Array, each: Array, ends: Array, out: Array, start: int = 0) -> None:
    """Write x over its runs' numbers into out; see multiply_runs."""
    np.divide(x, _spread(each, ends, start, start + x.size), out=out)


def _spread(each: Array, ends: Array, start: int, stop: int) -> Array:
    """Return np.repeat(each, np.diff(ends, prepend=0))[start:stop]; a lone one of a lone run."""
    if start == stop:
        return each[:0]
    first, last = np.searchsorted(ends, [start, stop - 1], side="right")
    if first == last:
        return each[first : last + 1]
    counts = np.minimum(ends[first : last + 1], stop)
    counts[1:] -= counts[:-1]  # NumPy sees that they overlap
    counts[0] -= start
    return np.repeat(each[first : last + 1], counts)


def row_products(m: Array, rows: Array) -> Array:
    """Return the product of m with each of some rows: float32[n, k], [r, k] to [r, n]."""
    return np.asarray(np.einsum("ij,rj->ri", m, rows))


def column_products(m: Array, rows: Array) -> Array:
    """Return the product of m, transposed, with each of some rows: [n, k], [r, n] to [r, k]."""
    return np.asarray(np.einsum("ij,ri->rj", m, rows))


def add_outer(total: Array, firsts: Array, seconds: Array) -> None:
    """Add the products of columns and rows to a matrix: float32[n, k], [r, n], [r, k]."""
    for column, row in zip(firsts, seconds, strict=True):
        total += column[:, None] * row

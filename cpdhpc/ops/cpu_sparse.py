"""Sparse operations of ops.reference, compiled; a part of ops.cpu.

The k largest of n values are found in little more than one pass over them. A sample says above
which magnitude about k values lie; one pass collects those that do, and a radix selection finds the
k-th among them. That is exact whatever the sample: where fewer than k lie above its magnitude, all
values but zeros are collected.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _cpu
from .reference_sparse import (
    MAGNITUDE,
    check_rank,
    check_size,
    radix_select,
    stream_words,
    threshold_bits,
    without_last_ties,
)
from .threads import kernel_threads

__all__ = [
    "clear",
    "count_bits",
    "count_digits",
    "gather",
    "kth_magnitude",
    "mark_above",
    "pack_bitmap",
    "pack_stream",
    "scatter_add",
    "select_above",
    "select_magnitude",
    "stream_words",
    "unpack_bitmap",
    "unpack_stream",
]

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLED = 4096  # of so many values a line is looked at
LINE = 16  # float32 in what memory delivers at once
FEW = 8192  # values up to here are left to NumPy: it takes less time than three calls
SPARE = 6  # standard deviations that a sample may be wrong by


def check(name: str, array: Array, dtype: type[np.generic]) -> None:
    """Raise TypeError unless array is of this dtype."""
    if array.dtype != dtype:
        raise TypeError(f"{name}: {array.dtype} given, {np.dtype(dtype)} needed")


def count_digits(x: Array, low: int, shift: int, buckets: int) -> Array:
    """Return how many magnitudes lie in each bucket, 2**shift wide, from low on."""
    check("x", x, np.float32)
    counts = np.empty(buckets, np.uint32)
    _cpu.count_digits(kernel_threads(), low, shift, x, counts)
    return counts


def mark_above(x: Array, bits: int) -> Array:
    """Return a bit for each value, set where its magnitude is above bits: uint32[ceil(n / 32)]."""
    check("x", x, np.float32)
    words = np.empty(-(-x.size // 32), np.uint32)
    _cpu.mark_above(kernel_threads(), bits, x, words)
    return words


def count_bits(words: Array) -> Array:
    """Return how many bits are set in each 32 words: uint32[w] to uint32[ceil(w / 32)]."""
    check("words", words, np.uint32)
    counts = np.empty(-(-words.size // 32), np.uint32)
    _cpu.count_bits(kernel_threads(), words, counts)
    return counts


def unpack_bitmap(words: Array) -> Array:
    """Return where bits are set, ascending: uint32[w] to uint32[m]."""
    counts = count_bits(words)
    ends = np.cumsum(counts, dtype=np.uint32)
    found = np.empty(int(ends[-1]) if ends.size else 0, np.uint32)
    _cpu.unpack_bitmap(kernel_threads(), words, ends - counts, found)
    return found


def pack_bitmap(indices: Array, size: int) -> Array:
    """Return a bit for each of size places, set at the indices: uint32[m] to uint32 words."""
    check("indices", indices, np.uint32)
    words = np.empty(-(-size // 32), np.uint32)
    _cpu.pack_bitmap(indices, words)
    return words


def pack_stream(codes: Array, widths: Array) -> Array:
    """Return codes as a stream of bits, each tile at its width; see ops.reference_sparse."""
    check("codes", codes, np.uint32)
    check("widths", widths, np.uint8)
    words = np.empty(stream_words(widths, codes.size), np.uint32)
    _cpu.pack_stream(codes, widths, words)
    return words


def unpack_stream(words: Array, widths: Array, n: int) -> Array:
    """Return the n codes that pack_stream packed: uint32[n]."""
    check("words", words, np.uint32)
    check("widths", widths, np.uint8)
    codes = np.empty(n, np.uint32)
    _cpu.unpack_stream(words, widths, codes)
    return codes


def gather(x: Array, indices: Array) -> Array:
    """Return x[indices]: float32[n], uint32[m] to float32[m]."""
    check("x", x, np.float32)
    check("indices", indices, np.uint32)
    out = np.empty(indices.size, np.float32)
    _cpu.gather(kernel_threads(), x, indices, out)
    return out


def scatter_add(out: Array, indices: Array, values: Array) -> None:
    """Add values to out[indices]: float32[n], uint32[m], float32[m]."""
    check("out", out, np.float32)
    check("indices", indices, np.uint32)
    check("values", values, np.float32)
    _cpu.scatter_add(kernel_threads(), out, indices, values)


def clear(x: Array, indices: Array) -> None:
    """Set x[indices] to 0.0: float32[n], uint32[m]."""
    check("x", x, np.float32)
    check("indices", indices, np.uint32)
    _cpu.clear(kernel_threads(), x, indices)


def select_above(x: Array, threshold: float) -> Array:
    """Return the indices of |x| > threshold, and of NaN: uint32[m], ascending."""
    check_size("select_above", x.size)
    return unpack_bitmap(mark_above(x, threshold_bits(threshold)))


def kth_magnitude(x: Array, k: int) -> int:
    """Return the float32 bits, without the sign, of the k-th largest |x|."""
    check("x", x, np.float32)
    check_rank("kth_magnitude", k, x.size, 1)
    return _kth(x, k) if x.size <= FEW else _largest(x, k)[2]


def select_magnitude(x: Array, k: int) -> Array:
    """Return the indices of the k largest |x|, of equal ones the lower: uint32[k], ascending."""
    check("x", x, np.float32)
    check_rank("select_magnitude", k, x.size, 0)
    if k == 0:
        return np.empty(0, np.uint32)
    if x.size <= FEW:
        return _first_largest(x, _kth(x, k), k).astype(np.uint32)
    found, values, kth = _largest(x, k)
    if kth == 0:
        zeros = np.flatnonzero(x == 0)[: k - found.size]
        return np.sort(np.concatenate([found, zeros.astype(np.uint32)]))
    return found[_first_largest(values, kth, k)]


def _magnitudes(x: Array) -> Array:
    return x.view(np.uint32) & MAGNITUDE


def _kth(x: Array, k: int) -> int:
    """Return the k-th largest magnitude."""
    if x.size > FEW:
        return radix_select(count_digits, x, k)
    return int(np.partition(_magnitudes(x), x.size - k)[x.size - k])


def _first_largest(x: Array, kth: int, k: int) -> Array:
    """Return where the k largest are, the k-th of which is known, ascending."""
    if x.size <= FEW:
        found = np.flatnonzero(_magnitudes(x) >= kth)
    else:
        found = unpack_bitmap(mark_above(x, kth - 1))
    return found if found.size == k else found[without_last_ties(_magnitudes(x[found]), kth, k)]


def _largest(x: Array, k: int) -> tuple[Array, Array, int]:
    """Return values among which the k largest are, but for zeros: indices, values, the k-th."""
    for low in (_low(x, k), 1):
        parts = _cpu.collect_above(kernel_threads(), low - 1, x)
        found, values = np.frombuffer(parts[0], np.uint32), np.frombuffer(parts[1], np.float32)
        if found.size >= k:
            return found, values, _kth(values, k)
    return found, values, 0


def _low(x: Array, k: int) -> int:
    """Return a magnitude, 1 or more, that about k values reach: rather more of them than less."""
    lines = x.size // SAMPLED
    sample = x[: lines * SAMPLED].reshape(lines, SAMPLED)[:, :LINE].reshape(-1)
    expected = k * sample.size / x.size
    reach = int(expected + SPARE * expected**0.5) + 1
    if reach >= sample.size:
        return 1
    return max(1, _kth(sample, reach))

"""The specification of sparse operations: selection by magnitude, access by index, bit streams.

A part of ops.reference. Magnitudes are compared as float32 bits without the sign, as integers: so
-0.0 equals 0.0, subnormal numbers count, and NaN lies above infinity, ordered by its payload.
Indices are uint32, ascending and distinct.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..formats import TILE, tiles

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
    "threshold_bits",
    "unpack_bitmap",
    "unpack_stream",
]

Array = np.ndarray[Any, np.dtype[Any]]

MAGNITUDE = np.uint32(0x7FFFFFFF)


def kth_magnitude(x: Array, k: int) -> int:
    """Return the float32 bits, without the sign, of the k-th largest |x|.

    x: float32[n]. Raises ValueError unless k is 1..n.
    """
    check_rank("kth_magnitude", k, x.size, 1)
    return int(np.sort(x.view(np.uint32) & MAGNITUDE)[x.size - k])


def select_magnitude(x: Array, k: int) -> Array:
    """Return the indices of the k largest |x|, of equal ones those with the lower index.

    x: float32[n]; returns uint32[k], ascending. Raises ValueError unless k is 0..n.
    """
    check_rank("select_magnitude", k, x.size, 0)
    magnitude = (x.view(np.uint32) & MAGNITUDE).astype(np.int64)
    return np.sort(np.argsort(-magnitude, kind="stable")[:k]).astype(np.uint32)


def select_above(x: Array, threshold: float) -> Array:
    """Return the indices of |x| > threshold, and of NaN.

    x: float32[n]; returns uint32[m], ascending. Raises ValueError unless threshold is 0 or more.
    """
    above = (x.view(np.uint32) & MAGNITUDE) > np.uint32(threshold_bits(threshold))
    return np.flatnonzero(above).astype(np.uint32)


def threshold_bits(threshold: float) -> int:
    """Return the bits of the largest float32 that is not above threshold.

    A float32 is above threshold where its bits are larger. Raises ValueError for NaN and negative
    numbers.
    """
    if not threshold >= 0:
        raise ArgumentError("select_above", "threshold", threshold, "must be 0 or more")
    with np.errstate(over="ignore"):
        nearest = np.float32(threshold)
    if float(nearest) > threshold:
        nearest = np.nextafter(nearest, np.float32(-math.inf))
    return int(nearest.view(np.uint32) & MAGNITUDE)


def count_digits(x: Array, low: int, shift: int, buckets: int) -> Array:
    """Return how many magnitudes lie in each bucket, 2**shift wide, from low on.

    x: float32[n]; returns uint32[buckets]; others than in the buckets are not counted
    """
    bucket = ((x.view(np.uint32) & MAGNITUDE).astype(np.int64) - low) >> shift
    inside = bucket[(bucket >= 0) & (bucket < buckets)]
    return np.bincount(inside, minlength=buckets).astype(np.uint32)


def mark_above(x: Array, bits: int) -> Array:
    """Return a bit for each value, set where its magnitude is above bits, as pack_bitmap has them.

    x: float32[n]; returns uint32[ceil(n / 32)]
    """
    above = np.flatnonzero((x.view(np.uint32) & MAGNITUDE) > np.uint32(bits))
    return pack_bitmap(above.astype(np.uint32), x.size)


def count_bits(words: Array) -> Array:
    """Return how many bits are set in each 32 words, of 1,024 places.

    words: uint32[w]; returns uint32[ceil(w / 32)]
    """
    bits = np.unpackbits(words.view(np.uint8))
    padded = np.zeros(-(-words.size // 32) * TILE, np.uint8)
    padded[: bits.size] = bits
    return padded.reshape(-1, TILE).sum(1, dtype=np.uint32)


def gather(x: Array, indices: Array) -> Array:
    """Return x[indices]: float32[n], uint32[m] to float32[m].

    Raises ValueError unless the indices ascend and are below n; so do scatter_add and clear.
    """
    _check_indices("gather", indices, x.size)
    return x[indices]


def scatter_add(out: Array, indices: Array, values: Array) -> None:
    """Add values to out[indices]: float32[n], uint32[m], float32[m]; each sum rounded once."""
    _check_indices("scatter_add", indices, out.size)
    out[indices] += values


def clear(x: Array, indices: Array) -> None:
    """Set x[indices] to 0.0: float32[n], uint32[m]."""
    _check_indices("clear", indices, x.size)
    x[indices] = 0


def _check_indices(name: str, indices: Array, n: int) -> None:
    if indices.size and (int(indices[-1]) >= n or (indices[1:] <= indices[:-1]).any()):
        raise ValueError(f"{name}: indices: must ascend, be distinct and be below {n}")


def pack_bitmap(indices: Array, size: int) -> Array:
    """Return a bit for each of size places, set at the indices: uint32[m] to uint32 words.

    Bit i % 32 of word i // 32 is place i; ceil(size / 32) words.
    """
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[indices] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def unpack_bitmap(words: Array) -> Array:
    """Return where bits are set, ascending: uint32[w] to uint32[m]."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.uint32)


def stream_words(widths: Array, n: int) -> int:
    """Words of n codes that pack_stream packs at the widths of their tiles."""
    return 32 * int(widths[:-1].sum(dtype=np.int64)) + _tail_words(widths, n) if n else 0


def _tail_words(widths: Array, n: int) -> int:
    return -(-(n - (tiles(n) - 1) * TILE) * int(widths[-1]) // 32)


def pack_stream(codes: Array, widths: Array) -> Array:
    """Return codes as a stream of bits, code after code, each tile of 1,024 at its own width.

    codes: uint32[n], below 2**width; widths: uint8[tiles(n)], 0..32; returns uint32 words
    Code i of a tile has bits i * width .. (i + 1) * width - 1 from the tile's first word on, the
    lowest bit first. Whole tiles fill whole words; the last tile ends with the word it reaches.
    """
    parts = []
    for t, width in enumerate(widths.tolist()):
        tile = codes[t * TILE : (t + 1) * TILE]
        bits = (tile[:, None] >> np.arange(width, dtype=np.uint32)) & np.uint32(1)
        stream = np.zeros(-(-tile.size * width // 32) * 32, np.uint8)
        stream[: tile.size * width] = bits.reshape(-1)
        parts.append(np.packbits(stream, bitorder="little").view("<u4"))
    return np.concatenate([np.empty(0, np.uint32), *parts])


def unpack_stream(words: Array, widths: Array, n: int) -> Array:
    """Return the n codes that pack_stream packed: uint32[stream_words], uint8[tiles] to uint32[n].

    Raises ValueError where the words are not as many as n codes of these widths take.
    """
    if words.size != stream_words(widths, n):
        raise ValueError(
            f"unpack_stream: {words.size} words given, {stream_words(widths, n)} needed"
        )
    codes, start = np.empty(n, np.uint32), 0
    for t, width in enumerate(widths.tolist()):
        count = min(TILE, n - t * TILE)
        used = -(-count * width // 32)
        stream = np.unpackbits(words[start : start + used].view(np.uint8), bitorder="little")
        bits = stream[: count * width].reshape(count, width).astype(np.uint32)
        codes[t * TILE : t * TILE + count] = (bits << np.arange(width, dtype=np.uint32)).sum(
            1, dtype=np.uint32
        )
        start += used
    return codes


Count = Callable[[Any, int, int, int], Array]  # a backend's count_digits, its result a NumPy array

PASSES = ((20, 2048), (10, 1024), (0, 1024))  # shift and buckets: 11, 10 and 10 of 31 bits


def check_rank(name: str, k: int, n: int, least: int) -> None:
    """Raise ValueError unless k is least..n, and n values have indices of 32 bits."""
    if not least <= k <= n:
        raise ArgumentError(name, "k", k, f"must be {least}..{n}, the number of values")
    check_size(name, n)


def check_size(name: str, n: int) -> None:
    """Raise ValueError unless n values have indices of 32 bits."""
    if n >= 2**32:
        raise ValueError(f"{name}: {n} values: must be below {2**32}")


def radix_select(count: Count, x: Any, k: int) -> int:
    """Return the k-th largest magnitude of x, by a histogram of some bits of it after the other.

    k: 1..n. Three passes over x, no sort.
    Source: radix selection, most significant digit first, as Alabi et al.: Fast k-selection
    algorithms for graphics processing units, ACM JEA 17, 2012.
    """
    low = 0
    for shift, buckets in PASSES:
        from_above = np.cumsum(count(x, low, shift, buckets)[::-1], dtype=np.int64)
        at = int(np.searchsorted(from_above, k))
        k -= int(from_above[at - 1]) if at else 0
        low += (buckets - 1 - at) << shift
    return low


def without_last_ties(magnitudes: Array, kth: int, k: int) -> Array:
    """Return where magnitudes, all of them kth or above, are the k largest: int64[k], ascending.

    Of those equal to kth the last ones are left out.
    """
    ties = np.flatnonzero(magnitudes == kth)
    return np.delete(np.arange(magnitudes.size), ties[k - magnitudes.size + ties.size :])

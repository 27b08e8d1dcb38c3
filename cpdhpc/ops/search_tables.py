"""The tables by which kernels find codes of a TableFormat, as one array of integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import Cast, TableFormat
from .reference_tables import passing, rises_on_middle

Array = np.ndarray[Any, np.dtype[Any]]

_HEADER = 12  # integers in front, in the order of struct Search of table_format.h
_MOST_BUCKETS = 1 << 14  # of a sign: what a processor's second cache holds beside the rest
_NEVER = 0x7FFFFFFF  # above every key


def search_table(cast: Cast, fmt: TableFormat) -> Array:
    """Return what struct Search of table_format.h reads: int32[n].

    A key is a float32's bits without sign, negated where the number is negative. A value's place
    among the numbers in order is the count of limits that its key has reached. It is found from
    the bucket of the key's upper bits, in so many steps as the fullest bucket asks for.
    """
    limits = _limits(cast, fmt)
    sign_free = np.abs(limits)
    low_bits, first, starts, steps = _buckets(limits, int(sign_free.min()), int(sign_free.max()))
    zero = np.flatnonzero(fmt.numbers == 0)
    parts = [
        starts,
        np.concatenate([limits, np.full(1 << steps, _NEVER)]),
        fmt.codes.astype(np.int64),
        fmt.values.view(np.int32).astype(np.int64),
        _float_bits(np.append(fmt.numbers, np.inf)),
    ]
    offsets = _HEADER + np.cumsum([0] + [part.size for part in parts[:-1]])
    least, most = _keys(fmt.numbers[[0, -1]].astype(np.float32))
    header = [steps, low_bits, first, starts.size // 2, *offsets[1:], least, most]
    header += [int(fmt.codes[zero[0]]) if zero.size else -1, fmt.inf_codes[1]]
    return np.concatenate([np.array(header, np.int64), *parts]).astype(np.int32)


def _float_bits(values: Array) -> Array:
    return values.astype(np.float32).view(np.int32).astype(np.int64)


def _keys(values: Array) -> Array:
    bits = _float_bits(np.abs(values))
    return np.where(values < 0, -bits, bits)


def _limits(cast: Cast, fmt: TableFormat) -> Array:
    """Return the least key of each number but the first: int64[m - 1], in order."""
    if cast.rounding == "stochastic":  # which of the two is found later
        return _keys(fmt.numbers[1:])
    middle = passing(cast, fmt)
    below = middle.astype(np.float32)
    below = np.where(below > middle, np.nextafter(below, np.float32(-np.inf)), below)
    return _keys(below) + ~((below == middle) & rises_on_middle(cast, fmt))


def _buckets(limits: Array, least: int, most: int) -> tuple[int, int, Array, int]:
    """Return the bits below a bucket's, the first bucket, the counts where each starts, the steps.

    The buckets of magnitudes are those of values above zero, then those below.
    """
    best: tuple[int, int, Array, int] | None = None
    for low_bits in range(30, -1, -1):
        first, count = least >> low_bits, (most >> low_bits) - (least >> low_bits) + 1
        if count > _MOST_BUCKETS:
            break
        edges = (first + np.arange(count + 1, dtype=np.int64)) << low_bits
        edges[0], edges[-1] = 0, _NEVER
        begin = np.concatenate([edges[:-1], 1 - edges[1:]])
        end = np.concatenate([edges[1:] - 1, -edges[:-1]])
        starts = np.searchsorted(limits, begin, "right")
        fullest = int((np.searchsorted(limits, end, "right") - starts).max())
        if best is None or fullest.bit_length() < best[3]:
            best = low_bits, first, starts.astype(np.int64), fullest.bit_length()
    assert best is not None, "30 low bits make a bucket or two"
    return best

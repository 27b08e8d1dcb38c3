"""Formats given by tables: the specification of their casts, and the table that kernels search."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import RANDOM_BITS, Cast, TableFormat

Array = np.ndarray[Any, np.dtype[Any]]


def encode(
    x: Array, cast: Cast, fmt: TableFormat, shift: Array, random: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Encode x * 2**shift; also return whether values saturate, underflow, or are not finite.

    random: of stochastic rounding, 31 bits each. With d the distance of x from the number below,
    and gap that of the two numbers around x, x is rounded up if
    d >= gap * ((2**31 - random) / 2**31), in float64.
    """
    finite = np.isfinite(x)
    scaled = np.ldexp(np.where(finite, x, 0).astype(np.float64), shift)  # exact
    numbers, codes = fmt.numbers, fmt.codes
    low = np.searchsorted(numbers, scaled, "right").astype(np.int64) - 1
    low = np.clip(low, 0, numbers.size - 2)
    below, above = numbers[low], numbers[low + 1]
    if cast.rounding == "stochastic":
        share = (2.0**RANDOM_BITS - random) / 2.0**RANDOM_BITS
        up = scaled - below >= (above - below) * share
    else:
        up = np.where(rises_on_middle(cast, fmt)[low], scaled >= passing(cast, fmt)[low],
                      scaled > passing(cast, fmt)[low])  # fmt: skip
    up = (up | (scaled >= above)) & (scaled > below)
    code = codes[low + up]
    too_large, too_small = scaled > numbers[-1], scaled < numbers[0]
    most, least = cast.overflow_codes
    code = np.where(too_large, most, np.where(too_small, least, code))
    infinite = np.where(x > 0, *fmt.inf_codes)
    code = np.where(finite, code, np.where(np.isnan(x), fmt.nan_code, infinite)).astype(np.uint32)
    under = finite & (x != 0) & (fmt.values[code] == 0)
    return code, (finite & (too_large | too_small), under, ~finite)


def passing(cast: Cast, fmt: TableFormat) -> Array:
    """Return the limits from which values between two neighbours round to the upper one.

    float64[m - 1]. A value at a limit rounds up only if rises_on_middle.
    """
    below, above = fmt.numbers[:-1], fmt.numbers[1:]
    if cast.rounding == "zero":
        middle = np.where(below >= 0, above, np.where(above <= 0, below, fmt.midpoints))
    elif cast.rounding == "odd":
        middle = np.where(_prefers_upper(fmt, 1), below, above)
    else:
        middle = {"nearest": fmt.midpoints, "up": below, "down": above}[cast.rounding]
    return np.asarray(middle)


def rises_on_middle(cast: Cast, fmt: TableFormat) -> Array:
    """Return whether a value at the limit of passing rounds to the upper one, bool[m - 1]."""
    middle, below, above = passing(cast, fmt), fmt.numbers[:-1], fmt.numbers[1:]
    return (middle != below) & ((middle == above) | _prefers_upper(fmt, 0))


def _prefers_upper(fmt: TableFormat, parity: int) -> Array:
    """Whether the upper of two neighbours has a code of this parity or, if both have, the lower."""
    lower, upper = fmt.codes[:-1], fmt.codes[1:]
    is_tie = lower % 2 == upper % 2
    return np.where(is_tie, upper < lower, upper % 2 == parity)


def decode(codes: Array, fmt: TableFormat, shift: Array) -> Array:
    """Return the number of each code times 2**-shift, rounded to float32."""
    with np.errstate(over="ignore"):
        return np.ldexp(fmt.values[codes].astype(np.float64), -shift).astype(np.float32)


_HEADER = 15  # integers in front, in the order of struct Search of table_format.h
_SHIFT = 17  # of a bucket's entry: above the count of limits, which are fewer than 2**16
_MOST_BUCKETS = 1 << 14  # of a sign: they fit in a processor's second cache with the rest
_NEVER = 0x7FFFFFFF  # above every key


def search_table(cast: Cast, fmt: TableFormat) -> Array:
    """Return the table that struct Search of table_format.h reads: int32[n].

    A key is a float32's bits without sign, negated for a negative number. A value's place among
    the sorted numbers is the count of limits that its key has reached. The bucket of the key's
    upper bits has the count of limits before it. If a bucket has several limits, it also has a
    shift: the lower bits, shifted, are the least number of further limits that are reached. If
    limits are equally spaced, as in an octave of a posit, one at most is then left. The number of
    steps to search the remaining limits is that of the worst bucket.
    """
    limits = _limits(cast, fmt)
    sign_free = np.abs(limits)
    ends = int(sign_free.min()), int(sign_free.max())
    low_bits, first, entries, steps = _buckets(limits, *ends, shifted=False)
    if shifted := steps > 1:
        low_bits, first, entries, steps = _buckets(limits, *ends, shifted=True)
    zero = np.flatnonzero(fmt.numbers == 0)
    mask = (1 << fmt.bits) - 1
    in_order = np.array_equal(fmt.codes, (int(fmt.codes[0]) + np.arange(fmt.codes.size)) & mask)
    parts = [
        entries,
        np.concatenate([limits, np.full(1 << steps, _NEVER)]),
        fmt.codes.astype(np.int64),
        fmt.values.view(np.int32).astype(np.int64),
        _float_bits(np.append(fmt.numbers, np.inf)),
    ]
    offsets = _HEADER + np.cumsum([0] + [part.size for part in parts[:-1]])
    least, most = _keys(fmt.numbers[[0, -1]].astype(np.float32))
    header = [steps, low_bits, first, entries.size // 2, *offsets[1:], least, most]
    header += [int(fmt.codes[zero[0]]) if zero.size else -1, fmt.inf_codes[1]]
    header += [int(fmt.codes[0]) if in_order else -1, mask, shifted]
    return np.concatenate([np.array(header, np.int64), *parts]).astype(np.int32)


def _float_bits(values: Array) -> Array:
    return values.astype(np.float32).view(np.int32).astype(np.int64)


def _keys(values: Array) -> Array:
    bits = _float_bits(np.abs(values))
    return np.where(values < 0, -bits, bits)


def _limits(cast: Cast, fmt: TableFormat) -> Array:
    """Return the least key of each number but the first: int64[m - 1], in order."""
    if cast.rounding == "stochastic":  # the kernel then chooses one of the two
        return _keys(fmt.numbers[1:])
    middle = passing(cast, fmt)
    below = middle.astype(np.float32)
    below = np.where(below > middle, np.nextafter(below, np.float32(-np.inf)), below)
    return _keys(below) + ~((below == middle) & rises_on_middle(cast, fmt))


def _buckets(limits: Array, least: int, most: int, shifted: bool) -> tuple[int, int, Array, int]:
    """Return the number of low bits, the first bucket, all entries, and the remaining steps.

    The buckets of values above zero come first, then those of values below. shifted: whether
    entries have shifts
    """
    best: tuple[int, int, Array, int] | None = None
    for low_bits in range(30, -1, -1):
        first, count = least >> low_bits, (most >> low_bits) - (least >> low_bits) + 1
        if count > _MOST_BUCKETS or (best is not None and best[3] <= 1):
            break
        edges = (first + np.arange(count + 1, dtype=np.int64)) << low_bits
        begin = np.concatenate([edges[:-1], 1 - edges[1:]])
        outer = begin.copy()  # the first and last bucket also have the keys beyond them
        outer[0], outer[-1] = 0, 1 - _NEVER
        starts = np.searchsorted(limits, outer, "right")
        shifts, left = _shifts(limits, begin, starts, low_bits, first, (2, 1, 0) if shifted else ())
        if best is None or left.bit_length() < best[3]:
            entries = starts | shifts << _SHIFT if shifted else starts
            best = low_bits, first, entries, left.bit_length()
    assert best is not None, "30 low bits make a bucket or two"
    return best


def _shifts(
    limits: Array, begin: Array, starts: Array, low_bits: int, first: int, tries: tuple[int, ...]
) -> tuple[Array, int]:
    """Return the shift of each bucket, and the largest number of limits that is left to search.

    (key - begin) >> shift never exceeds the number of the bucket's limits that the key has
    reached. tries: distances from the least possible shift; without any it is low_bits
    """
    bucket = (np.abs(limits) >> low_bits) - first
    bucket = np.where(limits < 0, bucket + begin.size // 2, bucket)
    rank = np.arange(1, limits.size + 1) - starts[bucket]  # 0: reached by the bucket's first key
    offset = limits - begin[bucket]
    count = np.bincount(bucket[rank > 0], minlength=begin.size)
    least = low_bits - (np.frexp(count + 1.0)[1] - 1)
    shifts = np.full(begin.size, low_bits)
    for more in tries:
        tried = np.minimum(least + more, low_bits)
        early = np.bincount(bucket[offset > rank << tried[bucket]], minlength=begin.size)
        shifts = np.where(early == 0, tried, shifts)
    return shifts, max(0, int((rank - (offset >> shifts[bucket])).max()))

"""The specification of casts to formats given by tables; a part of ops.reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import RANDOM_BITS, Cast, TableFormat

Array = np.ndarray[Any, np.dtype[Any]]


def encode(
    x: Array, cast: Cast, fmt: TableFormat, shift: Array, random: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Encode x * 2**shift; also return which values saturated, underflowed, are not finite.

    random: of stochastic rounding, 31 bits each. x lies by d above the number below it, whose next
    is by gap above it, and is rounded up where d >= gap * ((2**31 - random) / 2**31) in float64.
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
    """Return from where on values between two neighbours round to the upper one, float64[m - 1].

    Where rises_on_middle says so from there on, else from the next larger one on.
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
    """Return whether a value that is where passing says rounds to the upper one, bool[m - 1]."""
    middle, below, above = passing(cast, fmt), fmt.numbers[:-1], fmt.numbers[1:]
    return (middle != below) & ((middle == above) | _prefers_upper(fmt, 0))


def _prefers_upper(fmt: TableFormat, parity: int) -> Array:
    """Return whether of two neighbours the upper one's code has a parity, else is the lower."""
    lower, upper = fmt.codes[:-1], fmt.codes[1:]
    alike = lower % 2 == upper % 2
    return np.where(alike, upper < lower, upper % 2 == parity)


def decode(codes: Array, fmt: TableFormat, shift: Array) -> Array:
    """Return the number of each code times 2**-shift, rounded to float32."""
    with np.errstate(over="ignore"):
        return np.ldexp(fmt.values[codes].astype(np.float64), -shift).astype(np.float32)

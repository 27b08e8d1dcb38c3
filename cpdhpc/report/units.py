"""Quantities as people read them: three digits and a unit that fits."""

from __future__ import annotations

from math import isfinite

import numpy as np
import numpy.typing as npt

DASH = "\N{EN DASH}"  # between the ends of an interval
NONE = "-"  # where there is nothing to say
TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def digits(value: float, count: int = 3) -> str:
    """Return a number with so many significant digits, without an exponent where it is short."""
    if not isfinite(value):
        return NONE
    if value == 0:
        return "0"
    rounded = float(f"{value:.{count - 1}e}")
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{count - 1}e}"
    if abs(rounded) >= 10 ** (count - 1):
        return f"{rounded:,.0f}"
    return f"{rounded:#.{count}g}"


def time_unit(value_s: float) -> tuple[float, str]:
    """Return the unit, in seconds, in which a time is 1 or more, and its name."""
    return next((unit for unit in TIMES if value_s >= 0.9995 * unit[0]), TIMES[-1])


def time(value_s: float) -> str:
    """Return a time with its unit."""
    if not isfinite(value_s):
        return NONE
    scale, name = time_unit(value_s)
    return f"{digits(value_s / scale)} {name}"


def interval(low: float, high: float, scale: float = 1.0) -> str:
    """Return both ends of an interval, without a unit; scale: the unit's."""
    if not (isfinite(low) and isfinite(high)):
        return NONE
    return f"{digits(low / scale)} {DASH} {digits(high / scale)}"


def with_interval(value: float, low: float, high: float) -> str:
    """Return a number, with its interval in brackets where it has one."""
    known = isfinite(low) and isfinite(high)
    return digits(value) + (f" ({interval(low, high)})" if known else "")


def time_interval(low_s: float, high_s: float, median_s: float) -> str:
    """Return the ends of an interval in the unit in which its median is shown."""
    return interval(low_s, high_s, time_unit(median_s)[0])


def size(value: float) -> str:
    """Return bytes in the largest binary unit in which they are a short number."""
    if not isfinite(value) or value < 0:
        return NONE
    for scale, name in SIZES:
        if value >= scale and (value * 100 / scale).is_integer():
            return f"{value / scale:g} {name}"
    return f"{value:,.0f} B"


def with_deviation(values: npt.NDArray[np.float64]) -> str:
    """Return the mean, and the sample standard deviation where there are several values."""
    deviation = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
    return f"{values.mean():.2f}{deviation}"


def count(number: int, what: str) -> str:
    """Return a number of things, with an s for the plural."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def signed(difference: float) -> str:
    """Return a difference with its sign, to two places; one that rounds to zero is positive."""
    return f"{round(difference, 2) + 0.0:+.2f}"

"""Quantities as people read them: three digits and a unit that fits; the numbers stay with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import isfinite

import numpy as np
import numpy.typing as npt

DASH = "\N{EN DASH}"  # between the ends of an interval
NONE = "-"  # in place of an unknown value
TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class Cell(str):
    """Text for people, and the numbers that it shows, by what each is called, with its unit."""

    numbers: Mapping[str, float]

    def __new__(cls, text: str, **numbers: float) -> Cell:
        """Return the text; numbers: an underscore and a unit may end a name."""
        cell = super().__new__(cls, text)
        cell.numbers = numbers
        return cell


def digits(value: float, count: int = 3) -> Cell:
    """Return a number with so many significant digits, without an exponent if it is short."""
    text = f"{value:.{count - 1}e}"
    if not isfinite(value):
        text = NONE
    elif value == 0:
        text = "0"
    elif 1e-3 <= abs(value) < 1e6:
        whole = abs(float(text)) >= 10 ** (count - 1)
        text = f"{float(text):,.0f}" if whole else f"{float(text):#.{count}g}"
    return Cell(text, value=value)


def fixed(value: float, places: int = 0) -> Cell:
    return Cell(f"{value:,.{places}f}" if isfinite(value) else NONE, value=value)


def bytes_of(value: float) -> Cell:
    """Return bytes as a whole number of them."""
    return Cell(f"{value:,.0f} B" if isfinite(value) else NONE, value_bytes=value)


def apart(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with digits enough to tell them apart, three at least."""
    for count in range(3, 18):
        shown = digits(one, count), digits(other, count)
        if shown[0] != shown[1] or one == other:
            break
    return shown


def agreeing(shown: Callable[[int], str], agrees: Callable[[float], bool], count: int) -> str:
    """Return a number as text, with more than count digits if fewer would not agree.

    shown: the text with so many digits; agrees: with other statements about it
    """
    texts = map(shown, range(count, 17))
    known = (text for text in texts if text == NONE or agrees(float(text.replace(",", ""))))
    return next(known, shown(17))


def time_unit(value_s: float) -> tuple[float, str]:
    """Return the unit, in seconds, in which a time is 1 or more, and its name."""
    return next((unit for unit in TIMES if value_s >= 0.9995 * unit[0]), TIMES[-1])


def time(value_s: float) -> Cell:
    scale, name = time_unit(value_s)
    text = f"{digits(value_s / scale)} {name}" if isfinite(value_s) else NONE
    return Cell(text, value_s=value_s)


def interval(low: float, high: float) -> Cell:
    return Cell(_interval(low, high), low=low, high=high)


def _interval(low: float, high: float, scale: float = 1.0) -> str:
    if not (isfinite(low) and isfinite(high)):
        return NONE
    return f"{digits(low / scale)} {DASH} {digits(high / scale)}"


def with_interval(value: float, low: float, high: float) -> Cell:
    """Return a number, with its interval in brackets if it has one."""
    known = isfinite(low) and isfinite(high)
    text = digits(value) + (f" ({_interval(low, high)})" if known else "")
    return Cell(text, value=value, low=low, high=high)


def time_interval(low_s: float, high_s: float, median_s: float) -> Cell:
    """Return the ends of an interval in the unit in which its median is shown."""
    text = _interval(low_s, high_s, time_unit(median_s)[0])
    return Cell(text, low_s=low_s, high_s=high_s)


def size(value: float) -> Cell:
    """Return bytes in the largest binary unit in which they are a short number."""
    text = f"{value:,.0f} B" if isfinite(value) and value >= 0 else NONE
    for scale, name in SIZES:
        if text != NONE and value >= scale and (value * 100 / scale).is_integer():
            text = f"{value / scale:g} {name}"
            break
    return Cell(text, value_bytes=value)


def with_deviation(values: npt.NDArray[np.float64], form: str = ".2f", of: str = ".2f") -> Cell:
    """Return the mean, and the sample standard deviation if there are several values.

    form, of: formats of the two
    """
    mean, deviation = values.mean(), values.std(ddof=1) if len(values) > 1 else float("nan")
    text = f"{mean:{form}}" + (f" ± {deviation:{of}}" if len(values) > 1 else "")
    return Cell(text, value=mean, deviation=deviation)


def count(number: int, what: str) -> str:
    """Return a number of things, with an s for the plural."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def hosts(recorded: object) -> str:
    """Return the names of hosts, one a process as records have them, each once with its number."""
    found = Counter(str(recorded).split())
    return ", ".join(f"{name} x {n}" if n > 1 else name for name, n in found.items())


def signed(difference: float, agrees: Callable[[float], bool] = lambda _: True) -> Cell:
    """Return a difference with its sign, to two places; one that rounds to zero is positive.

    agrees: whether the shown number agrees with other statements; if not, it has more places
    """
    text = agreeing(lambda n: f"{round(difference, n) + 0.0:+.{n}f}", agrees, 2)
    return Cell(text, value=difference)

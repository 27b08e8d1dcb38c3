"""Axes: what they show, in which unit, on which scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, log2
from typing import Any, Literal

from . import text

Scale = Literal["linear", "whole", "log", "log2", "size"]
APART = 4.0  # positive values further apart than this factor get a logarithmic axis
TICKS = 7  # on an axis of sizes, at most


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit.

    scale: "whole" marks whole numbers only; "log2" and "size" are logarithms to base 2, "size"
        with binary units
    limits: fixed ends, None where they come from the data
    ticks: what is marked, if there is room; empty: what matplotlib likes
    """

    label: str
    scale: Scale = "linear"
    limits: tuple[float | None, float | None] = (None, None)
    ticks: Sequence[float] = ()

    def apply(self, axis: Any, set_scale: Any, set_limits: Any) -> None:
        """Set up matplotlib's axis."""
        SCALES[self.scale](axis, set_scale, sorted(self.ticks))
        if self.limits != (None, None):
            set_limits(*self.limits)


def spread(
    label: str,
    values: Iterable[float],
    scale: Scale = "log",
    apart: float = APART,
    start: float | None = 0,
) -> Axis:
    """Return an axis of that scale for positive values far apart, else a linear one.

    start: of a linear axis, None: where the values start
    """
    finite = [value for value in values if isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > apart * min(finite):
        return Axis(label, scale)
    return Axis(label, "linear", (start, None))


def _linear(axis: Any, set_scale: Any, ticks: list[float]) -> None:
    set_scale("linear")


def _whole(axis: Any, set_scale: Any, ticks: list[float]) -> None:
    set_scale("linear")
    axis.get_major_locator().set_params(integer=True)


def _log(axis: Any, set_scale: Any, ticks: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, (1, 2, 5) if high < 200 * low else (1,), numticks=15))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _log2(axis: Any, set_scale: Any, ticks: list[float]) -> None:
    _base_two(axis, set_scale, ticks, _power)


def _power(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"


def _size(axis: Any, set_scale: Any, ticks: list[float]) -> None:
    _base_two(axis, set_scale, ticks, lambda value: text.size(value).replace(" ", "\n"))


def _base_two(axis: Any, set_scale: Any, ticks: list[float], name: Callable[[float], str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    set_scale("log", base=2)
    if ticks:
        axis.set_major_locator(FixedLocator(_thinned(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: name(value)))
    axis.set_minor_locator(NullLocator())


def _thinned(ticks: list[float]) -> list[float]:
    """Return ticks without those that would come too near the one before on a logarithmic axis."""
    least = max(log2(ticks[-1] / ticks[0]) / TICKS - 1e-9, 1e-9)
    shown = ticks[:1]
    for tick in ticks[1:]:
        if log2(tick / shown[-1]) >= least:
            shown.append(tick)
    return shown


SCALES: dict[Scale, Callable[[Any, Any, list[float]], None]] = {
    "linear": _linear,
    "whole": _whole,
    "log": _log,
    "log2": _log2,
    "size": _size,
}

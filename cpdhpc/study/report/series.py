"""A series of values with intervals, drawn into matplotlib's axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .look import Look

Array = npt.NDArray[Any]
Values = Sequence[float] | Array
Join = Literal["line", "guide", "steps", "none"]
JOINS: dict[Join, dict[str, Any]] = {
    "line": {"linewidth": 1.5},
    "steps": {"linewidth": 1.3, "drawstyle": "steps-post"},
    "guide": {"linestyle": (0, (1, 2)), "linewidth": 0.9},
    "none": {"linestyle": "none"},
}


@dataclass(frozen=True)
class Series:
    """Values at places, with the ends of their intervals, NaN where there is none.

    label: "" for what the legend does not name
    join: "line" where values between are meant too, "guide" only leads the eye, "steps" holds a
        value up to the next place
    low, high, x_low, x_high: ends of intervals of y and of x
    every: the first point that has a marker, and how far apart these are
    """

    label: str
    look: Look
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    join: Join = "line"
    x_low: Values | None = None
    x_high: Values | None = None
    every: tuple[int, int] = (0, 1)

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes."""
        plain = self.look.marker in ("", "x", "+", "1")
        above = 3 if self.look.marker else 2
        axes.plot(
            self.x,
            self.y,
            label=self.label or None,
            color=self.look.color,
            marker=self.look.marker or "none",
            markersize=6,
            markeredgecolor=self.look.color if plain else "black",
            markeredgewidth=1.6 if plain else 0.6,
            markevery=self.every,
            zorder=above,
            **{"linestyle": self.look.dash} | JOINS[self.join],
        )
        axes.errorbar(
            self.x,
            self.y,
            xerr=_reach(self.x, self.x_low, self.x_high),
            yerr=_reach(self.y, self.low, self.high),
            fmt="none",
            ecolor=self.look.color,
            capsize=2.5,
            elinewidth=1.1,
            zorder=above - 0.5,
        )


def _reach(values: Values, low: Any, high: Any) -> Array | None:
    """Return how far the ends of intervals are from values, as errorbar wants it."""
    if low is None or high is None:
        return None
    middle = np.asarray(values, float)
    return np.nan_to_num(np.maximum([middle - low, np.asarray(high) - middle], 0.0))

"""What is inside one pair of axes: series, rows of dots, or a map of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .axis import Axis
from .series import Series, Values

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Panel:
    """Series over common axes.

    rows: names of the rows from above, where the places on the y axis are 0, 1, ...
    top: what an axis above shows: (its label, its value over that of the x axis, ticks)
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    rows: Sequence[str] = ()
    top: tuple[str, float, Sequence[float]] | None = None

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes."""
        for series in self.series:
            series.draw(axes)

    def finish(self, axes: Any) -> None:
        """Set up the axes, once all panels that share them are drawn."""
        self.x.apply(axes.xaxis, axes.set_xscale, axes.set_xlim)
        self.y.apply(axes.yaxis, axes.set_yscale, axes.set_ylim)
        if self.rows:
            _name_rows(axes, self.rows)
        if self.top:
            _add_top(axes, *self.top)
        axes.set_title(self.title, fontsize="medium")
        axes.set(xlabel=self.x.label, ylabel=self.y.label)
        axes.grid(alpha=0.3, linewidth=0.6)


def panels_with(
    series: Mapping[str, Sequence[Series]], x: Axis, y: Callable[[list[float]], Axis]
) -> list[Panel]:
    """Return a panel for each title, with axes that all share; y: from all values."""
    axis = y([value for each in series.values() for one in each for value in one.y])
    return [Panel(title, x, axis, each) for title, each in series.items()]


def _name_rows(axes: Any, rows: Sequence[str]) -> None:
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _add_top(axes: Any, label: str, factor: float, ticks: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    above = axes.secondary_xaxis("top", functions=(lambda x: x * factor, lambda x: x / factor))
    above.xaxis.set_major_locator(FixedLocator(list(ticks)))
    above.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    above.xaxis.set_minor_locator(NullLocator())
    above.set_xlabel(label)


@dataclass(frozen=True)
class Map:
    """Values in percent by row and place, float64[rows, places]; light is 0, dark is 100.

    places: where the columns are, ascending
    """

    title: str
    x: Axis
    y: Axis
    places: Values
    rows: Sequence[str]
    values: Array
    series: Sequence[Series] = ()  # it has none

    def draw(self, axes: Any) -> Any:
        """Draw into matplotlib's axes, and return what a colour bar explains."""
        return axes.pcolormesh(
            _edges(self.places),
            np.arange(len(self.rows) + 1) - 0.5,
            self.values,
            cmap="YlGnBu",
            vmin=0,
            vmax=100,
            rasterized=True,
        )

    def finish(self, axes: Any) -> None:
        """Set up the axes."""
        axes.set_yticks(range(len(self.rows)), self.rows, fontsize="x-small")
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_title(self.title, fontsize="medium")
        axes.set(xlabel=self.x.label, ylabel=self.y.label)


def _edges(places: Values) -> Array:
    """Return where the cells of places end: half-way between them."""
    at = np.asarray(places, float)
    half = (at[1] - at[0]) / 2 if len(at) > 1 else 0.5
    return np.concatenate([[at[0] - half], (at[1:] + at[:-1]) / 2, [at[-1] + half]])

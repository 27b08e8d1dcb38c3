"""Figures: panels in a grid, with axes and series whose styles differ in grey as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import cycle
from math import isfinite, log2
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ...lazy import Late
from . import units

if TYPE_CHECKING:
    from matplotlib import ticker
    from matplotlib.figure import Figure
else:
    ticker = Late("matplotlib.ticker")

# Neighbours differ in lightness; each is at least 2.1:1 in contrast with white.
COLOURS = (
    "#0b3c6f",  # dark blue
    "#ef9a1a",  # orange
    "#1f8a70",  # green
    "#8f1239",  # crimson
    "#63b8ee",  # sky
    "#5b2a86",  # violet
    "#8c6d1f",  # ochre
    "#e08fbd",  # pink
    "#2f2f2f",  # near black
    "#7f7f7f",  # grey
)
MARKERS = "os^Dv<>pPX*h"
DASHES: tuple[object, ...] = ("-", (0, (6, 2)), (0, (5, 2, 1, 2)), (0, (1.5, 1.5)), (0, (9, 3)))
BLACK, GREY, NO_VALUE = "#000000", "#6a6a6a", "#bdbdbd"


@dataclass(frozen=True)
class Style:
    """Style of a series; dash, marker: as in matplotlib; "" for no marker."""

    color: str
    marker: str
    dash: object = "-"


BOUND = Style(BLACK, "", (0, (1, 1.2)))
IDEAL = Style(GREY, "", (0, (7, 3)))
LIBRARIES = (
    Style(GREY, "x"),
    Style(GREY, "+", (0, (6, 2))),
    Style(GREY, "1", (0, (2, 2))),
    Style(GREY, "2", (0, (4, 1))),
)


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a style for each name; the three cycles have periods that share no factor by pairs."""
    cycles = zip(cycle(COLOURS), cycle(MARKERS[:11]), cycle(DASHES[:3]), strict=False)
    return {name: Style(*style) for name, style in zip(dict.fromkeys(names), cycles, strict=False)}


T = TypeVar("T")
Array = npt.NDArray[Any]
Values = Sequence[float] | Array
Join = Literal["line", "guide", "steps", "fit", "none"]
JOINS: dict[Join, dict[str, Any]] = {
    "line": {"linewidth": 1.5},
    "steps": {"linewidth": 1.3, "drawstyle": "steps-post"},
    "guide": {"linestyle": (0, (1, 2)), "linewidth": 0.9},
    "fit": {"linewidth": 0.8},
    "none": {"linestyle": "none"},
}


@dataclass(frozen=True)
class Series:
    """Values and the ends of their intervals, NaN for none.

    label: "" if it is not in the legend
    join: "line" if values between are meant too, "guide" only leads the eye, "steps" holds a
        value up to the next place, "fit" is a model's
    low, high, x_low, x_high: ends of intervals of y and of x
    every: the first point that has a marker, and how far apart these are
    aside: factor by which x is off, so that points of one place are drawn side by side
    """

    label: str
    style: Style
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    join: Join = "line"
    x_low: Values | None = None
    x_high: Values | None = None
    every: tuple[int, int] = (0, 1)
    aside: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether its markers have no inside."""
        return self.style.marker in ("", "x", "+", "1")

    @property
    def line(self) -> dict[str, Any]:
        """How its line is drawn, in matplotlib's words."""
        return {"linestyle": self.style.dash} | JOINS[self.join]

    def draw(self, axes: Any) -> None:
        """Draw into matplotlib's axes."""
        above = 3 if self.style.marker else 2
        axes.plot(
            self.x,
            self.y,
            label=self.label or None,
            color=self.style.color,
            marker=self.style.marker or "none",
            markersize=6,
            markeredgecolor=self.style.color if self.plain else "black",
            markeredgewidth=1.6 if self.plain else 0.6,
            markevery=self.every,
            zorder=above,
            **self.line,
        )
        axes.errorbar(
            self.x,
            self.y,
            xerr=_reach(self.x, self.x_low, self.x_high),
            yerr=_reach(self.y, self.low, self.high),
            fmt="none",
            ecolor=self.style.color,
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


Scale = Literal["linear", "whole", "log", "log2", "size"]
APART = 4.0  # positive values further apart than this factor get a logarithmic axis
TICKS = 7  # on an axis of sizes, at most


@dataclass(frozen=True)
class Axis:
    """An axis: its quantity with the unit, its scale and marks.

    scale: "whole" marks whole numbers only; "log2" and "size" are logarithms to base 2, "size"
        with binary units
    limits: fixed ends, None if they come from the data
    ticks: values to mark, if there is room; empty: the library chooses
    names: of the places 0, 1, ..., from above or from the left; then there is no scale
    """

    label: str
    scale: Scale = "linear"
    limits: tuple[float | None, float | None] = (None, None)
    ticks: Sequence[float] = ()
    names: Sequence[str] = ()

    @property
    def logarithmic(self) -> bool:
        """Whether equal ratios are equally far apart."""
        return self.scale.startswith(("log", "size"))

    def ends(self, which: Literal["x", "y"]) -> tuple[float | None, float | None]:
        """Return the start and the end of the axis, None if it comes from the data."""
        if not self.names:
            return self.limits
        first, last = -0.6, len(self.names) - 0.4
        return (first, last) if which == "x" else (last, first)

    @property
    def marks(self) -> dict[float, str]:
        """The marks of an axis of names, or of given values: value -> text."""
        if self.names:
            return {float(i): name for i, name in enumerate(self.names)}
        name = NAMES.get(self.scale)
        return {t: name(t) for t in _thinned(sorted(self.ticks))} if name and self.ticks else {}

    def text(self, value: float) -> str:
        """Return a value for people."""
        if self.names:  # none beyond the ends, to which references go
            return dict(enumerate(self.names)).get(round(value), "")
        return units.size(value) if self.scale == "size" else f"{value:,.6g}"

    def apply(self, axes: Any, which: Literal["x", "y"]) -> None:
        axis, set_limits = getattr(axes, f"{which}axis"), getattr(axes, f"set_{which}lim")
        axis.set_label_text(self.label)
        if self.names:
            set_limits(*self.ends(which))
            slant: Any = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
            slant = slant if which == "x" else {}
            axis.set_ticks(range(len(self.names)), self.names, fontsize="small", **slant)
            return
        self._scale(axis, getattr(axes, f"set_{which}scale"))
        start, end = self.limits
        if start is not None and end is None:  # with room above curves that are flat far from it
            end = axis.get_view_interval()[1]
            end += 0.05 * (end - start)
        if self.limits != (None, None):
            set_limits(start, end)

    def _scale(self, axis: Any, set_scale: Any) -> None:
        if not self.logarithmic:
            set_scale("linear")
            if self.scale == "whole":
                axis.get_major_locator().set_params(integer=True)
            return
        name = NAMES.get(self.scale)
        set_scale("log", base=2 if name else 10)
        if name is None:
            low, high = axis.get_view_interval()
            marks = next((marks for apart, marks in MARKED.items() if high < apart * low), (1,))
            axis.set_major_locator(ticker.LogLocator(10, marks, numticks=15))
            axis.set_minor_formatter(ticker.NullFormatter())
        else:
            axis.set_minor_locator(ticker.NullLocator())
            if self.ticks:
                axis.set_major_locator(ticker.FixedLocator(list(self.marks)))
        text = name or (lambda value: f"{value:,.10g}")
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))


def spread(
    label: str,
    values: Iterable[float],
    scale: Scale = "log",
    apart: float = APART,
    start: float | None = 0,
) -> Axis:
    """Return an axis of that scale for positive values far apart, else a linear one.

    start: of a linear axis, None: at the least value
    """
    finite = [value for value in values if isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > apart * min(finite):
        return Axis(label, scale)
    return Axis(label, "linear", (start, None))


MARKED = {  # ends of a logarithmic axis less than so many times apart: marks of each decade
    4: (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
    200: (1, 2, 5),
}
NAMES: dict[Scale, Callable[[float], str]] = {  # of ticks on an axis to base 2
    "log2": lambda value: f"{value:g}" if value >= 1 else f"1/{1 / value:g}",
    "size": lambda value: units.size(value).replace(" ", "\n"),
}


def _thinned(ticks: Values, at: Callable[[float], float] = log2) -> list[float]:
    """Return ticks without those that would come too near the one before; at: on the axis."""
    least = max((at(ticks[-1]) - at(ticks[0])) / TICKS - 1e-9, 1e-9)
    shown = [ticks[0]]
    for tick in ticks[1:]:
        if at(tick) - at(shown[-1]) >= least:
            shown.append(tick)
    return shown


NORMAL, SUBNORMAL = "#1f8a70", "#a9dbc9"
LETTER = 0.03  # of a panel's width: a bold letter of 7.5 points, 0.09 inches of 3


@dataclass(frozen=True)
class Range:
    """The range of a format: subnormal numbers from lowest on, normal ones up to highest."""

    name: str
    lowest: float
    normal: float
    highest: float


@dataclass(frozen=True)
class Bar:
    """A range as a bar at a height, with its name on it or beside it.

    where, align: the position of the name, and the end of the name that is there
    """

    of: Range
    at: float
    high: float
    where: float
    align: Literal["left", "center", "right"]

    @property
    def parts(self) -> list[tuple[float, float, str]]:
        """The left, the right and the colour of each part."""
        of = self.of
        return [(of.lowest, of.normal, SUBNORMAL), (of.normal, of.highest, NORMAL)]

    @property
    def colour(self) -> str:
        return "white" if self.align == "center" else NORMAL


@dataclass(frozen=True)
class Panel:
    """Series over common axes.

    top: an axis above: (label, its value over that of the x axis, ticks)
    ranges: of formats, drawn above the series, which begin at 0; the x axis has limits
    """

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    top: tuple[str, float, Sequence[float]] | None = None
    ranges: Sequence[Range] = ()

    @property
    def highest(self) -> float:
        """The greatest value of all series, 1 if there is none above 0."""
        return max((float(np.max(each.y, initial=0)) for each in self.series), default=0) or 1.0

    @property
    def bars(self) -> list[Bar]:
        """The ranges, the first one at the top."""
        start, stop = (end or 0.0 for end in self.x.limits)
        step, gap, bars = 0.17 * self.highest, LETTER / 2 * (stop - start), list[Bar]()
        for i, of in enumerate(reversed(self.ranges)):
            wide = (len(of.name) + 1) * LETTER * (stop - start)
            where, align = (of.normal + of.highest) / 2, "center"
            if wide > of.highest - of.normal:  # beside the bar, on the side that has more room
                is_right = stop - of.highest >= of.lowest - start
                where = of.highest + gap if is_right else of.lowest - gap
                align = "left" if is_right else "right"
            bars.append(Bar(of, self.highest * 1.12 + i * step, 0.55 * step, where, align))  # type: ignore[arg-type]
        return bars

    @property
    def ceiling(self) -> float:
        """The end of the y axis above the ranges."""
        return self.highest * 1.06 + (len(self.ranges) + 0.2) * 0.17 * self.highest

    def draw(self, axes: Any) -> None:
        for series in self.series:
            series.draw(axes)

    def finish(self, axes: Any) -> None:
        """Set up the axes, once all panels that share them are drawn."""
        self.x.apply(axes, "x")
        self.y.apply(axes, "y")
        if self.top:
            _add_top(axes, *self.top)
        axes.set_title(self.title, fontsize="medium")
        axes.grid(alpha=0.3, linewidth=0.6)
        for bar in self.bars:
            for left, right, colour in bar.parts:
                axes.barh(bar.at, right - left, bar.high, left, color=colour, zorder=2)
            style = {"ha": bar.align, "va": "center", "fontsize": 7.5, "color": bar.colour}
            axes.text(bar.where, bar.at, bar.of.name, zorder=4, weight="bold", **style)
        if self.ranges:
            axes.set_ylim(0, self.ceiling)
            axes.set_yticks([tick for tick in axes.get_yticks() if tick <= self.highest * 1.06])


def panels_with(
    series: Mapping[str, Sequence[Series]], x: Axis, y: Callable[[list[float]], Axis]
) -> list[Panel]:
    """Return a panel for each title, with axes that all share; y: from all values."""
    axis = y([value for each in series.values() for one in each for value in one.y])
    return [Panel(title, x, axis, each) for title, each in series.items()]


def _add_top(axes: Any, label: str, factor: float, ticks: Sequence[float]) -> None:
    above = axes.secondary_xaxis("top", functions=(lambda x: x * factor, lambda x: x / factor))
    above.xaxis.set_major_locator(ticker.FixedLocator(list(ticks)))
    above.xaxis.set_major_formatter("{x:g}")
    above.xaxis.set_minor_locator(ticker.NullLocator())
    above.set_xlabel(label)


@dataclass(frozen=True)
class Map:
    """Values in percent by row and place, float64[rows, places]; light is 0, dark is 100, grey NaN.

    places: x of the columns, ascending
    """

    title: str
    x: Axis
    y: Axis
    places: Values
    rows: Sequence[str]
    values: Array
    series: Sequence[Series] = ()  # it has none

    def draw(self, axes: Any) -> Any:
        """Draw into matplotlib's axes, and return the object for a colour bar."""
        return axes.pcolormesh(
            edges(self.places),
            np.arange(len(self.rows) + 1) - 0.5,
            self.values,
            cmap="YlGnBu",
            vmin=0,
            vmax=100,
            rasterized=True,
        )

    def finish(self, axes: Any) -> None:
        axes.set_facecolor(NO_VALUE)
        axes.set_xticks(_thinned(self.places, float))
        axes.set_yticks(range(len(self.rows)), self.rows, fontsize="x-small")
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_title(self.title, fontsize="medium")
        axes.set(xlabel=self.x.label, ylabel=self.y.label)


def edges(places: Values) -> Array:
    """Return the ends of the cells around places: half-way between them."""
    at = np.asarray(places, float)
    half = (at[1] - at[0]) / 2 if len(at) > 1 else 0.5
    return np.concatenate([[at[0] - half], (at[1:] + at[:-1]) / 2, [at[-1] + half]])


WIDTH, HEIGHT = 3.7, 2.9  # of a panel, inches
EDGE = 0.08  # around texts and the legend, inches
SETTINGS: Any = {
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "cpdhpc",  # the same figure has the same bytes
    "text.parse_math": False,  # names may have dollars
}


@dataclass(frozen=True)
class Chart:
    """A figure and its texts.

    name: of its files; title, notes: above the panels; caption: below it on a page
    columns: of the grid of panels; shared: whether the panels have axes in common
    colours: label of the colour bar of maps; scale: of a panel's width and height
    most: panels that are drawn: more take long to draw and to look at
    """

    name: str
    title: str
    notes: Sequence[str]
    caption: str
    panels: Sequence[Panel | Map]
    columns: int = 3
    shared: bool = True
    colours: str = ""
    scale: tuple[float, float] = (1.0, 1.0)
    most: int = 12

    @property
    def shown(self) -> list[Sequence[Panel | Map]]:
        """The rows of panels that are drawn: all, or so many that they have the most panels."""
        columns = min(self.columns, len(self.panels))
        rows = [self.panels[i : i + columns] for i in range(0, len(self.panels), columns)]
        return thinned(rows, max(self.most // columns, 1))

    @property
    def heading(self) -> str:
        """The notes, with the number of panels that are left out."""
        drawn = sum(map(len, self.shown))
        left = [f"{drawn} of {len(self.panels)} panels, evenly spread."]
        return " ".join([*self.notes, *(left if drawn < len(self.panels) else [])])

    @property
    def points(self) -> int:
        series = (each for row in self.shown for panel in row for each in panel.series)
        return sum(len(each.x) for each in series if each.style.marker)


def thinned(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(most - 1, 1))] for i in range(most)]


def draw(chart: Chart) -> Figure:
    """Return the figure, of at most chart.most panels: whole rows of them, evenly spread."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = chart.shown
    columns, panels = len(rows[0]), [panel for row in rows for panel in row]
    wide = max(WIDTH * chart.scale[0] * columns + 0.6, 6.5)
    high = HEIGHT * chart.scale[1] * len(rows)
    figure = Figure(figsize=(wide, high))
    grid = figure.subplots(
        len(rows), columns, squeeze=False, sharex=chart.shared, sharey=chart.shared
    )
    _fill(figure, chart, panels, list(grid.flat), columns)
    high += _add_legend(figure, panels)
    head = [(chart.title, {"weight": "bold", "size": 11}), (chart.heading, QUIET)]
    top = _add_head(figure, high, [(text, style) for text, style in head if text])
    total = figure.get_figheight()
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - top / total)))
    return figure


QUIET = {"size": 8.5, "color": "#444444"}


def _add_head(figure: Figure, high: float, texts: Sequence[tuple[str, dict[str, Any]]]) -> float:
    """Add wrapped texts above a figure of a height, and return theirs; all in inches."""
    wide = figure.get_figwidth()
    added = [  # matplotlib's wrapping looks for formulas in any case, so dollars are escaped
        figure.text(EDGE / wide, 0.5, text.replace("$", r"\$"), va="top", wrap=True,
                    parse_math=True, **style)
        for text, style in texts
    ]  # fmt: skip
    heights = [text.get_window_extent().height / figure.dpi + EDGE for text in added]
    total = high + sum(heights) + EDGE
    figure.set_size_inches(wide, total)
    for i, text in enumerate(added):
        text.set_y(1 - (sum(heights[:i]) + EDGE) / total)
    return sum(heights) + EDGE


def _fill(
    figure: Figure, chart: Chart, panels: Sequence[Panel | Map], places: list[Any], columns: int
) -> None:
    used = places[: len(panels)]
    maps = [panel.draw(axes) for axes, panel in zip(used, panels, strict=True)]
    for axes, panel in zip(used, panels, strict=True):
        panel.finish(axes)
    if chart.shared:
        for axes in used:
            axes.label_outer()
    for axes in places[len(used) :]:
        axes.remove()
    for axes, panel in list(zip(used, panels, strict=True))[-columns:]:
        axes.tick_params(labelbottom=True)  # also above an empty place
        axes.set_xlabel(panel.x.label)
    if maps[0] is not None:
        figure.colorbar(maps[0], ax=used, label=chart.colours, shrink=0.6, aspect=30)


def legend_of(panels: Iterable[Panel | Map]) -> list[str]:
    """Return the labels of a legend, references last."""
    named = [each for panel in panels for each in panel.series if each.label]
    named.sort(key=lambda each: not each.style.marker)
    return list(dict.fromkeys(each.label for each in named))


def _add_legend(figure: Figure, panels: Sequence[Panel | Map]) -> float:
    """Add the legend below all axes, as wide as there is room, and return its height in inches."""
    labels = legend_of(panels)
    if not labels:
        return 0.0
    known: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        known |= dict(zip(names, handles, strict=True))
    columns, room = 1, (figure.get_figwidth() - 2 * EDGE) * figure.dpi
    while True:
        legend = figure.legend(
            [known[label] for label in labels],
            labels,
            loc="outside lower center",
            ncols=columns,
            handlelength=3,
            borderaxespad=0.2,
        )
        box = legend.get_window_extent()
        fit = min(int(columns * room / box.width), len(labels))
        if columns > 1 or fit <= 1:
            return box.height / figure.dpi + EDGE
        legend.remove()
        columns = fit


def image(chart: Chart, kind: str) -> bytes:
    """Return the figure as a file's content. kind: as "png" or "svg", of matplotlib."""
    from matplotlib import rc_context

    buffer = BytesIO()
    with rc_context(SETTINGS):
        metadata: Any = {"Date": None} if kind == "svg" else None
        dpi = 100 if kind == "webp" else 130  # WebP is for pages, which are to be small
        draw(chart).savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()

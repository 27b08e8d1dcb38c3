"""Figures for a browser, by Bokeh: values under the pointer, zoom, series on and off.

They draw the same Chart as matplotlib, with the same colours, markers and marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, pi
from typing import TYPE_CHECKING, Any

import numpy as np

from ...lazy import Late
from . import units
from .figures import HEIGHT, NO_VALUE, Axis, Chart, Map, Panel, Series, Values, edges, legend_of

if TYPE_CHECKING:
    from bokeh import models, plotting
    from bokeh.models import GlyphRenderer, glyphs
    from bokeh.plotting import figure as Figure
else:
    models, plotting, glyphs = map(Late, ("bokeh.models", "bokeh.plotting", "bokeh.models.glyphs"))

MARKERS = {  # matplotlib's: Bokeh's, and by how much it is turned
    "o": ("circle", 0.0),
    "s": ("square", 0.0),
    "^": ("triangle", 0.0),
    "v": ("inverted_triangle", 0.0),
    "<": ("triangle", pi / 2),
    ">": ("triangle", -pi / 2),
    "D": ("diamond", 0.0),
    "p": ("hex", 0.0),
    "h": ("hex", pi / 6),
    "P": ("plus", 0.0),
    "X": ("plus", pi / 4),
    "*": ("star", 0.0),
    "x": ("x", 0.0),
    "+": ("cross", 0.0),
    "1": ("y", 0.0),
    "2": ("y", pi),
    "|": ("dash", pi / 2),
}
INCH = 105  # pixels of the page for one of matplotlib's pictures
PAGE, ALONE = 1104, 760  # width of figures, and of those of one column, at most, pixels
KEY, CHARACTER, ROW = 52, 6.8, 24  # of a legend, pixels: sample and gaps, a letter, height
TOOLS = "box_zoom,wheel_zoom,pan,save,reset"
SHADES = 64  # of a map


def library() -> str:
    """Return the script that draws figures of the page."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", components=["bokeh"], log_level="warn").js_raw)


def item(chart: Chart) -> Any:
    """Return a figure for the library, as JSON: the panels that matplotlib would draw."""
    from bokeh.embed import json_item
    from bokeh.layouts import column, gridplot

    rows = chart.shown
    panels = [panel for row in rows for panel in row]
    keys: dict[str, list[GlyphRenderer]] = {label: [] for label in legend_of(panels)}
    plots = list[Any]()
    for panel in panels:
        plots.append(_plot(chart, panel, plots[0] if plots and chart.shared else None))
        if isinstance(panel, Map):
            _draw_map(plots[-1], panel, chart.colours)
        else:
            _draw_panel(plots[-1], panel, keys)
    columns = len(rows[0])
    grid = gridplot(plots, ncols=columns, sizing_mode="stretch_width", toolbar_location="right",
                    toolbar_options={"logo": None})  # fmt: skip
    wide = PAGE if columns > 1 else ALONE
    below = [_legend(panels, keys, wide)] if keys else []
    return json_item(column(grid, *below, sizing_mode="stretch_width", max_width=wide))


def _plot(chart: Chart, panel: Panel | Map, first: Any) -> Figure:
    """Return an empty plot. first: one that it shares its axes with, None: has its own."""
    ends: dict[str, Any] = {
        "x_range": first.x_range if first else _between(*panel.x.ends("x")),
        "y_range": first.y_range if first else _between(*panel.y.ends("y")),
    }
    if isinstance(panel, Panel) and panel.ranges:
        ends["y_range"] = _between(0.0, panel.ceiling)
    elif isinstance(panel, Map):
        ends["y_range"] = _between(len(panel.rows) - 0.5, -0.5)
    plot = plotting.figure(
        height=round(INCH * HEIGHT * chart.scale[1]),
        min_width=220,
        sizing_mode="stretch_width",
        title=models.Title(text=_plain(panel.title) or ""),
        x_axis_type="log" if panel.x.logarithmic else "linear",
        y_axis_type="log" if panel.y.logarithmic else "linear",
        tools=TOOLS,
        active_drag="box_zoom",
        **ends,
    )
    plot.outline_line_color = None
    plot.grid.grid_line_alpha = 0.6
    for axis, of in ((plot.xaxis, panel.x), (plot.yaxis, panel.y)):
        axis.axis_label = _plain(of.label)
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
        if of.logarithmic:
            base = 10 if of.scale == "log" else 2
            axis.ticker, axis.formatter = models.LogTicker(base=base), models.BasicTickFormatter()
        _mark(axis, of.marks)
    if panel.x.names:
        plot.xaxis.major_label_orientation = 0.5
    return plot


def _between(start: float | None, end: float | None) -> Any:
    """Return a range with these ends; None: from the data."""
    if start is not None and end is not None:
        return models.Range1d(start, end)
    return models.DataRange1d(
        **{k: v for k, v in (("start", start), ("end", end)) if v is not None}
    )


def _plain(text: str) -> Any:
    """Return text that the library takes as it is; of $$ and the like it would make formulas."""
    return models.PlainText(text=text) if text else None


def _mark(axis: Any, marks: dict[float, str]) -> None:
    if marks:
        axis.ticker = models.FixedTicker(ticks=list(marks))
        axis.major_label_overrides = {at: _plain(name) for at, name in marks.items()}


def _numbers(values: Values) -> list[float]:
    """Return values for JSON, with digits enough for a figure."""
    return [float(f"{value:.6g}") for value in np.asarray(values, float).tolist()]


def _draw_panel(plot: Figure, panel: Panel, keys: dict[str, list[GlyphRenderer]]) -> None:
    """Draw series and ranges. keys: label of the legend -> its renderers, to which it adds."""
    shown = list[Any]()
    for series in panel.series:
        drawn = _draw_series(plot, panel, series)
        keys.get(series.label, []).extend(drawn)
        shown += drawn[-1:] if series.label else []
    for bar in panel.bars:
        for left, right, colour in bar.parts:
            plot.hbar(bar.at, height=bar.high, left=left, right=right, color=colour)
        plot.text([bar.where], [bar.at], [bar.of.name], text_align=bar.align,
                  text_baseline="middle", text_color=bar.colour, text_font_size="10px",
                  text_font_style="bold")  # fmt: skip
    if panel.top:
        label, factor, ticks = panel.top
        above = models.LinearAxis(axis_label=_plain(label), axis_label_text_font_style="normal")
        _mark(above, {tick / factor: f"{tick:g}" for tick in ticks})
        plot.add_layout(above, "above")
    _hover(plot, shown, [("", "$name"), (panel.x.label, "@at"), (panel.y.label, "@value")])


def _hover(plot: Figure, renderers: Sequence[Any], rows: Sequence[tuple[str, str]]) -> None:
    how: Any = {"line_policy": "nearest", "point_policy": "snap_to_data"}
    plot.add_tools(models.HoverTool(renderers=list(renderers), tooltips=list(rows), **how))


def _draw_series(plot: Figure, panel: Panel, series: Series) -> list[GlyphRenderer]:
    """Draw a series; return its renderers, the last of which is under the mouse."""
    data: dict[str, Any] = {"x": _numbers(series.x), "y": _numbers(series.y)}
    data["at"] = _texts(panel.x, np.asarray(series.x) / series.aside, series.x_low, series.x_high)
    data["value"] = _texts(panel.y, series.y, series.low, series.high)
    look, drawn, source = series.style, list[Any](), models.ColumnDataSource(data)

    def add(glyph: models.Glyph, **view: models.CDSView) -> None:
        drawn.append(plot.add_glyph(source, glyph, name=series.label, **view))

    for along, a, b in (("y", series.low, series.high), ("x", series.x_low, series.x_high)):
        if a is not None and b is not None and np.isfinite(np.asarray(a, float)).any():
            names = {"x0": "x", "x1": "x", "y0": "y", "y1": "y"}
            for end, values in zip("01", (a, b), strict=True):
                names[f"{along}{end}"] = f"{along}{end}"
                source.data[f"{along}{end}"] = _numbers(values)
            add(glyphs.Segment(**names, line_color=look.color, line_width=1.5))
    width, dash = 1.2 * series.line.get("linewidth", 1.3), series.line["linestyle"]
    if dash != "none":
        steps = {"mode": "after"} if "drawstyle" in series.line else {}
        pattern = [] if isinstance(dash, str) else [max(1, round(width * n)) for n in dash[1]]
        line = {"line_color": look.color, "line_width": width, "line_dash": pattern}
        add((glyphs.Step if steps else glyphs.Line)(x="x", y="y", **steps, **line))
    if look.marker:
        name, angle = MARKERS[look.marker]
        edge, width = (look.color, 2.0) if series.plain else ("black", 0.7)
        colours: Any = {"fill_color": look.color, "line_color": edge, "line_width": width}
        marks = glyphs.Scatter(x="x", y="y", marker=name, angle=angle, size=9, **colours)
        start, step = series.every
        if step == 1:
            add(marks)
        else:  # the line shows every value
            some = models.IndexFilter(list(range(start, len(data["x"]), step)))
            add(marks, view=models.CDSView(filter=some))
            drawn[-2:] = drawn[:-3:-1]
    return drawn


def _texts(axis: Axis, values: Values, low: Values | None, high: Values | None) -> list[str]:
    """Return values for people, with their intervals if they have some."""
    if low is None or high is None:
        return [axis.text(float(f"{value:.12g}")) for value in values]
    return [str(units.with_interval(*each)) for each in zip(values, low, high, strict=True)]


def _legend(
    panels: Iterable[Panel | Map], keys: dict[str, list[GlyphRenderer]], wide: int
) -> Figure:
    """Return a plot of its own with the legend below all panels: a click hides a series."""
    widest = max(map(len, keys)) * CHARACTER + KEY
    columns = max(1, min(len(keys), wide // int(widest)))
    plot = plotting.figure(height=ROW * -(-len(keys) // columns) + 12, sizing_mode="stretch_width",
                  tools="", toolbar_location=None, outline_line_color=None,
                  x_range=models.Range1d(0, 1), y_range=models.Range1d(0, 1))  # fmt: skip
    plot.axis.visible = plot.grid.visible = False
    first = {each.label: each for panel in panels for each in reversed(panel.series)}
    items = []
    for label, renderers in keys.items():
        series = first[label]
        bare = Series(label, series.style, [-1], [-1], join=series.join)  # out of sight
        samples = _draw_series(plot, Panel("", Axis(""), Axis(""), []), bare)
        items.append(models.LegendItem(label={"value": label}, renderers=[*samples, *renderers]))
    around: Any = {"spacing": 8, "border_line_color": None, "margin": 0, "padding": 2}
    where: Any = {"location": "center", "orientation": "horizontal", "ncols": columns}
    plot.add_layout(models.Legend(items=items, click_policy="hide", **where, **around))
    return plot


def _draw_map(plot: Figure, panel: Map, colours: str) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = [to_hex(colour) for colour in colormaps["YlGnBu"](np.linspace(0, 1, SHADES))]
    mapper = models.LinearColorMapper(palette=shades, low=0, high=100, nan_color=NO_VALUE)
    at, ends = np.asarray(panel.places, float), edges(panel.places)
    rows, columns = np.indices(panel.values.shape).reshape(2, -1)
    values = panel.values.ravel()
    source = models.ColumnDataSource(
        {
            "row": rows.tolist(),
            "top": (rows - 0.5).tolist(),
            "bottom": (rows + 0.5).tolist(),
            "left": _numbers(ends[columns]),
            "right": _numbers(ends[columns + 1]),
            "of": [panel.rows[row] for row in rows],
            "at": [f"{value:,.6g}" for value in at[columns]],
            "percent": _numbers(values),
            "value": [f"{v:.3g} %" if isfinite(v) else units.NONE for v in values],
        }
    )
    quad = models.Quad(line_color=None, fill_color={"field": "percent", "transform": mapper})
    cells = plot.add_glyph(source, quad)
    plot.x_range = _between(float(ends[0]), float(ends[-1]))
    _mark(plot.yaxis, dict(enumerate(map(str, panel.rows))))
    plot.yaxis.major_label_text_font_size = "9px"
    plot.add_layout(models.ColorBar(color_mapper=mapper, title=_plain(colours), width=8), "right")
    _hover(plot, [cells], [("", "@of"), (panel.x.label, "@at"), ("", "@value")])

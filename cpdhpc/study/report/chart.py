"""A figure: panels in a grid, a title above, one legend below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from math import ceil
from typing import TYPE_CHECKING, Any

from .panel import Map, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.7, 2.9  # of a panel, inches
LINE = 0.2  # height of a line of text, inches
STYLE: Any = {
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "cpdhpc",  # the same figure has the same bytes
}


@dataclass(frozen=True)
class Chart:
    """A figure and what is said of it.

    name: of its files; title, notes: above the panels; caption: below it on a page
    columns: of the grid of panels; shared: whether the panels have axes in common
    colours: what the colours of maps show; scale: of a panel's width and height
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


def draw(chart: Chart) -> Figure:
    """Return the figure."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(chart.columns, len(chart.panels))
    rows = ceil(len(chart.panels) / columns)
    wide, high = WIDTH * chart.scale[0] * columns + 0.6, HEIGHT * chart.scale[1] * rows
    wide = max(wide, 6.5)
    notes = [line for note in chart.notes for line in _wrapped(note, wide)]
    legend = _legend_rows(chart, wide)
    head, foot = LINE * (1.6 + len(notes)), LINE * (legend + 0.5 if legend else 0)
    total = high + head + foot
    layout = ConstrainedLayoutEngine(rect=(0, foot / total, 1, high / total))
    figure = Figure(figsize=(wide, total), layout=layout)
    figure.text(0.1 / wide, 1 - 0.07 / total, chart.title, va="top", weight="bold", size=11)
    under = 1 - (0.07 + 1.35 * LINE) / total
    figure.text(0.1 / wide, under, "\n".join(notes), va="top", size=8.5, color="#444444")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=chart.shared, sharey=chart.shared)
    _fill(figure, chart, list(grid.flat), columns)
    _add_legend(figure, chart, wide)
    return figure


def _wrapped(note: str, width: float) -> list[str]:
    from textwrap import wrap

    return wrap(note, int(width * 15.5))


def _fill(figure: Figure, chart: Chart, places: list[Any], columns: int) -> None:
    used = places[: len(chart.panels)]
    maps = [panel.draw(axes) for axes, panel in zip(used, chart.panels, strict=True)]
    for axes, panel in zip(used, chart.panels, strict=True):
        panel.finish(axes)
    if chart.shared:
        for axes in used:
            axes.label_outer()
    for axes in places[len(used) :]:
        axes.remove()
    for axes, panel in list(zip(used, chart.panels, strict=True))[-columns:]:
        axes.tick_params(labelbottom=True)  # also above an empty place
        axes.set_xlabel(panel.x.label)
    if maps[0] is not None:
        figure.colorbar(maps[0], ax=used, label=chart.colours, shrink=0.6, aspect=30)


def _labels(chart: Chart) -> list[str]:
    """Return what the legend names, each once, references without markers last."""
    named = [each for panel in chart.panels for each in panel.series if each.label]
    named.sort(key=lambda each: not each.look.marker)
    return list(dict.fromkeys(each.label for each in named))


def _legend_columns(labels: list[str], width: float) -> int:
    return max(1, min(len(labels), int(width / (0.085 * max(map(len, labels)) + 0.75))))


def _legend_rows(chart: Chart, width: float) -> int:
    labels = _labels(chart)
    return ceil(len(labels) / _legend_columns(labels, width)) if labels else 0


def _add_legend(figure: Figure, chart: Chart, width: float) -> None:
    labels = _labels(chart)
    if not labels:
        return
    known: dict[Any, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        known |= dict(zip(names, handles, strict=True))
    figure.legend(
        [known[label] for label in labels],
        labels,
        loc="lower center",
        ncols=_legend_columns(labels, width),
        handlelength=3,
        borderaxespad=0.2,
    ).set_in_layout(False)


def image(chart: Chart, kind: str) -> bytes:
    """Return the figure as a file's content. kind: "png" or "svg"."""
    from matplotlib import rc_context

    buffer = BytesIO()
    with rc_context(STYLE):
        metadata = {"Date": None} if kind == "svg" else {}
        draw(chart).savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()

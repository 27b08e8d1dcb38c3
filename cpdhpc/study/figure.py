"""The figure of a report: accuracy against wire bytes, and loss curves."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from .runs import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "os^Dv<>pPX*h"
LINES = ("-", "--", "-.", ":")


def draw(groups: list[Group]) -> Figure:
    """Return the figure; line styles and markers tell runs apart without colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5 + 0.12 * len(groups)), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = side_by_side([group.wire_bytes for group in groups])
    for index, (group, place) in enumerate(zip(groups, places, strict=True)):
        look = {"color": f"C{index % 10}", "label": group.name}
        _accuracy(left, group, place, look | {"marker": MARKERS[index % len(MARKERS)]})
        _loss(right, group, look | {"linestyle": LINES[index % len(LINES)]}, index)
    left.set(
        xlabel="payload per step and rank / byte (alike ones side by side)",
        ylabel="test accuracy / %",
    )
    if all(group.wire_bytes > 0 for group in groups):
        left.set_xscale("log", base=2)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set(xlabel="epoch", ylabel="test loss / nat", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    handles, labels = right.get_legend_handles_labels()  # the same colours and markers as left
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(groups), 5),
        handlelength=4,
    )
    return figure


def side_by_side(sizes: list[float]) -> list[float]:
    """Return where to draw sizes: those within 5% of one another spread, so that none is hidden."""
    places = list(sizes)
    for size in sizes:
        alike = [i for i, other in enumerate(sizes) if abs(other - size) <= 0.05 * size]
        for order, i in enumerate(alike):
            places[i] = size * 2 ** (0.1 * (order - (len(alike) - 1) / 2))
    return places


def _accuracy(axes: Any, group: Group, place: float, look: dict[str, Any]) -> None:
    """Draw the mean over seeds, and a bar from the lowest to the highest."""
    values = group.accuracies
    low, high = group.accuracy - values.min(), values.max() - group.accuracy
    axes.errorbar(
        place,
        group.accuracy,
        yerr=[[low], [high]],
        linestyle="none",
        markersize=8,
        markeredgecolor="black",
        capsize=3,
        **look,
    )


def _loss(axes: Any, group: Group, look: dict[str, Any], index: int) -> None:
    """Draw the mean over seeds of the test loss after each epoch, with markers now and then."""
    losses = np.mean([run.epochs["test_loss"] for run in group.runs], axis=0)
    epochs = group.runs[0].epochs["epoch"]
    every = max(1, len(epochs) // 5)
    axes.plot(
        epochs,
        losses,
        marker=MARKERS[index % len(MARKERS)],
        markevery=(index % every, every),
        markeredgecolor="black",
        markersize=5,
        **look,
    )


def image(groups: list[Group], kind: str) -> bytes:
    """Return the figure as a file's content. kind: what matplotlib calls it, as "png" or "svg"."""
    buffer = BytesIO()
    draw(groups).savefig(buffer, format=kind, dpi=150)
    return buffer.getvalue()

"""Figures of trainings: accuracy against bits and time, and how they learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy.typing as npt

from .axis import Axis, spread
from .chart import Chart
from .look import BLACK, Look
from .panel import Panel
from .pool import finite
from .series import Series

Array = npt.NDArray[Any]
FRONT = Look(BLACK, "", (0, (2, 2)))
NEAR = 2.0  # points of accuracy below the best that a closer look takes in
ALIKE, STEP = 0.05, 0.1  # share within which places are alike; doublings that they move apart


@dataclass(frozen=True)
class Trained:
    """Trainings that differ only in the seed.

    panel: what it shares with others of a panel; accuracies: float64[seeds], %
    sent_bytes: mean that the rank that sends most sends in a step; bit_bytes: what it would send
        with a bit a value, NaN if not known
    times_s: float64[seeds] of the whole training; accuracy, loss: means over seeds by epoch
    """

    panel: str
    name: str
    look: Look
    accuracies: Array
    sent_bytes: float
    bit_bytes: float
    times_s: Array
    epochs: Array
    accuracy: Array
    loss: Array


def accuracy_charts(title: str, trained: Sequence[Trained]) -> list[Chart]:
    """Return accuracy against bytes, where any are sent, and against time."""
    sending = [each for each in trained if each.sent_bytes > 0]
    charts = []
    if sending:
        panels = _by_panel(sending, _by_bits)
        charts.append(
            Chart(
                "accuracy_by_bits",
                f"{title}: accuracy against bits sent",
                [f"{SEEDS} Those alike in bytes are drawn side by side."],
                f"Test accuracy at the end against the bytes that a rank sends in a step. {FRONTS}",
                panels,
                _columns(panels),
                shared=False,
            )
        )
    timed = [each for each in trained if finite(each.times_s)]
    if timed:
        panels = _by_panel(timed, _by_time)
        charts.append(
            Chart(
                "accuracy_by_time",
                f"{title}: accuracy against time",
                [SEEDS],
                f"Test accuracy at the end against the time of the training. {FRONTS}",
                panels,
                _columns(panels),
                shared=False,
            )
        )
    return charts


SEEDS = "Mean over seeds; bars: from the least to the greatest of the seeds."
FRONTS = (
    "Pareto front: no other has a mean as high for less; differences within the bars may be chance."
)


def _columns(panels: Sequence[Panel]) -> int:
    return 2 if any(panel.title.endswith(CLOSER) for panel in panels) else 3


def _by_panel(
    trained: Sequence[Trained], draw: Callable[[str, Sequence[Trained]], Panel]
) -> list[Panel]:
    """Return a panel for each title, and beside it a closer look at the best where it helps."""
    groups: dict[str, list[Trained]] = {}
    for each in trained:
        groups.setdefault(each.panel, []).append(each)
    best = {name: _near(group) for name, group in groups.items()}
    closer = any(0 < len(best[name]) < len(group) for name, group in groups.items())
    panels = []
    for name, group in groups.items():
        panel = draw(name or ("all" if closer else ""), group)
        panels.append(panel)
        if closer:
            near = best[name] or group
            ends = [end for each in near for end in (min(each.accuracies), max(each.accuracies))]
            room = 0.1 * (max(ends) - min(ends)) + 0.05
            y = Axis(panel.y.label, limits=(min(ends) - room, max(ends) + room))
            title = f"{name}: {CLOSER}" if name else CLOSER
            panels.append(Panel(title, panel.x, y, panel.series, top=panel.top))
    return panels


CLOSER = "the best, closer"


def _near(group: Sequence[Trained]) -> list[Trained]:
    """Return those of which every seed is near the best mean."""
    best = max(each.accuracies.mean() for each in group)
    return [each for each in group if each.accuracies.min() >= best - NEAR]


def _by_bits(title: str, group: Sequence[Trained]) -> Panel:
    sizes = [each.sent_bytes / 1e3 for each in group]
    places = spread_out(sizes)
    means = [float(each.accuracies.mean()) for each in group]
    series = [_point(each, place) for each, place in zip(group, places, strict=True)]
    front = pareto(sizes, means)
    series.append(_front([places[i] for i in front], [means[i] for i in front], max(places)))
    bit = finite(each.bit_bytes for each in group)
    top = ("bits sent per value", 1e3 / bit[0], (1, 2, 4, 8, 16, 32)) if bit else None
    x = spread("sent per step and rank / kB", places, "log", 1.5)
    return Panel(title, x, Axis("test accuracy / %"), series, top=top)


def _by_time(title: str, group: Sequence[Trained]) -> Panel:
    times = [float(each.times_s.mean()) for each in group]
    means = [float(each.accuracies.mean()) for each in group]
    series = [_point(each, None) for each in group]
    front = pareto(times, means)
    series.append(_front([times[i] for i in front], [means[i] for i in front], max(times)))
    x = spread("time of the training / s", times, "log", 10, start=None)
    return Panel(title, x, Axis("test accuracy / %"), series)


def _point(each: Trained, place: float | None) -> Series:
    """Return the mean at a place, None: at the mean of the times, with a bar for these too."""
    low, high = each.accuracies.min(), each.accuracies.max()
    times = each.times_s
    at = float(times.mean()) if place is None else place
    reach = ([times.min()], [times.max()]) if place is None else (None, None)
    mean = float(each.accuracies.mean())
    return Series(each.name, each.look, [at], [mean], [low], [high], "none", *reach)


def _front(x: Sequence[float], y: Sequence[float], end: float) -> Series:
    return Series("Pareto front", FRONT, [*x, end], [*y, y[-1]], join="steps")


def pareto(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Return which have a gain that nothing of no more cost has, cheapest first."""
    order = sorted(range(len(costs)), key=lambda i: (costs[i], -gains[i]))
    front: list[int] = []
    for i in order:
        if not front or gains[i] > gains[front[-1]]:
            front.append(i)
    return front


def spread_out(sizes: Sequence[float]) -> list[float]:
    """Return where to draw sizes: those alike moved apart, in their order, so none is hidden."""
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    clusters: list[list[int]] = []
    for i in order:
        alike = clusters and sizes[i] <= (1 + ALIKE) * sizes[clusters[-1][-1]]
        clusters[-1].append(i) if alike else clusters.append([i])
    places = list(sizes)
    for cluster in clusters:
        for at, i in zip(count(-(len(cluster) - 1) / 2), cluster, strict=False):
            places[i] = sizes[i] * 2 ** (STEP * at)
    return places


def learning_charts(title: str, trained: Sequence[Trained]) -> list[Chart]:
    """Return test accuracy and test loss by epoch, where they were kept."""
    kept = [each for each in trained if len(each.epochs)]
    if not kept:
        return []
    accuracy = Axis("test accuracy / %")
    loss = spread("test loss / nat", [x for each in kept for x in each.loss], "log", 3)
    return [
        _learning(
            "accuracy_by_epoch", f"{title}: accuracy over epochs", kept, "accuracy", accuracy
        ),
        _learning("loss_by_epoch", f"{title}: loss over epochs", kept, "loss", loss),
    ]


def _learning(name: str, title: str, trained: Sequence[Trained], what: str, y: Axis) -> Chart:
    groups: dict[str, list[Series]] = {}
    for each in trained:
        lines = groups.setdefault(each.panel, [])
        apart = max(1, len(each.epochs) // 5)
        every = (len(lines) % apart, apart)
        lines.append(Series(each.name, each.look, each.epochs, getattr(each, what), every=every))
    panels = [Panel(panel, Axis("epoch", "whole"), y, lines) for panel, lines in groups.items()]
    caption = "Mean over seeds after each epoch; markers now and then."
    return Chart(name, title, [caption], caption, panels)

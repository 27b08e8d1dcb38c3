"""How well trainings went: by the metric of their job, against bits and time, and by epoch."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...config import value_of
from ..study_data.factors import Array
from . import units
from .figures import BLACK, Axis, Chart, Panel, Series, Style, spread
from .points import finite


@dataclass(frozen=True)
class Score:
    """A metric of trainings. unit: "%" of an accuracy, else ""; lower: whether less is better.

    loss_unit: of the loss
    """

    label: str
    unit: str
    lower: bool
    loss_unit: str

    @classmethod
    def of(cls, toml: str) -> Score:
        """Return the score by a job, as TOML text; jobs of older versions have an accuracy."""
        return cls._of(toml, "metric")

    @classmethod
    def further(cls, toml: str) -> list[Score]:
        """Return what is told beside it, by the [[metrics]] of a job."""
        return [
            cls._of(toml, f"metrics.{i}")
            for i in range(len(tomllib.loads(toml).get("metrics", [])))
        ]

    @classmethod
    def _of(cls, toml: str, table: str) -> Score:
        keys = f"{table}.name", f"{table}.import", f"{table}.better", "loss.name", "loss.import"
        name, imported, better, loss, own_loss = (value_of(toml, key) for key in keys)
        label = imported.partition(":")[2] if imported else name or "accuracy"
        lower = better == "lower" if imported else label != "accuracy"
        nat = "" if own_loss or (loss or "cross_entropy") != "cross_entropy" else "nat"
        return cls(label, "%" if label == "accuracy" else "", lower, nat)

    @property
    def column(self) -> str:
        """Name of the record's column."""
        return f"test_{self.label}"

    @property
    def factor(self) -> int:
        """What the record's values are multiplied by, to be shown."""
        return 100 if self.unit else 1

    @property
    def heading(self) -> str:
        """Heading of a table's column."""
        return f"{self.label}\n{self.unit}".strip()

    @property
    def points(self) -> str:
        """What differences are counted in."""
        return "points" if self.unit else ""

    def axis(self) -> Axis:
        """Return an axis of scores of the test."""
        return Axis(f"test {self.label}" + (f" / {self.unit}" if self.unit else ""))

    def loss_axis(self, values: list[float]) -> Axis:
        """Return an axis of losses of the test: logarithmic where they are far apart."""
        return spread(
            "test loss" + (f" / {self.loss_unit}" if self.loss_unit else ""), values, "log", 3
        )

    def told(self, values: Array) -> units.Cell:
        """Return the mean, and the standard deviation where there are several."""
        if self.unit:
            return units.with_deviation(values)
        mean, deviation = values.mean(), values.std(ddof=1) if len(values) > 1 else float("nan")
        text = f"{mean:.4g}" + (f" ± {deviation:.2g}" if len(values) > 1 else "")
        return units.Cell(text, value=mean, deviation=deviation)

    def difference(self, value: float) -> units.Cell:
        """Return a difference with its sign."""
        return units.signed(value) if self.unit else units.Cell(f"{value:+.3g}", value=value)

    def gains(self, values: list[float]) -> list[float]:
        """Return values of which more is better."""
        return [-value for value in values] if self.lower else values

    def near(self, best: float) -> float:
        """Return how far a score may be below the best in a closer look: 2 points, or 2 %."""
        return 2.0 if self.unit else 0.02 * abs(best)


PADDED = (  # a caption, where bytes are shown
    " Formats of few bits travel in tiles of 1,024 values, and every layer fills up its last one: "
    "small layers take more than their bits."
)
FRONT = Style(BLACK, "", (0, (2, 2)))


@dataclass(frozen=True)
class Trained:
    """Trainings that differ only in the seed.

    panel: what it shares with others of a panel; scores: float64[seeds], an accuracy in %
    sent_bytes: mean that the rank that sends most sends in a step; bit_bytes: what it would send
        with a bit a value, NaN if not known
    times_s: float64[seeds] of the whole training; score, loss: means over seeds by epoch
    """

    panel: str
    name: str
    style: Style
    scores: Array
    sent_bytes: float
    bit_bytes: float
    times_s: Array
    epochs: Array
    score: Array
    loss: Array


def score_charts(title: str, trained: Sequence[Trained], measure: Score) -> list[Chart]:
    """Return the score against bytes, where any are sent, and against time; of those with scores.

    One whose score is not known is beside no other, nor a best.
    """
    known = [each for each in trained if finite(each.scores)]
    sending = [each for each in known if each.sent_bytes > 0]
    timed = [each for each in known if finite(each.times_s)]
    cost = "the bytes that a rank sends in a step"
    rows = (
        (sending, _by_bits, "bits", "bits sent", cost),
        (timed, _by_time, "time", "time", "the time of the training"),
    )
    return [
        Chart(
            f"{measure.label}_by_{name}",
            f"{title}: {measure.label} against {what}",
            [SEEDS, *(_covered(shown) if name == "bits" else [])],
            f"Test {measure.label} at the end against {said}. {FRONTS}",
            panels := _by_panel(shown, partial(draw, measure), measure),
            2 if any(panel.title.endswith(CLOSER) for panel in panels) else 3,
            shared=False,
        )
        for shown, draw, name, what, said in rows
        if shown
    ]


def _covered(trained: Sequence[Trained]) -> list[str]:
    """Return a note for each place of the chart against bytes where one mark covers others."""
    places: dict[tuple[str, ...], list[str]] = {}
    for each in trained:
        place = each.panel, f"{each.sent_bytes:.2g}", f"{each.scores.mean():.3g}"
        places.setdefault(place, []).append(each.name)
    return [f"At one place: {', '.join(names)}." for names in places.values() if len(names) > 1]


SEEDS = "Mean over seeds; bars: from the least to the greatest of the seeds."
FRONTS = (
    "Pareto front: no other has a mean as good for less; differences within the bars may be chance."
)


def _by_panel(
    trained: Sequence[Trained], draw: Callable[[str, Sequence[Trained]], Panel], measure: Score
) -> list[Panel]:
    """Return a panel for each title, and beside it a closer look at the best where it helps."""
    groups: dict[str, list[Trained]] = {}
    for each in trained:
        groups.setdefault(each.panel, []).append(each)
    best = {name: _near(group, measure) for name, group in groups.items()}
    closer = any(len(best[name]) < len(group) for name, group in groups.items())
    panels = []
    for name, group in groups.items():
        panel = draw(name or ("all" if closer else ""), group)
        panels.append(panel)
        if closer:
            ends = [end for each in best[name] for end in (min(each.scores), max(each.scores))]
            room = 0.1 * (max(ends) - min(ends)) + measure.near(max(ends)) / 40
            y = Axis(panel.y.label, limits=(min(ends) - room, max(ends) + room))
            title = f"{name}: {CLOSER}" if name else CLOSER
            panels.append(Panel(title, panel.x, y, panel.series, top=panel.top))
    return panels


CLOSER = "the best, closer"


def _near(group: Sequence[Trained], measure: Score) -> list[Trained]:
    """Return those of which every seed is near the best mean; all where these are no two."""
    gains = [np.array(measure.gains(list(each.scores))) for each in group]
    best = max(each.mean() for each in gains)
    least = best - measure.near(best)
    near = [each for each, gain in zip(group, gains, strict=True) if gain.min() >= least]
    return near if len(near) > 1 else list(group)


def _by_bits(measure: Score, title: str, group: Sequence[Trained]) -> Panel:
    sizes = [each.sent_bytes / 1e3 for each in group]
    bit = [each.bit_bytes for each in group if each.bit_bytes > 0]
    top = ("bits sent per value", 1e3 / bit[0], (1, 2, 4, 8, 16, 32)) if bit else None
    x = spread("sent per step and rank / kB", sizes, "log", 1.5)
    return _against(measure, title, group, sizes, x, top)


def _by_time(measure: Score, title: str, group: Sequence[Trained]) -> Panel:
    times_s = [float(each.times_s.mean()) for each in group]
    x = spread("time of the training / s", times_s, "log", 10, start=None)
    return _against(measure, title, group, times_s, x, bars=True)


def _against(
    measure: Score,
    title: str,
    group: Sequence[Trained],
    costs: Sequence[float],
    x: Axis,
    top: tuple[str, float, Sequence[float]] | None = None,
    bars: bool = False,
) -> Panel:
    """Return the score by cost with its Pareto front; bars: of the times too."""
    means = [float(each.scores.mean()) for each in group]
    series = []
    for each, cost, mean in zip(group, costs, means, strict=True):
        low, high = [each.scores.min()], [each.scores.max()]
        reach = ([each.times_s.min()], [each.times_s.max()]) if bars else (None, None)
        series.append(Series(each.name, each.style, [cost], [mean], low, high, "none", *reach))
    front = pareto(costs, measure.gains(means))
    along, best = [costs[i] for i in front], [means[i] for i in front]
    along, best = [*along, max(costs)], [*best, best[-1]]
    series.append(Series("Pareto front", FRONT, along, best, join="steps"))
    return Panel(title, x, measure.axis(), series, top=top)


def pareto(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Return which have a gain that nothing of no more cost has, cheapest first."""
    order = sorted(range(len(costs)), key=lambda i: (costs[i], -gains[i]))
    front: list[int] = []
    for i in order:
        if not front or gains[i] > gains[front[-1]]:
            front.append(i)
    return front


def learning_charts(title: str, trained: Sequence[Trained], measure: Score) -> list[Chart]:
    """Return the score and the loss of the test by epoch, where they were kept."""
    kept = [each for each in trained if len(each.epochs)]
    if not kept:
        return []
    axes = {measure.label: ("score", measure.axis())}
    axes["loss"] = "loss", measure.loss_axis([x for each in kept for x in each.loss])
    return [
        _learning(f"{name}_by_epoch", f"{title}: {name} over epochs", kept, what, axis)
        for name, (what, axis) in axes.items()
    ]


def _learning(name: str, title: str, trained: Sequence[Trained], what: str, y: Axis) -> Chart:
    groups: dict[str, list[Series]] = {}
    for each in trained:
        lines = groups.setdefault(each.panel, [])
        apart = max(1, len(each.epochs) // 5)
        every = (len(lines) % apart, apart)
        lines.append(Series(each.name, each.style, each.epochs, getattr(each, what), every=every))
    panels = [Panel(panel, Axis("epoch", "whole"), y, lines) for panel, lines in groups.items()]
    caption = "Mean over seeds after each epoch; markers now and then."
    return Chart(name, title, [caption], caption, panels)

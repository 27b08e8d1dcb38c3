"""The critical batch: fitted to the steps that batches need, and predicted by the noise scale.

Source: McCandlish et al., arXiv 1812.06162: (S / S_min - 1) (E / E_min - 1) = 1 for the steps S
and the samples E that a batch takes to a target; E_min / S_min is the critical batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isnan, log, nan
from typing import Any

import numpy as np

from ..study_data.factors import Array
from ..study_data.study_file import StudyFile
from . import units
from .figures import GREY, Axis, Chart, Panel, Series, Style, spread, styles
from .points import UNKNOWN, Estimate, SeedGroup, label, varying
from .tables import Column, Section, tabulate

BATCH, RATE = "train.batch", "train.learning_rate"
FREE = (BATCH, RATE, "train.epochs")  # the last only says when a run ends
WIDEST = 10.0  # upper by lower end of an interval: beyond it, nothing is determined


def critical_batch(samples: Array, noise_scale: Array) -> Array:
    """Return float64[steps], the critical batch of a run up to each step, from its noise scale.

    samples: int64[steps], of each; noise_scale: float64[steps], in samples; infinity is a number
    A step of B samples does the work of 1 / (1 + noise / B) steps without noise (equation 2.7).
    The sums of these and of their samples are S_min and E_min.
    """
    share = np.nan_to_num(1 / (1 + noise_scale / samples))
    spent = np.where(np.isnan(noise_scale), 0.0, samples * (1 - share))
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.cumsum(spent) / np.cumsum(share)
    return found


@dataclass(frozen=True)
class Tradeoff:
    """S_min, E_min and E_min / S_min with their intervals; refusal: why they are not determined."""

    steps: Estimate = UNKNOWN
    samples: Estimate = UNKNOWN
    batch: Estimate = UNKNOWN
    refusal: str = ""


def fit(batches: Array, steps: Array, level: float) -> Tradeoff:
    """Return the trade-off of steps, float64[points], that batches took to one target.

    As E = B S it is S = S_min + E_min / B: by least squares of the logarithms, so that errors are
    relative, with Student's intervals of the logarithms.
    """
    from scipy.optimize import least_squares
    from scipy.special import stdtrit

    if len(set(batches.tolist())) < 3:
        return Tradeoff(refusal="fewer than three batches reach the target")
    near, far = float(steps.min()), float((steps * batches).min())
    solved = least_squares(
        lambda p: np.log(np.exp(p[0]) + np.exp(p[1]) / batches) - np.log(steps),
        [log(near / 2), log(far / 2)],
    )
    information = solved.jac.T @ solved.jac
    if np.linalg.cond(information) > 1e10:
        return Tradeoff(refusal="all batches are on one side of the critical batch")
    freedom = len(steps) - 2
    variance = np.linalg.inv(information) * 2 * solved.cost / freedom
    reach = float(stdtrit(freedom, (1 + level) / 2))

    def estimate(combination: Sequence[float]) -> Estimate:
        along = np.array(combination)
        value, width = float(along @ solved.x), reach * float(along @ variance @ along) ** 0.5
        ends = (exp(min(value + sign * width, 700.0)) for sign in (-1, 1))
        return Estimate(exp(value), *ends)

    found = Tradeoff(estimate([1, 0]), estimate([0, 1]), estimate([-1, 1]))
    if found.batch.high > WIDEST * found.batch.low:
        interval = units.interval(found.batch.low, found.batch.high)
        return Tradeoff(refusal=f"the critical batch is somewhere in {interval}")
    return found


@dataclass(frozen=True)
class Reached:
    """What it took the seeds of a group to reach the target: float64[seeds], NaN: not known."""

    group: SeedGroup
    steps: Array
    samples: Array
    predicted: Array


@dataclass(frozen=True)
class Target:
    """What trainings are to reach: a test loss, or an accuracy in %; series: which of both."""

    value: float
    series: str = "test_loss"

    @property
    def told(self) -> str:
        """What it is, with its unit."""
        return f"{units.digits(self.value)} {'nat' if self.series == 'test_loss' else '%'}"

    def crossing(self, score: Array, values: Array) -> float:
        """Return a value where the score first reaches the target. See crossing."""
        sign = 1.0 if self.series == "test_loss" else -1.0
        return crossing(sign * score, sign * self.value, values)


@dataclass(frozen=True)
class Curve:
    """Trainings alike in all but batch and rate, with the best rate for each batch."""

    name: str
    target: Target
    points: Sequence[Reached]
    found: Tradeoff
    at_the_end: Sequence[int]

    @property
    def predicted(self) -> Array:
        """float64[points], the critical batch that the noise scale of each predicts."""
        means = np.array([np.mean(point.predicted) for point in self.points])
        return means[np.isfinite(means)]


def crossing(loss: Array, target: float, values: Array) -> float:
    """Return a value where the loss first reaches the target, on a line between epochs.

    loss, values: float64[epochs]; NaN where it never does, or does in the first epoch already
    """
    (below,) = np.nonzero(loss <= target)
    if not below.size or below[0] == 0:
        return nan
    i = int(below[0])
    share = (loss[i - 1] - target) / (loss[i - 1] - loss[i])
    return float(values[i - 1] + share * (values[i] - values[i - 1]))


def critical(file: StudyFile, groups: Sequence[SeedGroup]) -> list[Section]:
    """Return the steps to a target by batch and what was fitted; nothing for one batch."""
    if "steps_done" not in file.training:
        return []
    alike: dict[Any, list[SeedGroup]] = {}
    for group in groups:
        key = frozenset((k, v) for k, v in group.factors.items() if k not in FREE)
        alike.setdefault(key, []).append(group)
    several = [each for each in alike.values() if len({g.factors.get(BATCH) for g in each}) > 2]
    names = varying([each[0].factors for each in several], FREE)
    curves = [_curve(file, label(each[0].factors, names), each) for each in several]
    if not curves:
        return []
    caption = (
        "Steps and samples to the target: the study's train.target_loss or train.target_accuracy, "
        "else the least test loss that all batches reach; on lines between epochs. Of several "
        "learning rates the one that takes the fewest steps. By noise: median over batches of what "
        f"the noise scale up to the target predicts. In brackets: {file.percent} CI."
    )
    notes = [
        f"{curve.name or 'all'}: batch {batch}: the best learning rate is the last one tried"
        for curve in curves
        for batch in curve.at_the_end
    ]
    table = tabulate("Critical batch", _columns(), curves, caption)
    return [Section("Critical batch", tables=[table], charts=_charts(file, curves), notes=notes)]


def _curve(file: StudyFile, name: str, groups: Sequence[SeedGroup]) -> Curve:
    target = _target(file, groups)
    by_batch: dict[int, list[Reached]] = {}
    for group in groups:
        by_batch.setdefault(int(group.factors[BATCH]), []).append(_reached(file, group, target))
    best, ends = list[Reached](), list[int]()
    for batch, each in sorted(by_batch.items()):
        known = [one for one in each if np.isfinite(one.steps).all()]
        if not known:
            continue
        best.append(min(known, key=lambda one: float(one.steps.mean())))
        rates = sorted(float(one.group.factors.get(RATE, nan)) for one in each)
        if len(rates) > 1 and float(best[-1].group.factors[RATE]) in (rates[0], rates[-1]):
            ends.append(batch)
    steps = np.concatenate([one.steps for one in best]) if best else np.zeros(0)
    batches = [np.full(len(one.steps), float(one.group.factors[BATCH])) for one in best]
    found = fit(np.concatenate(batches) if best else steps, steps, file.level)
    return Curve(name, target, best, found, ends)


def _target(file: StudyFile, groups: Sequence[SeedGroup]) -> Target:
    """Return what was asked for, or the least loss that all seeds of some rate reach, by batch."""
    asked = file.toml.get("train", {})
    for name in ("loss", "accuracy"):
        if f"target_{name}" in asked:
            return Target(float(asked[f"target_{name}"]), f"test_{name}")
    least: dict[int, float] = {}
    for group in groups:
        batch, rows = int(group.factors[BATCH]), [point.index for point in group.points]
        worst = float(np.fmin.reduce(file.training["test_loss"][rows], axis=1).max())
        if not isnan(worst):  # of a rate with which every seed trains
            least[batch] = min(worst, least.get(batch, inf))
    return Target(max(least.values(), default=nan))


def _reached(file: StudyFile, group: SeedGroup, target: Target) -> Reached:
    rows = [point.index for point in group.points]
    unknown = np.full(file.training["test_loss"].shape, nan)  # where trainings have no accuracy
    score = file.training.get(target.series, unknown)

    def at(name: str) -> Array:
        values = file.training.get(name, unknown)
        return np.array([target.crossing(score[row], values[row]) for row in rows])

    return Reached(group, at("steps_done"), at("samples_seen"), at("critical_batch"))


def _columns() -> list[Column[Curve]]:
    def three(estimate: Estimate) -> str:
        return units.NONE if isnan(estimate.value) else units.with_interval(*estimate)

    def noise(curve: Curve) -> str:
        return units.digits(float(np.median(curve.predicted))) if len(curve.predicted) else "-"

    return [
        Column("trainings", lambda c: c.name or "all", numbers=False),
        Column("target", lambda c: c.target.told),
        Column("batches", lambda c: str(len(c.points))),
        Column("least\nsteps", lambda c: three(c.found.steps)),
        Column("least\nsamples", lambda c: three(c.found.samples)),
        Column("critical\nbatch", lambda c: three(c.found.batch)),
        Column("by\nnoise", noise),
        Column("not determined", lambda c: c.found.refusal or units.NONE, numbers=False),
    ]


def _charts(file: StudyFile, curves: Sequence[Curve]) -> list[Chart]:
    shown = [curve for curve in curves if curve.points]
    if not shown:
        return []
    panels = []
    for curve in shown:
        style = styles([curve.name])[curve.name]
        x, low, high = _spread([one.samples for one in curve.points])
        y, y_low, y_high = _spread([one.steps for one in curve.points])
        series = [Series("measured", style, x, y, y_low, y_high, "none", low, high)]
        if not curve.found.refusal:
            batches = [float(one.group.factors[BATCH]) for one in curve.points]
            b = np.geomspace(min(batches), max(batches), 33)
            steps = curve.found.steps.value + curve.found.samples.value / b
            series.append(Series("fit", Style(GREY, ""), b * steps, steps, join="fit"))
        axes = spread("samples to the target", x, "log", 2), spread("steps", y, "log", 2)
        panels.append(Panel(curve.name, *axes, series))
    return [
        Chart(
            "critical_batch",
            f"{file.name}: steps against samples by batch",
            ["Means over seeds; bars: from the least to the greatest of the seeds."],
            "Steps and samples that batches take to one target.",
            panels,
            shared=False,
        )
    ]


def _spread(values: Sequence[Array]) -> tuple[list[float], list[float], list[float]]:
    return (
        [float(each.mean()) for each in values],
        [float(each.min()) for each in values],
        [float(each.max()) for each in values],
    )


Runs = Sequence[tuple[str, Style, Sequence[Mapping[str, Array]]]]


def noise_charts(title: str, groups: Runs) -> list[Chart]:
    """Return the noise scale over the iterations, of runs that measured it.

    groups: name, style, and the steps of each seed's record
    """
    series = []
    for name, style, seeds in groups:
        for number, steps in enumerate(each for each in seeds if "noise_scale" in each):
            known = np.isfinite(steps["noise_scale"]) & (steps["noise_scale"] > 0)
            x, y = steps["iteration"][known], steps["noise_scale"][known]
            series.append(Series("" if number else name, Style(style.color, "", style.dash), x, y))
    if not any(len(each.x) for each in series):
        return []
    axes = Axis("iteration"), Axis("noise scale / samples", "log")
    return [
        Chart(
            "noise_scale",
            f"{title}: gradient noise scale",
            ["A line for each seed."],
            "Gradient noise scale, tr(Sigma) / |G|^2 by running means, over the training.",
            [Panel("", *axes, series)],
        )
    ]


def predicted(seeds: Sequence[Mapping[str, Array]]) -> float:
    """Return the critical batch that noise scales of whole runs predict, NaN: not measured."""
    known = [each for each in seeds if "noise_scale" in each and len(each["samples"])]
    if not known:
        return nan
    last = [critical_batch(each["samples"], each["noise_scale"])[-1] for each in known]
    return float(np.mean(last))

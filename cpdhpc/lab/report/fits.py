"""Models fitted to points: laws of scaling, the critical batch, the front of scores by cost.

Source of the critical batch: McCandlish et al., arXiv 1812.06162: (S / S_min - 1) (E / E_min - 1)
= 1 for the steps S and the samples E that a batch takes to a target; it is E_min / S_min.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import exp, inf, isnan, log, log2, nan

import numpy as np

from ...config import keys_of, value_of
from ..study_data import SHAPE, Array, but, grouped
from ..study_data.study_file import StudyFile
from . import units
from .figures import BLACK, GREY, Axis, Chart, Panel, Series, Style, spread, styles
from .points import (
    UNKNOWN,
    Estimate,
    Facets,
    Line,
    SeedGroup,
    finite,
    heading,
    label,
    of_factors,
    varying,
)
from .tables import Column, Section, Table, tabulate


@dataclass(frozen=True)
class Law:
    """A model with one parameter s, the serial share, that is linear in it: y = s x.

    speedup: (s, r) -> speed-up at r times the ranks of the base; x, y: (r, speed-up) of the line;
    weight: (speed-up) -> weight of a squared residual, so that times have equal relative errors
    """

    name: str
    speedup: Callable[[float, Array], Array]
    x: Callable[[Array], Array]
    y: Callable[[Array, Array], Array]
    weight: Callable[[Array], Array]


LAWS = {  # by scaling
    # Amdahl: Validity of the single processor approach, AFIPS 1967: 1 / S = s + (1 - s) / r
    "strong": Law(
        "Amdahl's law",
        lambda s, r: 1 / (s + (1 - s) / r),
        lambda r: 1 - 1 / r,
        lambda r, speedup: 1 / speedup - 1 / r,
        lambda speedup: speedup**2,
    ),
    # Gustafson: Reevaluating Amdahl's law, CACM 31(5), 1988: S = s + (1 - s) r
    "weak": Law(
        "Gustafson's law",
        lambda s, r: s + (1 - s) * r,
        lambda r: r - 1,
        lambda r, speedup: r - speedup,
        lambda speedup: speedup**-2,
    ),
}


def serial_share(law: Law, ratios: Array, speedups: Array, level: float) -> Estimate:
    """Return the serial share by weighted least squares, with Student's interval.

    ratios, speedups: float64[points], both over the base, which itself says nothing
    NaN if fewer than two points are known, or no point is faster than the base.
    """
    from scipy.special import stdtrit

    known = np.isfinite(speedups) & (speedups > 0) & (ratios > 1)
    r, speedup = ratios[known], speedups[known]
    if len(r) < 2 or speedup.max() <= 1:
        return UNKNOWN
    x, y, weight = law.x(r), law.y(r, speedup), law.weight(speedup)
    squares = float(np.sum(weight * x * x))
    share = float(np.sum(weight * x * y)) / squares
    residual = float(np.sum(weight * (y - share * x) ** 2)) / (len(r) - 1)
    reach = float(stdtrit(len(r) - 1, (1 + level) / 2)) * (residual / squares) ** 0.5
    return Estimate(share, share - reach, share + reach)


MISFIT = 0.25  # medians differ by some per cent: the interval of a share takes the law for granted
NO_FIT = units.Cell("does not fit", value=nan)


@dataclass(frozen=True)
class Fit:
    """A law fitted to a series. share: serial share."""

    law: Law
    line: Line
    share: Estimate

    @property
    def ratios(self) -> Array:
        """float64[points], ranks over those of the base."""
        return np.array([group.ideal for group in self.line.groups])

    @property
    def misfit(self) -> float:
        """Greatest relative difference of a measured speed-up from the law's."""
        measured = np.array([group.speedup.value for group in self.line.groups])
        modelled = self.law.speedup(self.share.value, self.ratios)
        return float(np.nanmax(np.abs(measured / modelled - 1)))

    @property
    def fits(self) -> bool:
        """Whether the law can hold: the misfit is small, and the interval has a share in 0 to 1."""
        return self.misfit <= MISFIT and self.share.low <= 1 and self.share.high >= 0

    def series(self) -> Series:
        """Return the law as a line, which the legend does not name."""
        ratios = np.geomspace(1, self.ratios.max(), 16)
        ranks = ratios * self.line.groups[0].base_points[0].ranks
        plain = Style(self.line.style.color, "")
        return Series("", plain, ranks, self.law.speedup(self.share.value, ratios), join="fit")


def fit(file: StudyFile, line: Line) -> Fit | None:
    """Return the law of the study's scaling fitted to a series, None if there is no fit."""
    law = LAWS.get(file.scaling)
    bases = {tuple(point.index for point in group.base_points) for group in line.groups}
    if law is None or len(bases) != 1 or not line.groups[0].base_points:
        return None
    ratios = np.array([group.ideal for group in line.groups])
    speedups = np.array([group.speedup.value for group in line.groups])
    share = serial_share(law, ratios, speedups, file.level)
    return None if isnan(share.value) else Fit(law, line, share)


def law_table(file: StudyFile, layout: Facets, fits: Sequence[Fit]) -> Table:
    """Return the table of serial shares."""

    def interval(found: Fit) -> str:
        return units.interval(*found.share.scaled(100)[1:]) if found.fits else units.NONE

    def most(found: Fit) -> str:
        share = found.share if found.fits else UNKNOWN
        ends = [1 / end if end > 0 else nan for end in (share.value, share.high, share.low)]
        return units.with_interval(*ends)

    firsts = [found.line.groups[0] for found in fits]
    shared = [*of_factors(layout.panels, firsts), *layout.names(firsts)]
    columns: list[Column[Fit]] = [
        *(Column(c.heading, lambda f, c=c: c.cell(f.line.groups[0]), c.numbers) for c in shared),  # type: ignore[misc]
        Column("points", lambda f: str(len(f.line.groups))),
        Column(
            "serial\nshare %",
            lambda f: units.digits(100 * f.share.value) if f.fits else NO_FIT,
        ),
        Column(f"{file.percent} CI", interval),
        *([Column("speed-up\nat most", most)] if file.scaling == "strong" else []),
        Column("greatest\nmisfit %", lambda f: units.digits(100 * f.misfit)),
    ]
    name = LAWS[file.scaling].name
    caption = (
        f"{name} fitted to the speed-ups of a series, whose base stands for one rank: weighted "
        "least squares, Student's interval. Does not fit: a misfit above "
        f"{100 * MISFIT:g} %, or a share that cannot be within 0 to 100 %. Left out: series of "
        "fewer than three points, or never faster than their base."
    )
    return tabulate(name, columns, fits, caption)


LEVELS = (0.5, 0.7, 0.9)  # efficiencies
COLOURS = styles(f"efficiency {100 * level:g} %" for level in LEVELS)


def work_for(level: float, works: Sequence[float], efficiencies: Sequence[float]) -> float:
    """Return the least work with an efficiency, on straight lines over its logarithm; NaN: none.

    works: ascending. NaN also if the least work measured has it already.
    """
    pairs = [(log2(w), e) for w, e in zip(works, efficiencies, strict=True) if e > 0]
    for (x, before), (after_x, after) in pairwise(pairs):
        if before < level <= after:
            return float(2 ** (x + (level - before) / (after - before) * (after_x - x)))
    return nan


@dataclass(frozen=True)
class WorkCurve:
    """Points that differ only in the work, and the work for each of LEVELS."""

    group: SeedGroup
    work: tuple[Estimate, ...]


def isoefficiency(file: StudyFile, groups: Sequence[SeedGroup]) -> list[Section]:
    """Return the work that keeps efficiencies as ranks grow; nothing if none is crossed.

    Source: Grama, Gupta, Kumar: Isoefficiency, IEEE Parallel and Distributed Technology 1(3), 1993.
    """
    work = str(file.attributes["work"])
    able = [g for g in groups if file.scaling == "strong" and work in g.factors and not g.is_base]
    places = [
        _place(each, work) for each in grouped(able, lambda g: but(g.factors, [work])).values()
    ]
    found = [place for place in places if not all(isnan(each.value) for each in place.work)]
    if not found:
        return []
    names = varying([place.group.factors for place in found], {*SHAPE, work})
    by = Column[WorkCurve]("method", lambda p: label(p.group.factors, names) or units.NONE, False)
    columns: list[Column[WorkCurve]] = [
        *([by] if names else []),
        Column("ranks", lambda p: str(p.group.ranks)),
        *(Column(f"for\n{100 * level:g} %", partial(_work, i)) for i, level in enumerate(LEVELS)),
    ]
    caption = (
        f"Least {heading(work)} with an efficiency, on straight lines over its logarithm; in "
        "brackets by the ends of the efficiencies' intervals. None: not between two values "
        "measured."
    )
    table = tabulate("Isoefficiency", columns, found, caption)
    panels = grouped(found, lambda place: label(place.group.factors, names))
    values = [each.value for place in found for each in place.work if not isnan(each.value)]
    unit = " / byte" if work.endswith("bytes") else ""
    y = spread(f"{heading(work)}{unit}", values, "log", 1.9, start=None)
    ranks = sorted({float(place.group.ranks) for place in found})
    chart = Chart(
        "isoefficiency",
        f"{file.name}: isoefficiency",
        [f"{heading(work).capitalize()} that keeps an efficiency; bars: {file.percent} CI."],
        f"Least {heading(work)} with an efficiency, by ranks.",
        [Panel(t, Axis("ranks", "log2", ticks=ranks), y, _lines(of)) for t, of in panels.items()],
    )
    return [Section("Isoefficiency", tables=[table], charts=[chart])]


def _work(level: int, place: WorkCurve) -> str:
    return units.with_interval(*place.work[level])


def _place(groups: Sequence[SeedGroup], work: str) -> WorkCurve:
    alike = sorted(groups, key=lambda group: float(group.factors[work]))
    works = [float(group.factors[work]) for group in alike]
    efficiencies = [group.efficiency for group in alike]
    return WorkCurve(
        alike[0],
        tuple(
            Estimate(*(work_for(level, works, [e[i] for e in efficiencies]) for i in (0, 2, 1)))
            for level in LEVELS
        ),
    )


def _lines(places: Sequence[WorkCurve]) -> list[Series]:
    ordered = sorted(places, key=lambda place: place.group.ranks)
    found = []
    for i, (name, style) in enumerate(COLOURS.items()):
        known = [place for place in ordered if not isnan(place.work[i].value)]
        value, low, high = ([p.work[i][end] for p in known] for end in range(3))
        ranks = [float(place.group.ranks) for place in known]
        found += [Series(name, style, ranks, value, low, high, "guide")] if known else []
    return found


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


def tradeoff(batches: Array, steps: Array, level: float) -> Tradeoff:
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
    """Cost for the seeds of a group to reach the target: float64[seeds], NaN: not known."""

    group: SeedGroup
    steps: Array
    samples: Array
    predicted: Array


@dataclass(frozen=True)
class Target:
    """A target of trainings: a test loss, or an accuracy in %; series: which of both."""

    value: float
    series: str = "test_loss"

    @property
    def told(self) -> str:
        """The target with its unit."""
        return f"{units.digits(self.value)} {'nat' if self.series == 'test_loss' else '%'}"

    def crossing(self, score: Array, values: Array) -> float:
        """Return the value at which the score first reaches the target. See crossing."""
        sign = 1.0 if self.series == "test_loss" else -1.0
        return crossing(sign * score, sign * self.value, values)


@dataclass(frozen=True)
class Curve:
    """Trainings that differ only in batch and rate, with the best rate for each batch."""

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
    """Return the value at which the loss first reaches the target, on a line between epochs.

    loss, values: float64[epochs]; NaN if it never does, or does in the first epoch already
    """
    (below,) = np.nonzero(loss <= target)
    if not below.size or below[0] == 0:
        return nan
    i = int(below[0])
    share = (loss[i - 1] - target) / (loss[i - 1] - loss[i])
    return float(values[i - 1] + share * (values[i] - values[i - 1]))


def critical(file: StudyFile, groups: Sequence[SeedGroup]) -> list[Section]:
    """Return the steps to a target by batch and their fit; nothing for one batch."""
    if "steps_done" not in file.training:
        return []
    alike = grouped(groups, lambda group: but(group.factors, FREE))
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
    best, ends = list[Reached](), list[int]()
    for batch, some in sorted(grouped(groups, lambda g: int(g.factors[BATCH])).items()):
        each = [_reached(file, group, target) for group in some]
        known = [one for one in each if np.isfinite(one.steps).all()]
        if not known:
            continue
        best.append(min(known, key=lambda one: float(one.steps.mean())))
        rates = sorted(float(one.group.factors.get(RATE, nan)) for one in each)
        if len(rates) > 1 and float(best[-1].group.factors[RATE]) in (rates[0], rates[-1]):
            ends.append(batch)
    steps = np.concatenate([one.steps for one in best]) if best else np.zeros(0)
    batches = [np.full(len(one.steps), float(one.group.factors[BATCH])) for one in best]
    found = tradeoff(np.concatenate(batches) if best else steps, steps, file.level)
    return Curve(name, target, best, found, ends)


def _target(file: StudyFile, groups: Sequence[SeedGroup]) -> Target:
    """Return the study's target, or the least loss that every batch reaches with some rate."""
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
    unknown = np.full(file.training["test_loss"].shape, nan)  # if trainings have no accuracy
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


def _spread(values: Sequence[Array]) -> tuple[list[float], ...]:
    return tuple([float(of(each)) for each in values] for of in (np.mean, np.min, np.max))


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


@dataclass(frozen=True)
class Score:
    """A metric of trainings. unit: "%" of shares, else ""; lower: whether less is better.

    loss_unit: of the loss
    """

    label: str
    unit: str
    lower: bool
    loss_unit: str

    @classmethod
    def further(cls, toml: str) -> list[Score]:
        """Return the further scores, by the [[metrics]] of a job."""
        count = len(tomllib.loads(toml).get("metrics", []))
        return [cls.of(toml, f"metrics.{i}") for i in range(count)]

    @classmethod
    def of(cls, toml: str, table: str = "metric") -> Score:
        """Return the score by a job, as TOML text; jobs of older versions have an accuracy."""
        from ..train.losses import LOSSES, METRICS

        keys = f"{table}.name", f"{table}.import", f"{table}.better", "loss.name", "loss.import"
        name, imported, better, loss, own_loss = (value_of(toml, key) for key in keys)
        row = LOSSES.get(loss or "cross_entropy")  # None, here and below: not of this version
        unit = "" if own_loss or row is None or row.units == "1" else row.units
        if imported:
            return cls(imported.partition(":")[2], "", better == "lower", unit)
        metric = METRICS.get(name or "accuracy")
        if metric is None:
            return cls(name, "", True, unit)
        given = {key.removeprefix(f"{table}."): value_of(toml, key) for key in keys_of(toml, table)}
        built = metric.model_construct(**given)
        return cls(built.label, "%" if built.percent else "", built.lower, unit)

    @property
    def column(self) -> str:
        return f"test_{self.label}"

    @property
    def factor(self) -> int:
        """Factor of the record's values in tables and figures."""
        return 100 if self.unit else 1

    @property
    def heading(self) -> str:
        return f"{self.label}\n{self.unit}".strip()

    @property
    def points(self) -> str:
        return "points" if self.unit else ""

    def axis(self) -> Axis:
        return Axis(f"test {self.label}" + (f" / {self.unit}" if self.unit else ""))

    def loss_axis(self, values: list[float]) -> Axis:
        """Return an axis of test losses: logarithmic if they are far apart."""
        return spread(
            "test loss" + (f" / {self.loss_unit}" if self.loss_unit else ""), values, "log", 3
        )

    def told(self, values: Array) -> units.Cell:
        """Return the mean, and the standard deviation if there are several values."""
        forms = () if self.unit else (".4g", ".2g")
        return units.with_deviation(values, *forms)

    def difference(self, value: float) -> units.Cell:
        return units.signed(value) if self.unit else units.Cell(f"{value:+.3g}", value=value)

    def gains(self, values: list[float]) -> list[float]:
        """Return values that are better if higher."""
        return [-value for value in values] if self.lower else values

    def near(self, best: float) -> float:
        """Return how far a score may be below the best in a closer look: 2 points, or 2 %."""
        return 2.0 if self.unit else 0.02 * abs(best)


PADDED = (  # a caption of bytes
    " Formats of few bits travel in tiles of 1,024 values, and every layer fills up its last one: "
    "small layers take more than their bits."
)
FRONT = Style(BLACK, "", (0, (2, 2)))


@dataclass(frozen=True)
class Trained:
    """Trainings that differ only in the seed.

    panel: title that it shares with others of a panel; scores: float64[seeds], an accuracy in %
    sent_bytes: mean that the rank that sends most sends in a step; bit_bytes: the same
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
    """Return the score against bytes, if any are sent, and against time; of those with scores.

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


def finding(trained: Sequence[Trained], float32: Collection[str], measure: Score) -> str:
    """Return in a sentence which training sends least with a score near float32's, or the best.

    float32: names of trainings whose gradients are not compressed. Of several panels the last.
    """
    known = [each for each in trained if len(each.scores) and np.isfinite(each.scores).all()]
    if not known:
        return ""
    last = known[-1].panel
    known = [each for each in known if each.panel == last]
    place = f"With {last}: " if len({each.panel for each in trained}) > 1 and last else ""

    def score(one: Trained) -> str:
        return f"{measure.told(one.scores)} {measure.unit}".strip()

    def gain(one: Trained) -> float:
        return measure.gains([float(one.scores.mean())])[0]

    base = next((each for each in known if each.name in float32 and each.sent_bytes > 0), None)
    others = [each for each in known if each.name not in float32]
    if base is None or not others:
        best = max(known, key=gain)
        of = f", of {best.name}" if best.name else ""
        among = f", among {units.count(len(known), 'training')}" if len(known) > 1 else ""
        return f"{place}the best test {measure.label} is {score(best)}{of}{among}."
    allowed, methods = measure.near(gain(base)) / 2, units.count(len(others), "method")
    unit = f" {measure.points.removesuffix('s')}{'s' * (allowed != 1)}" if measure.points else ""
    within = f"within {allowed:.3g}{unit} of float32's test {measure.label} of {score(base)}"
    near = [each for each in others if gain(each) >= gain(base) - allowed]
    if not near:
        best = max(others, key=gain)
        return f"{place}none of {methods} is {within}; {best.name} is nearest, at {score(best)}."
    least = min(near, key=lambda each: (each.sent_bytes, -gain(each)))
    share = units.digits(100 * least.sent_bytes / base.sent_bytes)
    return (
        f"{place}of {methods} {least.name} needs the fewest bytes, {share} % of float32's, to be "
        f"{within}: it reaches {score(least)}."
    )


def _covered(trained: Sequence[Trained]) -> list[str]:
    """Return a note for each point of the chart against bytes whose marker covers others."""
    places = grouped(trained, lambda t: (t.panel, f"{t.sent_bytes:.2g}", f"{t.scores.mean():.3g}"))
    return [
        f"Overlapping markers: {', '.join(each.name for each in some)}."
        for some in places.values()
        if len(some) > 1
    ]


SEEDS = "Mean over seeds; bars: from the least to the greatest of the seeds."
FRONTS = (
    "Pareto front: no other has a mean as good for less; differences within the bars may be chance."
)


def _by_panel(
    trained: Sequence[Trained], draw: Callable[[str, Sequence[Trained]], Panel], measure: Score
) -> list[Panel]:
    """Return a panel for each title, and beside it a closer look at the best if it helps."""
    groups = grouped(trained, lambda each: each.panel)
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
    """Return those with every seed near the best mean; all of them if fewer than two are."""
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
    if len(group) > 1:
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
    """Return the score and the loss of the test by epoch, if they were kept."""
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
    panels = []
    for panel, group in grouped(trained, lambda each: each.panel).items():
        lines = []
        for i, each in enumerate(group):
            apart = max(1, len(each.epochs) // 5)
            values, every = getattr(each, what), (i % apart, apart)
            lines.append(Series(each.name, each.style, each.epochs, values, every=every))
        panels.append(Panel(panel, Axis("epoch", "whole"), y, lines))
    caption = "Mean over seeds after each epoch; markers now and then."
    return Chart(name, title, [caption], caption, panels)

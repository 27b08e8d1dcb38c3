"""Laws of scaling fitted to series, and the work that keeps an efficiency as ranks grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isnan, log2, nan

import numpy as np

from ..study_data.factors import SHAPE, Array
from ..study_data.study_file import StudyFile
from . import units
from .figures import Axis, Chart, Panel, Series, Style, spread, styles
from .points import UNKNOWN, Estimate, Layout, Line, SeedGroup, heading, label, of_factors, varying
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
    NaN where fewer than two points are known, or no point is faster than the base.
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
        """Whether the law can be: misfit is small, and the share can be one, by its interval."""
        return self.misfit <= MISFIT and self.share.low <= 1 and self.share.high >= 0

    def series(self) -> Series:
        """Return the law as a line, which the legend does not name."""
        ratios = np.geomspace(1, self.ratios.max(), 16)
        ranks = ratios * self.line.groups[0].base_points[0].ranks
        plain = Style(self.line.style.color, "")
        return Series("", plain, ranks, self.law.speedup(self.share.value, ratios), join="fit")


def fit(file: StudyFile, line: Line) -> Fit | None:
    """Return the law of the study's scaling fitted to a series, None where it says nothing."""
    law = LAWS.get(file.scaling)
    bases = {tuple(point.index for point in group.base_points) for group in line.groups}
    if law is None or len(bases) != 1 or not line.groups[0].base_points:
        return None
    ratios = np.array([group.ideal for group in line.groups])
    speedups = np.array([group.speedup.value for group in line.groups])
    share = serial_share(law, ratios, speedups, file.level)
    return None if isnan(share.value) else Fit(law, line, share)


def law_table(file: StudyFile, layout: Layout, fits: Sequence[Fit]) -> Table:
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

    works: ascending. NaN also where the least work measured has it already.
    """
    pairs = [(log2(w), e) for w, e in zip(works, efficiencies, strict=True) if e > 0]
    for (x, before), (after_x, after) in pairwise(pairs):
        if before < level <= after:
            return float(2 ** (x + (level - before) / (after - before) * (after_x - x)))
    return nan


@dataclass(frozen=True)
class Place:
    """Points alike in all but the work, and the work for each of LEVELS."""

    group: SeedGroup
    work: tuple[Estimate, ...]


def isoefficiency(file: StudyFile, groups: Sequence[SeedGroup]) -> list[Section]:
    """Return the work that keeps efficiencies as ranks grow; nothing where none is crossed.

    Source: Grama, Gupta, Kumar: Isoefficiency, IEEE Parallel and Distributed Technology 1(3), 1993.
    """
    work = str(file.attributes["work"])
    by_place: dict[frozenset[object], list[SeedGroup]] = {}
    for group in groups if file.scaling == "strong" else ():
        key = frozenset(item for item in group.factors.items() if item[0] != work)
        if work in group.factors and not group.is_base:
            by_place.setdefault(key, []).append(group)
    places = [_place(each, work) for each in by_place.values()]
    found = [place for place in places if not all(isnan(each.value) for each in place.work)]
    if not found:
        return []
    names = varying([place.group.factors for place in found], {*SHAPE, work})
    by = Column[Place]("method", lambda p: label(p.group.factors, names) or units.NONE, False)
    columns: list[Column[Place]] = [
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
    panels: dict[str, list[Place]] = {}
    for place in found:
        panels.setdefault(label(place.group.factors, names), []).append(place)
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


def _work(level: int, place: Place) -> str:
    return units.with_interval(*place.work[level])


def _place(groups: Sequence[SeedGroup], work: str) -> Place:
    alike = sorted(groups, key=lambda group: float(group.factors[work]))
    works = [float(group.factors[work]) for group in alike]
    efficiencies = [group.efficiency for group in alike]
    return Place(
        alike[0],
        tuple(
            Estimate(*(work_for(level, works, [e[i] for e in efficiencies]) for i in (0, 2, 1)))
            for level in LEVELS
        ),
    )


def _lines(places: Sequence[Place]) -> list[Series]:
    ordered = sorted(places, key=lambda place: place.group.ranks)
    found = []
    for i, (name, style) in enumerate(COLOURS.items()):
        known = [place for place in ordered if not isnan(place.work[i].value)]
        value, low, high = ([p.work[i][end] for p in known] for end in range(3))
        ranks = [float(place.group.ranks) for place in known]
        found += [Series(name, style, ranks, value, low, high, "guide")] if known else []
    return found

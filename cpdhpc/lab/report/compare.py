"""Compare a study with a reference, point by point: changes beyond chance and tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ...config import Section as ConfigSection
from ...config import difference, read_toml, validate
from ..study_data.study_file import WALL, Point, ReportError, StudyFile, table_of
from . import units
from .figures import HEIGHT, IDEAL, Axis, Chart, Panel, Series, Style, spread
from .points import Estimate, label, ratio, varying
from .scaling import condition
from .tables import Column, Listed, Report, Section, Table, counted, tabulate, words

Verdict = Literal["slower", "faster", "unknown", "alike"]
COMPUTED = ("error", "wire_bytes", "payload_bytes", "accuracy", "loss")  # not sampled


@dataclass(frozen=True)
class Change:
    """A point that both studies have; times: of the second by the first.

    tolerance: share by which a time may be longer
    metric: of a program, in place of the time; of one that is better when higher times are those of
        the first by the second, so that more is worse; unit: of it; the time's own name has none
    """

    before: Point
    after: Point
    times: Estimate
    tolerance: float = 0.0
    metric: str = ""
    unit: str = ""

    @property
    def verdict(self) -> Verdict:
        """Slower or faster if the interval is beyond the tolerance; unknown without one."""
        if isnan(self.times.low):
            return "unknown"
        if self.times.low > 1 + self.tolerance:
            return "slower"
        return "faster" if self.times.high < 1 / (1 + self.tolerance) else "alike"

    @property
    def change(self) -> Estimate:
        """Additional time of the second, %."""
        return Estimate(*(100 * (each - 1) for each in self.times))


@dataclass(frozen=True)
class Comparison:
    """changes: of points that both have, in the order of the first; the rest by itself.

    shown: changes that are not judged: of the wall time, if a metric is the time
    """

    before: StudyFile
    after: StudyFile
    changes: Sequence[Change]
    shown: Sequence[Change]
    only_before: Sequence[Point]
    only_after: Sequence[Point]

    def having(self, verdict: Verdict) -> list[Change]:
        """Return the changes with a verdict, the greatest first."""
        found = [change for change in self.changes if change.verdict == verdict]
        known = [change for change in found if not isnan(change.times.value)]
        known.sort(key=lambda change: abs(change.times.value - 1), reverse=True)
        return [*known, *(change for change in found if isnan(change.times.value))]


Tolerance = Annotated[float, Field(ge=0)]


class CaseTolerance(ConfigSection):
    """[[case]]: the share by which the times of points may be longer; where: as of report."""

    where: Annotated[tuple[str, ...], Field(strict=False)]
    tolerance: Tolerance


class Reference(ConfigSection):
    """A reference file: the study to compare with, and how much slower another may be.

    study: a path, from the file's directory; tolerance: of points that no case names
    """

    study: str
    tolerance: Tolerance = 0.0
    case: Annotated[tuple[CaseTolerance, ...], Field(strict=False)] = ()

    def of(self, points: Sequence[Point]) -> list[float]:
        """Return each point's tolerance: of the last case that names it. Raises ReportError."""
        factors = [point.factors for point in points]
        found = [self.tolerance] * len(points)
        for case in self.case:
            tests = [condition(text, factors, "[[case]] where") for text in case.where]
            for i, each in enumerate(factors):
                if all(test(each) for test in tests):
                    found[i] = case.tolerance
        return found


def load_reference(path: Path, tolerance: float | None = None) -> Reference:
    """Return the content of a TOML file; a study is a reference without tolerances.

    tolerance: in place of the file's own of all points. Raises UserError.
    """
    given: dict[str, Any] = {} if tolerance is None else {"tolerance": tolerance}
    if path.suffix != ".toml":
        return validate(Reference, {"study": str(path)} | given, f"--tolerance {tolerance}")
    found = validate(Reference, read_toml(path) | given, str(path))
    return found.model_copy(update={"study": str(path.parent / found.study)})


def compare(before: StudyFile, after: StudyFile, reference: Reference | None = None) -> Comparison:
    """Return the differences of the second. Points with the same factors are the same.

    reference: the tolerances, none by default
    Raises ReportError for studies of different kinds, times or levels, or without a common point.
    """
    tolerances = reference.of(before.points) if reference else [0.0] * len(before.points)
    for name in ("kind", "times", "level"):
        values = getattr(before, name), getattr(after, name)
        if values[0] != values[1]:
            verb = "are" if name == "times" else "is"
            raise ReportError(
                f"--compare {before.path} {after.path}: {name} {verb} {values[0]} and {values[1]}"
            )
    there = {frozenset(point.factors.items()): point for point in after.points}
    changes, lost = [], []
    shown = list[Change]()
    for point, tolerance in zip(before.points, tolerances, strict=True):
        other = there.pop(frozenset(point.factors.items()), None)
        if other is None:
            lost.append(point)
        else:
            times = ratio(other.times_s, point.times_s, before.level)
            changes.append(Change(point, other, times, tolerance))
            for change in _of_metrics(before, point, other, tolerance):
                (shown if change.metric == WALL else changes).append(change)
    if not changes:
        raise ReportError(f"--compare {before.path} {after.path}: no point is in both")
    return Comparison(before, after, changes, shown, lost, list(there.values()))


def _of_metrics(file: StudyFile, point: Point, other: Point, tolerance: float) -> Iterator[Change]:
    """Yield the changes of the metrics, but the time, that are better when lower, or higher."""
    for name, row in file.metrics.items():
        if name != file.time and row["better"] and name in point.metrics and name in other.metrics:
            pair = other.metrics[name], point.metrics[name]
            worse = ratio(*(pair if row["better"] == "lower" else pair[::-1]), file.level)
            yield Change(point, other, worse, tolerance, name, row["unit"])


def computed(comparison: Comparison) -> dict[str, list[str]]:
    """Return which outcomes that are no samples differ: name -> point: first, second."""
    found: dict[str, list[str]] = {}
    for change in comparison.changes:
        for name in COMPUTED:
            one, other = (point.outcomes.get(name) for point in (change.before, change.after))
            if one is None or other is None or one == other or (isnan(one) and isnan(other)):
                continue
            shown = ", ".join(units.apart(one, other))
            found.setdefault(name, []).append(f"{change.before.case_id}: {shown}")
    return found


def environments(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the differences of the machines and software: name, first, second."""
    one, other = (_values(file) for file in (comparison.before, comparison.after))
    return [
        (name, one.get(name, ""), other.get(name, ""))
        for name in dict.fromkeys([*one, *other])
        if one.get(name, "") != other.get(name, "")
    ]


def _values(file: StudyFile) -> dict[str, str]:
    """Return the values of all environments of a study, packages one by one."""
    found: dict[str, dict[str, None]] = {}
    for environment in file.environments:
        for name, value in _flat(environment).items():
            found.setdefault(name, {})[value] = None
    return {name: "; ".join(values) for name, values in found.items()}


def _flat(environment: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in environment.items():
        inner = table_of(value)
        whole = {name: value} if inner is None else {}
        found |= whole | {f"{name}: {key}": str(item) for key, item in (inner or {}).items()}
    return found


def asked(comparison: Comparison) -> list[str]:
    """Return the keys in which the studies' texts differ, besides the name."""
    one, other = (str(f.attributes["study"]) for f in (comparison.before, comparison.after))
    keys = ["name"]
    while (key := difference(one, other, keys)) is not None:
        keys.append(key)
    return keys[1:]


MOST = 50  # rows of the figure
FIRST = 3  # slower points that the last line names
ROW = 0.2  # height of one, inches
LOOKS: dict[Verdict, tuple[str, Style]] = {  # in words, and in the figure
    "slower": ("slower", Style("#b3204d", ">")),
    "faster": ("faster", Style("#63b8ee", "<")),
    "unknown": ("no interval: too few repeats", Style("#000000", "x")),
    "alike": ("no change beyond interval and tolerance", Style("#b9bec5", "o")),
}
NOT_JUDGED = "shown only"


def compare_report(comparison: Comparison) -> Report:
    before, after = comparison.before, comparison.after
    counts = [(words, str(len(comparison.having(each)))) for each, (words, _) in LOOKS.items()]
    points = len(comparison.changes)
    has_metrics = any(change.metric for change in comparison.changes)
    chance = f"{points * (1 - before.level):.2g}"
    notes = [
        f"A point changed if the {before.percent} interval of the ratio of its medians lies beyond "
        "1 and its tolerance. The interval takes in those of both medians, each wide enough for "
        "both to hold. "
        f"Were nothing different, {chance} of {units.count(points, 'point')} or fewer would be "
        "called changed by chance on average."
    ]
    if has_metrics:
        notes.append(
            "Metrics count as points of their own. Of one that is better when higher, the ratio is "
            "A's median by B's: longer and slower then mean lower."
        )
    if comparison.shown:
        notes.append(f"{WALL} is shown and not judged, as {before.time} is the time.")
    return Report(
        f"{before.name} and {after.name}" if before.name != after.name else before.name,
        [
            ("found", f"{verdict(comparison)}."),
            ("A", f"{before.path}, {before.attributes.get('date', '')}"),
            ("B", f"{after.path}, {after.attributes.get('date', '')}"),
            ("points in both", str(points)),
            *counts,
        ],
        [
            Section("Changes", notes, [_table(comparison)], [_chart(comparison)]),
            *_environments(comparison),
        ],
        _listed(comparison),
    )


def _name(comparison: Comparison, change: Change, names: Sequence[str]) -> str:
    point = label(change.before.factors, names) or "the point"
    metric = change.metric or comparison.before.time
    return f"{point}: {metric}" if metric else point


def _names(comparison: Comparison) -> list[str]:
    return varying([change.before.factors for change in comparison.changes], ("nodes", "ppn"))


def _table(comparison: Comparison) -> Table:
    names = _names(comparison)
    columns: list[Column[Change]] = [
        Column("point", lambda change: _name(comparison, change, names), numbers=False),
        Column("A: median", lambda change: _medians(change)[0]),
        Column("B: median", lambda change: _medians(change)[1]),
        Column("B longer by\n%", lambda change: units.digits(change.change.value)),
        Column(
            f"{comparison.before.percent} CI",
            lambda change: units.interval(change.change.low, change.change.high),
        ),
        *(
            [Column("tolerance\n%", lambda change: units.digits(100 * change.tolerance))]
            if any(change.tolerance for change in comparison.changes)
            else []
        ),
        Column(
            "",
            lambda change: NOT_JUDGED if change.metric == WALL else LOOKS[change.verdict][0],
            numbers=False,
        ),
    ]
    ordered = [change for verdict in LOOKS for change in comparison.having(verdict)]
    return tabulate("Times of B by times of A", columns, [*ordered, *comparison.shown])


def _medians(change: Change) -> list[units.Cell]:
    """Return both medians in one unit, with digits enough to tell them apart."""
    if change.metric:
        both = (change.before, change.after)
        values = [float(np.median(point.metrics[change.metric])) for point in both]
        unit = "" if change.unit == "1" else f" {change.unit}"
        pairs = zip(units.apart(*values), values, strict=True)
        return [units.Cell(f"{text}{unit}", value=value) for text, value in pairs]
    times_s = change.before.summary["median_s"], change.after.summary["median_s"]
    scale, unit = units.time_unit(times_s[0])
    shown = units.apart(*(time_s / scale for time_s in times_s))
    return [
        units.Cell(f"{text} {unit}", value_s=time_s)
        for text, time_s in zip(shown, times_s, strict=True)
    ]


def verdict(comparison: Comparison) -> str:
    """Return the number of slower points, the first of them, and points without a verdict."""
    slower, names = comparison.having("slower"), _names(comparison)
    counted = f"{len(slower)} of {units.count(len(comparison.changes), 'point')} slower"
    shown = [
        f"{_name(comparison, each, names)} by {units.with_interval(*each.change)} %"
        for each in slower[:FIRST]
    ]
    rest = ["..."] if len(slower) > FIRST else []
    said = f"{counted}: {'; '.join([*shown, *rest])}" if slower else counted
    unsaid = len(comparison.having("unknown")), len(comparison.only_before)
    kinds = ("without an interval", "of the reference missing")
    more = [f"{n} {what}" for n, what in zip(unsaid, kinds, strict=True) if n]
    return f"{said} ({', '.join(more)})" if more else said


def _chart(comparison: Comparison) -> Chart:
    names = _names(comparison)
    ordered = [change for verdict in LOOKS for change in comparison.having(verdict)][:MOST]
    ordered.sort(key=lambda change: -change.times.value)
    series = [_series(ordered, verdict) for verdict in LOOKS]
    series.append(Series("", IDEAL, [1, 1], [-0.6, len(ordered) - 0.4]))
    left = len(comparison.changes) - len(ordered)
    note = f"Ratio of medians; bars: {comparison.before.percent} CI."
    note += f" The {MOST} that changed most; {left} more are in the table." if left else ""
    ends = [end for c in ordered for end in c.times if end > 0]
    x = spread("time of B / time of A", ends, "log", 4, start=None)
    rows = [_name(comparison, change, names) for change in ordered]
    return Chart(
        "changes",
        f"{comparison.before.name}: B by A",
        [note],
        "Right of 1: B takes longer.",
        [Panel("", x, Axis("", names=rows), [each for each in series if each.x])],
        scale=(2.0, max((len(ordered) + 3) * ROW / HEIGHT, 0.4)),
    )


def _series(ordered: Sequence[Change], verdict: Verdict) -> Series:
    rows = [i for i, change in enumerate(ordered) if change.verdict == verdict]
    times = [ordered[i].times for i in rows]
    return Series(
        *LOOKS[verdict],
        [each.value for each in times],
        [float(row) for row in rows],
        join="none",
        x_low=[each.low for each in times],
        x_high=[each.high for each in times],
    )


def _listed(comparison: Comparison) -> list[Listed]:
    found = [
        ("only in A", [point.case_id for point in comparison.only_before]),
        ("only in B", [point.case_id for point in comparison.only_after]),
        *((f"{name} differs (A, B)", items) for name, items in computed(comparison).items()),
    ]
    keys = asked(comparison)
    return counted(found) + ([Listed("the studies differ in", keys)] if keys else [])


def _environments(comparison: Comparison) -> list[Section]:
    rows = environments(comparison)
    if not rows:
        return [Section("Environments", ["Nothing that the files say of them differs."])]
    return [Section("Environments", tables=[Table("What differs", words("", "A", "B"), rows)])]

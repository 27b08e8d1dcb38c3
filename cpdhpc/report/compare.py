"""Two studies beside one another, point by point: what changed by more than chance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal

from ..config import difference
from ..study.study_file import Point, ReportError, StudyFile
from . import units
from .figures import HEIGHT, IDEAL, Axis, Chart, Panel, Series, Style, spread
from .points import Estimate, label, ratio, varying
from .tables import Column, Listed, Report, Section, Table, tabulate, words

Verdict = Literal["slower", "faster", "unknown", "alike"]
VERDICTS: tuple[Verdict, ...] = ("slower", "faster", "unknown", "alike")
COMPUTED = ("error", "wire_bytes", "payload_bytes", "accuracy", "loss")  # not sampled


@dataclass(frozen=True)
class Change:
    """A point that both studies have; times: of the second by the first."""

    before: Point
    after: Point
    times: Estimate

    @property
    def verdict(self) -> Verdict:
        """Whether the interval of the ratio lies on one side of 1; unknown where there is none."""
        if isnan(self.times.low):
            return "unknown"
        if self.times.low > 1:
            return "slower"
        return "faster" if self.times.high < 1 else "alike"


@dataclass(frozen=True)
class Comparison:
    """changes: of points that both have, in the order of the first; the rest by itself."""

    before: StudyFile
    after: StudyFile
    changes: Sequence[Change]
    only_before: Sequence[Point]
    only_after: Sequence[Point]

    def having(self, verdict: Verdict) -> list[Change]:
        """Return the changes with a verdict, the greatest first."""
        found = [change for change in self.changes if change.verdict == verdict]
        known = [change for change in found if not isnan(change.times.value)]
        known.sort(key=lambda change: abs(change.times.value - 1), reverse=True)
        return [*known, *(change for change in found if isnan(change.times.value))]


def compare(before: StudyFile, after: StudyFile) -> Comparison:
    """Return what is different in the second. Points are the same whose factors are.

    Raises ReportError for studies of different kinds or levels, or without a common point.
    """
    for name in ("kind", "level"):
        values = getattr(before, name), getattr(after, name)
        if values[0] != values[1]:
            raise ReportError(
                f"--compare {before.path} {after.path}: {name} is {values[0]} and {values[1]}"
            )
    there = {frozenset(point.factors.items()): point for point in after.points}
    changes, lost = [], []
    for point in before.points:
        other = there.pop(frozenset(point.factors.items()), None)
        if other is None:
            lost.append(point)
        else:
            times = ratio(other.times_s, point.times_s, before.level)
            changes.append(Change(point, other, times))
    if not changes:
        raise ReportError(f"--compare {before.path} {after.path}: no point is in both")
    return Comparison(before, after, changes, lost, list(there.values()))


def computed(comparison: Comparison) -> dict[str, list[str]]:
    """Return which outcomes that are no samples differ: name -> point: first, second."""
    found: dict[str, list[str]] = {}
    for change in comparison.changes:
        for name in COMPUTED:
            one, other = (point.outcomes.get(name) for point in (change.before, change.after))
            if one is None or other is None or one == other or (isnan(one) and isnan(other)):
                continue
            found.setdefault(name, []).append(f"{change.before.case_id}: {one:g}, {other:g}")
    return found


def environments(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return what differs of where the studies were measured: name, first, second."""
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
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        inner = parsed if isinstance(parsed, dict) else {}
        found |= {f"{name}: {key}": str(item) for key, item in inner.items()}
        if not isinstance(parsed, dict):
            found[name] = value
    return found


def asked(comparison: Comparison) -> list[str]:
    """Return the keys in which the studies' texts differ, besides the name."""
    one, other = (str(f.attributes["study"]) for f in (comparison.before, comparison.after))
    keys = ["name"]
    while (key := difference(one, other, keys)) is not None:
        keys.append(key)
    return keys[1:]


MOST = 50  # rows of the figure
ROW = 0.2  # height of one, inches
STYLES: dict[Verdict, Style] = {
    "slower": Style("#b3204d", ">"),
    "faster": Style("#63b8ee", "<"),
    "unknown": Style("#000000", "x"),
    "alike": Style("#b9bec5", "o"),
}
SAID: dict[Verdict, str] = {
    "slower": "slower",
    "faster": "faster",
    "unknown": "no interval: too few repeats",
    "alike": "no change beyond the intervals",
}


def compare_report(comparison: Comparison) -> Report:
    """Return the report of a comparison."""
    before, after = comparison.before, comparison.after
    counts = {verdict: len(comparison.having(verdict)) for verdict in VERDICTS}
    points = len(comparison.changes)
    chance = f"{points * (1 - before.level):.2g}"
    notes = [
        f"A point changed if the {before.percent} interval of the ratio of its medians does not "
        "hold 1: the intervals of both medians, each wide enough for both to hold, do not overlap. "
        f"Were nothing different, {chance} of {units.count(points, 'point')} or fewer would be "
        "called changed by chance on average."
    ]
    return Report(
        f"{before.name} and {after.name}" if before.name != after.name else before.name,
        [
            ("A", f"{before.path}, {before.attributes.get('date', '')}"),
            ("B", f"{after.path}, {after.attributes.get('date', '')}"),
            ("points in both", str(points)),
            *((SAID[verdict], str(count)) for verdict, count in counts.items()),
        ],
        [
            Section("Changes", notes, [_table(comparison)], [_chart(comparison)]),
            *_environments(comparison),
        ],
        _listed(comparison),
    )


def _name(change: Change, names: Sequence[str]) -> str:
    return label(change.before.factors, names) or "the point"


def _names(comparison: Comparison) -> list[str]:
    return varying([change.before.factors for change in comparison.changes], ("nodes", "ppn"))


def _table(comparison: Comparison) -> Table:
    names = _names(comparison)
    columns: list[Column[Change]] = [
        Column("point", lambda change: _name(change, names), numbers=False),
        Column("A: median", lambda change: units.time(change.before.summary["median_s"])),
        Column("B: median", lambda change: units.time(change.after.summary["median_s"])),
        Column("B / A", lambda change: units.digits(change.times.value)),
        Column(
            f"{comparison.before.percent} CI",
            lambda change: units.interval(change.times.low, change.times.high),
        ),
        Column("", lambda change: SAID[change.verdict], numbers=False),
    ]
    ordered = [change for verdict in VERDICTS for change in comparison.having(verdict)]
    return tabulate("Times of B by times of A", columns, ordered)


def _chart(comparison: Comparison) -> Chart:
    names = _names(comparison)
    ordered = [change for verdict in VERDICTS for change in comparison.having(verdict)][:MOST]
    ordered.sort(key=lambda change: -change.times.value)
    series = [_series(ordered, verdict) for verdict in VERDICTS]
    series.append(Series("", IDEAL, [1, 1], [-0.6, len(ordered) - 0.4]))
    left = len(comparison.changes) - len(ordered)
    note = f"Ratio of medians; bars: {comparison.before.percent} CI."
    note += f" The {MOST} that changed most; {left} more are in the table." if left else ""
    ends = [end for c in ordered for end in c.times if end > 0]
    x = spread("time of B / time of A", ends, "log", 4, start=None)
    rows = [_name(change, names) for change in ordered]
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
        SAID[verdict],
        STYLES[verdict],
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
    listed = [
        Listed(f"{what}, {units.count(len(items), 'point')}", items)
        for what, items in found
        if items
    ]
    keys = asked(comparison)
    return listed + ([Listed("the studies differ in", keys)] if keys else [])


def _environments(comparison: Comparison) -> list[Section]:
    rows = environments(comparison)
    if not rows:
        return [Section("Environments", ["Nothing that the files say of them differs."])]
    return [Section("Environments", tables=[Table("What differs", words("", "A", "B"), rows)])]

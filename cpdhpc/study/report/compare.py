"""Two studies point by point: what changed by more than chance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal

from ...config import difference
from .pool import Estimate, ratio
from .study_file import Point, ReportError, StudyFile

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
        return sorted(found, key=lambda change: abs(change.times.value - 1), reverse=True)


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

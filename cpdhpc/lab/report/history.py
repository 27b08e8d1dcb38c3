"""A study over days and commits: a library of its files by system, a table and a figure of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan
from pathlib import Path

from ..schedulers import SCHEDULERS
from ..study_data.study_file import Point, ReportError, StudyFile, load_study_file, table_of
from . import units
from .figures import Axis, Chart, Panel, Series, spread, styles
from .points import UNKNOWN, Estimate, label, median, ratio, varying
from .tables import Column, Report, Section, Table, slug, tabulate

TIME = "time"
CLUSTERS = [each.CLUSTER for each in SCHEDULERS.values() if each.CLUSTER]
MOST = 11  # points of a figure: those that changed most
SHORT = 9  # digits of a commit


def system(file: StudyFile) -> str:
    """Return the cluster of a study, or its processor, as the name of a folder."""
    for environment in file.environments:
        for text in environment.values():
            named = table_of(text) or {}
            if found := next((named[name] for name in CLUSTERS if named.get(name)), ""):
                return slug(str(found))
    return slug(next((e["processor"] for e in file.environments if e.get("processor")), "unknown"))


def commit(file: StudyFile) -> str:
    """Return the commit that was measured, shortened; "" if it is not known or not one."""
    found = {e.get("git_commit", "") for e in file.environments}
    return found.pop()[:SHORT] if len(found) == 1 else ""


def date(file: StudyFile) -> str:
    """Return when the study file was written, ISO 8601, UTC."""
    return str(file.attributes.get("date", ""))


def place(library: Path, file: StudyFile) -> Path:
    """Return the path of a study in a library: LIBRARY/STUDY/SYSTEM/DATE-COMMIT.h5."""
    when = date(file).replace(":", "").replace("+0000", "Z") or "undated"
    name = "-".join(filter(None, [when, commit(file)]))
    return library / slug(file.name) / system(file) / f"{name}.h5"


def latest(library: Path, file: StudyFile) -> Path:
    """Return the last file of a library, before this one, of its study and system.

    Raises ReportError if there is none.
    """
    own = place(library, file)
    before = sorted(path for path in own.parent.glob("*.h5") if path.name < own.name)
    if not before:
        raise ReportError(
            f"--compare {library}: has no {file.name} of {system(file)} before {date(file)}: "
            f"report {file.path} --keep {library} puts this one there"
        )
    return before[-1]


@dataclass(frozen=True)
class HistoryPoint:
    """A point in one of the files, or none; by: times of the file before, NaN without one."""

    file: StudyFile
    point: Point | None
    value: Estimate
    by: Estimate


def history_report(files: Sequence[StudyFile], metric: str = TIME) -> Report:
    """Return the report of files of one study on one system, the oldest first.

    metric: time, or the name of a metric of a program or of an outcome
    Raises ReportError for fewer than two files, files of several studies or kinds, a metric that
    none has.
    """
    files = sorted(files, key=date)
    _check(files)
    rows = _rows(files, metric)
    unit = "s" if metric == TIME else ""
    factors = {frozenset(p.factors.items()): p.factors for file in files for p in file.points}
    names = varying([*factors.values()], ("nodes", "ppn"))
    shown = {label(factors[key], names) or "the point": stages for key, stages in rows.items()}
    heads = _heads(files)
    last = {name: stages[-1] for name, stages in shown.items()}
    slower = [name for name, each in last.items() if each.by.low > 1]
    faster = [name for name, each in last.items() if each.by.high < 1]
    finding = (
        f"{files[-1].name}, {heads[-1]}: {len(slower)} of {units.count(len(shown), 'point')} "
        f"{'slower' if metric == TIME else 'larger'} and {len(faster)} "
        f"{'faster' if metric == TIME else 'smaller'} than the last time, by more than chance."
    )
    note = (
        "A change is between a file and the one before, and counts if its interval does not hold 1."
    )
    return Report(
        f"{files[-1].name} on {system(files[-1])}",
        [("found", finding), ("files", f"{len(files)}, {heads[0]} to {heads[-1]}")],
        [
            Section(
                "History",
                [note],
                [_table(shown, heads, metric)],
                [_chart(files, shown, heads, metric, unit)],
            )
        ],
    )


def _heads(files: Sequence[StudyFile]) -> list[str]:
    """Return names of files: day and commit, with the time of day if two were the same."""
    for digits in (10, 16, 19):  # of 2026-11-01T10:00:00
        heads = [" ".join(filter(None, [*date(f)[:digits].split("T"), commit(f)])) for f in files]
        if len(set(heads)) == len(heads):
            break
    return heads


def _check(files: Sequence[StudyFile]) -> None:
    if len(files) < 2:
        raise ReportError(f"--history: needs two files of a study or more; came {len(files)}")
    for what, values in (
        ("names", {file.name for file in files}),
        ("kinds", {file.kind for file in files}),
        ("systems", {system(file) for file in files}),
    ):
        if len(values) > 1:
            raise ReportError(f"--history: files of several {what}: {', '.join(sorted(values))}")


Key = frozenset[tuple[str, int | float | str]]  # the factors of a point


def _rows(files: Sequence[StudyFile], metric: str) -> dict[Key, list[HistoryPoint]]:
    """Return the stages of each point, by its factors, a stage for each file."""
    every = [{frozenset(p.factors.items()): p for p in file.points} for file in files]
    rows: dict[Key, list[HistoryPoint]] = {}
    for factors in dict.fromkeys(each for points in every for each in points):
        before: Point | None = None
        for file, points in zip(files, every, strict=True):
            point = points.get(factors)
            by = UNKNOWN
            if point is not None and before is not None:
                by = _by(metric, before, point, file.level)
            rows.setdefault(factors, []).append(
                HistoryPoint(file, point, _value(metric, point, file.level), by)
            )
            before = point or before
    if all(isnan(stage.value.value) for stages in rows.values() for stage in stages):
        known = sorted(
            {name for f in files for p in f.points for name in (*p.metrics, *p.outcomes)}
        )
        raise ReportError(f"--history {metric}: no file has it; known are {', '.join(known)}, time")
    return rows


def _value(metric: str, point: Point | None, level: float) -> Estimate:
    if point is None:
        return UNKNOWN
    if metric == TIME:
        return Estimate(*(point.summary[f"{name}_s"] for name in ("median", "ci_low", "ci_high")))
    if metric in point.metrics:
        return median(point.metrics[metric], level)
    value = point.outcomes.get(metric, nan)
    return Estimate(value, value, value)


def _by(metric: str, before: Point, after: Point, level: float) -> Estimate:
    if metric == TIME:
        return ratio(after.times_s, before.times_s, level)
    if metric in before.metrics and metric in after.metrics:
        return ratio(after.metrics[metric], before.metrics[metric], level)
    one, other = before.outcomes.get(metric, nan), after.outcomes.get(metric, nan)
    by = other / one if one else nan
    return Estimate(by, by, by)


def _table(shown: Mapping[str, Sequence[HistoryPoint]], heads: Sequence[str], metric: str) -> Table:
    def cell(at: int, row: tuple[str, Sequence[HistoryPoint]]) -> str:
        stages = row[1]
        value = stages[at].value.value
        text = units.time(value) if metric == TIME else units.digits(value)
        by = stages[at].by
        mark = "" if isnan(by.low) or by.low <= 1 <= by.high else " (+)" if by.low > 1 else " (-)"
        return f"{text}{mark}" if mark else text

    columns: list[Column[tuple[str, Sequence[HistoryPoint]]]] = [
        Column("point", lambda row: row[0], numbers=False),
        *(Column(head.replace(" ", "\n"), partial(cell, at)) for at, head in enumerate(heads)),
    ]
    caption = f"{metric}; (+): larger than before, (-): smaller, by more than chance"
    return tabulate("Over days and commits", columns, shown.items(), caption)


def _chart(
    files: Sequence[StudyFile],
    shown: Mapping[str, Sequence[HistoryPoint]],
    heads: Sequence[str],
    metric: str,
    unit: str,
) -> Chart:
    """Return the figure: each point by its first value, so that all have one axis."""
    several = [n for n in shown if sum(not isnan(s.value.value) for s in shown[n]) > 1] or shown
    chosen = sorted(several, key=lambda name: -_most(shown[name]))[:MOST]
    look = styles(shown)
    series = [_series(name, shown[name], look[name]) for name in shown if name in chosen]
    ends = [value for each in series for value in (*each.y, *(each.high or [])) if value > 0]
    left = len(shown) - len(chosen)
    notes = [f"{metric.capitalize()} of each point over that of the first file that has the point."]
    notes += [f"The {len(chosen)} points that changed most; {left} more are in the table."] * bool(
        left
    )
    return Chart(
        "history",
        f"{files[-1].name}: {metric} over days and commits",
        notes,
        "Above 1: more than at first.",
        [Panel("", Axis("", names=heads), spread(f"{metric} / first", ends, start=None), series)],
        scale=(1.6, 1.0),
    )


def _relative(stages: Sequence[HistoryPoint]) -> list[Estimate]:
    first = next((s.value.value for s in stages if s.value.value > 0), nan)
    return [Estimate(*(value / first for value in stage.value)) for stage in stages]


def _most(stages: Sequence[HistoryPoint]) -> float:
    return max(
        (abs(each.value - 1) for each in _relative(stages) if not isnan(each.value)), default=0.0
    )


def _series(name: str, stages: Sequence[HistoryPoint], style: object) -> Series:
    known = [(i, each) for i, each in enumerate(_relative(stages)) if not isnan(each.value)]
    return Series(
        name,
        style,  # type: ignore[arg-type]
        [float(i) for i, _ in known],
        [each.value for _, each in known],
        [each.low for _, each in known],
        [each.high for _, each in known],
        join="guide",
    )


def load_history(paths: Sequence[Path]) -> list[StudyFile]:
    """Return the studies of files, and of all files below folders. Raises UserError."""
    found = [f for path in paths for f in (sorted(path.rglob("*.h5")) if path.is_dir() else [path])]
    if not found:
        raise ReportError(f"--history: no file below {', '.join(map(str, paths))}")
    return [load_study_file(path) for path in found]

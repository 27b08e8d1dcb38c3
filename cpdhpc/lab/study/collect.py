"""From the files of cases to the study file: labelled arrays of all cases, with speed-ups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import store
from ..._version import __version__
from ...store import StoreError, Variable
from ..schedulers.base import Scheduler
from ..study_data import SHAPE, Array, Case, Factor, Result, Value
from ..study_data.statistics import ratio_intervals, summarise
from ..study_data.study_file import (
    FURTHER,
    METRIC,
    NO_INTEGER,
    OPTIONAL,
    OUTCOMES,
    SAME_FOR_ALL,
    SCHEMA,
    SERIES,
    WALL,
    read_result,
)
from .cases import SAME, base_factors, expand
from .folder import Folder, FolderError
from .spec import Study
from .submit import kept_site


@dataclass(frozen=True)
class Base:
    """The rule that finds base points.

    named: factors of base points; free: factors in which a point may differ from its base
    work: the factor that is the size of the problem
    """

    named: Mapping[str, Value]
    free: frozenset[str]
    work: str

    @classmethod
    def of(cls, study: Study) -> Base:
        work = study.of_kind.work
        same = study.base.get("ranks") == SAME
        named = base_factors(study)
        free = {"throughput": {work}, "weak": {*SHAPE, *study.weak}, "strong": {*SHAPE}}
        varies = set() if same else free[study.scaling]
        shape = SHAPE if named.keys() & SHAPE.keys() else ()
        return cls(named, frozenset({*varies, *named, *shape}), work)

    def points(self, cases: Sequence[Case]) -> npt.NDArray[np.int64]:
        """Return the index of each case's base among cases, -1 for none.

        The base agrees with the case in all factors that are not free, and has those that are
        named. Among several it has the fewest ranks, then the least work.
        """
        tables: dict[tuple[str, ...], dict[tuple[Value, ...], int]] = {}
        for index in sorted(range(len(cases)), key=lambda i: self._size(cases[i])):
            factors = cases[index].all_factors
            if any(factors.get(name) != value for name, value in self.named.items()):
                continue
            names = tuple(sorted(factors.keys() - self.free))
            values = tuple(factors[name] for name in names)
            tables.setdefault(names, {}).setdefault(values, index)
        return np.array([self._find(tables, case) for case in cases], np.int64)

    def _find(
        self, tables: Mapping[tuple[str, ...], Mapping[tuple[Value, ...], int]], case: Case
    ) -> int:
        """Return a case's base, -1 for none; a named base need not use all factors of the case."""
        factors = case.all_factors
        own = {name for name in factors if name not in self.free}
        for names, table in sorted(tables.items(), key=lambda item: -len(item[0])):
            if not own.issuperset(names) or not (self.named or own == set(names)):
                continue
            index = table.get(tuple(factors[name] for name in names))
            if index is not None:
                return index
        return -1

    def _size(self, case: Case) -> tuple[int, float]:
        return case.ranks, float(case.factors.get(self.work, 0))

    def work_ratio(self, cases: Sequence[Case], base: npt.NDArray[np.int64]) -> list[float]:
        """Return each case's work over that of its base: 1: the same problem, NaN: no base."""
        works = [float(case.factors.get(self.work, 1)) for case in cases]
        return [
            work / works[index] if index >= 0 else float("nan")
            for work, index in zip(works, base, strict=True)
        ]

    def __str__(self) -> str:
        named = " and ".join(f"{name} = {value}" for name, value in self.named.items())
        free = self.free - self.named.keys()
        same = "otherwise the same settings" if named else "same settings"
        fewest = "fewest ranks" if free & SHAPE.keys() else ""
        least = f"least {self.work}" if self.work in free else ""
        return ", ".join(filter(None, [named, same, fewest, least]))


Points = Sequence[tuple[Case, Result]]
Variables = dict[str, Variable]
BY = ("point",)
MISSING: dict[type, Any] = {str: "", int: -1, float: np.nan, bool: -1}
OF_FACTORS = MISSING | {int: NO_INTEGER}  # a factor of a user may be -1
DTYPES: dict[type, Any] = {str: str, int: np.int64, float: np.float64, bool: np.int8}
SUMMARY = {  # column: long name; all but n in seconds
    "n": "repeats that count, without warm-ups",
    "median_s": "median over repeats of the slowest rank's time",
    "ci_low_s": "lower end of the rank-based interval of the median; NaN: too few repeats",
    "ci_high_s": "upper end of the rank-based interval of the median; NaN: too few repeats",
    "mean_s": "mean",
    "std_s": "sample standard deviation",
    "min_s": "least",
    "max_s": "greatest",
    "p95_s": "95th percentile",
    "p99_s": "99th percentile",
}
IDEAL = {  # scaling: what efficiency is
    "strong": "speed-up over the ratio of ranks",
    "weak": "speed-up over the ratio of ranks; the work grows with them",
    "throughput": "ratio of work per time, over the ratio of ranks",
}


def write_study(
    path: Path,
    study: Study,
    points: Points,
    missing: int = 0,
    of_benchmark: Mapping[str, Factor] | None = None,
) -> None:
    """Write a study file, see docs/reference/hdf5.md, from finished cases.

    missing: number of other cases of the study
    of_benchmark: factors that the kind does not have, if a benchmark made the points
    Raises StoreError if the file cannot be written, ValueError if there is no point.
    """
    if not points:
        raise ValueError("write_study: points: must be one or more")
    points = with_differences(points)
    environments = list(dict.fromkeys(_text(result.environment) for _, result in points))
    known = dict(study.factors) | dict(of_benchmark or {})
    samples = _samples(known, points, environments)
    groups = {
        "samples": samples,
        "summary": _summary(study, points, samples),
        "environment": _environment(environments),
    }
    for name in study.of_kind.groups:
        if any(name in result.series for _, result in points):
            groups[name] = SERIES_OF[name](points)
    for name in dict.fromkeys(name for _, result in points for name in result.series):
        if name.startswith(METRIC):
            groups[name] = _metric(study, name, points)
    of_summary = {
        "ci_level": study.measure.confidence,
        "base": str(Base.of(study)),
        "title": "medians over repeats, with intervals",
    }
    attributes = _attributes(study, missing) | {"benchmark": int(of_benchmark is not None)}
    store.write(path, groups, attributes, {"summary": of_summary})


def with_differences(points: Points) -> Points:
    """Return points with those of SAME_FOR_ALL in which they differ as factors.

    So no speed-up is across two libraries, commits or processors.
    """
    apart = [name for name in SAME_FOR_ALL if len({r.environment.get(name) for _, r in points}) > 1]
    if not apart:
        return points
    return [
        (replace(case, factors={**case.factors, **_known(result, apart)}), result)
        for case, result in points
    ]


def _known(result: Result, names: Sequence[str]) -> dict[str, Value]:
    return {name: result.environment.get(name) or "unknown" for name in names}


def _attributes(study: Study, missing: int) -> dict[str, str | int]:
    return {
        "Conventions": "CF-1.11",
        "cpdhpc_schema": SCHEMA,
        "title": f"{study.name}: {study.scaling} scaling, {study.kind}",
        "software": "cpdhpc",
        "software_version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "kind": study.kind,
        "name": study.name,
        "scaling": study.scaling,
        "work": study.of_kind.work,
        "sample": study.of_kind.sample,
        "study": study.toml(),
        "study_hash": study.hash,
        "missing": missing,
        "missing_integer": NO_INTEGER,
        "status": "partial" if missing else "complete",
    }


def _text(environment: Any) -> str:
    return json.dumps(dict(environment), sort_keys=True)


def _point(points: Points) -> Variable:
    return Variable(BY, np.arange(len(points)), "point, in the order of the sweep")


def _samples(factors: Mapping[str, Factor], points: Points, environments: list[str]) -> Variables:
    repeats = max(len(result.times_s) for _, result in points)
    times_s = np.full((len(points), repeats, 3), np.nan)
    is_warmup = np.zeros((len(points), repeats), np.uint8)
    for index, (_, result) in enumerate(points):
        times_s[index, : len(result.times_s)] = result.times_s
        is_warmup[index, : len(result.is_warmup)] = result.is_warmup
    both = (*BY, "repeat")
    flags = {"flag_values": np.array([0, 1], np.uint8), "flag_meanings": "counts warm_up"}
    of = "time of a repeat; NaN: fewer repeats were needed; over ranks: "
    order = {text: index for index, text in enumerate(environments)}
    indexes = [order[_text(result.environment)] for _, result in points]
    return {
        "point": _point(points),
        "repeat": Variable(("repeat",), np.arange(repeats), "repeat, warm-ups included"),
        "case_id": Variable(BY, [case.id for case, _ in points], "id of the case"),
        **_factors(factors, points),
        "time_s": Variable(both, times_s[:, :, 0], of + "the slowest", "s"),
        "min_rank_time_s": Variable(both, times_s[:, :, 1], of + "the fastest", "s"),
        "mean_rank_time_s": Variable(both, times_s[:, :, 2], of + "the mean", "s"),
        "is_warmup": Variable(both, is_warmup, "whether it is a warm-up", "1", flags),
        **_outcomes(points),
        "environment": Variable(BY, indexes, "index into the group environment"),
    }


def _factors(factors: Mapping[str, Factor], points: Points) -> Variables:
    """Return the shape, and every factor that a point uses."""
    used = {name for case, _ in points for name in case.all_factors}
    known = {**SHAPE, **factors, **{k: Factor(text, str) for k, text in SAME_FOR_ALL.items()}}
    return {
        name: Variable(
            BY,
            _column(factor.type, [case.all_factors.get(name) for case, _ in points], OF_FACTORS),
            factor.long_name,
            factor.units,
        )
        for name, factor in known.items()
        if name in used
    }


def _column(kind: type, values: list[Any], without: Mapping[type, Any] = MISSING) -> Array:
    missing = without[kind]
    return np.array([missing if value is None else value for value in values], DTYPES[kind])


def _outcomes(points: Points) -> Variables:
    named = {n: None for _, result in points for n in result.outcomes if n.startswith(FURTHER)}
    further = {name: (float, "test score at the end by a further metric", "1") for name in named}
    return {
        name: Variable(
            BY, _column(kind, [result.outcomes.get(name) for _, result in points]), text, units
        )
        for name, (kind, text, units) in (OUTCOMES | further).items()
        if name not in OPTIONAL or any(name in result.outcomes for _, result in points)
    }


def _summary(study: Study, points: Points, samples: Variables) -> Variables:
    """Return medians, intervals and speed-ups of the repeats without warm-ups."""
    counted = np.where(samples["is_warmup"].data == 0, samples["time_s"].data, np.nan)
    columns = summarise(counted, study.measure.confidence)
    cases, rule = [case for case, _ in points], Base.of(study)
    base = rule.points(cases)
    work = np.array(rule.work_ratio(cases, base))
    ratios = ratio_intervals(counted, base, study.measure.confidence)
    ranks = np.array([case.ranks for case in cases])
    ideal = np.where(base >= 0, ranks / ranks[base], np.nan)
    speedup, low, high = (work * ratio for ratio in ratios)
    what = "work per time over that of the base point; NaN: there is none"
    return {
        "point": _point(points),
        **{
            name: Variable(BY, columns[name], text, "1" if name == "n" else "s")
            for name, text in SUMMARY.items()
        },
        "speedup": Variable(BY, speedup, what),
        "speedup_low": Variable(BY, low, "lower end of the interval of speedup"),
        "speedup_high": Variable(BY, high, "upper end of the interval of speedup"),
        "efficiency": Variable(BY, speedup / ideal, IDEAL[study.scaling]),
        "base_point": Variable(BY, base, "index of the base point; -1: none"),
    }


def _environment(environments: list[str]) -> Variables:
    by, parsed = ("environment",), [json.loads(text) for text in environments]
    names = list(dict.fromkeys(name for each in parsed for name in each))
    return {
        "environment": Variable(by, np.arange(len(parsed)), "where cases were measured"),
        **{
            name: Variable(by, [str(each.get(name, "")) for each in parsed], name.replace("_", " "))
            for name in names
        },
    }


def _training(points: Points) -> Variables:
    series = [result.series.get("training", {}) for _, result in points]
    epochs = max(len(each["epoch"]) for each in series if each)
    found: Variables = {
        "point": _point(points),
        "epoch": Variable(("epoch",), np.arange(1, epochs + 1), "epoch, from 1"),
    }
    for name, (text, units) in SERIES["training"].items():
        if name in OPTIONAL and not any(name in each for each in series):
            continue
        data = np.full((len(points), epochs), np.nan)
        for index, each in enumerate(series):
            if name in each:  # files of older versions do not have all
                data[index, : len(each[name])] = each[name]
        found[name] = Variable((*BY, "epoch"), data, text, units)
    return found


def _telemetry(points: Points) -> Variables:
    """Return the telemetry of all points, whose layers may differ."""
    series = [result.series.get("telemetry", {}) for _, result in points]
    layers = list(dict.fromkeys(str(name) for each in series if each for name in each["layer"]))
    samples = max(len(each["iteration"]) for each in series if each)
    iteration = np.full((len(points), samples), -1, np.int64)
    data = {
        name: np.full((len(points), samples, len(layers)), np.nan) for name in SERIES["telemetry"]
    }
    for index, each in enumerate(series):
        if not each:
            continue
        rows = slice(len(each["iteration"]))
        columns = [layers.index(str(name)) for name in each["layer"]]
        iteration[index, rows] = each["iteration"]
        for name, values in data.items():
            values[index, rows, columns] = each[name].T
    by = (*BY, "sample", "layer")
    return {
        "point": _point(points),
        "sample": Variable(("sample",), np.arange(samples), "observation of a step"),
        "layer": Variable(("layer",), np.array(layers), "parameter tensor"),
        "iteration": Variable(by[:2], iteration, "iteration observed, from 0; -1: none"),
        **{name: Variable(by, values, *SERIES["telemetry"][name]) for name, values in data.items()},
    }


def _metric(study: Study, group: str, points: Points) -> Variables:
    """Return the samples of a metric of programs, and their medians, as ragged arrays of CF."""
    name = group.removeprefix(METRIC)
    asked = study.job.get("metrics", {}).get(name, {"unit": "s", "better": "lower"})
    unit, better = str(asked["unit"]), str(asked["better"])
    series = [result.series.get(group, NO_SAMPLES) for _, result in points]
    value, run, is_warmup = (
        np.concatenate([each[column] for each in series])
        for column in ("value", "run", "is_warmup")
    )
    index = np.repeat(np.arange(len(points)), [len(each["value"]) for each in series])
    counted = [each["value"][each["is_warmup"] == 0] for each in series]
    rows = np.full((len(points), max(map(len, counted), default=0)), np.nan)
    for row, each in zip(rows, counted, strict=True):
        row[: len(each)] = each
    columns, of = summarise(rows, study.measure.confidence), ("sample",)
    notes = {"instance_dimension": "point"}  # CF: indexed ragged array
    return {
        "point": _point(points),
        "sample": Variable(of, np.arange(len(value)), "sample, of all points one after the other"),
        "point_index": Variable(of, index, "index of the sample's point", "1", notes),
        "value": Variable(of, value, name, unit, {"better": better}),
        "run": Variable(of, run, "run of the program that gave it, from 0, warm-ups included"),
        "is_warmup": Variable(of, is_warmup, "whether the run is a warm-up"),
        **{
            column: Variable(BY, columns[of_time], text, "1" if column == "n" else unit)
            for column, (of_time, text) in OF_METRIC.items()
        },
    }


NO_SAMPLES: Mapping[str, Array] = {
    "value": np.empty(0),
    "run": np.empty(0, np.int64),
    "is_warmup": np.empty(0, np.uint8),
}
OF_METRIC = {  # column: that of summarise, long name
    "n": ("n", "samples that count, without warm-ups"),
    "median": ("median_s", "median over samples"),
    "ci_low": ("ci_low_s", "lower end of the rank-based interval of the median; NaN: too few"),
    "ci_high": ("ci_high_s", "upper end of the rank-based interval of the median; NaN: too few"),
}
SERIES_OF = {"training": _training, "telemetry": _telemetry}


@dataclass(frozen=True)
class FolderCases:
    """The cases of a folder. rejected: files that are left out, each with the reason."""

    results: list[tuple[Case, Result]]
    missing: list[Case]
    rejected: Mapping[str, str]


def collect(study: Study, folder: Folder) -> FolderCases:
    """Write the study file of a folder, and print which cases it has and which are left out.

    No other file is deleted or changed. Raises FolderError if no case is finished, StoreError if
    the file cannot be written.
    """
    found = find(folder, expand(study).cases)
    for name, reason in found.rejected.items():
        print(f"left out: {name}: {reason}")
    if not found.results:
        raise FolderError(f"{folder.cases}: no case of study {study.name} is finished")
    results = with_energy(found.results, kept_site(folder).by)
    write_study(folder.study_file, study, results, len(found.missing))
    for name in SAME_FOR_ALL:
        values = {_known(result, [name])[name] for _, result in found.results}
        if len(values) > 1:
            print(f"{name} is a factor, as the cases differ in it: {', '.join(map(str, values))}")
    total = len(found.results) + len(found.missing)
    print(f"{folder.study_file}: {len(found.results)} of {total} cases")
    return found


def with_energy(points: Points, by: Scheduler) -> Points:
    """Return points with the energy of a repeat by the scheduler, if no counter was read.

    It is the mean power of the point's job times the mean time of a repeat: of whole nodes, and of
    all cases of the job.
    """
    jobs = {
        str(result.outcomes["job_id"])
        for _, result in points
        if result.outcomes.get("job_id") and "energy_j" not in result.outcomes
    }
    power_w = by.mean_power_w(jobs) if jobs else {}

    def with_its(result: Result) -> Result:
        job = str(result.outcomes.get("job_id", ""))
        if job not in power_w or "energy_j" in result.outcomes:
            return result
        wall = result.series.get(METRIC + WALL)  # of a program whose times are those of a metric
        times_s = result.times_s[:, 0] if wall is None else wall["value"]  # of the slowest rank
        outcomes = {**result.outcomes, "energy_j": power_w[job] * float(times_s.mean())}
        environment = {**result.environment, "energy": "ConsumedEnergy of the job, by time"}
        return replace(result, outcomes=outcomes, environment=environment)

    return [(case, with_its(result)) for case, result in points]


def find(folder: Folder, cases: list[Case]) -> FolderCases:
    """Return the results of cases, the cases without one, and files that are left out."""
    results, missing, rejected = [], [], dict[str, str]()
    files = {path.name for path in folder.cases.glob("*.h5") if not path.name.startswith(".")}
    for case in cases:
        path = folder.case_file(case)
        if path.name not in files:
            missing.append(case)
            continue
        files.discard(path.name)
        try:
            results.append((case, read_result(path, case)))
        except StoreError as error:
            rejected[path.name] = f"{error}; {folder.remedy(case)}"
            missing.append(case)
    foreign = dict.fromkeys(sorted(files), "is of no case of this study")
    return FolderCases(results, missing, rejected | foreign)

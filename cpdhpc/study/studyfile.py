"""The study file: all cases as labelled arrays that h5py, xarray and netCDF4 read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import __version__, store
from ..store import Variable
from .base import Base
from .case import Case
from .kind import SHAPE
from .result import OUTCOMES, SCHEMA, SERIES, Result
from .spec import Study
from .statistics import ratio_intervals, summarise

Array = npt.NDArray[Any]
Points = Sequence[tuple[Case, Result]]
Variables = dict[str, Variable]
BY = ("point",)
MISSING: dict[type, Any] = {str: "", int: -1, float: np.nan, bool: -1}
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


def write_study(path: Path, study: Study, points: Points, missing: int = 0) -> None:
    """Write a study file from finished cases; missing: how many others the study has.

    docs/hdf5.md says what is in it. Raises OSError where it cannot be written, ValueError where
    there is no case.
    """
    if not points:
        raise ValueError("write_study: points: must be one or more")
    environments = list(dict.fromkeys(_text(result.environment) for _, result in points))
    samples = _samples(study, points, environments)
    groups = {
        "samples": samples,
        "summary": _summary(study, points, samples),
        "environment": _environment(environments),
    }
    for name in study.of_kind.groups:
        if any(name in result.series for _, result in points):
            groups[name] = SERIES_OF[name](points)
    of_summary = {
        "ci_level": study.measure.confidence,
        "base": str(Base.of(study)),
        "title": "medians over repeats, with intervals",
    }
    store.write(path, groups, _attributes(study, missing), {"summary": of_summary})


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
        "status": "partial" if missing else "complete",
    }


def _text(environment: Any) -> str:
    return json.dumps(dict(environment), sort_keys=True)


def _point(points: Points) -> Variable:
    return Variable(BY, np.arange(len(points)), "point, in the order of the sweep")


def _samples(study: Study, points: Points, environments: list[str]) -> Variables:
    repeats = max(len(result.times_s) for _, result in points)
    times_s = np.full((len(points), repeats, 3), np.nan)
    is_warmup = np.zeros((len(points), repeats), np.uint8)
    for index, (_, result) in enumerate(points):
        times_s[index, : len(result.times_s)] = result.times_s
        is_warmup[index, : len(result.is_warmup)] = result.is_warmup
    both = (*BY, "repeat")
    flags = {"flag_values": np.array([0, 1], np.uint8), "flag_meanings": "counts warm_up"}
    of = "time of a repeat; NaN: fewer repeats were needed; over ranks: "
    indexes = [environments.index(_text(result.environment)) for _, result in points]
    return {
        "point": _point(points),
        "repeat": Variable(("repeat",), np.arange(repeats), "repeat, warm-ups included"),
        "case_id": Variable(BY, np.array([case.id for case, _ in points]), "id of the case"),
        **_factors(study, points),
        "time_s": Variable(both, times_s[:, :, 0], of + "the slowest", "s"),
        "min_rank_time_s": Variable(both, times_s[:, :, 1], of + "the fastest", "s"),
        "mean_rank_time_s": Variable(both, times_s[:, :, 2], of + "the mean", "s"),
        "is_warmup": Variable(both, is_warmup, "whether it is a warm-up", "1", flags),
        **_outcomes(points),
        "environment": Variable(BY, np.array(indexes), "index into the group environment"),
    }


def _factors(study: Study, points: Points) -> Variables:
    """Return the shape, and every factor that a point uses."""
    used = {name for case, _ in points for name in case.all_factors}
    known = {**SHAPE, **study.of_kind.factors}
    return {
        name: Variable(
            BY,
            _column(factor.type, [case.all_factors.get(name) for case, _ in points]),
            factor.long_name,
            factor.units,
        )
        for name, factor in known.items()
        if name in used
    }


def _column(kind: type, values: list[Any]) -> Array:
    missing = MISSING[kind]
    return np.array([missing if value is None else value for value in values], DTYPES[kind])


def _outcomes(points: Points) -> Variables:
    return {
        name: Variable(
            BY, _column(kind, [result.outcomes.get(name) for _, result in points]), text, units
        )
        for name, (kind, text, units) in OUTCOMES.items()
    }


def _summary(study: Study, points: Points, samples: Variables) -> Variables:
    """Return medians, intervals and speed-ups of the repeats that count."""
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
            name: Variable(
                by, np.array([str(each.get(name, "")) for each in parsed]), name.replace("_", " ")
            )
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
        data = np.full((len(points), epochs), np.nan)
        for index, each in enumerate(series):
            if each:
                data[index, : len(each[name])] = each[name]
        found[name] = Variable((*BY, "epoch"), data, text, units)
    return found


def _telemetry(points: Points) -> Variables:
    """Return the telemetry of all points, whose layers may be others."""
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


SERIES_OF = {"training": _training, "telemetry": _telemetry}

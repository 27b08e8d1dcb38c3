"""HDF5 files of studies: of a case, and of all cases."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from ... import store
from ..._version import __version__
from ...config import UserError
from ...store import StoreError, Variable
from . import Array, Case, Factors, Result, Value

SCHEMA = 1  # of files of cases and of studies
NO_INTEGER = -(2**63)  # in columns of whole factors; attribute missing_integer, -1 in older files
OVER_RANKS = ("max", "min", "mean")  # the columns of Result.times_s
SAME_FOR_ALL = {  # of environments: cases that differ in them are not compared; see provenance
    "mpi_library": "MPI library",
    "git_commit": "commit of cpdhpc",
    "processor": "processor",
    "program": "program, by the SHA-256 of its files",
    "program_commit": "commit of the program's source",
}
OUTCOMES: dict[str, tuple[type, str, str]] = {  # name: type, long name, units
    "error": (float, "relative error in the Euclidean norm; NaN: not known", "1"),
    "wire_bytes": (
        float,
        "left the rank that sent most in a repeat; codec: codes; NaN: only the library knows",
        "byte",
    ),
    "payload_bytes": (float, "float32 data that a rank sums or codes in a repeat", "byte"),
    "bound_s": (
        float,
        "least time: the longer of a copy of the data by all ranks at once and of 2 (N - 1) / N of "
        "the payload on the wire at the rate of the link of each of N nodes; NaN: not known",
        "s",
    ),
    "plan_bytes": (
        float,
        "leave the rank that sends most in a repeat, as the plans of its exchanges say; NaN: none",
        "byte",
    ),
    "exchange_s": (
        float,
        "median time in exchanges of cells, waits included, on the rank with most; NaN: none",
        "s",
    ),
    "flop": (float, "floating-point operations of a repeat in matrix products; NaN: none", "1"),
    "predicted_s": (float, "predicted time of a repeat; NaN: none", "s"),
    "energy_j": (
        float,
        "energy of the nodes in a repeat, mean over all repeats, warm-ups and idle parts included",
        "J",
    ),
    "accuracy": (float, "test samples that are right at the end; NaN: no training", "%"),
    "loss": (float, "test loss at the end; NaN: no training", "nat"),
    "score": (float, "test score at the end by the job's metric; NaN: accuracy or loss", "1"),
    "data_share": (float, "share of the time of all steps that a rank waits for samples", "%"),
    "job_id": (str, "job of the scheduler; empty: none", "1"),
    "restarts": (int, "starts of the batch before this one", "1"),
    "date": (str, "end of the case, ISO 8601, UTC", "1"),
}
METRIC, WALL = "metric_", "wall_s"  # begins groups of metrics of programs; the one of wall times
FURTHER = "test_"  # begins the names of outcomes by further metrics, as jobs call them
# Columns that a file lacks if no case has them
OPTIONAL = ("predicted_s", "energy_j", "score", "data_share", "test_score")
SERIES: dict[str, dict[str, tuple[str, str]]] = {  # group: column: long name, units
    "training": {
        "test_accuracy": ("test samples that are right", "%"),
        "test_score": ("score of the test samples by the job's metric", "1"),
        "test_loss": ("mean loss of test samples", "nat"),
        "train_loss": ("mean loss of the epoch's batches", "nat"),
        "epoch_time_s": ("time of training and evaluation, the slowest rank", "s"),
        "steps_done": ("steps up to the end of the epoch", "1"),
        "samples_seen": ("samples up to the end of the epoch, repeats included", "1"),
        "critical_batch": (
            "critical batch that the noise scale up to there predicts; NaN: it was not measured",
            "1",
        ),
    },
    "telemetry": {
        "underflow": ("non-zero gradient values that become zero on the wire", "%"),
        "saturated": ("non-zero gradient values that saturate on the wire", "%"),
    },
}


def write_result(path: Path, case: Case, result: Result) -> None:
    """Write the file of a finished case. Raises StoreError if it cannot be written."""
    repeats = len(result.times_s)
    samples = {
        "repeat": Variable(("repeat",), np.arange(repeats), "repeat, warm-ups included"),
        "over_ranks": Variable(("over_ranks",), np.array(OVER_RANKS), "of all ranks' times"),
        "time_s": Variable(("repeat", "over_ranks"), result.times_s, "time of a repeat", "s"),
        "is_warmup": Variable(("repeat",), result.is_warmup, "1: a warm-up"),
    }
    record = {
        "cpdhpc_schema": SCHEMA,
        "software": f"cpdhpc {__version__}",
        "factors": case.all_factors,
        "outcomes": dict(result.outcomes),
        "environment": dict(result.environment),
    }
    attributes = {  # few, as a study may have thousands of cases to read
        "kind": "case",
        "case_id": case.id,
        "record": json.dumps(record),
        "status": "complete",
    }
    series = {group: dict(columns) for group, columns in result.series.items()}
    store.write(path, {"samples": samples, **series}, attributes)


def read_environment(path: Path) -> Mapping[str, str]:
    """Return the environment in the file of a case. Raises StoreError as read_result."""
    return _read(path, path.stem).environment


def read_result(path: Path, case: Case) -> Result:
    """Return the result in the file of a case.

    Raises StoreError if the file is missing, damaged, not complete or of another case.
    """
    return _read(path, case.id)


def _read(path: Path, case_id: str) -> Result:
    wanted = {"time_s", "is_warmup", "epoch", "iteration", "layer", "value", "run"}
    wanted |= {name for columns in SERIES.values() for name in columns}
    groups, attributes = store.read(path, wanted)
    if attributes.get("kind") != "case":
        raise StoreError(f"{path}: is no file of a case")
    if attributes.get("status") != "complete":
        raise StoreError(f"{path}: is not complete")
    if attributes.get("case_id") != case_id:
        raise StoreError(f"{path}: is of case {attributes.get('case_id')}")
    try:
        record = json.loads(attributes["record"])
        if record["cpdhpc_schema"] != SCHEMA:
            raise StoreError(f"{path}: has schema {record['cpdhpc_schema']}, known is {SCHEMA}")
        samples = groups.pop("samples")
        outcomes, environment = dict(record["outcomes"]), dict(record["environment"])
        times_s, is_warmup = samples["time_s"], samples["is_warmup"]
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: is damaged: {error}") from None
    if times_s.shape != (len(is_warmup), len(OVER_RANKS)):
        raise StoreError(f"{path}: is damaged: times of shape {times_s.shape}")
    return Result(times_s, is_warmup, outcomes, environment, groups)


Groups = Mapping[str, Mapping[str, Array]]
LEVEL = 0.95
NUMBERS = (*(name for name, (kind, *_) in OUTCOMES.items() if kind is not str), "environment")
NO_FACTORS = ("point", "case_id", *OUTCOMES, "environment")
NEEDED = {
    "samples": ("case_id", "ranks", "time_s", "is_warmup"),
    "summary": ("n", "median_s", "ci_low_s", "ci_high_s", "speedup", "efficiency", "base_point"),
}


class ReportError(UserError):
    """A file cannot be shown in a report."""


@dataclass(frozen=True)
class Point:
    """A case that was measured.

    factors: those that it uses; outcomes, summary: NaN for a missing value
    times_s: float64[repeats], of the slowest rank, without warm-ups
    base: index of the base point of its speed-up, -1 for none
    metrics: float64[samples] of each metric of a program, without warm-ups
    """

    index: int
    case_id: str
    factors: Factors
    outcomes: Mapping[str, float]
    summary: Mapping[str, float]
    times_s: Array
    base: int
    metrics: Mapping[str, Array] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(self.factors["ranks"])


@dataclass(frozen=True)
class StudyFile:
    """A study. training, telemetry: arrays by point, empty if the kind has none."""

    path: Path
    attributes: Mapping[str, Any]
    rules: Mapping[str, Any]
    points: tuple[Point, ...]
    environments: tuple[Mapping[str, str], ...]
    training: Mapping[str, Array]
    telemetry: Mapping[str, Array]

    @property
    def name(self) -> str:
        return str(self.attributes["name"])

    @property
    def kind(self) -> str:
        """The kind of its cases, or of those that a benchmark is like."""
        return str(self.attributes["kind"])

    @property
    def benchmark(self) -> bool:
        """Whether a benchmark made the points: without a sweep, with fixed numbers of repeats."""
        return bool(self.attributes.get("benchmark", 0))

    @property
    def scaling(self) -> str:
        return str(self.attributes["scaling"])

    @property
    def level(self) -> float:
        return float(self.rules["ci_level"])

    @property
    def percent(self) -> str:
        return f"{100 * self.level:g} %"

    @property
    def base_rule(self) -> str:
        """The rule that finds base points of speed-ups, as text."""
        return str(self.rules["base"])

    @property
    def over(self) -> str:
        """The factor along which a series goes."""
        return str(self.attributes["work"]) if self.scaling == "throughput" else "ranks"

    @cached_property
    def toml(self) -> Mapping[str, Any]:
        """The tables of the study. Raises ReportError if its text is not TOML."""
        try:
            return tomllib.loads(str(self.attributes["study"]))
        except tomllib.TOMLDecodeError as error:
            raise ReportError(f"{self.path}: the attribute study is not TOML: {error}") from None

    @property
    def times(self) -> str:
        """The meaning of the times, as text."""
        if self.kind != "command":
            return "the slowest rank's times"
        return f"the metric {self.time}" if self.time else "the wall times of runs"

    @property
    def time(self) -> str:
        """The metric of a program that is its time; "" for the wall time, and for other kinds."""
        if self.kind != "command":
            return ""
        return str(self.toml.get("job", {}).get("command", {}).get("time", ""))

    @property
    def metrics(self) -> Mapping[str, Mapping[str, Any]]:
        """Unit and direction of each metric of a study of a program, and of its wall times."""
        asked = dict(self.toml.get("job", {}).get("metrics", {}))
        there = {name for point in self.points for name in point.metrics}
        wall = {WALL: {"unit": "s", "better": "lower"}} if WALL in there else {}
        return {name: row for name, row in {**asked, **wall}.items() if name in there}

    @property
    def weak(self) -> Mapping[str, Any]:
        """Factors whose value is per rank, and that value."""
        return dict(self.toml.get("weak", {})) if self.scaling == "weak" else {}


def load_study_file(path: Path | str) -> StudyFile:
    """Return a study.

    Raises StoreError if the file cannot be read, ReportError if it is not the file of a study.
    """
    groups, attributes = store.read(path)
    schema = attributes.get("cpdhpc_schema")
    if schema != SCHEMA:
        raise ReportError(f"{path}: has schema {schema}; this version reads {SCHEMA}")
    _check(path, groups, attributes)
    rules = store.read_attributes(path, "summary")
    return StudyFile(
        Path(path),
        attributes,
        {"ci_level": LEVEL, "base": "not stated"} | rules,
        tuple(_points(groups, int(attributes.get("missing_integer", -1)))),
        tuple(_environments(groups.get("environment", {}))),
        groups.get("training", {}),
        groups.get("telemetry", {}),
    )


def _check(path: Path | str, groups: Groups, attributes: Mapping[str, Any]) -> None:
    missing = [
        name
        for name in ("name", "kind", "scaling", "status", "study", "work")
        if name not in attributes
    ]
    if missing:
        raise ReportError(f"{path}: has no attribute {missing[0]}: is not the file of a study")
    check_arrays(path, groups, NEEDED, "is not the file of a study")
    if not len(groups["samples"]["case_id"]):
        raise ReportError(f"{path}: holds no point")


def check_arrays(
    path: Path | str, groups: Groups, needed: Mapping[str, Sequence[str]], otherwise: str
) -> None:
    """Raise ReportError, which ends with otherwise, unless a file has these arrays, by group."""
    for group, names in needed.items():
        for name in names:
            if name not in groups.get(group, {}):
                raise ReportError(f"{path}: has no /{group}/{name}: {otherwise}")


def table_of(value: str) -> dict[str, Any] | None:
    """Return a value of an environment that is a table in JSON, None for other text."""
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _points(groups: Groups, missing: int) -> list[Point]:
    samples, summary = groups["samples"], groups["summary"]
    count = len(samples["case_id"])
    columns = {k: v for k, v in samples.items() if v.shape == (count,) and k != "repeat"}
    scores = [name for name in columns if name.startswith(FURTHER)]
    factors = {k: v.tolist() for k, v in columns.items() if k not in (*NO_FACTORS, *scores)}
    outcomes = {k: columns[k].tolist() for k in (*NUMBERS, *scores) if k in columns}
    figures = {k: v.tolist() for k, v in summary.items() if v.shape == (count,)}
    # In columns of true and false, -1 is a missing value.
    without = {k: -1 if columns[k].dtype == np.int8 else missing for k in factors}
    counted = np.isfinite(samples["time_s"]) & (samples["is_warmup"] == 0)
    metrics = {
        name.removeprefix(METRIC): _by_point(group, count)
        for name, group in groups.items()
        if name.startswith(METRIC)
    }
    return [
        Point(
            i,
            str(samples["case_id"][i]),
            {k: v[i] for k, v in factors.items() if _used(v[i], without[k])},
            {k: v[i] for k, v in outcomes.items()},
            {k: v[i] for k, v in figures.items()},
            samples["time_s"][i][counted[i]],
            int(figures["base_point"][i]),
            {name: samples_of[i] for name, samples_of in metrics.items() if len(samples_of[i])},
        )
        for i in range(count)
    ]


def _by_point(group: Mapping[str, Array], count: int) -> list[Array]:
    """Return the samples of a metric of each point, without warm-ups; they are in its order."""
    counts = group["is_warmup"] == 0
    ends = np.searchsorted(group["point_index"][counts], np.arange(1, count))
    return np.split(group["value"][counts], ends)


def _used(value: Value, missing: int) -> bool:
    if isinstance(value, float):
        return not isnan(value)
    return value not in ("", missing)


def _environments(columns: Mapping[str, Array]) -> list[dict[str, str]]:
    names = [name for name in columns if name != "environment"]
    count = max((len(columns[name]) for name in names), default=0)
    return [{name: str(columns[name][i]) for name in names} for i in range(count)]

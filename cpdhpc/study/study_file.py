"""The study file as reports read it: points with their factors, outcomes and times."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from .. import store
from ..config import UserError
from ..kinds.factors import Array, Factors, Value
from .case_file import FURTHER, OUTCOMES, SCHEMA

Groups = Mapping[str, Mapping[str, Array]]
LEVEL = 0.95
NUMBERS = (*(name for name, (kind, *_) in OUTCOMES.items() if kind is not str), "environment")
NO_FACTORS = ("point", "case_id", *OUTCOMES, "environment")
NEEDED = {
    "samples": ("case_id", "ranks", "time_s", "is_warmup"),
    "summary": ("n", "median_s", "ci_low_s", "ci_high_s", "speedup", "efficiency", "base_point"),
}


class ReportError(UserError):
    """Files that no report can be made of."""


@dataclass(frozen=True)
class Point:
    """A case that was measured.

    factors: only those that it uses; outcomes, summary: NaN where there is none
    times_s: float64[repeats], the slowest rank's, without warm-ups
    base: index of the point that its speed-up is relative to, -1 for none
    """

    index: int
    case_id: str
    factors: Factors
    outcomes: Mapping[str, float]
    summary: Mapping[str, float]
    times_s: Array
    base: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.factors["ranks"])


@dataclass(frozen=True)
class StudyFile:
    """A study. training, telemetry: arrays by point, empty where the kind has none."""

    path: Path
    attributes: Mapping[str, Any]
    rules: Mapping[str, Any]
    points: tuple[Point, ...]
    environments: tuple[Mapping[str, str], ...]
    training: Mapping[str, Array]
    telemetry: Mapping[str, Array]

    @property
    def name(self) -> str:
        """The study's name."""
        return str(self.attributes["name"])

    @property
    def kind(self) -> str:
        """What was measured."""
        return str(self.attributes["kind"])

    @property
    def benchmark(self) -> bool:
        """Whether the points are a benchmark's: of no sweep, and no repeat was asked for more."""
        return bool(self.attributes.get("benchmark", 0))

    @property
    def scaling(self) -> str:
        """strong, weak or throughput."""
        return str(self.attributes["scaling"])

    @property
    def level(self) -> float:
        """Confidence level of the intervals."""
        return float(self.rules["ci_level"])

    @property
    def percent(self) -> str:
        """Confidence level in words."""
        return f"{100 * self.level:g} %"

    @property
    def base_rule(self) -> str:
        """What speed-up is relative to, in words."""
        return str(self.rules["base"])

    @property
    def over(self) -> str:
        """The factor along which a series goes."""
        return str(self.attributes["work"]) if self.scaling == "throughput" else "ranks"

    @cached_property
    def toml(self) -> Mapping[str, Any]:
        """The study as it was asked for. Raises ReportError where it is no TOML."""
        try:
            return tomllib.loads(str(self.attributes["study"]))
        except tomllib.TOMLDecodeError as error:
            raise ReportError(f"{self.path}: the attribute study is not TOML: {error}") from None

    @property
    def weak(self) -> Mapping[str, Any]:
        """Factors whose value is per rank, and that value."""
        return dict(self.toml.get("weak", {})) if self.scaling == "weak" else {}


def load_study_file(path: Path) -> StudyFile:
    """Return a study. Raises StoreError for what cannot be read, ReportError for what is none."""
    groups, attributes = store.read(path)
    schema = attributes.get("cpdhpc_schema")
    if schema != SCHEMA:
        raise ReportError(f"{path}: has schema {schema}; this version reads {SCHEMA}")
    _check(path, groups, attributes)
    rules = store.read_attributes(path, "summary")
    return StudyFile(
        path,
        attributes,
        {"ci_level": LEVEL, "base": "not stated"} | rules,
        tuple(_points(groups)),
        tuple(_environments(groups.get("environment", {}))),
        groups.get("training", {}),
        groups.get("telemetry", {}),
    )


def _check(path: Path, groups: Groups, attributes: Mapping[str, Any]) -> None:
    missing = [
        name
        for name in ("name", "kind", "scaling", "status", "study", "work")
        if name not in attributes
    ]
    if missing:
        raise ReportError(f"{path}: has no attribute {missing[0]}: is not the file of a study")
    for group, names in NEEDED.items():
        for name in names:
            if name not in groups.get(group, {}):
                raise ReportError(f"{path}: has no /{group}/{name}: is not the file of a study")
    if not len(groups["samples"]["case_id"]):
        raise ReportError(f"{path}: holds no point")


def _points(groups: Groups) -> list[Point]:
    samples, summary = groups["samples"], groups["summary"]
    count = len(samples["case_id"])
    columns = {k: v for k, v in samples.items() if v.shape == (count,) and k != "repeat"}
    scores = [name for name in columns if name.startswith(FURTHER)]
    factors = {k: v.tolist() for k, v in columns.items() if k not in (*NO_FACTORS, *scores)}
    outcomes = {k: columns[k].tolist() for k in (*NUMBERS, *scores) if k in columns}
    figures = {k: v.tolist() for k, v in summary.items() if v.shape == (count,)}
    counted = np.isfinite(samples["time_s"]) & (samples["is_warmup"] == 0)
    return [
        Point(
            i,
            str(samples["case_id"][i]),
            {k: v[i] for k, v in factors.items() if _used(v[i])},
            {k: v[i] for k, v in outcomes.items()},
            {k: v[i] for k, v in figures.items()},
            samples["time_s"][i][counted[i]],
            int(figures["base_point"][i]),
        )
        for i in range(count)
    ]


def _used(value: Value) -> bool:
    return value not in ("", -1) and not (isinstance(value, float) and isnan(value))


def _environments(columns: Mapping[str, Array]) -> list[dict[str, str]]:
    names = [name for name in columns if name != "environment"]
    count = max((len(columns[name]) for name in names), default=0)
    return [{name: str(columns[name][i]) for name in names} for i in range(count)]

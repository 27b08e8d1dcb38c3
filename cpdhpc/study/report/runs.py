"""Runs as their files tell them, and the groups that share a name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import store
from ...config import difference, value_of
from .study_file import ReportError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Run:
    """One training run. The arrays are those of its file."""

    path: Path
    attributes: dict[str, Any]
    steps: dict[str, Array]
    epochs: dict[str, Array]
    layers: dict[str, Array]

    @property
    def name(self) -> str:
        """The name that runs with other seeds share."""
        return str(self.attributes["name"])

    @property
    def complete(self) -> bool:
        """Whether the run went to its end."""
        return bool(self.attributes["status"] == "complete")

    @property
    def accuracy(self) -> float:
        """Share of the test samples that are right at the end."""
        return float(self.epochs["test_accuracy"][-1])

    @property
    def wire_bytes(self) -> float:
        """Mean payload that a rank sends in a step."""
        return float(self.steps["wire_bytes"].mean())

    @property
    def step_times_s(self) -> Array:
        """float64[iterations], time of each step, all phases together."""
        total: Array = self.steps["time_s"].sum(1)
        return total

    @property
    def underflow_share(self) -> float:
        """Share of the non-zero gradient values observed that became zero on the wire."""
        nonzero = self.layers["nonzero"]
        return float((self.layers["underflow_share"] * nonzero).sum() / max(nonzero.sum(), 1))


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds: the complete ones, and how many there are in all."""

    name: str
    runs: list[Run]
    found: int

    @property
    def compressed(self) -> bool:
        """Whether gradients travel in fewer bits than float32."""
        return bool(value_of(self.runs[0].attributes["toml"], "gradient.aggregator") != "none")

    @property
    def accuracies(self) -> Array:
        """float64[runs], in percent."""
        return 100 * np.array([run.accuracy for run in self.runs])

    @property
    def accuracy(self) -> float:
        """Mean over seeds, in percent."""
        return float(self.accuracies.mean())

    @property
    def wire_bytes(self) -> float:
        """Mean payload that a rank sends in a step."""
        return float(np.mean([run.wire_bytes for run in self.runs]))

    @property
    def step_time_ms(self) -> float:
        """Median time of a step, over all steps of all runs."""
        return 1e3 * float(np.median(np.concatenate([run.step_times_s for run in self.runs])))

    @property
    def underflow_share(self) -> float:
        """Mean over the runs."""
        return float(np.mean([run.underflow_share for run in self.runs]))


def load_run(path: Path) -> Run:
    """Return a run. Raises StoreError for what cannot be read, ReportError for what is no run."""
    groups, attributes = store.read(path)
    if attributes.get("kind") != "run":
        raise ReportError(f"{path}: is not the file of a run")
    return Run(path, attributes, groups["steps"], groups["epochs"], groups["layers"])


def group(runs: Iterable[Run]) -> list[Group]:
    """Return the runs grouped by name, in the order in which the names come.

    Names without a complete run are left out. Raises ReportError where runs of one name differ
    in more than the seed.
    """
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    for same in by_name.values():
        _check_alike(same)
    groups = [
        Group(name, [run for run in same if run.complete], len(same))
        for name, same in by_name.items()
    ]
    return [each for each in groups if each.runs]


def _check_alike(runs: list[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        texts = first.attributes["toml"], run.attributes["toml"]
        key = difference(*texts, ignored=["train.seeds"])
        if key is not None:
            raise ReportError(
                f"{run.path} and {first.path} are both {run.name}, but differ in {key}"
            )


def baseline(groups: Iterable[Group]) -> Group | None:
    """Return the first group whose gradients travel as float32, if there is one."""
    return next((each for each in groups if not each.compressed), None)

"""The time series of a run, as rows while it goes on and as labelled arrays in its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..store import Variable
from .step import PHASES
from .telemetry import Layers

Array = np.ndarray[Any, np.dtype[Any]]

SCHEMA = 1
GROUPS = {  # group: its columns; the first one labels the rows
    "steps": ("iteration", "loss", "learning_rate", "time_s", "wire_bytes"),
    "epochs": ("epoch", "test_accuracy", "test_loss", "time_s"),
    "layers": ("iteration", "aps_shift", "underflow_share", "saturated_share"),
}


class Record:
    """Rows of the three groups.

    ranks: of the run; layers: names of the parameters, in the order of the bucket
    """

    def __init__(self, ranks: int, layers: list[str]) -> None:
        self.ranks, self.layers = ranks, layers
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in GROUPS}

    def step(
        self, iteration: int, loss: float, learning_rate: float, time_ns: Array, wire_bytes: Array
    ) -> None:
        """Add a step; time_ns: int64[phases], wire_bytes: int64[ranks] of this step."""
        self.rows["steps"].append((iteration, loss, learning_rate, time_ns / 1e9, wire_bytes))

    def epoch(self, epoch: int, accuracy: float, loss: float, time_s: float) -> None:
        """Add an epoch."""
        self.rows["epochs"].append((epoch, accuracy, loss, time_s))

    def telemetry(self, iteration: int, layers: Layers) -> None:
        """Add what was observed of the layers in a step."""
        row = (iteration, layers.aps_shift, layers.underflow_share, layers.saturated_share)
        self.rows["layers"].append(row)

    def arrays(self) -> dict[str, dict[str, Array]]:
        """Return each group's columns as plain arrays, from which restore makes the rows again."""
        return {name: self._columns(name) for name in GROUPS}

    def _columns(self, group: str) -> dict[str, Array]:
        rows, empty = self.rows[group], {"time_s": (0, len(PHASES)), "wire_bytes": (0, self.ranks)}
        if rows:
            return {
                name: np.array([row[i] for row in rows]) for i, name in enumerate(GROUPS[group])
            }
        shapes: Mapping[str, tuple[int, ...]] = {
            "steps": empty,
            "epochs": {},
            "layers": dict.fromkeys(GROUPS["layers"][1:], (0, len(self.layers))),
        }[group]
        whole = ("iteration", "epoch", "wire_bytes")
        return {
            name: np.zeros(shapes.get(name, (0,)), np.int64 if name in whole else np.float64)
            for name in GROUPS[group]
        }

    def restore(self, groups: Mapping[str, Mapping[str, Array]]) -> None:
        """Take over rows that arrays returned."""
        for group, names in GROUPS.items():
            self.rows[group] = list(zip(*(groups[group][name] for name in names), strict=True))

    def groups(self) -> dict[str, dict[str, Variable]]:
        """Return the groups as labelled arrays for store.write."""
        columns = self.arrays()
        return {
            "steps": self._steps(columns["steps"]),
            "epochs": _epochs(columns["epochs"]),
            "layers": self._layers(columns["layers"]),
        }

    def _steps(self, of: Mapping[str, Array]) -> dict[str, Variable]:
        by = ("iteration",)
        return {
            "iteration": Variable(by, of["iteration"], "iteration, from 0"),
            "phase": Variable(("phase",), np.array(PHASES), "phase of a step"),
            "rank": Variable(("rank",), np.arange(self.ranks), "rank, virtual ones included"),
            "loss": Variable(by, of["loss"], "cross entropy of the global batch", "nat"),
            "learning_rate": Variable(by, of["learning_rate"], "learning rate"),
            "time_s": Variable(
                (*by, "phase"), of["time_s"], "time of a phase, the largest over processes", "s"
            ),
            "wire_bytes": Variable(
                (*by, "rank"), of["wire_bytes"], "payload that a rank sends in a step", "byte"
            ),
        }

    def _layers(self, of: Mapping[str, Array]) -> dict[str, Variable]:
        by = ("iteration", "layer")
        share = "share of non-zero gradient values, over all ranks, that "
        return {
            "iteration": Variable(("iteration",), of["iteration"], "iteration, from 0"),
            "layer": Variable(("layer",), np.array(self.layers), "parameter tensor"),
            "aps_shift": Variable(by, of["aps_shift"], "k of the scale 2**k; NaN: none per layer"),
            "underflow_share": Variable(by, of["underflow_share"], share + "become zero"),
            "saturated_share": Variable(by, of["saturated_share"], share + "saturate"),
        }


def _epochs(of: Mapping[str, Array]) -> dict[str, Variable]:
    by = ("epoch",)
    return {
        "epoch": Variable(by, of["epoch"], "epoch, from 1"),
        "test_accuracy": Variable(by, of["test_accuracy"], "share of test samples that are right"),
        "test_loss": Variable(by, of["test_loss"], "mean cross entropy of test samples", "nat"),
        "time_s": Variable(by, of["time_s"], "time of training and evaluation", "s"),
    }

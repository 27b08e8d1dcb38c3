"""The time series of a run, as rows while it goes on and as labelled arrays in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..compress.base import Mean
from ..store import Variable
from .reducer import GradientReducer
from .step import PHASES

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layers:
    """What encoding does to the gradients of all ranks, by layer.

    nonzero: int64[layers], how many values are not zero; of these,
    underflow_share, saturated_share: float64[layers], the shares that become zero, that saturate
    aps_shift: float64[layers], k of the scale 2**k, NaN where layers have none
    """

    nonzero: Array
    aps_shift: Array
    underflow_share: Array
    saturated_share: Array


def observe(reducer: GradientReducer, mean: Mean) -> Layers:
    """Return what encoding did in the last reduce. Collective."""
    bucket = reducer.bucket
    counts = np.zeros((len(bucket.names), 3), np.int64)
    for flat in reducer.flats:
        counts[:, :2] += reducer.aggregator.events(flat, bucket, mean.shifts)
        counts[:, 2] += [np.count_nonzero(view) for view in bucket.views(flat)]
    total = np.sum(reducer.world.gather(counts), axis=0)
    saturated, underflowed, nonzero = total.T
    some = np.maximum(nonzero, 1)  # a layer of zeros loses nothing
    unknown = np.full(len(bucket.names), np.nan)
    return Layers(
        nonzero=nonzero,
        aps_shift=unknown if mean.shifts is None else mean.shifts.astype(np.float64),
        underflow_share=underflowed / some,
        saturated_share=saturated / some,
    )


SCHEMA = 1
GROUPS = {  # group: its columns; the first one labels the rows
    "steps": ("iteration", "loss", "learning_rate", "time_s", "wire_bytes"),
    "epochs": ("epoch", "test_accuracy", "test_loss", "time_s"),
    "layers": ("iteration", "nonzero", "aps_shift", "underflow_share", "saturated_share"),
}
WHOLE = dict.fromkeys(("iteration", "epoch", "wire_bytes", "nonzero"), np.int64)


class Record:
    """Rows of the three groups.

    ranks: of the run; layers: names of the parameters, in the order of the bucket
    """

    def __init__(self, ranks: int, layers: Sequence[str]) -> None:
        self.ranks, self.layers = ranks, list(layers)
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
        columns = (getattr(layers, name) for name in GROUPS["layers"][1:])
        self.rows["layers"].append((iteration, *columns))

    def arrays(self) -> dict[str, dict[str, Array]]:
        """Return each group's columns as plain arrays, from which restore makes the rows again."""
        return {name: self._columns(name) for name in GROUPS}

    def _columns(self, group: str) -> dict[str, Array]:
        names, rows = GROUPS[group], self.rows[group]
        width = {"time_s": len(PHASES), "wire_bytes": self.ranks} if group == "steps" else {}
        width |= dict.fromkeys(names[1:], len(self.layers)) if group == "layers" else {}
        shapes = [(len(rows), width[name]) if name in width else (len(rows),) for name in names]
        return {
            name: np.array([row[i] for row in rows], WHOLE.get(name, np.float64)).reshape(shape)
            for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
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
                (*by, "rank"),
                of["wire_bytes"],
                "payload that a rank sends in a step, to ranks and to MPI's collectives",
                "byte",
            ),
        }

    def _layers(self, of: Mapping[str, Array]) -> dict[str, Variable]:
        by = ("iteration", "layer")
        share = "share of non-zero gradient values, over all ranks, that "
        return {
            "iteration": Variable(("iteration",), of["iteration"], "iteration, from 0"),
            "layer": Variable(("layer",), np.array(self.layers), "parameter tensor"),
            "nonzero": Variable(by, of["nonzero"], "non-zero gradient values of all ranks"),
            "aps_shift": Variable(
                by, of["aps_shift"], "k of the scale 2**k; NaN: layers have none"
            ),
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

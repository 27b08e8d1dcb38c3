"""The time series of a run: rows while it runs, labelled arrays in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...compress.base import Array, Column, Mean
from ...ops import on_gpu
from ...store import Attributes, Variable, write
from ...torch.reducer import GradientReducer
from ...world.timeline import PHASES
from .losses import Accuracy, CrossEntropy, Loss, Metric

Layers = dict[str, Array]  # [layers] by column


def count_nonzero(x: Array) -> int:
    """Return the number of nonzero float32 values; also correct on a GPU.

    Bits are compared, as CuPy's own arithmetic takes subnormal numbers for zero.
    """
    return int((x.view(np.uint32) << 1 != 0).sum() if on_gpu(x) else np.count_nonzero(x))


def observe(reducer: GradientReducer, mean: Mean) -> Layers:
    """Return the aggregator's telemetry of each layer after the last reduce. Collective.

    nonzero: int64[layers], number of nonzero values in all ranks' gradients; the counted
    columns are shares of these, the others are copied from mean, NaN if missing there
    """
    bucket, columns = reducer.bucket, reducer.aggregator.columns
    counted = [name for name, column in columns.items() if column.counted]
    counts = {name: np.zeros(len(bucket.names), np.int64) for name in ("nonzero", *counted)}
    for flat in reducer.flats:
        counts["nonzero"] += [count_nonzero(view) for view in bucket.views(flat)]
        for name, of_rank in reducer.aggregator.observe(flat, bucket, mean).items():
            counts[name] += of_rank
    everyone = reducer.world.gather(counts)
    total = {name: np.sum([each[name] for each in everyone], axis=0) for name in counts}
    some = np.maximum(total["nonzero"], 1)  # a layer of zeros loses nothing
    unknown = np.full(len(bucket.names), np.nan)
    return {"nonzero": total["nonzero"]} | {
        name: total[name] / some if name in total else mean.layers.get(name, unknown)
        for name in columns
    }


SCHEMA = 1
FGSM = "_fgsm"  # suffix of the score of adversarial copies
WINDOW_PHASES = "correction", "refresh", "local"


class RecordColumn(NamedTuple):
    """A column of a group; axes: after that of the rows, which the first column labels."""

    long_name: str
    units: str = "1"
    axes: tuple[str, ...] = ()
    dtype: Any = np.float64


ColumnsOf = dict[str, RecordColumn]
ITERATION = RecordColumn("iteration, from 0", dtype=np.int64)
EPOCH = RecordColumn("epoch, from 1", dtype=np.int64)


def _steps(loss: Loss, decided: Mapping[str, Column]) -> ColumnsOf:
    return {
        "iteration": ITERATION,
        "samples": RecordColumn("samples of the global batch", dtype=np.int64),
        "loss": RecordColumn(f"{loss.label} of the global batch", loss.units),
        "learning_rate": RecordColumn("learning rate"),
        "loss_scale": RecordColumn("factor on the loss; a step is skipped if the next is half"),
        "time_s": RecordColumn("time of a phase, the largest over processes", "s", ("phase",)),
        "wire_bytes": RecordColumn(
            "payload that a rank sends in a step, to ranks and to MPI's collectives",
            "byte",
            ("rank",),
            np.int64,
        ),
        **{name: RecordColumn(each.long_name, each.units) for name, each in decided.items()},
    }


def _epochs(loss: Loss, scores: Mapping[str, str]) -> ColumnsOf:
    return {
        "epoch": EPOCH,
        **{name: RecordColumn(what) for name, what in scores.items()},
        "test_loss": RecordColumn(f"mean {loss.label} of test samples", loss.units),
        "time_s": RecordColumn("time of training and evaluation", "s"),
    }


def _layers(columns: Mapping[str, Column]) -> ColumnsOf:
    by = ("layer",)
    return {
        "iteration": ITERATION,
        "nonzero": RecordColumn("non-zero gradient values of all ranks", "1", by, np.int64),
        **{name: RecordColumn(each.long_name, each.units, by) for name, each in columns.items()},
    }


def _ranks(loss: Loss, scores: Mapping[str, str]) -> ColumnsOf:
    return {
        "epoch": EPOCH,
        "consensus_distance": RecordColumn(
            "root mean square distance of the ranks' parameters to their mean"
        ),
        "worst_rank": RecordColumn(
            "rank whose own model has the largest test loss; -1: unknown", dtype=np.int64
        ),
        **{name: RecordColumn(f"{what}, of that rank") for name, what in scores.items()},
        "test_loss": RecordColumn(f"mean {loss.label}, of that rank", loss.units),
    }


WINDOWS = {
    "iteration": RecordColumn("first iteration of a window", dtype=np.int64),
    "violation": RecordColumn(
        "mean square of what enters a stage less what is given", axes=("cut",)
    ),
    "time_s": RecordColumn("time of a phase, the largest over processes", "s", ("phase",)),
    "busy_time_s": RecordColumn(
        "processor time of a stage in forward and backward, the largest over shares",
        "s",
        ("phase", "stage"),
    ),
}


class Record:
    """Rows of steps, epochs and layers, of "ranks" that have own models, "windows" of stages.

    ranks: the largest number of ranks in the run; layers: parameter names, in the bucket's order
    columns: the aggregator's telemetry of each layer
    loss, metrics: the trained loss, and the scores of the test samples beside it
    copies: whether the first metric is also computed for adversarial copies
    stages: that the network is cut into
    decided: the controller's columns of each step
    tables: the columns of each group; rows: of each group, by column
    """

    def __init__(
        self,
        ranks: int,
        layers: Sequence[str],
        columns: Mapping[str, Column] | None = None,
        loss: Loss | None = None,
        metrics: Sequence[Metric] = (Accuracy(),),
        decided: Mapping[str, Column] | None = None,
        *,
        copies: bool = False,
        own_models: bool = False,
        stages: int = 1,
    ) -> None:
        self.ranks, self.layers, self.stages = ranks, list(layers), stages
        loss = loss or CrossEntropy()
        self.scores = scores = {metric.column: metric.long_name for metric in metrics}
        first = dict([*scores.items()][:1])
        if copies:
            scores |= {f"{name}{FGSM}": f"{what}, of copies" for name, what in first.items()}
        self.tables = {
            "steps": _steps(loss, decided or {}),
            "epochs": _epochs(loss, scores),
            "layers": _layers(columns or {}),
        }
        self.tables |= {"ranks": _ranks(loss, first)} if own_models else {}
        self.tables |= {"windows": WINDOWS} if stages > 1 else {}
        self.rows: dict[str, list[dict[str, Any]]] = {group: [] for group in self.tables}

    def add(self, group: str, row: Mapping[str, Any]) -> None:
        """Add a row: the group's columns by name, and perhaps values that it has no column for."""
        self.rows[group].append({name: row[name] for name in self.tables[group]})

    def arrays(self) -> dict[str, dict[str, Array]]:
        """Return each group's columns as plain arrays, from which restore makes the rows again."""
        return {group: self._columns(group) for group in self.tables}

    def _columns(self, group: str) -> dict[str, Array]:
        labels, rows = self._labels(group), self.rows[group]
        found = {}
        for name, each in self.tables[group].items():
            shape = len(rows), *(labels[axis].data.size for axis in each.axes)
            found[name] = np.array([row[name] for row in rows], each.dtype).reshape(shape)
        return found

    def _labels(self, group: str) -> dict[str, Variable]:
        """Return the labels of a group's axes after that of the rows."""
        axes: dict[str, dict[str, tuple[Sequence[Any], str]]] = {
            "steps": {
                "phase": (PHASES, "phase of a step"),
                "rank": (range(self.ranks), "rank, virtual ones included"),
            },
            "layers": {"layer": (self.layers, "parameter tensor")},
            "windows": {
                "cut": (range(1, self.stages), "cut, by the stage behind it"),
                "stage": (range(self.stages), "stage"),
                "phase": (WINDOW_PHASES, "phase of a window"),
            },
        }
        return {
            name: Variable((name,), values, what)
            for name, (values, what) in axes.get(group, {}).items()
        }

    def restore(self, groups: Mapping[str, Mapping[str, Array]]) -> None:
        """Restore the rows in the result of arrays; former or new ranks that are missing sent 0.

        A column that an older version did not write is unknown: NaN, an integer -1.
        """
        count, before = groups["steps"]["wire_bytes"].shape
        self.ranks = max(self.ranks, before)
        wire_bytes = np.pad(groups["steps"]["wire_bytes"], ((0, 0), (0, self.ranks - before)))
        steps = {"loss_scale": np.ones(count)} | {**groups["steps"], "wire_bytes": wire_bytes}
        groups = {**groups, "steps": steps}  # older files have no scales
        for group, table in self.tables.items():
            (first, *_), there = table, groups[group]
            columns = [
                there.get(name, self._unknown(group, name, len(there[first]))) for name in table
            ]
            rows = zip(*columns, strict=True)
            self.rows[group] = [dict(zip(table, row, strict=True)) for row in rows]

    def _unknown(self, group: str, name: str, rows: int) -> Array:
        each, labels = self.tables[group][name], self._labels(group)
        value = np.nan if each.dtype is np.float64 else -1
        shape = rows, *(labels[axis].data.size for axis in each.axes)
        return np.full(shape, value, each.dtype)

    def save(self, path: Path, attributes: Attributes) -> None:
        """Write a record that replaces path when it is complete; attributes: of the run."""
        write(path, self.groups(), {"kind": "run", "schema": SCHEMA, **attributes})

    def groups(self) -> dict[str, dict[str, Variable]]:
        """Return the groups as labelled arrays."""
        found = {}
        for group, columns in self.arrays().items():
            table, (rows, *_) = self.tables[group], columns
            of = {
                name: Variable((rows, *each.axes), columns[name], each.long_name, each.units)
                for name, each in table.items()
            }
            found[group] = {rows: of[rows]} | self._labels(group) | of  # labels first
        return found

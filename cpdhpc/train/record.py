"""The time series of a run, as rows while it goes on and as labelled arrays in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..compress.base import Column, Mean
from ..ops import on_gpu
from ..store import Variable
from .losses import Accuracy, CrossEntropy, Loss, Metric
from .reducer import GradientReducer
from .step import PHASES

Array = npt.NDArray[Any]


Layers = dict[str, Array]  # [layers] by column


def count_nonzero(x: Array) -> int:
    """Return how many of float32 values are not zero; on a GPU, too, where CuPy drops small ones.

    Bits are compared, as CuPy's own arithmetic takes subnormal numbers for zero.
    """
    return int((x.view(np.uint32) << 1 != 0).sum() if on_gpu(x) else np.count_nonzero(x))


def observe(reducer: GradientReducer, mean: Mean) -> Layers:
    """Return what the aggregator has to say of each layer after the last reduce. Collective.

    nonzero: int64[layers], how many values of all ranks' gradients are not zero; the counted
    columns are shares of these, the others as they stand in mean, NaN where they do not
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
FGSM = "_fgsm"  # ends the name of a score of adversarial copies
GROUPS = {  # group: its columns; the first one labels the rows
    "steps": (  # and what the controller offers
        *("iteration", "samples", "loss", "learning_rate", "loss_scale"),
        *("time_s", "wire_bytes"),
    ),
    "epochs": ("epoch", "test_loss", "time_s"),  # and before the loss what the metric gives
    "layers": ("iteration", "nonzero"),  # and what the aggregator offers
}
OF_RANKS = ("epoch", "consensus_distance", "worst_rank", "test_loss")  # where models differ
WINDOWS = "iteration", "violation", "time_s", "busy_time_s"  # where there are stages
WINDOW_PHASES = "correction", "refresh", "local"
WHOLE = dict.fromkeys(
    ("iteration", "epoch", "samples", "wire_bytes", "nonzero", "worst_rank"), np.int64
)


class Record:
    """Rows of the three groups, of "ranks" that have models of their own, of "windows" of stages.

    ranks: of the run, the most it had; layers: names of the parameters, in the bucket's order
    columns: what the aggregator offers of each layer
    loss, metrics: what is trained, and what is told of the test samples beside it
    copies: whether the first metric is told of adversarial copies too
    stages: that the network is cut into
    decided: what the controller offers of each step
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
        self.stages = stages
        self.ranks, self.layers, self.columns = ranks, list(layers), dict(columns or {})
        self.loss = loss or CrossEntropy()
        self.decided = dict(decided or {})
        epoch, *rest = GROUPS["epochs"]
        first = [metric.column for metric in metrics[:1]]
        self.scores = {metric.column: metric.long_name for metric in metrics}
        self.scores |= {
            f"{each}{FGSM}": f"{self.scores[each]}, of copies" for each in first * copies
        }
        self.names: dict[str, tuple[str, ...]] = GROUPS | {
            "steps": (*GROUPS["steps"], *self.decided),
            "epochs": (epoch, *self.scores, *rest),
            "layers": (*GROUPS["layers"], *self.columns),
        }
        self.names |= {"windows": WINDOWS} if stages > 1 else {}
        if own_models:
            self.names["ranks"] = (*OF_RANKS[:-1], *first, OF_RANKS[-1])
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self.names}

    def step(
        self,
        iteration: int,
        samples: int,
        loss: float,
        learning_rate: float,
        loss_scale: float,
        time_ns: Array,
        wire_bytes: Array,
        decided: Mapping[str, float],
    ) -> None:
        """Add a step; time_ns: int64[phases], wire_bytes: int64[ranks] of this step."""
        sent = np.pad(wire_bytes, (0, self.ranks - wire_bytes.size))
        row = iteration, samples, loss, learning_rate, loss_scale, time_ns / 1e9, sent
        self.rows["steps"].append((*row, *(decided[name] for name in self.decided)))

    def epoch(self, epoch: int, scores: Mapping[str, float], loss: float, time_s: float) -> None:
        """Add an epoch; scores: of test samples, and of copies if there are some, by column."""
        self.rows["epochs"].append((epoch, *map(scores.__getitem__, self.scores), loss, time_s))

    def epoch_of_ranks(
        self, epoch: int, distance: float, rank: int, score: float, loss: float
    ) -> None:
        """Add how far apart the ranks' models are, and the one whose test loss is largest."""
        scores = [score] * (len(self.names["ranks"]) - len(OF_RANKS))
        self.rows["ranks"].append((epoch, distance, rank, *scores, loss))

    def telemetry(self, iteration: int, layers: Layers) -> None:
        """Add what was observed of the layers in a step."""
        self.rows["layers"].append((iteration, *(layers[n] for n in self.names["layers"][1:])))

    def window(self, iteration: int, violation: Array, time_ns: Array, busy_time_ns: Array) -> None:
        """Add a window: its first iteration, float64[cuts], int64[phases], [phases, stages]."""
        self.rows["windows"].append((iteration, violation, time_ns / 1e9, busy_time_ns / 1e9))

    def arrays(self) -> dict[str, dict[str, Array]]:
        """Return each group's columns as plain arrays, from which restore makes the rows again."""
        return {name: self._columns(name) for name in self.names}

    def _columns(self, group: str) -> dict[str, Array]:
        names, rows = self.names[group], self.rows[group]
        phases = len(WINDOW_PHASES)
        of_stages = (self.stages - 1,), (phases,), (phases, self.stages)
        further: dict[str, dict[str, tuple[int, ...]]] = {  # axes behind that of the rows
            "steps": {"time_s": (len(PHASES),), "wire_bytes": (self.ranks,)},
            "layers": dict.fromkeys(names[1:], (len(self.layers),)),
            "windows": dict(zip(WINDOWS[1:], of_stages, strict=True)),
        }
        shape = further.get(group, {})
        shapes = [(len(rows), *shape.get(name, ())) for name in names]
        return {
            name: np.array([row[i] for row in rows], WHOLE.get(name, np.float64)).reshape(shape)
            for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
        }

    def restore(self, groups: Mapping[str, Mapping[str, Array]]) -> None:
        """Take over rows that arrays returned; ranks that a run had before or has now send 0."""
        count, before = groups["steps"]["wire_bytes"].shape
        self.ranks = max(self.ranks, before)
        wire_bytes = np.pad(groups["steps"]["wire_bytes"], ((0, 0), (0, self.ranks - before)))
        steps = {"loss_scale": np.ones(count)} | {**groups["steps"], "wire_bytes": wire_bytes}
        groups = {**groups, "steps": steps}  # older files have no scales
        for group, names in self.names.items():
            self.rows[group] = list(zip(*(groups[group][name] for name in names), strict=True))

    def groups(self) -> dict[str, dict[str, Variable]]:
        """Return the groups as labelled arrays for store.write."""
        columns = self.arrays()
        return {
            "steps": self._steps(columns["steps"]),
            "epochs": self._epochs(columns["epochs"]),
            "layers": self._layers(columns["layers"]),
        } | {
            name: self._further(name, columns[name])
            for name in ("ranks", "windows")
            if name in columns
        }

    def _further(self, group: str, of: Mapping[str, Array]) -> dict[str, Variable]:
        return self._of_ranks(of) if group == "ranks" else _windows(of)

    def _steps(self, of: Mapping[str, Array]) -> dict[str, Variable]:
        by = ("iteration",)
        return {
            "iteration": Variable(by, of["iteration"], "iteration, from 0"),
            "phase": Variable(("phase",), np.array(PHASES), "phase of a step"),
            "rank": Variable(("rank",), np.arange(self.ranks), "rank, virtual ones included"),
            "samples": Variable(by, of["samples"], "samples of the global batch"),
            "loss": Variable(
                by, of["loss"], f"{self.loss.label} of the global batch", self.loss.units
            ),
            "learning_rate": Variable(by, of["learning_rate"], "learning rate"),
            "loss_scale": Variable(
                by, of["loss_scale"], "factor on the loss; a step is skipped where the next is half"
            ),
            "time_s": Variable(
                (*by, "phase"), of["time_s"], "time of a phase, the largest over processes", "s"
            ),
            "wire_bytes": Variable(
                (*by, "rank"),
                of["wire_bytes"],
                "payload that a rank sends in a step, to ranks and to MPI's collectives",
                "byte",
            ),
        } | {
            name: Variable(by, of[name], column.long_name, column.units)
            for name, column in self.decided.items()
        }

    def _layers(self, of: Mapping[str, Array]) -> dict[str, Variable]:
        by = ("iteration", "layer")
        offered = {
            name: Variable(by, of[name], column.long_name, column.units)
            for name, column in self.columns.items()
        }
        return {
            "iteration": Variable(("iteration",), of["iteration"], "iteration, from 0"),
            "layer": Variable(("layer",), np.array(self.layers), "parameter tensor"),
            "nonzero": Variable(by, of["nonzero"], "non-zero gradient values of all ranks"),
        } | offered

    def _of_ranks(self, of: Mapping[str, Array]) -> dict[str, Variable]:
        by = ("epoch",)
        distance = "root mean square distance of the ranks' parameters to their mean"
        return {
            "epoch": Variable(by, of["epoch"], "epoch, from 1"),
            "consensus_distance": Variable(by, of["consensus_distance"], distance),
            "worst_rank": Variable(
                by, of["worst_rank"], "rank whose own model has the largest test loss; -1: unknown"
            ),
            **{
                name: Variable(by, of[name], f"{self.scores[name]}, of that rank")
                for name in of
                if name not in OF_RANKS
            },
            "test_loss": Variable(
                by, of["test_loss"], f"mean {self.loss.label}, of that rank", self.loss.units
            ),
        }

    def _epochs(self, of: Mapping[str, Array]) -> dict[str, Variable]:
        by, label, units = ("epoch",), self.loss.label, self.loss.units
        return {
            "epoch": Variable(by, of["epoch"], "epoch, from 1"),
            **{name: Variable(by, of[name], what) for name, what in self.scores.items()},
            "test_loss": Variable(by, of["test_loss"], f"mean {label} of test samples", units),
            "time_s": Variable(by, of["time_s"], "time of training and evaluation", "s"),
        }


def _windows(of: Mapping[str, Array]) -> dict[str, Variable]:
    by = ("iteration",)
    cuts, phases, stages = of["violation"].shape[1], *of["busy_time_s"].shape[1:]
    assert phases == len(WINDOW_PHASES), "the columns have them"
    return {
        "iteration": Variable(by, of["iteration"], "first iteration of a window"),
        "cut": Variable(("cut",), np.arange(1, cuts + 1), "cut, by the stage behind it"),
        "stage": Variable(("stage",), np.arange(stages), "stage"),
        "phase": Variable(("phase",), np.array(WINDOW_PHASES), "phase of a window"),
        "violation": Variable(
            (*by, "cut"), of["violation"], "mean square of what enters a stage less what is given"
        ),
        "time_s": Variable(
            (*by, "phase"), of["time_s"], "time of a phase, the largest over processes", "s"
        ),
        "busy_time_s": Variable(
            (*by, "phase", "stage"),
            of["busy_time_s"],
            "processor time of a stage in forward and backward, the largest over shares",
            "s",
        ),
    }

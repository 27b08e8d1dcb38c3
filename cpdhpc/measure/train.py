"""Training in a job: a study's job with a case's factors, checkpointed, and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..config import merge, validate
from ..signals import Caught
from ..study.case_file import Result, Series
from ..study.cases import Case
from ..study.spec import Study
from ..train.job import Job
from ..train.loop import run
from ..train.progress import Display
from ..train.record import Record
from ..train.setup import Files, Training, agreed, prepare
from .repeats import Measuring, Place


class _Training(Measuring):
    """A case of the kind "train": one visit trains to the end."""

    def __init__(self, study: Study, case: Case, directory: Path) -> None:
        super().__init__(case, study.measure, directory)
        self.job = _job(study, case)
        self.virtual_ranks, self.timeout_s = self.job.train.virtual_ranks, self.job.train.timeout_s
        self.training: Training | None = None
        self.began = 0

    def visit(self, place: Place, caught: Caught) -> None:
        """Train from the last checkpoint to the end. Collective; see Measuring.visit."""
        world = place.world
        place.cores = "as the launcher has bound the ranks"
        files = Files(self.directory / "record.h5", self.directory / "checkpoint.h5")
        if world.process == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
        data = agreed(world, self.job.data.load)
        training = prepare(self.job, world, data, files)
        training.resume()
        self.began = training.iteration
        run(training, caught, Display(world.process == 0, 1))
        self.training, self.done = training, True

    def result(self, place: Place) -> Result:
        """Return the times of all steps, and how training went."""
        assert self.training is not None, "visit has come to its end"
        training = self.training
        columns = training.record.arrays()
        steps, epochs = columns["steps"], columns["epochs"]
        times_s = np.full((len(steps["iteration"]), 3), np.nan)
        times_s[:, 0] = steps["time_s"].sum(axis=1)
        cold = [0, self.began] if self.began < len(times_s) else [0]
        is_warmup = np.zeros(len(times_s), np.uint8)
        for first in cold:
            is_warmup[first : first + self.measure.warmup] = 1
        outcomes: dict[str, float | int | str] = {
            "wire_bytes": float(steps["wire_bytes"].max(axis=1).mean()),
            "payload_bytes": 4 * sum(p.numel() for p in training.reducer.parameters),
            "accuracy": 100 * float(epochs["test_accuracy"][-1]),
            "loss": float(epochs["test_loss"][-1]),
        }
        environment = place.environment() | {
            "torch_threads": str(training.provenance["torch_threads"])
        }
        series = _series(training.record, training.iterations_per_epoch)
        return Result(times_s, is_warmup, outcomes, environment, series)


def start(study: Study, case: Case, directory: Path) -> _Training:
    """Return a case of the kind "train", about to run. Raises ConfigError for its job."""
    return _Training(study, case, directory)


def _job(study: Study, case: Case) -> Job:
    """Return the study's job with the case's factors laid over it."""
    raw: dict[str, Any] = dict(study.job)
    for name, value in case.factors.items():
        change: Any = value
        for part in reversed(("train.seed" if name == "seed" else name).split(".")):
            change = {part: change}
        raw = merge(raw, change)
    return validate(Job, raw | {"name": case.id}, f"case {case.id}")


def _series(record: Record, iterations_per_epoch: int) -> Series:
    columns = record.arrays()
    steps, epochs, layers = columns["steps"], columns["epochs"], columns["layers"]
    unknown = np.full(layers["nonzero"].shape, np.nan)  # where the method does not count them
    losses = steps["loss"].reshape(-1, iterations_per_epoch).mean(axis=1)
    return {
        "training": {
            "epoch": epochs["epoch"],
            "test_accuracy": 100 * epochs["test_accuracy"],
            "test_loss": epochs["test_loss"],
            "train_loss": losses,
            "epoch_time_s": epochs["time_s"],
        },
        "telemetry": {
            "iteration": layers["iteration"],
            "layer": np.array(record.layers, dtype=object),
            "underflow": 100 * layers.get("underflow_share", unknown),
            "saturated": 100 * layers.get("saturated_share", unknown),
        },
    }

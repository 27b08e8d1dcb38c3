"""A run and its position: the objects of its loop, its files, and how it is resumed."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

import numpy as np
import torch

from ... import store
from ...compress.base import Array, Mean
from ...config import ConfigError
from ...torch.controllers import Controller
from ...torch.loss_scaling import LossScaler
from ...torch.precision.recorder import Recorder
from ...torch.reducer import GradientReducer
from ...torch.split_images.windowed import ImageGrid
from ...world.ranks import Ranks
from . import checkpoint, gradients
from .adversary import Adversary
from .checkpoint import Files
from .job import Job
from .losses import LossFunction
from .record import Layers, Record, observe
from .samples import Samples, Workers
from .step import StepResult, step
from .update import AnyUpdate, Update


@dataclass(frozen=True)
class Given:
    """The data that a run learns from, with its metadata, and the parts that any run has.

    train, test: samples; of split images this rank's parts; workers: that read them ahead
    classes: of the samples; 0 if the data does not define them
    grid: how images are split, None if they are not
    at_once: samples that are evaluated at once
    data_digest: of whole samples, if weights are kept; see checkpoint.data_digest
    data_sample: the same of few samples, for checkpoints; "" if they cannot be read
    """

    train: Samples
    test: Samples
    workers: Workers
    loss: LossFunction
    classes: int
    files: Files
    provenance: dict[str, str | int]
    grid: ImageGrid | None
    at_once: int
    data_digest: str
    data_sample: str
    job: Job
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    controller: Controller


@dataclass
class Training:
    """A run and its position.

    given: its fields become attributes of this object
    iteration: the next one; samples_seen: before it, which is the run's position
    adversary: makes adversarial copies, None if there are none
    recorder: of [record], while the run continues; None: nothing is recorded
    """

    given: InitVar[Given]
    world: Ranks
    reducer: GradientReducer
    update: AnyUpdate
    scaler: LossScaler
    record: Record
    adversary: Adversary | None = None
    recorder: Recorder | None = None
    iteration: int = 0
    samples_seen: int = 0

    def __post_init__(self, given: Given) -> None:
        self.train, self.test, self.workers = given.train, given.test, given.workers
        self.loss, self.classes, self.at_once = given.loss, given.classes, given.at_once
        self.files, self.provenance, self.grid = given.files, given.provenance, given.grid
        self.data_digest, self.data_sample = given.data_digest, given.data_sample
        self.job, self.model, self.optimizer = given.job, given.model, given.optimizer
        self.controller = given.controller

    @property
    def sharing(self) -> int:
        """The number of ranks that share an image."""
        return 1 if self.grid is None else self.grid.sharing

    @property
    def sent_bytes(self) -> Array:
        """int64[hosted], the bytes that each hosted rank has sent so far."""
        worlds = {self.world} if self.grid is None else {self.world, self.grid.group}
        return sum(
            (each.bytes_sent + each.collective_bytes for each in worlds),
            np.zeros(self.world.virtual_ranks, np.int64) + self.update.sent_bytes,
        )

    def train_on(self, batch: Array, seed: int) -> StepResult:
        """Train on a global batch of update.batch. Collective. See step.step."""
        assert isinstance(self.update, Update), "others have a Training of their own"
        how = self.loss, self.sharing, seed, self.scaler, self.adversary
        return step(self.update, self.train, batch, *how)

    def observe(self, mean: Mean) -> Layers:
        """Return the aggregator's telemetry of each layer in the last step. Collective."""
        return observe(self.reducer, mean)

    def close(self) -> None:
        """Free objects that only this run used. Collective."""
        if self.grid is not None:
            self.grid.free()

    @property
    def samples(self) -> int:
        return len(self.train)

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations that go through all samples once; the last batch may be smaller."""
        return -(-self.samples // self.job.train.batch)

    @property
    def ended(self) -> bool:
        return self.samples_seen >= self.samples * self.job.train.epochs

    @property
    def states(self) -> checkpoint.States:
        """The state that methods keep of each rank, by owner."""
        copies = {"adversarial": self.adversary.state} if self.adversary else {}
        return {"gradient": self.reducer.state, "update": self.update.state} | copies

    def save(self, status: str) -> None:
        """Write the methods' state from all processes, the rest from process 0. Collective.

        The state's file has the iteration in its name, and the checkpoint replaces the former one
        last. So a checkpoint always finds its own state, whenever a process is killed.
        status: "running", "interrupted" or "complete"
        Raises UserError on all processes if they cannot be written.
        """
        path = self.files.checkpoint
        kept = self.files.state(self.iteration)
        self.update.note()
        state = checkpoint.save_states(self.world, kept, self.states)

        def write() -> None:
            groups = checkpoint.tensors(self.model, self.optimizer) | self.record.arrays()
            groups["controller"] = self.controller.state()
            groups["loss_scaling"] = self.scaler.state()
            where = self.iteration, self.samples_seen, self.record.ranks
            here = checkpoint.Position(*where, state, self.data_sample)
            try:
                checkpoint.save(path, groups, here, self.job.toml())
            except store.StoreError:
                kept.unlink(missing_ok=True)  # frees space on the disk
                raise
            for other in path.parent.glob(self.files.state("*").name):
                if other != kept:
                    other.unlink()
            self._write_record(status)

        with self.update.evaluated():
            self.world.on_first(write, "checkpoint")

    def save_record(self, status: str) -> None:
        self.world.on_first(lambda: self._write_record(status), "record")

    def save_gradients(self) -> None:
        """Write the gradients of all ranks in the current iteration. Collective.

        Raises UserError on all processes if the update rule averages none, or the file
        cannot be written.
        """
        if self.reducer.iteration != self.iteration + 1:
            raise ConfigError(
                f"{self.job.id}: train.record_gradients: there are none: the update rule "
                f"{type(self.update).__name__} averages none by the reducer"
            )
        path = gradients.path_of(self.files.record, self.iteration)
        gradients.save(self.reducer, path, self.iteration, self.job.id)

    def save_weights(self, epoch: int) -> None:
        """Write the evaluated weights after an epoch, from 1. Collective.

        Raises UserError on all processes if they cannot be written.
        """
        path = self.files.weights(epoch)
        rate = self.optimizer.param_groups[0]["lr"]  # of the last step
        kept = checkpoint.KeptWeights(
            epoch, self.iteration, rate, self.data_digest, self.job.toml()
        )
        with self.update.evaluated():
            self.world.on_first(lambda: checkpoint.save_weights(path, self.model, kept), "weights")

    def _write_record(self, status: str) -> None:
        attributes = {
            "name": self.job.name,
            "seed": self.job.seed,
            "toml": self.job.toml(),
            "parameters": sum(p.numel() for p in self.reducer.parameters),
            "algorithms": ", ".join(sorted(self.world.chosen)),
            **self.provenance,
            "status": status,
        }
        self.record.save(self.files.record, attributes)

    def resume(self) -> str:
        """Restore the checkpoint, if there is one, made by any number of ranks. Collective.

        Returns a notice, mostly empty. Raises CheckpointError or StoreError on all processes.
        """
        path = self.files.checkpoint
        loaded = checkpoint.load(self.world, path, self.job.toml(), self._samples_seen)
        said = ""
        if loaded is None:
            return said
        groups, here = loaded
        self.iteration, self.samples_seen = here.iteration, here.samples_seen
        self.reducer.iteration = self.iteration
        checkpoint.load_tensors(groups, self.model, self.optimizer)
        self.scaler.restore(groups.get("loss_scaling", {}))
        if here.state:
            kept = self.files.state(self.iteration)
            former = checkpoint.load_states(self.world, kept, here.state, self.states)
            said = self.update.resumed(former)
        self.scaler.note()
        self.controller.restore(groups.get("controller", {}))
        if "samples" not in groups["steps"]:  # of versions whose batch was constant
            before = [self._samples_seen(i) for i in range(len(groups["steps"]["iteration"]) + 1)]
            groups["steps"]["samples"] = np.diff(before)
        self.record.restore(groups)
        if here.data and here.data != self.data_sample:
            said = "; ".join(filter(None, [said, "the samples differ from before"]))
        return said

    def _samples_seen(self, iteration: int) -> int:
        """Return the samples seen before an iteration, for a constant batch."""
        epoch, inside = divmod(iteration, self.iterations_per_epoch)
        return epoch * self.samples + inside * self.job.train.batch

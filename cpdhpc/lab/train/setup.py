"""Everything a run works with, made from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from ... import store
from ...compress.base import Mean
from ...config import ConfigError, UserError
from ...ops import set_kernel_threads
from ...torch.controllers import Controller
from ...torch.loss_scaling import LossScaler
from ...torch.precision.conversion import (
    BY_TORCH,
    aggregator_of,
    by_parameter,
    convert,
    obeyed,
    unheard,
)
from ...torch.precision.recorder import Recorder
from ...torch.precision.updates import RoundedUpdates
from ...torch.reducer import GradientReducer
from ...torch.split_images import partition
from ...torch.split_images.grid import ImageGrid
from ...world.ranks import Ranks
from .. import provenance
from . import checkpoint, gradients
from .adversary import Adversary
from .checkpoint import Files
from .data import Augment
from .fitting import (
    build_model,
    cast_forward,
    check_fit,
    of_gradient,
    own_device,
    own_threads,
    samples_of,
)
from .job import Job
from .losses import LossFunction
from .pipeline import Stage, cut
from .record import SCHEMA, Layers, Record, observe
from .samples import Dataset, Prefetched, Samples, Source, Workers
from .staged import StagedUpdate, StageReducers
from .stages import Placement
from .step import Step, samples_at_once, step
from .update import OwnModelsRule, Update

T = TypeVar("T")
Array = npt.NDArray[Any]


def agreed(world: Ranks, make: Callable[[], T]) -> T:
    """Return make(), which has no collective in it, unless some process fails. Collective.

    Raises the first failing process's UserError on all of them; a ValueError becomes one.
    """

    def told() -> T:
        try:
            return make()
        except UserError:
            raise
        except ValueError as problem:
            raise ConfigError(str(problem)) from None

    return world.agreed(told)


@dataclass
class Given:
    """What a run learns from, and where its files are.

    train, test: samples; of split images this rank's parts; workers: that read them ahead
    classes: of the samples; 0 where the data does not say
    grid: how images are split, None where they are not
    at_once: samples that are evaluated at once
    data_digest: of whole samples, where weights are kept; see checkpoint.data_digest
    data_sample: the same of few samples, for checkpoints; "" where they cannot be read
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


@dataclass
class Training(Given):
    """A run and where it stands.

    iteration: the next one; samples_seen: before it, which is where the run stands
    adversary: what makes adversarial copies, None where there are none
    recorder: of [record], while the run goes on; None: nothing is recorded
    """

    job: Job
    world: Ranks
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    reducer: GradientReducer
    update: Update | StagedUpdate
    scaler: LossScaler
    controller: Controller
    record: Record
    adversary: Adversary | None = None
    recorder: Recorder | None = None
    iteration: int = 0
    samples_seen: int = 0

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

    def train_on(self, batch: Array, seed: int) -> Step:
        """Train on a global batch, which update.batch gave. Collective. See step.step."""
        if isinstance(self.update, StagedUpdate):
            return self.update.train(self.train, seed)
        return step(
            self.update,
            self.train,
            batch,
            self.loss,
            self.sharing,
            seed,
            self.scaler,
            self.adversary,
        )

    def observe(self, mean: Mean) -> Layers:
        """Return what the aggregator has to say of each layer in the last step. Collective."""
        if isinstance(self.update, StagedUpdate):
            return self.update.observe()
        return observe(self.reducer, mean)

    def close(self) -> None:
        """Free what the run alone used. Collective."""
        if self.grid is not None:
            self.grid.free()
        if isinstance(self.update, StagedUpdate):
            self.update.placement.free()

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.train)

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations that go through all samples once; the last batch may be smaller."""
        return -(-self.samples // self.job.train.batch)

    @property
    def ended(self) -> bool:
        """Whether all epochs are done."""
        return self.samples_seen >= self.samples * self.job.train.epochs

    @property
    def states(self) -> checkpoint.States:
        """What methods keep of each rank, by who keeps it."""
        copies = {"adversarial": self.adversary.state} if self.adversary else {}
        return {"gradient": self.reducer.state, "update": self.update.state} | copies

    def save(self, status: str) -> None:
        """Write what methods keep from all processes, the rest from process 0. Collective.

        The file of the methods carries the iteration in its name, so the checkpoint that takes the
        former one's place last finds its own, whenever a process is killed.
        status: "running", "interrupted" or "complete"
        Raises UserError on all processes alike where they cannot be written.
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
                kept.unlink(missing_ok=True)  # what fills the disk goes
                raise
            for other in path.parent.glob(self.files.state("*").name):
                if other != kept:
                    other.unlink()
            self._write_record(status)

        with self.update.evaluated():
            self.world.on_first(write, "checkpoint")

    def save_record(self, status: str) -> None:
        """Write only the record. Collective."""
        self.world.on_first(lambda: self._write_record(status), "record")

    def save_gradients(self) -> None:
        """Write the gradients of all ranks in the iteration that goes on. Collective.

        Raises UserError on all processes alike where the update rule averages none, or the file
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
        """Write the weights after an epoch, from 1, that are evaluated. Collective.

        Raises UserError on all processes alike where they cannot be written.
        """
        path = self.files.weights(epoch)
        rate = self.optimizer.param_groups[0]["lr"]  # of the last step
        kept = checkpoint.Kept(epoch, self.iteration, rate, self.data_digest, self.job.toml())
        with self.update.evaluated():
            self.world.on_first(lambda: checkpoint.save_weights(path, self.model, kept), "weights")

    def _write_record(self, status: str) -> None:
        attributes = {
            "kind": "run",
            "schema": SCHEMA,
            "name": self.job.name,
            "seed": self.job.seed,
            "toml": self.job.toml(),
            "parameters": sum(p.numel() for p in self.reducer.parameters),
            "algorithms": ", ".join(sorted(self.world.chosen)),
            **self.provenance,
            "status": status,
        }
        store.write(self.files.record, self.record.groups(), attributes)

    def resume(self) -> str:
        """Take over the checkpoint, where there is one, made by any number of ranks. Collective.

        Returns what is to be said of it, mostly nothing. Raises CheckpointError or StoreError on
        all processes alike.
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
            said = "; ".join(filter(None, [said, "the samples are others than before"]))
        return said

    def _samples_seen(self, iteration: int) -> int:
        """Return the samples seen before an iteration, where the batch is constant."""
        epoch, inside = divmod(iteration, self.iterations_per_epoch)
        return epoch * self.samples + inside * self.job.train.batch


def prepare(job: Job, world: Ranks, data: Dataset | Source, files: Files) -> Training:
    """Return a run that is about to begin. Collective.

    Raises UserError on all processes alike where the job does not go with the data.
    """
    threads = own_threads(world, job.train.threads)
    job.check_ranks(world.ranks)
    set_kernel_threads(1 if job.train.overlap else threads)  # else they would slow backward down
    device = own_device(
        world,
        job.train.device,
        oversubscribe=job.train.oversubscribe_gpus,
        gpu_direct=job.train.gpu_direct,
    )
    model = agreed(world, lambda: build_model(job, data)).to(device)
    cast_forward(model, job.train, device)
    grid = None
    if job.train.image_grid != (1, 1):
        grid, model = _split(job, world, data, model)
    given = _given(job, world, data, files, model, grid)
    train = _in_stages if job.stages.count > 1 else _whole
    return train(job, world, model, given)


def _given(
    job: Job,
    world: Ranks,
    data: Dataset | Source,
    files: Files,
    model: torch.nn.Module,
    grid: ImageGrid | None,
) -> Given:
    """Return samples and loss, which go with the model, and who reads them. Collective."""
    train, test = samples_of(data, grid)
    digests = _digests(job, world, samples_of(data))
    train = job.augment.of(train)
    loss = agreed(world, job.loss.build)
    if grid is None:  # else forward has messages, and partition has checked the layers
        agreed(world, lambda: check_fit(job, model, loss, train, data.classes))
    obeying = agreed(world, lambda: _obeying(job, model))

    def counted() -> int:
        return samples_at_once(model, train, bool(job.adversarial.epsilon))

    at_once = agreed(world, counted) if grid is None else counted()  # which has messages then
    directory = data.directory if isinstance(data, Source) else None
    wait_s = 0.9 * job.train.timeout_s  # before others give up that wait for this process
    sources = train, test
    workers = agreed(world, lambda: Workers(job.loader, sources, directory, wait_s))
    if workers.count:
        train, test = Prefetched(workers, 0), Prefetched(workers, 1)
    machine = provenance.attributes(world) | {"torch_threads": torch.get_num_threads()}
    machine |= {"precision": obeying}
    return Given(train, test, workers, loss, data.classes, files, machine, grid, at_once, *digests)


def _digests(job: Job, world: Ranks, whole: tuple[Samples, Samples]) -> tuple[str, str]:
    """Return what tells data sets apart, for kept weights and for checkpoints. Collective."""
    digest = ""
    if job.train.keep_every:
        digest = world.on_first(lambda: checkpoint.data_digest(*whole), "data")

    def of_few() -> str:
        try:
            return checkpoint.data_digest(*whole, checkpoint.FEW)
        except Exception:  # of an item, which is told where training takes it
            return ""

    return digest, world.on_first(of_few, "data")


def _whole(job: Job, world: Ranks, model: torch.nn.Module, given: Given) -> Training:
    """Return a run whose ranks have the whole network. Collective. See prepare."""
    copies = job.adversarial
    adversary = Adversary(copies, model, world) if copies.epsilon else None
    aggregator = agreed(world, lambda: aggregator_of(model, job.precision, job.aggregator()))
    given.provenance["advice"] = job.advice(job.aggregator())
    try:
        reducer = GradientReducer(
            model,
            world,
            aggregator,
            seed=job.seed,
            bucket_mib=job.train.bucket_mib,
            overlap=job.train.overlap,
        )
    except ValueError as error:  # on all ranks alike, as a pattern that matches no layer
        raise of_gradient(job, error) from None
    reducer.advised = True  # by the run itself, before it begins
    controller = job.controller.build(job.settings(len(given.train), world))
    optimizer = job.optimizer.build(model.parameters(), job.train.learning_rate)
    if rows := by_parameter(model, job.precision):
        RoundedUpdates(optimizer, rows, job.seed)
    record = Record(
        world.ranks,
        reducer.bucket.names,
        reducer.aggregator.columns,
        job.loss,
        job.told,
        controller.columns,
        copies=bool(copies.epsilon),
        own_models=isinstance(job.update, OwnModelsRule),
    )
    return Training(
        **vars(given),
        job=job,
        world=world,
        model=model,
        optimizer=optimizer,
        reducer=reducer,
        update=job.update.build(model, optimizer, reducer),
        scaler=LossScaler(
            reducer, job.train.loss_scale, dynamic=job.train.loss_scaling == "dynamic"
        ),
        controller=controller,
        record=record,
        adversary=adversary,
    )


def _in_stages(job: Job, world: Ranks, model: torch.nn.Module, given: Given) -> Training:
    """Return a run whose network is cut into stages. Collective. See prepare."""

    def cut_up() -> list[Stage]:
        try:
            job.stages.layout(world.processes)
            two = given.train.take(np.arange(2) % len(given.train), 0)[0]
            return cut(model, job.stages.count, job.stages.cut, job.stages.filter, two)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{job.id}: {error}") from None

    stages = agreed(world, cut_up)
    placement, aggregator = Placement(job.stages, world), job.aggregator()
    reducers = StageReducers(
        stages, placement, aggregator, seed=job.seed, bucket_mib=job.train.bucket_mib
    )
    optimizer = job.optimizer.build(model.parameters(), job.train.learning_rate)
    names = reducers.bucket.names
    ranks, columns = placement.world.ranks, aggregator.columns
    record = Record(ranks, names, columns, job.loss, job.told, stages=job.stages.count)
    reducer = cast(GradientReducer, reducers)  # which has what the loop asks of one
    return Training(
        **vars(given),
        job=job,
        world=placement.world,
        model=model,
        optimizer=optimizer,
        reducer=reducer,
        update=StagedUpdate(optimizer, reducers, job.stages, given.loss, given.train, record),
        scaler=LossScaler(reducer, job.train.loss_scale),
        controller=job.controller.build(job.settings(len(given.train), world)),
        record=record,
    )


def _split(
    job: Job, world: Ranks, data: Dataset | Source, model: torch.nn.Module
) -> tuple[ImageGrid, torch.nn.Module]:
    """Return how images are split, and the network that takes their parts. Collective."""
    try:
        if isinstance(data, Source):
            raise ValueError("only data in memory is split")
        if job.augment != Augment():
            raise ValueError("augmented images are not split")
        grid = ImageGrid(world, job.train.image_grid)
        return grid, partition(model, data.image_shape, grid)
    except (TypeError, ValueError) as error:  # alike on all ranks
        raise ConfigError(f"{job.id}: train.image_grid={job.train.image_grid}: {error}") from None


def _obeying(job: Job, model: torch.nn.Module) -> str:
    """Let layers obey the policy of a job, and return which do; "" without one."""
    try:
        found = obeyed(model, job.precision)
        left = unheard(model, job.precision)
        convert(model, job.precision, job.seed)
    except ConfigError as error:
        raise ConfigError(f"{job.id}: {error}") from None
    lines = [f"{name}: {of.told()}" for name, of in found.items()]
    return "\n".join(lines + [f"{name}: {BY_TORCH}" for name in left])

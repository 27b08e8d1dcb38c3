"""Creates all objects of a run from its configuration, and tries them before it begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ...config import ConfigError, UserError, told
from ...ops import set_kernel_threads
from ...ops.tensors import CPU
from ...torch.loss_scaling import LossScaler
from ...torch.precision import conversion
from ...torch.precision.updates import RoundedUpdates
from ...torch.reducer import GradientReducer
from ...torch.split_images import partition
from ...torch.split_images.windowed import ImageGrid
from ...world.cores import threads_of_rank
from ...world.gpu_messages import gpu_aware, use_gpu
from ...world.ranks import Ranks
from .. import provenance
from . import checkpoint
from .adversary import Adversary, add_statistics
from .checkpoint import Files
from .data import Augment
from .imports import ImportedModel
from .job import Job, TrainSettings
from .losses import LossFunction, shown
from .record import Record
from .samples import (
    Dataset,
    InMemory,
    InputScaling,
    Prefetched,
    Samples,
    StreamedData,
    Workers,
    device_of,
    taken,
)
from .stages import Placement
from .step import naming_items, samples_at_once
from .training import Given, Training
from .update import OwnModelsRule


def own_device(
    world: Ranks, kind: str, *, oversubscribe: bool = False, gpu_direct: str = "auto"
) -> torch.device:
    """Return this process's device, now the current one of torch and CuPy. Collective.

    kind: cpu or gpu; the others: see train.job.TrainSettings
    Raises UserError on all processes if one has no GPU, or torch or CuPy cannot use it,
    if several share one without permission, and if MPI must take GPU memory but does not.
    """
    if kind == "cpu":
        return CPU
    problem = None
    if not torch.cuda.is_available():
        problem = UserError(
            f"train.device='gpu': torch {torch.__version__} finds no GPU on rank {world.rank}"
        )
    world.agree(problem)
    number = use_gpu(world, oversubscribe=oversubscribe)
    if gpu_direct == "required" and world.processes > 1:
        answer = gpu_aware(world)
        if not answer.yes:
            raise UserError(f"train.gpu_direct='required': GPU-aware MPI: {answer}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def own_threads(world: Ranks, wanted: int) -> int:
    """Set torch's number of threads, 0: one for each core of this rank; return it. Collective.

    Raises the UserError of threads_of_rank.
    """
    threads = wanted or threads_of_rank(world)
    torch.set_num_threads(threads)
    return threads


def cast_forward(model: torch.nn.Module, train: TrainSettings, device: torch.device) -> None:
    """Let a model's forward use torch.autocast, but return float32, if configured."""
    if train.autocast == "none":
        return
    forward, dtype = model.forward, getattr(torch, train.autocast)

    @wraps(forward)
    def cast(*inputs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            outputs = forward(*inputs)
        return outputs.float() if isinstance(outputs, torch.Tensor) else outputs

    model.forward = cast


def samples_of(
    data: Dataset | StreamedData, grid: ImageGrid | None = None
) -> tuple[Samples, Samples]:
    """Return the samples of training and test; of split images this rank's parts."""
    if isinstance(data, StreamedData):
        return data.train, data.test
    images = [torch.from_numpy(x) for x in (data.train_x, data.test_x)]
    train_x, test_x = images if grid is None else map(grid.cut, images)
    labels = torch.from_numpy(data.train_y), torch.from_numpy(data.test_y)
    scaling = InputScaling(data.mean, data.deviation)
    return InMemory(train_x, labels[0], scaling), InMemory(test_x, labels[1], scaling)


def build_model(job: Job, data: Dataset | StreamedData) -> torch.nn.Module:
    """Return a job's network, initialised by its seed. Raises ConfigError, or its ValueError."""
    if not data.classes and not isinstance(job.model, ImportedModel):
        raise ConfigError(
            f"{job.id}: data.import: classes are unknown: the training dataset needs an attribute "
            "classes for models that are not imported"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model = job.model.build(data.image_shape, data.classes)
    if job.adversarial.epsilon:
        add_statistics(model)
    return model


def names_layers(job: Job) -> bool:
    """Return whether an option of gradient names a layer."""
    try:
        job.aggregator().check_layers([])
    except ValueError:
        return True
    return False


def check_layers(job: Job, model: torch.nn.Module) -> None:
    """Raise ConfigError if an option of gradient names a layer that the network does not have."""
    try:
        job.aggregator().check_layers([n for n, p in model.named_parameters() if p.requires_grad])
    except ValueError as error:
        raise of_gradient(job, error) from None


def of_gradient(job: Job, error: ValueError) -> ConfigError:
    """Return the error of a job whose gradients cannot be averaged as configured."""
    said = str(error).removeprefix(type(job.aggregator()).__name__).lstrip(".: ")
    return ConfigError(f"{job.id}: gradient.{said}")


def check_fit(
    job: Job, model: torch.nn.Module, loss: LossFunction, samples: Samples, classes: int
) -> None:
    """Run two samples through model, loss and metric, and restore all state.

    Raises ConfigError, in one line that names the parts that do not fit each other.
    """
    index = np.arange(min(2, len(samples)))
    inputs, targets = taken(samples, index, 0, device_of(model))
    metrics = {f"metric {each.label}": each.build() for each in job.told}
    training, scores = model.training, list[tuple[str, Any, int]]()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), naming_items(index):
        torch.manual_seed(job.seed)  # for layers that are initialised in the first forward
        with told(f"{job.id}: model: inputs {shown(inputs)}"):
            outputs = model.eval()(inputs)
        model.train(training)
        if not isinstance(outputs, torch.Tensor):
            came = type(outputs).__name__
            raise ConfigError(f"{job.id}: model: returned {came}: must be a tensor")
        what = f"outputs {shown(outputs)}, targets {shown(targets)}"
        with told(f"{job.id}: loss: {what}"):
            mean, each = loss(outputs, targets), loss(outputs, targets, reduction="none")
            job.loss.check(outputs, classes)
        for name, metric in metrics.items():
            with told(f"{job.id}: {name}: {what}"):
                scores += [(name, metric(outputs, targets), 1)] if metric is not None else []
    values = [("loss", mean, 0), ("loss, none", each, 1), *scores]
    for name, value, axes in values:
        if not isinstance(value, torch.Tensor) or value.shape[:1] != inputs.shape[:axes]:
            came = shown(value) if isinstance(value, torch.Tensor) else type(value).__name__
            should = f"a tensor [{len(inputs)}, ...]" if axes else "a tensor without axes"
            raise ConfigError(f"{job.id}: {name}: {what}: returned {came}: must be {should}")


T = TypeVar("T")


def agreed(world: Ranks, make: Callable[[], T]) -> T:
    """Return make(), which contains no collective, unless some process fails. Collective.

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


def prepare(job: Job, world: Ranks, data: Dataset | StreamedData, files: Files) -> Training:
    """Return a run that is ready to begin. Collective.

    Raises UserError on all processes if the job does not suit the data.
    """
    threads = own_threads(world, job.train.threads)
    job.check_ranks(world.ranks)
    set_kernel_threads(1 if job.train.overlap else threads)  # more would slow backward down
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
    data: Dataset | StreamedData,
    files: Files,
    model: torch.nn.Module,
    grid: ImageGrid | None,
) -> Given:
    """Return samples and loss, checked with the model, and the readers. Collective."""
    train, test = samples_of(data, grid)
    whole, digest = samples_of(data), ""
    if job.train.keep_every:
        digest = world.on_first(lambda: checkpoint.data_digest(*whole), "data")
    few = world.on_first(lambda: checkpoint.few_digest(*whole), "data")
    train = job.augment.of(train)
    loss = agreed(world, job.loss.build)
    if grid is None:  # otherwise forward has messages, and partition has checked the layers
        agreed(world, lambda: check_fit(job, model, loss, train, data.classes))
    obeying = agreed(world, lambda: _obeying(job, model))

    def counted() -> int:
        return samples_at_once(model, train, bool(job.adversarial.epsilon))

    at_once = agreed(world, counted) if grid is None else counted()  # the latter has messages
    directory = data.directory if isinstance(data, StreamedData) else None
    wait_s = 0.9 * job.train.timeout_s  # before others give up that wait for this process
    sources = train, test
    workers = agreed(world, lambda: Workers(job.loader, sources, directory, wait_s))
    if workers.count:
        train, test = Prefetched(workers, 0), Prefetched(workers, 1)
    machine = provenance.attributes(world) | {"torch_threads": torch.get_num_threads()}
    machine |= {"precision": obeying}
    optimizer = job.optimizer.build(model.parameters(), job.train.learning_rate)
    controller = job.controller.build(job.settings(len(train), world))
    told = loss, data.classes, files, machine, grid, at_once, digest, few
    return Given(train, test, workers, *told, job, model, optimizer, controller)


def _whole(job: Job, world: Ranks, model: torch.nn.Module, given: Given) -> Training:
    """Return a run whose ranks have the whole network. Collective. See prepare."""
    copies = job.adversarial
    adversary = Adversary(copies, model, world) if copies.epsilon else None
    aggregator = agreed(
        world, lambda: conversion.aggregator_of(model, job.precision, job.aggregator())
    )
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
    except ValueError as error:  # on all ranks, for example a pattern that matches no layer
        raise of_gradient(job, error) from None
    reducer.advised = True  # by the run itself, before it begins
    if rows := conversion.by_parameter(model, job.precision):
        RoundedUpdates(given.optimizer, rows, job.seed)
    record = Record(
        world.ranks,
        reducer.bucket.names,
        reducer.aggregator.columns,
        job.loss,
        job.told,
        given.controller.columns,
        copies=bool(copies.epsilon),
        own_models=isinstance(job.update, OwnModelsRule),
    )
    update = job.update.build(model, given.optimizer, reducer)
    dynamic = job.train.loss_scaling == "dynamic"
    scaler = LossScaler(reducer, job.train.loss_scale, dynamic=dynamic)
    return Training(given, world, reducer, update, scaler, record, adversary)


def _in_stages(job: Job, world: Ranks, model: torch.nn.Module, given: Given) -> Training:
    """Return a run whose network is cut into stages. Collective. See prepare."""
    from .pipeline import Stage, cut
    from .staged import StagedTraining, StagedUpdate, StageReducers

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
    ranks, columns = placement.world.ranks, aggregator.columns
    layers, count = list(reducers.layers), job.stages.count
    record = Record(ranks, layers, columns, job.loss, job.told, stages=count)
    reducer = cast(GradientReducer, reducers)  # it has the methods that loop and scaler use
    update = StagedUpdate(given.optimizer, reducers, job.stages, given.loss, given.train, record)
    scaler = LossScaler(reducer, job.train.loss_scale)
    return StagedTraining(given, placement.world, reducer, update, scaler, record)


def _split(
    job: Job, world: Ranks, data: Dataset | StreamedData, model: torch.nn.Module
) -> tuple[ImageGrid, torch.nn.Module]:
    """Return the split of images, and the network for their parts. Collective."""
    try:
        if isinstance(data, StreamedData):
            raise ValueError("only data in memory is split")
        if job.augment != Augment():
            raise ValueError("augmented images are not split")
        grid = ImageGrid(world, job.train.image_grid)
        return grid, partition(model, data.image_shape, grid)
    except (TypeError, ValueError) as error:  # the same on all ranks
        raise ConfigError(f"{job.id}: train.image_grid={job.train.image_grid}: {error}") from None


def _obeying(job: Job, model: torch.nn.Module) -> str:
    """Make layers obey the policy of a job, and return their description; "" without one."""
    try:
        found = conversion.obeyed(model, job.precision)
        left = conversion.unheard(model, job.precision)
        conversion.convert(model, job.precision, job.seed)
    except ConfigError as error:
        raise ConfigError(f"{job.id}: {error}") from None
    lines = [f"{name}: {of.told()}" for name, of in found.items()]
    return "\n".join(lines + [f"{name}: {conversion.BY_TORCH}" for name in left])

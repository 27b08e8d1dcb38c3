"""Where a job computes, its samples and network, and that they go together: before any training."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch

from ...config import ConfigError, UserError, told
from ...ops.tensors import CPU
from ...torch.split_images.grid import ImageGrid
from ...world.cores import threads_of_rank
from ...world.gpu_messages import gpu_aware, use_gpu
from ...world.ranks import Ranks
from .adversary import add_statistics
from .imports import ImportedModel
from .job import Job, Train
from .losses import LossFunction, shown
from .samples import Dataset, InMemory, Samples, Scaling, Source, device_of, taken
from .step import naming_items


def own_device(
    world: Ranks, kind: str, *, oversubscribe: bool = False, gpu_direct: str = "auto"
) -> torch.device:
    """Return the device of this process, which is torch's and CuPy's current one then. Collective.

    kind: cpu or gpu; the others: see train.job.Train
    Raises UserError on all processes alike where one has no GPU, or torch or CuPy none for it,
    where several share one that should not, and where MPI is to take GPU memory and does not.
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
    """Let torch have so many threads, 0: one for each core of this rank; return them. Collective.

    Raises UserError as threads_of_rank.
    """
    threads = wanted or threads_of_rank(world)
    torch.set_num_threads(threads)
    return threads


def cast_forward(model: torch.nn.Module, train: Train, device: torch.device) -> None:
    """Let a model's forward choose dtypes by torch.autocast, and return float32, if asked for."""
    if train.autocast == "none":
        return
    forward, dtype = model.forward, getattr(torch, train.autocast)

    @wraps(forward)
    def cast(*inputs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            outputs = forward(*inputs)
        return outputs.float() if isinstance(outputs, torch.Tensor) else outputs

    model.forward = cast


def samples_of(data: Dataset | Source, grid: ImageGrid | None = None) -> tuple[Samples, Samples]:
    """Return the samples of training and test; of split images this rank's parts."""
    if isinstance(data, Source):
        return data.train, data.test
    images = [torch.from_numpy(x) for x in (data.train_x, data.test_x)]
    train_x, test_x = images if grid is None else map(grid.cut, images)
    labels = torch.from_numpy(data.train_y), torch.from_numpy(data.test_y)
    scaling = Scaling(data.mean, data.deviation)
    return InMemory(train_x, labels[0], scaling), InMemory(test_x, labels[1], scaling)


def build_model(job: Job, data: Dataset | Source) -> torch.nn.Module:
    """Return a job's network, as its seed begins. Raises ConfigError, or the model's ValueError."""
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
    """Return whether an option of gradient names a layer: no network without layers has it."""
    try:
        job.aggregator().check_layers([])
    except ValueError:
        return True
    return False


def check_layers(job: Job, model: torch.nn.Module) -> None:
    """Raise ConfigError where an option of gradient names a layer that the network has not."""
    try:
        job.aggregator().check_layers([n for n, p in model.named_parameters() if p.requires_grad])
    except ValueError as error:
        raise of_gradient(job, error) from None


def of_gradient(job: Job, error: ValueError) -> ConfigError:
    """Return what is said of a job whose gradients cannot be averaged as it says."""
    said = str(error).removeprefix(type(job.aggregator()).__name__).lstrip(".: ")
    return ConfigError(f"{job.id}: gradient.{said}")


def check_fit(
    job: Job, model: torch.nn.Module, loss: LossFunction, samples: Samples, classes: int
) -> None:
    """Run two samples through model, loss and metric, which leaves all as it was.

    Raises ConfigError, one line that names what does not go with what.
    """
    index = np.arange(min(2, len(samples)))
    inputs, targets = taken(samples, index, 0, device_of(model))
    metrics = {f"metric {each.label}": each.build() for each in job.told}
    training, scores = model.training, list[tuple[str, Any, int]]()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), naming_items(index):
        torch.manual_seed(job.seed)  # of layers that are not initialised before
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

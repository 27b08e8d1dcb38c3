"""A job's samples and network, and that they go together, before anything is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...config import ConfigError, told
from ...torch.split_images.grid import ImageGrid
from .adversary import add_statistics
from .data import Dataset, Samples, Source
from .device import device_of, taken
from .imports import ImportedModel
from .job import Job
from .losses import LossFunction, shown
from .samples import InMemory, Scaling
from .step import naming_items


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

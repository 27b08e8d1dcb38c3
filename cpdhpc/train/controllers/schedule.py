"""Schedules: the factor on the learning rate by the time of the run and by the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from ...config import Section, suggest


def _known(name: str) -> str:
    if name not in DECAYS:
        raise ValueError(suggest(name, DECAYS))
    return name


def _known_batch_scaling(name: str) -> str:
    if name not in BATCH_SCALINGS:
        raise ValueError(suggest(name, BATCH_SCALINGS))
    return name


class Schedule(Section):
    """[schedule]: the factor on the learning rate, which changes with every iteration.

    warmup_epochs: in which it rises from 0 to 1; decay: what it does then, a name of DECAYS
    milestones: epochs, for decay "step"; gamma: factor at each milestone, or of an epoch for
        "exponential"; power: of "polynomial"
    base_batch: for which the rate and the warm-up are given; 0: for whatever train.batch is
    batch_scaling: what a batch k times as large as base_batch changes, a name of
        BATCH_SCALINGS: "linear" rate k, "sqrt" rate sqrt(k), "legw" rate sqrt(k) and warm-up
        epochs k, "linear_legw" both k
    """

    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    decay: Annotated[str, AfterValidator(_known)] = "constant"
    milestones: Annotated[tuple[float, ...], Field(strict=False)] = ()
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    power: Annotated[float, Field(gt=0)] = 1.0
    base_batch: Annotated[int, Field(ge=0)] = 0
    batch_scaling: Annotated[str, AfterValidator(_known_batch_scaling)] = "none"

    @model_validator(mode="after")
    def _batch_scaling_has_a_base(self) -> Schedule:
        if (self.batch_scaling == "none") != (self.base_batch == 0):
            raise ValueError(
                f"batch_scaling={self.batch_scaling!r}, base_batch={self.base_batch}: "
                "give both or neither"
            )
        return self

    def scaled(self, batch: int) -> tuple[float, Schedule]:
        """Return the factor on the rate for a batch, and the schedule with its warm-up."""
        if not self.base_batch:
            return 1.0, self
        k, row = batch / self.base_batch, BATCH_SCALINGS[self.batch_scaling]
        warmup_epochs = self.warmup_epochs * k**row.warmup
        return k**row.rate, self.model_copy(update={"warmup_epochs": warmup_epochs})

    def factor(self, epoch: float, epochs: int) -> float:
        """Return the factor at a time in epochs, of a run that takes so many in all.

        Source: the warm-up is that of Goyal et al., arXiv 1706.02677, section 2.2.
        """
        if epoch < self.warmup_epochs:
            return epoch / self.warmup_epochs
        return DECAYS[self.decay](self, epoch, epochs)


def constant(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return 1."""
    return 1.0


def step(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return gamma to the power of the milestones that are behind."""
    return float(schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones))


def cosine(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return half a cosine from 1 at the end of the warm-up to 0 at the end of the run.

    Source: Loshchilov, Hutter: SGDR, arXiv 1608.03983, equation 5, without restarts.
    """
    length = epochs - schedule.warmup_epochs
    return 0.5 * (1 + math.cos(math.pi * (epoch - schedule.warmup_epochs) / length))


def polynomial(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return the share of the run behind the warm-up that is left, to the power."""
    left = (epochs - epoch) / (epochs - schedule.warmup_epochs)
    return float(max(left, 0.0) ** schedule.power)


def exponential(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return gamma to the power of the epochs since the warm-up."""
    return float(schedule.gamma ** (epoch - schedule.warmup_epochs))


DECAYS: dict[str, Callable[[Schedule, float, int], float]] = {
    "constant": constant,
    "step": step,
    "cosine": cosine,
    "polynomial": polynomial,
    "exponential": exponential,
}


class Scaling(NamedTuple):
    """Powers of k, the batch by the base batch, on the rate and on the epochs of the warm-up."""

    rate: float
    warmup: float


BATCH_SCALINGS = {
    "none": Scaling(0, 0),
    "linear": Scaling(1, 0),  # Goyal et al., arXiv 1706.02677, section 2.1
    "sqrt": Scaling(0.5, 0),
    "linear_legw": Scaling(1, 1),
    "legw": Scaling(0.5, 1),  # You et al., arXiv 1901.08256: the warm-up keeps its iterations
}

"""What decides the learning rate and the batch of every step, and schedules, which see nothing."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy.typing as npt
from pydantic import Field, model_validator

from ...compress.base import Column
from ...config import Above0, NotNegative, Section, Whole, one_of
from ...world.ranks import Loopback, Ranks

Array = npt.NDArray[Any]
DEFAULT_RATE = 0.1


@dataclass(frozen=True)
class Norms:
    """Squared norms of the gradients of a step, before any compression; alike on all ranks.

    of_ranks: float64[ranks], of the gradient of the mean loss of each rank's own samples; 0 where
        it had none; of_mean: of the gradient of the mean loss of all samples
    samples: int64[ranks], those that ranks had
    """

    of_ranks: Array
    of_mean: float
    samples: Array


class Controller(ABC):
    """Decides the learning rate and the batch of each step, alike on all ranks.

    It is asked before each step and told of each step; all it is told is shared by all ranks.
    columns: what it offers of each step for the record
    """

    columns: ClassVar[Mapping[str, Column]] = {}

    @abstractmethod
    def next(self, samples_seen: int) -> tuple[float, int]:
        """Return (learning rate, samples of all ranks together) of the step that begins there."""

    def observe_norms(self, norms: Norms | None) -> None:
        """Take note of a step's gradients, before observe, where Control.measures_norms.

        None: one of them overflowed, and the step was skipped.
        """

    def observe(self, samples_seen: int, loss: float) -> None:
        """Take note of a step: the samples seen behind it, the loss of its global batch.

        All processes call it alike, so it may be collective.
        """

    def telemetry(self) -> Mapping[str, float]:
        """Return the columns of the step that was observed last."""
        return {}

    def state(self) -> dict[str, Array]:
        """Return what it must know to go on, as arrays, for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take over what state returned."""


@dataclass(frozen=True)
class Settings:
    """What a job says of rate and batch; samples: of the training set; world: that trains."""

    schedule: Schedule
    rate: float
    batch: int
    epochs: int
    samples: int
    world: Ranks = field(default_factory=Loopback)

    def iteration(self, samples_seen: int) -> tuple[int, int]:
        """Return (iterations done, iterations of an epoch) of a run whose batch is constant."""
        epoch, inside = divmod(samples_seen, self.samples)
        per_epoch = -(-self.samples // self.batch)  # the last batch of an epoch may be smaller
        return epoch * per_epoch + inside // self.batch, per_epoch


class Scheduled(Controller):
    """A constant batch, and a rate that follows the schedule, changed with every iteration."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        factor, self.schedule = settings.schedule.scaled(settings.batch)
        self.rate = settings.rate * factor

    def next(self, samples_seen: int) -> tuple[float, int]:
        """Return the scheduled rate, and the batch. See Controller.next."""
        job = self.settings
        iterations, per_epoch = job.iteration(samples_seen)
        begin, end = iterations / per_epoch, (iterations + 1) / per_epoch
        return self.rate * self.schedule.factor(begin, job.epochs, end), job.batch


class Control(Section):
    """[controller]: who decides rate and batch, named in CONTROLLERS.

    measures_norms: whether it is told the norms of gradients, for which two ranks are needed
    decides: keys of a job, or how they begin, that have no meaning beside it
    """

    name: str
    decides: ClassVar[tuple[str, ...]] = ()
    measures_norms: ClassVar[bool] = False

    @abstractmethod
    def build(self, settings: Settings) -> Controller:
        """Return the controller of a run that begins."""

    def check(self, settings: Settings) -> None:
        """Raise ValueError for what does not go with the job; samples and world are unknown."""

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError where it cannot do with so many ranks, virtual ones included."""
        if self.measures_norms and ranks < 2:
            raise ValueError(
                f"{ranks} rank: the noise is in the differences between ranks: should be 2 or "
                "more, by mpirun or train.virtual_ranks"
            )


class BySchedule(Control):
    """[controller] name = "schedule": as [schedule] and [train] say."""

    name: Literal["schedule"] = "schedule"

    def build(self, settings: Settings) -> Controller:
        """Return the controller. See Control.build."""
        return Scheduled(settings)


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


class Schedule(Section):
    """[schedule]: the factor on the learning rate, which changes with every iteration.

    warmup_epochs: in which it rises to 1, of n steps by 1/n with each, from 1/n in the first one
    decay: what it does then, a name of DECAYS
    milestones: epochs, for decay "step"; gamma: factor at each milestone, or of an epoch for
        "exponential"; power: of "polynomial"
    base_batch: for which the rate and the warm-up are given; 0: for whatever train.batch is
    batch_scaling: what a batch k times as large as base_batch changes, a name of
        BATCH_SCALINGS: "linear" rate k, "sqrt" rate sqrt(k), "legw" rate sqrt(k) and warm-up
        epochs k, "linear_legw" both k
    """

    warmup_epochs: NotNegative = 0.0
    decay: Annotated[str, one_of(DECAYS)] = "constant"
    milestones: Annotated[tuple[NotNegative, ...], Field(strict=False)] = ()
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    power: Above0 = 1.0
    base_batch: Whole = 0
    batch_scaling: Annotated[str, one_of(BATCH_SCALINGS)] = "none"

    @model_validator(mode="after")
    def _batch_scaling_has_a_base(self) -> Schedule:
        if (self.batch_scaling == "none") != (self.base_batch == 0):
            raise ValueError(
                f"batch_scaling={self.batch_scaling!r}, base_batch={self.base_batch}: "
                "give both or neither"
            )
        return self

    @model_validator(mode="after")
    def _steps_have_milestones(self) -> Schedule:
        if self.decay == "step" and not self.milestones:
            raise ValueError("decay='step': needs milestones: epochs, as [30, 60]")
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError(f"milestones={list(self.milestones)}: must ascend, as [30, 60]")
        return self

    def scaled(self, batch: int) -> tuple[float, Schedule]:
        """Return the factor on the rate for a batch, and the schedule with its warm-up."""
        if not self.base_batch:
            return 1.0, self
        k, row = batch / self.base_batch, BATCH_SCALINGS[self.batch_scaling]
        warmup_epochs = self.warmup_epochs * k**row.warmup
        return k**row.rate, self.model_copy(update={"warmup_epochs": warmup_epochs})

    def factor(self, epoch: float, epochs: int, end: float) -> float:
        """Return the factor of a step, of a run that takes so many epochs in all.

        epoch, end: when it begins and ends, in epochs. In the warm-up the end counts, as no step is
        to be without a rate.
        Source: the warm-up is that of Goyal et al., arXiv 1706.02677, section 2.2, by the same
        amount with each step, which begins there with the rate of the base batch.
        """
        if epoch < self.warmup_epochs:
            return min(end / self.warmup_epochs, 1.0)
        return DECAYS[self.decay](self, epoch, epochs)

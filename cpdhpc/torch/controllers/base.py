"""Controllers, which decide the learning rate and the batch of every step, and fixed schedules."""

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
    """Squared norms of a step's gradients, before any compression; the same on all ranks.

    of_ranks: float64[ranks], of the gradient of the mean loss of each rank's own samples; 0 if
        it had none; of_mean: of the gradient of the mean loss of all samples
    samples: int64[ranks], each rank's number of samples
    """

    of_ranks: Array
    of_mean: float
    samples: Array


class Controller(ABC):
    """Decides the learning rate and the batch of each step, identically on all ranks.

    It is called before and after each step; all its arguments are the same on all ranks.
    columns: its columns for the record of each step
    """

    columns: ClassVar[Mapping[str, Column]] = {}

    @abstractmethod
    def next(self, samples_seen: int) -> tuple[float, int]:
        """Return (learning rate, samples of all ranks together) of the step that begins there."""

    def observe_norms(self, norms: Norms | None) -> None:
        """Record a step's gradients, called before observe if Control.measures_norms is set.

        None: one of them overflowed, and the step was skipped.
        """

    def observe(self, samples_seen: int, loss: float) -> None:
        """Record a step: the samples seen after it, the loss of its global batch.

        All processes call it with the same arguments, so it may be collective.
        """

    def telemetry(self) -> Mapping[str, float]:
        """Return the columns of the last observed step."""
        return {}

    def state(self) -> dict[str, Array]:
        """Return the arrays that a checkpoint needs in order to resume."""
        return {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restore the result of state."""


@dataclass(frozen=True)
class Settings:
    """A job's settings of rate and batch; samples: of the training set; world: that trains."""

    schedule: Schedule
    rate: float
    batch: int
    epochs: int
    samples: int
    world: Ranks = field(default_factory=Loopback)

    def iteration(self, samples_seen: int) -> tuple[int, int]:
        """Return (iterations done, iterations per epoch) of a run whose batch is constant."""
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
    """[controller]: the method that decides rate and batch, named in CONTROLLERS.

    measures_norms: whether it needs the norms of gradients, which takes at least two ranks
    decides: keys of a job, or their prefixes, that have no meaning with it
    """

    name: str
    decides: ClassVar[tuple[str, ...]] = ()
    measures_norms: ClassVar[bool] = False

    @abstractmethod
    def build(self, settings: Settings) -> Controller:
        """Return the controller of a new run."""

    def check(self, settings: Settings) -> None:
        """Raise ValueError if the job does not fit; samples and world are unknown."""

    def check_ranks(self, ranks: int) -> None:
        """Raise ValueError if this number of ranks, virtual ones included, is not possible."""
        if self.measures_norms and ranks < 2:
            raise ValueError(
                f"{ranks} rank: noise is measured by differences between ranks: should be 2 or "
                "more, by mpirun or train.virtual_ranks"
            )


class BySchedule(Control):
    """[controller] name = "schedule": rate and batch follow [schedule] and [train]."""

    name: Literal["schedule"] = "schedule"

    def build(self, settings: Settings) -> Controller:
        """Return the controller. See Control.build."""
        return Scheduled(settings)


def constant(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return 1."""
    return 1.0


def step(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return gamma to the power of the number of past milestones."""
    return float(schedule.gamma ** sum(epoch >= milestone for milestone in schedule.milestones))


def cosine(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return half a cosine from 1 at the end of the warm-up to 0 at the end of the run.

    Source: Loshchilov, Hutter: SGDR, arXiv 1608.03983, equation 5, without restarts.
    """
    length = epochs - schedule.warmup_epochs
    return 0.5 * (1 + math.cos(math.pi * (epoch - schedule.warmup_epochs) / length))


def polynomial(schedule: Schedule, epoch: float, epochs: int) -> float:
    """Return the remaining share of the run after the warm-up, to the power."""
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


class BatchScaling(NamedTuple):
    """Powers of k, the batch by the base batch, on the rate and on the epochs of the warm-up."""

    rate: float
    warmup: float


BATCH_SCALINGS = {
    "none": BatchScaling(0, 0),
    "linear": BatchScaling(1, 0),  # Goyal et al., arXiv 1706.02677, section 2.1
    "sqrt": BatchScaling(0.5, 0),
    "linear_legw": BatchScaling(1, 1),
    "legw": BatchScaling(0.5, 1),  # You et al., arXiv 1901.08256: the warm-up keeps its iterations
}


class Schedule(Section):
    """[schedule]: the factor on the learning rate, which changes with every iteration.

    warmup_epochs: the factor rises to 1 in these epochs: in n steps by 1/n each, from 1/n on
    decay: the course after the warm-up, a name of DECAYS
    milestones: epochs, for decay "step"; gamma: factor at each milestone, or of an epoch for
        "exponential"; power: of "polynomial"
    base_batch: the batch for which rate and warm-up are meant; 0: train.batch
    batch_scaling: the effect of a batch k times as large as base_batch, a name of
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
            raise ValueError("decay='step': needs milestones: epochs, for example [30, 60]")
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError(f"milestones={list(self.milestones)}: must ascend, like [30, 60]")
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

        epoch, end: the step's begin and end, in epochs. In the warm-up the end counts, so that no
        step has rate 0.
        Source: the warm-up is that of Goyal et al., arXiv 1706.02677, section 2.2, by the same
        amount with each step, which begins there with the rate of the base batch.
        """
        if epoch < self.warmup_epochs:
            return min(end / self.warmup_epochs, 1.0)
        return DECAYS[self.decay](self, epoch, epochs)

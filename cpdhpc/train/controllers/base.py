"""What decides the learning rate and the batch of every step, and the one that sees nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy.typing as npt

from ...compress.base import Column
from ...config import Section
from ...world.ranks import Loopback, Ranks
from .schedule import Schedule

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
        return self.rate * self.schedule.factor(iterations / per_epoch, job.epochs), job.batch


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

"""Learning rates: a linear warm-up, then a decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field

from ..config import Section, suggest


def _known(name: str) -> str:
    if name not in DECAYS:
        raise ValueError(suggest(name, DECAYS))
    return name


class Schedule(Section):
    """[schedule]: the factor on the learning rate, which changes with every iteration."""

    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    decay: Annotated[str, AfterValidator(_known)] = "constant"
    milestones: Annotated[tuple[float, ...], Field(strict=False)] = ()  # epochs; for "step"
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1  # factor at each milestone; for "step"

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


DECAYS: dict[str, Callable[[Schedule, float, int], float]] = {
    "constant": constant,
    "step": step,
    "cosine": cosine,
}

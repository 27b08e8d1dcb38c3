"""A batch that grows towards the gradient noise scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from .base import Array, Controller, Settings
from .noise import ByNoise, Measured


class Growing(Measured):
    """Doubles the batch while the noise scale is above it, and lets the rate follow.

    doublings: of train.batch so far; calm: steps since the last one
    """

    def __init__(self, settings: Settings, options: ByAdaptiveBatch) -> None:
        super().__init__(settings, options.smoothing)
        self.share = options.share
        self.most = min(options.max_batch or settings.samples, settings.samples)
        self.doublings, self.calm = 0, 0

    def next(self, samples_seen: int) -> tuple[float, int]:
        """Return the rate of the grown batch, and that batch. See Controller.next."""
        job = self.settings
        batch = job.batch << self.doublings
        factor, _ = job.schedule.scaled(batch)  # the warm-up stays that of the first batch
        factor *= self.schedule.factor(samples_seen / job.samples, job.epochs)
        return job.rate * factor, batch

    def observe(self, samples_seen: int, loss: float) -> None:
        """Double the batch where the noise scale says so. See Controller.observe."""
        self.calm += 1
        larger = self.settings.batch << (self.doublings + 1)
        settled = self.noise.settled and self.calm * (1 - self.noise.smoothing) >= 1
        if settled and larger <= self.most and larger <= self.share * self.noise.value:
            self.doublings, self.calm = self.doublings + 1, 0

    def state(self) -> dict[str, Array]:
        """Return where batch and noise stand. See Controller.state."""
        return super().state() | {"batch": np.array([self.doublings, self.calm])}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take over what state returned."""
        super().restore(state)
        self.doublings, self.calm = map(int, state["batch"])


class ByAdaptiveBatch(ByNoise):
    """[controller] name = "adaptive_batch": the batch doubles towards the gradient noise scale.

    It begins at train.batch, never shrinks, and waits 1 / (1 - smoothing) steps after each
    doubling. The rate follows as schedule.batch_scaling says, with the warm-up of the first batch.

    share: of the noise scale that the batch grows to; at 1 the batch takes twice the least steps
        and twice the least samples
    max_batch: no batch is larger; 0: no larger than all training samples
    Source: McCandlish et al., arXiv 1812.06162, appendix D, in powers of two.
    """

    name: Literal["adaptive_batch"] = "adaptive_batch"
    share: Annotated[float, Field(gt=0)] = 1.0
    max_batch: Annotated[int, Field(ge=0)] = 0

    def check(self, settings: Settings) -> None:
        """Raise ValueError where the batch may not grow. See Control.check."""
        if self.max_batch and self.max_batch < 2 * settings.batch:
            raise ValueError(
                f"max_batch={self.max_batch}: should be 0, or twice train.batch={settings.batch} "
                "or more"
            )

    def build(self, settings: Settings) -> Controller:
        """Return the controller. See Control.build."""
        return Growing(settings, self)

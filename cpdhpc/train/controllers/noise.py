"""The gradient noise scale: the batch beyond which more samples in a step gain little."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, isnan, nan
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from ...compress.base import Column
from .base import (
    Array,
    Control,
    Controller,
    Norms,
    Scheduled,
    Settings,
)

COLUMNS = {  # with optimisers that precondition, of gradients times sqrt(P)
    "gradient_variance": Column(
        "estimate of the trace of the covariance of the gradients of single samples"
    ),
    "gradient_norm2": Column("estimate of the squared norm of the gradient without noise"),
    "noise_scale": Column("gradient noise scale, the quotient of both running means"),
}


def moments(norms: Norms) -> tuple[float, float]:
    """Return unbiased estimates of tr(Sigma) and |G|^2 from one step; NaN from one rank's samples.

    With b_i of B samples on p ranks, E |g_i|^2 = |G|^2 + tr(Sigma) / b_i. So the mean s of |g_i|^2
    with weights b_i / B has |G|^2 + p tr(Sigma) / B, and the mean gradient |G|^2 + tr(Sigma) / B.
    Either estimate may be negative: only their means say something.
    Source: McCandlish et al., arXiv 1812.06162, appendix A.1, here for any shares.
    """
    ranks, batch = int(np.count_nonzero(norms.samples)), int(norms.samples.sum())
    if ranks < 2:
        return nan, nan
    small = float(np.sum(norms.of_ranks * norms.samples) / batch)
    variance = batch * (small - norms.of_mean) / (ranks - 1)
    return variance, (ranks * norms.of_mean - small) / (ranks - 1)


class NoiseScale:
    """Running means of both moments, each for itself: the mean of their quotients has no limit.

    smoothing: what remains of a step's weight after the next one; a step weighs as its samples do
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.last = nan, nan
        self.sums = np.zeros(4)  # of steps, of samples, of both moments times samples

    def observe(self, norms: Norms | None) -> None:
        """Take note of a step; None: it was skipped."""
        self.last = (nan, nan) if norms is None else moments(norms)
        if norms is not None and not isnan(self.last[0]):
            batch = float(norms.samples.sum())
            each = np.array([1.0, batch, *(batch * moment for moment in self.last)])
            self.sums = self.smoothing * self.sums + each

    @property
    def settled(self) -> bool:
        """Whether so many steps are in the means that the first ones weigh little."""
        return bool(self.sums[0] * (1 - self.smoothing) >= 1 - exp(-1))

    @property
    def value(self) -> float:
        """tr(Sigma) / |G|^2, in samples: 0 and infinity where an estimate is not above 0."""
        variance, norm2 = (float(each) for each in self.sums[2:])
        if variance <= 0:
            return nan if norm2 <= 0 else 0.0
        return inf if norm2 <= 0 else variance / norm2


class Measured(Scheduled):
    """Rate and batch of the schedule; the noise is recorded, and known to rows that do more."""

    columns = COLUMNS

    def __init__(self, settings: Settings, smoothing: float) -> None:
        super().__init__(settings)
        self.noise = NoiseScale(smoothing)

    def observe_norms(self, norms: Norms | None) -> None:
        """Take note of a step's gradients. See Controller.observe_norms."""
        self.noise.observe(norms)

    def telemetry(self) -> Mapping[str, float]:
        """Return the step's two moments and the noise scale. See Controller.telemetry."""
        return dict(zip(COLUMNS, (*self.noise.last, self.noise.value), strict=True))

    def state(self) -> dict[str, Array]:
        """Return the running sums. See Controller.state."""
        return {"noise": self.noise.sums}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take over what state returned."""
        self.noise.sums = np.array(state["noise"])


class ByNoise(Control):
    """What rows share that measure the noise.

    smoothing: of the running means, what remains of a step's weight after the next step
    """

    measures_norms: ClassVar[bool] = True
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.99


class ByNoiseScale(ByNoise):
    """[controller] name = "noise_scale": as [schedule] says, and the noise is recorded."""

    name: Literal["noise_scale"] = "noise_scale"

    def build(self, settings: Settings) -> Controller:
        """Return the controller. See Control.build."""
        return Measured(settings, self.smoothing)

"""The gradient noise scale, beyond which a larger batch gains little; batches that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, isnan, nan
from typing import ClassVar, Literal

import numpy as np

from ...compress.base import Column
from ...config import Above0, Share, Whole
from .base import Array, Control, Controller, Norms, Scheduled, Settings

COLUMNS = {  # with preconditioning optimisers, of gradients times sqrt(P)
    "gradient_variance": Column(
        "estimate of the trace of the covariance of the gradients of single samples"
    ),
    "gradient_norm2": Column("estimate of the squared norm of the gradient without noise"),
    "noise_scale": Column("gradient noise scale, the quotient of both running means"),
}


def moments(norms: Norms) -> tuple[float, float]:
    """Return unbiased estimates of tr(Sigma) and |G|^2 from one step; NaN if one rank has all.

    With b_i of B samples on p ranks, E |g_i|^2 = |G|^2 + tr(Sigma) / b_i. So the mean s of |g_i|^2
    with weights b_i / B has |G|^2 + p tr(Sigma) / B, and the mean gradient |G|^2 + tr(Sigma) / B.
    Either estimate may be negative: only their means over steps are meaningful.
    Source: McCandlish et al., arXiv 1812.06162, appendix A.1, here for any shares.
    """
    ranks, batch = int(np.count_nonzero(norms.samples)), int(norms.samples.sum())
    if ranks < 2:
        return nan, nan
    small = float(np.sum(norms.of_ranks * norms.samples) / batch)
    variance = batch * (small - norms.of_mean) / (ranks - 1)
    return variance, (ranks * norms.of_mean - small) / (ranks - 1)


class NoiseScale:
    """Separate running means of both moments, as the mean of their quotients has no limit.

    smoothing: the factor on a step's weight with each further step; a step weighs by its samples
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing
        self.last = nan, nan
        self.sums = np.zeros(4)  # of steps, of samples, of both moments times samples

    def observe(self, norms: Norms | None) -> None:
        """Add a step; None: it was skipped."""
        self.last = (nan, nan) if norms is None else moments(norms)
        if norms is not None and not isnan(self.last[0]):
            batch = float(norms.samples.sum())
            each = np.array([1.0, batch, *(batch * moment for moment in self.last)])
            self.sums = self.smoothing * self.sums + each

    @property
    def settled(self) -> bool:
        """Whether the means include so many steps that the first ones weigh little."""
        return bool(self.sums[0] * (1 - self.smoothing) >= 1 - exp(-1))

    @property
    def value(self) -> float:
        """tr(Sigma) / |G|^2, in samples: 0 and infinity if an estimate is not above 0."""
        variance, norm2 = (float(each) for each in self.sums[2:])
        if variance <= 0:
            return nan if norm2 <= 0 else 0.0
        return inf if norm2 <= 0 else variance / norm2


class Measured(Scheduled):
    """Rate and batch of the schedule; the noise is measured, for the record and for subclasses."""

    columns = COLUMNS

    def __init__(self, settings: Settings, smoothing: float) -> None:
        super().__init__(settings)
        self.noise = NoiseScale(smoothing)

    def observe_norms(self, norms: Norms | None) -> None:
        """Add a step's gradients. See Controller.observe_norms."""
        self.noise.observe(norms)

    def telemetry(self) -> Mapping[str, float]:
        """Return the step's two moments and the noise scale. See Controller.telemetry."""
        return dict(zip(COLUMNS, (*self.noise.last, self.noise.value), strict=True))

    def state(self) -> dict[str, Array]:
        """Return the running sums. See Controller.state."""
        return {"noise": self.noise.sums}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restore the result of state."""
        self.noise.sums = np.array(state["noise"])


class ByNoise(Control):
    """The common options of controllers that measure the noise.

    smoothing: of the running means, the factor on a step's weight with each further step
    """

    measures_norms: ClassVar[bool] = True
    smoothing: Share = 0.99


class ByNoiseScale(ByNoise):
    """[controller] name = "noise_scale": rates of [schedule]; the noise scale is recorded."""

    name: Literal["noise_scale"] = "noise_scale"

    def build(self, settings: Settings) -> Controller:
        """Return the controller. See Control.build."""
        return Measured(settings, self.smoothing)


class Growing(Measured):
    """Doubles the batch while the noise scale is above it, and scales the rate accordingly.

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
        begin, end = samples_seen / job.samples, (samples_seen + batch) / job.samples
        factor *= self.schedule.factor(begin, job.epochs, end)
        return job.rate * factor, batch

    def observe(self, samples_seen: int, loss: float) -> None:
        """Double the batch if the noise scale requires it. See Controller.observe."""
        self.calm += 1
        larger = self.settings.batch << (self.doublings + 1)
        settled = self.noise.settled and self.calm * (1 - self.noise.smoothing) >= 1
        if settled and larger <= self.most and larger <= self.share * self.noise.value:
            self.doublings, self.calm = self.doublings + 1, 0

    def state(self) -> dict[str, Array]:
        """Return the state of batch and noise. See Controller.state."""
        return super().state() | {"batch": np.array([self.doublings, self.calm])}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restore the result of state."""
        super().restore(state)
        self.doublings, self.calm = map(int, state["batch"])


class ByAdaptiveBatch(ByNoise):
    """[controller] name = "adaptive_batch": the batch doubles towards the gradient noise scale.

    It begins at train.batch, never shrinks, and waits 1 / (1 - smoothing) steps after each
    doubling. The rate follows schedule.batch_scaling, with the warm-up of the first batch.

    share: of the noise scale that the batch grows to; at 1 the batch takes twice the least steps
        and twice the least samples
    max_batch: the largest batch; 0: all training samples
    Source: McCandlish et al., arXiv 1812.06162, appendix D, in powers of two.
    """

    name: Literal["adaptive_batch"] = "adaptive_batch"
    share: Above0 = 1.0
    max_batch: Whole = 0

    def check(self, settings: Settings) -> None:
        """Raise ValueError if the batch could not grow. See Control.check."""
        if self.max_batch and self.max_batch < 2 * settings.batch:
            raise ValueError(
                f"max_batch={self.max_batch}: should be 0, or twice train.batch={settings.batch} "
                "or more"
            )

    def build(self, settings: Settings) -> Controller:
        """Return the controller. See Control.build."""
        return Growing(settings, self)

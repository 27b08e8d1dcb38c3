"""AutoWU: the learning rate rises until the loss rises, and then falls from its best value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, cos, erfc, pi, sqrt
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from ...config import Above0, Positive
from .base import DEFAULT_RATE, Array, Control, Controller, Schedule, Settings

LENGTH = 0.2  # of the kernel
NODES, SMALLEST = 32, 1e-13  # of the kernel's eigenvalues, which fall faster than exponentially
RATIOS = np.geomspace(1e-6, 1e4, 101)  # trial ratios of the noise's variance to the function's
JITTER = 1e-4  # nat^2, the minimal variance of a difference: without it flat losses "rise"


def kernel(one: Array, other: Array) -> Array:
    """Return float64[m, n], exp(-(x - y)^2 / (2 LENGTH^2)), the covariance per variance."""
    found: Array = np.exp(-0.5 * ((one[:, None] - other[None, :]) / LENGTH) ** 2)
    return found


def features(x: Array) -> Array:
    """Return F, float64[n, at most NODES], so that kernel(x, x) = F F' to within 1e-9.

    Computed by eigenvectors at Chebyshev's nodes, so that all sums are over few numbers.
    Source: Williams, Seeger: Using the Nystroem method to speed up kernel machines, NIPS 2000.
    """
    nodes = 0.5 - 0.5 * np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    values, vectors = np.linalg.eigh(kernel(nodes, nodes))
    known = values > SMALLEST
    found: Array = kernel(x, nodes) @ (vectors[:, known] / np.sqrt(values[known]))
    return found


@dataclass(frozen=True)
class Process:
    """A process of zero mean. variance: of its values; noise: variance ratio of observations."""

    variance: float
    noise: float

    @classmethod
    def likeliest(cls, x: Array, y: Array) -> Process:
        """Return the maximum-likelihood process for observations y, float64[n] of mean 0.

        For a given ratio of both variances the best variance is known, so only the ratio is
        searched, on a grid.
        Source: Rasmussen, Williams: Gaussian Processes for Machine Learning, MIT 2006, equation
        5.8, in the kernel's eigenvectors.
        """
        left, roots, _ = np.linalg.svd(features(x), full_matrices=False)
        along = (left.T @ y) ** 2
        rest = max(float(y @ y - along.sum()), 0.0)  # of y, explained only by noise
        spread = roots**2 + RATIOS[:, None]
        variances = ((along / spread).sum(axis=1) + rest / RATIOS) / len(y)
        if not variances.any():
            return cls(0.0, 1.0)
        unlikely = len(y) * np.log(variances) + np.log(spread).sum(axis=1)
        unlikely += (len(y) - len(roots)) * np.log(RATIOS)
        best = int(np.argmin(unlikely))
        return cls(float(variances[best]), float(RATIOS[best]))

    def posterior(self, x: Array, y: Array, places: Array) -> tuple[Array, Array]:
        """Return means at places, and variances of their differences from the last, per variance.

        Source: the same, equation 2.11.
        """
        seen, asked = features(x), features(places)
        inverse = np.linalg.inv(seen.T @ seen / self.noise + np.eye(seen.shape[1]))
        apart = asked - asked[-1]
        return asked @ inverse @ (seen.T @ y) / self.noise, np.sum(apart @ inverse * apart, axis=1)


def least(process: Process, x: Array, y: Array, places: Array) -> tuple[float, float]:
    """Return the place of the least posterior mean, and the certainty of a rise since then.

    x, y: float64[n], observations; places: ascending
    The certainty is the largest probability, over places, that the value there is below the last.
    """
    means, variances = process.posterior(x, y, places)
    deviations = np.sqrt(process.variance * np.maximum(variances, 0.0) + JITTER)
    highest = np.max((means[-1] - means) / deviations)
    return float(places[np.argmin(means)]), 0.5 * erfc(-float(highest) / sqrt(2))


DRAWN_TO_FIT, DRAWN_TO_TEST, PLACES, TESTS = 100, 500, 500, 5  # of the method


def turning_point(losses: Array, confidence: float) -> tuple[bool, Array]:
    """Return whether the loss has risen since its least value, and the places of least values.

    losses: float64[n] of the steps so far; places: float64[TESTS], 0..1 of the steps
    Each test draws its own steps, seeded by their number; the majority of tests decides.
    Source: Kim et al., arXiv 2107.05855, section 3.
    """
    n = len(losses)
    chance = np.random.default_rng(n)
    x, y = np.linspace(0, 1, n), losses - losses.mean()

    def drawn(most: int) -> Array:
        which: Array = np.sort(chance.choice(n, min(n, most), replace=False))
        return which

    few = drawn(DRAWN_TO_FIT)
    process, grid = Process.likeliest(x[few], y[few]), np.linspace(0, 1, PLACES)
    found = []
    for _ in range(TESTS):
        some = drawn(DRAWN_TO_TEST)
        found.append(least(process, x[some], y[some], grid))
    risen = sum(sure > confidence for _, sure in found) > TESTS // 2
    return risen, np.array([place for place, _ in found])


class AutoWu(Controller):
    """Raises the rate exponentially, step by step, and lets it decay once the loss has risen.

    losses: float64, of the steps of the warm-up so far; votes: consecutive epochs at whose end
        the loss was found to have risen
    start, peak: the first step of the decay, and its rate
    """

    def __init__(self, settings: Settings, options: ByAutoWu) -> None:
        self.settings, self.options = settings, options
        _, per_epoch = settings.iteration(0)
        self.steps = settings.epochs * per_epoch
        self.warmup = options.warmup_share * self.steps
        self.losses, self.votes = np.zeros(0), 0
        self.start, self.peak = ceil(self.warmup), options.max_rate

    def rising(self, step: float) -> float:
        """Return the rate of the warm-up at a step."""
        low, high = self.options.min_rate, self.options.max_rate
        return float(low * (high / low) ** (step / self.warmup))

    def next(self, samples_seen: int) -> tuple[float, int]:
        """Return the rate and the batch. See Controller.next."""
        step, _ = self.settings.iteration(samples_seen)
        rate = self.rising(step) if step < self.start else self.peak * self.decay(step)
        return rate, self.settings.batch

    def decay(self, step: int) -> float:
        """Return the factor on the peak: half a cosine, after a constant part if configured."""
        first = self.start
        if self.options.decay == "constant_cosine":
            first = max(first, ceil((1 - self.options.cooldown_share) * self.steps))
        return 0.5 * (1 + cos(pi * max(step - first, 0) / max(self.steps - first, 1)))

    def observe(self, samples_seen: int, loss: float) -> None:
        """Add the loss of a step; at the end of an epoch test all so far. Collective then.

        Process 0 decides for all: linear algebra may round differently on another processor.
        """
        step, per_epoch = self.settings.iteration(samples_seen)
        if step > self.start:
            return
        self.losses = np.append(self.losses, loss)
        if step % per_epoch or step < 2:
            return
        risen, places = self.settings.world.on_first(
            lambda: turning_point(self.losses, self.options.confidence), "controller"
        )
        self.votes = self.votes + 1 if risen else 0
        if self.votes >= self.options.patience:
            rates = [self.rising(place * (len(self.losses) - 1)) for place in places]
            self.start, self.peak = step, sum(rates) / len(rates)

    def state(self) -> dict[str, Array]:
        """Return the losses and the decisions so far. See Controller.state."""
        return {
            "losses": self.losses,
            "decided": np.array([self.start, self.votes]),
            "rise": np.array([self.warmup, self.peak]),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restore the result of state."""
        self.losses = np.array(state["losses"])
        self.start, self.votes = map(int, state["decided"])
        self.warmup, self.peak = map(float, state["rise"])  # of a run that may have been shorter


class ByAutoWu(Control):
    """[controller] name = "autowu": the rate rises until the loss rises, then falls from its best.

    It has rates of its own: train.learning_rate and [schedule] may not be set with it. The weights
    are not reset to those of the best rate: runs of less than about 60 epochs overshoot.

    min_rate, max_rate: the rates at the start and the end of a full warm-up
    warmup_share: the warm-up's largest share of all steps; then the rate falls from max_rate
    patience: consecutive epochs in which the loss must be found to have risen
    confidence: the probability required for that finding
    decay: "cosine" falls at once, "constant_cosine" in the last steps; cooldown_share: their share
    Source: Kim et al., arXiv 2107.05855, with its defaults.
    """

    decides: ClassVar[tuple[str, ...]] = ("train.learning_rate", "schedule.")

    name: Literal["autowu"] = "autowu"
    min_rate: Above0 = 1e-5
    max_rate: Above0 = 1.0
    warmup_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    patience: Positive = 3
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    decay: Literal["cosine", "constant_cosine"] = "cosine"
    cooldown_share: Annotated[float, Field(gt=0, le=1)] = 0.2

    @model_validator(mode="after")
    def _rates_rise(self) -> ByAutoWu:
        if self.min_rate >= self.max_rate:
            raise ValueError(
                f"min_rate={self.min_rate:g}: should be below max_rate={self.max_rate:g}"
            )
        return self

    def check(self, settings: Settings) -> None:
        """Raise ValueError if the job has rates too. See Control.check."""
        if settings.schedule != Schedule():
            raise ValueError("has a warm-up and a decay of its own: [schedule] should be left out")
        if settings.rate != DEFAULT_RATE:
            raise ValueError(
                f"train.learning_rate={settings.rate:g}: has rates of its own: should be left out"
            )

    def build(self, settings: Settings) -> Controller:
        """Return the controller. See Control.build."""
        return AutoWu(settings, self)

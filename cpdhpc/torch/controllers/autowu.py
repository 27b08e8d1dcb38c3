"""AutoWU: the learning rate rises until the loss does, and falls from where the loss was least."""

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
RATIOS = np.geomspace(1e-6, 1e4, 101)  # variance of the noise by that of the function, tried
JITTER = 1e-4  # nat^2, a variance that a difference has in any case: else flat losses "rise"


def kernel(one: Array, other: Array) -> Array:
    """Return float64[m, n], exp(-(x - y)^2 / (2 LENGTH^2)), the covariance by its variance."""
    found: Array = np.exp(-0.5 * ((one[:, None] - other[None, :]) / LENGTH) ** 2)
    return found


def features(x: Array) -> Array:
    """Return F, float64[n, at most NODES], so that kernel(x, x) = F F' to within 1e-9.

    By eigenvectors at Chebyshev's nodes, so that all sums are over few numbers.
    Source: Williams, Seeger: Using the Nystroem method to speed up kernel machines, NIPS 2000.
    """
    nodes = 0.5 - 0.5 * np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    values, vectors = np.linalg.eigh(kernel(nodes, nodes))
    known = values > SMALLEST
    found: Array = kernel(x, nodes) @ (vectors[:, known] / np.sqrt(values[known]))
    return found


@dataclass(frozen=True)
class Process:
    """A process of zero mean. variance: of its values; noise: of what is observed, by variance."""

    variance: float
    noise: float

    @classmethod
    def likeliest(cls, x: Array, y: Array) -> Process:
        """Return the process that makes observations y, float64[n] of mean 0, the likeliest.

        For a ratio of both variances the best variance is known, so one number remains, which is
        tried on a grid.
        Source: Rasmussen, Williams: Gaussian Processes for Machine Learning, MIT 2006, equation
        5.8, in the kernel's eigenvectors.
        """
        left, roots, _ = np.linalg.svd(features(x), full_matrices=False)
        along = (left.T @ y) ** 2
        rest = max(float(y @ y - along.sum()), 0.0)  # of y, which only noise explains
        spread = roots**2 + RATIOS[:, None]
        variances = ((along / spread).sum(axis=1) + rest / RATIOS) / len(y)
        if not variances.any():
            return cls(0.0, 1.0)
        unlikely = len(y) * np.log(variances) + np.log(spread).sum(axis=1)
        unlikely += (len(y) - len(roots)) * np.log(RATIOS)
        best = int(np.argmin(unlikely))
        return cls(float(variances[best]), float(RATIOS[best]))

    def posterior(self, x: Array, y: Array, places: Array) -> tuple[Array, Array]:
        """Return means at places, and variances of what they differ from the last, by variance.

        Source: the same, equation 2.11.
        """
        seen, asked = features(x), features(places)
        inverse = np.linalg.inv(seen.T @ seen / self.noise + np.eye(seen.shape[1]))
        apart = asked - asked[-1]
        return asked @ inverse @ (seen.T @ y) / self.noise, np.sum(apart @ inverse * apart, axis=1)


def least(process: Process, x: Array, y: Array, places: Array) -> tuple[float, float]:
    """Return where the posterior mean is least, and how sure it is that it has risen since then.

    x, y: float64[n], observations; places: ascending
    The second is the largest probability, over places, that the value there is below the last's.
    """
    means, variances = process.posterior(x, y, places)
    deviations = np.sqrt(process.variance * np.maximum(variances, 0.0) + JITTER)
    highest = np.max((means[-1] - means) / deviations)
    return float(places[np.argmin(means)]), 0.5 * erfc(-float(highest) / sqrt(2))


DRAWN_TO_FIT, DRAWN_TO_TEST, PLACES, TESTS = 100, 500, 500, 5  # of the method


def turning_point(losses: Array, confidence: float) -> tuple[bool, Array]:
    """Return whether the loss has risen since its least value, and where that was.

    losses: float64[n] of the steps so far; places: float64[TESTS], 0..1 of the steps
    Each test has its own draw of steps, seeded by their number; most tests decide.
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

    losses: float64, of the steps of the warm-up so far; votes: epochs one after the other whose
    end found that the loss had risen
    start, peak: the step that the decay begins at, and its first rate
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
        """Return the factor on the peak: half a cosine, behind a constant part where asked for."""
        first = self.start
        if self.options.decay == "constant_cosine":
            first = max(first, ceil((1 - self.options.cooldown_share) * self.steps))
        return 0.5 * (1 + cos(pi * max(step - first, 0) / max(self.steps - first, 1)))

    def observe(self, samples_seen: int, loss: float) -> None:
        """Take note of the loss; at the end of an epoch judge all so far. Collective then.

        Process 0 judges for all: linear algebra may round otherwise on another processor.
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
        """Return the losses and what was decided. See Controller.state."""
        return {
            "losses": self.losses,
            "decided": np.array([self.start, self.votes]),
            "rise": np.array([self.warmup, self.peak]),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take over what state returned."""
        self.losses = np.array(state["losses"])
        self.start, self.votes = map(int, state["decided"])
        self.warmup, self.peak = map(float, state["rise"])  # of a run that may have been shorter


class ByAutoWu(Control):
    """[controller] name = "autowu": the rate rises until the loss does, and falls from its best.

    It has rates of its own: train.learning_rate and [schedule] are refused beside it. The weights
    are not taken back to those of the best rate: runs of less than some 60 epochs overshoot.

    min_rate, max_rate: that the warm-up begins at, and would end at
    warmup_share: of all steps, that the warm-up takes at most; then the rate falls from max_rate
    patience: epochs one after the other that have to find that the loss has risen
    confidence: with which they find it
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
        """Raise ValueError where the job has rates too. See Control.check."""
        if settings.schedule != Schedule():
            raise ValueError("has a warm-up and a decay of its own: [schedule] should be left out")
        if settings.rate != DEFAULT_RATE:
            raise ValueError(
                f"train.learning_rate={settings.rate:g}: has rates of its own: should be left out"
            )

    def build(self, settings: Settings) -> Controller:
        """Return the controller. See Control.build."""
        return AutoWu(settings, self)

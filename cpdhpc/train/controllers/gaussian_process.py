"""A Gaussian process of one variable in 0..1, and where its least value is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
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
    from scipy.special import ndtr

    means, variances = process.posterior(x, y, places)
    deviations = np.sqrt(process.variance * np.maximum(variances, 0.0) + JITTER)
    return float(places[np.argmin(means)]), float(ndtr((means[-1] - means) / deviations).max())

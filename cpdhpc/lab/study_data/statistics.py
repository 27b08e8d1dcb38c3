"""Statistics of repeated times: medians with rank-based intervals, and when repeats are enough.

Times are not normally distributed, so intervals come from order statistics and assume only that
repeats are independent. Source: Hoefler, Belli: Scientific benchmarking of parallel computing
systems, SC15, rules 5, 6 and 8.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@cache
def median_rank(n: int, confidence: float) -> int:
    """Return j: the interval of the median is from the j-th smallest to the j-th largest sample.

    For any distribution it holds the median with a probability of 1 - 2 P(B < j), B ~
    Binomial(n, 1/2). j is the largest for which this is confidence or more; 0 if n is too small.
    Source: Le Boudec: Performance evaluation of computer and communication systems, 2010,
    theorem 2.1, for two equal tails.
    """
    if n == 0:
        return 0
    k = np.arange(1, n // 2 + 1)
    logarithms = np.concatenate([[0.0], np.cumsum(np.log((n - k + 1) / k))]) - n * np.log(2)
    below = np.cumsum(np.exp(logarithms))  # P(B <= 0), P(B <= 1), ...
    # A rounding error must not make an interval too narrow.
    return int(np.searchsorted(below, (1 - confidence) / 2 * (1 - 1e-9), side="right"))


def median_interval(samples: Array, confidence: float) -> tuple[float, float]:
    """Return the lower and the upper end of the interval of the median; NaN if n is too small.

    samples: float64[n], in any order
    """
    j = median_rank(len(samples), confidence)
    if j == 0:
        return float("nan"), float("nan")
    ordered = np.sort(samples)
    return float(ordered[j - 1]), float(ordered[-j])


def is_enough(samples: Array, confidence: float, relative: float) -> bool:
    """Return whether both ends of the median's interval are within a share of the median."""
    low, high = median_interval(samples, confidence)
    median = float(np.median(samples)) if len(samples) else float("nan")
    return bool(max(median - low, high - median) <= relative * median)  # false for NaN


def summarise(times: Array, confidence: float) -> dict[str, Array]:
    """Return the columns of a summary, each of [points].

    times: float64[points, repeats], NaN for warm-ups and missing repeats
    Quantiles are interpolated linearly between neighbouring samples.
    """
    ordered = np.sort(times, axis=1)  # NaN goes to the end
    n = np.sum(~np.isnan(times), axis=1)
    low, high = _intervals(ordered, n, confidence)
    mean = _sum(ordered) / np.maximum(n, 1)
    squares = _sum((ordered - mean[:, None]) ** 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        deviation = np.where(n > 1, np.sqrt(squares / (n - 1)), np.nan)
    return {
        "n": n,
        "median_s": quantile(ordered, n, 0.5),
        "ci_low_s": low,
        "ci_high_s": high,
        "mean_s": np.where(n > 0, mean, np.nan),
        "std_s": deviation,
        "min_s": quantile(ordered, n, 0.0),
        "max_s": quantile(ordered, n, 1.0),
        "p95_s": quantile(ordered, n, 0.95),
        "p99_s": quantile(ordered, n, 0.99),
    }


def _sum(values: Array) -> Array:
    total: Array = np.nansum(values, axis=1)
    return total


def quantile(ordered: Array, n: Array, share: float) -> Array:
    """Return a quantile of each row of float64[points, repeats], whose first n are in order."""
    place = np.maximum(n - 1, 0) * share
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, np.maximum(n - 1, 0))
    rows = np.arange(len(ordered))
    left, right = ordered[rows, below], ordered[rows, above]
    result: Array = left + (place - below) * (right - left)
    return result


def _intervals(ordered: Array, n: Array, confidence: float) -> tuple[Array, Array]:
    j = np.array([median_rank(int(each), confidence) for each in n], np.int64)
    rows = np.arange(len(ordered))
    low = ordered[rows, np.maximum(j - 1, 0)]
    high = ordered[rows, np.maximum(n - j, 0).clip(max=ordered.shape[1] - 1)]
    return np.where(j > 0, low, np.nan), np.where(j > 0, high, np.nan)


def ratio_intervals(times: Array, base: Array, confidence: float) -> tuple[Array, Array, Array]:
    """Return the median time of each point's base over its own, and the ends of its interval.

    times: as for summarise; base: int64[points], the index of each point's base, -1 for none
    The ends are ratios of the ends of both medians' intervals. Each of these fails with half the
    probability that the ratio's may (Bonferroni), so the ratio's holds with confidence or more.
    """
    each = 1 - (1 - confidence) / 2
    ordered, n = np.sort(times, axis=1), np.sum(~np.isnan(times), axis=1)
    median = quantile(ordered, n, 0.5)
    low, high = _intervals(ordered, n, each)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = median[base] / median, low[base] / high, high[base] / low
    ratio, least, most = (np.where(base >= 0, value, np.nan) for value in ratios)
    own = base == np.arange(len(base))  # the ratio to itself is exactly 1
    return tuple(np.where(own, 1.0, value) for value in (ratio, least, most))  # type: ignore[return-value]

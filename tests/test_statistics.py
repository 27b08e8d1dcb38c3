"""Intervals of medians hold as often as they say; summaries are those of NumPy and SciPy."""

from math import comb

import numpy as np
import pytest
from every import every

from cpdhpc.lab.study_data.statistics import (
    is_enough,
    median_interval,
    median_rank,
    ratio_intervals,
    summarise,
)

# n: j of the 95 % interval from the j-th smallest to the j-th largest: critical value of the
# two-sided sign test at 5 %, plus 1 (Conover: Practical nonparametric statistics, table A3).
KNOWN = {5: 0, 6: 1, 7: 1, 8: 1, 9: 2, 10: 2, 12: 3, 15: 4, 17: 5, 20: 6, 25: 8, 30: 10, 40: 14}
KNOWN |= {50: 18}


def coverage(n: int, j: int) -> float:
    """How often the interval holds the median, by enumeration of how many samples are below it."""
    return sum(comb(n, k) for k in range(j, n - j + 1)) / 2**n


@every("confidence", [0.6, 0.9, 0.95, 0.99, 0.999])
def test_coverage_is_enough_and_no_wider_interval_is_needed(confidence: float) -> None:
    from scipy.stats import binom  # a second, which collecting need not take

    for n in range(1, 200):
        j = median_rank(n, confidence)
        assert 2 * j <= n + 1
        if j:
            assert coverage(n, j) >= confidence
            assert coverage(n, j) == pytest.approx(1 - 2 * binom.cdf(j - 1, n, 0.5), abs=1e-12)
        if 2 * (j + 1) <= n + 1:
            assert coverage(n, j + 1) < confidence


def test_ranks_are_those_of_the_tables() -> None:
    assert {n: median_rank(n, 0.95) for n in KNOWN} == KNOWN
    assert median_rank(0, 0.95) == 0
    # Many samples: the normal approximation n / 2 - 1.96 sqrt(n) / 2 is good to one rank.
    for n in (1000, 10_000, 100_000):
        assert abs(median_rank(n, 0.95) - (n / 2 - 0.98 * np.sqrt(n))) <= 1


def test_intervals_hold_for_times_that_are_not_normal() -> None:
    rng, true = np.random.default_rng(0), np.log(2)
    intervals = [median_interval(rng.exponential(size=11), 0.9) for _ in range(2000)]
    held = sum(low <= true <= high for low, high in intervals)
    # Binomial with p >= 0.935 (n = 11, j = 3): 4 standard deviations are 0.022 of 2000.
    assert held / 2000 >= coverage(11, median_rank(11, 0.9)) - 0.022


def test_enough_is_when_both_ends_are_near() -> None:
    times = np.array([1.0, 1.125, 0.875, 1.0, 1.25, 0.75])
    assert is_enough(times, 0.95, 0.25) and not is_enough(times, 0.95, 0.249)
    assert not is_enough(times[:5], 0.95, 1.0), "five samples have no interval of 95 %"
    assert not is_enough(np.array([]), 0.95, 1.0)


def test_summaries_are_numpys() -> None:
    rng = np.random.default_rng(1)
    times = rng.lognormal(size=(4, 30))
    times[1, 20:] = np.nan
    times[2, 1:] = np.nan
    times[3] = np.nan
    found = summarise(times, 0.95)
    assert found["n"].tolist() == [30, 20, 1, 0]
    for row, n in ((0, 30), (1, 20), (2, 1)):
        own = times[row, :n]
        low, high = median_interval(own, 0.95)
        expected = {
            "median_s": np.median(own),
            "ci_low_s": low,
            "ci_high_s": high,
            "mean_s": own.mean(),
            "std_s": own.std(ddof=1) if n > 1 else np.nan,
            "min_s": own.min(),
            "max_s": own.max(),
            "p95_s": np.percentile(own, 95),
            "p99_s": np.percentile(own, 99),
        }
        for name, value in expected.items():
            # Sums of 30 numbers in another order: below 30 ulp.
            np.testing.assert_allclose(found[name][row], value, rtol=30 * 2**-52, err_msg=name)
    assert all(np.isnan(found[name][3]) for name in found if name != "n")


def test_speed_ups_have_their_intervals() -> None:
    """Both intervals at 97.5 %: with 8 samples from the least to the greatest."""
    times = np.array([np.arange(8.0) + 10, np.arange(8.0) + 2, np.full(8, np.nan)])
    ratio, low, high = ratio_intervals(times, np.array([0, 0, -1]), 0.95)
    assert ratio.tolist()[:2] == [1, 13.5 / 5.5]
    assert low.tolist()[:2] == [1, 10 / 9] and high.tolist()[:2] == [1, 17 / 2]
    assert np.isnan([ratio[2], low[2], high[2]]).all()
    assert median_rank(7, 0.975) == 1 and median_rank(6, 0.975) == 0

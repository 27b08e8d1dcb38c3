"""Stochastic rounding: the bits of gfloat, no bias, and random bits worth the name."""

from itertools import pairwise
from typing import Any

import numpy as np
import oracles
import pytest
from every import every

from cpdhpc.formats import Cast, parse_format
from cpdhpc.ops import reference
from cpdhpc.randomness import random_key

NAMES = ("e5m2", "e4m3", "e4m3fn", "e2m1fn", "e2m5", "e6m9", "e7m8", "bf16", "fp16", "e3m0")
DRAWS = 1 << 15


def random_bits(n: int, *path: int, offset: int = 0) -> np.ndarray:
    """The 31 bits that encode draws for n elements. uint32[n]"""
    index = np.uint64(offset) + np.arange(n, dtype=np.uint64)
    return reference.random31(random_key(*path), index)


@every("name", NAMES)
def test_equals_gfloat_given_the_same_bits(ops: Any, name: str) -> None:
    """gfloat's StochasticFastest: up where the part cut off plus a random one reaches one."""
    fmt, offset = parse_format(name), 2**33 - 1000  # the high half of the index changes on the way
    x = oracles.structured(0, 65536, oracles.SIXTEEN_LOWS[1:3])
    x = x[~np.isnan(x)]
    bits = random_bits(x.size, 1, 2, 3, offset=offset).astype(np.int64)
    for overflow in oracles.overflows(fmt):
        cast = Cast(fmt, "stochastic", overflow)  # type: ignore[arg-type]
        codes = ops.encode(x, cast, key=random_key(1, 2, 3), offset=offset)
        expected = oracles.gfloat_round(x.astype(np.float64), fmt, "stochastic", overflow, bits)
        oracles.assert_same_values(ops.decode(codes, fmt), expected, x)


@every("name", ["e5m2", "e4m3", "e3m0", "e6m9"])
def test_the_threshold_is_exact(ops: Any, name: str) -> None:
    """Cut-off part plus bits is exactly one unit: up. One step of float32 below: not."""
    fmt, key = parse_format(name), random_key(4, 4)
    count = 31 - fmt.man
    bits = reference.random31(key, np.arange(1 << 12, dtype=np.uint64)).astype(np.int64) >> fmt.man
    exact = (bits % 128 == 0) & (bits > 0)  # at most 24 bits: 2**count - bits is a float32
    assert exact.sum() > 10
    parts = np.ldexp((2.0**count - bits), -count) * fmt.smallest
    x = np.where(exact, parts, 0).astype(np.float32)
    assert np.array_equal(x[exact], parts[exact])
    cast = Cast(fmt, "stochastic")
    assert np.all(ops.encode(x, cast, key=key)[exact] == 1)
    assert np.all(ops.encode(np.nextafter(x, np.float32(0)), cast, key=key) == 0)


@every("name", ["e5m2", "e4m3", "e2m1fn", "e3m0", "e6m9"])
def test_mean_of_many_draws(ops: Any, name: str) -> None:
    """A draw is low or low + spacing, the latter with probability p, the part cut off.

    So its variance is p (1 - p) spacing**2, and of DRAWS independent ones the mean lies within 4
    standard errors, 4 sqrt(p (1 - p) / DRAWS) spacing. p is cut to 31 - man bits: 2**(man - 31)
    spacing more.
    """
    fmt, cast = parse_format(name), Cast(parse_format(name), "stochastic")
    grid = oracles.number_grid(fmt)
    last = len(grid) - 2
    normal = 1 << fmt.man
    for number, low in enumerate((0, normal - 1, normal, last // 2, last - 1)):
        spacing = grid[low + 1] - grid[low]
        for p in (1 / 64, 0.25, 0.5, 0.8125):
            x = np.full(DRAWS, grid[low] + p * spacing, np.float32)
            assert float(x[0]) == grid[low] + p * spacing
            codes = ops.encode(x, cast, key=random_key(11, number, int(64 * p)))
            assert set(codes.tolist()) == {low, low + 1}
            bound = (4 * np.sqrt(p * (1 - p) / DRAWS) + 2.0 ** (fmt.man - 31)) * spacing
            mean = ops.decode(codes, fmt).astype(np.float64).mean()
            assert abs(mean - float(x[0])) <= bound, (low, p)


def test_numbers_of_the_format_stay(ops: Any) -> None:
    """Nothing is cut off, so no random bits can move them; also above the largest with overflow."""
    for name in NAMES:
        fmt = parse_format(name)
        numbers = oracles.number_grid(fmt)[:-1].astype(np.float32)
        for seed in range(4):
            codes = ops.encode(numbers, Cast(fmt, "stochastic"), key=random_key(seed))
            assert np.array_equal(codes, np.arange(fmt.max_code + 1))


def test_draws_depend_on_key_and_index_alone(ops: Any) -> None:
    """A piece encoded by itself, with its offset, gives the codes of the whole."""
    x = np.random.default_rng(5).standard_normal(5000).astype(np.float32)
    cast, key = Cast(parse_format("e4m3"), "stochastic"), random_key(3, 1)
    whole = ops.encode(x, cast, key=key, offset=2**32 - 3000)
    for start, stop in ((0, 1), (1, 1000), (1000, 5000), (2990, 3010)):
        part = ops.encode(x[start:stop], cast, key=key, offset=2**32 - 3000 + start)
        assert np.array_equal(part, whole[start:stop])
    assert not np.array_equal(whole, ops.encode(x, cast, key=random_key(3, 2)))


def test_random_bits_are_balanced() -> None:
    """The share of ones in n fair bits has standard error 1 / (2 sqrt(n)); 5 of them allowed.

    Two-sided 5 sigma is 6e-7 each; there are 4 * 31 shares and 4 * 30 pairs of adjacent bits.
    """
    n = 1 << 18
    for path in ((0,), (0, 0, 0, 0), (1, 2, 3, 4), (2**63, 5)):
        draws = random_bits(n, *path)
        assert draws.dtype == np.uint32 and draws.max() < 2**31
        ones = (draws[:, None] >> np.arange(31, dtype=np.uint32)) & 1
        assert np.abs(ones.mean(0) - 0.5).max() <= 5 / (2 * np.sqrt(n))
        adjacent = (ones[:, 1:] ^ ones[:, :-1]).mean(0)
        assert np.abs(adjacent - 0.5).max() <= 5 / (2 * np.sqrt(n))


def test_random_bits_are_uniform() -> None:
    """Chi-square of 1,024 bins has mean 1,023 and variance 2 * 1,023: 5 standard deviations."""
    n, bins = 1 << 18, 1024
    for shift in (21, 10, 0):  # the highest, the middle and the lowest ten bits
        counts = np.bincount((random_bits(n, 42, shift) >> shift) % bins, minlength=bins)
        chi_square = ((counts - n / bins) ** 2 / (n / bins)).sum()
        assert abs(chi_square - (bins - 1)) <= 5 * np.sqrt(2 * (bins - 1))


def neighbouring_streams() -> list[np.ndarray]:
    """Streams of (seed, iteration, rank, phase) that differ by one somewhere, and by order."""
    n = 1 << 17
    paths = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 2, 0)]
    paths += [(0, 0, 3, 0), (0, 2, 0, 0), (0, 0, 0, 2), (0, 0, 1, 1), (2, 0, 0, 0), (7, 100, 12, 3)]
    streams = [random_bits(n, *path) for path in paths]
    streams += [random_bits(n, *paths[0], offset=1), random_bits(n, *paths[0], offset=1024)]
    return streams + [random_bits(n, *paths[0], offset=k * 2**32) for k in (1, 2, 3)]


def test_neighbouring_streams_are_uncorrelated() -> None:
    """Independent uniform streams of n draws have a correlation of standard error 1 / sqrt(n)."""
    streams = neighbouring_streams()
    n, pairs = streams[0].size, np.triu_indices(len(streams), 1)
    correlation = np.corrcoef(np.array(streams, np.float64))[pairs]
    assert np.abs(correlation).max() <= 5 / np.sqrt(n)


def test_bits_of_neighbouring_streams_are_uncorrelated() -> None:
    """Equal bits have a share of one half, standard error 1 / (2 sqrt(n)), in each of 31 places."""
    streams = neighbouring_streams()
    bound = 5 / (2 * np.sqrt(streams[0].size))
    places = np.arange(31, dtype=np.uint32)
    for a, b in [*pairwise(streams), *((streams[0], other) for other in streams[2:])]:
        differing = (((a ^ b)[:, None] >> places) & 1).mean(0)
        assert np.abs(differing - 0.5).max() <= bound


def correlations(a: np.ndarray, b: np.ndarray, lags: int) -> np.ndarray:
    """Correlations of a series with another (or itself) 1, 2, ... lags draws later, of deviation 1.

    Round the end, so that each is of all n draws: times sqrt(n), those of independent series have
    mean 0 and variance 1, but for 1 / n.
    """
    (one, two) = (np.fft.rfft((each - each.mean()) / each.std()) for each in (a, b))
    found = np.fft.irfft(one.conj() * two, a.size)[1 : lags + 1]
    return np.asarray(found / np.sqrt(a.size))


def most_of(count: int) -> float:
    """What the largest |z| of count normal ones exceeds with probability below 1e-4.

    P(|z| > b) <= exp(-b**2 / 2), and the probabilities of all add up to no less than that of any.
    """
    return float(np.sqrt(2 * np.log(count / 1e-4)))


def bit(draws: np.ndarray, place: int) -> np.ndarray:
    return (draws >> np.uint32(place)) & np.uint32(1)


def test_no_lag_is_correlated() -> None:
    """Draws and their highest bit, which decides most roundings, at 2**17 lags."""
    lags, paths = 1 << 17, ((0,), (1, 0, 0), (42,))
    for path in paths:
        draws = random_bits(1 << 21, *path)
        for series in (draws, bit(draws, 30)):
            assert np.abs(correlations(series, series, lags)).max() <= most_of(6 * lags), path


def test_no_lag_between_neighbouring_streams_is_correlated() -> None:
    first, *others = neighbouring_streams()
    lags = first.size - 1
    for other in others[:6]:
        found = correlations(first, other, lags)
        assert np.abs(found).max() <= most_of(6 * lags)


def test_draws_repeat_as_often_as_they_should() -> None:
    """Equal pairs among n draws of 31 bits: n**2 / 2**32 on average, and that is their variance.

    A permutation of the indices, which a hash of 32 bits often is, has half of them.
    """
    n, equal = 1 << 20, 0
    for path in ((0,), (1, 2, 3), (5, 0, 0, 7), (2**40,)):
        counts = np.unique(random_bits(n, *path), return_counts=True)[1]
        equal += int((counts * (counts - 1) // 2).sum())
    expected = 4 * n**2 / 2**32
    assert abs(equal - expected) <= 5 * np.sqrt(expected)


@pytest.mark.slow
def test_no_lag_of_any_bit_is_correlated() -> None:
    """Each of the 31 bits, in 2**22 draws, at 200,000 lags."""
    lags, paths = 200_000, ((0,), (3, 1, 4))
    for path in paths:
        draws = random_bits(1 << 22, *path)
        for place in range(31):
            series = bit(draws, place)
            found = np.abs(correlations(series, series, lags))
            assert found.max() <= most_of(2 * 31 * lags), (path, place, int(found.argmax()) + 1)


@pytest.mark.slow
def test_no_bit_is_correlated_far_away() -> None:
    """Lags of one bit, which the first multiplications of a hash leave in few places."""
    blocks, n = 256, 1 << 16  # of keys, and draws of each
    for exponent in range(34):
        differing = np.zeros(31)
        for key in range(blocks):
            one = random_bits(n, key, exponent, offset=key << 20)
            two = random_bits(n, key, exponent, offset=(key << 20) + (1 << exponent))
            differing += [np.count_nonzero((one ^ two) & np.uint32(1 << i)) for i in range(31)]
        z = (differing - blocks * n / 2) / np.sqrt(blocks * n / 4)
        assert np.abs(z).max() <= most_of(34 * 31), exponent


def test_keys_differ() -> None:
    """64 bits of key: among 30,000 a collision has probability below 30000**2 / 2**65 = 3e-11."""
    paths = [(s, i, r) for s in range(10) for i in range(50) for r in range(60)]
    keys = {random_key(*path) for path in paths}
    assert len(keys) == len(paths) == 30000
    assert all(0 <= word < 2**32 for key in keys for word in key)
    assert random_key(1, 2) != random_key(2, 1) and random_key(1) != random_key(1, 0)

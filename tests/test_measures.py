"""Measures of rounding, against Python's numbers, gfloat and fractions."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from every import every
from oracles import gfloat_round

from cpdhpc.formats import Cast, parse_format
from cpdhpc.lab.precision.measures import (
    LOWEST,
    SCALINGS,
    UNKNOWN,
    WAYS,
    ErrorNorms,
    SumWay,
    error,
    exponents,
    product_error,
    rounded,
    sum_error,
)

SPECIAL = np.array([0, -0.0, 1e-45, -1e-39, np.inf, -np.inf, -np.inf, np.nan], np.float32)


def spread(n: int, seed: int = 0, reach: int = 30) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.ldexp(rng.normal(size=n), rng.integers(-reach, reach, n)).astype(np.float32)


def test_exponents_are_those_of_frexp():
    x = np.concatenate([SPECIAL, spread(3000, reach=120), np.float32([2.0**-126, 2.0**127])])
    with np.errstate(over="ignore"):
        expected = Counter(
            math.frexp(v)[1] - 1 for v in x.tolist() if math.isfinite(v) and abs(v) >= 2.0**-126
        )
    found = exponents(x.reshape(2, -1))
    assert {LOWEST + int(i): int(found.counts[i]) for i in found.counts.nonzero()[0]} == expected
    infinite = int(np.isinf(x).sum())
    tiny = int(((np.abs(x) < 2.0**-126) & (x != 0)).sum())
    assert (found.zeros, found.subnormals) == (int((x == 0).sum()), tiny)
    assert (found.infinities, found.nans, found.values) == (infinite, 1, x.size)
    assert exponents(np.zeros((0, 3), np.float32)).values == 0
    with pytest.raises(TypeError, match=r"exponents: x is numpy\.ndarray of float64"):
        exponents(np.zeros(3))  # type: ignore[arg-type]


@every("name", ["e4m3", "e5m2", "e4m3fn", "e2m1fn", "e3m0"])
@every("scaling", SCALINGS)
def test_what_rounding_does_is_counted_as_gfloat_says(name: str, scaling: str):
    """Each value after its power of two, which is taken from the values that share it."""
    fmt, x = parse_format(name), spread(2048, 1, 8)
    x[::17], x[1030] = 0, 4000
    own = Cast(fmt, overflow="saturate")
    found = rounded(x.reshape(2, 32, 32), own, scaling)
    # Value i of a tile is in lane i % 32 and row i // 32; a block is some rows of a lane.
    rows = {"tile": 32, "block32": 32, "block16": 16}.get(scaling)
    tiled = x.reshape(2, 32, 32)
    k = np.zeros(tiled.shape, int)
    if scaling == "aps":
        k[...] = fmt.emax - math.ceil(math.log2(np.abs(x).max()))
    elif rows:
        axes = (1, 2) if scaling == "tile" else 1
        for start in range(0, 32, rows):
            part = np.abs(tiled[:, start : start + rows])
            amax = part.max(axes, keepdims=True).astype(np.float64)
            with np.errstate(divide="ignore"):
                fit = np.frexp(fmt.max / amax)[1] - 1  # the floor of the logarithm
            k[:, start : start + rows] = np.where(amax > 0, fit, 0)
    scaled = np.ldexp(tiled.astype(np.float64), k).reshape(-1)
    expected = gfloat_round(scaled, fmt, "nearest", "saturate")
    values = np.ldexp(expected, -k.reshape(-1))
    np.testing.assert_array_equal(found.values.reshape(-1), values.astype(np.float32))
    unbounded = gfloat_round(scaled, parse_format(f"e8m{fmt.man}"))
    beyond = np.abs(unbounded) > fmt.max
    assert found.nonzero == np.count_nonzero(x)
    assert found.saturated == int(beyond.sum())
    assert found.underflowed == int(((expected == 0) & (scaled != 0)).sum())
    small = (expected != 0) & (np.abs(expected) < 2.0**fmt.emin)
    assert found.subnormal == int(small.sum())
    assert found.share(found.underflowed) == found.underflowed / found.nonzero


def test_values_that_are_not_finite_are_counted_apart():
    x = np.concatenate([SPECIAL, np.float32([1, 2, 3e-9])])
    found = rounded(x, Cast(parse_format("e4m3")), "none")
    assert (found.nonfinite, found.nonzero) == (4, 5)
    assert found.underflowed == 3  # the two subnormals of float32, and 3e-9
    empty = rounded(np.zeros(0, np.float32), Cast(parse_format("e4m3")), "tile")
    assert math.isnan(empty.share(empty.saturated))
    assert error(empty.values, empty.values) is UNKNOWN
    assert error(x, x) is UNKNOWN


def test_an_unknown_scaling_is_refused():
    x, cast = np.ones(3, np.float32), Cast(parse_format("e4m3"))
    with pytest.raises(ValueError, match="rounded: scaling='tiles': did you mean tile"):
        rounded(x, cast, "tiles")
    with pytest.raises(ValueError, match="rounded: scaling=400: e4m3 allows"):
        rounded(x, cast, 400)


def test_errors_are_those_of_fractions():
    """Norms of 300 squares in float64: relative error below 300 * 2**-53, see Higham, 3.1."""
    x, y = spread(300, 2, 5), spread(300, 3, 5)
    wrong = [Fraction(float(b)) - Fraction(float(a)) for a, b in zip(x, y, strict=True)]
    whole = [Fraction(float(a)) for a in x]
    square = sum(w * w for w in wrong) / sum(w * w for w in whole)
    found = error(y, x)
    assert found.relative == pytest.approx(math.sqrt(square), rel=300 * 2.0**-52)
    assert found.largest == float(max(map(abs, wrong)) / max(map(abs, whole)))
    assert found.snr_db == pytest.approx(-10 * math.log10(square), abs=1e-11)
    assert error(x, x) == ErrorNorms(0.0, 0.0) and error(x, x).snr_db == math.inf
    # Squares that float64 cannot hold.
    huge = np.array([3e200, 4e200])
    assert error(2 * huge, huge).relative == pytest.approx(1.0, rel=2.0**-50)
    with pytest.raises(ValueError, match=r"found of \(2,\), exact of \(300,\)"):
        error(huge, x)


def test_sums_are_those_of_training():
    """Whole numbers up to 15 are exact in e4m3 at every step; others lose more than once."""
    whole = [np.arange(8, dtype=np.float32).repeat(130), np.full(1040, 8, np.float32)]
    for way in WAYS:
        assert sum_error(whole, "e4m3", way, "aps").relative == 0, way
    x = [spread(1040, seed, 3) for seed in range(8)]
    ring, gather = (
        sum_error(x, "e4m3", SumWay(name, accumulate), "tile").relative
        for name, accumulate in (("ring", "requantise"), ("gather", "float32"))
    )
    contributions = [rounded(each, Cast(parse_format("e4m3")), "tile").values for each in x]
    once = error(np.sum(contributions, axis=0, dtype=np.float64), np.sum(x, 0, np.float64))
    # Sums in float32 are not rounded again: 7 errors of 2**-24 each beside those of 4 bits.
    assert gather == pytest.approx(once.relative, rel=1e-5) and gather < ring
    x[3][7] = np.nan
    assert sum_error(x, "e4m3", WAYS[0], "tile") is UNKNOWN


def test_products_are_compared_with_exact_ones():
    a, b = np.full((3, 4096), 1, np.float32), np.ones((4096, 2), np.float32)
    found = product_error(a, b, accumulate="e6m9")
    assert found.largest == 0.75  # the sum stalls at 1,024: 1,025 needs 11 bits; ties go to even
    assert product_error(a, b, accumulate="e6m9", chunk=64).relative == 0

"""Rounding up, down, to odd and with few random bits: gfloat's, MPFR's and the definition's."""

from typing import Any

import gmpy2
import numpy as np
import oracles
import pytest
from every import every
from gfloat import RoundMode
from refusing import refused

from cpdhpc.formats import Cast, FloatFormat, parse_format
from cpdhpc.ops import reference
from cpdhpc.randomness import random_key

NAMES = ("e5m2", "e4m3", "e4m3fn", "e2m1fn", "e3m0", "e6m9", "bf16", "fp16")
MODES = {"up": RoundMode.TowardPositive, "down": RoundMode.TowardNegative}


def inputs() -> np.ndarray:
    """Both signs, every exponent, subnormals, infinity; ties and one step beside. float32[n]"""
    x = oracles.structured(0, 65536, oracles.SIXTEEN_LOWS[[1, 2, 5]])[::5]
    few = np.arange(64, dtype=np.uint32)
    return np.concatenate([x[~np.isnan(x)], few.view(np.float32), -few.view(np.float32)])


@every("name", NAMES)
def test_directed_roundings_equal_gfloat(
    ops: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt, x = parse_format(name), inputs()
    assert isinstance(fmt, FloatFormat)
    for rounding, mode in MODES.items():
        monkeypatch.setitem(oracles.MODES, rounding, mode)
        for overflow in oracles.overflows(fmt):
            cast = Cast(fmt, rounding, overflow)  # type: ignore[arg-type]
            got = ops.decode(ops.encode(x, cast), fmt)
            expected = oracles.gfloat_round(x, fmt, rounding, overflow)
            oracles.assert_same_values(got, expected, x)


@every("name", [*NAMES, "e1m3"])
def test_odd_by_its_neighbours(ops: Any, name: str) -> None:
    """Of the numbers below and above, which differ where x is none, the one with an odd code."""
    fmt, x = parse_format(name), inputs()
    assert isinstance(fmt, FloatFormat)
    codes = ops.encode(x, Cast(fmt, "odd"))
    below, above = (ops.encode(x, Cast(fmt, way)) for way in ("down", "up"))  # type: ignore[arg-type]
    inside = np.abs(x) <= fmt.max
    exact = np.isin(x, ops.decode(below, fmt)) & (ops.decode(below, fmt) == x)
    expected = np.where(exact | (below % 2 == 1), below, above)
    expected = np.where(exact & (x == 0), np.signbit(x) * (1 << (fmt.bits - 1)), expected)
    assert np.array_equal(codes[inside], expected[inside])
    beyond = ~inside & np.isfinite(x)
    assert np.array_equal(ops.decode(codes[beyond], fmt), np.copysign(fmt.max, x[beyond]))


@every("name", ["e4m3", "e5m10", "e8m20"])
def test_directed_roundings_equal_mpfr(ops: Any, name: str) -> None:
    fmt = parse_format(name)
    assert isinstance(fmt, FloatFormat)
    x = np.concatenate([oracles.awkward(600, 1), oracles.awkward(600, 2) * np.float32(2.0**-60)])
    x = np.concatenate([x, np.random.default_rng(3).standard_normal(600).astype(np.float32)])
    for rounding in ("up", "down"):
        with oracles.mpfr(fmt, rounding):
            expected = [float(gmpy2.mpfr(float(v))) for v in x]
        cast = Cast(fmt, rounding)  # type: ignore[arg-type]
        got = ops.decode(ops.encode(x, cast), fmt)
        oracles.assert_same_values(got, np.array(expected, np.float32), x)


@every("bits", [1, 3, 8])
@every("name", ["e5m2", "e4m3fn", "e3m0", "bf16"])
def test_few_random_bits_equal_gfloat(ops: Any, name: str, bits: int) -> None:
    """Of the part cut off and of the draw the upper bits count: gfloat's StochasticFastest."""
    fmt, x, key = parse_format(name), inputs(), random_key(5, 6)
    assert isinstance(fmt, FloatFormat)
    draws = reference.random31(key, np.arange(x.size, dtype=np.uint64)).astype(np.int64)
    got = ops.decode(ops.encode(x, Cast(fmt, "stochastic", None, bits), key=key), fmt)
    expected = oracles.gfloat_round(x, fmt, "stochastic", "inf", draws >> (31 - bits), bits)
    oracles.assert_same_values(got, expected, x)


def test_all_random_bits_are_those_of_zero(ops: Any) -> None:
    x, key = inputs(), random_key(1)
    for name in ("e4m3", "e6m9"):
        fmt = parse_format(name)
        assert isinstance(fmt, FloatFormat)
        all_of_them = Cast(fmt, "stochastic", random_bits=31 - fmt.man)
        same = ops.encode(x, Cast(fmt, "stochastic"), key=key)
        assert np.array_equal(ops.encode(x, all_of_them, key=key), same)


def test_random_bits_out_of_range_are_errors() -> None:
    fmt = parse_format("e4m3")
    for rounding, bits in (("stochastic", 29), ("stochastic", -1), ("nearest", 1)):
        with refused("Cast", "random_bits") as caught:
            Cast(fmt, rounding, random_bits=bits)  # type: ignore[arg-type]
        assert "e4m3 allows 0..28 with" in caught.value.allowed

"""Encoding and decoding with a shift, and the shift that fits a tile, on every implementation."""

from fractions import Fraction
from typing import Any

import numpy as np
import oracles
from every import every

from cpdhpc.formats import SHIFT_BIAS, SHIFT_NONFINITE, Cast, FloatFormat, parse_format
from cpdhpc.ops.common import fitting_shift

SHIFTED = ("e5m2", "e4m3", "e4m3fn", "e2m1fn", "e3m0", "e6m9", "fp16", "e1m2fn", "e7m8", "bf16")
FLT_MAX = 0x7F7FFFFF


@every("name", SHIFTED)
def test_every_shift_equals_gfloat_on_the_exact_product(ops: Any, name: str) -> None:
    fmt = parse_format(name)
    codes = np.arange(0, 1 << fmt.bits, 1 if fmt.bits <= 8 else 257, dtype=np.uint32)
    plain = ops.decode(codes, fmt).astype(np.float64)
    edges = np.concatenate([plain, np.nextafter(plain, 0), plain * 1.5, plain * 1.25, plain / 2])
    ends = {fmt.shift_min, fmt.shift_min + 1, -1, 0, 1, fmt.shift_max - 1, fmt.shift_max}
    for k in sorted(ends & {*range(fmt.shift_min, fmt.shift_max + 1)}):
        with np.errstate(over="ignore", invalid="ignore"):
            moved = np.ldexp(edges[np.isfinite(edges)], -k).astype(np.float32)
            expected_back = np.ldexp(plain, -k).astype(np.float32)
        x = np.concatenate([oracles.awkward(150, k + 200), moved[np.isfinite(moved)]])
        product = np.ldexp(x.astype(np.float64), k)
        expected = oracles.gfloat_round(product, fmt)
        if fmt.man == 0:  # gfloat breaks those ties by the code, so leave them to test_oracles
            tie = np.frexp(np.abs(product))[0] == 0.75
            x, product, expected = x[~tie], product[~tie], expected[~tie]
        got = ops.encode(x, Cast(fmt), shift=k)
        oracles.assert_same_values(ops.decode(got, fmt), expected, x)
        back = ops.decode(codes, fmt, shift=k)
        oracles.assert_same_values(back, expected_back, codes)


@every("name", SHIFTED)
def test_shift_is_undone_exactly(ops: Any, name: str) -> None:
    """Within shift_min..shift_max every number of the format comes back, but for float32's top."""
    fmt = parse_format(name)
    codes = np.arange(0, fmt.max_code + 1, 1 if fmt.bits <= 8 else 61, dtype=np.uint32)
    for k in range(fmt.shift_min, fmt.shift_max + 1):
        back = ops.decode(codes, fmt, shift=k)
        assert np.all(np.isfinite(back)), k
        assert np.array_equal(ops.encode(back, Cast(fmt), shift=k), codes), k


@every(
    "fmt",
    [
        *(FloatFormat(e, m) for e in (1, 2, 5, 8) for m in (0, 2, 23) if e > 1 or m),
        *(parse_format(n) for n in ("e4m3fn", "e2m1fn", "e1m0fn", "e1m6fn")),
    ],
)
def test_fitting_shift_is_the_largest_that_fits(fmt: FloatFormat) -> None:
    significand = fmt.max_significand
    fractions = {0, 1, significand, 0x7FFFFF, 0x400000, (significand + 1) & 0x7FFFFF}
    bits = sorted({(e << 23) | f for e in range(255) for f in fractions} | {2, 3, 5, 1000})
    got = fitting_shift(np.array(bits, np.uint32), fmt).astype(int) - SHIFT_BIAS
    largest = Fraction(fmt.max)
    for amax_bits, k in zip(bits, got.tolist(), strict=True):
        amax = Fraction(float(np.uint32(amax_bits).view(np.float32)))
        if amax == 0:
            assert k == 0
            continue
        assert fmt.shift_min <= k <= fmt.shift_max
        assert amax * Fraction(2) ** k <= largest or k == fmt.shift_min
        assert amax * Fraction(2) ** (k + 1) > largest or k == fmt.shift_max


def test_fitting_shift_of_nonfinite() -> None:
    bits = np.array([0x7F800000, 0x7F800001, 0x7FFFFFFF, FLT_MAX], np.uint32)
    marks = fitting_shift(bits, parse_format("e5m2"))
    assert marks.dtype == np.uint8
    assert (marks == SHIFT_NONFINITE).tolist() == [True, True, True, False]

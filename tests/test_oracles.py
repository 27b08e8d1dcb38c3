"""Encoding against independent answers: ml_dtypes, gfloat, and a table of all numbers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from every import every

from cpdhpc.formats import Cast, FloatFormat, parse_format
from cpdhpc.ops import reference

CHUNK = 2048  # upper half-words at a time: what is in flight stays in the cache
FORMATS = (*oracles.ML_DTYPES, *oracles.ODD)
CASTS = [("nearest", "inf"), ("nearest", "saturate"), ("zero", "inf"), ("zero", "saturate")]
SPECIALS = ("ieee", "nan", "none")
SWEEP = [(e, s) for e in range(1, 9) for s in SPECIALS if e < 8 or s == "ieee"]

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast", "ignore:overflow")


def ml_dtypes_codes(x: np.ndarray, name: str) -> np.ndarray:
    """x as ml_dtypes (or NumPy, for fp16) converts it, as codes. uint32[n]"""
    target = oracles.ML_DTYPES[name]
    converted = x.astype(np.float16 if target == "float16" else getattr(ml_dtypes, target))
    return converted.view({1: np.uint8, 2: np.uint16}[converted.itemsize]).astype(np.uint32)


def check_nearest(ops: Any, name: str, x: np.ndarray) -> None:
    """Encode x with rounding to nearest and compare with ml_dtypes and gfloat."""
    fmt = parse_format(name)
    codes = ops.encode(x, Cast(fmt))
    nan = np.isnan(x)
    assert np.all(codes[nan] == fmt.nan_code)  # no sign: that of inf - inf differs by processor
    wrong = np.flatnonzero((codes != ml_dtypes_codes(x, name)) & ~nan)[:4]
    assert not wrong.size, (name, x[wrong], codes[wrong])
    number = ~nan if fmt.special == "none" else slice(None)
    expected = oracles.gfloat_round(x[number], fmt)  # float32 is exact here: only exponents move
    oracles.assert_same_values(ops.decode(codes, fmt)[number], expected, x[number])


@pytest.mark.slow
@pytest.mark.parametrize("name", oracles.ML_DTYPES)
def test_2_to_24_values_equal_ml_dtypes_and_gfloat(fast_ops: Any, name: str) -> None:
    def check(start: int) -> None:
        check_nearest(fast_ops, name, oracles.structured(start, start + CHUNK))

    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(check, range(0, 65536, CHUNK)))) * CHUNK * 256 == 2**24


@every("name", oracles.ML_DTYPES)
def test_reference_on_2_to_18_values(name: str) -> None:
    """The lower half-words of ties and of what lies beside them; make test-slow has the others."""
    check_nearest(reference, name, oracles.structured(0, 65536, oracles.SIXTEEN_LOWS[:4]))


@every("name", FORMATS)
def test_backends_equal_the_reference(fast_ops: Any, name: str) -> None:
    x = oracles.structured(0, 65536, oracles.SIXTEEN_LOWS[1:4:2])
    for rounding, overflow in [*CASTS, ("stochastic", "inf"), ("stochastic", "saturate")]:
        if overflow not in oracles.overflows(parse_format(name)):
            continue
        cast = Cast(parse_format(name), rounding, overflow)  # type: ignore[arg-type]
        got = fast_ops.encode(x, cast, key=(3, 5), offset=2**32 - 2**17)
        expected = reference.encode(x, cast, key=(3, 5), offset=2**32 - 2**17)
        assert np.array_equal(got, expected), cast
    codes = np.arange(1 << parse_format(name).bits, dtype=np.uint32)
    decoded = [b.decode(codes, parse_format(name)).view(np.uint32) for b in (fast_ops, reference)]
    assert np.array_equal(*decoded)


def ties_to_an_even_significand(x: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """Where man = 0 and x lies between two powers of two, which gfloat may round down.

    All significands are odd there: gfloat looks at the code, this package goes up.
    """
    a = np.abs(x.astype(np.float64))
    fraction, exponent = np.frexp(a)
    smallest_normal = 2.0 ** (2 - 2 ** (fmt.exp - 1))
    return (fraction == 0.75) & (a > smallest_normal) & (fmt.man == 0) & (exponent < 200)


@every(("rounding", "overflow"), CASTS)
@every("name", FORMATS)
def test_roundings_equal_gfloat(name: str, rounding: str, overflow: str) -> None:
    """Of the reference, which the other implementations equal."""
    fmt = parse_format(name)
    if overflow not in oracles.overflows(fmt):
        return
    x = oracles.structured(0, 65536, oracles.SIXTEEN_LOWS[:2])
    x = x[~np.isnan(x)].astype(np.float64)
    if fmt.exp == 1:  # gfloat takes the largest number of such a format for a normal one
        overflow_free = fmt.max if overflow == "saturate" or rounding == "zero" else np.inf
        x = x[(np.abs(x) <= overflow_free) | np.isinf(x)]
    expected = oracles.gfloat_round(x, fmt, rounding, overflow)
    if rounding == "nearest":
        tie = ties_to_an_even_significand(x, fmt)
        away = x[tie] * (4 / 3)  # 1.5 * 2**e becomes 2 * 2**e
        top = fmt.max if overflow == "saturate" else np.inf
        expected[tie] = np.where(np.abs(away) > fmt.max, np.copysign(top, away), away)
    cast = Cast(fmt, rounding, overflow)  # type: ignore[arg-type]
    codes = reference.encode(x.astype(np.float32), cast)
    oracles.assert_same_values(reference.decode(codes, fmt), expected, x)


def around(points: np.ndarray) -> np.ndarray:
    """Each point, its two neighbours in float32, and all these with a minus sign. float32[6 n]"""
    middle = points.astype(np.float32)
    assert np.array_equal(middle, points)  # float32 holds them, or the test would miss them
    down, up = np.nextafter(middle, np.float32(-1)), np.nextafter(middle, np.float32(np.inf))
    positive = np.concatenate([np.abs(down), middle, up])
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("bits", [12, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("exp", "special"), SWEEP)
def test_every_step_of_every_format(ops: Any, exp: int, special: str, bits: int) -> None:
    """Rounding is a staircase: right at both ends of each step, and rising, it is right between."""
    for fmt in oracles.formats_up_to(bits, exp, special):
        grid = oracles.number_grid(fmt)
        middles = (grid[1:] + grid[:-1]) / 2
        x = around(np.concatenate([grid[grid < 2.0**128], middles[middles < 2.0**128]]))
        x = x[np.isfinite(x)]
        for rounding, overflow in CASTS:
            if overflow not in oracles.overflows(fmt):
                continue
            cast = Cast(fmt, rounding, overflow)  # type: ignore[arg-type]
            code = oracles.grid_code(x, fmt, grid, rounding)
            code = np.where(code == len(grid) - 1, cast.overflow_code, code)
            sign = np.signbit(x).astype(np.int64) << (fmt.exp + fmt.man)
            assert np.array_equal(ops.encode(x, cast), code | sign), cast


def test_overflow_codes() -> None:
    """What Cast says of numbers too large and of infinity, written out."""
    rows = {  # format: (largest, infinity, NaN)
        "e5m2": (0x7B, 0x7C, 0x7E),
        "e4m3": (0x77, 0x78, 0x7C),
        "e4m3fn": (0x7E, 0x7F, 0x7F),
        "e2m1fn": (7, 7, 7),
        "e3m0": (6, 7, 7),
        "bf16": (0x7F7F, 0x7F80, 0x7FC0),
    }
    for name, (largest, infinity, nan) in rows.items():
        fmt = parse_format(name)
        assert (fmt.max_code, fmt.inf_code, fmt.nan_code) == (largest, infinity, nan), name
        for rounding, overflow in CASTS:
            if overflow not in oracles.overflows(fmt):
                continue
            finite_goes_up = rounding == "nearest" and overflow == "inf"
            expected = infinity if finite_goes_up else largest
            cast = Cast(fmt, rounding, overflow)  # type: ignore[arg-type]
            assert cast.overflow_code == expected, (name, rounding, overflow)


BELOW, LAST, STICKY = (
    float(np.nextafter(np.float32(61440), np.float32(0))),
    float(np.nextafter(np.float32(65536), np.float32(0))),
    float.fromhex("0x1.000002p-17"),
)


@every(
    "name, x, back",
    [
        # Overflow is tested after rounding; CPD (float_kernel.cu) gives 65536 from 61440 on.
        ("e5m2", [BELOW, 61440, -61440, LAST], [57344, np.inf, -np.inf, np.inf]),
        ("e4m3", [247.9, 248, 255.9], [240, np.inf, np.inf]),
        ("e3m4", [15.74, 15.75, -15.99], [15.5, np.inf, -np.inf]),
        # Sticky bits of subnormal numbers count; CPD shifts the bits below a tie away, and gives 0.
        ("e5m2", [STICKY, 2.0**-17, -STICKY], [2.0**-16, 0, -(2.0**-16)]),
        # Subnormal numbers of float32 survive; CPD makes +0 of them, even with 8 exponent bits.
        ("bf16", [2.0**-133, -(2.0**-130), 2.0**-127], [2.0**-133, -(2.0**-130), 2.0**-127]),
        ("bf16", [2.0**-134, 3 * 2.0**-134], [0, 2.0**-132]),
        # Ties without mantissa go up, as all significands are odd; to zero only below 0.25.
        ("e3m0", [0.125, 0.126, 0.375, 0.75, -1.5], [0, 0.25, 0.5, 1, -2]),
        ("e3m0", [3, 6, 11.9, 12], [4, 8, 8, np.inf]),
        *(
            (name, [-0.0, 0.0, -(2.0**-149), 2.0**-149, -(2.0**-127)], [-0.0, 0, -0.0, 0, -0.0])
            for name in ("e5m2", "e4m3fn", "e2m1fn", "e3m0", "e1m3")
        ),
    ],
)
def test_known_values(ops: Any, name: str, x: list[float], back: list[float]) -> None:
    cast = Cast(parse_format(name))
    found = ops.decode(ops.encode(np.array(x, np.float32), cast), cast.fmt)
    assert found.tobytes() == np.array(back, np.float32).tobytes()


def test_fp32_is_the_identity(ops: Any) -> None:
    fmt, x = parse_format("fp32"), oracles.structured(0, 65536, oracles.LOW_HALVES[::64])
    nan = np.isnan(x)
    for rounding, overflow in [*CASTS, ("stochastic", "inf")]:
        codes = ops.encode(x, Cast(fmt, rounding, overflow))  # type: ignore[arg-type]
        assert np.array_equal(codes[~nan], x.view(np.uint32)[~nan])
        assert np.all(codes[nan] == fmt.nan_code)
        oracles.assert_same_values(ops.decode(codes, fmt), x, x)

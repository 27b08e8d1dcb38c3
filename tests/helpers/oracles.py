"""Independent answers for the number formats: gfloat, a table of all numbers, Python integers."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import gmpy2
import numpy as np
from gfloat import Domain, FormatInfo, RoundMode, round_ndarray

from cpdhpc.formats import FloatFormat, overflow_shows

ML_DTYPES = {  # name here -> name in ml_dtypes; fp16 is NumPy's own
    "e5m2": "float8_e5m2",
    "e4m3": "float8_e4m3",
    "e4m3fn": "float8_e4m3fn",
    "e2m1fn": "float4_e2m1fn",
    "e2m3fn": "float6_e2m3fn",
    "e3m2fn": "float6_e3m2fn",
    "bf16": "bfloat16",
    "fp16": "float16",
}
ODD = ("e3m0", "e2m5", "e6m9", "e1m3", "e7m8")
MODES = {
    "nearest": RoundMode.TiesToEven,
    "zero": RoundMode.TowardZero,
    "stochastic": RoundMode.StochasticFastest,
}


def formats_up_to(bits: int, exp: int, special: str) -> Iterator[FloatFormat]:
    """Every allowed format of an exponent width and a special that is at most so wide."""
    for man in range(bits - exp):
        only_zero = exp == 1 and man == 0 and special != "none"
        if not only_zero and (exp < 8 or special == "ieee"):
            yield FloatFormat(exp, man, special)  # type: ignore[arg-type]


def gfloat_info(fmt: FloatFormat) -> FormatInfo:
    """The format described to gfloat, from its parameters alone."""
    return FormatInfo(
        fmt.name,
        k=1 + fmt.exp + fmt.man,
        precision=fmt.man + 1,
        bias=2 ** (fmt.exp - 1) - 1,
        is_signed=True,
        domain=Domain.Extended if fmt.special == "ieee" else Domain.Finite,
        has_nz=True,
        num_high_nans={"ieee": 2**fmt.man - 1, "nan": 1, "none": 0}[fmt.special],
        has_subnormals=True,
        is_twos_complement=False,
    )


def overflows(fmt: Any) -> tuple[str, ...]:
    """What overflow may be of a format, "inf" first where it can say so."""
    return ("inf", "saturate") if overflow_shows(fmt) else ("saturate",)


def gfloat_round(
    x: np.ndarray,
    fmt: FloatFormat,
    rounding: str = "nearest",
    overflow: str = "inf",
    bits: np.ndarray | None = None,
    count: int | None = None,
) -> np.ndarray:
    """x rounded by gfloat, in x's dtype, with this package's rule that infinity never saturates.

    bits: int64[n], for stochastic rounding: count random bits each, or 31 of which the first
        31 - man count
    """
    saturate = overflow == "saturate" or fmt.special == "none"
    info, finite = gfloat_info(fmt), np.isfinite(x)
    safe = np.where(finite, x, x.dtype.type(0))
    used = bits
    if bits is not None and count is None:
        count, used = 31 - fmt.man, bits >> fmt.man
    y = round_ndarray(info, safe, MODES[rounding], saturate, used, count or 0)
    infinity = {"ieee": np.inf, "nan": np.nan, "none": info.max}[fmt.special]
    y = np.where(finite, y, np.copysign(x.dtype.type(infinity), x))
    return np.where(np.isnan(x), x.dtype.type(np.nan), y)


def number_grid(fmt: FloatFormat) -> np.ndarray:
    """The non-negative numbers in order, so by code, and the first one that is too large.

    Made from the definition of floating point: 2**man numbers with one spacing, then 2**man more
    with the same, and from there the spacing doubles at each power of two. float64[codes + 1]
    """
    spacing = 2.0 ** (2 - 2 ** (fmt.exp - 1) - fmt.man)
    steps = np.arange(2**fmt.man)
    binades = [(steps + 2**fmt.man) * spacing * 2.0**i for i in range(2**fmt.exp)]
    count = 2**fmt.exp * 2**fmt.man
    count -= {"ieee": 2**fmt.man, "nan": 1, "none": 0}[fmt.special]
    return np.concatenate([steps * spacing, *binades])[: count + 1]


def exact_number(fmt: FloatFormat, magnitude: int) -> Fraction:
    """The number of a code without sign, by the formula of IEEE 754-2019 3.4."""
    field, fraction = divmod(magnitude, 2**fmt.man)
    bias = 2 ** (fmt.exp - 1) - 1
    if field == 0:
        return Fraction(2) ** (1 - bias) * Fraction(fraction, 2**fmt.man)
    return Fraction(2) ** (field - bias) * (1 + Fraction(fraction, 2**fmt.man))


def grid_code(x: np.ndarray, fmt: FloatFormat, grid: np.ndarray, rounding: str) -> np.ndarray:
    """The code of finite |x| found in a table of all numbers; len(grid) - 1 means too large.

    x: any float; every midpoint of two numbers is exact in float64
    """
    a = np.abs(x.astype(np.float64))
    low = np.minimum(np.searchsorted(grid, a, side="right") - 1, len(grid) - 2)
    middle = (grid[low] + grid[low + 1]) / 2
    odd = low >= 1 if fmt.man == 0 else low % 2 == 1  # man = 0: significands are all odd
    up = (a > middle) | ((a == middle) & odd)
    return low + np.where(a >= grid[-1], 1, up & (rounding == "nearest"))


def pack_integers(codes: np.ndarray, bits: int) -> bytes:
    """Pack by Python integers: lane l is one integer of 32 codes, cut into 32-bit words."""
    out = bytearray()
    for start in range(0, len(codes), 1024):
        tile = [int(c) for c in codes[start : start + 1024]]
        tile += [0] * (1024 - len(tile))
        lanes = [sum(tile[r * 32 + lane] << (bits * r) for r in range(32)) for lane in range(32)]
        for word in range(bits):
            for whole in lanes:
                out += ((whole >> (32 * word)) & 0xFFFFFFFF).to_bytes(4, "little")
    return bytes(out)


def low_halves() -> np.ndarray:
    """256 lower half-words: ends, every single bit and its neighbours, ties of each width, random.

    returns uint32[256]
    """
    chosen = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF}
    for bit in range(16):
        power = 1 << bit
        chosen |= {power, power - 1, power + 1, 0xFFFF ^ power, 3 * power, 0x8000 | power}
        chosen |= {5 * power, 0x10000 - power, 7 * power}
    first = np.array(sorted(c for c in chosen if c <= 0xFFFF), np.uint32)
    others = np.setdiff1d(np.arange(65536, dtype=np.uint32), first)
    rest = np.random.default_rng(20261120).choice(others, 256 - len(first), replace=False)
    return np.concatenate([first, rest.astype(np.uint32)])


LOW_HALVES = low_halves()
SIXTEEN_LOWS = np.array(
    [0, 1, 0x8000, 0xFFFF, 0x7FFF, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x4000, 0xC000, 0x0080]
    + [0x5555, 0xAAAA, 0xF000],
    np.uint32,
)


def structured(start: int, stop: int, lows: np.ndarray = LOW_HALVES) -> np.ndarray:
    """float32 values: the upper half-words start..stop-1, each with all the lower half-words."""
    high = np.arange(start, stop, dtype=np.uint32) << np.uint32(16)
    return (high[:, None] | lows).reshape(-1).view(np.float32)


def awkward(n: int, seed: int = 0) -> np.ndarray:
    """Finite float32 values over all exponents: random bits with the infinite exponents moved."""
    bits = np.random.default_rng(seed).integers(0, 2**32, n, np.uint32)
    top = (bits & 0x7F800000) == 0x7F800000
    return np.where(top, bits & np.uint32(0xBFFFFFFF), bits).view(np.float32)


def assert_same_values(got: np.ndarray, expected: np.ndarray, x: np.ndarray) -> None:
    """Equal bit for bit, where any NaN equals any other; shows the first inputs that differ."""
    integers = {4: np.uint32, 8: np.uint64}[expected.dtype.itemsize]
    got = got.astype(expected.dtype)
    wrong = got.view(integers) != expected.view(integers)
    wrong &= ~(np.isnan(got) & np.isnan(expected))
    first = np.flatnonzero(wrong)[:4]
    assert not first.size, (wrong.sum(), x[first], got[first], expected[first])


MPFR = {
    "nearest": gmpy2.RoundToNearest,
    "zero": gmpy2.RoundToZero,
    "up": gmpy2.RoundUp,
    "down": gmpy2.RoundDown,
}


def mpfr(fmt: FloatFormat, rounding: str = "nearest") -> gmpy2.context:
    """Arithmetic that rounds each result to a format of IEEE style."""
    return gmpy2.context(
        precision=fmt.man + 1,
        emax=fmt.bias + 1,
        emin=2 - fmt.bias - fmt.man,
        subnormalize=True,
        round=MPFR[rounding],
    )

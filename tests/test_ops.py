"""Tiles, counts, the fused hop and properties, the same on every implementation."""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracles
import pytest
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from cpdhpc.formats import (
    SHIFT_BIAS,
    SHIFT_NONFINITE,
    TILE,
    Cast,
    FloatFormat,
    packed_bytes,
    parse_format,
    tiles,
)
from cpdhpc.lab.verify.outcomes import KEY, OFFSET, differing, of_tiles
from cpdhpc.ops import reference
from cpdhpc.ops.common import NONFINITE_BITS, fitting_shift

LENGTHS = (0, 1, 31, 32, 33, 1023, 1024, 1025, 2500)


def gradients(n: int, seed: int = 0) -> np.ndarray:
    """Normal values whose size differs from tile to tile. float32[n]"""
    scale = np.ldexp(np.float32(1), (np.arange(n) // TILE * 7) % 40 - 20)
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def buffers(n: int, fmt: FloatFormat, shift: int = 0) -> SimpleNamespace:
    """What encode_tiles writes, filled with rubbish where it must write."""
    return SimpleNamespace(
        words=np.full(packed_bytes(n, fmt.bits), 0xA5, np.uint8),
        shifts=np.full(tiles(n), shift + SHIFT_BIAS, np.uint8),
        counts=np.full((tiles(n), 3), 0xABCDEF, np.uint32),
    )


@every("n", LENGTHS)
def test_amax_tiles(ops: Any, n: int) -> None:
    x = oracles.awkward(n)
    got = ops.amax_tiles(x)
    expected = [np.abs(x[i : i + TILE]).max() for i in range(0, n, TILE)]
    assert got.dtype == np.uint32 and got.view(np.float32).tolist() == expected
    for special in (np.nan, -np.inf):
        for position in (0, n - 1):
            if n:
                y = x.copy()
                y[position] = special
                assert (ops.amax_tiles(y) >= NONFINITE_BITS).tolist() == [
                    i == position // TILE for i in range(tiles(n))
                ]


@every("fit", [False, True])
@every("name", ["e4m3", "e2m1fn", "e3m0", "e6m9", "fp32"])
@every("n", LENGTHS)
def test_tiles_equal_their_parts(ops: Any, name: str, n: int, fit: bool) -> None:
    """encode_tiles is a shift, an encode and a pack per tile; decode_tiles undoes them."""
    cast = Cast(parse_format(name), "stochastic" if n % 2 else "nearest")
    x, b, key, offset = gradients(n), buffers(n, cast.fmt), (7, 9), 2**32 - 512
    ops.encode_tiles(x, cast, b.words, b.shifts, fit=fit, key=key, offset=offset)
    out = np.full(n, np.float32(77))
    assert ops.decode_tiles(b.words, b.shifts, cast.fmt, out) == 0
    for t, start in enumerate(range(0, n, TILE)):
        part = x[start : start + TILE]
        stored = fitting_shift(ops.amax_tiles(part), cast.fmt)[0] if fit else SHIFT_BIAS
        assert b.shifts[t] == stored
        k = int(stored) - SHIFT_BIAS
        codes = ops.encode(part, cast, shift=k, key=key, offset=offset + start)
        size = packed_bytes(TILE, cast.fmt.bits)
        assert b.words[t * size : (t + 1) * size].tobytes() == oracles.pack_integers(
            codes, cast.fmt.bits
        )
        decoded = ops.decode(codes, cast.fmt, shift=k)
        oracles.assert_same_values(out[start : start + TILE], decoded, part)


@every("name", ["e5m2", "e4m3fn", "e2m1fn", "e3m0"])
def test_a_tile_with_nonfinite_values_is_nan_throughout(ops: Any, name: str) -> None:
    fmt, n = parse_format(name), 3 * TILE + 5
    for special in (np.nan, np.inf, -np.inf):
        x, b = gradients(n), buffers(n, fmt)
        x[TILE + 3] = special
        ops.encode_tiles(x, Cast(fmt), b.words, b.shifts, fit=True, counts=b.counts)
        assert (b.shifts == SHIFT_NONFINITE).tolist() == [False, True, False, False]
        assert b.counts[:, 2].tolist() == [0, 1, 0, 0]
        out = np.zeros(n, np.float32)
        assert ops.decode_tiles(b.words, b.shifts, fmt, out) == TILE
        assert np.isnan(out[TILE : 2 * TILE]).all()
        assert np.isfinite(out[:TILE]).all() and np.isfinite(out[2 * TILE :]).all()


@every("k", [0, -6, 5])
def test_counts_are_exact(ops: Any, k: int) -> None:
    """e4m3, known values: largest 240, smallest 2**-9, halfway points 248 and 2**-10."""
    fmt, unit = parse_format("e4m3"), 2.0**-k
    saturating = [248, -248, 300, 1e6, -1e6]
    vanishing = [2.0**-10, -(2.0**-10), 2.0**-11, -(2.0**-30)]
    harmless = [0.0, -0.0, 1, 247.9, -240, 2.0**-9, 1.0001 * 2.0**-10]
    first = np.array(saturating + vanishing + harmless) * unit
    second = [np.nan, -np.inf, np.inf, 500 * unit]
    x = np.zeros(TILE + 10, np.float32)
    x[100 : 100 + len(first)] = first
    x[TILE : TILE + 4] = second
    for overflow in ("saturate", "inf"):
        b = buffers(x.size, fmt, k)
        cast = Cast(fmt, "nearest", overflow)  # type: ignore[arg-type]
        ops.encode_tiles(x, cast, b.words, b.shifts, counts=b.counts)
        assert b.counts.tolist() == [[5, 4, 0], [1, 0, 3]]
        out = np.empty_like(x)
        lost = 3 + (6 if overflow == "inf" else 0)
        assert ops.decode_tiles(b.words, b.shifts, fmt, out) == lost


@every("n", LENGTHS)
@every(
    "name, fit, rounding",
    [
        ("e5m2", True, "stochastic"),
        ("e4m3", False, "nearest"),
        ("e2m1fn", True, "nearest"),
        ("e6m9", True, "zero"),
        ("fp32", False, "nearest"),
    ],
)
def test_decode_add_and_the_hop_are_compositions(
    ops: Any, name: str, fit: bool, rounding: Any, n: int
) -> None:
    cast, y = Cast(parse_format(name), rounding), gradients(n, 1)
    words, given, _, gone, chosen, alone, again, counts, out, total, inside, after, *lost = (
        of_tiles(ops, gradients(n, 2), y, cast, fit=fit)
    )
    b, expected, how = buffers(n, cast.fmt), np.empty(n, np.float32), {"key": KEY, "fit": fit}
    ops.encode_tiles(y + out, cast, b.words, b.shifts, offset=OFFSET, counts=b.counts, **how)
    ops.decode_tiles(b.words, b.shifts, cast.fmt, expected)
    found = [given, total, inside, gone, alone, chosen, again, counts[1], after]
    wanted = [words, y + out, y + out, *[b.words] * 2, *[b.shifts] * 2, b.counts, expected]
    assert not differing(found, wanted) and not any(lost)


@pytest.mark.filterwarnings("ignore:overflow encountered in add")
def test_the_hop_carries_nonfinite_values_on(ops: Any) -> None:
    """A marked tile that comes in, and infinity met on the way, mark the tile that goes out."""
    n, cast = 4 * TILE, Cast(parse_format("e5m2"))
    sent, x = gradients(n, 3), gradients(n, 4)
    sent[5], x[TILE + 5] = np.inf, np.nan
    sent[2 * TILE], x[2 * TILE] = 3e38, 3e38  # the sum overflows float32
    came, gone = buffers(n, cast.fmt), buffers(n, cast.fmt)
    ops.encode_tiles(sent, cast, came.words, came.shifts, fit=True)
    options, out = {"fit": True, "counts": gone.counts}, np.empty(n, np.float32)
    arrays = came.words, came.shifts, cast, x, gone.words, gone.shifts
    assert ops.decode_add_encode_tiles(*arrays, out=out, **options) == 3 * TILE
    assert np.isnan(out[: 3 * TILE]).all() and np.isfinite(out[3 * TILE :]).all()
    assert (gone.shifts == SHIFT_NONFINITE).tolist() == [True, True, True, False]
    assert gone.counts[:, 2].tolist() == [TILE, 1, 1, 0]


@every("name", ["e5m2", "e4m3fn", "e2m1fn", "e3m0", "e6m9", "bf16", "fp32"])
@every("n", LENGTHS)
def test_tiles_equal_the_reference(fast_ops: Any, name: str, n: int) -> None:
    fmt = parse_format(name)
    for fit, rounding, overflow in (
        (True, "nearest", "saturate"),
        (True, "stochastic", "inf"),
        (False, "nearest", "inf"),
        (False, "zero", "saturate"),
    ):
        if overflow in oracles.overflows(fmt):
            cast = Cast(fmt, rounding, overflow)  # type: ignore[arg-type]
            for x in (gradients(n), oracles.awkward(n)):
                got, want = (of_tiles(o, x, x, cast, fit=fit) for o in (fast_ops, reference))
                assert not differing(got, want, any_nan=True), cast


FORMAT = st.builds(
    lambda exp, man, special: FloatFormat(exp, man, "ieee" if exp == 8 else special),
    st.integers(2, 8),
    st.integers(1, 23),
    st.sampled_from(["ieee", "nan", "none"]),
)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
BOUNDED = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@BOUNDED
@given(fmt=FORMAT, values=st.lists(FLOAT32, min_size=1, max_size=40))
def test_rounding_properties(ops: Any, fmt: FloatFormat, values: list[float]) -> None:
    """Idempotent, odd, monotonic, and at most half a spacing away where nothing saturates."""
    x, cast = np.sort(np.array(values, np.float32)), Cast(fmt, overflow="saturate")
    y = ops.decode(ops.encode(x, cast), fmt)
    assert np.array_equal(ops.decode(ops.encode(y, cast), fmt), y)
    assert np.array_equal(ops.decode(ops.encode(-x, cast), fmt), -y)
    assert np.all(np.diff(y) >= 0)
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if abs(a) <= fmt.max:
            exponent = max(int(np.frexp(abs(a))[1]) - 1 if a else -(10**6), 2 - 2 ** (fmt.exp - 1))
            assert abs(Fraction(a) - Fraction(b)) <= Fraction(2) ** (exponent - fmt.man) / 2
        else:
            assert abs(b) == fmt.max


@BOUNDED
@given(
    fmt=FORMAT,
    values=st.lists(FLOAT32, min_size=1, max_size=40),
    rounding=st.sampled_from(["nearest", "zero", "stochastic"]),
)
def test_fitted_tiles_never_saturate(
    ops: Any, fmt: FloatFormat, values: list[float], rounding: Any
) -> None:
    """The largest value fits, so nothing saturates unless the range of shifts ends first."""
    x, cast = np.array(values, np.float32), Cast(fmt, rounding)
    b = buffers(x.size, fmt)
    ops.encode_tiles(x, cast, b.words, b.shifts, fit=True, counts=b.counts)
    if b.shifts[0] > fmt.shift_min + SHIFT_BIAS:
        assert b.counts[0, 0] == 0
    out = np.empty_like(x)  # beside the smallest shift 2**128 is too large
    assert ops.decode_tiles(b.words, b.shifts, fmt, out) <= b.counts[0, 0]
    assert np.array_equal(np.signbit(out), np.signbit(x))

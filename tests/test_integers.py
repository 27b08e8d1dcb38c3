"""Integers on uniform grids: their codes and exact additions, against Python integers."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from allreduce_oracle import float32_of, format_of
from every import every

from cpdhpc.formats import (
    INTEGERS,
    SHIFT_BIAS,
    TILE,
    Cast,
    FloatFormat,
    packed_bytes,
    sum_bits,
    tiles,
)
from cpdhpc.lab.verify.outcomes import differing, of_sums
from cpdhpc.ops import cpu, reference

GOLDEN = Path(__file__).parent / "golden"
N = 2100
EXACT = ["int2", "int3", "int8", "int16", "ternary", "e4m3", "e2m1fn", "e3m0", "e4m3fn", "e4m7"]


def packed_integers(integers: Any, bits: int) -> np.ndarray:
    """Two's complement, packed by Python integers."""
    codes = [int(each) % 2**bits for each in integers]
    return np.frombuffer(oracles.pack_integers(np.array(codes, object), bits), np.uint8)


def some_integers(n: int, bits: int, seed: int) -> np.ndarray:
    """Integers of a width, its extremes among them. int64[n]"""
    top = 2 ** (bits - 1)
    integers = np.random.default_rng((seed, bits)).integers(-top, top, n)
    integers[:4] = -top, top - 1, -1, 0
    return integers


def values(n: int, seed: int, exponent: int = 0) -> np.ndarray:
    """Values on and between the points of a grid of step 2**exponent / 8, and tiny ones."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.integers(-40, 41, n) / np.float32(16), exponent).astype(np.float32)
    x[::7] = np.ldexp(rng.standard_normal(len(x[::7])), exponent).astype(np.float32)
    x[::31] = np.float32(1e-42)
    return x


def shifts_of(k: int, n: int) -> np.ndarray:
    return np.full(tiles(n), k + SHIFT_BIAS, np.uint8)


def by_fractions(x: np.ndarray, fmt: FloatFormat, k: int, rounding: str) -> list[int]:
    """The integer nearest to x * 2**k / step, or the one towards zero, within the range."""
    step, out = Fraction(fmt.smallest), []
    for value in x.tolist():
        whole = abs(Fraction(value)) * Fraction(2) ** k / step
        number = round(whole) if rounding == "nearest" else int(whole)  # round: ties to even
        out.append(min(number, fmt.max_integer) * (1 if value >= 0 else -1))
    return out


def codes_as_integers(words: np.ndarray, fmt: FloatFormat, n: int) -> list[int]:
    """Codes are a sign above the magnitude of the integer."""
    top = 1 << (fmt.bits - 1)
    codes = reference.unpack(words, fmt.bits, n).tolist()
    return [-(code - top) if code >= top else code for code in codes]


def test_formats_of_integers() -> None:
    for name, fmt in INTEGERS.items():
        bits = 2 if name == "ternary" else int(name[3:])
        assert (fmt.bits, fmt.max_integer) == (bits, 2 ** (bits - 1) - 1)
        steps = np.diff(oracles.number_grid(fmt)[:-1])
        assert np.all(steps == fmt.smallest) and len(steps) == fmt.max_integer
        assert sum_bits(fmt, 1) == bits
    assert [sum_bits(INTEGERS["ternary"], m) for m in (2, 3, 4, 7, 8)] == [3, 3, 4, 4, 5]
    assert sum_bits(INTEGERS["int8"], 16) == 12 and sum_bits(INTEGERS["int8"], 17) == 13
    for fmt in map(format_of, EXACT):
        assert fmt.max_integer == Fraction(fmt.max) / Fraction(fmt.smallest)


@every("rounding", ["nearest", "zero"])
@every("name", ["int2", "int3", "int8", "int16"])
def test_contributions_are_the_nearest_integers(ops: Any, name: str, rounding: Any) -> None:
    fmt, n = INTEGERS[name], 1030
    for exponent, k in ((0, 1), (-120, 121), (90, -85)):
        x, counts = values(n, 1, exponent), np.zeros((tiles(n), 3), np.uint32)
        words = np.zeros(packed_bytes(n, fmt.bits), np.uint8)
        ops.encode_tiles(x, Cast(fmt, rounding), words, shifts_of(k, n), counts=counts)
        expected = by_fractions(x, fmt, k, rounding)
        assert codes_as_integers(words, fmt, n) == expected
        scaled = [abs(Fraction(v)) * Fraction(2) ** k / Fraction(fmt.smallest) for v in x.tolist()]
        over = [(round(s) if rounding == "nearest" else int(s)) > fmt.max_integer for s in scaled]
        zero = [e == 0 and s > 0 for e, s in zip(expected, scaled, strict=True)]
        assert counts.sum(0).tolist() == [sum(over), sum(zero), 0]


@every("name", ["int2", "int5", "int16"])
def test_stochastic_contributions(ops: Any, name: str) -> None:
    """Up where the part cut off and 31 - man random bits make one; the mean is the value.

    Hoeffding: of 2**15 integers one apart, the mean is off by more than 0.02 with a probability
    below 2 exp(-2 * 0.02**2 * 2**15) = 1e-11.
    """
    fmt, n, key, offset = INTEGERS[name], 1 << 15, (5, 6), 70000
    x = np.full(n, np.float32(0.3 * fmt.smallest))
    words = np.zeros(packed_bytes(n, fmt.bits), np.uint8)
    cast = Cast(fmt, "stochastic")
    ops.encode_tiles(x, cast, words, shifts_of(0, n), key=key, offset=offset)
    integers = np.array(codes_as_integers(words, fmt, n))
    bits = 31 - fmt.man
    part = int(Fraction(float(x[0])) / Fraction(fmt.smallest) * 2**bits)
    random = reference.random31(key, np.arange(offset, offset + n, dtype=np.uint64))
    assert np.array_equal(integers, (part + (random.astype(np.int64) >> fmt.man)) >> bits)
    assert abs(integers.mean() - 0.3) < 0.02


@every("bits_a", [1, 2, 7, 8, 9, 31])
@every("bits_b", [2, 9, 31])
def test_sums_of_integers(ops: Any, bits_a: int, bits_b: int) -> None:
    """One bit more than the wider one holds any sum."""
    fmt, bits = INTEGERS["int8"], max(bits_a, bits_b) + 1
    a, b = some_integers(TILE * 2, bits_a, 1), some_integers(TILE * 2, bits_b, 2)
    words = np.full(packed_bytes(len(a), bits), 0xA5, np.uint8)
    packed = packed_integers(a, bits_a), packed_integers(b, bits_b)
    ops.add_integers_tiles(packed[0], bits_a, packed[1], bits_b, fmt, words, bits)
    assert np.array_equal(words, packed_integers(a + b, bits))


@every("name", EXACT)
def test_sums_with_codes(ops: Any, name: str) -> None:
    """A payload of codes counts as the integers of its numbers; any code is one."""
    fmt, bits = format_of(name), sum_bits(format_of(name), 2)
    magnitudes = np.arange(TILE) * 977 % (fmt.max_code + 1)
    codes = (magnitudes | (np.arange(TILE) % 2 << (fmt.bits - 1))).astype(np.uint32)
    signs = np.where(np.arange(TILE) % 2, -1, 1)
    smallest = oracles.exact_number(fmt, 1)
    numbers = [int(oracles.exact_number(fmt, m) / smallest) for m in magnitudes.tolist()]
    integers = np.array(numbers) * signs
    words = np.zeros(packed_bytes(TILE, bits), np.uint8)
    ops.add_integers_tiles(
        reference.pack(codes, fmt.bits), 0, packed_integers(integers, 32), 32, fmt, words, bits
    )
    assert np.array_equal(words, packed_integers(2 * integers, bits))


@every("rounding", ["nearest", "zero", "stochastic"])
@every("name", ["int2", "int16", "ternary", "e4m3", "e3m0", "e4m3fn"])
def test_the_hop_is_encode_and_add(ops: Any, name: str, rounding: Any) -> None:
    fmt = format_of(name)
    cast, stream = Cast(fmt, rounding), {"key": (7, 8), "offset": 3 * TILE}
    x, shifts = values(N, 3), shifts_of(0, N)
    codes, own_counts = np.zeros(packed_bytes(N, fmt.bits), np.uint8), np.zeros((3, 3), np.uint32)
    reference.encode_tiles(x, cast, codes, shifts, counts=own_counts, **stream)  # type: ignore[arg-type]
    for terms in (1, 2, 5):
        bits_in, bits = (0 if terms == 1 else sum_bits(fmt, terms)), sum_bits(fmt, terms + 1)
        came = codes if terms == 1 else packed_integers(
            np.resize([fmt.max_integer * terms, -fmt.max_integer * terms, 0, 1], N), bits_in
        )  # fmt: skip
        expected = np.zeros(packed_bytes(N, bits), np.uint8)
        reference.add_integers_tiles(came, bits_in, codes, 0, fmt, expected, bits)
        for counts in (None, np.full((3, 3), 77, np.uint32)):
            words = np.full_like(expected, 0xA5)
            ops.add_encode_integers_tiles(
                came, bits_in, cast, x, shifts, words, bits, counts=counts, **stream
            )
            assert np.array_equal(words, expected)
            assert counts is None or np.array_equal(counts, own_counts)


@pytest.mark.parametrize("name", ["int2", "int16", "e4m3", "e4m7"])
def test_decoding_rounds_once(ops: Any, name: str) -> None:
    """For the least and the largest shift too, where results are subnormal or overflow."""
    fmt = format_of(name)
    integers = some_integers(60, 32, 4)
    integers[4:20] = 2**24 + np.arange(16) * (1 << np.arange(16) % 7)
    integers[20:40] >>= np.arange(20) + 5
    words = packed_integers(np.resize(integers, TILE), 32)
    for k in (0, fmt.shift_min, fmt.shift_max):
        out = np.full(60, 7, np.float32)
        lost = ops.decode_integers_tiles(words, 32, shifts_of(k, 60), fmt, out)
        step = Fraction(fmt.smallest) / Fraction(2) ** k
        expected = np.array([float32_of(step * int(i)) for i in integers], np.float32)
        assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))
        assert lost == np.isinf(expected).sum()


def test_no_zero_is_negative(ops: Any) -> None:
    fmt, out = INTEGERS["int8"], np.full(3, 7, np.float32)
    words = reference.pack(np.array([0x80, 0x00, 0x81], np.uint32), 8)
    assert ops.decode_integers_tiles(words, 0, shifts_of(0, 3), fmt, out) == 0
    assert out.tolist() == [0, 0, -fmt.smallest] and not np.signbit(out[:2]).any()


def test_golden_sums(ops: Any) -> None:
    """Three int5 contributions on a grid of 1: the words of 7 bits."""
    fmt, cast = INTEGERS["int5"], Cast(INTEGERS["int5"])
    shifts = shifts_of(1 - fmt.man, 1100)  # smallest * 2**-k is 1
    xs = [((np.arange(1100) * step) % 31 - 15).astype(np.float32) for step in (7, 11, 13)]
    codes, two = (
        np.zeros(packed_bytes(1100, 5), np.uint8),
        np.zeros(packed_bytes(1100, 6), np.uint8),
    )
    three = np.zeros(packed_bytes(1100, 7), np.uint8)
    ops.encode_tiles(xs[0], cast, codes, shifts)
    ops.add_encode_integers_tiles(codes, 0, cast, xs[1], shifts, two, 6)
    ops.add_encode_integers_tiles(two, 6, cast, xs[2], shifts, three, 7)
    golden = bytes.fromhex((GOLDEN / "sums-int5.hex").read_text())
    assert packed_integers(sum(xs), 7).tobytes() == golden
    assert three.tobytes() == golden
    out = np.empty(1100, np.float32)
    assert ops.decode_integers_tiles(three, 7, shifts, fmt, out) == 0
    assert np.array_equal(out, sum(xs))


def test_wrong_lengths_are_errors() -> None:
    fmt, words = INTEGERS["int8"], np.zeros(1024, np.uint8)
    for call in (
        lambda: cpu.add_integers_tiles(words, 8, words[:-1], 8, fmt, words, 8),
        lambda: cpu.add_integers_tiles(words, 8, words, 33, fmt, words, 8),
        lambda: cpu.add_integers_tiles(words, 8, words, 8, fmt, words[:-1], 8),
        lambda: cpu.decode_integers_tiles(words, 9, words[:1], fmt, np.zeros(9, np.float32)),
        lambda: cpu.pack_trits(words, words),
        lambda: cpu.unpack_trits(words[:205], words),
    ):
        with pytest.raises(ValueError, match=r"bytes given|bits: 33"):
            call()


@every("name", ["int7", "e4m3"])
def test_clones_give_the_same_bits(clone: str, name: str) -> None:
    assert cpu.clone() == clone
    x, fmt = values(N, 5), format_of(name)
    assert not differing(*(of_sums(ops, x, fmt, "stochastic") for ops in (cpu, reference)))

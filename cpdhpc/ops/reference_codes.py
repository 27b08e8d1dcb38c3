"""The specification of codes: a number to its code and back, codes to bits and back.

NumPy, float64 and integers, slow and plain.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import LANES, TILE, Cast, FloatFormat, tiles
from ..randomness import Key

Array = np.ndarray[Any, np.dtype[Any]]


def random31(key: Key, index: Array) -> Array:
    """Return the 31 random bits of each element: a hash of the stream's key and the index.

    index: uint64[n]; returns uint32[n] below 2**31
    Source: C. Wellons' lowbias32 ("Prospecting for hash functions", 2018); the second word of the
    key joins half-way, and multiples of the index's high word with both.
    """

    low = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (index >> np.uint64(32)).astype(np.uint32)
    h = low ^ np.uint32(key[0]) ^ (high * np.uint32(0x85EBCA6B))
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = h ^ (h >> np.uint32(15)) ^ np.uint32(key[1]) ^ (high * np.uint32(0x9E3779B9))
    h = h * np.uint32(0x846CA68B)
    return (h ^ (h >> np.uint32(16))) >> np.uint32(1)


def encode_with_events(
    x: Array, cast: Cast, shift: Array, key: Key, index: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Encode x * 2**shift; also return which values saturated, underflowed, are not finite."""
    fmt = cast.fmt
    finite = np.isfinite(x)
    scaled = np.ldexp(np.abs(np.where(finite, x, 0).astype(np.float64)), shift)  # exact
    exponent = np.maximum(np.where(scaled > 0, np.frexp(scaled)[1] - 1, fmt.emin), fmt.emin)
    multiple = np.ldexp(scaled, fmt.man - exponent)  # of the spacing of numbers there; exact
    whole = np.floor(multiple)
    rest = multiple - whole
    if cast.rounding == "nearest":
        up = (rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))
    elif cast.rounding == "stochastic":
        bits = 31 - fmt.man  # of the rest that count, and of the random number
        random = random31(key, index) >> np.uint32(fmt.man)
        up = np.floor(np.ldexp(rest, bits)) + random >= 2.0**bits
    else:
        up = np.zeros(x.shape, bool)
    # A carry out of the mantissa moves into the exponent by itself.
    code = (whole + up).astype(np.int64) + ((exponent - fmt.emin).astype(np.int64) << fmt.man)
    over = finite & (code > fmt.max_code)
    code = np.where(over, cast.overflow_code, code)
    code = np.where(finite, code, np.where(np.isnan(x), fmt.nan_code, fmt.inf_code))
    under = (code == 0) & (x != 0)
    sign = np.signbit(x) & ~np.isnan(x)  # NaN has none: hardware differs in which one it gives
    code = code | (sign.astype(np.int64) << (fmt.bits - 1))
    return code.astype(np.uint32), (over, under, ~finite)


def encode(x: Array, cast: Cast, shift: int = 0, key: Key = (0, 0), offset: int = 0) -> Array:
    """Return the code of each x * 2**shift.

    x: float32[n]; returns uint32[n]
    key, offset: stochastic rounding draws random31(key, offset + i) for element i
    """
    index = np.uint64(offset) + np.arange(x.size, dtype=np.uint64)
    return encode_with_events(x, cast, np.full(x.shape, shift), key, index)[0]


def decode(codes: Array, fmt: FloatFormat, shift: int = 0) -> Array:
    """Return the number of each code times 2**-shift.

    codes: uint32[n]; returns float32[n]
    """
    return decode_shifted(codes, fmt, np.full(codes.shape, shift))


def decode_shifted(codes: Array, fmt: FloatFormat, shift: Array) -> Array:
    magnitude = (codes & np.uint32((1 << (fmt.bits - 1)) - 1)).astype(np.int64)
    field = magnitude >> fmt.man
    whole = (magnitude & ((1 << fmt.man) - 1)) + np.where(field > 0, 1 << fmt.man, 0)
    value = np.ldexp(whole.astype(np.float64), np.maximum(field, 1) - fmt.bias - fmt.man - shift)
    if fmt.special == "ieee":
        value = np.where(magnitude > fmt.max_code, np.nan, value)
        value = np.where(magnitude == fmt.inf_code, np.inf, value)
    elif fmt.special == "nan":
        value = np.where(magnitude > fmt.max_code, np.nan, value)
    sign = (codes >> np.uint32(fmt.bits - 1)) & np.uint32(1)
    return np.where(sign == 1, -value, value).astype(np.float32)


def pack(codes: Array, bits: int) -> Array:
    """Return codes packed in tiles: lane l's 32 codes, lowest bits first, are words [w][l].

    codes: uint32[n], each below 2**bits; returns uint8[ceil(n / 1024) * 128 * bits]
    Source: the layout of FastLanes (Afroozeh, Boncz; VLDB 2023), 32 lanes of 32-bit words.
    """
    count = tiles(codes.size)
    padded = np.zeros(count * TILE, np.uint32)
    padded[: codes.size] = codes
    rows = padded.reshape(count, TILE // LANES, LANES)
    each_bit = (rows[..., None] >> np.arange(bits, dtype=np.uint32)) & np.uint32(1)
    stream = each_bit.transpose(0, 2, 1, 3).reshape(count, LANES, bits, 32)
    words = (stream.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).astype("<u4").view(np.uint8).reshape(-1)


def unpack(packed: Array, bits: int, n: int) -> Array:
    """Return the first n codes of tiles that pack made.

    packed: uint8[ceil(n / 1024) * 128 * bits]; returns uint32[n]
    """
    count = tiles(n)
    words = packed.view("<u4").reshape(count, bits, LANES).transpose(0, 2, 1)
    each_bit = (words[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    rows = each_bit.reshape(count, LANES, TILE // LANES, bits).transpose(0, 2, 1, 3)
    codes = (rows.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return np.ascontiguousarray(codes.reshape(-1)[:n])

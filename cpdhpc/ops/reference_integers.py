"""The specification of exact sums: numbers of a format as integers, added without rounding.

An integer is a number of a format divided by the format's smallest. A payload holds either codes of
the format, or integers in two's complement of so many bits; both are packed in tiles. In the
arguments bits = 0 says codes. formats.sum_bits says how many bits hold a sum; where fewer are
given, sums wrap around. NaN and infinity have no integer: values and codes must be finite.
"""

from __future__ import annotations

import numpy as np

from ..formats import LANES, SHIFT_BIAS, TILE, TRIT_BYTES, Cast, FloatFormat, tiles
from ..randomness import Key
from .reference_codes import Array, decode, encode_with_events, pack, unpack


def _integers(words: Array, bits: int, fmt: FloatFormat, n: int) -> Array:
    """Return the first n integers of a payload, int64[n]."""
    if bits == 0:
        values = decode(unpack(words, fmt.bits, n), fmt).astype(np.float64)
        return (values / fmt.smallest).astype(np.int64)  # exact: a power of two
    codes = unpack(words, bits, n).astype(np.int64)
    return codes - ((codes >> (bits - 1)) << bits)


def _pack_integers(integers: Array, bits: int) -> Array:
    return pack((integers & ((1 << bits) - 1)).astype(np.uint32), bits)


def add_integers_tiles(
    a: Array, bits_a: int, b: Array, bits_b: int, fmt: FloatFormat, words: Array, bits: int
) -> None:
    """Write the sums of the integers of a and b into words.

    a, b: uint8[128 * bits_a * tiles], uint8[128 * bits_b * tiles], of fmt.bits where bits are 0
    words: uint8[128 * bits * tiles], written; bits: 1..32
    """
    n = words.size // (TILE // 8 * bits) * TILE
    total = _integers(a, bits_a, fmt, n) + _integers(b, bits_b, fmt, n)
    words[:] = _pack_integers(total, bits)


def add_encode_integers_tiles(
    words_in: Array,
    bits_in: int,
    cast: Cast,
    x: Array,
    shifts: Array,
    words: Array,
    bits: int,
    *,
    key: Key = (0, 0),
    offset: int = 0,
    counts: Array | None = None,
) -> None:
    """Write the sums of the integers of words_in and of x * 2**k, rounded by cast, into words.

    words_in: uint8[packed_bytes(n, bits_in)], of cast.fmt.bits where bits_in is 0
    x: float32[n], finite; shifts: uint8[tiles(n)], the k + 127 of each tile
    words: uint8[packed_bytes(n, bits)], written; bits: 1..32
    key, offset, counts: as encode_tiles
    """
    count = tiles(x.size)
    padded = np.zeros(count * TILE, np.float32)
    padded[: x.size] = x
    k = np.repeat(shifts.astype(np.int64) - SHIFT_BIAS, TILE)
    index = np.uint64(offset) + np.arange(padded.size, dtype=np.uint64)
    codes, events = encode_with_events(padded, cast, k, key, index)
    own = _integers(pack(codes, cast.fmt.bits), 0, cast.fmt, padded.size)
    words[:] = _pack_integers(_integers(words_in, bits_in, cast.fmt, padded.size) + own, bits)
    if counts is not None:
        for column, event in enumerate(events):
            counts[:, column] = event.reshape(count, TILE).sum(1)


def decode_integers_tiles(
    words: Array, bits: int, shifts: Array, fmt: FloatFormat, out: Array
) -> int:
    """Write integer * fmt.smallest * 2**-k into out; return how many values are not finite.

    words: uint8[packed_bytes(n, bits)], of fmt.bits where bits is 0; shifts: uint8[tiles(n)]
    out: float32[n], written: rounded once, to nearest with ties to even; zero is never negative
    """
    k = np.repeat(shifts.astype(np.int64) - SHIFT_BIAS, TILE)[: out.size]
    integers = _integers(words, bits, fmt, out.size).astype(np.float64)  # below 2**31: exact
    with np.errstate(over="ignore"):
        out[:] = np.ldexp(integers * fmt.smallest, -k).astype(np.float32)
    return int(out.size - np.isfinite(out).sum())


def pack_trits(words: Array, trits: Array) -> None:
    """Write ternary codes, five in a byte, into trits.

    words: uint8[256 * tiles], codes of the format of INTEGERS["ternary"]: 0, 1 for 1, 3 for -1,
    2 for -0, which becomes 0; trits: uint8[205 * tiles], written
    A byte is the sum of digit i * 3**i, i = 0..4; the digits are 0, 1 for 1 and 2 for -1. Bytes
    32 g + l, g = 0..5, hold rows 5 g .. 5 g + 4 of lane l; byte 192 + j digits 5 j .. 5 j + 4 of
    the 64 values of rows 30 and 31 in order.
    """
    count = trits.size // TRIT_BYTES
    digits = np.array([0, 1, 0, 2], np.uint8)[unpack(words, 2, count * TILE)]
    rows = digits.reshape(count, TILE // LANES, LANES)
    first = rows[:, :30].reshape(count, 6, 5, LANES).transpose(0, 1, 3, 2).reshape(count, -1, 5)
    last = np.zeros((count, 65), np.uint8)
    last[:, :64] = rows[:, 30:].reshape(count, 64)
    fives = np.concatenate([first, last.reshape(count, 13, 5)], 1)
    trits[:] = (fives * 3 ** np.arange(5)).sum(-1).astype(np.uint8).reshape(-1)


def unpack_trits(trits: Array, words: Array) -> None:
    """Write the codes that pack_trits packed into words: 0, 1 for 1 and 3 for -1.

    trits: uint8[205 * tiles]; words: uint8[256 * tiles], written
    """
    count = trits.size // TRIT_BYTES
    digits = trits.astype(np.int64).reshape(count, TRIT_BYTES, 1) // 3 ** np.arange(5) % 3
    first = digits[:, :192].reshape(count, 6, LANES, 5).transpose(0, 1, 3, 2)
    last = digits[:, 192:].reshape(count, 65)[:, :64]
    rows = np.concatenate([first.reshape(count, -1), last], 1)
    words[:] = pack(np.array([0, 1, 3], np.uint32)[rows.reshape(-1)], 2)

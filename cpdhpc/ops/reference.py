"""The specification of every array operation: NumPy, float64 and integers, slow and simple.

It has codes (a number to its code, codes to packed bits and back), operations on tiles, exact sums
of integers, and sparse operations. ops.cpu and ops.gpu have the same functions and must give the
same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..formats import (
    LANES,
    RANDOM_BITS,
    SHIFT_BIAS,
    SHIFT_NONFINITE,
    TILE,
    TRIT_BYTES,
    Cast,
    FloatFormat,
    Format,
    Microscaling,
    TableFormat,
    tiles,
)
from ..randomness import Key
from . import composed, products, tables, two_scales
from .common import MAGNITUDE, Term, check_rank, threshold_bits
from .common import fitting_shift as fitting_shift
from .common import stream_words as stream_words
from .products import Products
from .steps import step_layers as step_layers

Array = np.ndarray[Any, np.dtype[Any]]
_OPS = sys.modules[__name__]
multiply, divide = np.multiply, np.divide


def random31(key: Key, index: Array) -> Array:
    """Return the 31 random bits of each element: a hash of the stream's key and the index.

    index: uint64[n]; returns uint32[n] below 2**31
    Source: C. Wellons' triple32 ("Prospecting for hash functions", 2018), to whose input the first
    word of the key is added; the second word joins after the first round, and multiples of the
    index's high word with both. The input joins again at the end (Davies, Meyer).
    """

    low = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (index >> np.uint64(32)).astype(np.uint32)
    x = low + np.uint32(key[0]) + high * np.uint32(0x85EBCA6B)
    h = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    h = h ^ (h >> np.uint32(11)) ^ np.uint32(key[1]) ^ (high * np.uint32(0x9E3779B9))
    h = h * np.uint32(0xAC4C1B51)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x31848BAB)
    return (h ^ (h >> np.uint32(14)) ^ x) >> np.uint32(1)


def encode_with_events(
    x: Array, cast: Cast, shift: Array, key: Key, index: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Encode x * 2**shift; also return whether values saturate, underflow, or are not finite."""
    fmt = cast.fmt
    chance = cast.rounding == "stochastic"
    draws = random31(key, index) if chance else np.zeros(x.shape, np.uint32)
    random = draws & np.uint32(cast.random_mask)
    if isinstance(fmt, TableFormat):
        return tables.encode(x, cast, fmt, shift, random)
    finite, sign = np.isfinite(x), np.signbit(x) & ~np.isnan(x)  # NaN's depends on the hardware
    scaled = np.ldexp(np.abs(np.where(finite, x, 0).astype(np.float64)), shift)  # exact
    exponent = np.maximum(np.where(scaled > 0, np.frexp(scaled)[1] - 1, fmt.emin), fmt.emin)
    multiple = np.ldexp(scaled, fmt.man - exponent)  # of the spacing of numbers there; exact
    whole = np.floor(multiple)
    rest = multiple - whole
    code = whole.astype(np.int64) + ((exponent - fmt.emin).astype(np.int64) << fmt.man)
    if cast.rounding == "nearest":
        up = (rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))
    elif cast.rounding == "stochastic":
        bits = RANDOM_BITS - fmt.man  # of the rest that count, and of the draw
        up = np.floor(np.ldexp(rest, bits)) + (random >> np.uint32(fmt.man)) >= 2.0**bits
    else:
        no = np.zeros(x.shape, bool)
        up = {"zero": no, "up": ~sign, "down": sign, "odd": code % 2 == 0}[cast.rounding]
        up = up & (rest > 0)
    code = code + up  # a carry out of the mantissa increments the exponent
    over = finite & (code > fmt.max_code)
    above, below = cast.overflow_codes
    code = np.where(over, np.where(sign, below, above), code)
    code = np.where(finite, code, np.where(np.isnan(x), fmt.nan_code, fmt.inf_code))
    under = (code == 0) & (x != 0)
    code = code | (sign.astype(np.int64) << (fmt.bits - 1))
    return code.astype(np.uint32), (over, under, ~finite)


def encode(x: Array, cast: Cast, shift: int = 0, key: Key = (0, 0), offset: int = 0) -> Array:
    """Return the code of each x * 2**shift.

    x: float32[n]; returns uint32[n]
    key, offset: stochastic rounding draws random31(key, offset + i) for element i
    """
    index = np.uint64(offset) + np.arange(x.size, dtype=np.uint64)
    return encode_with_events(x, cast, np.full(x.shape, shift), key, index)[0]


def decode(codes: Array, fmt: Format, shift: int = 0) -> Array:
    """Return the number of each code times 2**-shift.

    codes: uint32[n]; returns float32[n]
    """
    return decode_shifted(codes, fmt, np.full(codes.shape, shift))


def decode_shifted(codes: Array, fmt: Format, shift: Array) -> Array:
    if isinstance(fmt, TableFormat):
        return tables.decode(codes, fmt, shift)
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

    a, b: uint8[128 * bits_a * tiles], uint8[128 * bits_b * tiles]; bits 0: codes of fmt
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

    words_in: uint8[packed_bytes(n, bits_in)]; bits_in 0: codes of cast.fmt
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
    fmt = cast.float_format
    own = _integers(pack(codes, fmt.bits), 0, fmt, padded.size)
    words[:] = _pack_integers(_integers(words_in, bits_in, fmt, padded.size) + own, bits)
    if counts is not None:
        for column, event in enumerate(events):
            counts[:, column] = event.reshape(count, TILE).sum(1)


def decode_integers_tiles(
    words: Array, bits: int, shifts: Array, fmt: FloatFormat, out: Array
) -> int:
    """Write integer * fmt.smallest * 2**-k into out; return how many values are not finite.

    words: uint8[packed_bytes(n, bits)]; bits 0: codes of fmt; shifts: uint8[tiles(n)]
    out: float32[n], written: rounded once, to nearest with ties to even; zero is never negative
    """
    k = np.repeat(shifts.astype(np.int64) - SHIFT_BIAS, TILE)[: out.size]
    integers = _integers(words, bits, fmt, out.size).astype(np.float64)  # below 2**31: exact
    with np.errstate(over="ignore"):
        out[:] = np.ldexp(integers * fmt.smallest, -k).astype(np.float32)
    return int(out.size - np.isfinite(out).sum())


def pack_trits(words: Array, trits: Array) -> None:
    """Write ternary codes, five in a byte, into trits.

    words: uint8[256 * tiles], codes of INTEGERS["ternary"]: 0, 1 for 1, 3 for -1, and 2 for -0,
    which becomes 0; trits: uint8[205 * tiles], written
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


def matmul(a: Array, b: Array, how: Products, key: Key = (0, 0)) -> Array:
    """Return the products of the rows of a and the columns of b, rounded as how says.

    a: float32[batch, m, k]; b: float32[batch, k, n]; returns float32[batch, m, n]
    A sum begins with +0. Rounding 8 s + j belongs to step s: the number of the term; for the sum of
    chunks, or the additions of a pairwise sum, k plus their number. j is 0 for the sum and 4 for
    the product; with kahan 1 for the term, 2 for the gain of the sum and 3 for the rest.
    Rounding r of output o, counted over all batches, draws random31(key, r * outputs + o).
    """

    def round_to(exact: Array, cast: Cast, number: int) -> Array:
        index = np.uint64(number) * np.uint64(exact.size) + np.arange(exact.size, dtype=np.uint64)
        shift = np.zeros(exact.shape, np.int64)
        codes = encode_with_events(exact, cast, shift, key, index.reshape(exact.shape))[0]
        return decode(codes, cast.fmt).astype(np.float64)

    return products.matmul(a, b, how, round_to).astype(np.float32)


SATURATED, UNDERFLOWED, NONFINITE = range(3)  # columns of counts


def amax_tiles(x: Array) -> Array:
    """Return per tile the float32 bits of max|x|; NONFINITE_BITS or more is NaN or infinity.

    x: float32[n]; returns uint32[ceil(n / 1024)]
    """
    padded = np.zeros(tiles(x.size) * TILE, np.uint32)
    padded[: x.size] = x.view(np.uint32) & MAGNITUDE
    return padded.reshape(-1, TILE).max(1)


def _blocks(values: Array, shifts: int) -> Array:
    """Return whole tiles with the values of a shift along axes 2 and 4, the shifts along 1 and 3.

    values: [tiles * 1024]; shifts: number in a tile: 1, or 32 for each of its blocks of rows
    """
    blocks, lanes = max(1, shifts // LANES), min(shifts, LANES)
    return values.reshape(-1, blocks, TILE // LANES // blocks, lanes, LANES // lanes)


def _per_value(shifts: Array, count: int) -> Array:
    """Return the shift byte of each value of count tiles, int64[count * 1024]."""
    each = max(1, shifts.size // max(1, count))
    spread = np.zeros(count * TILE, np.int64)
    blocks = _blocks(spread, each)
    blocks[:] = shifts.reshape(count, blocks.shape[1], 1, blocks.shape[3], 1)
    return spread


def _turned(values: Array, fmt: Format) -> Array:
    """Return tiles of OCP's blocks with neighbours in a lane's column, or the reverse.

    Row and lane of a value are exchanged, and with them its random bits. Other formats: unchanged.
    """
    if not isinstance(fmt, Microscaling):
        return values
    return values.reshape(-1, LANES, LANES).transpose(0, 2, 1).reshape(-1)


def _bytes_of(packed: Array, fmt: Format, bits: int, lanes: int) -> Array:
    """Return words of OCP's blocks with those of a lane side by side, or the reverse.

    bits, lanes: the shape of a tile's words, [w][l] or [l][w]. Other formats: unchanged.
    """
    if not isinstance(fmt, Microscaling):
        return packed
    words = packed.view("<u4").reshape(-1, bits, lanes).transpose(0, 2, 1)
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1)


def _flipped(shifts: Array, fmt: Format) -> Array:
    """Return shift bytes of OCP's blocks as E8M0, or the reverse. 255 is NaN in both."""
    if not isinstance(fmt, Microscaling):
        return shifts
    flipped = 2 * SHIFT_BIAS - shifts.astype(np.int64)
    return np.where(shifts == SHIFT_NONFINITE, SHIFT_NONFINITE, flipped).astype(np.uint8)


def encode_tiles(
    x: Array,
    cast: Cast,
    words: Array,
    shifts: Array,
    *,
    fit: bool = False,
    key: Key = (0, 0),
    offset: int = 0,
    counts: Array | None = None,
) -> None:
    """Encode and pack x into words, each tile or block scaled by 2**k with k + 127 in shifts.

    x: float32[n]; words: uint8[packed_bytes(n, bits)], written
    shifts: uint8[tiles(n)], or with blocks of b = 32 or 16 rows of a lane's column, uint8[tiles(n)
        * 1024 / b], in the order [tile][block][lane]; their number decides
    With formats.Microscaling words and shifts have OCP's layout, with x in blocks of 32
        neighbours. Element 32 b + r of a tile draws the random bits of element 32 r + b.
    fit: choose the shifts by fitting_shift and write them, instead of reading them. A tile or block
        with NaN or infinity is then encoded with k = 0 and marked SHIFT_NONFINITE.
    counts: uint32[tiles(n), 3] or None: how many values of each tile saturated, underflowed
        (became zero) or were not finite, written
    """
    count = tiles(x.size)
    padded = np.zeros(count * TILE, np.float32)
    padded[: x.size] = x
    padded = _turned(padded, cast.fmt)
    if fit:
        magnitudes = padded.view(np.uint32) & MAGNITUDE
        amax = _blocks(magnitudes, max(1, shifts.size // max(1, count))).max((2, 4)).reshape(-1)
        shifts[:] = _flipped(fitting_shift(amax, cast.fmt), cast.fmt)
    stored = _per_value(_flipped(shifts, cast.fmt), count)
    k = np.where(stored == SHIFT_NONFINITE, 0, stored - SHIFT_BIAS)
    index = np.uint64(offset) + np.arange(padded.size, dtype=np.uint64)
    codes, events = encode_with_events(padded, cast, k, key, index)
    words[:] = _bytes_of(pack(codes, cast.fmt.bits), cast.fmt, cast.fmt.bits, LANES)
    if counts is not None:
        for column, event in enumerate(events):
            counts[:, column] = event.reshape(count, TILE).sum(1)


def decode_tiles(words: Array, shifts: Array, fmt: Format, out: Array) -> int:
    """Unpack and decode into out, and return how many values are not finite.

    words, shifts: as encode_tiles made them; out: float32[n], written
    A tile or block marked SHIFT_NONFINITE is NaN throughout.
    """
    count = tiles(out.size)
    codes = unpack(_bytes_of(words, fmt, LANES, fmt.bits), fmt.bits, count * TILE)
    k = _per_value(_flipped(shifts, fmt), count) - SHIFT_BIAS
    marked = k == SHIFT_NONFINITE - SHIFT_BIAS
    numbers = decode_shifted(codes, fmt, np.where(marked, 0, k))
    out[:] = _turned(np.where(marked, np.float32(np.nan), numbers), fmt)[: out.size]
    return int(out.size - np.isfinite(out).sum())


def decode_add_tiles(words: Array, shifts: Array, fmt: Format, x: Array, out: Array) -> None:
    """Write x + decoded, summed in float32, into out; out may be x.

    x, out: float32[n]
    """
    decoded = np.empty_like(x)
    decode_tiles(words, shifts, fmt, decoded)
    np.add(x, decoded, out=out)


def decode_add_encode_tiles(
    words_in: Array,
    shifts_in: Array,
    cast: Cast,
    x: Array,
    words: Array,
    shifts: Array,
    *,
    fit: bool = False,
    key: Key = (0, 0),
    offset: int = 0,
    counts: Array | None = None,
    out: Array | None = None,
) -> int:
    """One hop of a reduction: encode_tiles of x + what words_in and shifts_in decode to.

    out: float32[n] or None: what words decode to, written
    Returns how many values of out are not finite; 0 without it.
    """
    total = np.empty_like(x)
    decode_add_tiles(words_in, shifts_in, cast.fmt, x, total)
    encode_tiles(total, cast, words, shifts, fit=fit, key=key, offset=offset, counts=counts)
    return 0 if out is None else decode_tiles(words, shifts, cast.fmt, out)


# Passes over gradients. Each operation on a value is rounded by itself; sums over values are
# NumPy's, in float64, in its order of additions.


def accumulate(
    x: Array,
    kept: Array,
    out: Array,
    *,
    factor: float = 1.0,
    more: Array | None = None,
    total: Array | None = None,
) -> int:
    """Write x + factor * kept into out, and out + more into total, if they are given.

    All are float32[n]. Returns the float32 bits of the largest magnitude of total, else of out; NaN
    is larger than infinity.
    """
    np.add(x, kept if factor == 1 else np.float32(factor) * kept, out=out)
    if more is not None and total is not None:
        np.add(out, more, out=total)
    return largest_bits(out if total is None else total)


def encode_bins(
    x: Array, kept: Array, out: Array, rate: float, bin_values: int
) -> tuple[Array, Array]:
    """Write x + kept into out; return its bins' largest magnitudes and the codes of its leaders.

    x, kept, out: float32[n], in bins of bin_values values; the last bin may be shorter
    Returns float32[bins], and uint8[bytes] of pack_bins. Leaders are the values but zeros whose
    magnitude, with rate * x added, is no less than the largest of their bin.
    """
    accumulate(x, kept, out)
    short = np.zeros(-x.size % bin_values, np.float32)
    own = np.concatenate([out, short]).view(np.uint32) & MAGNITUDE
    reach = np.concatenate([np.float32(rate) * x + out, short]).view(np.uint32) & MAGNITUDE
    highest = own.reshape(-1, bin_values).max(axis=1, initial=0)
    found = (reach >= np.repeat(highest, bin_values)) & (own != 0)
    indices = np.flatnonzero(found).astype(np.uint32)
    return highest.view(np.float32), pack_bins(bin_values, indices, out[indices])


def chunk_leaders(x: Array, chunk_values: int) -> Array:
    """Return the position of the largest magnitude in each chunk, the first of equal ones.

    x: float32[n], in chunks of chunk_values; the last may be shorter; returns int64[chunks]
    """
    parts = [x[i : i + chunk_values] for i in range(0, x.size, chunk_values)]
    found = [int((part.view(np.uint32) & MAGNITUDE).argmax()) for part in parts]
    return np.array(found, np.int64)


def row_sums(x: Array) -> Array:
    """Return the sum of each row: float32[rows, columns] to float64[rows]."""
    return np.asarray(x.sum(axis=1, dtype=np.float64))


def run_sums(x: Array, starts: Array, of: Term) -> Array:
    """Return the sum of magnitudes or squares of each run: float32[n], int64[runs] to float64.

    starts: the first of each run, ascending; the last run ends with x
    """
    wide = x.astype(np.float64)
    return np.add.reduceat(np.abs(wide) if of == "magnitude" else np.square(wide), starts)


def square_sum(x: Array, center: float = 0.0) -> float:
    """Return the sum of squares of x - center, float32[n]."""
    return float(np.square(x - np.float64(center)).sum())


def run_maxima(x: Array, ends: Array) -> tuple[Array, float]:
    """Return the largest magnitude of each run of float32[n], NaN if one is, and the sum of x.

    ends: int64[runs], the ends of the runs, the last one n
    Returns float32[runs], and the sum of row_sums.
    """
    bits = x.view(np.uint32) & MAGNITUDE
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    found = [bits[a:b].max(initial=0) for a, b in zip(starts, ends, strict=True)]
    return np.array(found, np.uint32).view(np.float32), float(row_sums(x.reshape(1, -1))[0])


def multiply_runs(x: Array, each: Array, ends: Array, out: Array) -> int:
    """Write x times its runs' numbers into out; return the bits of the largest magnitude.

    x: float32[n]; each: float32[runs], of runs that end at ends, int64[runs]
    """
    np.multiply(x, _spread(each, ends, x.size), out=out)
    return largest_bits(out)


def divide_runs(
    x: Array, each: Array, ends: Array, out: Array, limits: Array | None = None
) -> None:
    """Write x over its runs' numbers into out; see multiply_runs.

    limits: float32[runs], above 0: x is cut to +-limit before; NaN stays NaN
    """
    if limits is not None:
        limit = _spread(limits, ends, x.size)
        x = np.minimum(np.maximum(x, -limit), limit)
    np.divide(x, _spread(each, ends, x.size), out=out)


def _spread(each: Array, ends: Array, n: int) -> Array:
    return each[np.searchsorted(ends, np.arange(n), side="right")]


def largest_bits(x: Array) -> int:
    """Return the float32 bits of the largest magnitude of x."""
    return int((x.view(np.uint32) & MAGNITUDE).max(initial=0))


def encode_signs(
    x: Array, kept: Array | None = None, rest: Array | None = None
) -> tuple[Array, Array, int]:
    """Return the signs of x + kept as bits, the two means of each row, and its largest bits.

    x, kept: float32[rows, columns], kept 0 if not given; rest: x + kept minus the means, written if
        given
    Returns uint8[bytes], a bit for each value, the first one the highest of its byte, set unless
    the value is below 0, so also for NaN; float32[rows, 2]: the means of the values below 0 and of
    the others; and the float32 bits of the largest magnitude of x + kept.
    """
    total = x if kept is None else x + kept
    positive = ~(total < 0)
    counts = positive.sum(axis=1)
    below = np.where(positive, np.float32(0), total).sum(axis=1, dtype=np.float64)
    above = np.where(positive, total, np.float32(0)).sum(axis=1, dtype=np.float64)
    means = (below / np.maximum(x.shape[1] - counts, 1), above / np.maximum(counts, 1))
    pairs = np.stack(means, axis=1).astype(np.float32)
    if rest is not None:
        np.subtract(total, np.where(positive, pairs[:, 1:], pairs[:, :1]), out=rest)
    return np.packbits(positive), pairs, largest_bits(total.reshape(-1))


def decode_signs(signs: Sequence[Array], pairs: Sequence[Array], out: Array, divisor: float) -> int:
    """Write the sum of the values of signs and pairs of encode_signs, over divisor, into out.

    signs, pairs: one of each rank, added in their order; out: float32[rows, columns]
    Returns the bits of the largest magnitude.
    """
    out[...] = 0
    for sign, pair in zip(signs, pairs, strict=True):
        positive = np.unpackbits(sign, count=out.size).reshape(out.shape).astype(bool)
        out += np.where(positive, pair[:, 1:], pair[:, :1])
    out /= np.float32(divisor)
    return largest_bits(out.reshape(-1))


def row_products(m: Array, rows: Array) -> Array:
    """Return the product of m with each of some rows: float32[n, k], [r, k] to [r, n].

    A sum over columns has four sums side by side: of 16 columns the last four come first. The last
    four are padded with zeros. These are the additions of np.einsum on x86-64.
    """
    columns = m.shape[1]
    padded, others = (np.zeros((len(x), -(-columns // 4) * 4), np.float32) for x in (m, rows))
    padded[:, :columns], others[:, :columns] = m, rows
    whole = columns // 16 * 16
    order = [j + k for j in range(0, whole, 16) for k in (12, 8, 4, 0)]
    side = np.zeros((len(rows), len(m), 4), np.float32)
    for j in [*order, *range(whole, columns, 4)]:
        side = padded[:, j : j + 4] * others[:, None, j : j + 4] + side
    found = (side[..., 0] + side[..., 1]) + (side[..., 2] + side[..., 3])
    return np.asarray(found + np.float32(0))


def column_products(m: Array, rows: Array) -> Array:
    """Return the product of m, transposed, with each of some rows: [n, k], [r, n] to [r, k].

    A sum over rows of m is in their order, from 0 on.
    """
    out = np.zeros((len(rows), m.shape[1]), np.float32)
    for row, factors in zip(m, rows.T, strict=True):
        out = row * factors[:, None] + out
    return out


def outer(firsts: Array, seconds: Array, out: Array) -> int:
    """Write the sum of the products of columns and rows into out, in their order, from 0 on.

    firsts: float32[r, n]; seconds: float32[r, k]; out: float32[n, k]
    Returns the bits of the largest magnitude.
    """
    out[...] = 0
    for column, row in zip(firsts, seconds, strict=True):
        out += column[:, None] * row
    return largest_bits(out.reshape(-1))


def mean_runs(
    payloads: Sequence[Array],
    each: Sequence[Array],
    ends: Array,
    bits: int,
    out: Array,
    *,
    trits: bool = False,
) -> int:
    """Write the mean of integers times their runs' numbers into out.

    payloads: of encode_runs, uint8, one of each rank, in whose order terms are added to 0; bits: of
        a code, a sign and a magnitude; each: float32[runs] of each rank; out: float32[n]
    Returns the bits of the largest magnitude.
    """
    out[:] = 0
    for payload, numbers in zip(payloads, each, strict=True):
        words = payload
        if trits:
            words = np.empty(tiles(out.size) * (TILE // 8) * bits, np.uint8)
            unpack_trits(payload, words)
        codes = unpack(words, bits, out.size).astype(np.int64)
        sign, level = codes >> (bits - 1), codes & ((1 << (bits - 1)) - 1)
        term = np.where(sign == 1, -level, level).astype(np.float32)
        out += term * _spread(numbers, ends, out.size)
    out /= np.float32(len(payloads))
    return largest_bits(out)


# Sparse operations: selection by magnitude, access by index, bit streams. Magnitudes are compared
# as float32 bits without the sign, as integers: so -0.0 equals 0.0, subnormal numbers count, and
# NaN lies above infinity, ordered by its payload. Indices are uint32, ascending and distinct.


def kth_magnitude(x: Array, k: int) -> int:
    """Return the float32 bits, without the sign, of the k-th largest |x|.

    x: float32[n]. Raises ValueError unless k is 1..n.
    """
    check_rank("kth_magnitude", k, x.size, 1)
    return int(np.sort(x.view(np.uint32) & MAGNITUDE)[x.size - k])


def select_magnitude(x: Array, k: int) -> Array:
    """Return the indices of the k largest |x|, of equal ones those with the lower index.

    x: float32[n]; returns uint32[k], ascending. Raises ValueError unless k is 0..n.
    """
    check_rank("select_magnitude", k, x.size, 0)
    magnitude = (x.view(np.uint32) & MAGNITUDE).astype(np.int64)
    return np.sort(np.argsort(-magnitude, kind="stable")[:k]).astype(np.uint32)


def select_above(x: Array, threshold: float) -> Array:
    """Return the indices of |x| > threshold, and of NaN.

    x: float32[n]; returns uint32[m], ascending. Raises ValueError unless threshold is 0 or more.
    """
    above = (x.view(np.uint32) & MAGNITUDE) > np.uint32(threshold_bits(threshold))
    return np.flatnonzero(above).astype(np.uint32)


def count_digits(x: Array, low: int, shift: int, buckets: int) -> Array:
    """Return the number of magnitudes in each bucket, 2**shift wide, from low on.

    x: float32[n]; returns uint32[buckets]; magnitudes outside the buckets are not counted
    """
    bucket = ((x.view(np.uint32) & MAGNITUDE).astype(np.int64) - low) >> shift
    inside = bucket[(bucket >= 0) & (bucket < buckets)]
    return np.bincount(inside, minlength=buckets).astype(np.uint32)


def mark_above(x: Array, bits: int) -> Array:
    """Return a bit for each value, set if its magnitude is above bits, as pack_bitmap.

    x: float32[n]; returns uint32[ceil(n / 32)]
    """
    above = np.flatnonzero((x.view(np.uint32) & MAGNITUDE) > np.uint32(bits))
    return pack_bitmap(above.astype(np.uint32), x.size)


def count_bits(words: Array) -> Array:
    """Return the number of set bits in each 32 words, of 1,024 places.

    words: uint32[w]; returns uint32[ceil(w / 32)]
    """
    bits = np.unpackbits(words.view(np.uint8))
    padded = np.zeros(-(-words.size // 32) * TILE, np.uint8)
    padded[: bits.size] = bits
    return padded.reshape(-1, TILE).sum(1, dtype=np.uint32)


def gather(x: Array, indices: Array) -> Array:
    """Return x[indices]: float32[n], uint32[m] to float32[m].

    Raises ValueError unless the indices ascend and are below n; so do scatter_add and clear.
    """
    _check_indices("gather", indices, x.size)
    return x[indices]


def scatter_add(out: Array, indices: Array, values: Array) -> None:
    """Add values to out[indices]: float32[n], uint32[m], float32[m]; each sum rounded once."""
    _check_indices("scatter_add", indices, out.size)
    out[indices] += values


def put(out: Array, indices: Array, values: Array) -> None:
    """Write values to out[indices]: float32[n], uint32[m], float32[m]."""
    _check_indices("put", indices, out.size)
    out[indices] = values


def merge_places(indices: Sequence[Array], values: Sequence[Array], n: int) -> tuple[Array, Array]:
    """Return indices and values of the sum of sparse arrays of n values, without zeros.

    Returns uint32[m], ascending, and float32[m].
    """
    total = np.zeros(n, np.float32)
    for each, own in zip(indices, values, strict=True):
        scatter_add(total, each, own)
    found = np.flatnonzero(total != 0).astype(np.uint32)
    return found, total[found]


def pairs_at(marks: Array, indices: Array, values: Array) -> tuple[Array, Array]:
    """Return the indices that are marked, uint32[m], ascending, and their values, float32[m].

    marks: uint32[words], see pack_bitmap; indices: ascending, below 32 * words
    """
    found = np.isin(indices, unpack_bitmap(marks))
    return indices[found], values[found]


def mark_drawn(key: Array, count: int, n: int) -> Array:
    """Return a bit for each of n places, the first count of them that are drawn.

    key: uint64[2], of the stream of numbers, NumPy's Philox, whose remainders modulo n are places
    Returns uint32[ceil(n / 32)], see pack_bitmap. Raises ValueError unless count is 0..n.
    """
    if not 0 <= count <= n:
        raise ValueError(f"mark_drawn: count={count}: must be 0..{n}")
    stream, found = np.random.Philox(key=key), np.empty(0, np.uint64)
    while found.size < count:
        draws = stream.random_raw(count - found.size) % np.uint64(n)
        found = np.union1d(found, draws)
    return pack_bitmap(found.astype(np.uint32), n)


def pack_bins(bin_values: int, indices: Array, values: Array) -> Array:
    """Return codes of indices in bins of bin_values, and of the signs of their values.

    indices: uint32[m], ascending; values: float32[m]; returns uint8[bytes], codes of 8 bits if
    bins have less than 64 values, else of 16. compress/adacomp.py has their layout.
    """
    kind, index_bits = _bin_codes(bin_values)
    passing, last = (1 << index_bits) - 1, 2 << index_bits
    codes, before = list[int](), -1
    for index, value in zip(indices.tolist(), values.tolist(), strict=True):
        own = index // bin_values
        if codes and own != before:
            codes[-1] |= last
        for empty in range(own - before - 1, 0, -4):
            codes.append(passing | (min(empty, 4) - 1) << index_bits)
        codes.append(index - own * bin_values | int(value < 0) << index_bits)
        before = own
    if codes:
        codes[-1] |= last
    return np.array(codes, kind).view(np.uint8)


def unpack_bins(bin_values: int, codes: Array, scale: float, first: int) -> tuple[Array, Array]:
    """Return the indices of codes of pack_bins, uint32[m], and scale or -scale, float32[m].

    first: added to the indices
    """
    kind, index_bits = _bin_codes(bin_values)
    indices, values, start = list[int](), list[float](), first
    for code in codes.view(kind).tolist():
        index, upper = code & (1 << index_bits) - 1, code >> index_bits
        if index == (1 << index_bits) - 1:
            start += (upper + 1) * bin_values
            continue
        indices.append(start + index)
        values.append(-scale if upper & 1 else scale)
        start += (upper >> 1) * bin_values
    return np.array(indices, np.uint32), np.array(values, np.float32)


def _bin_codes(bin_values: int) -> tuple[type[np.unsignedinteger], int]:
    """Return the dtype of codes, and the number of bits of their index."""
    return (np.uint8, 6) if bin_values < 1 << 6 else (np.uint16, 14)


def clear(x: Array, indices: Array) -> None:
    """Set x[indices] to 0.0: float32[n], uint32[m]."""
    _check_indices("clear", indices, x.size)
    x[indices] = 0


def _check_indices(name: str, indices: Array, n: int) -> None:
    if indices.size and (int(indices[-1]) >= n or (indices[1:] <= indices[:-1]).any()):
        raise ValueError(f"{name}: indices: must ascend, be distinct and be below {n}")


def pack_bitmap(indices: Array, size: int) -> Array:
    """Return a bit for each of size places, set at the indices: uint32[m] to uint32 words.

    Bit i % 32 of word i // 32 is place i; ceil(size / 32) words.
    """
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[indices] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


def unpack_bitmap(words: Array) -> Array:
    """Return the places of set bits, ascending: uint32[w] to uint32[m]."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.uint32)


def pack_stream(codes: Array, widths: Array) -> Array:
    """Return codes as a stream of bits, code after code, each tile of 1,024 at its own width.

    codes: uint32[n], below 2**width; widths: uint8[tiles(n)], 0..32; returns uint32 words
    Code i of a tile has bits i * width .. (i + 1) * width - 1 from the tile's first word on, the
    lowest bit first. Whole tiles fill whole words; the last tile ends with the word it reaches.
    """
    parts = []
    for t, width in enumerate(widths.tolist()):
        tile = codes[t * TILE : (t + 1) * TILE]
        bits = (tile[:, None] >> np.arange(width, dtype=np.uint32)) & np.uint32(1)
        stream = np.zeros(-(-tile.size * width // 32) * 32, np.uint8)
        stream[: tile.size * width] = bits.reshape(-1)
        parts.append(np.packbits(stream, bitorder="little").view("<u4"))
    return np.concatenate([np.empty(0, np.uint32), *parts])


def unpack_stream(words: Array, widths: Array, n: int) -> Array:
    """Return the n codes that pack_stream packed: uint32[stream_words], uint8[tiles] to uint32[n].

    Raises ValueError for another number of words than n codes of these widths need.
    """
    if words.size != stream_words(widths, n):
        raise ValueError(
            f"unpack_stream: {words.size} words given, {stream_words(widths, n)} needed"
        )
    codes, start = np.empty(n, np.uint32), 0
    for t, width in enumerate(widths.tolist()):
        count = min(TILE, n - t * TILE)
        used = -(-count * width // 32)
        stream = np.unpackbits(words[start : start + used].view(np.uint8), bitorder="little")
        bits = stream[: count * width].reshape(count, width).astype(np.uint32)
        codes[t * TILE : t * TILE + count] = (bits << np.arange(width, dtype=np.uint32)).sum(
            1, dtype=np.uint32
        )
        start += used
    return codes


encode_two_scales = partial(two_scales.encode, _OPS)
decode_two_scales = partial(two_scales.decode, _OPS)

clear_all = composed.clear_all
divide_all = partial(composed.divide_all, _OPS)
accumulate_largest = partial(composed.accumulate_largest, _OPS)
accumulate_above = partial(composed.accumulate_above, _OPS)
accumulate_taking = partial(composed.accumulate_taking, _OPS)
accumulate_chunks = partial(composed.accumulate_chunks, _OPS)
take = partial(composed.take, _OPS)
put_marked = partial(composed.put_marked, _OPS)
mean_places = partial(composed.mean_places, _OPS)
mean_bins = partial(composed.mean_bins, _OPS)
encode_runs = partial(composed.encode_runs, _OPS)

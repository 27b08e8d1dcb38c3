"""The specification of every array operation: NumPy, float64 and integers, slow and plain.

ops.cpu and ops.gpu have the same functions and must give the same bits.
"""

from __future__ import annotations

import numpy as np

from ..formats import SHIFT_BIAS, SHIFT_NONFINITE, TILE, Cast, FloatFormat, tiles
from ..randomness import Key
from .reference_codes import (
    Array,
    decode,
    decode_shifted,
    encode,
    encode_with_events,
    pack,
    random31,
    unpack,
)
from .reference_integers import (
    add_encode_integers_tiles,
    add_integers_tiles,
    decode_integers_tiles,
    pack_trits,
    unpack_trits,
)

__all__ = [
    "NONFINITE",
    "NONFINITE_BITS",
    "SATURATED",
    "UNDERFLOWED",
    "add_encode_integers_tiles",
    "add_integers_tiles",
    "amax_tiles",
    "decode",
    "decode_add_encode_tiles",
    "decode_add_tiles",
    "decode_integers_tiles",
    "decode_tiles",
    "encode",
    "encode_tiles",
    "fitting_shift",
    "pack",
    "pack_trits",
    "random31",
    "unpack",
    "unpack_trits",
]

NONFINITE_BITS = 0x7F800000  # float32 bits of |x| from here on: infinity or NaN
SATURATED, UNDERFLOWED, NONFINITE = range(3)  # columns of counts


def amax_tiles(x: Array) -> Array:
    """Return per tile the float32 bits of max|x|; NONFINITE_BITS or more says NaN or infinity.

    x: float32[n]; returns uint32[ceil(n / 1024)]
    """
    padded = np.zeros(tiles(x.size) * TILE, np.uint32)
    padded[: x.size] = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return padded.reshape(-1, TILE).max(1)


def fitting_shift(amax_bits: Array, fmt: FloatFormat) -> Array:
    """Return per tile the stored byte of the largest k with amax * 2**k <= fmt.max.

    amax_bits: uint32[tiles] as from amax_tiles; returns uint8[tiles]
    k stays within fmt.shift_min .. fmt.shift_max; all zeros: k = 0, not finite: SHIFT_NONFINITE.
    """
    bits = amax_bits.astype(np.int64)
    exponent = (bits >> 23) - 127
    k = fmt.emax - exponent - ((bits & 0x7FFFFF) > fmt.max_significand)
    k = np.where(bits == 0, 0, np.clip(k, fmt.shift_min, fmt.shift_max))
    return np.where(bits >= NONFINITE_BITS, SHIFT_NONFINITE, k + SHIFT_BIAS).astype(np.uint8)


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
    """Encode and pack x into words, each tile scaled by 2**k with k + 127 in shifts.

    x: float32[n]; words: uint8[packed_bytes(n, bits)], written; shifts: uint8[tiles(n)]
    fit: choose the shifts by fitting_shift and write them, rather than read them. A tile with
        NaN or infinity is then encoded with k = 0 and marked SHIFT_NONFINITE.
    counts: uint32[tiles(n), 3] or None: how many values of each tile saturated, underflowed
        (became zero) or were not finite, written
    """
    count = tiles(x.size)
    padded = np.zeros(count * TILE, np.float32)
    padded[: x.size] = x
    if fit:
        shifts[:] = fitting_shift(amax_tiles(x), cast.fmt)
    k = np.where(shifts == SHIFT_NONFINITE, 0, shifts.astype(np.int64) - SHIFT_BIAS)
    index = np.uint64(offset) + np.arange(padded.size, dtype=np.uint64)
    codes, events = encode_with_events(padded, cast, np.repeat(k, TILE), key, index)
    words[:] = pack(codes, cast.fmt.bits)
    if counts is not None:
        for column, event in enumerate(events):
            counts[:, column] = event.reshape(count, TILE).sum(1)


def decode_tiles(words: Array, shifts: Array, fmt: FloatFormat, out: Array) -> int:
    """Unpack and decode into out, and return how many values are not finite.

    words, shifts: as encode_tiles made them; out: float32[n], written
    A tile marked SHIFT_NONFINITE is NaN throughout.
    """
    codes = unpack(words, fmt.bits, out.size)
    k = np.repeat(shifts.astype(np.int64) - SHIFT_BIAS, TILE)[: out.size]
    marked = k == SHIFT_NONFINITE - SHIFT_BIAS
    out[:] = np.where(
        marked, np.float32(np.nan), decode_shifted(codes, fmt, np.where(marked, 0, k))
    )
    return int(out.size - np.isfinite(out).sum())


def decode_add_tiles(words: Array, shifts: Array, fmt: FloatFormat, x: Array, out: Array) -> None:
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

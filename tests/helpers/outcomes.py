"""All that the array operations write and return, to compare implementations of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpdhpc.formats import TILE, TRIT_BYTES, Cast, FloatFormat, packed_bytes, shift_count, sum_bits
from cpdhpc.formats import tiles as tiles_of

Array = np.ndarray[Any, np.dtype[Any]]
KEY, OFFSET = (7, 2**32 - 1), 2**40 + 2**32 - 2048  # whose upper half changes on the way


def of_tiles(
    ops: Any,
    x: Array,
    y: Array,
    cast: Cast,
    shared: int = TILE,
    *,
    fit: bool = True,
    counted: bool = True,
    shift: int = 127,
) -> list[Array]:
    """Of floats in tiles: x is encoded, and y is added to it.

    shared: how many values have a shift in common; fit: whether it is chosen, else shift, a byte
    """
    n, fmt, most = x.size, cast.fmt, packed_bytes(x.size, cast.fmt.bits)
    words, given, gone, alone = (np.full(most, 0xA5, np.uint8) for _ in range(4))
    shifts, chosen, again = (np.full(shift_count(n, shared), shift, np.uint8) for _ in range(3))
    counts = np.zeros((2, tiles_of(n), 3), np.uint32)
    out, total, after, inside = (np.zeros(n, np.float32) for _ in range(4))
    inside[:] = y
    how: dict[str, Any] = {"key": KEY, "offset": OFFSET}
    first, second = ({"counts": each} if counted else {} for each in counts)
    with np.errstate(all="ignore"):
        ops.encode_tiles(x, cast, words, shifts, fit=fit, **how, **first)
        ops.encode_tiles(x, cast, given, shifts, **how)
        lost = ops.decode_tiles(words, shifts, fmt, out)
        ops.decode_add_tiles(words, shifts, fmt, y, total)
        ops.decode_add_tiles(words, shifts, fmt, inside, inside)
        hop = words, shifts, cast, y
        found = ops.decode_add_encode_tiles(*hop, gone, chosen, fit=fit, **how, **second, out=after)
        ops.decode_add_encode_tiles(*hop, alone, again, fit=fit, **how)
    returned = [np.asarray(each, np.uint64) for each in (lost, found)]
    written = [words, given, shifts, gone, chosen, alone, again, counts, out, total, inside, after]
    return [*written, *returned]


def of_codes(ops: Any, x: Array, cast: Cast, shift: int = 2) -> list[Array]:
    """Of floats and their codes without tiles, and of the largest values."""
    codes = ops.encode(x, cast, shift, KEY, OFFSET)
    packed = ops.pack(codes, cast.fmt.bits)
    back = ops.unpack(packed, cast.fmt.bits, x.size)
    return [codes, packed, back, ops.decode(codes, cast.fmt, shift), ops.amax_tiles(x)]


def of_sums(ops: Any, x: Array, fmt: FloatFormat, rounding: Any, shift: int = 127) -> list[Array]:
    """Of exact sums of two and three contributions, and of ternary codes."""
    cast, n, bits = Cast(fmt, rounding), x.size, sum_bits(fmt, 2)
    shifts = np.full(tiles_of(n), shift, np.uint8)
    codes, two, three = (
        np.zeros(packed_bytes(n, each), np.uint8) for each in (fmt.bits, bits, bits + 1)
    )
    counts, out = np.zeros((tiles_of(n), 3), np.uint32), np.zeros(n, np.float32)
    how: dict[str, Any] = {"key": KEY, "offset": OFFSET, "counts": counts}
    ops.encode_tiles(x, cast, codes, shifts, key=(1, 2))
    ops.add_encode_integers_tiles(codes, 0, cast, x, shifts, two, bits, **how)
    ops.add_integers_tiles(two, bits, codes, 0, fmt, three, bits + 1)
    lost = ops.decode_integers_tiles(three, bits + 1, shifts, fmt, out)
    ternary = np.resize(codes, 256 * tiles_of(n))
    trits, back = np.zeros(TRIT_BYTES * tiles_of(n), np.uint8), np.zeros_like(ternary)
    ops.pack_trits(ternary, trits)
    ops.unpack_trits(trits, back)
    return [codes, two, three, counts, out, trits, back, np.asarray(lost, np.uint64)]


def differing(ours: list[Array], theirs: list[Array], *, any_nan: bool = False) -> list[int]:
    """Where two outcomes differ in a bit; any_nan: a NaN is as good as another."""
    return [
        place
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a.shape != b.shape or a.dtype != b.dtype or not _same(a, b, any_nan)
    ]


def _same(a: Array, b: Array, any_nan: bool) -> bool:
    if any_nan and a.dtype == np.float32:
        a, b = (np.where(np.isnan(each), np.float32(np.nan), each) for each in (a, b))
    return a.tobytes() == b.tobytes()

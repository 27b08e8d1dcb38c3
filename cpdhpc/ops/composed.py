"""Operations that are others in turn: those of the specification and of the GPU.

ops: the module that has the others, ops.reference or ops.gpu. ops.cpu has a kernel for each, with
the same bits in fewer passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..formats import Cast, packed_bytes, tiles
from ..randomness import Key
from .common import MAGNITUDE, check_rank

Array = Any  # of NumPy or CuPy


def divide_all(ops: ModuleType, x: Array, divisor: float, out: Array) -> int:
    """Write x over divisor into out, float32[n]; return the bits of the largest magnitude."""
    ops.divide(x, np.float32(divisor), out)
    return int(ops.largest_bits(out))


def accumulate_largest(
    ops: ModuleType,
    x: Array,
    kept: Array,
    out: Array,
    k: int,
    *,
    factor: float = 1.0,
    more: Array | None = None,
    total: Array | None = None,
) -> tuple[Array, Array]:
    """Return indices and values of the k largest of accumulate's last result, see select_magnitude.

    Returns uint32[k], ascending, and float32[k].
    """
    check_rank("accumulate_largest", k, x.size, 0)
    ops.accumulate(x, kept, out, factor=factor, more=more, total=total)
    last = out if total is None else total
    found = ops.select_magnitude(last, k)
    return found, ops.gather(last, found)


def accumulate_above(
    ops: ModuleType, x: Array, kept: Array, out: Array, threshold: float, less: float = 0.0
) -> tuple[int, Array, Array]:
    """Return the bits of accumulate, and indices and values of its result above a threshold.

    Then the magnitudes of these are reduced by less in out.
    Returns the bits, uint32[m], ascending, and float32[m]. See select_above.
    """
    most = ops.accumulate(x, kept, out)
    found = ops.select_above(out, threshold)
    values = ops.gather(out, found)
    if less:
        signs = _opposite(values).view(np.uint32) & ~MAGNITUDE
        ops.scatter_add(out, found, (signs | np.float32(less).view(np.uint32)).view(np.float32))
    return most, found, values


def _opposite(values: Array) -> Array:
    """Return values with the other sign; CuPy's own arithmetic makes zeros of subnormal numbers."""
    return (values.view(np.uint32) ^ ~MAGNITUDE).view(np.float32)


def accumulate_taking(
    ops: ModuleType, x: Array, kept: Array, out: Array, marks: Array
) -> tuple[int, Array]:
    """Return the bits of accumulate, and its results at marked places, which become 0 in out.

    marks: uint32[ceil(n / 32)], see pack_bitmap; returns the bits and float32[m]
    """
    most = ops.accumulate(x, kept, out)
    return most, take(ops, out, ops.unpack_bitmap(marks))


def accumulate_chunks(
    ops: ModuleType, x: Array, kept: Array, out: Array, chunk_values: int
) -> tuple[int, Array]:
    """Return the bits of accumulate, and chunk_leaders of its result."""
    most = ops.accumulate(x, kept, out)
    return most, ops.chunk_leaders(out, chunk_values)


def take(ops: ModuleType, x: Array, indices: Array) -> Array:
    """Return x[indices], which become 0: float32[n], uint32[m] to float32[m]."""
    values = ops.gather(x, indices)
    ops.clear(x, indices)
    return values


def put_marked(ops: ModuleType, out: Array, marks: Array, values: Array) -> None:
    """Write values to the marked places of out, float32[n], and zeros to the others.

    marks: uint32[ceil(n / 32)], see pack_bitmap; values: float32[m], as many as there are bits
    """
    clear_all(out)
    ops.put(out, ops.unpack_bitmap(marks), values)


def clear_all(out: Array) -> None:
    """Write zeros into out, float32[n]."""
    out[...] = 0


def mean_places(
    ops: ModuleType,
    indices: Sequence[Array],
    values: Sequence[Array],
    divisor: float,
    out: Array,
) -> int:
    """Write the sum of several sparse arrays over divisor into out, float32[n].

    indices, values: uint32[m] and float32[m] of each, added to 0 in their order
    Returns the bits of the largest magnitude.
    """
    clear_all(out)
    for each, own in zip(indices, values, strict=True):
        ops.scatter_add(out, each, own)
    return divide_all(ops, out, divisor, out)


def mean_bins(
    ops: ModuleType,
    bin_values: int,
    codes: Sequence[Array],
    scales: Sequence[float],
    out: Array,
    divisor: float,
    rests: Sequence[Array] = (),
    first: int = 0,
) -> tuple[int, Array]:
    """Write the sum of the values of codes of encode_bins over divisor into out, float32[n].

    codes: uint8[bytes] of each rank, in whose order values, scale or -scale, are added to 0
    rests: float32[n] of rank first and the next ones, from which their values are subtracted
    Returns the bits of the largest magnitude, and the number of values of each rank, int64[ranks].
    Raises ValueError unless the codes are those of such bins.
    """
    clear_all(out)
    counts = np.zeros(len(codes), np.int64)
    for rank, (own, scale) in enumerate(zip(codes, scales, strict=True)):
        indices, values = ops.unpack_bins(bin_values, own, scale, 0)
        ops.scatter_add(out, indices, values)
        if 0 <= rank - first < len(rests):
            ops.scatter_add(rests[rank - first], indices, _opposite(values))
        counts[rank] = indices.size
    return divide_all(ops, out, divisor, out), counts


def encode_runs(
    ops: ModuleType,
    x: Array,
    each: Array,
    ends: Array,
    factor: float,
    cast: Cast,
    shift: int,
    payload: Array,
    *,
    trits: bool = False,
    key: Key = (0, 0),
) -> None:
    """Encode x over its runs' numbers, times factor, into payload; see divide_runs.

    shift: the byte of each tile, as encode_tiles reads it
    payload: uint8, written: words of encode_tiles, for trits packed by pack_trits
    """
    scaled = np.empty_like(x)
    ops.divide_runs(x, each, ends, scaled)
    if factor != 1:
        ops.multiply(scaled, np.float32(factor), scaled)
    shifts = np.full_like(x, shift, np.uint8, shape=(tiles(x.size),))
    size_bytes = packed_bytes(x.size, cast.fmt.bits)
    words = np.empty_like(x, np.uint8, shape=(size_bytes,)) if trits else payload
    ops.encode_tiles(scaled, cast, words, shifts, key=key)
    if trits:
        ops.pack_trits(words, payload)

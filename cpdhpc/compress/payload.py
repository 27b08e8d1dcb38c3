"""Sparse payloads: indices and values of a sparse array, in few bytes.

A payload has whole 32-bit words, lowest bits and bytes first:

    byte 0      4          5              6      8
    | count m  | encoding | bits a value | 0 0  | bytes | index words | value words |

    bytes        deltas: the width of each tile's codes; then, except for raw, the shifts of the
                 tiles of values, 32 each for mxfp8, mxfp6 and mxfp4; then zeros up to a whole word
    value words  raw: float32; else m codes of a format, one after the other (ops.pack_stream)

The index words are the smallest of three, in the order of ENCODINGS:

    bitmap   a bit for each of n places; the smallest for more than about 0.4 n indices
    deltas   the number of places between an index and the one before, one code after the other;
             the largest of a tile of 1,024 decides its width; for runs or evenly spread indices
    bins     bins of 2**b places: a bitmap with a one for each index and a zero after each bin, then
             the lower b bits of each index, b + 2 to b + 3 bits an index; for random indices.
             Source: Elias: Efficient storage and retrieval by content and address of static files,
             J. ACM 21(2), 1974; Fano: On the number of bits required to implement an associative
             memory, MIT, 1971.

Besides these words a payload has 8 bytes, a byte for each 1,024 deltas, the shifts, and padding.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from ..formats import (
    SHARED,
    TILE,
    Cast,
    Format,
    Microscaling,
    TwoScales,
    packed_bytes,
    shift_count,
    tiles,
    wire_scaling,
)
from ..ops import backend_of, cpu, on_gpu, placed, to_host
from ..ops.payloads import parse_wire
from .bucket import ON_CPU

Array = npt.NDArray[Any]

ENCODINGS = ("bitmap", "deltas", "bins")
_HEADER = struct.Struct("<IBBH")
_LARGEST = 2**32 - 1  # of sizes: an index has 32 bits


def encode_sparse(indices: Array, values: Array, size: int, wire: str = "raw") -> Array:
    """Return a sparse array of size values as a payload, NumPy's uint8[sparse_bytes].

    indices: uint32[m], ascending, distinct and below size; values: float32[m]; both NumPy's, or
        both CuPy's: then only the payload is copied to the host
    wire: raw, bf16 or another format of cpdhpc.allreduce: values are rounded to nearest, after
        each 1,024 (32 of mxfp8, mxfp6 and mxfp4) are scaled by a power of two to fit
    Raises TypeError and ValueError for other arrays, sizes and wires.
    """
    kind = _kind("encode_sparse", wire)
    _check_size("encode_sparse", size)
    for name, array, dtype in (("indices", indices, np.uint32), ("values", values, np.float32)):
        if not _is_array(array) or array.dtype != dtype or array.ndim != 1:
            given = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"encode_sparse: {name}: {given}: must be {dtype.__name__}, one axis")
    if on_gpu(indices) != on_gpu(values):
        raise TypeError("encode_sparse: indices and values: one on the CPU: must be both, or none")
    if indices.size != values.size:
        raise ValueError(f"encode_sparse: {indices.size} indices, but {values.size} values")
    _check_ascending("encode_sparse", indices, size)
    encoding, widths, index_words = _packed_indices(indices, size)
    shifts, value_words = _packed_values(values, kind)
    some = np.concatenate([widths, shifts])
    header = _HEADER.pack(indices.size, ENCODINGS.index(encoding), kind.bits, 0)
    parts = [np.frombuffer(header, np.uint8), some, np.zeros(-some.size % 4, np.uint8)]
    return np.concatenate([*parts, index_words.view(np.uint8), value_words.view(np.uint8)])


def decode_sparse(
    payload: Array, size: int, wire: str = "raw", like: Array = ON_CPU
) -> tuple[Array, Array]:
    """Return the indices, uint32[m], and the values, float32[m], of a payload.

    payload: NumPy's uint8[sparse_bytes], of encode_sparse with the same size and wire
    like: an array of NumPy or CuPy; the result is on its device
    Raises TypeError and ValueError for an invalid payload: nothing outside of it is read, and
    the indices ascend and are below size.
    """
    kind = _kind("decode_sparse", wire)
    count, encoding, borders = _layout("decode_sparse", payload, size, kind)
    if payload.size != borders[-1]:
        raise ValueError(f"decode_sparse: payload: {payload.size} bytes: must be {borders[-1]}")
    aligned = np.ascontiguousarray(payload)
    if aligned.ctypes.data % 4:  # a part of a longer message
        aligned = aligned.copy()
    widths, shifts, _, index_words, value_words = (
        aligned[start:stop] for start, stop in pairwise(borders)
    )
    words = placed(index_words.view("<u4"), like), placed(value_words.view("<u4"), like)
    found = _unpacked_indices(encoding, words[0], widths, count, size)
    return found, _unpacked_values(words[1], placed(shifts, like), count, kind)


def sparse_bytes(payload: Array, size: int, wire: str = "raw") -> int:
    """Return the number of bytes of the payload at the start of an array, uint8[...].

    size, wire: those of encode_sparse. Raises as decode_sparse.
    """
    return _layout("sparse_bytes", payload, size, _kind("sparse_bytes", wire))[2][-1]


def _check_size(name: str, size: int) -> None:
    if not 0 <= size <= _LARGEST:
        raise ValueError(f"{name}: size={size}: must be 0..{_LARGEST}")


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or type(x).__module__ == "cupy"


def _check_ascending(name: str, indices: Array, size: int) -> None:
    if indices.size and (int(indices[-1]) >= size or bool((indices[1:] <= indices[:-1]).any())):
        raise ValueError(f"{name}: indices: must ascend, be distinct and be below size={size}")


class _Kind(NamedTuple):
    """The format of values, None for float32, and the number of values that share a shift."""

    fmt: Format | None
    shared: int

    @property
    def bits(self) -> int:
        return 32 if self.fmt is None else self.fmt.bits

    def shifts(self, count: int) -> int:
        return 0 if self.fmt is None else shift_count(count, self.shared)


def _kind(name: str, wire: str) -> _Kind:
    fmt = parse_wire(wire, name)
    if isinstance(fmt, TwoScales):
        raise ArgumentError(name, "wire", wire, "goes with all-reduces: its scale is a tensor's")
    return _Kind(fmt, SHARED[wire_scaling(wire)])


def _bin_bits(count: int, size: int) -> int:
    """Return b of the bins: one more bit would cost more than the zeros that it saves."""
    bits = 0
    while size >> (bits + 1) > count:
        bits += 1
    return bits


def _bins(count: int, size: int) -> int:
    return -(-size // (1 << _bin_bits(count, size)))


def _widths(width: int, count: int) -> Array:
    """Return the widths of the tiles of count codes of one width."""
    return np.full(tiles(count), width, np.uint8)


def _index_words(encoding: str, widths: Array, count: int, size: int) -> int:
    """Return the number of words of the indices."""
    if encoding == "bitmap":
        return -(-size // 32)
    if encoding == "deltas":
        return cpu.stream_words(widths, count)
    lower = cpu.stream_words(_widths(_bin_bits(count, size), count), count)
    return -(-(count + _bins(count, size)) // 32) + lower


def _packed_indices(indices: Array, size: int) -> tuple[str, Array, Array]:
    """Return the smallest encoding, the widths of its tiles and its words, both NumPy's."""
    count, none, ops = indices.size, np.empty(0, np.uint8), backend_of(indices)
    gaps = indices.copy()  # of the first one: itself
    gaps[1:] = indices[1:] - indices[:-1] - np.uint32(1)
    largest = np.zeros_like(indices, shape=(tiles(count) * TILE,))
    largest[:count] = gaps
    largest = to_host(largest.reshape(-1, TILE).max(1)).astype(np.float64)
    bits = np.frexp(largest)[1].astype(np.uint8)
    widths = {"bitmap": none, "deltas": bits, "bins": none}
    cost = {e: 4 * _index_words(e, widths[e], count, size) + widths[e].size for e in ENCODINGS}
    best = min(ENCODINGS, key=cost.__getitem__)
    if best == "bitmap":
        return best, none, to_host(ops.pack_bitmap(indices, size))
    if best == "deltas":
        return best, bits, to_host(ops.pack_stream(gaps, bits))
    b = _bin_bits(count, size)
    places = (indices >> np.uint32(b)) + np.arange(count, dtype=np.uint32, like=indices)
    lower = ops.pack_stream(indices & np.uint32((1 << b) - 1), _widths(b, count))
    marks = ops.pack_bitmap(places, count + _bins(count, size))
    return best, none, np.concatenate([to_host(marks), to_host(lower)])


def _unpacked_indices(encoding: str, words: Array, widths: Array, count: int, size: int) -> Array:
    """Return the indices. Raises ValueError unless they ascend and are below size."""
    ops = backend_of(words)
    if encoding == "bitmap":
        found = _places(words, count)
    elif encoding == "deltas":
        gaps = ops.unpack_stream(words, widths, count)
        steps = np.arange(count, dtype=np.uint64, like=words)
        wide = np.cumsum(gaps, dtype=np.uint64) + steps
        if count and int(wide[-1]) >= size:
            raise ValueError(f"decode_sparse: payload: index {wide[-1]}: must be below {size}")
        return wide.astype(np.uint32)
    else:
        b, border = _bin_bits(count, size), -(-(count + _bins(count, size)) // 32)
        steps = np.arange(count, dtype=np.uint32, like=words)
        found = _places(words[:border], count) - steps << np.uint32(b)
        found |= ops.unpack_stream(words[border:], _widths(b, count), count)
    _check_ascending("decode_sparse", found, size)
    return found


def _places(words: Array, count: int) -> Array:
    """Return the places of set bits. Raises ValueError unless exactly count are set."""
    found: Array = backend_of(words).unpack_bitmap(words)
    if found.size != count:
        raise ValueError(f"decode_sparse: payload: {found.size} bits are set: must be {count}")
    return found


def _packed_values(values: Array, kind: _Kind) -> tuple[Array, Array]:
    """Return the shifts of the values' tiles, none for raw, and their words, all NumPy's."""
    fmt, ops = kind.fmt, backend_of(values)
    shifts = np.empty_like(values, shape=(kind.shifts(values.size),), dtype=np.uint8)
    if fmt is None:
        return to_host(shifts), to_host(values).view(np.uint32)
    packed = np.empty_like(shifts, shape=(packed_bytes(values.size, fmt.bits),))
    ops.encode_tiles(values, Cast(fmt), packed, shifts, fit=True)
    widths = _widths(fmt.bits, values.size)
    if isinstance(fmt, Microscaling):  # its packed bytes are such a stream
        count = cpu.stream_words(widths, values.size)
        return to_host(shifts), to_host(packed).view(np.uint32)[:count]
    codes = ops.unpack(packed, fmt.bits, values.size)  # packed has whole tiles, a stream has not
    return to_host(shifts), to_host(ops.pack_stream(codes, widths))


def _unpacked_values(words: Array, shifts: Array, count: int, kind: _Kind) -> Array:
    if kind.fmt is None:
        return words.view(np.float32).copy()
    values, ops = np.empty_like(words, shape=(count,), dtype=np.float32), backend_of(words)
    if isinstance(kind.fmt, Microscaling):
        packed = np.zeros_like(words, shape=(packed_bytes(count, kind.bits) // 4,))
        packed[: words.size] = words
        ops.decode_tiles(packed.view(np.uint8), shifts, kind.fmt, values)
        return values
    codes = ops.unpack_stream(words, _widths(kind.bits, count), count)
    ops.decode_tiles(ops.pack(codes, kind.bits), shifts, kind.fmt, values)
    return values


def _layout(name: str, payload: Array, size: int, kind: _Kind) -> tuple[int, str, list[int]]:
    """Return the count, the encoding, and the borders of the parts of a payload."""
    _check_size(name, size)
    if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8 or payload.ndim != 1:
        given = getattr(payload, "dtype", type(payload).__name__)
        raise TypeError(f"{name}: payload: {given}: must be uint8, one axis")
    if payload.size < _HEADER.size:
        raise ValueError(f"{name}: payload: {payload.size} bytes: must be {_HEADER.size} or more")
    count, number, width, zero = _HEADER.unpack(payload[: _HEADER.size].tobytes())
    if count > size or number >= len(ENCODINGS) or width != kind.bits or zero:
        raise ValueError(
            f"{name}: payload: {count} values of {width} bits, encoding {number}: must be 0..{size}"
            f" values of {kind.bits} bits, encoding 0..{len(ENCODINGS) - 1}"
        )
    encoding, start = ENCODINGS[number], _HEADER.size
    borders = [start, start + (tiles(count) if encoding == "deltas" else 0)]
    borders.append(borders[-1] + kind.shifts(count))
    borders.append(borders[-1] + -(borders[-1] - start) % 4)
    widths = payload[start : borders[1]]
    if payload.size < borders[1] or widths.max(initial=0) > 32:
        raise ValueError(f"{name}: payload: widths of deltas: too few, or above 32 bits")
    borders.append(borders[-1] + 4 * _index_words(encoding, widths, count, size))
    borders.append(borders[-1] + 4 * cpu.stream_words(_widths(kind.bits, count), count))
    if payload.size < borders[-1]:
        raise ValueError(f"{name}: payload: {payload.size} bytes: must be {borders[-1]}")
    return count, encoding, borders

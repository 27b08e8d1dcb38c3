"""The operations of ops.reference on CuPy arrays: the CPU kernels' bodies, compiled by NVRTC."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np

from ..formats import TILE, TRIT_BYTES, Cast, FloatFormat, packed_bytes, tiles
from ..randomness import Key
from . import reference
from .cpu import cast_numbers
from .cuda_source import OPTIONS, cuda_source

Array = Any  # cupy.ndarray

_BLOCK = 128  # threads: CPD_WARPS warps of 32
_TILES_PER_BLOCK = 4
_MAX_BLOCKS = 65535


@cache
def _module(device: int) -> Any:
    return cupy.RawModule(code=cuda_source(), options=OPTIONS)


@cache
def _cast_on_device(cast: Cast, device: int) -> Array:
    return cupy.asarray(np.array(cast_numbers(cast), np.int64).astype(np.int32))


def _cast(cast: Cast) -> Array:
    return _cast_on_device(cast, cupy.cuda.Device().id)


def _launch(name: str, blocks: int, *args: Any) -> None:
    """Launch a kernel on CuPy's current stream; nothing for no work."""
    if blocks:
        kernel = _module(cupy.cuda.Device().id).get_function(name)
        kernel((min(blocks, _MAX_BLOCKS),), (_BLOCK,), args)


def _check(name: str, array: Array, dtype: type[np.generic], size: int | None = None) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{name}: {array.dtype} given, {np.dtype(dtype)} needed")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: a contiguous array needed")
    if size is not None and array.size != size:
        raise ValueError(f"{name}: {array.size} elements given, {size} needed")


def _check_tiles(words: Array, shifts: Array, n: int, fmt: FloatFormat) -> None:
    _check("words", words, np.uint8, tiles(n) * 128 * fmt.bits)
    _check("shifts", shifts, np.uint8, tiles(n))


def _element_blocks(n: int) -> int:
    return -(-n // _BLOCK)


def _tile_blocks(n: int) -> int:
    return -(-tiles(n) // _TILES_PER_BLOCK)


def _key_numbers(key: Key, offset: int) -> tuple[Any, ...]:
    return np.uint32(key[0]), np.uint32(key[1]), np.uint64(offset)


def _counts(counts: Array | None, n: int) -> Any:
    if counts is None:
        return np.uint64(0)  # a null pointer
    _check("counts", counts, np.uint32, 3 * tiles(n))
    return counts


def encode(x: Array, cast: Cast, shift: int = 0, key: Key = (0, 0), offset: int = 0) -> Array:
    """Return the code of each x * 2**shift: float32[n] to uint32[n]."""
    _check("x", x, np.float32)
    codes = cupy.empty(x.shape, np.uint32)
    numbers = (_cast(cast), np.int32(shift), *_key_numbers(key, offset))
    _launch("encode", _element_blocks(x.size), *numbers, x, np.int64(x.size), codes)
    return codes


def decode(codes: Array, fmt: FloatFormat, shift: int = 0) -> Array:
    """Return the number of each code times 2**-shift: uint32[n] to float32[n]."""
    _check("codes", codes, np.uint32)
    out = cupy.empty(codes.shape, np.float32)
    n = np.int64(codes.size)
    blocks = _element_blocks(codes.size)
    _launch("decode", blocks, _cast(Cast(fmt)), np.int32(shift), codes, n, out)
    return out


def pack(codes: Array, bits: int) -> Array:
    """Return codes packed in tiles: uint32[n] to uint8[tiles(n) * 128 * bits]."""
    _check("codes", codes, np.uint32)
    words = cupy.empty(tiles(codes.size) * 128 * bits, np.uint8)
    n = np.int64(codes.size)
    _launch("pack", _tile_blocks(codes.size), np.int32(bits), codes, n, words)
    return words


def unpack(packed: Array, bits: int, n: int) -> Array:
    """Return the first n codes of packed tiles: uint8[tiles(n) * 128 * bits] to uint32[n]."""
    _check("packed", packed, np.uint8, tiles(n) * 128 * bits)
    codes = cupy.empty(n, np.uint32)
    _launch("unpack", _tile_blocks(n), np.int32(bits), packed, np.int64(n), codes)
    return codes


def amax_tiles(x: Array) -> Array:
    """Return per tile the float32 bits of max|x|: float32[n] to uint32[tiles(n)]."""
    _check("x", x, np.float32)
    amax = cupy.empty(tiles(x.size), np.uint32)
    _launch("amax_tiles", _tile_blocks(x.size), x, np.int64(x.size), amax)
    return amax


def fitting_shift(amax_bits: Array, fmt: FloatFormat) -> Array:
    """Return per tile the stored byte of the largest k with amax * 2**k <= fmt.max."""
    return cupy.asarray(reference.fitting_shift(cupy.asnumpy(amax_bits), fmt))


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
    """Encode and pack x into words, each tile scaled by its shift; see ops.reference."""
    _check("x", x, np.float32)
    _check_tiles(words, shifts, x.size, cast.fmt)
    numbers = (_cast(cast), np.int32(fit), *_key_numbers(key, offset))
    arrays = (x, np.int64(x.size), words, shifts, _counts(counts, x.size))
    _launch("encode_tiles", _tile_blocks(x.size), *numbers, *arrays)


def decode_tiles(words: Array, shifts: Array, fmt: FloatFormat, out: Array) -> int:
    """Unpack and decode into out, and return how many values are not finite (synchronises)."""
    _check("out", out, np.float32)
    _check_tiles(words, shifts, out.size, fmt)
    nonfinite = cupy.zeros(1, np.uint64)
    arrays = (words, shifts, out, np.int64(out.size), nonfinite)
    _launch("decode_tiles", _tile_blocks(out.size), _cast(Cast(fmt)), *arrays)
    return int(nonfinite[0])


def decode_add_tiles(words: Array, shifts: Array, fmt: FloatFormat, x: Array, out: Array) -> None:
    """Write x + decoded, summed in float32, into out; out may be x."""
    _check("x", x, np.float32)
    _check("out", out, np.float32, x.size)
    _check_tiles(words, shifts, x.size, fmt)
    arrays = (words, shifts, x, out, np.int64(x.size))
    _launch("decode_add_tiles", _tile_blocks(x.size), _cast(Cast(fmt)), *arrays)


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
) -> None:
    """One hop of a reduction: encode_tiles of x + decoded, in one pass over memory."""
    _check("x", x, np.float32)
    _check_tiles(words_in, shifts_in, x.size, cast.fmt)
    _check_tiles(words, shifts, x.size, cast.fmt)
    numbers = (_cast(cast), np.int32(fit), *_key_numbers(key, offset))
    arrays = (words_in, shifts_in, x, np.int64(x.size), words, shifts, _counts(counts, x.size))
    _launch("decode_add_encode_tiles", _tile_blocks(x.size), *numbers, *arrays)


def add_integers_tiles(
    a: Array, bits_a: int, b: Array, bits_b: int, fmt: FloatFormat, words: Array, bits: int
) -> None:
    """Write the sums of the integers of a and b into words; see ops.reference_integers."""
    n = words.size // (TILE // 8 * bits) * TILE
    for name, array, width in (("words", words, bits), ("a", a, bits_a), ("b", b, bits_b)):
        _check(name, array, np.uint8, packed_bytes(n, width or fmt.bits))
    numbers = (a, np.int32(bits_a), b, np.int32(bits_b), np.int64(tiles(n)), words, np.int32(bits))
    _launch("add_integers_tiles", _tile_blocks(n), _cast(Cast(fmt)), *numbers)


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
    """Write the sums of the integers of words_in and of x, rounded by cast, into words."""
    _check("x", x, np.float32)
    _check("words_in", words_in, np.uint8, packed_bytes(x.size, bits_in or cast.fmt.bits))
    _check("shifts", shifts, np.uint8, tiles(x.size))
    _check("words", words, np.uint8, packed_bytes(x.size, bits))
    came = (words_in, np.int32(bits_in), shifts, x, np.int64(x.size))
    gone = (words, np.int32(bits), _counts(counts, x.size))
    numbers = (_cast(cast), *_key_numbers(key, offset))
    _launch("add_encode_integers_tiles", _tile_blocks(x.size), *numbers, *came, *gone)


def decode_integers_tiles(
    words: Array, bits: int, shifts: Array, fmt: FloatFormat, out: Array
) -> int:
    """Write the integers as float32 into out; return how many are not finite (synchronises)."""
    _check("out", out, np.float32)
    _check("words", words, np.uint8, packed_bytes(out.size, bits or fmt.bits))
    _check("shifts", shifts, np.uint8, tiles(out.size))
    nonfinite = cupy.zeros(1, np.uint64)
    arrays = (words, np.int32(bits), shifts, out, np.int64(out.size), nonfinite)
    _launch("decode_integers_tiles", _tile_blocks(out.size), _cast(Cast(fmt)), *arrays)
    return int(nonfinite[0])


def pack_trits(words: Array, trits: Array) -> None:
    """Write ternary codes, five in a byte, into trits."""
    n = trits.size // TRIT_BYTES * TILE
    _check("trits", trits, np.uint8, tiles(n) * TRIT_BYTES)
    _check("words", words, np.uint8, packed_bytes(n, 2))
    _launch("pack_trits", _tile_blocks(n), words, np.int64(tiles(n)), trits)


def unpack_trits(trits: Array, words: Array) -> None:
    """Write the codes that pack_trits packed into words."""
    n = trits.size // TRIT_BYTES * TILE
    _check("trits", trits, np.uint8, tiles(n) * TRIT_BYTES)
    _check("words", words, np.uint8, packed_bytes(n, 2))
    _launch("unpack_trits", _tile_blocks(n), trits, np.int64(tiles(n)), words)


def device_name() -> str:
    """Return the name of CuPy's current GPU, "" where it finds none."""
    try:
        return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    except cupy.cuda.runtime.CUDARuntimeError:
        return ""


def to_device(x: Any) -> Array:
    """Return a NumPy array's copy on the GPU, ready for any stream."""
    copy = cupy.asarray(x)
    cupy.cuda.Device().synchronize()
    return copy


def to_host(x: Array) -> Any:
    """Return a CuPy array's copy as a NumPy array."""
    return cupy.asnumpy(x)

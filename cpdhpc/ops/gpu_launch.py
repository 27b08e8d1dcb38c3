"""Launches the CUDA kernels, and checks what they are given."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np

from ..formats import Cast, FloatFormat, tiles
from ..randomness import Key
from .cpu import cast_numbers
from .cuda_source import OPTIONS, cuda_source

Array = Any  # cupy.ndarray

_BLOCK = 128  # threads: CPD_WARPS warps of 32
_TILES_PER_BLOCK = 4
_MAX_BLOCKS = 65535
NULL = np.uint64(0)  # a pointer to nothing


def current_device() -> int:
    """Return the number of CuPy's current GPU."""
    return int(cupy.cuda.Device().id)


@cache
def _module(device: int) -> Any:
    return cupy.RawModule(code=cuda_source(), options=OPTIONS)


@cache
def _kernel(name: str, device: int) -> Any:
    return _module(device).get_function(name)


@cache
def _cast_of(cast: Cast, device: int) -> Array:
    """Copy the numbers in a stream of their own and wait: later calls may be in any stream."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        numbers = cupy.asarray(np.array(cast_numbers(cast), np.int64).astype(np.int32))
        stream.synchronize()
    return numbers


def cast_on_device(cast: Cast) -> Array:
    """Return the numbers of a cast, int32[12], on CuPy's current GPU."""
    return _cast_of(cast, current_device())


def launch(name: str, blocks: int, *args: Any) -> None:
    """Launch a kernel on CuPy's current stream; nothing for no work."""
    if blocks:
        kernel = _kernel(name, current_device())
        kernel((min(blocks, _MAX_BLOCKS),), (_BLOCK,), args)


def check(name: str, array: Array, dtype: type[np.generic], size: int | None = None) -> None:
    """Raise TypeError or ValueError unless array is contiguous and of this dtype and size."""
    if array.dtype != dtype:
        raise TypeError(f"{name}: {array.dtype} given, {np.dtype(dtype)} needed")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: a contiguous array needed")
    if size is not None and array.size != size:
        raise ValueError(f"{name}: {array.size} elements given, {size} needed")


def check_tiles(words: Array, shifts: Array, n: int, fmt: FloatFormat) -> None:
    """Raise TypeError or ValueError unless words and shifts hold n values of a format."""
    check("words", words, np.uint8, tiles(n) * 128 * fmt.bits)
    check("shifts", shifts, np.uint8, tiles(n))


def element_blocks(n: int) -> int:
    """Return the blocks of a kernel that takes an element a thread."""
    return -(-n // _BLOCK)


def tile_blocks(n: int) -> int:
    """Return the blocks of a kernel that takes a tile a warp."""
    return -(-tiles(n) // _TILES_PER_BLOCK)


def key_numbers(key: Key, offset: int) -> tuple[Any, ...]:
    """Return a random stream and a place in it as kernels take them."""
    return np.uint32(key[0]), np.uint32(key[1]), np.uint64(offset)


def counts_or_null(counts: Array | None, n: int) -> Any:
    """Return counts, uint32[tiles(n), 3], or a null pointer for None."""
    if counts is None:
        return NULL
    check("counts", counts, np.uint32, 3 * tiles(n))
    return counts

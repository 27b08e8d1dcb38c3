"""The operations of ops.reference, compiled: NumPy arrays in, the same bits out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_args

import numpy as np

from .. import _cpu
from ..formats import Cast, Format, Rounding, TableFormat, tiles
from ..randomness import Key
from .cpu_products import matmul
from .cpu_sparse import (
    clear,
    count_bits,
    count_digits,
    gather,
    kth_magnitude,
    mark_above,
    pack_bitmap,
    pack_stream,
    scatter_add,
    select_above,
    select_magnitude,
    stream_words,
    unpack_bitmap,
    unpack_stream,
)
from .cpu_sums import (
    add_outer,
    column_products,
    divide_runs,
    multiply_runs,
    row_products,
    row_sums,
    run_sums,
    square_sum,
)
from .reference import fitting_shift
from .search_tables import search_table
from .threads import kernel_threads

__all__ = [
    "add",
    "add_encode_integers_tiles",
    "add_integers_tiles",
    "add_outer",
    "amax_tiles",
    "clear",
    "clone",
    "column_products",
    "copy",
    "count_bits",
    "count_digits",
    "decode",
    "decode_add_encode_tiles",
    "decode_add_tiles",
    "decode_integers_tiles",
    "decode_tiles",
    "divide",
    "divide_runs",
    "encode",
    "encode_tiles",
    "fitting_shift",
    "gather",
    "kth_magnitude",
    "load_acquire",
    "mark_above",
    "matmul",
    "multiply",
    "multiply_runs",
    "pack",
    "pack_bitmap",
    "pack_stream",
    "pack_trits",
    "read_memory",
    "row_products",
    "row_sums",
    "run_sums",
    "scatter_add",
    "select_above",
    "select_magnitude",
    "square_sum",
    "store_release",
    "stream_words",
    "subtract",
    "unpack",
    "unpack_bitmap",
    "unpack_stream",
    "unpack_trits",
]

Array = np.ndarray[Any, np.dtype[Any]]
# What the GPU needs kernels for
add, subtract, multiply, divide = np.add, np.subtract, np.multiply, np.divide
copy = np.copyto
ROUNDINGS = {word: code for code, word in enumerate(get_args(Rounding))}  # as in cast.h
CAST_NUMBERS = 15  # before what owns a table
Numbers = tuple[Any, ...]


@lru_cache(maxsize=64)
def cast_numbers(cast: Cast) -> Numbers:
    """Return the kernels' struct Cast: 14 numbers, its table's address or 0, what owns it."""
    fmt = cast.fmt
    overflow, overflow_below = cast.overflow_codes
    limits = (fmt.shift_min, fmt.shift_max, fmt.emax, fmt.max_significand)
    rest = (overflow_below, cast.random_mask)
    rounding = ROUNDINGS[cast.rounding]
    if isinstance(fmt, TableFormat):  # exp and man say no more than the width
        table = search_table(cast, fmt)
        codes = (fmt.ends[0], fmt.inf_codes[0], fmt.nan_code, overflow, 0)
        return fmt.bits - 1, 0, rounding, *codes, *limits, *rest, table.ctypes.data, table
    first_nan = {"ieee": fmt.inf_code + 1, "nan": fmt.nan_code, "none": fmt.max_code + 1}
    codes = (fmt.max_code, fmt.inf_code, fmt.nan_code, overflow, first_nan[fmt.special])
    return fmt.exp, fmt.man, rounding, *codes, *limits, *rest, 0


@lru_cache(maxsize=64)
def _format_numbers(fmt: Format) -> Numbers:
    return cast_numbers(Cast(fmt))


def _check(name: str, array: Array, dtype: type[np.generic]) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{name}: {array.dtype} given, {np.dtype(dtype)} needed")


def clone() -> str:
    """Return for which generation of processors the loops in use were compiled."""
    return str(_cpu.clone())


def encode(x: Array, cast: Cast, shift: int = 0, key: Key = (0, 0), offset: int = 0) -> Array:
    """Return the code of each x * 2**shift: float32[n] to uint32[n]."""
    _check("x", x, np.float32)
    codes = np.empty(x.shape, np.uint32)
    _cpu.encode(kernel_threads(), cast_numbers(cast), shift, key, offset, x, codes)
    return codes


def decode(codes: Array, fmt: Format, shift: int = 0) -> Array:
    """Return the number of each code times 2**-shift: uint32[n] to float32[n]."""
    _check("codes", codes, np.uint32)
    out = np.empty(codes.shape, np.float32)
    _cpu.decode(kernel_threads(), _format_numbers(fmt), shift, codes, out)
    return out


def pack(codes: Array, bits: int) -> Array:
    """Return codes packed in tiles: uint32[n] to uint8[tiles(n) * 128 * bits]."""
    _check("codes", codes, np.uint32)
    words = np.empty(tiles(codes.size) * 128 * bits, np.uint8)
    _cpu.pack(kernel_threads(), bits, codes, words)
    return words


def unpack(packed: Array, bits: int, n: int) -> Array:
    """Return the first n codes of packed tiles: uint8[tiles(n) * 128 * bits] to uint32[n]."""
    _check("packed", packed, np.uint8)
    codes = np.empty(n, np.uint32)
    _cpu.unpack(kernel_threads(), bits, packed, codes)
    return codes


def amax_tiles(x: Array) -> Array:
    """Return per tile the float32 bits of max|x|: float32[n] to uint32[tiles(n)]."""
    _check("x", x, np.float32)
    amax = np.empty(tiles(x.size), np.uint32)
    _cpu.amax_tiles(kernel_threads(), x, amax)
    return amax


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
    extra = () if counts is None else (counts,)
    _cpu.encode_tiles(
        kernel_threads(), cast_numbers(cast), fit, key, offset, x, words, shifts, *extra
    )


def decode_tiles(words: Array, shifts: Array, fmt: Format, out: Array) -> int:
    """Unpack and decode into out, and return how many values are not finite."""
    _check("out", out, np.float32)
    return int(_cpu.decode_tiles(kernel_threads(), _format_numbers(fmt), words, shifts, out))


def decode_add_tiles(words: Array, shifts: Array, fmt: Format, x: Array, out: Array) -> None:
    """Write x + decoded, summed in float32, into out; out may be x."""
    _check("x", x, np.float32)
    _check("out", out, np.float32)
    _cpu.decode_add_tiles(kernel_threads(), _format_numbers(fmt), words, shifts, x, out)


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
    """One hop of a reduction: encode_tiles of x + decoded, in one pass over memory.

    out: float32[n] or None: what words decode to, written in the same pass
    Returns how many values of out are not finite; 0 without it.
    """
    _check("x", x, np.float32)
    if out is not None:
        _check("out", out, np.float32)
    numbers = kernel_threads(), cast_numbers(cast), fit, key, offset
    arrays = words_in, shifts_in, x, words, shifts, out, counts
    return int(_cpu.decode_add_encode_tiles(*numbers, *arrays))


def add_integers_tiles(
    a: Array, bits_a: int, b: Array, bits_b: int, fmt: Format, words: Array, bits: int
) -> None:
    """Write the sums of the integers of a and b into words; see ops.reference_integers."""
    _cpu.add_integers_tiles(
        kernel_threads(), _format_numbers(fmt), a, bits_a, b, bits_b, words, bits
    )


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
    extra = () if counts is None else (counts,)
    _cpu.add_encode_integers_tiles(
        kernel_threads(),
        cast_numbers(cast),
        key,
        offset,
        words_in,
        bits_in,
        shifts,
        x,
        words,
        bits,
        *extra,
    )


def decode_integers_tiles(words: Array, bits: int, shifts: Array, fmt: Format, out: Array) -> int:
    """Write the integers as float32 into out, and return how many are not finite."""
    _check("out", out, np.float32)
    return int(
        _cpu.decode_integers_tiles(kernel_threads(), _format_numbers(fmt), words, bits, shifts, out)
    )


def pack_trits(words: Array, trits: Array) -> None:
    """Write ternary codes, five in a byte, into trits."""
    _cpu.pack_trits(kernel_threads(), words, trits)


def unpack_trits(trits: Array, words: Array) -> None:
    """Write the codes that pack_trits packed into words."""
    _cpu.unpack_trits(kernel_threads(), trits, words)


def store_release(target: Array, value: int) -> None:
    """Write an int64 into target, uint8[8], for other processes.

    Who reads it by load_acquire sees all that was written before.
    """
    _cpu.store_release(target, value)


def read_memory(process: int, address: int, out: Array) -> None:
    """Overwrite out, uint8[n], by what another process has at an address of its memory.

    Raises OSError where the system does not allow it, or there is nothing.
    """
    _cpu.read_memory(process, address, out)


def load_acquire(source: Array) -> int:
    """Return the int64 in source, uint8[8], that another process writes by store_release."""
    return _cpu.load_acquire(source)

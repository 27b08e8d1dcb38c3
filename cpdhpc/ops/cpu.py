"""The operations of ops.reference, compiled: NumPy arrays in, the same bits out."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from .. import _cpu
from ..formats import NAMED, RANDOM_BITS, Cast, Format, Microscaling, Rounding, TableFormat, tiles
from ..randomness import Key
from .common import (
    MAGNITUDE,
    NONFINITE_BITS,
    Term,
    check_rank,
    check_size,
    kernel_threads,
    threshold_bits,
)
from .common import fitting_shift as fitting_shift
from .common import stream_words as stream_words

if TYPE_CHECKING:
    from .products import Arithmetic, Inputs, Products
    from .steps import LayerArrays

Array = np.ndarray[Any, np.dtype[Any]]
# Operations for which the GPU has kernels
add, subtract, multiply, divide = np.add, np.subtract, np.multiply, np.divide
copy = np.copyto
ROUNDINGS = {word: code for code, word in enumerate(get_args(Rounding))}  # as in cast.h
CAST_NUMBERS = 18  # of cast_numbers, before the owner of the table
Numbers = tuple[Any, ...]
# Results of a run of a call list besides 0, as in cpu_call_list_calls.h
WAITING, OVERLAPS, UNLIKE, ABSENT, STRANGE = -1, -2, -3, -4, -5
LOOKS, FEW_LOOKS = 20_000, 100  # failed looks before the world waits, and each time that it looks


@lru_cache(maxsize=64)
def cast_numbers(cast: Cast) -> Numbers:
    """Return the kernels' struct Cast: 17 numbers, its table's address or 0, and the table."""
    fmt = cast.fmt
    overflow, overflow_below = cast.overflow_codes
    limits = (fmt.shift_min, fmt.shift_max, fmt.emax, fmt.max_significand)
    rest: Numbers = (overflow_below, cast.random_mask, fmt.near_min, fmt.near_max)
    rounding = ROUNDINGS[cast.rounding]
    if isinstance(fmt, TableFormat):  # exp and man give only the width
        from .tables import search_table

        table = search_table(cast, fmt)
        codes = (fmt.ends[0], fmt.inf_codes[0], fmt.nan_code, overflow, 0)
        return fmt.bits - 1, 0, rounding, *codes, *limits, *rest, 0, table.ctypes.data, table
    rest += (int(isinstance(fmt, Microscaling)),)
    first_nan = {"ieee": fmt.inf_code + 1, "nan": fmt.nan_code, "none": fmt.max_code + 1}
    codes = (fmt.max_code, fmt.inf_code, fmt.nan_code, overflow, first_nan[fmt.special])
    return fmt.exp, fmt.man, rounding, *codes, *limits, *rest, 0


@lru_cache(maxsize=64)
def _format_numbers(fmt: Format) -> Numbers:
    return cast_numbers(Cast(fmt))


def _check(name: str, array: Array, dtype: type[np.generic]) -> None:
    if array.dtype != dtype:
        raise TypeError(f"{name}: {array.dtype} given, {np.dtype(dtype)} needed")


def _check_floats(**arrays: Array | None) -> None:
    for name, array in arrays.items():
        if array is not None:
            _check(name, array, np.float32)


def clone() -> str:
    """Return the generation of processors that the loops in use were compiled for."""
    return str(_cpu.clone())


def clones() -> list[str]:
    """Return the generations whose loops this processor can run, the slowest first."""
    return list(_cpu.clones())


def use_clone(name: str) -> None:
    """Use the loops of one of clones() from now on: the bits are the same.

    Raises ValueError for another name.
    """
    _cpu.use_clone(name)


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
    _check_floats(x=x, out=out)
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
    _check_floats(x=x, out=out)
    numbers = kernel_threads(), cast_numbers(cast), fit, key, offset
    arrays = words_in, shifts_in, x, words, shifts, out, counts
    return int(_cpu.decode_add_encode_tiles(*numbers, *arrays))


def add_integers_tiles(
    a: Array, bits_a: int, b: Array, bits_b: int, fmt: Format, words: Array, bits: int
) -> None:
    """Write the sums of the integers of a and b into words; see ops.reference."""
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


def read_memory(process: int, address: int, out: Array) -> None:
    """Read n bytes at an address of another process's memory into out, uint8[n].

    Raises OSError if the system does not allow it, or the address is not mapped.
    """
    _cpu.read_memory(process, address, out)


_INF, _NAN = NONFINITE_BITS, 0x7FC00000
FLOAT32 = NAMED["fp32"]
# Ways of rounding, as products_how.h has them.
TO_NEAREST, TO_FLOOR, AT_RANDOM, TO_ODD = range(1, 5)
# The way of each rounding, and its operand: whether |x| instead of x, whether -x instead of x.
WAYS = {
    "nearest": (TO_NEAREST, 0, 0),
    "zero": (TO_FLOOR, 1, 0),
    "down": (TO_FLOOR, 0, 0),
    "up": (TO_FLOOR, 0, 1),
    "odd": (TO_ODD, 1, 0),
    "stochastic": (AT_RANDOM, 1, 0),
}


@lru_cache(maxsize=256)
def rounding_numbers(cast: Cast | None, single: bool) -> Numbers:
    """Return the numbers of the kernels' struct Rounding; single: float32 is rounded to as well."""
    if cast is None or (single and cast.fmt == FLOAT32):
        return (0,) * 11
    fmt = cast.float_format
    by_code = {fmt.max_code: _bits(fmt.max), fmt.inf_code: _INF, fmt.nan_code: _NAN}
    if fmt.special == "none":  # NaN and infinity become the largest number
        by_code = dict.fromkeys(by_code, _bits(fmt.max))
    elif fmt.special == "nan":
        by_code[fmt.inf_code] = _NAN
    elif not fmt.man:
        by_code[fmt.nan_code] = _INF
    most = RANDOM_BITS - fmt.man
    random_bits = min(cast.random_bits or most, most) if cast.rounding == "stochastic" else 0
    return (
        fmt.man,
        *WAYS[cast.rounding],
        random_bits,
        (fmt.emin + 127) << 23,
        _bits(fmt.max),
        *(by_code[code] for code in cast.overflow_codes),
        by_code[fmt.inf_code],
        by_code[fmt.nan_code],
    )


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def product_numbers(
    how: Products, arithmetic: Arithmetic
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return the numbers of the kernels' struct Products, of each rounding and of the rest."""
    product, total, between = (
        rounding_numbers(cast, arithmetic == "float32") for cast in how.casts
    )
    from .products import Arithmetic

    number = get_args(Arithmetic).index(arithmetic)
    return product, total, between, (number, how.order == "pairwise", int(how.kahan), how.chunk)


def matmul(
    a: Array, b: Array, how: Products, key: Key = (0, 0), inputs: Inputs = (FLOAT32, FLOAT32)
) -> Array:
    """Return the products of the rows of a and the columns of b, rounded as how says.

    a: float32[batch, m, k]; b: float32[batch, k, n]; returns float32[batch, m, n]
    inputs: formats that hold all values of a and of b, so that less precise arithmetic may do
    """
    batch, m, k = a.shape
    out = np.empty((batch, m, b.shape[2]), np.float32)
    left, right = np.ascontiguousarray(a), np.ascontiguousarray(b)
    numbers = product_numbers(how, how.arithmetic(*inputs))
    _cpu.matmul(kernel_threads(), *numbers, key, batch, m, k, b.shape[2], left, right, out)
    return out


# Sums and products in NumPy's order of additions, as the GPU's. Sums are in float64 and pairwise:
# halves of halves, down to 128 values, for which eight partial sums run side by side.
TERMS = ("value", *get_args(Term))  # as kernels/passes.h numbers them


def row_sums(x: Array) -> Array:
    """Return the sum of each row: float32[rows, columns] to float64[rows]."""
    _check("x", x, np.float32)
    sums = np.empty(len(x))
    _cpu.row_sums(x, sums)
    return sums


def run_sums(x: Array, starts: Array, of: Term) -> Array:
    """Return the sum of magnitudes or squares of each run: float32[n], int64[runs] to float64."""
    _check("x", x, np.float32)
    sums = np.empty(starts.size)
    _cpu.run_sums(TERMS.index(of), x, np.ascontiguousarray(starts, np.int64), sums)
    return sums


def square_sum(x: Array, center: float = 0.0) -> float:
    """Return the sum of squares of x - center, float32[n]."""
    _check("x", x, np.float32)
    return float(_cpu.square_sum(x, center)) + 0.0


def run_maxima(x: Array, ends: Array) -> tuple[Array, float]:
    """Return the largest magnitude of each run of float32[n], and the sum; see ops.reference."""
    _check("x", x, np.float32)
    _check("ends", ends, np.int64)
    found = np.empty(ends.size, np.float32)
    return found, _cpu.run_maxima(x, ends, found)


def multiply_runs(x: Array, each: Array, ends: Array, out: Array) -> int:
    """Write x times its runs' numbers into out; see ops.reference."""
    return _scaled(False, x, each, ends, out, None)


def divide_runs(
    x: Array, each: Array, ends: Array, out: Array, limits: Array | None = None
) -> None:
    """Write x over its runs' numbers into out, cut to limits if given; see ops.reference."""
    _scaled(True, x, each, ends, out, limits)


def divide_all(x: Array, divisor: float, out: Array) -> int:
    """Write x over divisor into out, float32[n]; return the bits of the largest magnitude."""
    return _scaled(True, x, np.array([divisor], np.float32), np.array([x.size]), out, None)


def _scaled(
    divides: bool, x: Array, each: Array, ends: Array, out: Array, limits: Array | None
) -> int:
    _check_floats(x=x, out=out, each=each)
    _check("ends", ends, np.int64)
    arrays = x, each, ends, limits, out
    return int(_cpu.scale_runs(kernel_threads(), divides, *arrays))


def accumulate(
    x: Array,
    kept: Array,
    out: Array,
    *,
    factor: float = 1.0,
    more: Array | None = None,
    total: Array | None = None,
) -> int:
    """Write x + factor * kept, and that + more into total if given; see ops.reference."""
    return _accumulated(x, kept, out, factor, more, total)[0]


def accumulate_largest(
    x: Array,
    kept: Array,
    out: Array,
    k: int,
    *,
    factor: float = 1.0,
    more: Array | None = None,
    total: Array | None = None,
) -> tuple[Array, Array]:
    """Return the k largest of what accumulate writes last: uint32[k], ascending, float32[k]."""
    check_rank("accumulate_largest", k, x.size, 0)
    _check_floats(x=x, kept=kept, out=out, more=more, total=total)
    sums = x, kept, factor, more, out, total
    found, values = _pairs(_cpu.accumulate_largest(kernel_threads(), *sums, k))
    if found.size == k:
        return found, values
    last = out if total is None else total  # zeros are among them, or a sample was wrong
    found = select_magnitude(last, k)
    return found, last[found]


def accumulate_above(
    x: Array, kept: Array, out: Array, threshold: float, less: float = 0.0
) -> tuple[int, Array, Array]:
    """Return what accumulate returns, and what it writes above a threshold; see ops.reference."""
    check_size("accumulate_above", x.size)
    return _accumulated(x, kept, out, 1.0, None, None, threshold_bits(threshold), less)


def accumulate_taking(x: Array, kept: Array, out: Array, marks: Array) -> tuple[int, Array]:
    """Return what accumulate returns, and what it writes at marked places, which become 0."""
    _check_floats(x=x, kept=kept, out=out)
    _check("marks", marks, np.uint32)
    values = np.empty(int(count_bits(marks).sum()), np.float32)
    most = _cpu.accumulate_taking(kernel_threads(), x, kept, out, marks, values)
    return int(most), values


def accumulate_chunks(x: Array, kept: Array, out: Array, chunk_values: int) -> tuple[int, Array]:
    """Return what accumulate returns, and chunk_leaders of what it writes."""
    _check_floats(x=x, kept=kept, out=out)
    leaders = np.empty(-(-x.size // chunk_values), np.int64)
    return int(_cpu.accumulate_chunks(x, kept, chunk_values, out, leaders)), leaders


def put_marked(out: Array, marks: Array, values: Array) -> None:
    """Write values to marked places, and zeros to the others: float32[n], words, float32[m]."""
    _check_floats(out=out, values=values)
    _check("marks", marks, np.uint32)
    _cpu.put_marked(kernel_threads(), marks, values, out)


def take(x: Array, indices: Array) -> Array:
    """Return x[indices], which become 0: float32[n], uint32[m] to float32[m]."""
    _check("x", x, np.float32)
    _check("indices", indices, np.uint32)
    values = np.empty(indices.size, np.float32)
    _cpu.take(kernel_threads(), x, indices, values)
    return values


def mean_places(
    indices: Sequence[Array], values: Sequence[Array], divisor: float, out: Array
) -> int:
    """Write the sum of several sparse arrays over divisor into out; see ops.reference."""
    _check_places(indices, values)
    _check("out", out, np.float32)
    given = tuple(indices), tuple(values)
    return int(_cpu.mean_places(kernel_threads(), *given, divisor, out))


def merge_places(indices: Sequence[Array], values: Sequence[Array], n: int) -> tuple[Array, Array]:
    """Return the indices and values of the sum of sparse arrays; see ops.reference."""
    _check_places(indices, values)
    return _pairs(_cpu.merge_places(n, tuple(indices), tuple(values)))


def pairs_at(marks: Array, indices: Array, values: Array) -> tuple[Array, Array]:
    """Return the indices that are marked, and their values; see ops.reference."""
    _check("marks", marks, np.uint32)
    _check_places([indices], [values])
    return _pairs(_cpu.pairs_at(marks, indices, values))


def _check_places(indices: Sequence[Array], values: Sequence[Array]) -> None:
    for each, own in zip(indices, values, strict=True):
        _check("indices", each, np.uint32)
        _check("values", own, np.float32)


def _accumulated(
    x: Array,
    kept: Array,
    out: Array,
    factor: float,
    more: Array | None,
    total: Array | None,
    above: int = int(MAGNITUDE),  # nothing is
    less: float = 0.0,
) -> tuple[int, Array, Array]:
    """Return the largest bits, and indices and values of magnitudes above some bits."""
    _check_floats(x=x, kept=kept, out=out, more=more, total=total)
    sums = x, kept, factor, more, out, total
    most, found = _cpu.accumulate(kernel_threads(), *sums, above, less)
    return int(most), *_pairs(found)


def _pairs(found: tuple[bytearray, bytearray]) -> tuple[Array, Array]:
    return np.frombuffer(found[0], np.uint32), np.frombuffer(found[1], np.float32)


def encode_bins(
    x: Array, kept: Array, out: Array, rate: float, bin_values: int
) -> tuple[Array, Array]:
    """Write x + kept into out; return its bins' largest values and codes; see ops.reference."""
    _check_floats(x=x, kept=kept, out=out)
    highest = np.empty(-(-x.size // bin_values), np.float32)
    codes = _cpu.encode_bins(x, kept, rate, bin_values, out, highest)
    return highest, np.frombuffer(codes, np.uint8)


def mean_bins(
    bin_values: int,
    codes: Sequence[Array],
    scales: Sequence[float],
    out: Array,
    divisor: float,
    rests: Sequence[Array] = (),
    first: int = 0,
) -> tuple[int, Array]:
    """Write the mean of codes of encode_bins into out; see ops.reference."""
    for rest in (out, *rests):
        _check("out and rests", rest, np.float32)
    given = tuple(codes), np.array(scales, np.float32), tuple(rests), first
    most, counts = _cpu.mean_bins(bin_values, *given, divisor, out)
    return most, np.frombuffer(counts, np.int64)


def pack_bins(bin_values: int, indices: Array, values: Array) -> Array:
    """Return codes of a layer's indices and its values' signs, uint8[bytes]; see AdaComp.

    indices: uint32[m], ascending; values: float32[m]
    """
    _check("indices", indices, np.uint32)
    _check("values", values, np.float32)
    return np.frombuffer(_cpu.pack_bins(bin_values, indices, values), np.uint8)


def unpack_bins(bin_values: int, codes: Array, scale: float, first: int) -> tuple[Array, Array]:
    """Return the indices, from first on, and the values, scale or -scale, of codes of pack_bins."""
    _check("codes", codes, np.uint8)
    n = codes.size if bin_values < 1 << 6 else codes.size // 2
    indices, values = np.empty(n, np.uint32), np.empty(n, np.float32)
    count = _cpu.unpack_bins(bin_values, codes, scale, first, indices, values)
    return indices[:count], values[:count]


def chunk_leaders(x: Array, chunk_values: int) -> Array:
    """Return the position of the largest magnitude in each chunk: float32[n] to int64[chunks]."""
    _check("x", x, np.float32)
    found = np.empty(-(-x.size // chunk_values), np.int64)
    _cpu.chunk_leaders(x, chunk_values, found)
    return found


def clear_all(out: Array) -> None:
    """Write zeros into out, float32[n]."""
    _check("out", out, np.float32)
    _cpu.clear_all(kernel_threads(), out)


def put(out: Array, indices: Array, values: Array) -> None:
    """Write values to out[indices]: float32[n], uint32[m], float32[m]."""
    _check_floats(out=out, values=values)
    _check("indices", indices, np.uint32)
    _cpu.put(kernel_threads(), out, indices, values)


def mark_drawn(key: Array, count: int, n: int) -> Array:
    """Return a bit for each of n places, the first count of them that are drawn; see reference."""
    words = np.empty(-(-n // 32), np.uint32)
    _cpu.mark_drawn(int(key[0]), int(key[1]), count, n, words)
    return words


def encode_signs(
    x: Array, kept: Array | None = None, rest: Array | None = None
) -> tuple[Array, Array, int]:
    """Return the signs of x + kept, rows' two means, and its largest bits; see ops.reference."""
    _check_floats(x=x, kept=kept, rest=rest)
    signs, pairs = np.empty(-(-x.size // 8), np.uint8), np.empty((len(x), 2), np.float32)
    return signs, pairs, int(_cpu.encode_signs(x, kept, rest, signs, pairs))


def decode_signs(signs: Sequence[Array], pairs: Sequence[Array], out: Array, divisor: float) -> int:
    """Write the sum of the values of signs and pairs, over divisor; see ops.reference."""
    _check("out", out, np.float32)
    return int(_cpu.decode_signs(tuple(signs), tuple(pairs), len(out), divisor, out))


def row_products(m: Array, rows: Array) -> Array:
    """Return the product of m with each of some rows: float32[n, k], [r, k] to [r, n]."""
    return _products(_cpu.row_products, m, rows, len(m))


def column_products(m: Array, rows: Array) -> Array:
    """Return the product of m, transposed, with each of some rows: [n, k], [r, n] to [r, k]."""
    return _products(_cpu.column_products, m, rows, m.shape[1])


def _products(kernel: Callable[..., None], m: Array, rows: Array, size: int) -> Array:
    _check_floats(m=m, rows=rows)
    out = np.empty((len(rows), size), np.float32)
    kernel(len(m), np.ascontiguousarray(m), np.ascontiguousarray(rows), out)
    return out


def outer(firsts: Array, seconds: Array, out: Array) -> int:
    """Write the sum of products of columns and rows; see ops.reference."""
    _check_floats(firsts=firsts, seconds=seconds, out=out)
    return int(_cpu.outer(len(out), firsts, seconds, out))


def encode_runs(
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
    """Encode x over its runs' numbers, times factor, into payload; see ops.reference."""
    _check_floats(x=x, each=each)
    _check("ends", ends, np.int64)
    how = kernel_threads(), cast_numbers(cast), trits, key, shift
    _cpu.encode_runs(*how, x, each, ends, factor, payload)


def mean_runs(
    payloads: Sequence[Array],
    each: Sequence[Array],
    ends: Array,
    bits: int,
    out: Array,
    *,
    trits: bool = False,
) -> int:
    """Write the mean of integers times their runs' numbers into out; see ops.reference."""
    numbers = np.concatenate([*each, np.empty(0, np.float32)])
    _check_floats(out=out, each=numbers)
    _check("ends", ends, np.int64)
    how, divisor = (kernel_threads(), bits, trits, tuple(payloads)), float(len(payloads))
    return int(_cpu.mean_runs(*how, numbers, ends, divisor, out))


def count_digits(x: Array, low: int, shift: int, buckets: int) -> Array:
    """Return how many magnitudes lie in each bucket, 2**shift wide, from low on."""
    _check("x", x, np.float32)
    counts = np.empty(buckets, np.uint32)
    _cpu.count_digits(kernel_threads(), low, shift, x, counts)
    return counts


def step_layers(
    rule: str, layers: Sequence[LayerArrays], numbers: Array, threads: int | None = None
) -> None:
    """Take a step of each layer of an optimiser; threads: default kernel_threads. See ops.steps."""
    from .steps import RULES, check_layers  # only for optimisers: an all-reduce does not load it

    check_layers(rule, layers, numbers)
    arrays = [x for layer in layers for x in layer[:4]]
    rows = np.array([layer.rows for layer in layers], np.int64)
    _cpu.step_layers(threads or kernel_threads(), RULES.index(rule), arrays, rows, numbers)


def mark_above(x: Array, bits: int) -> Array:
    """Return a bit for each value, set if its magnitude is above bits: uint32[ceil(n / 32)]."""
    _check("x", x, np.float32)
    words = np.empty(-(-x.size // 32), np.uint32)
    _cpu.mark_above(kernel_threads(), bits, x, words)
    return words


def count_bits(words: Array) -> Array:
    """Return how many bits are set in each 32 words: uint32[w] to uint32[ceil(w / 32)]."""
    _check("words", words, np.uint32)
    counts = np.empty(-(-words.size // 32), np.uint32)
    _cpu.count_bits(kernel_threads(), words, counts)
    return counts


def unpack_bitmap(words: Array) -> Array:
    """Return the places of set bits, ascending: uint32[w] to uint32[m]."""
    counts = count_bits(words)
    ends = np.cumsum(counts, dtype=np.uint32)
    found = np.empty(int(ends[-1]) if ends.size else 0, np.uint32)
    _cpu.unpack_bitmap(kernel_threads(), words, ends - counts, found)
    return found


def pack_bitmap(indices: Array, size: int) -> Array:
    """Return a bit for each of size places, set at the indices: uint32[m] to uint32 words."""
    _check("indices", indices, np.uint32)
    words = np.empty(-(-size // 32), np.uint32)
    _cpu.pack_bitmap(indices, words)
    return words


def pack_stream(codes: Array, widths: Array) -> Array:
    """Return codes as a stream of bits, each tile at its width; see ops.reference."""
    _check("codes", codes, np.uint32)
    _check("widths", widths, np.uint8)
    words = np.empty(stream_words(widths, codes.size), np.uint32)
    _cpu.pack_stream(codes, widths, words)
    return words


def unpack_stream(words: Array, widths: Array, n: int) -> Array:
    """Return the n codes that pack_stream packed: uint32[n]."""
    _check("words", words, np.uint32)
    _check("widths", widths, np.uint8)
    codes = np.empty(n, np.uint32)
    _cpu.unpack_stream(words, widths, codes)
    return codes


def gather(x: Array, indices: Array) -> Array:
    """Return x[indices]: float32[n], uint32[m] to float32[m]."""
    _check("x", x, np.float32)
    _check("indices", indices, np.uint32)
    out = np.empty(indices.size, np.float32)
    _cpu.gather(kernel_threads(), x, indices, out)
    return out


def scatter_add(out: Array, indices: Array, values: Array) -> None:
    """Add values to out[indices]: float32[n], uint32[m], float32[m]."""
    _check_floats(out=out, values=values)
    _check("indices", indices, np.uint32)
    _cpu.scatter_add(kernel_threads(), out, indices, values)


def clear(x: Array, indices: Array) -> None:
    """Set x[indices] to 0.0: float32[n], uint32[m]."""
    _check("x", x, np.float32)
    _check("indices", indices, np.uint32)
    _cpu.clear(kernel_threads(), x, indices)


def select_above(x: Array, threshold: float) -> Array:
    """Return the indices of |x| > threshold, and of NaN: uint32[m], ascending."""
    check_size("select_above", x.size)
    return unpack_bitmap(mark_above(x, threshold_bits(threshold)))


def kth_magnitude(x: Array, k: int) -> int:
    """Return the float32 bits, without the sign, of the k-th largest |x|."""
    check_rank("kth_magnitude", k, x.size, 1)
    _, values = _largest(x, k)
    return int(np.min(values.view(np.uint32) & MAGNITUDE)) if values.size == k else 0


def select_magnitude(x: Array, k: int) -> Array:
    """Return the indices of the k largest |x|, of equal ones the lower: uint32[k], ascending."""
    check_rank("select_magnitude", k, x.size, 0)
    found, _ = _largest(x, k)
    if found.size == k:
        return found
    zeros = np.flatnonzero(x == 0)[: k - found.size]
    return np.sort(np.concatenate([found, zeros.astype(np.uint32)]))


def _largest(x: Array, k: int) -> tuple[Array, Array]:
    """Return the indices and values of the k largest |x| without zeros."""
    _check("x", x, np.float32)
    return _pairs(_cpu.largest(kernel_threads(), x, k))


def encode_two_scales(
    x: Array,
    cast: Cast,
    words: Array,
    scales: Array,
    scale: Array,
    *,
    key: Key = (0, 0),
    offset: int = 0,
) -> None:
    """Write x as NVFP4; see ops.two_scales."""
    from . import two_scales

    two_scales.encode(sys.modules[__name__], x, cast, words, scales, scale, key, offset)


def decode_two_scales(
    words: Array, scales: Array, scale: Array, out: Array, more: Array | None = None
) -> int:
    """Write the numbers of NVFP4, plus more if given, into out; see ops.two_scales."""
    from . import two_scales

    return two_scales.decode(sys.modules[__name__], words, scales, scale, out, more)

"""The operations of ops.reference on CuPy arrays, by kernels that NVRTC compiles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np

from ..formats import (
    NVFP4_BLOCK,
    SHIFT_BIAS,
    TILE,
    TRIT_BYTES,
    Cast,
    FloatFormat,
    Format,
    nvfp4_blocks,
    packed_bytes,
    tiles,
)
from ..randomness import Key
from . import composed, cpu
from .common import (
    MAGNITUDE,
    Term,
    check_rank,
    check_size,
    radix_select,
    threshold_bits,
)
from .common import stream_words as stream_words
from .cpu import TERMS
from .cuda_source import Fixed
from .gpu_runtime import (
    NULL,
    WORD_BYTES,
    cast_on_device,
    check,
    check_tiles,
    check_words,
    counts_or_null,
    element_blocks,
    key_numbers,
    launch,
    launch_codec,
    products_on_device,
    tile_blocks,
    to_host,
    warp_blocks,
)
from .products import FLOAT32, Inputs, Products
from .two_scales import ELEMENT, SCALE

Array = Any  # cupy.ndarray
HostArray = np.ndarray[Any, np.dtype[Any]]

_OPS = sys.modules[__name__]
_ROWS, _COLUMNS = 8, 16  # of a block's outputs of a matrix product
_COUNTING_BLOCKS = 512  # at most: each warp adds its table of counts to the result at its end


def encode(x: Array, cast: Cast, shift: int = 0, key: Key = (0, 0), offset: int = 0) -> Array:
    """Return the code of each x * 2**shift: float32[n] to uint32[n]."""
    check("x", x, np.float32)
    codes = cupy.empty(x.shape, np.uint32)
    numbers = (cast_on_device(cast), np.int32(shift), *key_numbers(key, offset))
    launch("encode", element_blocks(x.size), *numbers, x, np.int64(x.size), codes)
    return codes


def decode(codes: Array, fmt: Format, shift: int = 0) -> Array:
    """Return the number of each code times 2**-shift: uint32[n] to float32[n]."""
    check("codes", codes, np.uint32)
    out = cupy.empty(codes.shape, np.float32)
    n = np.int64(codes.size)
    blocks = element_blocks(codes.size)
    launch("decode", blocks, cast_on_device(Cast(fmt)), np.int32(shift), codes, n, out)
    return out


def pack(codes: Array, bits: int) -> Array:
    """Return codes packed in tiles: uint32[n] to uint8[tiles(n) * 128 * bits]."""
    check("codes", codes, np.uint32)
    words = cupy.empty(tiles(codes.size) * 128 * bits, np.uint8)
    n = np.int64(codes.size)
    launch("pack", tile_blocks(codes.size), np.int32(bits), codes, n, words)
    return words


def unpack(packed: Array, bits: int, n: int) -> Array:
    """Return the first n codes of packed tiles: uint8[tiles(n) * 128 * bits] to uint32[n]."""
    if packed.data.ptr % WORD_BYTES:
        packed = packed.copy()  # a part of an array of bytes may begin anywhere
    check_words("packed", packed, tiles(n) * 128 * bits)
    codes = cupy.empty(n, np.uint32)
    launch("unpack", tile_blocks(n), np.int32(bits), packed, np.int64(n), codes)
    return codes


def amax_tiles(x: Array) -> Array:
    """Return per tile the float32 bits of max|x|: float32[n] to uint32[tiles(n)]."""
    check("x", x, np.float32)
    amax = cupy.empty(tiles(x.size), np.uint32)
    launch("amax_tiles", tile_blocks(x.size), x, np.int64(x.size), amax)
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
    check("x", x, np.float32)
    blocks = check_tiles(words, shifts, x.size, cast.fmt)
    fixed = Fixed(cast, blocks, fit, counts is not None)
    numbers = (np.int32(fit), *key_numbers(key, offset))
    arrays = (x, np.int64(x.size), words, shifts, counts_or_null(counts, x.size))
    launch_codec("encode_tiles", x.size, fixed, *numbers, *arrays)


def decode_tiles(words: Array, shifts: Array, fmt: Format, out: Array) -> Array:
    """Unpack and decode into out; return how many values are not finite, uint64[], on the GPU."""
    check("out", out, np.float32)
    blocks = check_tiles(words, shifts, out.size, fmt)
    nonfinite = cupy.zeros((), np.uint64)
    arrays = (words, shifts, out, np.int64(out.size), nonfinite)
    launch_codec("decode_tiles", out.size, Fixed(Cast(fmt), blocks), *arrays)
    return nonfinite


def decode_add_tiles(words: Array, shifts: Array, fmt: Format, x: Array, out: Array) -> None:
    """Write x + decoded, summed in float32, into out; out may be x."""
    check("x", x, np.float32)
    check("out", out, np.float32, x.size)
    blocks = check_tiles(words, shifts, x.size, fmt)
    arrays = (words, shifts, x, out, np.int64(x.size))
    launch_codec("decode_add_tiles", x.size, Fixed(Cast(fmt), blocks), *arrays)


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
) -> Any:
    """One hop of a reduction: encode_tiles of x + decoded, in one pass over memory.

    out: float32[n] or None: what words decode to, written in the same pass
    Returns how many values of out are not finite, uint64[] on the GPU; 0 without it.
    """
    check("x", x, np.float32)
    blocks = check_tiles(words_in, shifts_in, x.size, cast.fmt)
    check_tiles(words, shifts, x.size, cast.fmt)
    check("shifts", shifts, np.uint8, shifts_in.size)
    if out is not None:
        check("out", out, np.float32, x.size)
    fixed = Fixed(cast, blocks, fit, counts is not None)
    numbers = (np.int32(fit), *key_numbers(key, offset))
    nonfinite: Any = NULL if out is None else cupy.zeros((), np.uint64)
    arrays = (
        words_in,
        shifts_in,
        x,
        np.int64(x.size),
        words,
        shifts,
        NULL if out is None else out,
        nonfinite,
        counts_or_null(counts, x.size),
    )
    launch_codec("decode_add_encode_tiles", x.size, fixed, *numbers, *arrays)
    return 0 if out is None else nonfinite


def add_integers_tiles(
    a: Array, bits_a: int, b: Array, bits_b: int, fmt: Format, words: Array, bits: int
) -> None:
    """Write the sums of the integers of a and b into words; see ops.reference."""
    n = words.size // (TILE // 8 * bits) * TILE
    for name, array, width in (("words", words, bits), ("a", a, bits_a), ("b", b, bits_b)):
        check_words(name, array, packed_bytes(n, width or fmt.bits))
    numbers = (a, np.int32(bits_a), b, np.int32(bits_b), np.int64(tiles(n)), words, np.int32(bits))
    launch("add_integers_tiles", tile_blocks(n), cast_on_device(Cast(fmt)), *numbers)


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
    check("x", x, np.float32)
    check_words("words_in", words_in, packed_bytes(x.size, bits_in or cast.fmt.bits))
    check("shifts", shifts, np.uint8, tiles(x.size))
    check_words("words", words, packed_bytes(x.size, bits))
    came = (words_in, np.int32(bits_in), shifts, x, np.int64(x.size))
    gone = (words, np.int32(bits), counts_or_null(counts, x.size))
    numbers = (cast_on_device(cast), *key_numbers(key, offset))
    launch("add_encode_integers_tiles", tile_blocks(x.size), *numbers, *came, *gone)


def decode_integers_tiles(words: Array, bits: int, shifts: Array, fmt: Format, out: Array) -> Array:
    """Write the integers as float32 into out; return how many are not finite, uint64[]."""
    check("out", out, np.float32)
    check_words("words", words, packed_bytes(out.size, bits or fmt.bits))
    check("shifts", shifts, np.uint8, tiles(out.size))
    nonfinite = cupy.zeros((), np.uint64)
    arrays = (words, np.int32(bits), shifts, out, np.int64(out.size), nonfinite)
    launch("decode_integers_tiles", tile_blocks(out.size), cast_on_device(Cast(fmt)), *arrays)
    return nonfinite


def pack_trits(words: Array, trits: Array) -> None:
    """Write ternary codes, five in a byte, into trits."""
    n = trits.size // TRIT_BYTES * TILE
    check("trits", trits, np.uint8, tiles(n) * TRIT_BYTES)
    check_words("words", words, packed_bytes(n, 2))
    launch("pack_trits", tile_blocks(n), words, np.int64(tiles(n)), trits)


def unpack_trits(trits: Array, words: Array) -> None:
    """Write the codes that pack_trits packed into words."""
    n = trits.size // TRIT_BYTES * TILE
    check("trits", trits, np.uint8, tiles(n) * TRIT_BYTES)
    check_words("words", words, packed_bytes(n, 2))
    launch("unpack_trits", tile_blocks(n), trits, np.int64(tiles(n)), words)


def count_digits(x: Array, low: int, shift: int, buckets: int) -> Any:
    """Return how many magnitudes lie in each bucket, 2**shift wide, from low on: NumPy's uint32."""
    check("x", x, np.float32)
    counts = cupy.zeros(buckets, np.uint32)
    numbers = (np.uint32(low), np.int32(shift), np.uint32(buckets))
    blocks = min(tile_blocks(x.size), _COUNTING_BLOCKS)
    launch("count_digits", blocks, *numbers, x, np.int64(x.size), counts)
    return to_host(counts)


def mark_above(x: Array, bits: int) -> Array:
    """Return a bit for each value, set if its magnitude is above bits: uint32[ceil(n / 32)]."""
    check("x", x, np.float32)
    words = cupy.empty(-(-x.size // 32), np.uint32)
    launch("mark_above", tile_blocks(x.size), np.uint32(bits), x, np.int64(x.size), words)
    return words


def count_bits(words: Array) -> Array:
    """Return how many bits are set in each 32 words: uint32[w] to uint32[ceil(w / 32)]."""
    check("words", words, np.uint32)
    counts = cupy.empty(-(-words.size // 32), np.uint32)
    launch("count_bits", tile_blocks(32 * words.size), words, np.int64(words.size), counts)
    return counts


def unpack_bitmap(words: Array) -> Array:
    """Return the places of set bits, ascending: uint32[w] to uint32[m]. Waits for their number."""
    counts = count_bits(words)
    ends = cupy.cumsum(counts, dtype=np.uint32)
    places = cupy.empty(int(to_host(ends[-1:])[0]) if ends.size else 0, np.uint32)
    arrays = (words, np.int64(words.size), ends - counts, places)
    launch("unpack_bitmap", tile_blocks(32 * words.size), *arrays, np.int64(places.size))
    return places


def pack_bitmap(indices: Array, size: int) -> Array:
    """Return a bit for each of size places, set at the indices: uint32[m] to uint32 words."""
    check("indices", indices, np.uint32)
    words = cupy.zeros(-(-size // 32), np.uint32)
    arrays = (indices, np.int64(indices.size), words, np.int64(words.size))
    launch("pack_bitmap", element_blocks(indices.size), *arrays)
    return words


def pack_stream(codes: Array, widths: HostArray) -> Array:
    """Return codes as a stream of bits, each tile at its width, NumPy's; see ops.reference."""
    check("codes", codes, np.uint32)
    words = cupy.empty(stream_words(widths, codes.size), np.uint32)
    arrays = (codes, np.int64(codes.size), *_stream(widths, codes.size), words)
    launch("pack_stream", tile_blocks(codes.size), *arrays)
    return words


def unpack_stream(words: Array, widths: HostArray, n: int) -> Array:
    """Return the n codes that pack_stream packed: uint32[n]."""
    check("words", words, np.uint32, stream_words(widths, n))
    codes = cupy.empty(n, np.uint32)
    launch("unpack_stream", tile_blocks(n), words, *_stream(widths, n), codes, np.int64(n))
    return codes


def _stream(widths: HostArray, n: int) -> tuple[Array, Array]:
    """Return the widths of the tiles of n codes, and the first word of each."""
    if widths.dtype != np.uint8 or widths.size != tiles(n) or widths.max(initial=0) > 32:
        raise ValueError(f"widths: {widths.dtype}[{widths.size}]: must be uint8[{tiles(n)}], 0..32")
    starts = 32 * (np.cumsum(widths, dtype=np.int64) - widths)
    return cupy.asarray(widths), cupy.asarray(starts)


def kth_magnitude(x: Array, k: int) -> int:
    """Return the float32 bits, without the sign, of the k-th largest |x|. Waits for it."""
    check_rank("kth_magnitude", k, x.size, 1)
    return radix_select(count_digits, x, k)


def select_magnitude(x: Array, k: int) -> Array:
    """Return the indices of the k largest |x|, of equal ones the lower: uint32[k], ascending."""
    check_rank("select_magnitude", k, x.size, 0)
    kth = radix_select(count_digits, x, k) if k else 2**31
    found = unpack_bitmap(mark_above(x, kth - 1)) if kth else cupy.arange(x.size, dtype=np.uint32)
    if found.size == k:
        return found
    is_tie = gather(x, found).view(np.uint32) & np.uint32(MAGNITUDE) == np.uint32(kth)
    wanted = k - found.size + int(to_host(is_tie.sum()))  # the first of the ties
    return found[~is_tie | (cupy.cumsum(is_tie, dtype=np.int64) <= wanted)]


def select_above(x: Array, threshold: float) -> Array:
    """Return the indices of |x| > threshold, and of NaN: uint32[m], ascending."""
    check_size("select_above", x.size)
    return unpack_bitmap(mark_above(x, threshold_bits(threshold)))


def gather(x: Array, indices: Array) -> Array:
    """Return x[indices]: float32[n], uint32[m] to float32[m]; 0 for an index from n on."""
    check("x", x, np.float32)
    check("indices", indices, np.uint32)
    values = cupy.empty(indices.size, np.float32)
    arrays = (x, np.int64(x.size), indices, np.int64(indices.size), values)
    launch("gather", element_blocks(indices.size), *arrays)
    return values


def scatter_add(out: Array, indices: Array, values: Array) -> None:
    """Add values to out[indices]: float32[n], uint32[m], float32[m]; no index twice."""
    check("out", out, np.float32)
    check("indices", indices, np.uint32)
    check("values", values, np.float32, indices.size)
    arrays = (out, np.int64(out.size), indices, np.int64(indices.size), values)
    launch("scatter_add", element_blocks(indices.size), *arrays)


def clear(x: Array, indices: Array) -> None:
    """Set x[indices] to 0.0: float32[n], uint32[m]."""
    check("x", x, np.float32)
    check("indices", indices, np.uint32)
    arrays = (x, np.int64(x.size), indices, np.int64(indices.size))
    launch("clear", element_blocks(indices.size), *arrays)


def asarray(x: Any) -> Array:
    """Return a NumPy array's copy on CuPy's current GPU."""
    return cupy.asarray(x)


def copy(target: Array, source: Array) -> None:
    """Overwrite target by source."""
    target[...] = source


def add(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a + b, float32, in out if given; rounded as by NumPy, subnormal numbers too."""
    return _floats("add_floats", a, b, out)


def subtract(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a - b, float32, in out if given; rounded as by NumPy, subnormal numbers too."""
    return _floats("subtract_floats", a, b, out)


def multiply(a: Array, b: np.float32, out: Array | None = None) -> Array:
    """Return a * b, float32, in out if given; rounded as by NumPy, subnormal numbers too."""
    return _floats("multiply_floats", a, np.float32(b), out)


def divide(a: Array, b: np.float32, out: Array | None = None) -> Array:
    """Return a / b, float32, in out if given; rounded as by NumPy, subnormal numbers too."""
    return _floats("divide_floats", a, np.float32(b), out)


def _floats(name: str, a: Array, b: Any, out: Array | None) -> Array:
    check("a", a, np.float32)
    if not isinstance(b, np.float32):
        check("b", b, np.float32, a.size)
    out = cupy.empty(a.shape, np.float32) if out is None else out
    check("out", out, np.float32, a.size)
    launch(name, element_blocks(a.size), a, b, out, np.int64(a.size))
    return out


def matmul(
    a: Array, b: Array, how: Products, key: Key = (0, 0), inputs: Inputs = (FLOAT32, FLOAT32)
) -> Array:
    """Return the products of the rows of a and the columns of b; see ops.cpu.matmul."""
    batch, m, k = a.shape
    n = b.shape[2]
    check("a", a, np.float32)
    check("b", b, np.float32, batch * k * n)
    out = cupy.empty((batch, m, n), np.float32)
    sizes = (np.int64(size) for size in (batch, m, k, n))
    numbers = (products_on_device(how, how.arithmetic(*inputs)), *key_numbers(key, 0)[:2])
    launch("matmul", batch * -(-m // _ROWS) * -(-n // _COLUMNS), *numbers, a, b, *sizes, out)
    return out


def move_boxes(
    kind: int, table: Array, boxes: int, units: int, x: int, out: int, memory: Any
) -> None:
    """Copy and add boxes of cells; see kernels/cuda_moves.h.

    kind: of units; table: int64[n], which darray/device.py makes; boxes, units: their numbers in it
    x, out: addresses of arrays on CuPy's current GPU, aligned for units; memory: uint8[m]
    """
    check("table", table, np.int64)
    check("memory", memory, np.uint8)
    arrays = (np.uint64(x), np.uint64(out), memory)
    launch(
        "move_boxes",
        element_blocks(units),
        np.int32(kind),
        table,
        np.int64(boxes),
        np.int64(units),
        *arrays,
    )


# Sums and products in NumPy's order of additions: a thread sums up to 128 values, a leaf of NumPy's
# tree, a block the lowest 7 levels, and one block of each part the levels above.
SUMMED = (*TERMS, "above", "below")  # as kernels/cuda_sums.h numbers them
LEAF = 128  # values that NumPy sums without halving them
INNER = 7  # levels of a tree that a block sums
BUFFER = 8192  # values that NumPy converts to float64 at once; it adds their sums in order


def _pairwise(x: Array, starts: HostArray, stops: HostArray, of: str, center: float) -> HostArray:
    """Return the sum of each part of float32[n]: int64[parts] to NumPy's float64[parts].

    of: one of SUMMED, the terms
    """
    parts, sizes = np.int64(starts.size), stops - starts
    totals = cupy.empty(starts.size, np.float64)
    term = np.int32(SUMMED.index(of)), np.float64(center), x
    borders = cupy.asarray(starts), cupy.asarray(stops)
    if sizes.max(initial=0) <= LEAF:
        launch("leaf_sums", element_blocks(starts.size), *term, *borders, parts, totals)
        return to_host(totals)
    ends = np.cumsum(_blocks_of(sizes))
    blocks, lists = int(ends[-1]), (*borders, cupy.asarray(ends), parts)
    sums = cupy.empty(blocks, np.float64)
    launch("tree_sums", blocks, *term, *lists, np.int64(blocks), sums)
    launch("join_sums", starts.size, *lists, sums, totals)
    return to_host(totals)


def _blocks_of(sizes: HostArray) -> HostArray:
    """Return the number of blocks that sum each part, int64, by the depth of its tree."""
    longest, depths = sizes.copy(), np.zeros_like(sizes)
    while (is_long := longest > LEAF).any():
        longest -= np.where(is_long, longest // 2 // 8 * 8, 0)
        depths += is_long
    return np.left_shift(1, np.maximum(depths - INNER, 0))


def row_sums(x: Array) -> HostArray:
    """Return the sum of each row: float32[rows, columns] to NumPy's float64[rows]."""
    return _row_sums(x, "value")


def _row_sums(x: Array, of: str) -> HostArray:
    check("x", x, np.float32)
    rows, columns = x.shape
    if not columns:
        return np.zeros(rows)
    begins = np.arange(0, columns, BUFFER)
    starts = (np.arange(rows)[:, None] * columns + begins).ravel()
    stops = starts + np.tile(np.minimum(columns - begins, BUFFER), rows)
    parts = _pairwise(x.reshape(-1), starts, stops, of, 0.0).reshape(rows, -1)
    total = np.zeros(rows)
    for part in parts.T:
        total += part
    return total


def run_sums(x: Array, starts: HostArray, of: Term) -> HostArray:
    """Return the sum of magnitudes or squares of each run: float32[n], int64[runs] to float64.

    NumPy's reduceat adds the sum of the other terms to the first one.
    """
    check("x", x, np.float32)
    first = to_host(x[cupy.asarray(starts)]).astype(np.float64)
    sums = np.abs(first) if of == "magnitude" else np.square(first)
    sums += _pairwise(x, starts + 1, np.append(starts[1:], x.size), of, 0.0)
    return np.asarray(sums)


def square_sum(x: Array, center: float = 0.0) -> float:
    """Return the sum of squares of x - center, float32[n]."""
    check("x", x, np.float32)
    if not x.size:
        return 0.0
    ends = np.array([0]), np.array([x.size])
    return float(_pairwise(x.reshape(-1), *ends, "square", center)[0])


def multiply_runs(x: Array, each: HostArray, ends: HostArray, out: Array) -> int:
    """Write x times its runs' numbers into out; see ops.reference."""
    _runs("multiply_runs", x, each, ends, out)
    return largest_bits(out)


def divide_runs(
    x: Array, each: HostArray, ends: HostArray, out: Array, limits: HostArray | None = None
) -> None:
    """Write x over its runs' numbers into out, cut to limits if given; see ops.reference."""
    if limits is not None:
        _runs("cut_runs", x, limits.view(np.uint32), ends, out)
        x = out
    _runs("divide_runs", x, each, ends, out)


def _runs(name: str, x: Array, each: HostArray, ends: HostArray, out: Array) -> None:
    check("x", x, np.float32)
    check("out", out, np.float32, x.size)
    runs = (cupy.asarray(each), cupy.asarray(ends), np.int64(ends.size))
    launch(name, tile_blocks(x.size), x, np.int64(x.size), *runs, out)


def run_maxima(x: Array, ends: HostArray) -> tuple[HostArray, float]:
    """Return the largest magnitude of each run of float32[n], NumPy's, and the sum of x."""
    check("x", x, np.float32)
    most = cupy.zeros(ends.size, np.uint32)
    runs = (cupy.asarray(ends), np.int64(ends.size))
    launch("run_maxima", tile_blocks(x.size), x, np.int64(x.size), *runs, most)
    return to_host(most).view(np.float32), float(row_sums(x.reshape(1, -1))[0])


def accumulate(
    x: Array,
    kept: Array,
    out: Array,
    *,
    factor: float = 1.0,
    more: Array | None = None,
    total: Array | None = None,
) -> int:
    """Write x + factor * kept, and that + more into total if given; see ops.reference. Waits."""
    given = (("x", x), ("kept", kept), ("out", out), ("more", more), ("total", total))
    for name, array in given:
        if array is not None:
            check(name, array, np.float32, x.size)
    amax = cupy.empty(tiles(x.size), np.uint32)
    terms = (x, kept, np.float32(factor), NULL if more is None else more, np.int64(x.size))
    sums = (out, NULL if total is None else total, amax)
    launch("accumulate", tile_blocks(x.size), *terms, *sums)
    return int(to_host(amax).max(initial=0))


def encode_bins(
    x: Array, kept: Array, out: Array, rate: float, bin_values: int
) -> tuple[HostArray, HostArray]:
    """Write x + kept into out; return its bins' largest values and codes, NumPy's; see ops.cpu."""
    for name, array in (("x", x), ("kept", kept), ("out", out)):
        check(name, array, np.float32, x.size)
    bins = -(-x.size // bin_values)
    highest, words = cupy.empty(bins, np.uint32), cupy.zeros(-(-x.size // 32), np.uint32)
    sizes = (np.int64(x.size), np.int64(bin_values), np.int64(bins))
    launch("bin_leaders", warp_blocks(bins), x, kept, np.float32(rate), *sizes, out, highest, words)
    found = unpack_bitmap(words)
    codes = cpu.pack_bins(bin_values, to_host(found), to_host(gather(out, found)))
    return to_host(highest).view(np.float32), codes


def unpack_bins(bin_values: int, codes: HostArray, scale: float, first: int) -> list[Array]:
    """Return the indices, from first on, and the values, scale or -scale, of codes of pack_bins."""
    return [*map(cupy.asarray, cpu.unpack_bins(bin_values, codes, scale, first))]


def chunk_leaders(x: Array, chunk_values: int) -> HostArray:
    """Return the position of the largest magnitude in each chunk: float32[n] to int64[chunks]."""
    check("x", x, np.float32)
    check_size("chunk_leaders", chunk_values)
    chunks = -(-x.size // chunk_values)
    places = cupy.empty(chunks, np.int64)
    sizes = (np.int64(x.size), np.int64(chunk_values), np.int64(chunks))
    launch("chunk_leaders", warp_blocks(chunks), x, *sizes, places)
    return to_host(places)


def largest_bits(x: Array) -> int:
    """Return the bits of the largest magnitude of float32[n]. Waits for it."""
    return int(to_host(amax_tiles(x.reshape(-1))).max(initial=0))


def encode_signs(
    x: Array, kept: Array | None = None, rest: Array | None = None
) -> tuple[HostArray, HostArray, int]:
    """Return the signs of x + kept, rows' two means, NumPy's, and its largest bits."""
    check("x", x, np.float32)
    total, more = (x, NULL) if kept is None else (cupy.empty(x.shape, np.float32), kept)
    signs, amax = cupy.empty(-(-x.size // 8), np.uint8), cupy.empty(tiles(x.size), np.uint32)
    counts = cupy.zeros(len(x), np.uint32)
    sizes = (np.int64(x.shape[1]), np.int64(x.size))
    sums = (NULL if kept is None else total, signs, counts, amax)
    launch("pack_signs", tile_blocks(x.size), x, more, *sizes, *sums)
    counts = to_host(counts).astype(np.int64)
    above, below = _row_sums(total, "above"), _row_sums(total, "below")
    means = (below / np.maximum(x.shape[1] - counts, 1), above / np.maximum(counts, 1))
    pairs = np.stack(means, axis=1).astype(np.float32)
    if rest is not None:
        check("rest", rest, np.float32, x.size)
        launch("subtract_signs", element_blocks(x.size), total, cupy.asarray(pairs), *sizes, rest)
    return to_host(signs), pairs, int(to_host(amax).max(initial=0))


def decode_signs(
    signs: Sequence[HostArray], pairs: Sequence[HostArray], out: Array, divisor: float
) -> int:
    """Write the sum of the values of signs and pairs, over divisor; see ops.reference."""
    check("out", out, np.float32)
    out[...] = 0
    for sign, pair in zip(signs, pairs, strict=True):
        numbers = (cupy.asarray(pair), np.int64(out.shape[1]), np.int64(out.size))
        launch("add_signs", element_blocks(out.size), cupy.asarray(sign), *numbers, out)
    divide(out, np.float32(divisor), out)
    return largest_bits(out)


def mean_runs(
    payloads: Sequence[HostArray],
    each: Sequence[HostArray],
    ends: HostArray,
    bits: int,
    out: Array,
    *,
    trits: bool = False,
) -> int:
    """Write the mean of integers times their runs' numbers into out; see ops.reference."""
    check("out", out, np.float32)
    out[...] = 0
    fmt, term = FloatFormat(1, bits - 2, "none"), cupy.empty(out.size, np.float32)
    of_one = int(np.log2(fmt.smallest)) + SHIFT_BIAS
    shifts = cupy.full_like(out, of_one, np.uint8, shape=(tiles(out.size),))
    for payload, numbers in zip(payloads, each, strict=True):
        words = cupy.asarray(payload)
        if trits:
            came, words = words, cupy.empty(packed_bytes(out.size, bits), np.uint8)
            unpack_trits(came, words)
        decode_integers_tiles(words, 0, shifts, fmt, term)
        _runs("multiply_runs", term, numbers, ends, term)
        add(out, term, out)
    divide(out, np.float32(len(payloads)), out)
    return largest_bits(out)


def put(out: Array, indices: Array, values: Array) -> None:
    """Write values to out[indices]: float32[n], uint32[m], float32[m]; no index twice."""
    check("out", out, np.float32)
    check("indices", indices, np.uint32)
    check("values", values, np.float32, indices.size)
    out[indices] = values


def outer(firsts: Array, seconds: Array, out: Array) -> int:
    """Write the sum of products of columns and rows; see ops.reference."""
    n, columns = out.shape
    check("out", out, np.float32)
    check("firsts", firsts, np.float32, len(firsts) * n)
    check("seconds", seconds, np.float32, len(firsts) * columns)
    sizes = (np.int64(n), np.int64(columns))
    count = np.int64(len(firsts))
    launch("outer", element_blocks(out.size), out, *sizes, firsts, seconds, count)
    return largest_bits(out)


def row_products(m: Array, rows: Array) -> Array:
    """Return the product of m with each of some rows: float32[n, k], [r, k] to [r, n]."""
    return _products("row_products", m, rows, 1, 0)


def column_products(m: Array, rows: Array) -> Array:
    """Return the product of m, transposed, with each of some rows: [n, k], [r, n] to [r, k]."""
    return _products("column_products", m, rows, 0, 1)


def _products(name: str, m: Array, rows: Array, summed: int, kept: int) -> Array:
    check("m", m, np.float32)
    check("rows", rows, np.float32, len(rows) * m.shape[summed])
    out = cupy.empty((len(rows), m.shape[kept]), np.float32)
    sizes = (np.int64(m.shape[0]), np.int64(m.shape[1]))
    threads = 4 * out.size if name == "row_products" else out.size
    launch(name, element_blocks(threads), m, *sizes, rows, np.int64(len(rows)), out)
    return out


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
    check("x", x, np.float32)
    _check_two_scales(words, scales, scale, x.size)
    amax, n = cupy.zeros((), np.uint32), np.int64(x.size)
    blocks = element_blocks(nvfp4_blocks(x.size))
    launch("amax_two_scales", blocks, x, n, amax)
    casts = cast_on_device(cast), cast_on_device(SCALE)
    arrays = (x, n, amax, words, scales, scale)
    launch("encode_two_scales", blocks, *casts, *key_numbers(key, offset), *arrays)


def decode_two_scales(
    words: Array, scales: Array, scale: Array, out: Array, more: Array | None = None
) -> Array:
    """Write the numbers of NVFP4, plus more if given, into out; see ops.two_scales.

    Returns how many are not finite, uint64[], on the GPU.
    """
    check("out", out, np.float32)
    _check_two_scales(words, scales, scale, out.size)
    if more is not None:
        check("more", more, np.float32, out.size)
    casts = cast_on_device(Cast(ELEMENT)), cast_on_device(SCALE)
    nonfinite = cupy.zeros((), np.uint64)
    arrays = (words, scales, scale, NULL if more is None else more, out, np.int64(out.size))
    launch("decode_two_scales", element_blocks(out.size), *casts, *arrays, nonfinite)
    return nonfinite


def _check_two_scales(words: Array, scales: Array, scale: Array, n: int) -> None:
    check_words("words", words, nvfp4_blocks(n) * NVFP4_BLOCK // 2)
    check("scales", scales, np.uint8, nvfp4_blocks(n))
    check("scale", scale, np.float32, 1)


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

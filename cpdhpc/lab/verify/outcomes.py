"""The results of array operations, for comparisons of their implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np

from ...formats import (
    INTEGERS,
    NVFP4,
    NVFP4_BLOCK,
    SHIFT_BIAS,
    TILE,
    TRIT_BYTES,
    Cast,
    FloatFormat,
    nvfp4_blocks,
    packed_bytes,
    shift_count,
    sum_bits,
)
from ...formats import tiles as tiles_of
from ...ops import cpu, to_host
from ...ops.payloads import Exact
from ...ops.products import Products

Array = np.ndarray[Any, np.dtype[Any]]
There = Callable[[Array], Any]  # copies a NumPy array to the device of the operations
Here = Callable[[Any], Array]  # and back
KEY = 7, 2**32 - 1
OFFSET = 2**40 + 2**32 - 2048  # its upper half changes among the values


class OnGpu:
    """ops.gpu for NumPy arrays: copies arguments to the GPU, and written ones back."""

    def __init__(self, gpu: ModuleType) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        function, gpu = getattr(self._gpu, name), self._gpu

        def call(*args: Any, **kwargs: Any) -> Any:
            moved: dict[int, Any] = {}

            def move(value: Any) -> Any:
                if not isinstance(value, np.ndarray):
                    return value
                return moved.setdefault(id(value), gpu.asarray(value))

            result = function(*map(move, args), **{k: move(v) for k, v in kwargs.items()})
            for value in (*args, *kwargs.values()):
                if isinstance(value, np.ndarray) and value.flags.writeable:
                    value[...] = to_host(moved[id(value)])
            return to_host(result) if hasattr(result, "get") else result

        return call


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
    """Return the results for tiles: x is encoded, and y is added to it.

    shared: values that share a shift; fit: whether it is chosen, else it is shift, a byte
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
    returned: list[Array] = [np.asarray(each, np.uint64) for each in (lost, found)]
    encoded = words, given, shifts, gone, chosen, alone, again, counts
    return [*encoded, out, total, inside, after, *returned]


def of_two_scales(ops: Any, x: Array, y: Array, rounding: Any) -> list[Array]:
    """Return the results for blocks of NVFP4: x is encoded, decoded, and added to y."""
    blocks = nvfp4_blocks(x.size)
    words, scales = np.zeros(blocks * NVFP4_BLOCK // 2, np.uint8), np.zeros(blocks, np.uint8)
    scale, out, total = np.zeros(1, np.float32), np.zeros_like(x), np.zeros_like(x)
    cast = Cast(NVFP4.element, rounding)
    ops.encode_two_scales(x, cast, words, scales, scale, key=KEY, offset=OFFSET)
    lost = [ops.decode_two_scales(words, scales, scale, out),
            ops.decode_two_scales(words, scales, scale, total, y)]  # fmt: skip
    return [words, scales, scale, out, total, *(np.asarray(each, np.uint64) for each in lost)]


def of_codes(ops: Any, x: Array, cast: Cast, shift: int = 2) -> list[Array]:
    """Return the results for codes without tiles, and for the largest values."""
    codes = ops.encode(x, cast, shift, KEY, OFFSET)
    packed = ops.pack(codes, cast.fmt.bits)
    back = ops.unpack(packed, cast.fmt.bits, x.size)
    return [codes, packed, back, ops.decode(codes, cast.fmt, shift), ops.amax_tiles(x)]


def of_sums(ops: Any, x: Array, fmt: FloatFormat, rounding: Any, shift: int = 127) -> list[Array]:
    """Return the results for exact sums of two and three contributions, and for ternary codes."""
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


def values(n: int, seed: int) -> Array:
    """Return values of many magnitudes, which show another order or rounding, and both zeros."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)).astype(np.float32)
    x[::11], x[5::17], x[3::19] = 0.0, -0.0, 1e-44
    return x


class NamedResults(list[tuple[Any, ...]]):
    """Results by name: arrays as bytes, and numbers; here: see Here."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self._here = here

    def add(self, name: str, *parts: Any) -> None:
        bits = (self._here(p).tobytes() if hasattr(p, "dtype") else p for p in parts)
        self.append((name, *bits))


@dataclass
class Passes:
    """The data of passes over float32[n], on the device of ops, and their results.

    x, kept, more: input; out, total: written, and read again by later passes
    ends: of runs of values, int64[runs]; each: a number for each run
    """

    ops: Any
    n: int
    there: There
    here: Here

    def __post_init__(self) -> None:
        self.x, self.kept, self.more = (self.there(values(self.n, seed)) for seed in range(3))
        self.out, self.total = (self.there(np.ones(self.n, np.float32)) for _ in range(2))
        self.ends = np.unique(np.append(np.arange(1, self.n, 300), [self.n])).astype(np.int64)
        self.each = np.abs(values(self.ends.size, 5)) + np.float32(0.5)
        self.found = NamedResults(self.here)


def of_passes(ops: Any, n: int, there: There, here: Here) -> NamedResults:
    """Return the results of passes over gradients by name: arrays as bytes, and numbers."""
    of = Passes(ops, n, there, here)
    for take in (_accumulated, _in_bins, _of_runs, _of_signs, _of_codes, _of_places):
        take(of)
    return of.found


def _accumulated(of: Passes) -> None:
    """Add what was kept, whole or the largest values or those above a threshold."""
    ops, x, kept, out, add = of.ops, of.x, of.kept, of.out, of.found.add
    more = {"more": of.more, "total": of.total}
    add("accumulate", ops.accumulate(x, kept, out), out)
    add("factor", ops.accumulate(x, kept, out, factor=0.9), out)
    add("more", ops.accumulate(x, kept, out, factor=0.9, **more), out, of.total)
    for k in (0, 1, of.n // 100, of.n // 3, of.n):
        add("largest", k, *ops.accumulate_largest(x, kept, out, k), out)
        bits = ops.accumulate_largest(x, kept, out, k, factor=0.5, **more)
        add("of more", k, *bits, out, of.total)
    for threshold, less in product((0.0, 0.5, 1e30, np.inf), (0.0, 0.5)):
        above = ops.accumulate_above(x, kept, out, threshold, less)
        add("above", threshold, less, *above, out)


def _in_bins(of: Passes) -> None:
    """Find the leaders of bins and chunks, and means of their codes."""
    ops, x, kept, out, total, add = of.ops, of.x, of.kept, of.out, of.total, of.found.add
    for bin_values in (1, 50, 500, 5000):
        highest, codes = ops.encode_bins(x, kept, out, 1.5, bin_values)
        add("leaders", bin_values, out, highest, codes)
        given = [codes, codes[:0], codes], [0.3, 7.0, 1e-3]
        for own, divisor in (([out], 2.0), ([out, of.more.copy()], 3.0), ([], 1.0)):
            bits, counts = ops.mean_bins(bin_values, *given, total, divisor, own, 1)
            add("mean of leaders", bin_values, divisor, bits, counts, total, *own)
        add("chunks", ops.chunk_leaders(x, bin_values))
        add("of sums", *ops.accumulate_chunks(x, kept, out, bin_values), out)


def _of_runs(of: Passes) -> None:
    """Scale runs of values, and sum them."""
    ops, x, out, ends, each, add = of.ops, of.x, of.out, of.ends, of.each, of.found.add
    add("divide all", ops.divide_all(x, 3.0, out), out)
    add("maxima", *ops.run_maxima(x, ends))
    add("multiply", ops.multiply_runs(x, each, ends, out), out)
    limits = np.where(np.arange(ends.size) % 3, np.float32(0.75), np.float32(np.inf))
    ops.divide_runs(x, each, ends, out, limits=limits)
    add("divide", out)
    starts = np.concatenate([[0], ends[:-1]]) if ends[0] else np.zeros(1, np.int64)
    for what in ("magnitude", "square"):
        add("sums", what, ops.run_sums(x, starts, what))
    add("square sum", ops.square_sum(x), ops.square_sum(x, 0.1))


def _of_signs(of: Passes) -> None:
    """Take the signs of matrices with the means of both, and products with vectors."""
    ops, n, add = of.ops, of.n, of.found.add
    for rows in (row for row in (1, 3, 7) if n >= 3 * row):
        shape = rows, n // rows
        m, r, rest = (a[: rows * shape[1]].reshape(shape) for a in (of.x, of.kept, of.out))
        signs, pairs, bits = ops.encode_signs(m, r, rest)
        add("signs", signs, pairs, bits, rest)
        add("without rest", *ops.encode_signs(m, r))
        add("without memory", *ops.encode_signs(m, None, rest), rest)
        both = [signs] * 2, [pairs, pairs[::-1].copy()]
        add("mean of signs", ops.decode_signs(*both, rest, 3.0))
        add("decoded", rest)
        firsts = of.there(values(2 * rows, 8)).reshape(2, rows)
        seconds = of.there(values(2 * shape[1], 9)).reshape(2, shape[1])
        add("outer", ops.outer(firsts, seconds, rest), rest)
        add("row sums", ops.row_sums(m))
        rows_of, columns_of = ops.row_products(m, seconds), ops.column_products(m, firsts)
        add("products", of.here(rows_of), of.here(columns_of))


def _of_codes(of: Passes) -> None:
    """Encode runs of values as integers with a scale each, and take the mean of two ranks."""
    ops, n, each, ends, add = of.ops, of.n, of.each, of.ends, of.found.add
    cut = np.where(np.arange(ends.size) % 3, each, np.float32(9e9))
    for name in ("ternary", "int4", "int16"):
        wire = Exact(Cast(INTEGERS[name], "stochastic"), trits=name == "ternary")
        fmt = wire.cast.fmt
        shift, payloads = SHIFT_BIAS + int(np.log2(fmt.smallest)), []
        for key in ((1, 2), (3, 4)):
            payload = of.there(np.zeros(wire.size_bytes(n), np.uint8))
            how: dict[str, Any] = {"trits": wire.trits, "key": key}
            ops.encode_runs(of.x, cut, ends, 0.9, wire.cast, shift, payload, **how)
            payloads.append(of.here(payload))
        add("codes", *payloads)
        both = ops.mean_runs(payloads, [each, each], ends, fmt.bits, of.out, trits=wire.trits)
        add("mean of codes", both, of.out)


def _of_places(of: Passes) -> None:
    """Take, put and average values at marked or listed places."""
    ops, n, there, out, add = of.ops, of.n, of.there, of.out, of.found.add
    for share in (0.0, 0.01, 0.5, 1.0):  # of places: none, few, many, all
        rng = np.random.default_rng(n)
        lie = [np.flatnonzero(rng.random(n) < share).astype(np.uint32) for _ in range(3)]
        many = [there(each) for each in lie]
        own = [there(values(each.size, 6 + i)) for i, each in enumerate(lie)]
        marks = there(cpu.pack_bitmap(lie[0], n))
        most, own_values = ops.accumulate_taking(of.x, of.kept, out, marks)
        add("taking", share, most, own_values, out)
        ops.put_marked(of.total, marks, own_values)
        add("put marked", share, of.total)
        add("taken", share, ops.take(out, many[1]), out)
        for some, divisor in ((3, 3.0), (3, 1.0), (3, 2.0), (1, 1.0), (0, 2.0)):
            bits = ops.mean_places(many[:some], own[:some], divisor, out)
            add("mean of places", share, some, divisor, bits, out)
    indices = there(np.arange(0, n, 3, dtype=np.uint32))
    ops.clear_all(out)
    ops.put(out, indices, there(values(indices.size, 4)))
    add("put", out)


def of_selection(ops: Any, x: Array, there: There, here: Here) -> NamedResults:
    """Return the results for the largest of float32[n], for indices, and for streams of bits."""
    n, found = x.size, NamedResults(here)

    given = there(x)
    for k in sorted({0, 1, n // 100, n // 3, n}):
        found.add("select_magnitude", k, ops.select_magnitude(given, k))
        if k:
            found.add("kth_magnitude", k, int(ops.kth_magnitude(given, k)))
    for threshold in (0.0, 0.5, 1e30):
        found.add("select_above", threshold, ops.select_above(given, threshold))
    marks = ops.mark_above(given, 0x3F000000)  # of 0.5
    found.add("mark_above", marks)
    found.add("count_bits", ops.count_bits(marks))
    places = ops.unpack_bitmap(marks)
    found.add("unpack_bitmap", places)
    found.add("pack_bitmap", ops.pack_bitmap(places, n))
    for low, shift, buckets in ((0, 20, 2048), (0x3F800000, 10, 1024), (0x3F800005, 0, 7)):
        found.add("count_digits", low, ops.count_digits(given, low, shift, buckets))
    picked, total = ops.gather(given, places), there(x)
    found.add("gather", picked)
    ops.scatter_add(total, places, picked)
    found.add("scatter_add", total)
    ops.clear(total, places)
    found.add("clear", total)
    some = here(places)
    widths = np.random.default_rng(0).integers(0, 33, tiles_of(some.size)).astype(np.uint8)
    words = ops.pack_stream(places, widths)
    found.add("pack_stream", words)
    found.add("unpack_stream", ops.unpack_stream(words, widths, some.size))
    return found


def of_products(ops: Any, how: Products, m: int, k: int, n: int) -> list[Array]:
    """Return products of matrices, float32[2, m, k] and float32[2, k, n]."""
    a, b = values(2 * m * k, 3).reshape(2, m, k), values(2 * k * n, 4).reshape(2, k, n)
    return [np.asarray(ops.matmul(a, b, how, KEY))]


def differing(ours: list[Array], theirs: list[Array], *, any_nan: bool = False) -> list[int]:
    """Return the indices of arrays that differ in a bit; any_nan: all NaN are equal."""
    return [
        index
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a.shape != b.shape or a.dtype != b.dtype or not _same(a, b, any_nan)
    ]


def _same(a: Array, b: Array, any_nan: bool) -> bool:
    if any_nan and a.dtype == np.float32:
        a, b = (np.where(np.isnan(each), np.float32(np.nan), each) for each in (a, b))
    return a.tobytes() == b.tobytes()

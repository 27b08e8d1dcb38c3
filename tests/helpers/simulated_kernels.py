"""Stand-ins of the CUDA kernels: they check arguments against cuda_loops.cu and use the CPU's."""

import re
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpdhpc import _cpu
from cpdhpc.formats import Cast
from cpdhpc.ops import reference, two_scales
from cpdhpc.ops.cpu import CAST_NUMBERS

POINTERS = {  # C type -> the dtypes that an argument may have, and its alignment
    "float": (("float32",), 4),
    "u8": (("uint8",), 1),
    "u32": (("uint8", "uint32"), 4),
    "u64": (("uint64",), 8),
    "int": (("int32",), 4),
    "i64": (("int64",), 8),
    "double": (("float64",), 8),
    "char": (("uint8",), 1),
}
SCALARS = {
    "int": np.int32, "u32": np.uint32, "u64": np.uint64, "i64": np.int64, "float": np.float32,
    "double": np.float64,
}  # fmt: skip
NULL = ("counts", "out", "nonfinite", "more", "total")  # pointers that may be missing
ADDRESSES = "char"  # what pointers may have that are given as numbers
UNSIGNED = (3, 4, 5, 6, 7, 11, 12, 13)  # of the numbers of a cast, as load_cast has them


def signature(source: str, name: str) -> list[tuple[str, bool, str]]:
    """Return (C type, whether a pointer, name) of a kernel's parameters."""
    found = re.search(rf"__global__ void {name}\(([^)]*)\)", source)
    assert found, f"cuda_loops.cu has no kernel {name}"
    parameters = [re.sub(r"\bconst\b", "", each).split() for each in found[1].split(",")]
    return [(kind.strip("*"), "*" in kind, word) for kind, word in parameters]


def arguments(source: str, name: str, args: tuple[Any, ...]) -> SimpleNamespace:
    """Return the arguments by the names of the kernel's parameters, arrays as NumPy's."""
    parameters = signature(source, name)
    assert len(parameters) == len(args), f"{name}: {len(args)} arguments"
    found = SimpleNamespace()
    for (kind, pointer, word), value in zip(parameters, args, strict=True):
        where = f"{name}: {word}"
        if not pointer:
            assert type(value) is SCALARS[kind], f"{where} is {type(value)}"
            setattr(found, word, value.item())
        elif isinstance(value, np.uint64) and kind == ADDRESSES:
            setattr(found, word, value.item())
        elif isinstance(value, np.uint64):
            assert value == 0 and word in NULL, where
            setattr(found, word, None)
        else:
            dtypes, alignment = POINTERS[kind]
            assert value.dtype.name in dtypes and value.data.ptr % alignment == 0, where
            setattr(found, word, value.memory_view)
    return found


def run(name: str, a: SimpleNamespace) -> None:
    """Do what a kernel does."""
    if hasattr(a, "cast_numbers"):
        *plain, size = a.cast_numbers[:CAST_NUMBERS].tolist()
        table = a.cast_numbers[CAST_NUMBERS:] if size else None
        numbers = [v & 0xFFFFFFFF if i in UNSIGNED else v for i, v in enumerate(plain)]
        a.cast = (*numbers, 0 if table is None else table.ctypes.data, table)
    if hasattr(a, "key_low"):
        a.key = (a.key_low, a.key_high)
    if hasattr(a, "blocks"):  # what the CPU's kernels find out by themselves
        tiles = a.words.size // 128 // (1 + sum(a.cast[:2]))
        assert a.shifts.size == tiles * (a.blocks * 32 or 1), a.blocks
    a.extra = () if getattr(a, "counts", None) is None else (a.counts,)
    BODIES[name](a)


def _decode_tiles(a: SimpleNamespace) -> None:
    a.nonfinite += np.uint64(_cpu.decode_tiles(1, a.cast, a.words, a.shifts, a.out))


def _decode_integers_tiles(a: SimpleNamespace) -> None:
    a.nonfinite += np.uint64(
        _cpu.decode_integers_tiles(1, a.cast, a.words, a.bits, a.shifts, a.out)
    )


def _encode_tiles(a: SimpleNamespace) -> None:
    _cpu.encode_tiles(
        1, a.cast, bool(a.fit), a.key, a.offset, a.x[: a.n], a.words, a.shifts, *a.extra
    )


def _hop(a: SimpleNamespace) -> None:
    lost = _cpu.decode_add_encode_tiles(
        1, a.cast, bool(a.fit), a.key, a.offset, a.words_in, a.shifts_in, a.x, a.words, a.shifts,
        a.out, a.counts,
    )  # fmt: skip
    if a.out is not None:
        a.nonfinite += np.uint64(lost)


def _add_encode_integers(a: SimpleNamespace) -> None:
    _cpu.add_encode_integers_tiles(
        1, a.cast, a.key, a.offset, a.words_in, a.bits_in, a.shifts, a.x, a.words, a.bits, *a.extra
    )


def _count_digits(a: SimpleNamespace) -> None:
    counts = np.empty(a.buckets, np.uint32)
    _cpu.count_digits(1, a.low, a.shift, a.x[: a.n], counts)
    a.counts += counts


def _stream(kernel: Callable[..., object], a: SimpleNamespace, *arrays: np.ndarray) -> None:
    assert a.starts.tolist() == [32 * sum(a.widths[:t].tolist()) for t in range(a.widths.size)]
    kernel(*arrays)


def _sum_of(a: SimpleNamespace, start: int, stop: int) -> np.float64:
    x = a.x[start:stop].astype(np.float64)
    is_below = x < 0
    parts = np.where(is_below, 0, x), np.where(is_below, x, 0)
    terms = (x, np.abs(x), np.square(x - a.center), *parts)[a.of]
    return terms.sum() if x.size else np.float64(-0.0)


def _leaf_sums(a: SimpleNamespace) -> None:
    for leaf, (start, stop) in enumerate(zip(a.starts, a.stops, strict=True)):
        assert stop - start <= 128  # NumPy does not halve these
        a.sums[leaf] = _sum_of(a, start, stop)


def _tree_sums(a: SimpleNamespace) -> None:
    """The whole sum of a part in place of its first block's."""
    assert a.ends[-1] == a.count == a.sums.size and a.ends.size == a.parts
    firsts = np.append(0, a.ends[:-1])
    for first, start, stop in zip(firsts, a.starts, a.stops, strict=True):
        a.sums[first] = _sum_of(a, start, stop)


def _join_sums(a: SimpleNamespace) -> None:
    a.totals[...] = a.sums[np.append(0, a.ends[:-1])]


def _run_maxima(a: SimpleNamespace) -> None:
    magnitudes = a.x[: a.n].view(np.uint32) & 0x7FFFFFFF
    assert not a.most.any() and a.ends[-1] == a.n
    for run, (start, stop) in enumerate(pairwise([0, *a.ends])):
        a.most[run] = magnitudes[start:stop].max(initial=0)


def _chunk_leaders(a: SimpleNamespace) -> None:
    assert a.places.size == a.chunks == -(-a.n // a.chunk_values)
    a.places[...] = reference.chunk_leaders(a.x[: a.n], a.chunk_values)


def _bin_leaders(a: SimpleNamespace) -> None:
    given = a.x[: a.n], a.kept[: a.n], a.sum[: a.n]
    highest, codes = reference.encode_bins(*given, a.rate, a.bin_values)
    found, _ = reference.unpack_bins(a.bin_values, codes, 1.0, 0)
    a.highest[...] = highest.view(np.uint32)
    np.bitwise_or.at(a.words, found // 32, np.uint32(1) << (found % 32).astype(np.uint32))


def _by_sign(a: SimpleNamespace, is_above: np.ndarray) -> np.ndarray:
    rows = np.arange(a.n) // a.columns
    return a.pairs.reshape(-1, 2)[rows, is_above.reshape(-1)[: a.n].astype(int)]


def _pack_signs(a: SimpleNamespace) -> None:
    total = a.x.reshape(-1)[: a.n]
    if a.more is not None:
        a.total.reshape(-1)[: a.n] = total = total + a.more.reshape(-1)[: a.n]
    assert not a.counts.any() and a.counts.size * a.columns == a.n
    above = ~(total < 0)
    a.signs[...] = np.packbits(above)
    a.counts[...] = above.reshape(-1, a.columns).sum(1)
    a.amax[...] = reference.amax_tiles(total)


def _add_signs(a: SimpleNamespace) -> None:
    out = a.out.reshape(-1)
    out += _by_sign(a, np.unpackbits(a.signs))


def _subtract_signs(a: SimpleNamespace) -> None:
    x = a.x.reshape(-1)
    np.subtract(x, _by_sign(a, ~(x < 0)), out=a.out.reshape(-1))


def _of_runs(a: SimpleNamespace) -> np.ndarray:
    assert a.ends.size == a.each.size == a.runs and a.ends[-1] >= a.n
    return a.each[np.searchsorted(a.ends, np.arange(a.n), side="right")]


def _accumulate(a: SimpleNamespace) -> None:
    more = None if a.more is None else a.more[: a.n]
    total = None if a.total is None else a.total[: a.n]
    reference.accumulate(
        a.x[: a.n], a.kept[: a.n], a.sum[: a.n], factor=a.factor, more=more, total=total
    )
    a.amax[:] = reference.amax_tiles(a.sum[: a.n] if total is None else total)


def _cut_runs(a: SimpleNamespace) -> None:
    limit = a.limits[np.searchsorted(a.ends, np.arange(a.n), side="right")].view(np.float32)
    np.copysign(np.minimum(np.abs(a.x), limit), a.x, out=a.out)


def _outer(a: SimpleNamespace) -> None:
    a.total[...] = 0
    for column, row in zip(a.firsts, a.seconds, strict=True):
        a.total += column[:, None] * row


def _matmul(a: SimpleNamespace) -> None:
    numbers = [
        v & 0xFFFFFFFF if i < 33 and i % 11 > 4 else v for i, v in enumerate(a.how_numbers.tolist())
    ]
    parts = [tuple(numbers[i : i + 11]) for i in range(0, 37, 11)]
    _cpu.matmul(1, *parts, a.key, a.batch, a.m, a.k, a.n, a.a, a.b, a.out)


def _at(address: int, dtype: str, counts: list[int], strides: list[int]) -> np.ndarray:
    """Return the units at an address."""
    interface = {
        "shape": tuple(counts), "strides": tuple(strides), "typestr": dtype, "version": 3,
        "data": (address, False),
    }  # fmt: skip
    return np.asarray(SimpleNamespace(__array_interface__=interface))


MOVED = ["u1", "u2", "u4", "u8", "V16", "u1", "u2", "u4", "u8", "f4", "f8", "f2", ""]


def _move_boxes(a: SimpleNamespace) -> None:
    """Box by box, from what the table says."""
    heads = a.table[: (a.boxes + 1) * 16].reshape(-1, 16)
    terms = a.table[heads.size :]
    bases = (a.x, a.out, a.memory.ctypes.data, a.table.ctypes.data)
    assert heads[-1, 0] == a.units

    def units(base: int, offset: int, counts: list[int], strides: list[int]) -> np.ndarray:
        dtype = "<" + (MOVED[a.kind] or "u2") if a.kind != 4 else "|V16"
        return _at(bases[base % 4] + offset, dtype, counts, strides)

    for box, following in pairwise(heads.tolist()):
        target, counts = units(*box[2:4], box[4:10], box[10:]), box[4:10]
        partial = list[np.ndarray]()
        for base, offset, *strides in terms[8 * box[1] : 8 * following[1]].reshape(-1, 8).tolist():
            value = units(base, offset, counts, strides)
            if partial and base < 4:
                partial[-1] = _sum(a.kind, partial[-1], value)
            else:
                partial.append(value)
        target[...] = reduce(lambda x, y: _sum(a.kind, x, y), partial)


def _sum(kind: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if MOVED[kind]:
            return x + y
        wide = [(each.astype("u4") << 16).view("f4") for each in (x, y)]
        bits = (wide[0] + wide[1]).view("u4")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")


def _encode_two_scales(a: SimpleNamespace) -> None:
    blocks = np.pad(a.x[: a.n], (0, -a.n % 16)).reshape(-1, 16)
    bits = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(1, initial=0)
    assert int(a.amax) == int(bits[bits < 0x7F800000].max(initial=0))
    formats = {0: "nearest", 1: "zero", 2: "stochastic", 3: "up", 4: "down", 5: "odd"}
    cast = Cast(two_scales.ELEMENT, formats[a.cast[2]])  # type: ignore[arg-type]
    reference.encode_two_scales(
        a.x[: a.n], cast, a.words, a.scales, a.scale, key=a.key, offset=a.offset
    )


def _decode_two_scales(a: SimpleNamespace) -> None:
    more = None if a.more is None else a.more[: a.n]
    lost = reference.decode_two_scales(a.words, a.scales, a.scale, a.out[: a.n], more)
    a.nonfinite += np.uint64(lost)


def _amax_two_scales(a: SimpleNamespace) -> None:
    blocks = np.pad(a.x[: a.n], (0, -a.n % 16)).reshape(-1, 16)
    bits = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(1, initial=0)
    a.amax[...] = bits[bits < 0x7F800000].max(initial=0)


BODIES: dict[str, Callable[[SimpleNamespace], object]] = {
    "encode": lambda a: _cpu.encode(1, a.cast, a.k, a.key, a.offset, a.x, a.codes),
    "decode": lambda a: _cpu.decode(1, a.cast, a.k, a.codes, a.out),
    "matmul": _matmul,
    "pack": lambda a: _cpu.pack(1, a.bits, a.codes, a.words),
    "unpack": lambda a: _cpu.unpack(1, a.bits, a.words, a.codes),
    "amax_tiles": lambda a: _cpu.amax_tiles(1, a.x, a.amax),
    "encode_tiles": _encode_tiles,
    "decode_tiles": _decode_tiles,
    "decode_add_tiles": lambda a: _cpu.decode_add_tiles(1, a.cast, a.words, a.shifts, a.x, a.out),
    "decode_add_encode_tiles": _hop,
    "add_integers_tiles": lambda a: _cpu.add_integers_tiles(
        1, a.cast, a.a, a.bits_a, a.b, a.bits_b, a.words, a.bits
    ),
    "add_encode_integers_tiles": _add_encode_integers,
    "decode_integers_tiles": _decode_integers_tiles,
    "pack_trits": lambda a: _cpu.pack_trits(1, a.words, a.trits),
    "unpack_trits": lambda a: _cpu.unpack_trits(1, a.trits, a.words),
    "mark_above": lambda a: _cpu.mark_above(1, a.bits, a.x[: a.n], a.words),
    "count_bits": lambda a: _cpu.count_bits(1, a.words[: a.n], a.counts),
    "unpack_bitmap": lambda a: _cpu.unpack_bitmap(1, a.words[: a.n], a.starts, a.places[: a.end]),
    "pack_bitmap": lambda a: _cpu.pack_bitmap(a.indices[: a.m], a.words[: a.n]),
    "pack_stream": lambda a: _stream(_cpu.pack_stream, a, a.codes[: a.n], a.widths, a.words),
    "unpack_stream": lambda a: _stream(_cpu.unpack_stream, a, a.words, a.widths, a.codes[: a.n]),
    "count_digits": _count_digits,
    "gather": lambda a: _cpu.gather(1, a.x[: a.n], a.indices[: a.m], a.values),
    "scatter_add": lambda a: _cpu.scatter_add(1, a.total[: a.n], a.indices[: a.m], a.values),
    "clear": lambda a: _cpu.clear(1, a.x[: a.n], a.indices[: a.m]),
    "add_floats": lambda a: np.add(a.a, a.b, out=a.out),
    "subtract_floats": lambda a: np.subtract(a.a, a.b, out=a.out),
    "multiply_floats": lambda a: np.multiply(a.a, np.float32(a.b), out=a.out),
    "divide_floats": lambda a: np.divide(a.a, np.float32(a.b), out=a.out),
    "leaf_sums": _leaf_sums,
    "tree_sums": _tree_sums,
    "join_sums": _join_sums,
    "run_maxima": _run_maxima,
    "chunk_leaders": _chunk_leaders,
    "bin_leaders": _bin_leaders,
    "pack_signs": _pack_signs,
    "add_signs": _add_signs,
    "subtract_signs": _subtract_signs,
    "multiply_runs": lambda a: np.multiply(a.x, _of_runs(a), out=a.out),
    "divide_runs": lambda a: np.divide(a.x, _of_runs(a), out=a.out),
    "row_products": lambda a: np.einsum("ij,rj->ri", a.m, a.rows, out=a.out),
    "column_products": lambda a: np.einsum("ij,ri->rj", a.m, a.rows, out=a.out),
    "outer": _outer,
    "accumulate": _accumulate,
    "cut_runs": _cut_runs,
    "move_boxes": _move_boxes,
    "amax_two_scales": _amax_two_scales,
    "encode_two_scales": _encode_two_scales,
    "decode_two_scales": _decode_two_scales,
}

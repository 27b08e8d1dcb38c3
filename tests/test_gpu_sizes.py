"""Kernels in arrays of more than 2**32 values: one block of a launch, in memory that is not there.

A tile or value beyond 2**32 gives what the same one gives at the beginning of a small array, and
nothing is written where its number would be cut to 32 bits. Memory is taken page by page, when it
is touched (MAP_NORESERVE), so that an array of a terabyte costs what one block reads and writes.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import compiled_kernels
import numpy as np
import pytest

from cpdhpc.formats import SHIFT_BIAS, Cast, parse_format
from cpdhpc.lab.verify.outcomes import OnGpu
from cpdhpc.ops import cpu
from cpdhpc.ops.cpu import CAST_NUMBERS, cast_numbers, product_numbers
from cpdhpc.ops.cuda_source import ARITHMETIC, KERNELS, cuda_source
from cpdhpc.ops.products import FLOAT32, Products

pytestmark = pytest.mark.gpu
NORESERVE = 0x4000
THREADS, WARPS = 128, 4
TILE, WORDS, BITS = 1024, 32, 8  # values of a tile, words of 32 bits of each bit of a code
BEYOND = (1 << 24) + 3  # a tile whose values and words lie beyond 2**32
PLACE = (1 << 32) + 77  # a value


class Array(NamedTuple):
    """A kernel's array: how many for each tile or value; of what; whether it is written."""

    each: int
    dtype: str = "f4"
    written: bool = False


FLOATS, CODES = Array(TILE), Array(TILE, "u4")
PACKED = Array(WORDS * BITS, "u4")
OUT, OUT_CODES, OUT_PACKED = (
    Array(TILE, "f4", True),
    Array(TILE, "u4", True),
    PACKED._replace(written=True),
)
SHIFT, OUT_SHIFT = Array(1, "u1"), Array(1, "u1", True)
AMAX, COUNTS = Array(1, "u4", True), Array(3, "u4", True)
ONE, OUT_ONE, OUT_U4 = Array(1), Array(1, "f4", True), Array(1, "u4", True)
CODEC = {"blocks": 0, "fit": 1, "key_low": 1, "key_high": 2, "offset": 0}
RUNS = {"runs": 1}  # one run, of all values
OF_TILES: dict[str, dict[str, Any]] = {
    "amax_tiles": {"x": FLOATS, "amax": AMAX},
    "pack": {"bits": BITS, "codes": CODES, "words": OUT_PACKED},
    "unpack": {"bits": BITS, "words": PACKED, "codes": OUT_CODES},
    "encode_tiles": {
        **CODEC, "x": FLOATS, "words": OUT_PACKED, "shifts": OUT_SHIFT, "counts": COUNTS,
    },
    "decode_tiles": {"blocks": 0, "words": PACKED, "shifts": SHIFT, "out": OUT, "nonfinite": None},
    "decode_add_tiles": {"blocks": 0, "words": PACKED, "shifts": SHIFT, "x": FLOATS, "out": OUT},
    "decode_add_encode_tiles": {
        **CODEC, "words_in": PACKED, "shifts_in": SHIFT, "x": FLOATS, "words": OUT_PACKED,
        "shifts": OUT_SHIFT, "out": OUT, "nonfinite": None, "counts": COUNTS,
    },
    "add_integers_tiles": {
        "a": PACKED, "bits_a": 8, "b": PACKED, "bits_b": 8, "words": OUT_PACKED, "bits": 8,
    },
    "add_encode_integers_tiles": {
        "key_low": 1, "key_high": 2, "offset": 0, "words_in": PACKED, "bits_in": 8,
        "shifts": SHIFT, "x": FLOATS, "words": OUT_PACKED, "bits": 8, "counts": COUNTS,
    },
    "decode_integers_tiles": {
        "words": PACKED, "bits": 8, "shifts": SHIFT, "out": OUT, "nonfinite": None,
    },
    "pack_trits": {"words": Array(2 * WORDS, "u4"), "trits": Array(205, "u1", True)},
    "unpack_trits": {"trits": Array(205, "u1"), "words": Array(2 * WORDS, "u4", True)},
    "mark_above": {"bits": 0x3F800000, "x": FLOATS, "words": Array(WORDS, "u4", True)},
    "accumulate": {
        "x": FLOATS, "kept": FLOATS, "factor": 0.5, "more": FLOATS, "sum": OUT, "total": OUT,
        "amax": AMAX,
    },
    "multiply_runs": {"x": FLOATS, "each": None, "ends": None, **RUNS, "out": OUT},
    "divide_runs": {"x": FLOATS, "each": None, "ends": None, **RUNS, "out": OUT},
    "cut_runs": {"x": FLOATS, "limits": None, "ends": None, **RUNS, "out": OUT},
}  # fmt: skip
OF_VALUES: dict[str, dict[str, Any]] = {
    "encode": {"k": 0, "key_low": 1, "key_high": 2, "offset": 0, "x": ONE, "codes": OUT_U4},
    "decode": {"k": 0, "codes": Array(1, "u4"), "out": OUT_ONE},
    **{name: {"a": ONE, "b": ONE, "out": OUT_ONE} for name in ("add_floats", "subtract_floats")},
    **{name: {"a": ONE, "b": 3.0, "out": OUT_ONE} for name in ("multiply_floats", "divide_floats")},
    "gather": {"x": None, "indices": Array(1, "u4"), "values": OUT_ONE},
}
ELSEWHERE = {  # why a kernel is not in the tables
    "amax_two_scales": "below", "encode_two_scales": "below", "decode_two_scales": "below",
    "tree_sums": "starts are 64 bits that it is given",
    "join_sums": "of the sums of tree_sums, which are few",
    "run_maxima": "parts of runs are test_gpu_methods.py's, below 2**32",
    "chunk_leaders": "below",
    "bin_leaders": "test_gpu_methods.py, below 2**32",
    "pack_signs": "below",
    "add_signs": "below",
    "subtract_signs": "below",
    "matmul": "below",
    "clear": "below", "scatter_add": "below", "pack_bitmap": "below",
    "count_bits": "below", "unpack_bitmap": "places are 32 bits: test_bitmaps below",
    "count_digits": "writes one table", "leaf_sums": "starts are 64 bits that it is given",
    "pack_stream": "below", "unpack_stream": "below", "move_boxes": "test_mpi_darray_gpu.py",
    "row_products": "below", "column_products": "below", "outer": "below",
}  # fmt: skip


def sparse(size: int, dtype: str) -> np.ndarray:
    """Return zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    kept = mmap.mmap(-1, max(1, size * np.dtype(dtype).itemsize), flags=flags)
    return np.frombuffer(kept, dtype)[:size]


@pytest.fixture
def kernels() -> Any:
    """The kernels compiled for the CPU, of which one block is run."""
    emulated = sys.modules.get("emulated_gpu")
    if emulated is None:
        pytest.skip("runs single blocks: needs -p emulated_gpu")
    library = emulated.compiled_of(cuda_source())
    library.only_block.argtypes = (ctypes.c_long,)
    yield library
    library.only_block(-1)


def run(kernels: Any, name: str, given: dict[str, Any], grid: int, block: int) -> None:
    """Run one block of a launch, arguments by name."""
    cells = []
    for kind, pointer, word in compiled_kernels.signature(cuda_source(), name):
        value = given[word]
        if pointer:
            cells.append(np.array(0 if value is None else value.ctypes.data, np.uint64))
        else:
            cells.append(np.array(compiled_kernels.SCALARS[kind](value)))
    addresses = (ctypes.c_void_p * len(cells))(*(each.ctypes.data for each in cells))
    call = getattr(kernels, f"run_{name}")
    call.restype = ctypes.c_char_p
    kernels.only_block(block)
    trouble = call(ctypes.c_uint(grid), addresses)
    assert trouble is None, trouble.decode()


def numbers_of_cast(name: str) -> np.ndarray:
    *plain, _ = cast_numbers(Cast(parse_format(name)))[:CAST_NUMBERS]
    return np.array([*plain, 0], np.int64).astype(np.int32)


def filled(array: Array, size: int, place: int, draw: np.random.Generator) -> np.ndarray:
    """Return an array with numbers at one place, of what a tile or value has there."""
    found = sparse(size * array.each, array.dtype)
    if not array.written:
        here = slice(place * array.each, (place + 1) * array.each)
        if array.dtype == "f4":
            found[here] = draw.normal(size=array.each)
        elif array.dtype == "u1":
            found[here] = draw.integers(SHIFT_BIAS - 3, SHIFT_BIAS + 3, array.each)
        else:
            found[here] = draw.integers(0, 1 << 7, (4, array.each)).T @ (1, 256, 65536, 1 << 24)
    return found


def results(
    kernels: Any, name: str, row: dict[str, Any], place: int, values: int, more: int = 0
) -> Any:
    """Return what a kernel writes at a place, and at the place whose number is cut to 32 bits.

    more: tiles or values behind the place
    """
    draw, count = np.random.default_rng(7), place + 1 + more
    given: dict[str, Any] = {
        "cast_numbers": numbers_of_cast("e4m3"),
        "tiles": count,
        # Many more leave 396 in the lower 32 bits, less than a tile.
        "n": count * values - (3700 if more > 1 else 5 if values > 1 and not more else 0),
        "m": count,
    }
    arrays = {}
    for word, what in row.items():
        given[word] = filled(what, count, place, draw) if isinstance(what, Array) else what
        if isinstance(what, Array) and what.written:
            arrays[word] = what
    if "ends" in row:
        given["ends"] = np.array([given["n"]])
        each = "each" if "each" in row else "limits"
        given[each] = np.array([3.0], "f4") if each == "each" else np.array([0x3F000000], "u4")
    if name == "gather":
        given["x"], given["n"] = draw.normal(size=1 << 7).astype("f4"), 1 << 7
        given["indices"][place] %= 1 << 7
    if "nonfinite" in row:
        given["nonfinite"] = np.zeros(1, np.uint64)
    per_block = WARPS if values > 1 else THREADS
    run(kernels, name, given, -(-count // per_block), place // per_block)

    def at(what: Array, array: np.ndarray, value: int) -> bytes:
        start = value // values * what.each if values > 1 else value
        return array[start : start + what.each].tobytes()

    here = {w: at(a, given[w], place * values) for w, a in arrays.items()}
    low = place * values % (1 << 32)
    wrapped = {w: at(a, given[w], low) for w, a in arrays.items()} if place else {}
    return here, wrapped


@pytest.mark.parametrize("name", [*OF_TILES, *OF_VALUES])
def test_beyond_2_to_the_32_as_at_the_beginning(kernels: Any, name: str) -> None:
    row = OF_TILES.get(name) or OF_VALUES[name]
    place, values = (BEYOND, TILE) if name in OF_TILES else (PLACE, 1)
    expected, _ = results(kernels, name, row, 0, values)
    found, wrapped = results(kernels, name, row, place, values)
    assert found == expected
    assert any(map(any, expected.values())), "the kernel writes nothing"
    whole, _ = results(kernels, name, row, 0, values, 1)
    assert results(kernels, name, row, 0, values, place)[0] == whole, "what is left is cut"
    for word, bytes_there in wrapped.items():
        assert not any(bytes_there), f"{word}: written where the number is cut to 32 bits"


def test_every_kernel_is_looked_at() -> None:
    assert sorted([*OF_TILES, *OF_VALUES, *ELSEWHERE]) == sorted([*KERNELS, *ARITHMETIC])


def test_outputs_of_products_beyond_2_to_the_32(kernels: Any) -> None:
    """Blocks of outputs have numbers beyond 2**31, and batches of matrices begin beyond 2**32."""
    plain = Products(Cast(FLOAT32), Cast(FLOAT32))
    parts = product_numbers(plain, plain.arithmetic(FLOAT32, FLOAT32))
    how = np.array([number for part in parts for number in part], np.int64).astype(np.int32)
    draw = np.random.default_rng(3)
    for m, n, batch, each, row in (
        (1 << 35, 16, 1, 0, (1 << 34) + 9),
        (8, 16, 1 << 30, (1 << 29) + 5, 3),
    ):
        a, b = sparse(batch * m * 2, "f4"), sparse(batch * 2 * n, "f4")
        out = sparse(batch * m * n, "f4")
        at = each * m + row
        a[2 * at : 2 * at + 2] = draw.normal(size=2)
        b[each * 2 * n : (each + 1) * 2 * n] = draw.normal(size=2 * n)
        given = {"how_numbers": how, "key_low": 0, "key_high": 0, "a": a, "b": b, "batch": batch}
        given |= {"m": m, "k": 2, "n": n, "out": out}
        tile = each * (m // 8) + row // 8
        run(kernels, "matmul", given, (1 << 32) - 1, tile)
        matrix = b[each * 2 * n : (each + 1) * 2 * n].reshape(2, n)
        x = a[2 * at : 2 * at + 2]
        expected = (x[:1] * matrix[0]) + (x[1:] * matrix[1])
        assert out[at * n : (at + 1) * n].tobytes() == expected.tobytes() != bytes(4 * n)


def test_places_given_by_indices(kernels: Any) -> None:
    """The last value of 2**32 is read and written, and the one after it is not."""
    size = 1 << 32
    for count in (size - 1, size):
        x = sparse(size + 8, "f4")
        x[size - 1] = 3.0
        indices, values = sparse(PLACE + 1, "u4"), sparse(PLACE + 1, "f4")
        indices[PLACE], values[PLACE] = size - 1, 2.0
        grid, block = PLACE // THREADS + 1, PLACE // THREADS
        given = {
            "total": x,
            "x": x,
            "n": count,
            "indices": indices,
            "m": PLACE + 1,
            "values": values,
        }
        inside = count == size
        # Others of the block add nothing to x[0]: their values are zero.
        run(kernels, "scatter_add", given, grid, block)
        assert x[size - 1] == (5.0 if inside else 3.0)
        words = sparse(size // 32 + 8, "u4")
        run(kernels, "pack_bitmap", given | {"words": words, "n": count // 32}, grid, block)
        assert words[size // 32 - 1] == (1 << 31 if inside else 0)
        run(kernels, "clear", given, grid, block)
        assert x[size - 1] == (0.0 if inside else 3.0)


@pytest.mark.parametrize("size", [5, 32, 1000])
def test_an_index_at_the_end_is_outside(cupy: Any, size: int) -> None:
    """Nothing is written behind an array, whose neighbours are not what is expected else."""
    from cpdhpc.ops import gpu

    room = cupy.asarray(np.arange(size + 3, dtype=np.float32) + 1)
    x, before = room[:size], room.get()
    outside = cupy.asarray(np.array([size, size + 1, 2**32 - 1], np.uint32))
    values = cupy.asarray(np.full(3, 9, np.float32))
    gpu.scatter_add(x, outside, values)
    gpu.clear(x, outside)
    assert room.get().tobytes() == before.tobytes()
    assert not gpu.gather(x, outside).get().any()
    words = cupy.asarray(np.zeros(-(-size // 32) + 1, np.uint32))
    assert (
        not gpu.pack_bitmap(cupy.asarray(np.array([32 * words.size], np.uint32)), size).get().any()
    )


N = 40 * TILE + 5  # for which two blocks are too few
X, Y = np.random.default_rng(5).normal(size=(2, N)).astype(np.float32)
PLACES = np.arange(1, N, 2, dtype=np.uint32)
STREAM = np.random.default_rng(7).integers(0, 17, N).astype(np.uint32)
ENDS, EACH = np.array([N // 3, N]), np.array([2, 3], np.float32)
CALLS: dict[str, Callable[[Any], Any]] = {
    "pack": lambda ops: ops.pack(STREAM, 5),
    "unpack": lambda ops: ops.unpack(cpu.pack(STREAM, 5), 5, N),
    "encode": lambda ops: ops.encode(X, Cast(parse_format("e4m3"))),
    "decode": lambda ops: ops.decode(STREAM, parse_format("e4m3")),
    "amax_tiles": lambda ops: ops.amax_tiles(X),
    "add": lambda ops: ops.add(X, Y),
    "subtract": lambda ops: ops.subtract(X, Y),
    "multiply": lambda ops: ops.multiply(X, np.float32(3)),
    "divide": lambda ops: ops.divide(X, np.float32(3)),
    "gather": lambda ops: ops.gather(X, PLACES),
    "scatter_add": lambda ops: written(ops.scatter_add, PLACES, Y[: PLACES.size]),
    "clear": lambda ops: written(ops.clear, PLACES),
    "select_above": lambda ops: ops.select_above(X, 0.5),
    "pack_bitmap": lambda ops: ops.pack_bitmap(PLACES, N),
    "count_digits": lambda ops: ops.count_digits(X, 0, 20, 2048),
    "multiply_runs": lambda ops: written(lambda out: ops.multiply_runs(X, EACH, ENDS, out)),
    "divide_runs": lambda ops: written(lambda out: ops.divide_runs(X, EACH, ENDS, out)),
    "accumulate": lambda ops: written(lambda out: ops.accumulate(X, Y, out)),
    "row_sums": lambda ops: ops.row_sums(X.reshape(5, -1)),
    "row_products": lambda ops: ops.row_products(X[:40000].reshape(4000, 10), Y[:10][None]),
    "column_products": lambda ops: ops.column_products(X[:40000].reshape(10, 4000), Y[:10][None]),
    "matmul": lambda ops: ops.matmul(X[None, :999, None], Y[None, None, :99], FLOATS_ALONE),
}
FLOATS_ALONE = Products(Cast(FLOAT32), Cast(FLOAT32))


def written(call: Callable[..., Any], *arguments: Any) -> np.ndarray:
    """Return what a call writes into a copy of X."""
    out = X.copy()
    call(out, *arguments)
    return out


@pytest.mark.parametrize("name", CALLS)
def test_two_blocks_do_all_the_work(cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As 65,535 do that of arrays too large for tests."""
    from cpdhpc.ops import gpu, gpu_runtime

    monkeypatch.setattr(gpu_runtime, "_MAX_BLOCKS", 2)
    found, expected = CALLS[name](OnGpu(gpu)), CALLS[name](cpu)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def test_bitmaps_and_streams_beyond_2_to_the_32(kernels: Any) -> None:
    """Words of bits, and codes in streams whose tiles begin where they are told to."""
    tile = (1 << 27) + 1  # of 32 words: its words lie beyond 2**32
    words, counts = sparse((tile + 1) * 32, "u4"), sparse(tile + 1, "u4")
    words[tile * 32 : tile * 32 + 32] = np.arange(32, dtype="u4")
    given = {"words": words, "n": words.size, "counts": counts}
    run(kernels, "count_bits", given, tile // WARPS + 1, tile // WARPS)
    assert counts[tile] == 80 and not counts[: 1 << 12].any()

    bits, starts = sparse(32, "u4"), np.array([PLACE & 0xFFFFFFFF], "u4")
    bits[:2] = 6, 1
    places = sparse(1 << 32, "u4")
    given = {"words": bits, "n": 32, "starts": starts, "places": places, "end": places.size}
    run(kernels, "unpack_bitmap", given, 1, 0)
    assert places[77:80].tolist() == [1, 2, 32]

    place, width = BEYOND, 5
    codes, packed = sparse((place + 1) * TILE, "u4"), sparse((place + 1) * WORDS * width, "u4")
    codes[place * TILE :] = np.arange(TILE) % 32
    widths, starts = sparse(place + 1, "u1"), sparse(place + 1, "i8")
    widths[place], starts[place] = width, place * WORDS * width
    given = {"codes": codes, "n": codes.size, "widths": widths, "starts": starts, "words": packed}
    grid, block = place // WARPS + 1, place // WARPS
    run(kernels, "pack_stream", given, grid, block)
    again = sparse(codes.size, "u4")
    run(kernels, "unpack_stream", given | {"codes": again}, grid, block)
    assert again[place * TILE :].tobytes() == codes[place * TILE :].tobytes()


def test_blocks_of_nvfp4_beyond_2_to_the_32(kernels: Any) -> None:
    """The last block of an array, whose elements are read again by the number of their value."""
    block = (1 << 28) + 5
    x = sparse(16 * (block + 1), "f4")
    x[16 * block :] = np.random.default_rng(1).normal(size=16)
    elements = Cast(parse_format("e2m1fn"))
    expected, amax = np.zeros(8, np.uint8), np.zeros(1, np.uint32)
    scales, scale = np.zeros(1, np.uint8), np.zeros(1, np.float32)
    cpu.encode_two_scales(x[16 * block :].copy(), elements, expected, scales, scale)
    given: dict[str, Any] = {"x": x, "n": x.size, "amax": amax, "key_low": 0, "key_high": 0}
    given |= {"cast_numbers": numbers_of_cast("e2m1fn"), "offset": 0}
    given |= {"scale_numbers": numbers_of_cast("e4m3fn"), "words": sparse(2 * (block + 1), "u4")}
    given |= {"scales": sparse(block + 1, "u1"), "scale": np.zeros(1, np.float32)}
    grid, at = block // THREADS + 1, block // THREADS
    run(kernels, "amax_two_scales", given, grid, at)
    run(kernels, "encode_two_scales", given, grid, at)
    assert given["words"][2 * block :].tobytes() == expected.tobytes() != bytes(8)
    assert given["scales"][block] == scales[0]
    out, last = sparse(x.size, "f4"), x.size - 1
    given |= {"scale": scale, "more": None, "out": out, "nonfinite": np.zeros(1, np.uint64)}
    run(kernels, "decode_two_scales", given, last // THREADS + 1, last // THREADS)
    numbers = np.zeros(16, np.float32)
    cpu.decode_two_scales(expected, scales, scale, numbers)
    assert out[16 * block :].tobytes() == numbers.tobytes()


@pytest.mark.parametrize("name", ["row_products", "column_products", "outer"])
def test_products_of_vectors_beyond_2_to_the_32(kernels: Any, name: str) -> None:
    """A matrix of 2**33 rows or columns by one row; the last block of outputs alone."""
    n, columns = (1, 1 << 33) if name == "column_products" else (1 << 33, 1)
    at, threads = (1 << 33) - 1, 4 if name == "row_products" else 1  # of an output
    m, rows, out = sparse(1 << 33, "f4"), sparse(1 << 33, "f4"), sparse(1 << 33, "f4")
    m[at], rows[0], rows[at] = 3.0, 2.0, 2.0
    given = {"m": m, "n": n, "columns": columns, "rows": rows, "count": 1, "out": out}
    given |= {"total": out, "firsts": m, "seconds": rows}
    block = at * threads // THREADS
    run(kernels, name, given, block + 1, block)
    assert out[at] == 6.0 and not out[at % (1 << 32) - (1 << 12) : at % (1 << 32)].any()


def test_signs_and_chunks_beyond_2_to_the_32(kernels: Any) -> None:
    n = PLACE + 1
    x, signs, out = sparse(n, "f4"), sparse(n // 8 + 1, "u1"), sparse(n, "f4")
    x[PLACE], out[PLACE], signs[PLACE // 8] = -3.0, 1.0, 255
    given = {"x": x, "signs": signs, "pairs": np.array([-5, 7], "f4"), "columns": n, "n": n}
    block = PLACE // THREADS
    run(kernels, "add_signs", given | {"out": out}, block + 1, block)
    assert out[PLACE] == 8.0
    run(kernels, "subtract_signs", given | {"out": out}, block + 1, block)
    assert out[PLACE] == 2.0
    amax, counts, tile = sparse(PLACE // TILE + 1, "u4"), np.zeros(1, "u4"), PLACE // TILE
    given |= {"more": None, "total": None, "counts": counts, "amax": amax}
    run(kernels, "pack_signs", given, tile // WARPS + 1, tile // WARPS)
    assert amax[tile] == np.float32(3).view("u4") and not signs[PLACE // 8] & 128 >> PLACE % 8
    assert counts[0] == PLACE - tile // WARPS * WARPS * TILE  # of the block's values, but one

    chunk = BEYOND
    x, places = sparse((chunk + 1) * TILE, "f4"), sparse(chunk + 1, "i8")
    x[chunk * TILE + 700] = -9.0
    given = {"x": x, "n": x.size, "chunk_values": TILE, "chunks": chunk + 1, "places": places}
    run(kernels, "chunk_leaders", given, chunk // WARPS + 1, chunk // WARPS)
    assert places[chunk] == 700

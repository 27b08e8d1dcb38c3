"""Passes over gradients: each implementation, clone and number of threads against the reference."""

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from gpus import either_cupy

from cpdhpc import _cpu
from cpdhpc.lab.verify.outcomes import of_passes, values
from cpdhpc.ops import cpu, reference, set_kernel_threads, to_host
from cpdhpc.ops.common import NONFINITE_BITS

LARGE = (1 << 19) + 1234  # goes past the caches
SIZES = (1, 7, 33, 1025, 9001)
Array = np.ndarray[Any, np.dtype[Any]]


def same(array: Array) -> Array:
    return array


@pytest.mark.parametrize("n", [*SIZES, LARGE])
def test_clones_and_threads_do_as_the_reference(clone: str, n: int) -> None:
    expected = of_passes(reference, n, np.copy, same)
    for threads in (1, 3) if n == LARGE else (1,):
        set_kernel_threads(threads)
        found = of_passes(cpu, n, np.copy, same)
        assert [a[0] for a, b in zip(found, expected, strict=True) if a != b] == []


@pytest.mark.parametrize("where", ["simulated", pytest.param("GPU", marks=pytest.mark.gpu)])
def test_the_gpu_does_as_the_reference(where: str) -> None:
    with either_cupy(where) as cupy:
        gpu = import_module("cpdhpc.ops.gpu")
        for n in SIZES:
            found = of_passes(gpu, n, lambda x: cupy.asarray(x.copy()), to_host)
            expected = of_passes(reference, n, np.copy, same)
            assert [a[0] for a, b in zip(found, expected, strict=True) if a != b] == []


@pytest.mark.parametrize("bin_values", [1, 50, 63, 64, 500, (1 << 14) - 1])
def test_codes_of_bins_are_those_of_the_reference(bin_values: int) -> None:
    rng = np.random.default_rng(bin_values)
    for share in (0.0, 1e-4, 0.02, 1.0):  # none, rare ones beyond many empty bins, all of them
        indices = np.flatnonzero(rng.random(70_000) < share).astype(np.uint32)
        x = rng.standard_normal(indices.size).astype(np.float32)
        codes = reference.pack_bins(bin_values, indices, x)
        assert cpu.pack_bins(bin_values, indices, x).tobytes() == codes.tobytes()
        for ops in (reference, cpu):
            places, found = ops.unpack_bins(bin_values, codes, 0.25, 7)
            assert places.dtype == np.uint32 and np.array_equal(places, indices + 7)
            assert found.tobytes() == np.copysign(np.float32(0.25), x).tobytes()


@pytest.mark.parametrize("bin_values", [1, 50, 500, 5000])
def test_codes_that_no_bins_have_are_errors_and_never_a_crash(bin_values: int) -> None:
    """Random bytes: either sound codes, of places below n, or a ValueError."""
    rng, n, refused = np.random.default_rng(bin_values), 10_001, 0
    for size in (0, 1, 2, 40, 4000):
        for _ in range(20):
            codes, out, rest = rng.integers(0, 256, size, np.uint8), *np.ones((2, n), np.float32)
            try:
                _, counts = cpu.mean_bins(bin_values, [codes], [2.0], out, 1.0, [rest])
            except ValueError:
                refused += 1
                continue
            assert out.sum() == 1.0 * n - rest.sum() and counts <= codes.size
    assert refused >= 20


def test_sums_are_numpys(clone: str) -> None:
    """NumPy halves, sums 8 side by side, and makes 8,192 of a row float64 at once."""
    for n in (1, 7, 8, 9, 127, 128, 129, 1000, 8193, 30001):
        x = values(3 * n, n)
        assert cpu.square_sum(x, 0.1) == np.square(x - np.float64(0.1)).sum()
        rows, starts = x.reshape(3, n), np.array([0, n, 3 * n - 1])
        assert cpu.row_sums(rows).tobytes() == rows.sum(axis=1, dtype=float).tobytes()
        magnitudes = np.add.reduceat(np.abs(x), starts, dtype=float)
        assert cpu.run_sums(x, starts, "magnitude").tobytes() == magnitudes.tobytes()
        squares = np.add.reduceat(np.square(x, dtype=float), starts)
        assert cpu.run_sums(x, starts, "square").tobytes() == squares.tobytes()
    nothing = np.full((2, 9), -0.0, np.float32)
    assert cpu.row_sums(nothing).tobytes() == nothing.sum(axis=1, dtype=float).tobytes()


def test_products_are_einsums(clone: str) -> None:
    for n, columns, rank in ((1, 1, 1), (5, 3, 2), (9, 16, 3), (18, 75, 4), (33, 129, 5)):
        m, rows = values(n * columns, 0).reshape(n, columns), values(rank * columns, 1)
        rows, other = rows.reshape(rank, columns), values(rank * n, 2).reshape(rank, n)
        for ops in (reference, cpu):
            expected = np.einsum("ij,rj->ri", m, rows)
            assert ops.row_products(m, rows).tobytes() == expected.tobytes()
            expected = np.einsum("ij,ri->rj", m, other)
            assert ops.column_products(m, other).tobytes() == expected.tobytes()


@pytest.mark.parametrize("ops", [reference, cpu])
def test_what_is_not_a_number_is_the_largest(ops: Any) -> None:
    x, kept, out = np.ones(40, np.float32), np.ones(40, np.float32), np.empty(40, np.float32)
    x[39] = np.nan
    with np.errstate(all="ignore"):
        assert ops.accumulate(x, kept, out) > 0x7F800000
        assert 39 in ops.accumulate_largest(x, kept, out, 1)[0]
        most, found, _ = ops.accumulate_above(x, kept, out, 3.0)
        assert most > NONFINITE_BITS and found.tolist() == [39]
        kept[3], x[39] = np.inf, 0
        assert ops.accumulate(x, kept, out) == 0x7F800000
        assert np.isinf(ops.run_maxima(out, np.array([20, 40]))[0][0])


def runs_with_nan(
    ops: Any, there: Callable[[Array], Any], here: Callable[[Any], Array]
) -> list[Array]:
    """What NaN of both signs, infinity and a limit become in operations that compare values."""
    x = np.tile(np.array([np.nan, -np.nan, np.inf, -np.inf, 3.0, -3.0, 0.5], np.float32), 6)
    x[21:24], x[38:40] = 1.0, -1.0  # the NaN of a row of one sign alone
    ends, each = np.array([20, 42]), np.array([2.0, 4.0], np.float32)
    out, limits = there(np.zeros(42, np.float32)), np.array([1.0, np.inf], np.float32)
    with np.errstate(all="ignore"):
        ops.divide_runs(there(x), each, ends, out, limits)
        found = [here(out).copy(), ops.run_maxima(there(x), ends)[0]]
        m, kept, rest = (there(y.reshape(3, 14)) for y in (x, np.zeros_like(x), np.ones_like(x)))
        signs, pairs, largest = ops.encode_signs(m, kept, rest)
        alone = ops.encode_signs(m)
    found += [signs, pairs, here(rest), alone[0], alone[1]]
    return [*found, np.array([each >= NONFINITE_BITS for each in (largest, alone[2])])]


@pytest.mark.parametrize("where", ["simulated", pytest.param("GPU", marks=pytest.mark.gpu)])
def test_nan_has_the_sign_and_the_cut_of_the_reference(where: str) -> None:
    expected = runs_with_nan(reference, np.copy, same)
    wanted = [True, True, False, False, False, False, False]
    assert np.isnan(expected[0]).tolist()[:20] == (wanted * 3)[:20]
    assert expected[0][2:7].tolist() == [0.5, -0.5, 0.5, -0.5, 0.25]
    assert np.unpackbits(expected[2])[:7].tolist() == [1, 1, 1, 0, 1, 0, 1]  # NaN is not below 0
    found = [runs_with_nan(cpu, np.copy, same)]
    with either_cupy(where) as cupy:
        gpu = import_module("cpdhpc.ops.gpu")
        found.append(runs_with_nan(gpu, lambda x: cupy.asarray(x.copy()), to_host))
    for each in found:
        for a, b in zip(each, expected, strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def test_arrays_that_are_only_read_may_be_read_only() -> None:
    x, kept, more, limits = values(64, 0), values(64, 1), values(64, 2), np.full(1, 9, np.float32)
    for array in (x, kept, more, limits):
        array.flags.writeable = False
    out, total = np.empty_like(x), np.empty_like(x)
    cpu.accumulate(x, kept, out, more=more, total=total)
    assert total.tobytes() == (x + kept + more).tobytes()
    cpu.divide_runs(x, limits, np.array([64]), out, limits)
    with pytest.raises((ValueError, BufferError), match=r"read-only|not writable"):
        cpu.accumulate(x, kept, out, more=more, total=more)


def test_another_thread_runs_while_maxima_are_found() -> None:
    """Nothing but the call gives up the lock of the interpreter in time."""
    x, go, went = np.ones(1 << 24, np.float32), threading.Event(), list[bool]()

    def note() -> None:
        go.wait()
        went.append(True)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=note)
    thread.start()
    try:
        sys.setswitchinterval(1000.0)
        go.set()
        for _ in range(200):  # of some ms each: the other thread may get its core late
            cpu.run_maxima(x, np.array([x.size]))
            if went:
                break
        found = list(went)
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert found


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.3])
def test_sparse_arrays_are_merged_as_by_the_reference(share: float) -> None:
    """In the order of arrays; what adds up to 0 is left out, NaN is not."""
    n, rng = 30_000, np.random.default_rng(1)
    lie = [np.flatnonzero(rng.random(n) < share).astype(np.uint32) for _ in range(3)]
    own = [values(each.size, i) for i, each in enumerate(lie)]
    lie += [lie[0][::2].copy(), np.array([n - 1], np.uint32)]
    own += [-own[0][::2], np.array([np.nan], np.float32)]
    for each, x in zip(lie, own, strict=True):
        marks = cpu.pack_bitmap(lie[1], n)
        found, expected = (ops.pairs_at(marks, each, x) for ops in (cpu, reference))
        assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]
    for some in (0, 1, 3, 5):
        places, sums = cpu.merge_places(lie[:some], own[:some], n)
        expected = reference.merge_places(lie[:some], own[:some], n)
        assert places.tobytes() == expected[0].tobytes()
        assert np.array_equal(sums, expected[1], equal_nan=True)
        assert np.all(sums != 0)


def test_the_first_distinct_numbers_of_philox_are_marked() -> None:
    for n, count in ((1, 1), (2, 2), (101, 50), (128, 128), (1 << 20, 4097), (0, 0), (5, 0)):
        key = np.array([n, 2**64 - 1 - count], np.uint64)
        drawn: dict[int, None] = {}
        stream = np.random.Philox(key=key)
        while len(drawn) < count:
            drawn[int(stream.random_raw()) % n] = None
        for ops in (reference, cpu):
            words = ops.mark_drawn(key, count, n)
            assert words.size == -(-n // 32)
            assert ops.unpack_bitmap(words).tolist() == sorted(drawn)
            with pytest.raises(ValueError, match=r"count.*must be 0..n|must be 0\.\."):
                ops.mark_drawn(key, n + 1, n)


def test_wrong_lengths_are_errors_and_never_a_crash() -> None:
    x, short, i = np.ones(64, np.float32), np.ones(63, np.float32), np.array([64])
    marks = np.array([4, 1], np.uint32)
    wrong: list[Callable[[], object]] = [
        lambda: _cpu.accumulate(1, x, short, 1.0, None, x, None, 0, 0.0),
        lambda: _cpu.accumulate(1, x, x, 1.0, x, x, None, 0, 0.0),
        lambda: _cpu.accumulate(1, x, x, 1.0, x, x, short, 0, 0.0),
        lambda: _cpu.accumulate_largest(1, x, short, 1.0, None, x, None, 1),
        lambda: _cpu.accumulate_chunks(x, x, 50, x.copy(), np.empty(1, "i8")),
        lambda: _cpu.accumulate_chunks(x, x, 0, x.copy(), np.empty(1, "i8")),
        lambda: _cpu.accumulate_chunks(x, short, 50, x.copy(), np.empty(2, "i8")),
        lambda: _cpu.scale_runs(1, True, x, x[:1], np.array([63]), None, x),
        lambda: _cpu.scale_runs(1, True, x, x[:2], i, None, x),
        lambda: _cpu.scale_runs(1, True, x, x[:2], np.array([64, 63]), None, x),
        lambda: _cpu.scale_runs(1, True, x, x[:1], i, None, short),
        lambda: _cpu.run_maxima(x, np.array([65]), np.empty(1, np.uint32)),
        lambda: cpu.run_maxima(x, i.astype(np.int32)),
        lambda: _cpu.row_sums(x, np.empty(3)),
        lambda: _cpu.run_sums(1, x, np.array([0, 64]), np.empty(2)),
        lambda: _cpu.encode_signs(x, x, None, np.empty(7, "u1"), np.empty(8, "f4")),
        lambda: _cpu.encode_signs(x, x, short, np.empty(8, "u1"), np.empty(8, "f4")),
        lambda: _cpu.decode_signs((np.empty(8, "u1"),), (), 4, 1.0, x),
        lambda: _cpu.decode_signs((np.empty(7, "u1"),), (np.empty(8, "f4"),), 4, 1.0, x),
        lambda: _cpu.encode_bins(x, x, 1.0, 0, x.copy(), np.empty(1, "u4")),
        lambda: _cpu.encode_bins(x, x, 1.0, 50, x.copy(), np.empty(1, "u4")),
        lambda: _cpu.mean_bins(50, (), x[:1], (), 0, 1.0, x.copy()),
        lambda: _cpu.mean_bins(50, (np.empty(0, "u1"),), x[:1], (short,), 0, 1.0, x.copy()),
        lambda: _cpu.mean_bins(50, (np.empty(0, "u1"),), x[:1], (x.copy(),), 1, 1.0, x.copy()),
        lambda: _cpu.chunk_leaders(x, 50, np.empty(1, "i8")),
        lambda: _cpu.row_products(4, x, short[:15], x[:4]),
        lambda: _cpu.column_products(4, x, x[:4], x[:15]),
        lambda: _cpu.outer(4, x[:4], x[:15], x),
        lambda: _cpu.put(1, x, np.array([64], "u4"), x[:1]),
        lambda: _cpu.take(1, x.copy(), np.array([64], "u4"), x[:1].copy()),
        lambda: _cpu.take(1, x.copy(), np.array([3, 2], "u4"), x[:2].copy()),
        lambda: _cpu.take(1, x.copy(), np.array([3], "u4"), x[:2].copy()),
        lambda: _cpu.accumulate_taking(1, x, x, x.copy(), np.array([4], "u4"), x[:1].copy()),
        lambda: _cpu.accumulate_taking(1, x, x, x.copy(), np.array([4, 1], "u4"), x[:1].copy()),
        lambda: _cpu.accumulate_taking(1, x, x, short.copy(), marks, x[:2].copy()),
        lambda: _cpu.put_marked(1, marks, x[:1], x.copy()),
        lambda: _cpu.put_marked(1, np.array([0, 1 << 31], "u4"), x[:1], short.copy()),
        lambda: _cpu.mean_places(1, (np.array([64], "u4"),), (x[:1],), 1.0, x.copy()),
        lambda: _cpu.mean_places(1, (np.array([6], "u4"),), (x[:2],), 1.0, x.copy()),
        lambda: _cpu.mean_places(1, (np.array([6], "u4"),), (), 1.0, x.copy()),
        lambda: _cpu.merge_places(64, (np.array([64], "u4"),), (x[:1],)),
        lambda: _cpu.pairs_at(marks, np.array([64], "u4"), x[:1]),
        lambda: _cpu.pairs_at(marks, np.array([3, 3], "u4"), x[:2]),
        lambda: _cpu.pairs_at(marks, np.array([3], "u4"), x[:2]),
        lambda: cpu.mean_places([np.array([6])], [x[:1]], 1.0, x.copy()),
        lambda: _cpu.mark_drawn(1, 2, 3, 33, np.zeros(1, "u4")),
        lambda: _cpu.mark_drawn(1, 2, -1, 3, np.zeros(1, "u4")),
        lambda: _cpu.mean_runs(1, 1, False, (), x[:1], i, 1.0, x),
        lambda: _cpu.mean_runs(1, 4, False, (np.zeros(511, "u1"),), x[:1], i, 1.0, x),
    ]
    for call in wrong:
        with pytest.raises((ValueError, TypeError)):
            call()

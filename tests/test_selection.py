"""Selection by magnitude and access by index: against Python's sort, on every implementation."""

import importlib
from typing import Any

import numpy as np
import pytest
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from simulated_cupy import simulated

from cpdhpc import _cpu
from cpdhpc.formats import TILE
from cpdhpc.ops import cpu, reference, set_kernel_threads

LINE, SAMPLED = 16, 4096  # as kernels/cpu_largest_calls.h has them

BOUNDED = settings(max_examples=80, deadline=None, derandomize=True, database=None)
SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, np.inf, -np.inf, np.nan)
OTHER_NAN = 0xFFC00001  # negative, and above the usual one
VALUE = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([*np.array(SPECIAL, np.float32).view(np.uint32).tolist(), OTHER_NAN]),
)


def ranked(x: np.ndarray) -> tuple[list[int], list[int]]:
    """Magnitudes as integers, and indices from the largest, of equal ones the lower first."""
    bits = [each & 0x7FFFFFFF for each in x.view(np.uint32).tolist()]
    return bits, sorted(range(x.size), key=lambda i: (-bits[i], i))


def assert_selects(ops: Any, x: np.ndarray, k: int) -> None:
    bits, order = ranked(x)
    found = ops.select_magnitude(x, k)
    assert found.dtype == np.uint32 and found.tolist() == sorted(order[:k])
    if k:
        assert ops.kth_magnitude(x, k) == bits[order[k - 1]]


@BOUNDED
@given(values=st.lists(VALUE, max_size=70), data=st.data())
def test_any_values_are_ranked_as_python_ranks_them(
    ops: Any, values: list[int], data: st.DataObject
) -> None:
    x = np.array(values, np.uint32).view(np.float32)
    assert_selects(ops, x, data.draw(st.integers(0, x.size)))
    threshold = abs(data.draw(st.floats(allow_nan=False)))  # of 64 bits: mostly no float32
    above = [i for i, each in enumerate(x.tolist()) if abs(each) > threshold or each != each]
    assert ops.select_above(x, threshold).tolist() == above


def large(kind: str) -> np.ndarray:
    """Values of several lines of the sample, with a tail that is no whole tile or word."""
    n, rng = 9 * SAMPLED + 1029, np.random.default_rng(3)
    x = rng.standard_normal(n).astype(np.float32)
    if kind == "mostly zero":
        x[rng.random(n) < 0.997] = 0
    elif kind == "ties":
        x = np.round(x)
    elif kind == "equal":
        x[:] = -2
    elif kind == "edges":  # the last and the first of the buckets of each pass
        bits = np.array([0x3F7FFFFF, 0x3F800000, 0x3F8003FF, 0x3F8FFFFF, 0x7FFFFFFF], np.uint32)
        x = rng.choice(bits, n).view(np.float32)
    elif kind == "misleading":  # the sample sees the largest alone
        sampled = np.arange(n) % SAMPLED < LINE
        x[sampled] += np.where(x[sampled] < 0, np.float32(-90), np.float32(90))
    return x


@every("kind", ["normal", "mostly zero", "ties", "equal", "edges", "misleading"])
def test_the_sample_never_decides(fast_ops: Any, kind: str) -> None:
    x = large(kind)
    bits, order = ranked(x)
    for k in (1, 90, x.size // 100, x.size // 3, x.size // 2, x.size // 10 * 7, x.size):
        assert fast_ops.select_magnitude(x, k).tolist() == sorted(order[:k])
        assert fast_ops.kth_magnitude(x, k) == bits[order[k - 1]]


def test_clones_and_threads_select_the_same(clone: str) -> None:
    x = np.resize(large("normal"), 9 * 32 * TILE - 5)  # shared by threads
    for count in (1, 3):
        set_kernel_threads(count)
        for n in (0, 1, 31, 33, TILE + 1, x.size):
            part, low = x[:n], 0x3F800000  # of 1.0
            words = cpu.mark_above(part, low)
            assert np.array_equal(words, reference.mark_above(part, low))
            assert np.array_equal(cpu.count_bits(words), reference.count_bits(words))
            places = cpu.unpack_bitmap(words)
            assert np.array_equal(places, np.flatnonzero(np.abs(part) > 1))
            assert np.array_equal(cpu.gather(part, places), part[places])
            for passed in ((0, 20, 2048), (low, 10, 1024), (low + 5, 0, 7)):
                expected = reference.count_digits(part, *passed)
                assert np.array_equal(cpu.count_digits(part, *passed), expected)
    everywhere = np.arange(x.size, dtype=np.uint32)  # more indices than one thread takes
    total = x.copy()
    cpu.scatter_add(total, everywhere, x)
    assert np.array_equal(total, x + x) and np.array_equal(cpu.gather(x, everywhere), x)
    cpu.clear(total, everywhere)
    assert not total.any()


@BOUNDED
@given(n=st.integers(0, 90), data=st.data())
def test_access_by_index(ops: Any, n: int, data: st.DataObject) -> None:
    where = data.draw(st.lists(st.integers(0, n - 1), unique=True)) if n else []
    indices, rng = np.array(sorted(where), np.uint32), np.random.default_rng(n)
    x = np.ldexp(rng.standard_normal(n), rng.integers(-149, 0, n)).astype(np.float32)
    values = np.ldexp(rng.standard_normal(indices.size), -140).astype(np.float32)  # subnormal
    assert ops.gather(x, indices).tolist() == [x[i] for i in sorted(where)]
    expected = x.copy()
    for i, value in zip(sorted(where), values, strict=True):
        expected[i] += value
    total = x.copy()
    ops.scatter_add(total, indices, values)
    assert np.array_equal(total.view(np.uint32), expected.view(np.uint32))
    cleared = -np.abs(x)
    ops.clear(cleared, indices)
    assert not cleared[indices].view(np.uint32).any()
    assert np.count_nonzero(cleared) == np.count_nonzero(np.delete(x, indices))


@settings(BOUNDED, max_examples=30)
@given(widths=st.lists(st.integers(0, 32), max_size=3), data=st.data())
def test_streams_are_python_integers(widths: list[int], data: st.DataObject) -> None:
    """Each tile is one integer, its first code the lowest bits."""
    last = data.draw(st.integers(1, TILE)) if widths else 0
    n, rng = max(0, len(widths) - 1) * TILE + last, np.random.default_rng(last)
    per_code = np.repeat(np.array(widths, np.uint64), TILE)[:n]
    codes = (rng.integers(0, 2**32, n, dtype=np.uint64) >> (np.uint64(32) - per_code)).astype("<u4")
    expected = b""
    for t, width in enumerate(widths):
        tile = codes[t * TILE : (t + 1) * TILE].tolist()
        whole = sum(code << (i * width) for i, code in enumerate(tile))
        expected += whole.to_bytes(-(-len(tile) * width // 32) * 4, "little")
    for ops in (reference, cpu):
        words = ops.pack_stream(codes, np.array(widths, np.uint8))
        assert words.dtype == np.uint32 and words.tobytes() == expected
        assert np.array_equal(ops.unpack_stream(words, np.array(widths, np.uint8), n), codes)


def test_what_cannot_be_is_refused(ops: Any) -> None:
    for name, argument, values, allowed in (
        ("select_magnitude", "k", (-1, 6), "must be 0..5"),
        ("kth_magnitude", "k", (0, 6), "must be 1..5"),
        ("select_above", "threshold", (-1.0, np.nan), "must be 0 or more"),
    ):
        for value in values:
            with refused(name, argument) as caught:
                getattr(ops, name)(np.ones(5, np.float32), value)
            assert allowed in caught.value.allowed


@every("ops", [reference, cpu])  # a GPU does not ask: it would have to wait
@every("wrong", [[1, 1], [3, 2], [5]])
def test_indices_must_ascend(ops: Any, wrong: list[int]) -> None:
    x, indices = np.ones(5, np.float32), np.array(wrong, np.uint32)
    for name, more in (("gather", ()), ("scatter_add", (x[: indices.size],)), ("clear", ())):
        with pytest.raises(ValueError, match=f"{name}: indices: must ascend, be distinct and be"):
            getattr(ops, name)(x, indices, *more)
    assert (x == 1).all()
    for call in (
        lambda: ops.select_magnitude(x.astype(np.float64), 2),
        lambda: ops.kth_magnitude(x.astype(np.float64), 2),
        lambda: ops.gather(x, indices.astype(np.int64)),
    ):
        if ops is cpu:
            with pytest.raises(TypeError, match=r"64 given, (float|uint)32 needed"):
                call()


def test_a_simulated_gpu_selects_the_same() -> None:
    """The passes of ops.gpu, late and careless, over stand-ins of its kernels."""
    with simulated() as (_, cupy):
        gpu = importlib.import_module("cpdhpc.ops.gpu")
        for kind in ("normal", "mostly zero", "equal"):
            x, host = cupy.asarray(large(kind)), large(kind)
            for k in (0, 1, x.size // 100, x.size):
                found = gpu.select_magnitude(x, k)
                assert np.array_equal(cupy.asnumpy(found), cpu.select_magnitude(host, k))
            assert gpu.kth_magnitude(x, 99) == cpu.kth_magnitude(host, 99)
            found = gpu.select_above(x, 1.5)
            assert np.array_equal(cupy.asnumpy(found), np.flatnonzero(np.abs(host) > 1.5))
            values = gpu.gather(x, found)
            gpu.scatter_add(x, found, values)
            assert np.array_equal(cupy.asnumpy(x), np.where(np.abs(host) > 1.5, 2 * host, host))
            gpu.clear(x, found)
            assert np.array_equal(cupy.asnumpy(x), np.where(np.abs(host) > 1.5, 0, host))
            marks, some = gpu.pack_bitmap(found, x.size), cupy.asnumpy(found)
            assert np.array_equal(cupy.asnumpy(marks), cpu.pack_bitmap(some, x.size))
            widths = np.random.default_rng(0).integers(0, 33, -(-some.size // TILE)).astype("u1")
            words = gpu.pack_stream(found, widths)
            assert np.array_equal(cupy.asnumpy(words), cpu.pack_stream(some, widths))
            codes = cupy.asnumpy(gpu.unpack_stream(words, widths, some.size))
            assert np.array_equal(codes, cpu.unpack_stream(cupy.asnumpy(words), widths, some.size))
        for wrong in (np.array([33], "u1"), np.array([7, 7], "u1"), np.array([7])):
            with pytest.raises(
                ValueError, match=r"widths: u?int\d+\[.\]: must be uint8\[1\], 0..32"
            ):
                gpu.pack_stream(cupy.zeros(5, np.uint32), wrong)


def test_a_wrong_length_is_an_error_and_never_a_crash() -> None:
    some, none = np.zeros(5, np.uint32), np.zeros(0, np.uint32)
    for call in (
        lambda: _cpu.mark_above(1, 0, np.zeros(33, np.float32), some[:1]),
        lambda: _cpu.count_digits(1, 0, 0, np.zeros(3, np.float32), np.zeros(2049, np.uint32)),
        lambda: _cpu.count_digits(1, 0, 32, np.zeros(3, np.float32), some),
        lambda: _cpu.count_bits(1, some, none),
        lambda: _cpu.unpack_bitmap(1, some, none, some),
        lambda: _cpu.pack_bitmap(some + 160, some),
        lambda: _cpu.pack_stream(some, np.array([33], np.uint8), some),
        lambda: _cpu.unpack_stream(some[:1], np.array([7], np.uint8), np.zeros(5, np.uint32)),
        lambda: _cpu.gather(1, np.zeros(3, np.float32), some[:1], np.zeros(2, np.float32)),
        lambda: _cpu.scatter_add(1, np.zeros(3, np.float32), some[:1], np.zeros(2, np.float32)),
    ):
        with pytest.raises(ValueError):
            call()
    _cpu.unpack_bitmap(1, ~none.repeat(0), none, none)
    guarded = np.full(12, 7, np.uint32)
    _cpu.unpack_bitmap(1, ~np.zeros(32, np.uint32), np.array([2], np.uint32), guarded[:8])
    assert guarded.tolist() == [7, 7, 0, 1, 2, 3, 4, 5, 7, 7, 7, 7]

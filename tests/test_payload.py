"""Sparse payloads: what comes back, how long they are, and that damage is an error."""

import struct
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cupy import simulated

from cpdhpc.compress.payload import ENCODINGS, decode_sparse, encode_sparse, sparse_bytes
from cpdhpc.formats import TILE, Cast, packed_bytes, shift_count, tiles, wire_format
from cpdhpc.ops import reference

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True, database=None)
WIRES = ("raw", "bf16", "e4m3", "int4", "ternary", "mxfp6")


def some(kind: str, n: int, share: float) -> np.ndarray:
    """Ascending indices below n: by chance, in one run, evenly spread, or in clusters."""
    m, rng = round(n * share), np.random.default_rng(n)
    if kind == "run":
        return np.arange(n - m, n, dtype=np.uint32)
    if kind == "even":
        return (np.arange(m) * n // max(m, 1)).astype(np.uint32)
    if kind == "clusters":
        near = np.flatnonzero(np.sin(np.arange(n) / 50) > 0.8)
        return near[rng.random(near.size) < share].astype(np.uint32)
    return np.sort(rng.choice(n, m, replace=False)).astype(np.uint32)


def values_of(m: int) -> np.ndarray:
    return np.random.default_rng(m).standard_normal(m).astype(np.float32)


def rounded(values: np.ndarray, wire: str) -> np.ndarray:
    """What the specification makes of values that travel in a wire with a scale for each tile."""
    fmt = wire_format(wire)
    if fmt is None:
        return values
    words = np.empty(packed_bytes(values.size, fmt.bits), np.uint8)
    shifts = np.empty(shift_count(values.size, 32 if wire == "mxfp6" else TILE), np.uint8)
    out = np.empty_like(values)
    reference.encode_tiles(values, Cast(fmt), words, shifts, fit=True)
    reference.decode_tiles(words, shifts, fmt, out)
    return out


def shortest(indices: np.ndarray, n: int) -> int:
    """Bits of the shortest of the three ways to say which, counted in Python integers."""
    places, m = indices.tolist(), indices.size
    gaps = [b - a - 1 for a, b in pairwise([-1, *places])]
    starts = range(0, m, TILE)
    widths = [max(gaps[t : t + TILE]).bit_length() for t in starts]
    deltas = sum(8 + w * min(TILE, m - t) for t, w in zip(starts, widths, strict=True))
    bins = min(m + -(-n // 2**b) + b * m for b in range(33))
    return min(n, deltas, bins)


@every("wire", WIRES)
@every("kind", ["chance", "run", "even", "clusters"])
def test_what_is_sent_comes_back_in_few_bytes(kind: str, wire: str) -> None:
    seen = set()
    bits = {"raw": 32, "bf16": 16, "e4m3": 8, "int4": 4, "ternary": 2, "mxfp6": 6}[wire]
    for n in (0, 1, 31, 33, TILE, TILE + 1, 20_000):
        for share in (0, 0.001, 0.01, 0.1, 0.4, 0.7, 1):
            indices = some(kind, n, share)
            values = values_of(indices.size)
            payload = encode_sparse(indices, values, n, wire)
            back, decoded = decode_sparse(payload, n, wire)
            assert back.dtype == np.uint32 and np.array_equal(back, indices)
            assert decoded.tobytes() == rounded(values, wire).tobytes()
            both = np.concatenate([np.zeros(1, np.uint8), payload, payload])  # not aligned
            assert sparse_bytes(both[1:], n, wire) == payload.size
            assert np.array_equal(decode_sparse(both[1 : 1 + payload.size], n, wire)[0], indices)
            # A header of 8 bytes, a shift for each tile, and at most three streams and the bytes
            # before them that each end in the middle of a word.
            streams = -(-shortest(indices, n) // 8) + -(-bits * indices.size // 8)
            shifts = {"raw": 0, "mxfp6": 32}.get(wire, 1) * tiles(indices.size)
            assert payload.size <= streams + shifts + 8 + 4 * 4, (n, share)
            seen.add(ENCODINGS[payload[4]])
    assert seen >= {"chance": {*ENCODINGS}, "clusters": {*ENCODINGS}}.get(kind, {"deltas"})


@pytest.mark.parametrize("wire", WIRES)
def test_a_simulated_gpu_makes_and_reads_the_same_payloads(wire: str) -> None:
    seen = set()
    with simulated() as (_, cupy):
        for kind, n in product(("chance", "even"), (0, 33, TILE + 1, 5000)):
            for share in (0, 0.01, 0.4, 0.7):
                indices = some(kind, n, share)
                values = values_of(indices.size)
                there = cupy.asarray(indices), cupy.asarray(values)
                payload = encode_sparse(*there, n, wire)
                assert payload.tobytes() == encode_sparse(indices, values, n, wire).tobytes()
                found, decoded = decode_sparse(payload, n, wire, there[0])
                assert np.array_equal(cupy.asnumpy(found), indices)
                assert cupy.asnumpy(decoded).tobytes() == rounded(values, wire).tobytes()
                seen.add(ENCODINGS[payload[4]])
        with pytest.raises(TypeError, match="indices and values: one on the CPU: must be both"):
            encode_sparse(there[0], values, n, wire)
        turned = cupy.asarray(np.array([3, 2], np.uint32))
        with pytest.raises(ValueError, match="must ascend"):
            encode_sparse(turned, cupy.asarray(np.ones(2, np.float32)), 9, wire)
    assert seen == {*ENCODINGS}


def test_bits_of_an_index_by_chance() -> None:
    """The least that n choose m needs is 8.08 bits an index at 1 %: log2(100) + log2(e)."""
    n = 400_000
    for share, least in ((0.001, 11.41), (0.01, 8.08), (0.1, 4.69)):
        indices = some("chance", n, share)
        size_bytes = encode_sparse(indices, values_of(indices.size), n).size
        assert least < 8 * size_bytes / indices.size - 32 < least + 1


def header(count: int, encoding: int, width: int = 32) -> bytes:
    return struct.pack("<IBBH", count, encoding, width, 0)


def test_the_format_of_the_diagram() -> None:
    """Bytes put together by hand."""
    ones = struct.pack("<3f", 1, 1, 1)
    bitmap = header(3, 0) + struct.pack("<I", 1 << 1 | 1 << 2 | 1 << 5) + ones
    assert encode_sparse(np.array([1, 2, 5], "<u4"), np.ones(3, "<f4"), 6).tobytes() == bitmap
    # gaps 40, 39, 39: 6 bits each; the width, padded to a word
    deltas = header(3, 1) + b"\6\0\0\0" + struct.pack("<I", 40 | 39 << 6 | 39 << 12) + ones
    by_deltas = encode_sparse(np.array([40, 80, 120], "<u4"), np.ones(3, "<f4"), 130)
    assert by_deltas.tobytes() == deltas
    # 0..19 and 4,999 of 5,000: ones, and zeros of 40 bins of 128; then 7 bits each
    where = [*range(20), 4999]
    places = [i // 128 + j for j, i in enumerate(where)]
    lower = sum((i % 128) << (7 * j) for j, i in enumerate(where))
    found = encode_sparse(np.array(where, "<u4"), np.ones(21, "<f4"), 5000)
    expected = sum(1 << p for p in places).to_bytes(8, "little") + lower.to_bytes(20, "little")
    assert found.tobytes() == header(21, 2) + expected + struct.pack("<21f", *[1] * 21)


@pytest.mark.parametrize("wire", ["raw", "e4m3"])
def test_damage_is_an_error_or_other_indices(wire: str) -> None:
    """Whatever bytes come, nothing is read beside them, and the indices ascend below the size."""
    rng, n, refused = np.random.default_rng(5), 700, 0
    for kind, share in (("chance", 0.05), ("even", 0.05), ("chance", 0.6)):
        indices = some(kind, n, share)
        payload = encode_sparse(indices, values_of(indices.size), n, wire)
        for length in (*range(12), payload.size - 4, payload.size - 1):
            with pytest.raises(ValueError, match=r"decode_sparse: payload: "):
                decode_sparse(payload[:length], n, wire)
        with pytest.raises(ValueError, match=r"decode_sparse: payload: "):
            decode_sparse(np.concatenate([payload, payload[:4]]), n, wire)
        with pytest.raises(ValueError, match=r"decode_sparse: payload: "):
            decode_sparse(payload, n, "bf16")
        for _ in range(150):
            damaged = payload.copy()
            damaged[rng.integers(0, rng.choice([8, 40, payload.size]))] ^= 1 << rng.integers(8)
            try:
                found, values = decode_sparse(damaged, n, wire)
            except ValueError as error:
                assert str(error).startswith("decode_sparse: "), error
                refused += 1
            else:
                assert found.size == values.size and (np.diff(found.astype(np.int64)) > 0).all()
                assert not found.size or found[-1] < n
    assert refused > 100


@BOUNDED
@given(data=st.binary(max_size=80), count=st.integers(0, 40), encoding=st.integers(0, 3))
def test_rubbish_is_refused(data: bytes, count: int, encoding: int) -> None:
    payload = np.frombuffer(header(count, encoding) + data, np.uint8)
    try:
        found, values = decode_sparse(payload, 40)
    except ValueError:
        return
    assert found.size == values.size == count
    assert not count or (found[-1] < 40 and (np.diff(found.astype(np.int64)) > 0).all())


@every(
    ("indices", "values", "size", "wire", "said"),
    [
        (np.zeros(1, np.int64), np.ones(1, np.float32), 4, "raw", "indices: int64: must be uint32"),
        (np.zeros(1, np.uint32), np.ones(1), 4, "raw", "values: float64: must be float32"),
        (np.zeros(1, np.uint32), np.ones(2, np.float32), 4, "raw", "1 indices, but 2 values"),
        (np.array([4], np.uint32), np.ones(1, np.float32), 4, "raw", "ascend, be distinct and be"),
        (np.zeros(2, np.uint32), np.ones(2, np.float32), 4, "raw", "ascend, be distinct and be"),
        (np.zeros(1, np.uint32), np.ones(1, np.float32), 2**32, "raw", "size=4294967296: must be"),
        (np.zeros(1, np.uint32), np.ones(1, np.float32), 4, "e4m4m4", "e4m4m4"),
    ],
)
def test_what_cannot_travel_is_refused(
    indices: Any, values: Any, size: int, wire: str, said: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        encode_sparse(indices, values, size, wire)
    with pytest.raises(TypeError, match="decode_sparse: payload: int64: must be uint8, one axis"):
        decode_sparse(np.zeros(8, np.int64), 4)

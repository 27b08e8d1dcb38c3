"""Packing: every width against Python integers, and the bytes that are promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracles
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from cpdhpc.formats import SHIFT_BIAS, TILE, Cast, packed_bytes, parse_format, tiles

GOLDEN = Path(__file__).parent / "golden"
LENGTHS = (0, 1, 31, 32, 33, 1023, 1024, 1025, 2500)
GOLDEN_WIDTHS = (1, 3, 4, 6, 8, 11)
GOLDEN_TILES = ("e2m1fn", "e3m0", "e4m3", "e5m2")


def some_codes(n: int, bits: int) -> np.ndarray:
    """Codes by a multiplicative hash, so that the golden files can be made in any language."""
    spread = (np.arange(n, dtype=np.uint64) * 2654435761 + 12345) & 0xFFFFFFFF
    return (spread >> (32 - bits)).astype(np.uint32)


def some_values(n: int) -> np.ndarray:
    """Small integers times a power of two per tile, exact in float32."""
    i = np.arange(n)
    return np.ldexp((i * 7919 % 2001 - 1000).astype(np.float32), 5 - 11 * (i // TILE))


@every("bits", range(1, 33))
def test_every_width_equals_python_integers(ops: Any, bits: int) -> None:
    for n in LENGTHS:
        codes = some_codes(n, bits)
        packed = ops.pack(codes, bits)
        assert packed.dtype == np.uint8 and packed.size == packed_bytes(n, bits)
        assert packed.tobytes() == oracles.pack_integers(codes, bits)
        back = ops.unpack(packed, bits, n)
        assert back.dtype == np.uint32 and np.array_equal(back, codes)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(bits=st.integers(1, 32), data=st.data())
def test_any_code_comes_back(ops: Any, bits: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=70))
    array = np.array(codes, np.uint32)
    assert ops.unpack(ops.pack(array, bits), bits, array.size).tolist() == codes


@every("bits", GOLDEN_WIDTHS)
def test_golden_bytes_of_pack(ops: Any, bits: int) -> None:
    golden = bytes.fromhex((GOLDEN / f"pack-{bits}-bits.hex").read_text())
    assert ops.pack(some_codes(1000, bits), bits).tobytes() == golden
    assert np.array_equal(
        ops.unpack(np.frombuffer(golden, np.uint8), bits, 1000), some_codes(1000, bits)
    )


def oracle_tiles(name: str, x: np.ndarray) -> bytes:
    """Packed tiles and then their shifts, by the table of numbers and Python integers."""
    fmt = parse_format(name)
    grid = oracles.number_grid(fmt)
    packed, shifts = bytearray(), bytearray()
    for start in range(0, x.size, TILE):
        part = x[start : start + TILE].astype(np.float64)
        k = fmt.shift_max
        while np.ldexp(np.abs(part).max(), k) > grid[-2]:
            k -= 1
        scaled = np.ldexp(part, k)
        sign = np.signbit(part).astype(np.int64) << (fmt.bits - 1)
        code = oracles.grid_code(scaled, fmt, grid, "nearest") | sign
        packed += oracles.pack_integers(code, fmt.bits)
        shifts.append(k + SHIFT_BIAS)
    return bytes(packed + shifts)


@every("name", GOLDEN_TILES)
def test_golden_bytes_of_tiles(ops: Any, name: str) -> None:
    """Two tiles with tile scaling: the words, then one byte of shift per tile."""
    golden = bytes.fromhex((GOLDEN / f"tiles-{name}.hex").read_text())
    x, fmt = some_values(1100), parse_format(name)
    assert oracle_tiles(name, x) == golden
    words = np.zeros(packed_bytes(x.size, fmt.bits), np.uint8)
    shifts = np.zeros(tiles(x.size), np.uint8)
    ops.encode_tiles(x, Cast(fmt), words, shifts, fit=True)
    assert words.tobytes() + shifts.tobytes() == golden

"""Packing: every width against Python integers, and the bytes that are promised; ternary codes."""

from pathlib import Path
from typing import Any

import numpy as np
import oracles
from every import every

from cpdhpc.formats import SHIFT_BIAS, TILE, TRIT_BYTES, Cast, packed_bytes, parse_format, tiles
from cpdhpc.ops import reference

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


def some_trits(n: int) -> np.ndarray:
    """-1, 0 and 1 by a multiplicative hash."""
    return ((np.arange(n) * 2654435761 + 12345) % 2**32 * 3 // 2**32 - 1).astype(np.int64)


def trits_by_python(trits: np.ndarray) -> bytes:
    """The layout written out: a byte is digits in base 3, the first one the lowest."""
    out = bytearray()
    for start in range(0, len(trits), TILE):
        digit = [int(t) % 3 for t in trits[start : start + TILE]]  # -1 is 2
        groups = [
            [digit[(5 * g + i) * 32 + lane] for i in range(5)]
            for g in range(6)
            for lane in range(32)
        ]
        last = digit[960:]
        groups += [last[j : j + 5] for j in range(0, 64, 5)]
        out += bytes(sum(d * 3**i for i, d in enumerate(group)) for group in groups)
    return bytes(out)


def test_golden_trits(ops: Any) -> None:
    golden = np.frombuffer(bytes.fromhex((GOLDEN / "trits.hex").read_text()), np.uint8)
    trits = some_trits(2 * TILE)
    assert trits_by_python(trits) == golden.tobytes() and golden.size == 2 * TRIT_BYTES == 410
    words = reference.pack(np.array([0, 1, 3], np.uint32)[trits], 2)
    packed = np.full_like(golden, 0xA5)
    ops.pack_trits(words, packed)
    assert np.array_equal(packed, golden)
    back = np.full_like(words, 0xA5)
    ops.unpack_trits(packed, back)
    assert np.array_equal(back, words)


def test_every_byte_of_trits(ops: Any) -> None:
    """Negative zero becomes zero, and bytes that pack_trits never writes are read alike."""
    codes = np.arange(TILE, dtype=np.uint32) % 4
    packed, expected = np.zeros(TRIT_BYTES, np.uint8), np.zeros(TRIT_BYTES, np.uint8)
    ops.pack_trits(reference.pack(codes, 2), packed)
    reference.pack_trits(reference.pack(np.where(codes == 2, 0, codes), 2), expected)
    assert np.array_equal(packed, expected)
    strange = (np.arange(2 * TRIT_BYTES) % 256).astype(np.uint8)
    words, same = np.zeros(512, np.uint8), np.zeros(512, np.uint8)
    ops.unpack_trits(strange, words)
    reference.unpack_trits(strange, same)
    assert np.array_equal(words, same)

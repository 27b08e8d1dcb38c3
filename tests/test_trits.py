"""Ternary codes, five in a byte: the layout, byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cpdhpc.formats import TILE, TRIT_BYTES
from cpdhpc.ops import reference

GOLDEN = Path(__file__).parent / "golden"


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

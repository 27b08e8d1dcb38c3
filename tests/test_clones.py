"""The loops for all processors give the bits of the specification."""

from __future__ import annotations

import numpy as np
from every import every
from test_integers import N, format_of, shifts_of, values

from cpdhpc.formats import TRIT_BYTES, Cast, packed_bytes, sum_bits, tiles
from cpdhpc.ops import cpu, reference


@every("name", ["int7", "e4m3"])
def test_clones_give_the_same_bits(clone: str, name: str) -> None:
    fmt, x = format_of(name), values(N, 5)
    cast, bits, shifts = Cast(fmt, "stochastic"), sum_bits(format_of(name), 2), shifts_of(0, N)
    assert cpu.clone() == clone
    results = []
    for ops in (cpu, reference):
        codes, words = np.zeros(packed_bytes(N, fmt.bits), np.uint8), None
        ops.encode_tiles(x, cast, codes, shifts, key=(1, 2))
        words = np.zeros(packed_bytes(N, bits), np.uint8)
        ops.add_encode_integers_tiles(codes, 0, cast, x, shifts, words, bits, key=(3, 4))
        wide = np.zeros(packed_bytes(N, bits + 1), np.uint8)
        ops.add_integers_tiles(words, bits, codes, 0, fmt, wide, bits + 1)
        out = np.empty(N, np.float32)
        ops.decode_integers_tiles(wide, bits + 1, shifts, fmt, out)
        ternary = np.resize(codes, 256 * tiles(N))
        trits, back = np.zeros(TRIT_BYTES * tiles(N), np.uint8), np.zeros_like(ternary)
        ops.pack_trits(ternary, trits)
        ops.unpack_trits(trits, back)
        results.append((codes, words, wide, out.view(np.uint32), trits, back))
    for got, expected in zip(*results, strict=True):
        assert np.array_equal(got, expected)

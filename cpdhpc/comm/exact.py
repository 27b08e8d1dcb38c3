"""Wire of exact sums: contributions are codes on a shared grid, sums are integers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats import TRIT_BYTES, Cast, packed_bytes, sum_bits, tiles
from ..ops import backend_of
from ..randomness import Key

Array = npt.NDArray[Any]

MAX_BITS = 32  # of an integer that travels


@dataclass(frozen=True)
class Exact:
    """Sums of so many contributions as integers, multiples of the format's smallest number.

    A single contribution travels as codes of the format; sums are wider by just the bits that
    they can need, formats.sum_bits. All methods take shifts, uint8[tiles], the same on all ranks.
    trits: whether contributions, which are ternary, travel five in a byte
    """

    cast: Cast
    trits: bool = False
    terms: int = 1

    def of(self, terms: int) -> Exact:
        """Return the wire of sums of so many contributions."""
        return replace(self, terms=terms)

    @property
    def bits(self) -> int:
        """Width of the integers; 0 where there is one term, and codes travel."""
        return 0 if self.terms == 1 else sum_bits(self.cast.fmt, self.terms)

    def size_bytes(self, n: int) -> int:
        """Bytes of n values: whole tiles."""
        if self.trits and self.terms == 1:
            return tiles(n) * TRIT_BYTES
        return packed_bytes(n, self.bits or self.cast.fmt.bits)

    def _words(self, payload: Array) -> Array:
        """Return a payload's codes or integers, packed in tiles."""
        if not (self.trits and self.terms == 1):
            return payload
        words = self._ternary_words(payload)
        backend_of(payload).unpack_trits(payload, words)
        return words

    def _ternary_words(self, trits: Array) -> Array:
        size_bytes = trits.size // TRIT_BYTES * packed_bytes(1, self.cast.fmt.bits)
        return np.empty_like(trits, shape=(size_bytes,))

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array) -> None:
        """Write the contribution x, float32[n], into payload, uint8[size_bytes(n)].

        key, offset: the random stream, and the place of x in it
        """
        assert self.terms == 1, "a sum of several terms is made by add"
        ops = backend_of(x)
        words = self._ternary_words(payload) if self.trits else payload
        ops.encode_tiles(x, self.cast, words, shifts, key=key, offset=offset)
        if self.trits:
            ops.pack_trits(words, payload)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the sums into out, float32[n], rounded once; return how many are not finite."""
        ops = backend_of(out)
        words = self._words(payload)
        return ops.decode_integers_tiles(words, self.bits, shifts, self.cast.fmt, out)

    def add(self, a: Array, terms: int, b: Array, payload: Array) -> None:
        """Write the sums of payloads a, of so many terms, and b, of the others, into payload."""
        one, other = self.of(terms), self.of(self.terms - terms)
        words = (one._words(a), one.bits, other._words(b), other.bits)
        backend_of(a).add_integers_tiles(*words, self.cast.fmt, payload, self.bits)

    def add_encode(
        self, came: Array, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array
    ) -> None:
        """Write the sums of came, of one term less, and of the contribution x into payload.

        The same as encode and then add, in one pass over x.
        """
        before = self.of(self.terms - 1)
        words = (before._words(came), before.bits)
        backend_of(x).add_encode_integers_tiles(
            *words, self.cast, x, shifts, payload, self.bits, key=key, offset=offset
        )

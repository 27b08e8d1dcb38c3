"""Wires: what a chunk of float32 values becomes while it travels, and how bytes are added to it.

float32 as it is, packed codes of any format, and exact sums, whose contributions are codes on a
shared grid and whose sums are integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats import (
    INTEGERS,
    TILE,
    TRIT_BYTES,
    Cast,
    FloatFormat,
    packed_bytes,
    parse_format,
    sum_bits,
    tiles,
)
from ..partition import chunk
from ..randomness import Key
from . import backend_of

Array = npt.NDArray[Any]


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


@dataclass(frozen=True)
class Raw:
    """float32 as it is: nothing is rounded, and shifts and keys have no meaning."""

    def of(self, terms: int) -> Raw:
        """Return itself: sums are no wider."""
        return self

    def size_bytes(self, n: int) -> int:
        """Bytes of n values."""
        return 4 * n

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array) -> None:
        """Write the bytes of x into payload."""
        payload.view(np.float32)[:] = x

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the values into out; return 0, as nothing is checked."""
        out[:] = payload.view(np.float32)
        return 0

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values into out, which may be x."""
        np.add(x, payload.view(np.float32), out=out)

    def add_encode(
        self,
        came: Array,
        came_shifts: Array | None,
        x: Array,
        shifts: Array | None,
        key: Key,
        offset: int,
        payload: Array,
        out: Array | None,
    ) -> int:
        """Write the bytes of x plus the values into payload, and into out if given; return 0."""
        np.add(x, came.view(np.float32), out=payload.view(np.float32))
        return 0 if out is None else self.decode(payload, shifts, out)


@dataclass(frozen=True)
class Packed:
    """Codes of a small format, packed in tiles.

    fit: each tile chooses its shift, and the shift bytes follow the words of the payload; else
        all methods take shifts, uint8[tiles], that do not travel.
    """

    cast: Cast
    fit: bool

    def of(self, terms: int) -> Packed:
        """Return itself: sums are no wider."""
        return self

    def size_bytes(self, n: int) -> int:
        """Bytes of n values: whole tiles."""
        return packed_bytes(n, self.cast.fmt.bits) + (tiles(n) if self.fit else 0)

    def _split(self, payload: Array, shifts: Array | None, n: int) -> tuple[Array, Array]:
        """Return the words and the shifts of a payload."""
        border = packed_bytes(n, self.cast.fmt.bits)
        if shifts is None:
            return payload[:border], payload[border:]
        return payload, shifts

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array) -> None:
        """Write x, float32[n], into payload, uint8[size_bytes(n)].

        key, offset: the random stream, and the place of x in it
        """
        words, used = self._split(payload, shifts, x.size)
        ops = backend_of(x)
        ops.encode_tiles(x, self.cast, words, used, fit=self.fit, key=key, offset=offset)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the values into out, float32[n]; return how many are not finite."""
        words, used = self._split(payload, shifts, out.size)
        return backend_of(out).decode_tiles(words, used, self.cast.fmt, out)

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values, summed in float32, into out, which may be x."""
        words, used = self._split(payload, shifts, x.size)
        backend_of(x).decode_add_tiles(words, used, self.cast.fmt, x, out)

    def add_encode(
        self,
        came: Array,
        came_shifts: Array | None,
        x: Array,
        shifts: Array | None,
        key: Key,
        offset: int,
        payload: Array,
        out: Array | None,
    ) -> int:
        """Write x plus the values of the payload came into payload: one pass over the data.

        came_shifts, shifts: of the payload that came, and of the one that is written
        out: float32[n] for what payload decodes to, or None
        Returns how many values of out are not finite, 0 without it.
        """
        words_in, used_in = self._split(came, came_shifts, x.size)
        words, used = self._split(payload, shifts, x.size)
        options = {"fit": self.fit, "key": key, "offset": offset, "out": out}
        hop = backend_of(x).decode_add_encode_tiles
        return hop(words_in, used_in, self.cast, x, words, used, **options)


Wire = Raw | Packed | Exact


def parse_wire(wire: str | FloatFormat) -> FloatFormat | None:
    """Return the format of a wire that a user names; None for "raw".

    Raises ValueError for unknown names, TypeError for anything but a name or a FloatFormat.
    """
    if isinstance(wire, FloatFormat):
        return wire
    if not isinstance(wire, str):
        raise TypeError(f"allreduce: wire={wire!r}: must be 'raw', a format's name or FloatFormat")
    if wire in INTEGERS:
        return INTEGERS[wire]
    try:
        return None if wire == "raw" else parse_format(wire)
    except ValueError as error:
        raise ValueError(f"{error}; wires are also raw, {', '.join(INTEGERS)}") from None


@dataclass(frozen=True)
class Coder:
    """A wire for one chunk, values start..stop of the array, with the shifts of its tiles.

    take: size_bytes -> array for a payload
    """

    wire: Wire
    start: int
    stop: int
    shifts: Array | None
    take: Callable[[int], Array]

    def of(self, terms: int) -> Coder:
        """Return the coder of sums of so many contributions."""
        wire = self.wire.of(terms)
        return self if wire is self.wire else replace(self, wire=wire)

    @property
    def floats(self) -> Raw | Packed:
        """The wire, which is not one of exact sums."""
        assert not isinstance(self.wire, Exact), "exact sums are added by ExactChunk"
        return self.wire

    @property
    def size_bytes(self) -> int:
        """Bytes of the chunk on the wire."""
        return self.wire.size_bytes(self.stop - self.start)

    def place(self, out: Array) -> Array | None:
        """Return the bytes of out, the chunk's values, where they are a payload themselves."""
        return out.view(np.uint8) if isinstance(self.wire, Raw) else None

    def encode(self, x: Array, key: Key, place: Array | None = None) -> Array:
        """Return the payload of x, in place if given; a raw one may be x itself."""
        if place is None and isinstance(self.wire, Raw):
            return x.view(np.uint8)
        payload = self.take(self.size_bytes) if place is None else place
        self.wire.encode(x, self.shifts, key, self.start, payload)
        return payload

    def decode(self, payload: Array, out: Array) -> int:
        """Write the values into out; return how many are not finite."""
        return self.wire.decode(payload, self.shifts, out)

    def add(self, payload: Array, x: Array) -> None:
        """Add the values to x in place."""
        self.floats.add(payload, self.shifts, x, x)

    def add_encode(
        self,
        came: Array,
        coder: Coder,
        x: Array,
        key: Key,
        place: Array | None = None,
        out: Array | None = None,
    ) -> tuple[Array, int]:
        """Return the payload, in place if given, of x plus the values of came, made by coder.

        out: for what the payload decodes to, if that is wanted: written in the same pass
        The second result is how many values of out are not finite, 0 without it.
        """
        payload = self.take(self.size_bytes) if place is None else place
        where = key, self.start, payload, out
        return payload, self.floats.add_encode(came, coder.shifts, x, self.shifts, *where)

    def values(self, payload: Array) -> Array:
        """Return the values in an array of their own, float32."""
        out = self.take(4 * (self.stop - self.start)).view(np.float32)
        self.decode(payload, out)
        return out

    def rounded(self, x: Array, key: Key) -> Array:
        """Return Q(x): encoded and decoded, in an array of its own."""
        return self.values(self.encode(x, key))


def coders(
    wire: Wire,
    span: tuple[int, int],
    chunks: int,
    shifts: Array | None,
    take: Callable[[int], Array],
) -> tuple[Coder, ...]:
    """Return the coder of each chunk of the values start..stop, start on a tile.

    shifts: uint8 of each tile of the whole array, or None where they travel
    """

    def one(start: int, stop: int) -> Coder:
        first = start // TILE
        own = None if shifts is None else shifts[first : first + tiles(stop - start)]
        return Coder(wire, start, stop, own, take)

    start, stop = span
    parts = (chunk(stop - start, chunks, i) for i in range(chunks))
    return tuple(one(start + a, start + b) for a, b in parts)


@dataclass(frozen=True)
class DeviceRaw(Raw):
    """float32 as it is, with our own additions: CuPy's make subnormal numbers zero."""

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values into out, which may be x."""
        backend_of(x).add(x, payload.view(np.float32), out)

    def add_encode(
        self,
        came: Array,
        came_shifts: Array | None,
        x: Array,
        shifts: Array | None,
        key: Key,
        offset: int,
        payload: Array,
        out: Array | None,
    ) -> int:
        """Write the bytes of x plus the values into payload, and into out if given; return 0."""
        backend_of(x).add(x, came.view(np.float32), payload.view(np.float32))
        return 0 if out is None else self.decode(payload, shifts, out)

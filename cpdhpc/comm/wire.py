"""Wires: what a chunk of float32 values becomes while it travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats import SHIFT_NONFINITE, TILE, Cast, FloatFormat, packed_bytes, parse_format, tiles
from ..ops import backend_of
from ..randomness import Key

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Raw:
    """float32 as it is: nothing is rounded, and shifts and keys have no meaning."""

    def size_bytes(self, n: int) -> int:
        """Bytes of n values."""
        return 4 * n

    marks_nonfinite = False

    def marked(self, payload: Array, n: int) -> bool:
        """Return False: NaN and infinity are values like others."""
        return False

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int) -> Array:
        """Return the bytes of x: a view."""
        return x.view(np.uint8)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the values into out; return 0, as nothing is checked."""
        out[:] = payload.view(np.float32)
        return 0

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values into out, which may be x."""
        np.add(x, payload.view(np.float32), out=out)

    def add_encode(
        self,
        payload: Array,
        came: Array | None,
        x: Array,
        shifts: Array | None,
        key: Key,
        offset: int,
    ) -> Array:
        """Return the bytes of x plus the values."""
        return np.add(x, payload.view(np.float32)).view(np.uint8)


@dataclass(frozen=True)
class Packed:
    """Codes of a small format, packed in tiles.

    fit: each tile chooses its shift, and the shift bytes follow the words of the payload; else
        all methods take shifts, uint8[tiles], that do not travel.
    """

    cast: Cast
    fit: bool

    def size_bytes(self, n: int) -> int:
        """Bytes of n values: whole tiles."""
        return packed_bytes(n, self.cast.fmt.bits) + (tiles(n) if self.fit else 0)

    @property
    def marks_nonfinite(self) -> bool:
        """Whether all that is not finite is in tiles that are marked."""
        return self.fit and self.cast.overflow_code <= self.cast.fmt.max_code

    def marked(self, payload: Array, n: int) -> bool:
        """Whether a tile is marked as not finite; only where the shifts travel."""
        shifts = payload[packed_bytes(n, self.cast.fmt.bits) :]
        return bool((shifts == SHIFT_NONFINITE).any())

    def _split(self, payload: Array, shifts: Array | None, n: int) -> tuple[Array, Array]:
        """Return the words and the shifts of a payload."""
        border = packed_bytes(n, self.cast.fmt.bits)
        if shifts is None:
            return payload[:border], payload[border:]
        return payload, shifts

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int) -> Array:
        """Return the payload, uint8[size_bytes(n)], of x, float32[n].

        key, offset: the random stream, and the place of x in it
        """
        payload = np.empty_like(x, shape=(self.size_bytes(x.size),), dtype=np.uint8)
        words, used = self._split(payload, shifts, x.size)
        ops = backend_of(x)
        ops.encode_tiles(x, self.cast, words, used, fit=self.fit, key=key, offset=offset)
        return payload

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the values into out, float32[n]; return how many are not finite."""
        words, used = self._split(payload, shifts, out.size)
        return int(backend_of(out).decode_tiles(words, used, self.cast.fmt, out))

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values, summed in float32, into out, which may be x."""
        words, used = self._split(payload, shifts, x.size)
        backend_of(x).decode_add_tiles(words, used, self.cast.fmt, x, out)

    def add_encode(
        self,
        payload: Array,
        came: Array | None,
        x: Array,
        shifts: Array | None,
        key: Key,
        offset: int,
    ) -> Array:
        """Return the payload of x plus the values: one pass over the data.

        came, shifts: of the payload, and of what is returned
        """
        total = np.empty_like(payload)
        words_in, used_in = self._split(payload, came, x.size)
        words, used = self._split(total, shifts, x.size)
        backend_of(x).decode_add_encode_tiles(
            words_in, used_in, self.cast, x, words, used, fit=self.fit, key=key, offset=offset
        )
        return total


Wire = Raw | Packed


def parse_wire(wire: str | FloatFormat) -> FloatFormat | None:
    """Return the format of a wire that a user names; None for "raw".

    Raises ValueError for unknown names, TypeError for anything but a name or a FloatFormat.
    """
    if isinstance(wire, FloatFormat):
        return wire
    if not isinstance(wire, str):
        raise TypeError(f"allreduce: wire={wire!r}: must be 'raw', a format's name or FloatFormat")
    return None if wire == "raw" else parse_format(wire)


@dataclass(frozen=True)
class Coder:
    """A wire for one chunk, values start..stop of the array, with the shifts of its tiles."""

    wire: Wire
    start: int
    stop: int
    shifts: Array | None

    @classmethod
    def of(cls, wire: Wire, span: tuple[int, int], shifts: Array | None) -> Coder:
        """Return the coder of a span, given the shifts of the whole array's tiles."""
        start, stop = span
        own = (
            None if shifts is None else shifts[start // TILE : start // TILE + tiles(stop - start)]
        )
        return cls(wire, start, stop, own)

    @property
    def size_bytes(self) -> int:
        """Bytes of the chunk on the wire."""
        return self.wire.size_bytes(self.stop - self.start)

    def encode(self, x: Array, key: Key) -> Array:
        """Return the payload of x."""
        return self.wire.encode(x, self.shifts, key, self.start)

    def decode(self, payload: Array, out: Array) -> int:
        """Write the values into out; return how many are not finite."""
        return self.wire.decode(payload, self.shifts, out)

    def add(self, payload: Array, x: Array) -> None:
        """Add the values to x in place."""
        self.wire.add(payload, self.shifts, x, x)

    def add_encode(self, payload: Array, came: Coder, x: Array, key: Key) -> Array:
        """Return the payload of x plus the values of a payload of the coder came."""
        return self.wire.add_encode(payload, came.shifts, x, self.shifts, key, self.start)

    def marked(self, payload: Array) -> bool:
        """Whether a tile is marked as not finite; only where the shifts travel."""
        return self.wire.marked(payload, self.stop - self.start)

    def values(self, payload: Array, like: Array) -> Array:
        """Return the values in a new array, float32, of the kind of like."""
        out = np.empty_like(like, shape=(self.stop - self.start,), dtype=np.float32)
        self.decode(payload, out)
        return out

    def rounded(self, x: Array, key: Key) -> Array:
        """Return Q(x): encoded and decoded, in a new array."""
        return self.values(self.encode(x, key), x)

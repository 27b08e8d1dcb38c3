"""Wires: the encoding of a chunk of float32 values in messages, and its sums.

They are float32 itself, packed codes of any format, and exact sums, whose contributions are codes
on a common grid and whose sums are integers. The kernels of a wire are those of the array's
backend, or of an object with the same functions that records the calls or measures their times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError
from ..formats import (
    NAMED,
    NAMED_WIRES,
    NVFP4_BLOCK,
    SHARED,
    TILE,
    TRIT_BYTES,
    Cast,
    FloatFormat,
    Format,
    TableFormat,
    TwoScales,
    nvfp4_blocks,
    packed_bytes,
    shift_count,
    sum_bits,
    tiles,
    wire_format,
    wire_scaling,
)
from ..methods import suggest
from ..randomness import Key
from . import backend_of

Array = npt.NDArray[Any]

FLOAT32 = np.dtype(np.float32)
FLOAT32_MAN = 23  # mantissa bits, the most of any format


@dataclass(frozen=True)
class Exact:
    """Sums of contributions (terms) as integers, multiples of the format's smallest number.

    A single contribution travels as codes of the format; sums are wider by only the bits that
    they can need, formats.sum_bits. All methods take shifts, uint8[tiles], the same on all ranks.
    trits: whether contributions, which are ternary, travel five in a byte
    """

    cast: Cast
    trits: bool = False
    terms: int = 1
    kernels: Any = field(default=None, repr=False, compare=False)

    def of(self, terms: int) -> Exact:
        """Return the wire of sums of this number of contributions."""
        return replace(self, terms=terms)

    @property
    def bits(self) -> int:
        """Width of the integers; 0 for a single term, whose codes travel."""
        return 0 if self.terms == 1 else sum_bits(self.cast.fmt, self.terms)

    def size_bytes(self, n: int, terms: int | None = None) -> int:
        """Bytes of n values that are sums of terms contributions: whole tiles."""
        if terms is not None and terms != self.terms:
            return self.of(terms).size_bytes(n)
        if self.trits and self.terms == 1:
            return tiles(n) * TRIT_BYTES
        return packed_bytes(n, self.bits or self.cast.fmt.bits)

    def _words(self, payload: Array) -> Array:
        """Return a payload's codes or integers, packed in tiles."""
        if not (self.trits and self.terms == 1):
            return payload
        words = self._ternary_words(payload)
        (self.kernels or backend_of(payload)).unpack_trits(payload, words)
        return words

    def _ternary_words(self, trits: Array) -> Array:
        size_bytes = trits.size // TRIT_BYTES * packed_bytes(1, self.cast.fmt.bits)
        return np.empty_like(trits, shape=(size_bytes,))

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array) -> None:
        """Write the contribution x, float32[n], into payload, uint8[size_bytes(n)].

        key, offset: the random stream, and the place of x in it
        """
        assert self.terms == 1, "a sum of several terms is made by add"
        kernels = self.kernels or backend_of(x)
        words = self._ternary_words(payload) if self.trits else payload
        kernels.encode_tiles(x, self.cast, words, shifts, key=key, offset=offset)
        if self.trits:
            kernels.pack_trits(words, payload)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the sums into out, float32[n], rounded once; return how many are not finite."""
        kernels, words = self.kernels or backend_of(out), self._words(payload)
        return kernels.decode_integers_tiles(words, self.bits, shifts, self.cast.fmt, out=out)

    def add(self, a: Array, terms: int, b: Array, payload: Array) -> None:
        """Write the sums of payloads a, of terms terms, and b, of the others, into payload."""
        one, other = self.of(terms), self.of(self.terms - terms)
        words = (one._words(a), one.bits, other._words(b), other.bits)
        kernels = self.kernels or backend_of(a)
        kernels.add_integers_tiles(*words, self.cast.fmt, payload, self.bits)

    def add_encode(
        self, came: Array, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array
    ) -> None:
        """Write the sums of came, of one term less, and of the contribution x into payload.

        Equals encode and then add, in one pass over x.
        """
        before = self.of(self.terms - 1)
        words = (before._words(came), before.bits)
        (self.kernels or backend_of(x)).add_encode_integers_tiles(
            *words, self.cast, x, shifts, payload, self.bits, key=key, offset=offset
        )


@dataclass(frozen=True)
class Raw:
    """Values without encoding: nothing is rounded, and shifts and keys are ignored.

    dtype: of the values; float32 is added by kernels, others by NumPy or CuPy
    """

    dtype: Any = FLOAT32
    kernels: Any = field(default=None, repr=False, compare=False)

    def of(self, terms: int) -> Raw:
        """Return the wire of sums: itself."""
        return self

    def size_bytes(self, n: int, terms: int | None = None) -> int:
        """Bytes of n values; sums are no wider."""
        return int(self.dtype.itemsize) * n

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array) -> None:
        """Write the bytes of x into payload."""
        (self.kernels or backend_of(x)).copy(payload.view(self.dtype), x)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the values into out; return 0, as values are not checked."""
        (self.kernels or backend_of(out)).copy(out, payload.view(self.dtype))
        return 0

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values into out, which may be x."""
        is_float32 = self.dtype == np.float32
        add = (self.kernels or backend_of(x)).add if is_float32 else np.add
        add(x, payload.view(self.dtype), out)

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
        self.add(came, None, x, payload.view(self.dtype))
        return 0 if out is None else self.decode(payload, shifts, out)


class Growth(NamedTuple):
    """The number of bits that partial sums of an all-reduce have more than contributions.

    ranks: number of contributions of the whole sum
    hops: 0, or number of roundings of a partial sum on its way round a ring of all ranks
    free: if hops is 0, sums of up to so many contributions have no more bits
    """

    ranks: int
    hops: int = 0
    free: int = 1

    def bits(self, terms: int) -> int:
        """Return the additional mantissa bits of the partial sum of terms contributions.

        They are the fewest, g, with terms <= free * 4**g. By this rule another byte saves the same
        squared error in any partial sum if contributions are noise, and if they agree the error is
        smaller; docs/measurements/accuracy.md derives it.
        Round a ring of all ranks these would be too many bits; there they are the fewest with
        (terms / ranks)**2 * hops <= 3 * 4**g, by the error for contributions that agree. If the
        format rounds to nearest with a relative error e, and stochastically with e * sqrt(2), a
        partial sum is rounded with e * sqrt(2) / 2**g. It is terms / ranks of the whole sum. So all
        hops, for any number of them, add at most 6 e**2 to the squared error, and about half of
        that as g is an integer: with the last rounding the error is about 2 e.
        """
        if terms >= self.ranks:  # the result
            return 0
        if self.hops == 0:
            return next(g for g in count() if terms <= self.free * 4**g)
        return next(g for g in count() if self.hops * terms**2 <= 3 * 4**g * self.ranks**2)

    @property
    def any(self) -> bool:
        """Whether there is a partial sum with more bits."""
        return self.ranks > 1 and self.bits(self.ranks - 1) > 0


@lru_cache(maxsize=256)
def grown(cast: Cast, bits: int) -> Cast:
    """Return the cast of a partial sum with some bits more than the format.

    Nearest becomes stochastic: otherwise small contributions to a large sum would all be lost.
    """
    fmt = cast.float_format
    man = min(fmt.man + bits, FLOAT32_MAN)
    how = "stochastic" if cast.rounding == "nearest" else cast.rounding
    return replace(cast, fmt=replace(fmt, man=man), rounding=how)


@dataclass(frozen=True)
class Packed:
    """Codes of a small format, packed in tiles.

    fit: shifts are chosen while values are encoded, and follow the words of the payload; else all
        methods take shifts, uint8[tiles], that do not travel
    shared: number of values with a common shift if fit; from formats.SHARED
    growth: of partial sums; None: they have the bits of contributions
    """

    cast: Cast
    fit: bool
    shared: int = TILE
    growth: Growth | None = None
    kernels: Any = field(default=None, repr=False, compare=False)

    def of(self, terms: int) -> Packed:
        """Return the wire of sums of this number of contributions."""
        if self.growth is None:
            return self
        if terms not in self._grown:
            bits = self.growth.bits(terms)
            wider = replace(self, cast=grown(self.cast, bits), growth=None)
            self._grown[terms] = wider if bits else None
        return self._grown[terms] or self

    @cached_property
    def _grown(self) -> dict[int, Packed | None]:
        """The wires of partial sums by their terms; None for this one, to avoid a circle."""
        return {}

    def size_bytes(self, n: int, terms: int | None = None) -> int:
        """Bytes of n values that are sums of terms contributions: whole tiles."""
        if terms is not None and self.growth is not None:
            return self.of(terms).size_bytes(n)
        shifts = shift_count(n, self.shared) if self.fit else 0
        return packed_bytes(n, self.cast.fmt.bits) + shifts

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
        kernels = self.kernels or backend_of(x)
        kernels.encode_tiles(x, self.cast, words, used, fit=self.fit, key=key, offset=offset)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the values into out, float32[n]; return how many are not finite."""
        words, used = self._split(payload, shifts, out.size)
        return (self.kernels or backend_of(out)).decode_tiles(words, used, self.cast.fmt, out=out)

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values, summed in float32, into out, which may be x."""
        words, used = self._split(payload, shifts, x.size)
        (self.kernels or backend_of(x)).decode_add_tiles(words, used, self.cast.fmt, x, out)

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
        hop = (self.kernels or backend_of(x)).decode_add_encode_tiles
        return hop(words_in, used_in, self.cast, x, words, used, **options)


@dataclass(frozen=True)
class TwoScaled:
    """NVFP4: payloads of formats.TwoScales, which include all scales.

    A partial sum is encoded with new scales, those that its chunk needs.
    """

    cast: Cast
    kernels: Any = field(default=None, repr=False, compare=False)

    def of(self, terms: int) -> TwoScaled:
        """Return the wire of sums: itself."""
        return self

    def size_bytes(self, n: int, terms: int | None = None) -> int:
        """Bytes of n values; sums are no wider."""
        blocks = nvfp4_blocks(n)
        return blocks * NVFP4_BLOCK // 2 + -(-blocks // 4) * 4 + 4 if n else 0

    @staticmethod
    def _split(payload: Array, n: int) -> tuple[Array, Array, Array]:
        """Return the elements, the scales of blocks, and the scale of all, float32[1]."""
        blocks = nvfp4_blocks(n)
        border = blocks * NVFP4_BLOCK // 2
        return payload[:border], payload[border : border + blocks], payload[-4:].view(FLOAT32)

    def encode(self, x: Array, shifts: Array | None, key: Key, offset: int, payload: Array) -> None:
        """Write x, float32[n], into payload, uint8[size_bytes(n)].

        key, offset: the random stream, and the place of x in it
        """
        if x.size:
            words, scales, scale = self._split(payload, x.size)
            payload[words.size + scales.size :] = 0
            kernels = self.kernels or backend_of(x)
            kernels.encode_two_scales(x, self.cast, words, scales, scale, key=key, offset=offset)

    def decode(self, payload: Array, shifts: Array | None, out: Array) -> int:
        """Write the values into out, float32[n]; return how many are not finite."""
        return self._decoded(payload, None, out)

    def _decoded(self, payload: Array, more: Array | None, out: Array) -> int:
        if not out.size:
            return 0
        kernels = self.kernels or backend_of(out)
        return kernels.decode_two_scales(*self._split(payload, out.size), out=out, more=more)

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values, summed in float32, into out, which may be x."""
        self._decoded(payload, x, out)

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
        """Write x plus the values of the payload came into payload.

        out: float32[n] for what payload decodes to, or None
        Returns how many values of out are not finite, 0 without it.
        """
        total = np.empty_like(x)
        self._decoded(came, x, total)
        self.encode(total, None, key, offset, payload)
        return 0 if out is None else self.decode(payload, None, out)


Wire = Raw | Packed | Exact | TwoScaled


def parse_wire(wire: str | Format, name: str = "allreduce") -> Format | None:
    """Return the format of a wire, given by name or as a format; None for "raw".

    name: of the called function, for errors
    Raises ValueError for unknown names, TypeError for anything but a name or a format.
    """
    if isinstance(wire, FloatFormat | TableFormat):
        return wire
    if not isinstance(wire, str):
        raise ArgumentTypeError(name, "wire", wire, "must be 'raw', a format or its name")
    try:
        return wire_format(wire)
    except ValueError as error:
        advice = suggest(wire, ("raw", *NAMED_WIRES, *NAMED))
        if advice.startswith("did") and not wire.startswith("int"):
            raise ArgumentError(name, "wire", wire, advice) from None
        reason = re.sub(r"^\w+: ", "", str(error)).removeprefix(f"{wire!r}: ")
        also = "" if reason.endswith("?") else f"; wires are also raw, {', '.join(NAMED_WIRES)}"
        raise ArgumentError(name, "wire", wire, reason + also) from None


def packed_wire(wire: str | Format, name: str) -> Packed | None:
    """Return the packed wire of a format, with shifts that fit the values; None for "raw".

    Raises as parse_wire.
    """
    fmt = parse_wire(wire, name)
    if isinstance(fmt, TwoScales):
        raise ArgumentError(name, "wire", wire, "goes with all-reduces: its scale is a tensor's")
    return None if fmt is None else Packed(Cast(fmt), fit=True, shared=SHARED[wire_scaling(wire)])

"""One rank's part of a schedule with a wire: the program that the engine runs, and its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, repeat
from typing import Any, NamedTuple

import numpy as np

from ..formats import TILE, tiles
from ..methods import GROW
from ..ops import backend_of
from ..ops.payloads import FLOAT32, Array, Exact, Packed, Raw, TwoScaled, Wire
from ..randomness import Key, random_key
from .blocks import ChunkPlace, DataBlocks, Piece, Places, rounds
from .engine import Exchange, Program, ScheduleError, Take
from .schedules import Algorithm, Kind, Step


class PartialSum(NamedTuple):
    """A partial sum: total, float32, plus the decoded values of last, if there is one.

    shifts: those of last; terms: contributions in last
    A reader of one must not write into total: it may be a raw payload, in another rank's memory, or
    the caller's array.
    """

    total: Array
    last: Array | None
    shifts: Array | None
    terms: int = 1


# (chunk, payloads in the order of ranks) -> their sum, with its last term not yet added
Accumulate = Callable[["Chunk", Sequence[Array]], PartialSum]


def _float32(chunk: Chunk, payloads: Sequence[Array]) -> PartialSum:
    """Sum in float32."""
    raw, first = chunk.is_raw, payloads[0]  # a raw one is read in place
    total = first.view(chunk.dtype) if raw else chunk.values(first, chunk.sent)
    into = chunk.room() if raw and len(payloads) > 2 else total
    for payload in payloads[1:-1]:
        chunk.floats.add(payload, chunk.sent, total, into)
        total = into
    return PartialSum(total, payloads[-1] if len(payloads) > 1 else None, chunk.sent)


def _requantise(chunk: Chunk, payloads: Sequence[Array]) -> PartialSum:
    """Round to the wire after every addition: s = Q(s + g)."""
    total = chunk.values(payloads[0], chunk.sent)  # made here, so each sum is decoded into it
    sum_ = PartialSum(total, None, chunk.sent)
    for payload in payloads[1:]:
        if sum_.last is not None:
            chunk.wire.decode(chunk.encode_sum(sum_, next(chunk.keys)), chunk.result, total)
        sum_ = PartialSum(total, payload, chunk.sent)
    return sum_


def _kahan(chunk: Chunk, payloads: Sequence[Array]) -> PartialSum:
    """Compensate: y = Q(g - c); t = Q(s + y); c = Q(Q(t - s) - y); s = t.

    Source: CPD, kahan_sum_gradients; Kahan: Further remarks on reducing truncation errors,
    CACM 8(1), 1965.
    """
    keys, shifts = chunk.keys, chunk.result
    sum_ = PartialSum(chunk.values(payloads[0], chunk.sent), None, shifts)
    kernels = chunk.wire.kernels or backend_of(sum_.total)
    c: Array | None = None  # stands for zero, which changes no term

    def subtract(a: Array, b: Array) -> Array:
        out = chunk.room()
        kernels.subtract(a, b, out)
        return out

    def rounded(x: Array) -> Array:
        return chunk.values(chunk.encode(x, shifts, next(keys)), shifts)

    for payload in payloads[1:]:
        if sum_.last is not None:
            t = chunk.values(chunk.encode_sum(sum_, next(keys)), shifts)
            change = rounded(subtract(t, sum_.total))
            c = rounded(subtract(change, chunk.values(sum_.last, shifts)))
            sum_ = PartialSum(t, None, shifts)
        term = chunk.values(payload, chunk.sent)
        y = chunk.encode(term if c is None else subtract(term, c), shifts, next(keys))
        sum_ = PartialSum(sum_.total, y, shifts)
    return sum_


ACCUMULATES: dict[str, Accumulate] = {
    "float32": _float32,
    "requantise": _requantise,
    "kahan": _kahan,
    GROW: _float32,
}

PIECE_VALUES = 1 << 18, 1 << 20  # of a chunk that travel at a time: 1 MiB to 4 MiB of float32
NO_KEY = 0, 0
CONTRIBUTION, FINAL, BETWEEN = range(3)  # phases of random streams; BETWEEN and up: others


@dataclass(frozen=True)
class CollectivePlan:
    """The data that all ranks of one collective share.

    blocks: its data
    sent_shifts, result_shifts: uint8[tiles] for contributions, and for partial sums and the
        result, or None if none are needed or they travel
    accumulate: None for exact sums
    result_rounded: whether the result is rounded to the wire
    nodes: the node of each rank
    stream: (seed, iteration) of the random numbers, None if nothing is rounded stochastically
    copy: copy(memory, payload) copies a payload that must lie elsewhere
    slots: by rank and phase, memory for keys, uint32[2], which callers write later; None to pass
        the keys themselves
    """

    schedule: Algorithm
    blocks: DataBlocks
    accumulate: Accumulate | None
    wire: Wire
    sent_shifts: Array | None
    result_shifts: Array | None
    result_rounded: bool
    nodes: tuple[int, ...]
    stream: tuple[int, int] | None
    copy: Callable[[Array, Array], object] = np.copyto
    slots: dict[tuple[int, int], Any] | None = None

    @property
    def terms(self) -> int:
        """Number of contributions in a result."""
        return self.blocks.terms(len(self.nodes))

    def pieces(self) -> Sequence[Piece]:
        """Return the pieces of the data.

        PIECES of them, so that encoding, travel and decoding overlap, unless a chunk's part of
        one would be outside PIECE_VALUES. With "requantise" the result of an all-reduce depends on
        the pieces, as on everything that decides which rank adds first.
        """
        return self.blocks.pieces(self.schedule, self.nodes, *PIECE_VALUES)

    def places(self, rank: int, piece: Piece) -> Places:
        """Return the places of a rank's chunks in a piece, or in its part."""
        return rounds(self.schedule, self.nodes, self.blocks, rank, piece)[0]

    def key(self, rank: int, phase: int) -> Key:
        """Return the random stream of a rank and a phase.

        Phase 0 is for a rank's first message, 1 for the result, 2 and up for the roundings in
        between, in the order in which they happen. A value that is not summed counts as a result of
        the rank that encodes it. Results of sums, and the sums of all contributions that every rank
        computes by itself, use the number of the chunk instead of the rank: all get the same bits.
        """
        if self.stream is None:
            return NO_KEY
        if self.slots is not None:
            return self.slots.setdefault((rank, phase), np.zeros(2, np.uint32))
        return random_key(*self.stream, rank, phase)

    def keys_between(self, rank: int, index: int) -> Iterator[Key]:
        """Yield the random streams of a rank's roundings in between, in chunk index."""
        if self.stream is None:
            return repeat(NO_KEY)
        who = rank if self.schedule.result_travels else index
        return (self.key(who, phase) for phase in count(BETWEEN))


class Chunk:
    """A rank's state of one chunk, which begins on a tile.

    start: its place in the whole data
    out: its values in the rank's result, None if the result does not contain them
    raw_out: out as a payload, if the wire is raw: that of the result is the result itself
    sent, result: the shifts of its tiles for contributions, and for partial sums and the result
    take: size_bytes -> array for a payload
    first, keys: random streams of the first message, and of roundings in between

    A step "hold" comes before any "reduce", and "copy" is last. After them the state is:

    | after | held | pending | final | partial |
    |---|---|---|---|---|
    | no message | empty | None | None | the rank's part of x, only read |
    | hold, contribution | payloads by rank, the own one too once encoded | None | None | the same |
    | reduce | empty | the last sum received, of pending_terms | None | the sum without it |
    | finished, copy | empty | not read | the payload of the result | not read |

    summed: whether held contributions went into the sum, which is then no rank's first message
    nonfinite: the number of such values of out, once the result is in it
    """

    def __init__(
        self,
        plan: CollectivePlan,
        rank: int,
        index: int,
        place: ChunkPlace,
        x: Array,
        out: Array | None,
        take: Take,
    ) -> None:
        self.plan, self.rank, self.index, self.take = plan, rank, index, take
        start = self.start = place.at
        self.n, self.wire = place.n, plan.wire
        of_tiles = slice(start // TILE, start // TILE + tiles(self.n))
        sent, result = plan.sent_shifts, plan.result_shifts
        self.sent = None if sent is None else sent[of_tiles]
        self.result = None if result is None else result[of_tiles]
        self.is_raw = isinstance(plan.wire, Raw)
        self.partial = x if place.x is None else x[place.x : place.x + place.n]
        self.out = None if place.out is None or out is None else out[place.out :][: place.n]
        self.raw_out = self.out.view(np.uint8) if self.is_raw and self.out is not None else None
        self.pending: Array | None = None  # added while it is encoded
        self.pending_terms = 0
        self.held: dict[int, Array] = {}
        self.final: Array | None = None
        self.nonfinite: int | None = None
        self.summed = False
        self.first = plan.key(rank, CONTRIBUTION)
        self.keys = plan.keys_between(rank, index)

    @property
    def dtype(self) -> Any:
        """The dtype of values."""
        return self.wire.dtype if isinstance(self.wire, Raw) else FLOAT32

    @property
    def floats(self) -> Raw | Packed | TwoScaled:
        """The wire, unless it is for exact sums."""
        assert not isinstance(self.wire, Exact), "ExactChunk adds exact sums"
        return self.wire

    @property
    def grows(self) -> bool:
        """Whether partial sums have more bits, and are rounded only to travel."""
        return isinstance(self.wire, Packed) and self.wire.growth is not None

    def encode(
        self,
        x: Array,
        shifts: Array | None,
        key: Key,
        into: Array | None = None,
        wire: Wire | None = None,
    ) -> Array:
        """Return the payload of x, in memory that is given; a raw one may be x itself.

        wire: default that of contributions
        """
        wire = wire or self.wire
        if into is None and self.is_raw:
            return x.view(np.uint8)
        payload = self.take(wire.size_bytes(self.n)) if into is None else into
        wire.encode(x, shifts, key, self.start, payload)
        return payload

    def encode_sum(
        self,
        sum_: PartialSum,
        key: Key,
        into: Array | None = None,
        out: Array | None = None,
        terms: int = 1,
    ) -> Array:
        """Return the payload of a sum, in memory that is given; adds the last term on the way.

        out: for the decoded values of the payload, if wanted: written in the same pass
        terms: contributions in it
        """
        wire, came = self.floats.of(terms), self.floats.of(sum_.terms)
        if sum_.last is None or (came is not wire and came != wire):
            return self.encode(self.added(sum_), self.result, key, into, wire)
        payload = self.take(wire.size_bytes(self.n)) if into is None else into
        where = self.result, key, self.start, payload, out
        found = wire.add_encode(sum_.last, sum_.shifts, sum_.total, *where)
        if out is not None:
            self.nonfinite = found
        return payload

    def added(self, sum_: PartialSum) -> Array:
        """Return the values of a sum, float32[n], with its last term."""
        if sum_.last is None:
            return sum_.total
        total = self.room()
        self.floats.of(sum_.terms).add(sum_.last, sum_.shifts, sum_.total, total)
        return total

    def room(self) -> Array:
        """Return an array for values, float32[n], or of the dtype of a raw wire."""
        return self.take(self.dtype.itemsize * self.n).view(self.dtype)

    def values(self, payload: Array, shifts: Array | None) -> Array:
        """Return the values in an array of their own, float32."""
        out = self.room()
        self.wire.decode(payload, shifts, out)
        return out

    def outgoing(self, kind: Kind, terms: int, into: Array | None = None) -> Array:
        """Return the payload, of so many contributions, that a step of a kind sends.

        into: memory for it, used if it suits
        """
        if kind == "reduce":
            return self.partial_sum(terms, into)
        return self.contribution() if kind == "hold" else self.finished(into)

    def incoming(self, kind: Kind, source: int, payload: Array, terms: int) -> None:
        """Process the payload of a received step of a kind: the sum of so many contributions."""
        if kind == "reduce":
            self.reduce(payload, terms)
        elif kind == "hold":
            self.hold(source, payload)
        else:  # the result: contributions are no longer needed
            self.final = payload
            self.held.clear()

    def contribution(self) -> Array:
        """Return the payload of the rank's own contribution, which is kept."""
        if self.rank not in self.held:
            self.held[self.rank] = self.encode(self.partial, self.sent, self.first)
        return self.held[self.rank]

    def hold(self, source: int, payload: Array) -> None:
        """Keep the contribution of another rank."""
        self.held[source] = payload

    def partial_sum(self, terms: int, into: Array | None = None) -> Array:
        """Return the payload of the partial sum; its random numbers are used for nothing else."""
        between = bool(self.held) or self.summed
        sum_ = self._sum()
        key = next(self.keys) if between else self.first
        return self.encode_sum(sum_, key, into, terms=terms)

    def _sum(self) -> PartialSum:
        """Return the partial sum with all received payloads; held ones are freed."""
        if self.held:
            return self._held_sum()
        came, self.pending = self.pending, None
        return PartialSum(self.partial, came, self.result, self.pending_terms)

    def reduce(self, payload: Array, terms: int) -> None:
        """Add a partial sum of so many terms to the rank's own, rounding between two additions."""
        if self.held:
            total, last, shifts, _ = self._held_sum()
            self.partial = total if last is None or not self.is_raw else self.room()
            if last is not None:
                self.floats.add(last, shifts, total, self.partial)
        elif self.pending is not None and self.grows:
            self.partial = self.added(self._sum())
        elif self.pending is not None:
            rounded = self.encode_sum(self._sum(), next(self.keys))
            self.partial = self.values(rounded, self.result)
        self.pending, self.pending_terms = payload, terms

    def finished(self, into: Array | None = None) -> Array:
        """Return the payload of the result, which this rank computes or has received.

        If the last addition computes it, it is written to out as well: that saves a pass over
        memory compared with decoding the payload afterwards.
        """
        if self.final is None:
            sums = self.plan.blocks.share.sums
            key = self.plan.key(self.index if sums else self.rank, FINAL)
            if self.is_raw and not sums:  # others need not wait for a copy
                self.final = self.partial.view(np.uint8)
                return self.final
            at_once = self.raw_out is None and self.pending is not None and not self.held
            where = into if self.raw_out is None else self.raw_out
            out, terms = self.out if at_once else None, self.plan.terms
            self.final = self.encode_sum(self._sum(), key, where, out, terms)
        return self.final

    def _held_sum(self) -> PartialSum:
        """Sum the held contributions and the own one in the order of ranks; free them."""
        self.contribution()
        assert self.plan.accumulate is not None, "exact sums are ExactChunk's"
        payloads = [self.held[rank] for rank in sorted(self.held)]
        self.held.clear()
        self.summed = True
        return self.plan.accumulate(self, payloads)

    def write(self) -> int:
        """Write the result, float32, into out, if there is one; count its non-finite values.

        Results that are not rounded are not counted: the caller checks them as a whole.
        """
        if self.out is None:
            return 0
        if self.final is None and not self.plan.result_rounded:
            # Only gather and reduce-scatters leave the result unrounded. If one of the latter has
            # held nothing, as by rings or with one rank, the own contribution is not rounded
            # either. Gather holds all; with one rank, too, it rounds the own one, as with more.
            by_rings = self.plan.blocks.name == "reduce_scatter" and not self.held
            total, last, shifts, terms = self._sum() if by_rings else self._held_sum()
            if last is None:
                self.plan.copy(self.out, total)
            else:
                self.floats.of(terms).add(last, shifts, total, self.out)
            return 0
        final = self.finished()
        if self.nonfinite is None:
            in_place = final is self.raw_out
            self.nonfinite = 0 if in_place else self.wire.decode(final, self.result, self.out)
        return self.nonfinite


class ExactChunk(Chunk):
    """A rank's state of one chunk: the sum of received payloads, and its number of terms.

    Integers are summed on arrival, as the order does not matter. The rank's own contribution is
    added when the sum is sent or finished: in the pass in which it is encoded, unless it had to be
    sent by itself. Its random numbers are the same either way.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.wire, Exact)
        self.codes = self.wire  # of a contribution
        self.came: Array | None = None
        self.terms = 0
        self.own: Array | None = None

    def contribution(self) -> Array:
        """Return the payload of the rank's own contribution, which is kept."""
        if self.own is None:
            self.own = self.take(self.codes.size_bytes(self.n))
            self.codes.encode(self.partial, self.sent, self.first, self.start, self.own)
        return self.own

    def hold(self, source: int, payload: Array) -> None:
        """Add the contribution of another rank."""
        self.reduce(payload, 1)

    def reduce(self, payload: Array, terms: int) -> None:
        """Add the sum of so many contributions."""
        self.came = payload if self.came is None else self._added(payload, terms, None)
        self.terms += terms

    def _added(self, payload: Array, terms: int, into: Array | None) -> Array:
        """Return the payload of the received sum and of so many more terms, maybe in place."""
        wire, total = self._room(terms, into)
        assert self.came is not None, "the first payload is kept unchanged"
        wire.add(self.came, self.terms, payload, total)
        return total

    def _room(self, terms: int, into: Array | None) -> tuple[Exact, Array]:
        """Return the wire, and bytes, for so many terms more than were received."""
        wire = self.codes.of(self.terms + terms)
        return wire, self.take(wire.size_bytes(self.n)) if into is None else into

    def partial_sum(self, terms: int, into: Array | None = None) -> Array:
        """Return the payload of the sum of the received payloads and the own contribution."""
        if self.came is None:
            return self.contribution()
        if self.own is not None:
            return self._added(self.own, 1, into)
        wire, total = self._room(1, into)
        wire.add_encode(self.came, self.partial, self.sent, self.first, self.start, total)
        return total

    def finished(self, into: Array | None = None) -> Array:
        """Return the payload of the result, which this rank computes or has received."""
        if self.final is None:
            terms = self.plan.terms
            if self.terms + 1 != terms:
                raise ScheduleError(
                    f"rank {self.rank} has {self.terms + 1} contributions to chunk {self.index}: "
                    f"needs all {terms}"
                )
            self.final = self.partial_sum(terms, into)
        return self.final

    def write(self) -> int:
        """Write the result, float32, into out, if there is one; count its non-finite values."""
        if self.out is None:
            return 0
        wire = self.codes.of(self.plan.terms)
        return wire.decode(self.finished(), self.result, self.out)


ALIGNED_BYTES = 16  # kernels read and write payloads in words


def program(
    plan: CollectivePlan, piece: Piece, rank: int, x: Array, out: Array | None, take: Take
) -> Program[int]:
    """Run a rank's part of a piece: yield exchanges, add received payloads, write the result.

    x: float32, not written; out: float32 for the result, or None if another rank of this process
    writes it, or no result is wanted; both of the sizes of its blocks; take: for payloads
    Returns the number of non-finite values in the result; 0 for a raw wire.
    """
    places, steps = rounds(plan.schedule, plan.nodes, plan.blocks, rank, piece)
    kind = ExactChunk if isinstance(plan.wire, Exact) else Chunk
    chunks = {i: kind(plan, rank, i, place, x, out, take) for i, place in places.items()}
    for number, step in steps:
        coming = [chunks[i] for i in step.recv_chunks]
        sizes = _sizes(coming, step.recv_terms)
        received = yield Exchange(
            send_to=step.send_to,
            payload=None if step.send_to is None else _message(chunks, step, take),
            recv_from=step.recv_from,
            nbytes=sum(sizes),
            round=number,
            recv_chunks=step.recv_chunks,
            send_chunks=step.send_chunks,
            place=coming[0].raw_out if step.kind == "copy" and len(coming) == 1 else None,
        )
        if step.recv_from is not None:
            parts = _parts(plan, received, sizes, take)
            for each, part, terms in zip(coming, parts, step.recv_terms, strict=True):
                each.incoming(step.kind, step.recv_from, part, terms)
    return sum(each.write() for each in chunks.values())


def _sizes(chunks: Sequence[Chunk], terms: Sequence[int]) -> list[int]:
    """Return the size in bytes of each payload in a message."""
    return [each.plan.wire.size_bytes(each.n, m) for each, m in zip(chunks, terms, strict=True)]


def _message(chunks: Mapping[int, Chunk], step: Step, take: Take) -> Array:
    """Return the payloads of the chunks that a step sends, one after another."""
    gone = [chunks[i] for i in step.send_chunks]
    if len(gone) == 1:
        return gone[0].outgoing(step.kind, step.send_terms[0])
    sizes = _sizes(gone, step.send_terms)
    message = take(sum(sizes))
    for each, terms, size, end in zip(gone, step.send_terms, sizes, accumulate(sizes), strict=True):
        into = message[end - size : end]
        payload = each.outgoing(step.kind, terms, None if (end - size) % ALIGNED_BYTES else into)
        if payload is not into:
            each.plan.copy(into, payload)
    return message


def _parts(
    plan: CollectivePlan, message: Array, sizes: Sequence[int], take: Take
) -> Iterator[Array]:
    """Yield a message's payloads, of these sizes, each aligned for kernels."""
    if len(sizes) == 1:  # the message itself: a raw result may already be in its place
        yield message
        return
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        part = message[end - size : end]
        if (end - size) % ALIGNED_BYTES:
            aligned = take(size)
            plan.copy(aligned, part)
            part = aligned
        yield part

"""One rank's part of a schedule with a wire: the program that the engine runs, and its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, NamedTuple

import numpy as np

from ..ops import backend_of
from ..ops.payloads import Array, Coder, Exact, Wire, coders
from ..partition import chunk
from ..randomness import Key, random_key
from .engine import Exchange, Program, ScheduleError, Take
from .schedules import Kind, Layout, Schedule, Step


class Sum(NamedTuple):
    """total, float32, plus what last holds, if anything; coder: how last is encoded."""

    total: Array
    last: Array | None
    coder: Coder

    def value(self) -> Array:
        """Return the sum, not rounded."""
        if self.last is not None:
            self.coder.add(self.last, self.total)
        return self.total

    def encode(self, result: Coder, key: Key, place: Array | None = None) -> Array:
        """Return the payload of the sum, in place if given."""
        if self.last is None:
            return result.encode(self.total, key, place)
        return result.add_encode(self.last, self.coder, self.total, key, place)[0]


# (payloads in the order of ranks, how they and how partial sums are encoded, random streams of
# the roundings) -> sum
Accumulate = Callable[[Sequence[Array], Coder, Coder, Iterator[Key]], Sum]


def _float32(payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key]) -> Sum:
    """Sum in float32."""
    total = sent.values(payloads[0])
    for payload in payloads[1:-1]:
        sent.add(payload, total)
    return Sum(total, payloads[-1] if len(payloads) > 1 else None, sent)


def _requantise(payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key]) -> Sum:
    """Round to the wire after every addition: s = Q(s + g)."""
    sum_ = Sum(sent.values(payloads[0]), None, sent)
    for payload in payloads[1:]:
        if sum_.last is not None:
            rounded = sum_.encode(partial, next(keys))
            partial.decode(rounded, sum_.total)
        sum_ = Sum(sum_.total, payload, sent)
    return sum_


def _kahan(payloads: Sequence[Array], sent: Coder, partial: Coder, keys: Iterator[Key]) -> Sum:
    """Compensate: y = Q(g - c); t = Q(s + y); c = Q(Q(t - s) - y); s = t.

    Source: CPD, kahan_sum_gradients; Kahan: Further remarks on reducing truncation errors,
    CACM 8(1), 1965.
    """
    sum_ = Sum(sent.values(payloads[0]), None, partial)
    subtract = backend_of(sum_.total).subtract
    c = np.zeros_like(sum_.total)
    for payload in payloads[1:]:
        if sum_.last is not None:
            t = partial.values(sum_.encode(partial, next(keys)))
            change = partial.rounded(subtract(t, sum_.total), next(keys))
            c = partial.rounded(subtract(change, partial.values(sum_.last)), next(keys))
            sum_ = Sum(t, None, partial)
        y = partial.encode(subtract(sent.values(payload), c), next(keys))
        sum_ = Sum(sum_.total, y, partial)
    return sum_


ACCUMULATES: dict[str, Accumulate] = {
    "float32": _float32,
    "requantise": _requantise,
    "kahan": _kahan,
}

PIECES = 8
PIECE_VALUES = 1 << 18, 1 << 20  # of a chunk that travel at a time: 1 MiB to 4 MiB of float32
CONTRIBUTION, FINAL, BETWEEN = range(3)  # phases of random streams; BETWEEN and up: others


class Piece(NamedTuple):
    """Values start..stop of the data, which are reduced by themselves."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """What all ranks of one all-reduce share.

    sent_shifts, result_shifts: uint8[tiles] for contributions, and for partial sums and the
        result, or None where none are needed or they travel
    accumulate: None where sums are exact
    result_rounded: whether the result is rounded to the wire
    nodes: the node of each rank
    stream: (seed, iteration) of the random numbers
    copy: (place, payload) copies a payload that must lie elsewhere
    """

    schedule: Schedule
    accumulate: Accumulate | None
    wire: Wire
    sent_shifts: Array | None
    result_shifts: Array | None
    result_rounded: bool
    nodes: tuple[int, ...]
    stream: tuple[int, int]
    copy: Callable[[Array, Array], None] = np.copyto

    def pieces(self, n: int) -> list[Piece]:
        """Return the pieces of n values.

        PIECES of them, so that encoding, travel and decoding overlap, unless a chunk's part of
        one would leave PIECE_VALUES. With "requantise" the result depends on the pieces, as on
        all that decides which rank adds first.
        """
        chunks, (least, most) = self.schedule.chunks(Layout(self.nodes)), PIECE_VALUES
        count = max(1, min(-(-n // (chunks * least)), max(PIECES, -(-n // (chunks * most)))))
        return [Piece(i, *chunk(n, count, i)) for i in range(count)]

    def key(self, rank: int, phase: int) -> Key:
        """Return the random stream of a rank and a phase.

        Phase 0 is what a rank sends first, 1 the result, 2 and up the roundings in between, in
        the order in which they happen. Results, and the sums of all contributions that every rank
        forms by itself, take the number of the chunk for the rank: all get the same.
        """
        return random_key(*self.stream, rank, phase)

    def keys_between(self, rank: int, index: int) -> Iterator[Key]:
        """Yield the random streams of a rank's roundings in between, in chunk index."""
        who = rank if self.schedule.result_travels else index
        return (self.key(who, phase) for phase in count(BETWEEN))


class Chunk:
    """A rank's state of one chunk."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        index: int,
        sent: Coder,
        result: Coder,
        x: Array,
        out: Array | None,
    ) -> None:
        self.plan, self.rank, self.index = plan, rank, index
        self.sent, self.result = sent, result
        self.partial = x[sent.start : sent.stop]  # the rank's own, until it adds
        self.out = None if out is None else out[sent.start : sent.stop]
        self.place = None if self.out is None else result.place(self.out)
        self.pending: Array | None = None  # came in, not yet added: added while it is encoded
        self.held: dict[int, Array] = {}  # contributions by rank, not yet summed
        self.final: Array | None = None  # payload of the result
        self.nonfinite: int | None = None  # values of out, once the result is in it
        self.summed = False  # whether what was held is in the partial sum
        self.first = plan.key(rank, CONTRIBUTION)
        self.keys = plan.keys_between(rank, index)

    def outgoing(self, kind: Kind, place: Array | None = None) -> Array:
        """Return the payload that a step of a kind sends, in place if that is given and suits."""
        send = {"reduce": self.partial_sum, "hold": self.contribution, "copy": self.finished}
        return send[kind](place)

    def incoming(self, kind: Kind, source: int, payload: Array, terms: int) -> None:
        """Take in what a step of a kind has brought: the sum of so many contributions."""
        take = {"reduce": self.reduce, "hold": self.hold, "copy": self.copy}
        take[kind](source, payload, terms)

    def contribution(self, place: Array | None = None) -> Array:
        """Return the payload of the rank's own contribution, which is kept."""
        if self.rank not in self.held:
            self.held[self.rank] = self.sent.encode(self.partial, self.first)
        return self.held[self.rank]

    def hold(self, source: int, payload: Array, terms: int) -> None:
        """Keep the contribution of another rank."""
        self.held[source] = payload

    def partial_sum(self, place: Array | None = None) -> Array:
        """Return the payload of the partial sum; its random numbers are used for nothing else."""
        if self.held:
            return self._held_sum().encode(self.result, next(self.keys), place)
        return self._encoded(next(self.keys) if self.summed else self.first, place)

    def _encoded(self, key: Key, place: Array | None = None) -> Array:
        if self.held:
            return self._held_sum().encode(self.result, key, place)
        if self.pending is None:
            return self.result.encode(self.partial, key, place)
        came, self.pending = self.pending, None
        return self.result.add_encode(came, self.result, self.partial, key, place)[0]

    def reduce(self, source: int, payload: Array, terms: int) -> None:
        """Add a partial sum of so many terms to the rank's own, rounding between two additions."""
        if self.held:
            self.partial = self._held_sum().value()
        elif self.pending is not None:
            self.partial = self.result.values(self._encoded(next(self.keys)))
        self.pending = payload

    def finished(self, place: Array | None = None) -> Array:
        """Return the payload of the result, which this rank forms or has received."""
        if self.final is None:
            key = self.plan.key(self.index, FINAL)
            if self.place is None and self.pending is not None and self.out is not None:
                self.final = self._written(key, place)
            else:
                self.final = self._encoded(key, place if self.place is None else self.place)
        return self.final

    def _written(self, key: Key, place: Array | None) -> Array:
        """Return the payload of the result that the last addition gives; write it to out as well.

        One pass over memory less than to decode the payload afterwards.
        """
        assert self.pending is not None, "what is held is summed by Sum"
        came, self.pending = self.pending, None
        final, self.nonfinite = self.result.add_encode(
            came, self.result, self.partial, key, place, self.out
        )
        return final

    def copy(self, source: int, payload: Array, terms: int) -> None:
        """Keep the result as it came; contributions are not needed any more."""
        self.final = payload
        self.held.clear()

    def _held_sum(self) -> Sum:
        """Sum the held contributions and the own one in the order of ranks; free them."""
        self.contribution()
        assert self.plan.accumulate is not None, "exact sums are those of ExactChunk"
        payloads = [self.held[rank] for rank in sorted(self.held)]
        self.held.clear()
        self.summed = True
        return self.plan.accumulate(payloads, self.sent, self.result, self.keys)

    def write(self) -> int:
        """Write the result, float32, into out, if there is one; count what is not finite."""
        if self.out is None:
            return 0
        if self.final is None and not self.plan.result_rounded:
            self.out[:] = self._held_sum().value()
            return self.out.size - np.isfinite(self.out).sum()
        final = self.finished()
        if self.nonfinite is None:
            self.nonfinite = 0 if final is self.place else self.result.decode(final, self.out)
        return self.nonfinite


class ExactChunk(Chunk):
    """A rank's state of one chunk: the sum of what came in, and how many terms it has.

    Integers are summed as they come, for no order matters. The rank's own contribution joins when
    the sum is sent or finished: in the pass in which it is encoded, unless it had to be sent by
    itself. Its random numbers are the same either way.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.sent.wire, Exact)
        self.wire = self.sent.wire
        self.came: Array | None = None
        self.terms = 0
        self.own: Array | None = None

    def contribution(self, place: Array | None = None) -> Array:
        """Return the payload of the rank's own contribution, which is kept."""
        if self.own is None:
            self.own = self.sent.encode(self.partial, self.first)
        return self.own

    def hold(self, source: int, payload: Array, terms: int) -> None:
        """Add the contribution of another rank."""
        self.reduce(source, payload, terms)

    def reduce(self, source: int, payload: Array, terms: int) -> None:
        """Add the sum of so many contributions."""
        self.came = payload if self.came is None else self._added(payload, terms, None)
        self.terms += terms

    def _added(self, payload: Array, terms: int, place: Array | None) -> Array:
        """Return the payload of what came in and of so many terms more, in place if given."""
        wire, total = self._room(terms, place)
        assert self.came is not None, "the first payload is kept as it is"
        wire.add(self.came, self.terms, payload, total)
        return total

    def _room(self, terms: int, place: Array | None) -> tuple[Exact, Array]:
        """Return the wire, and bytes, for so many terms more than have come in."""
        wire = self.wire.of(self.terms + terms)
        size_bytes = wire.size_bytes(self.partial.size)
        return wire, self.sent.take(size_bytes) if place is None else place

    def partial_sum(self, place: Array | None = None) -> Array:
        """Return the payload of the sum of what came in and of the rank's own contribution."""
        if self.came is None:
            return self.contribution()
        if self.own is not None:
            return self._added(self.own, 1, place)
        wire, total = self._room(1, place)
        where = (self.sent.shifts, self.first, self.sent.start)
        wire.add_encode(self.came, self.partial, *where, total)
        return total

    def finished(self, place: Array | None = None) -> Array:
        """Return the payload of the result, which this rank forms or has received."""
        if self.final is None:
            ranks = len(self.plan.nodes)
            if self.terms + 1 != ranks:
                raise ScheduleError(
                    f"rank {self.rank} has {self.terms + 1} contributions to chunk {self.index}: "
                    f"needs all {ranks}"
                )
            self.final = self.partial_sum(place)
        return self.final


ALIGNED_BYTES = 16  # kernels read and write payloads word by word


def program(
    plan: Plan, piece: Piece, rank: int, x: Array, out: Array | None, take: Take
) -> Program[int]:
    """Carry out a rank's part in a piece: yield exchanges, add what comes in, write the result.

    x: float32[n], not written; out: float32[n] for the result, or None where another rank of this
    process writes it; take: for payloads
    Returns how many values of the result are not finite; 0 for a raw wire.
    """
    layout, span = Layout(plan.nodes, piece.number), (piece.start, piece.stop)
    count = plan.schedule.chunks(layout)
    sent = coders(plan.wire, span, count, plan.sent_shifts, take)
    result = coders(plan.wire.of(layout.ranks), span, count, plan.result_shifts, take)
    kind = ExactChunk if isinstance(plan.wire, Exact) else Chunk
    chunks = [
        kind(plan, rank, i, *each, x, out) for i, each in enumerate(zip(sent, result, strict=True))
    ]
    for number, step in enumerate(plan.schedule.steps(rank, layout)):
        received = yield _exchange(chunks, step, number, take)
        if step.recv_from is not None:
            into = [chunks[i] for i in step.recv_chunks]
            parts = _parts(plan, received, _sizes(into, step.recv_terms), take)
            for each, part, terms in zip(into, parts, step.recv_terms, strict=True):
                each.incoming(step.kind, step.recv_from, part, terms)
    return sum(each.write() for each in chunks)


def _exchange(chunks: Sequence[Chunk], step: Step, number: int, take: Take) -> Exchange:
    into = [chunks[i] for i in step.recv_chunks]
    out = [chunks[i] for i in step.send_chunks]
    return Exchange(
        send_to=step.send_to,
        payload=None if step.send_to is None else _message(out, step, take),
        recv_from=step.recv_from,
        nbytes=sum(_sizes(into, step.recv_terms)),
        round=number,
        recv_chunks=step.recv_chunks,
        send_chunks=step.send_chunks,
        place=into[0].place if step.kind == "copy" and len(into) == 1 else None,
    )


def _sizes(chunks: Sequence[Chunk], terms: Sequence[int]) -> list[int]:
    """Return the bytes of each payload in a message."""
    return [each.sent.of(m).size_bytes for each, m in zip(chunks, terms, strict=True)]


def _message(chunks: Sequence[Chunk], step: Step, take: Take) -> Array:
    """Return the payloads of chunks one after another."""
    if len(chunks) == 1:
        return chunks[0].outgoing(step.kind)
    sizes = _sizes(chunks, step.send_terms)
    message = take(sum(sizes))
    for each, size, end in zip(chunks, sizes, accumulate(sizes), strict=True):
        place = message[end - size : end]
        payload = each.outgoing(step.kind, None if (end - size) % ALIGNED_BYTES else place)
        if payload is not place:
            each.plan.copy(place, payload)
    return message


def _parts(plan: Plan, message: Array, sizes: Sequence[int], take: Take) -> Iterator[Array]:
    """Yield the payloads of these sizes that a message holds, each where kernels can read it."""
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        part = message[end - size : end]
        if (end - size) % ALIGNED_BYTES:
            aligned = take(size)
            plan.copy(aligned, part)
            part = aligned
        yield part

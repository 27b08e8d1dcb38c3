"""Carries out one rank's part of a schedule with a wire: the program that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np

from ..partition import chunk
from ..randomness import Key, random_key
from .accumulate import Accumulate, Sum
from .engine import Exchange, Program, Take
from .schedule import Schedule
from .step import Layout, Step
from .wire import Array, Coder, Wire, coders

PIECE = 1 << 18  # values of a chunk that travel at a time: 1 MiB of float32
CONTRIBUTION, FINAL, BETWEEN = range(3)  # phases of random streams; BETWEEN and up: others
ALIGNED_BYTES = 16  # kernels read and write payloads word by word


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
    result_rounded: whether the result is rounded to the wire
    nodes: the node of each rank
    stream: (seed, iteration) of the random numbers
    """

    schedule: Schedule
    accumulate: Accumulate
    wire: Wire
    sent_shifts: Array | None
    result_shifts: Array | None
    result_rounded: bool
    nodes: tuple[int, ...]
    stream: tuple[int, int]

    def pieces(self, n: int) -> list[Piece]:
        """Return the pieces of n values.

        PIECE values of every chunk, so that encoding, travel and decoding overlap. With
        "requantise" the result depends on PIECE, as on all that decides which rank adds first.
        """
        count = max(1, -(-n // (self.schedule.chunks(Layout(self.nodes)) * PIECE)))
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


class _Chunk:
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
        self.summed = False  # whether what was held is in the partial sum
        self.first = plan.key(rank, CONTRIBUTION)
        self.keys = plan.keys_between(rank, index)

    def contribution(self, place: Array | None) -> Array:
        """Return the payload of the rank's own contribution, which is kept."""
        if self.rank not in self.held:
            self.held[self.rank] = self.sent.encode(self.partial, self.first)
        return self.held[self.rank]

    def hold(self, source: int, payload: Array) -> None:
        """Keep the contribution of another rank."""
        self.held[source] = payload

    def partial_sum(self, place: Array | None) -> Array:
        """Return the payload of the partial sum; its random numbers are used for nothing else."""
        if self.held:
            return self._held_sum().encode(self.result, next(self.keys), place)
        return self._encoded(next(self.keys) if self.summed else self.first, place)

    def _encoded(self, key: Key, place: Array | None = None) -> Array:
        if self.held:
            return self._held_sum().encode(self.result, key, place)
        if self.pending is None:
            return self.result.encode(self.partial, key, place)
        payload = self.result.add_encode(self.pending, self.result, self.partial, key, place)
        self.pending = None
        return payload

    def reduce(self, source: int, payload: Array) -> None:
        """Add a partial sum to the rank's own, rounding between two additions."""
        if self.held:
            self.partial = self._held_sum().value()
        elif self.pending is not None:
            self.partial = self.result.values(self._encoded(next(self.keys)))
        self.pending = payload

    def finished(self, place: Array | None = None) -> Array:
        """Return the payload of the result, which this rank forms or has received."""
        if self.final is None:
            key = self.plan.key(self.index, FINAL)
            self.final = self._encoded(key, place if self.place is None else self.place)
        return self.final

    def copy(self, source: int, payload: Array) -> None:
        """Keep the result as it came; contributions are not needed any more."""
        self.final = payload
        self.held.clear()

    def _held_sum(self) -> Sum:
        """Sum the held contributions and the own one in the order of ranks; free them."""
        self.contribution(None)
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
            return int(self.out.size - np.isfinite(self.out).sum())
        final = self.finished()
        return 0 if final is self.place else self.result.decode(final, self.out)


# What goes out, written in place if that is given and it suits; what comes in, from a rank.
OUT: dict[str, Callable[[_Chunk, Array | None], Array]] = {
    "reduce": _Chunk.partial_sum,
    "hold": _Chunk.contribution,
    "copy": _Chunk.finished,
}
IN: dict[str, Callable[[_Chunk, int, Array], None]] = {
    "reduce": _Chunk.reduce,
    "hold": _Chunk.hold,
    "copy": _Chunk.copy,
}


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
    result = coders(plan.wire, span, count, plan.result_shifts, take)
    chunks = [
        _Chunk(plan, rank, i, *each, x, out)
        for i, each in enumerate(zip(sent, result, strict=True))
    ]
    for number, step in enumerate(plan.schedule.steps(rank, layout)):
        received = yield _exchange(chunks, step, number, take)
        if step.recv_from is not None:
            into = [chunks[i] for i in step.recv_chunks]
            parts = _parts(received, [each.sent.size_bytes for each in into], take)
            for each, part in zip(into, parts, strict=True):
                IN[step.kind](each, step.recv_from, part)
    return sum(each.write() for each in chunks)


def _exchange(chunks: Sequence[_Chunk], step: Step, number: int, take: Take) -> Exchange:
    into = [chunks[i] for i in step.recv_chunks]
    out = [chunks[i] for i in step.send_chunks]
    return Exchange(
        send_to=step.send_to,
        payload=None if step.send_to is None else _message(out, OUT[step.kind], take),
        recv_from=step.recv_from,
        nbytes=sum(each.sent.size_bytes for each in into),
        round=number,
        recv_chunks=step.recv_chunks,
        send_chunks=step.send_chunks,
        place=into[0].place if step.kind == "copy" and len(into) == 1 else None,
    )


def _message(
    chunks: Sequence[_Chunk], payload_of: Callable[[_Chunk, Array | None], Array], take: Take
) -> Array:
    """Return the payloads of chunks one after another."""
    if len(chunks) == 1:
        return payload_of(chunks[0], None)
    sizes = [each.sent.size_bytes for each in chunks]
    message = take(sum(sizes))
    for each, size, end in zip(chunks, sizes, accumulate(sizes), strict=True):
        place = message[end - size : end]
        payload = payload_of(each, None if (end - size) % ALIGNED_BYTES else place)
        if payload is not place:
            place[:] = payload
    return message


def _parts(message: Array, sizes: Sequence[int], take: Take) -> Iterator[Array]:
    """Yield the payloads of these sizes that a message holds, each where kernels can read it."""
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        part = message[end - size : end]
        if (end - size) % ALIGNED_BYTES:
            aligned = take(size)
            aligned[:] = part
            part = aligned
        yield part

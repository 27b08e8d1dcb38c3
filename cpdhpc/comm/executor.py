"""Carries out one rank's part of a schedule with a wire: the program that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ..partition import chunk
from ..randomness import Key, random_key
from .accumulate import Accumulate, Sum
from .engine import Exchange, Program, ScheduleError, Take
from .schedule import Schedule, Step
from .wire import Array, Coder, Wire, coders

PIECES = 8
PIECE_VALUES = 1 << 16, 1 << 20  # of a chunk that travel at a time: 256 KiB to 4 MiB of float32
CONTRIBUTION, FINAL, BETWEEN = range(3)  # phases of random streams; BETWEEN and up: others


@dataclass(frozen=True)
class Plan:
    """What all ranks of one all-reduce share.

    sent_shifts, result_shifts: uint8[tiles] for contributions and partial sums, and for the
        result, or None where none are needed or they travel
    result_rounded: whether the result is rounded to the wire
    stream: (seed, iteration) of the random numbers
    """

    schedule: Schedule
    accumulate: Accumulate
    wire: Wire
    sent_shifts: Array | None
    result_shifts: Array | None
    result_rounded: bool
    ranks: int
    stream: tuple[int, int]

    def pieces(self, n: int) -> list[tuple[int, int]]:
        """Return the pieces of n values that are reduced by themselves, as (start, stop).

        PIECES of them, so that encoding, travel and decoding overlap, unless a chunk's part of
        one would leave PIECE_VALUES. With "requantise" the result depends on the pieces, as on
        all that decides which rank adds first.
        """
        chunks, (least, most) = self.schedule.chunks(self.ranks), PIECE_VALUES
        count = min(-(-n // (chunks * least)), max(PIECES, -(-n // (chunks * most))))
        return [chunk(n, max(1, count), i) for i in range(max(1, count))]

    def key(self, rank: int, phase: int) -> Key:
        """Return the random stream of a rank and a phase.

        Phase 0 is what a rank sends of its own or as a partial sum, 1 the result, 2 and up the
        roundings in between, in the order in which they happen. Sums of held contributions, and
        results, take the number of the chunk for the rank: whoever forms them gets the same.
        """
        return random_key(*self.stream, rank, phase)

    def keys_between(self, rank: int) -> Iterator[Key]:
        """Yield the random streams of the roundings in between."""
        return (self.key(rank, phase) for phase in count(BETWEEN))


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
        self.held: dict[int, Array] = {}  # contributions by rank
        self.final: Array | None = None  # payload of the result
        self.keys = plan.keys_between(rank)

    def contribution(self) -> Array:
        """Return the payload of the rank's own contribution."""
        if self.rank not in self.held:
            key = self.plan.key(self.rank, CONTRIBUTION)
            self.held[self.rank] = self.sent.encode(self.partial, key)
        return self.held[self.rank]

    def hold(self, source: int, payload: Array) -> None:
        """Keep the contribution of another rank."""
        self.held[source] = payload

    def partial_sum(self) -> Array:
        """Return the payload of the partial sum."""
        return self._encoded(self.sent, self.plan.key(self.rank, CONTRIBUTION))

    def _encoded(self, coder: Coder, key: Key, place: Array | None = None) -> Array:
        if self.pending is None:
            return coder.encode(self.partial, key, place)
        payload = coder.add_encode(self.pending, self.sent, self.partial, key, place)
        self.pending = None
        return payload

    def reduce(self, source: int, payload: Array) -> None:
        """Add a partial sum to the rank's own, rounding between two additions."""
        if self.pending is not None:
            self.partial = self.sent.values(self._encoded(self.sent, next(self.keys)))
        self.pending = payload

    def finished(self) -> Array:
        """Return the payload of the result, which this rank forms or has received."""
        if self.final is None:
            key = self.plan.key(self.index, FINAL)
            if self.held:
                self.final = self._held_sum().encode(self.result, key, self.place)
            else:
                self.final = self._encoded(self.result, key, self.place)
        return self.final

    def copy(self, source: int, payload: Array) -> None:
        """Keep the result as it came; contributions are not needed any more."""
        self.final = payload
        self.held.clear()

    def _held_sum(self) -> Sum:
        """Sum the contributions in the order of ranks; free them."""
        self.contribution()
        if len(self.held) != self.plan.ranks:
            raise ScheduleError(
                f"rank {self.rank} has contributions of ranks {sorted(self.held)} to chunk "
                f"{self.index}: needs all {self.plan.ranks}"
            )
        payloads = [self.held[rank] for rank in sorted(self.held)]
        self.held.clear()
        keys = self.plan.keys_between(self.index)
        return self.plan.accumulate(payloads, self.sent, self.result, keys)

    def write(self) -> int:
        """Write the result, float32, into out, if there is one; count what is not finite."""
        if self.out is None:
            return 0
        if self.final is None and not self.plan.result_rounded:
            self.out[:] = self._held_sum().value()
            return int(self.out.size - np.isfinite(self.out).sum())
        final = self.finished()
        return 0 if final is self.place else self.result.decode(final, self.out)


OUT: dict[str, Callable[[_Chunk], Array]] = {
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
    plan: Plan, span: tuple[int, int], rank: int, x: Array, out: Array | None, take: Take
) -> Program[int]:
    """Carry out a rank's part in a piece: yield exchanges, add what comes in, write the result.

    span: the piece; x: float32[n], not written; out: float32[n] for the result, or None where
    another rank of this process writes it; take: for payloads
    Returns how many values of the result are not finite; 0 for a raw wire.
    """
    count = plan.schedule.chunks(plan.ranks)
    sent = coders(plan.wire, span, count, plan.sent_shifts, take)
    result = coders(plan.wire, span, count, plan.result_shifts, take)
    chunks = [
        _Chunk(plan, rank, i, *each, x, out)
        for i, each in enumerate(zip(sent, result, strict=True))
    ]
    for number, step in enumerate(plan.schedule.steps(rank, plan.ranks)):
        received = yield _exchange(chunks, step, number)
        if step.recv_from is not None:
            IN[step.kind](chunks[step.recv_chunk], step.recv_from, received)
    return sum(each.write() for each in chunks)


def _exchange(chunks: Sequence[_Chunk], step: Step, number: int) -> Exchange:
    payload = None if step.send_to is None else OUT[step.kind](chunks[step.send_chunk])
    chunk = chunks[step.recv_chunk]
    copied = step.kind == "copy"
    return Exchange(
        send_to=step.send_to,
        payload=payload,
        recv_from=step.recv_from,
        nbytes=(chunk.result if copied else chunk.sent).size_bytes,
        round=number,
        recv_chunk=step.recv_chunk,
        send_chunk=step.send_chunk,
        place=chunk.place if copied else None,
    )

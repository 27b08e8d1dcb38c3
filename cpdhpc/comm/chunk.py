"""What all ranks of an all-reduce share, and what a rank keeps of a chunk in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from ..partition import chunk
from ..randomness import Key, random_key
from .accumulate import Accumulate, Sum
from .schedule import Schedule
from .step import Kind, Layout
from .wire import Array, Coder, Wire

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

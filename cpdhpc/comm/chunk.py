"""What all ranks of an all-reduce share, and what a rank keeps of a chunk in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from ..partition import chunk
from ..randomness import Key, random_key
from .accumulate import Accumulate, Sum
from .engine import ScheduleError
from .schedule import Kind, Schedule
from .wire import Array, Coder, Wire

PIECE = 1 << 18  # values of a chunk that travel at a time: 1 MiB of float32
CONTRIBUTION, FINAL, BETWEEN = range(3)  # phases of random streams; BETWEEN and up: others


@dataclass(frozen=True)
class Plan:
    """What all ranks of one all-reduce share.

    sent_shifts, result_shifts: uint8[tiles] for contributions and partial sums, and for the
        result, or None where none are needed or they travel
    accumulate: None where sums are exact
    result_rounded: whether the result is rounded to the wire
    stream: (seed, iteration) of the random numbers
    """

    schedule: Schedule
    accumulate: Accumulate | None
    wire: Wire
    sent_shifts: Array | None
    result_shifts: Array | None
    result_rounded: bool
    ranks: int
    stream: tuple[int, int]

    def pieces(self, n: int) -> list[tuple[int, int]]:
        """Return the pieces of n values that are reduced by themselves, as (start, stop).

        PIECE values of every chunk, so that encoding, travel and decoding overlap. With
        "requantise" the result depends on PIECE, as on all that decides which rank adds first.
        """
        count = max(1, -(-n // (self.schedule.chunks(self.ranks) * PIECE)))
        return [chunk(n, count, i) for i in range(count)]

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
        self.held: dict[int, Array] = {}  # contributions by rank
        self.final: Array | None = None  # payload of the result
        self.keys = plan.keys_between(rank)

    def outgoing(self, kind: Kind) -> Array:
        """Return the payload that a step of a kind sends."""
        send = {"reduce": self.partial_sum, "hold": self.contribution, "copy": self.finished}
        return send[kind]()

    def incoming_bytes(self, kind: Kind, terms: int) -> int:
        """Return the size of a payload that a step of a kind brings."""
        return (self.result if kind == "copy" else self.sent.of(terms)).size_bytes

    def incoming(self, kind: Kind, source: int, payload: Array, terms: int) -> None:
        """Take in what a step of a kind has brought: the sum of so many contributions."""
        take = {"reduce": self.reduce, "hold": self.hold, "copy": self.copy}
        take[kind](source, payload, terms)

    def contribution(self) -> Array:
        """Return the payload of the rank's own contribution."""
        if self.rank not in self.held:
            key = self.plan.key(self.rank, CONTRIBUTION)
            self.held[self.rank] = self.sent.encode(self.partial, key)
        return self.held[self.rank]

    def hold(self, source: int, payload: Array, terms: int) -> None:
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

    def reduce(self, source: int, payload: Array, terms: int) -> None:
        """Add a partial sum of so many terms to the rank's own, rounding between two additions."""
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

    def copy(self, source: int, payload: Array, terms: int) -> None:
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
        assert self.plan.accumulate is not None, "exact sums are those of ExactChunk"
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

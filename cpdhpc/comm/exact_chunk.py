"""What a rank keeps of a chunk when sums are exact: one integer a value, in any order."""

from __future__ import annotations

from typing import Any

from .chunk import Chunk
from .exact import Exact
from .program import ScheduleError
from .wire import Array


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

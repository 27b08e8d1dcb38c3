"""Carries out one rank's part of a schedule with a wire: the program that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ..partition import chunk
from ..randomness import Key, random_key
from .accumulate import Accumulate, Sum
from .engine import Exchange, Program, ScheduleError
from .schedule import Schedule, Step
from .wire import Array, Coder, Wire

CONTRIBUTION, FINAL, BETWEEN = range(3)  # phases of random streams; BETWEEN and up: others


@dataclass(frozen=True)
class Plan:
    """What all ranks of one all-reduce share.

    sent, result: for each chunk, how contributions and partial sums travel, and how the result
    result_rounded: whether the result is rounded to the wire
    marks_nonfinite: whether marks in the result's payloads tell all about NaN and infinity
    stream: (seed, iteration) of the random numbers
    """

    schedule: Schedule
    accumulate: Accumulate
    sent: tuple[Coder, ...]
    result: tuple[Coder, ...]
    result_rounded: bool
    marks_nonfinite: bool
    ranks: int
    stream: tuple[int, int]

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


def coders(wire: Wire, n: int, chunks: int, shifts: Array | None) -> tuple[Coder, ...]:
    """Return the coder of each chunk of n values."""
    return tuple(Coder.of(wire, chunk(n, chunks, i), shifts) for i in range(chunks))


class _Chunk:
    """A rank's state of one chunk."""

    def __init__(self, plan: Plan, rank: int, index: int, x: Array) -> None:
        self.plan, self.rank, self.index = plan, rank, index
        self.sent, self.result = plan.sent[index], plan.result[index]
        self.partial = x[self.sent.start : self.sent.stop]  # the rank's own, until it adds
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

    def _encoded(self, coder: Coder, key: Key) -> Array:
        if self.pending is None:
            return coder.encode(self.partial, key)
        payload = coder.add_encode(self.pending, self.sent, self.partial, key)
        self.pending = None
        return payload

    def reduce(self, source: int, payload: Array) -> None:
        """Add a partial sum to the rank's own, rounding between two additions."""
        if self.pending is not None:
            self.partial = self.sent.values(self._encoded(self.sent, next(self.keys)), self.partial)
        self.pending = payload

    def finished(self) -> Array:
        """Return the payload of the result, which this rank forms or has received."""
        if self.final is None:
            key = self.plan.key(self.index, FINAL)
            if self.held:
                self.final = self._held_sum().encode(self.result, key)
            else:
                self.final = self._encoded(self.result, key)
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
        return self.plan.accumulate(payloads, self.sent, self.result, keys, self.partial)

    def write(self, out: Array) -> int:
        """Write the result, float32, into the array of all chunks; count what is not finite."""
        part = out[self.result.start : self.result.stop]
        if self.final is None and not self.plan.result_rounded:
            part[:] = self._held_sum().value()
            return int(part.size - np.isfinite(part).sum())
        return self.result.decode(self.finished(), part)


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


def program(plan: Plan, rank: int, x: Array, out: Array | None) -> Program[Array | None]:
    """Carry out a rank's part: yield its exchanges, add what comes in, write the result.

    x: float32[n], not written; out: float32[n] for the result, or None where another rank of
    this process writes it
    Returns None, or the result if it is not finite and the wire is packed; with
    plan.marks_nonfinite that is another array than out, which is then not written.
    """
    chunks = [_Chunk(plan, rank, i, x) for i in range(len(plan.sent))]
    for number, step in enumerate(plan.schedule.steps(rank, plan.ranks)):
        received = yield _exchange(plan, chunks, step, number)
        if step.recv_from is not None:
            IN[step.kind](chunks[step.recv_chunk], step.recv_from, received)
    if out is None:
        return None
    # The list forms all payloads: a rank has read its x before it writes out, maybe the same.
    if plan.marks_nonfinite and any([each.result.marked(each.finished()) for each in chunks]):
        out = np.empty_like(out)
    return out if sum(each.write(out) for each in chunks) else None


def _exchange(plan: Plan, chunks: Sequence[_Chunk], step: Step, number: int) -> Exchange:
    coder = (plan.result if step.kind == "copy" else plan.sent)[step.recv_chunk]
    payload = None if step.send_to is None else OUT[step.kind](chunks[step.send_chunk])
    return Exchange(
        send_to=step.send_to,
        payload=payload,
        recv_from=step.recv_from,
        nbytes=coder.size_bytes,
        round=number,
        recv_chunk=step.recv_chunk,
        send_chunk=step.send_chunk,
    )

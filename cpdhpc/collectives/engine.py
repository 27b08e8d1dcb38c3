"""Runs the programs of ranks and carries their messages, within and between processes."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from ..ops import backend_of, is_of_gpu, on_gpu
from ..world import timeline
from ..world.ranks import RankFailure, Ranks, Wait

if TYPE_CHECKING:
    from ..world.gpu_messages import Direct, Staged

Array = npt.NDArray[Any]
Result = TypeVar("Result")


class ScheduleError(RuntimeError):
    """A schedule that cannot complete: a deadlock, or a message that no rank receives."""


class Exchange(NamedTuple):
    """A request of a program: one message out, one in, or both at once.

    send_to, recv_from: rank or None; payload: uint8[any], not changed by anyone afterwards
    nbytes: size of the message in; no message is sent for size 0
    round, recv_chunks, send_chunks: for error messages
    place: uint8[nbytes], the place for the message in, if that matters
    """

    send_to: int | None
    payload: Array | None
    recv_from: int | None
    nbytes: int
    round: int
    recv_chunks: Sequence[int]
    send_chunks: Sequence[int]
    place: Array | None = None


Program = Generator[Exchange, Array, Result]
Take = Callable[[int], Array]  # size_bytes -> uint8[size_bytes] for a program's payloads


def wait_to_receive(requests: list[Any], rank: int, what: str, exchange: Exchange) -> Wait:
    """Return the wait for the message in of an exchange; its arrays are not kept."""
    where = exchange.recv_from, exchange.round, exchange.recv_chunks
    return Wait(requests, rank, partial(_reason, what, "", *where))


def wait_to_send(requests: list[Any], rank: int, what: str, exchange: Exchange) -> Wait:
    """Return the wait for the message out of an exchange; its arrays are not kept."""
    where = exchange.send_to, exchange.round, exchange.send_chunks
    return Wait(requests, rank, partial(_reason, what, " to receive", *where))


def _reason(what: str, does: str, other: int | None, number: int, chunks: Sequence[int]) -> str:
    return f"{what}: waited {{:.1f}} s for rank {other}{does}, round {number}, {named(chunks)}"


def named(chunks: Sequence[int]) -> str:
    """Return the name of chunks in errors."""
    more = f" and {len(chunks) - 1} more" if len(chunks) > 1 else ""
    return f"chunk {chunks[0]}{more}"


def fresh(like: Array, size_bytes: int) -> Array:
    """Return a new uint8[size_bytes] of the kind of like."""
    return np.empty_like(like, shape=(size_bytes,), dtype=np.uint8)


class BufferPool:
    """Arrays that are taken in the same order again and again, and allocated only once.

    make: size_bytes -> uint8[size_bytes]
    """

    def __init__(self, make: Callable[[int], Array]) -> None:
        self._make = make
        self._arrays: list[Array] = []
        self._taken = 0

    def take(self, size_bytes: int) -> Array:
        """Return uint8[size_bytes], which belongs to the caller until the next rewind."""
        if self._taken == len(self._arrays):
            self._arrays.append(self._make(size_bytes))
        elif self._arrays[self._taken].size < size_bytes:  # twice as large: memory may be kept
            self._arrays[self._taken] = self._make(
                max(size_bytes, 2 * self._arrays[self._taken].size)
            )
        self._taken += 1
        return self._arrays[self._taken - 1][:size_bytes]

    def rewind(self) -> None:
        """Start again with the first array."""
        self._taken = 0


Start = Callable[[int, Take], Sequence[Program[Result]]]  # piece -> programs of the hosted ranks


def run(
    world: Ranks,
    start: Start[Result],
    pieces: int,
    like: Array,
    what: str,
    window: int = 1,
    carrier: Ranks | Direct | Staged | None = None,
) -> list[list[Result]]:
    """Run the programs of all pieces to their ends; return their results, by piece and rank.

    Collective: all processes of world run the programs of their ranks, of the same pieces.
    start: called for each piece in order; like: an array of the kind that received bytes are
    stored in; what: named in messages, for example "allreduce ring"; window: how many pieces may be
    in progress, counted from the first unfinished one; the same on all processes; carrier: moves
    payloads that are of another kind than like
    Raises ScheduleError in a world of one process. With other processes, which can no longer
    learn of it, this and every other error ends the job with a message. The exception is
    RankFailure, after the death of a process, which all remaining processes raise.
    """
    try:
        carrier = carrier_of(world, like) if carrier is None else carrier
        return _Run(world, start, pieces, like, what, window, carrier, [[]] * pieces).run()
    except Exception as error:
        give_up(world, error, what)


def give_up(world: Ranks, error: Exception, what: str) -> NoReturn:
    """Raise the error that follows from one in the middle of a run, or end the job: see run."""
    failure = error if isinstance(error, RankFailure) else world.failure(error, what)
    if failure is not None:
        raise failure from None
    if world.processes == 1:
        raise error
    text = f"{what}: {type(error).__name__}: {error}"
    world.abort(text if is_of_gpu(error) else f"{text}\n{traceback.format_exc()}")


def carrier_of(world: Ranks, like: Array) -> Ranks | Direct | Staged:
    """Return the carrier of arrays like this for a new call; for NumPy arrays the world.

    Collective the first time that a world gets GPU arrays.
    """
    if not on_gpu(like):
        return world
    from ..world.gpu_messages import carrier_of_gpu

    return carrier_of_gpu(world)


def sum_by_mpi(world: Ranks, flat: Sequence[Array], totals: Sequence[Array]) -> int:
    """Sum the hosted ranks here, and the processes by MPI_Allreduce; return 0. Collective."""
    carrier, add = carrier_of(world, flat[0]), backend_of(flat[0]).add
    if len(flat) == 1:
        carrier.sum_by_mpi(totals[0], flat[0])
        return 0
    add(flat[0], flat[1], totals[0])
    for x in flat[2:]:
        add(totals[0], x, totals[0])
    carrier.sum_by_mpi(totals[0])
    for total in totals[1:]:
        total[:] = totals[0]
    return 0


@dataclass(eq=False)
class _Piece(Generic[Result]):
    """A piece in progress: its programs by rank, how many still run, and their buffers."""

    number: int
    take: Take
    programs: dict[int, Program[Result]]
    running: int
    results: dict[int, Result] = field(default_factory=dict)
    sends: list[Wait] = field(default_factory=list)


@dataclass
class _Run(Generic[Result]):
    """The state of one run: programs that can continue, and waits; for the first fields see run.

    mail: (piece, from, to) -> waiting messages; local: (piece, rank) -> who waits for one
    """

    world: Ranks
    start: Start[Result]
    pieces: int
    like: Array
    what: str
    window: int
    carrier: Ranks | Direct | Staged
    results: list[list[Result]]
    opened: int = 0
    under_way: list[_Piece[Result]] = field(default_factory=list)
    runnable: deque[tuple[_Piece[Result], int, Array | None]] = field(default_factory=deque)
    mail: dict[tuple[int, int, int], deque[Exchange]] = field(default_factory=dict)
    local: dict[tuple[int, int], tuple[_Piece[Result], Exchange]] = field(default_factory=dict)
    remote: list[tuple[_Piece[Result], int, Wait, Array]] = field(default_factory=list)

    def run(self) -> list[list[Result]]:
        while True:
            while self.runnable:
                self._advance(*self.runnable.popleft())
            self._close()
            oldest = self.under_way[0].number if self.under_way else self.opened
            if self.opened < self.pieces and self.opened - oldest < self.window:
                self._open()
                continue
            waits = [wait for _, _, wait, _ in self.remote]
            for piece in self.under_way:
                waits += [] if piece.running else piece.sends
            if not waits:
                break
            self.world.wait_any(waits)
            self._receive()
        if self.local or any(self.mail.values()):
            self._raise_what_is_left()
        return self.results

    def _open(self) -> None:
        """Start the next piece; it reuses the buffers of the piece before the window."""
        number, slot = self.opened, self.opened % self.window
        take: Take = partial(fresh, self.like)
        if self.world.virtual_ranks == 1:  # otherwise hosted ranks pass payloads without a copy
            pool = self.carrier.cache.get((BufferPool, type(self.like), slot), self._new_pool)
            pool.rewind()
            take = pool.take
        programs = dict(zip(self.world.hosted, self.start(number, take), strict=True))
        piece = _Piece(number, take, programs, len(programs))
        for rank in programs:
            self.runnable.append((piece, rank, None))
        self.under_way.append(piece)
        self.opened += 1

    def _new_pool(self) -> BufferPool:
        """Return a pool of arrays like the caller's, without a reference to the caller's."""
        return BufferPool(partial(fresh, np.empty_like(self.like, shape=(0,))))

    def _close(self) -> None:
        """Close pieces that have ended and whose messages have been sent."""
        for piece in self.under_way.copy():
            if piece.running:
                continue
            piece.sends = [wait for wait in piece.sends if not self.world.done(wait)]
            if not piece.sends:
                self.results[piece.number] = [piece.results[rank] for rank in self.world.hosted]
                self.under_way.remove(piece)

    def _advance(self, piece: _Piece[Result], rank: int, received: Array | None) -> None:
        """Resume a program up to its next exchange, send its message, look for the other."""
        program, since = piece.programs[rank], timeline.began()
        try:
            exchange = next(program) if received is None else program.send(received)
        except StopIteration as stop:
            piece.results[rank] = stop.value
            piece.running -= 1
            return
        finally:
            timeline.done(timeline.ENCODE, since)
        if exchange.send_to is not None and exchange.payload is not None and exchange.payload.size:
            self._send(piece, rank, exchange.send_to, exchange.payload, exchange)
        source = exchange.recv_from
        if source is None or exchange.nbytes == 0:
            self.runnable.append((piece, rank, self.like[:0].view(np.uint8)))
        elif source in self.world.hosted:
            messages = self.mail.get((piece.number, source, rank))
            if messages:
                self.runnable.append((piece, rank, messages.popleft().payload))
            else:
                self.local[piece.number, rank] = piece, exchange
        else:
            buffer = piece.take(exchange.nbytes) if exchange.place is None else exchange.place
            requests = self.carrier.irecv(source, rank, buffer, piece.number)
            wait = wait_to_receive(requests, rank, self.what, exchange)
            self.remote.append((piece, rank, wait, buffer))

    def _send(
        self, piece: _Piece[Result], rank: int, to: int, payload: Array, exchange: Exchange
    ) -> None:
        """Send a message, or pass it to a rank of this process."""
        self.world.count(rank, payload.size)
        if to not in self.world.hosted:
            since = timeline.began()
            requests = self.carrier.isend(rank, to, payload, piece.number)
            timeline.done(timeline.SEND, since, payload.size)
            piece.sends.append(wait_to_send(requests, rank, self.what, exchange))
            return
        waiting = self.local.get((piece.number, to))
        if waiting is not None and waiting[1].recv_from == rank:
            del self.local[piece.number, to]
            self.runnable.append((piece, to, payload))
        else:
            self.mail.setdefault((piece.number, rank, to), deque()).append(exchange)

    def _receive(self) -> None:
        """Resume all programs whose message from another process is complete."""
        waiting, self.remote = self.remote, []
        for piece, rank, wait, buffer in waiting:
            if self.world.done(wait):
                self.runnable.append((piece, rank, buffer))
            else:
                self.remote.append((piece, rank, wait, buffer))

    def _raise_what_is_left(self) -> NoReturn:
        """Raise ScheduleError for ranks that wait for ever, or messages that no rank receives."""
        if self.local:
            lines = (
                f"rank {rank} waits for rank {e.recv_from}, round {e.round}, {named(e.recv_chunks)}"
                for (_, rank), (_, e) in self.local.items()
            )
            raise ScheduleError(f"{self.what}: deadlock: {'; '.join(lines)}")
        left = (
            f"rank {rank} to rank {to}, round {e.round}, {named(e.send_chunks)}"
            for (_, rank, to), messages in self.mail.items()
            for e in messages
        )
        raise ScheduleError(f"{self.what}: messages left over: {'; '.join(left)}")

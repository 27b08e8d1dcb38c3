"""Runs the programs of ranks: takes their messages to one another, within and between processes."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from .ranks import Ranks, Wait

Array = npt.NDArray[Any]
Result = TypeVar("Result")


class ScheduleError(RuntimeError):
    """A schedule that cannot be carried out: a deadlock, or a message that nobody receives."""


class Exchange(NamedTuple):
    """What a program asks for: one message out, one in, or both at once.

    send_to, recv_from: rank or None; payload: uint8[any], not changed by anyone afterwards
    nbytes: bytes of the message in; no bytes mean no message
    round, recv_chunk, send_chunk: for error messages
    """

    send_to: int | None
    payload: Array | None
    recv_from: int | None
    nbytes: int
    round: int
    recv_chunk: int
    send_chunk: int


Program = Generator[Exchange, Array, Result]


def run(world: Ranks, programs: Sequence[Program[Result]], like: Array, what: str) -> list[Result]:
    """Run the programs of the hosted ranks to their ends and return what they return.

    Collective: all processes of world run the programs of their ranks.
    programs: one for each rank in world.hosted; like: where received bytes are to be stored (an
    array of the same kind); what: named in messages, as "allreduce ring"
    Raises ScheduleError in a world of one process. Where others take part they cannot be told
    any more, so this and every other error then ends the job with a message.
    """
    try:
        return _Run(world, programs, like, what).run()
    except Exception as error:
        if world.size == 1:
            raise
        world.abort(f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc()}")


class _Run(Generic[Result]):
    """The state of one run: which ranks can go on, and which wait for what."""

    def __init__(
        self, world: Ranks, programs: Sequence[Program[Result]], like: Array, what: str
    ) -> None:
        self.world, self.like, self.what = world, like, what
        self.programs = dict(zip(world.hosted, programs, strict=True))
        self.runnable: deque[tuple[int, Array | None]] = deque((r, None) for r in self.programs)
        self.mail: dict[tuple[int, int], deque[Exchange]] = {}  # (from, to): not yet received
        self.local: dict[int, Exchange] = {}  # ranks that wait for a rank of this process
        self.remote: dict[int, tuple[Wait, Array]] = {}  # and of another process
        self.sends: list[Wait] = []
        self.results: dict[int, Result] = {}

    def run(self) -> list[Result]:
        while self.runnable or self.remote:
            while self.runnable:
                self._advance(*self.runnable.popleft())
            if self.remote:
                self._receive()
        if self.local:
            self._deadlock()
        while self.sends:
            self.world.wait_any(self.sends)
            self.sends = [wait for wait in self.sends if not self.world.done(wait)]
        self._check_mail()
        return [self.results[rank] for rank in self.world.hosted]

    def _advance(self, rank: int, received: Array | None) -> None:
        """Resume a program up to its next exchange, send its message, look for the other."""
        program = self.programs[rank]
        try:
            exchange = next(program) if received is None else program.send(received)
        except StopIteration as stop:
            self.results[rank] = stop.value
            return
        if exchange.send_to is not None and exchange.payload is not None:
            self._send(rank, exchange.send_to, exchange.payload, exchange)
        if exchange.recv_from is None or exchange.nbytes == 0:
            self.runnable.append((rank, self._buffer(0)))
        elif self.world.hosts(exchange.recv_from):
            messages = self.mail.get((exchange.recv_from, rank))
            if messages:
                self.runnable.append((rank, messages.popleft().payload))
            else:
                self.local[rank] = exchange
        else:
            buffer = self._buffer(exchange.nbytes)
            requests = self.world.irecv(exchange.recv_from, rank, buffer)
            self.remote[rank] = Wait(requests, rank, self._reason(exchange)), buffer

    def _send(self, rank: int, to: int, payload: Array, exchange: Exchange) -> None:
        if payload.size == 0:
            return
        self.world.count(rank, payload.size)
        waiting = self.local.get(to)
        if not self.world.hosts(to):
            self.sends = [wait for wait in self.sends if not self.world.done(wait)]
            reason = (
                f"{self.what}: waited {{:.1f}} s for rank {to} to receive, "
                f"round {exchange.round}, chunk {exchange.send_chunk}"
            )
            self.sends.append(Wait(self.world.isend(rank, to, payload), rank, reason))
        elif waiting is not None and waiting.recv_from == rank:
            del self.local[to]
            self.runnable.append((to, payload))
        else:
            self.mail.setdefault((rank, to), deque()).append(exchange)

    def _receive(self) -> None:
        """Wait until a message from another process is complete; resume all who have theirs."""
        self.world.wait_any([wait for wait, _ in self.remote.values()])
        for rank, (wait, buffer) in list(self.remote.items()):
            if self.world.done(wait):
                del self.remote[rank]
                self.runnable.append((rank, buffer))

    def _buffer(self, nbytes: int) -> Array:
        return np.empty_like(self.like, shape=(nbytes,), dtype=np.uint8)

    def _reason(self, exchange: Exchange) -> str:
        return (
            f"{self.what}: waited {{:.1f}} s for rank {exchange.recv_from}, "
            f"round {exchange.round}, chunk {exchange.recv_chunk}"
        )

    def _check_mail(self) -> None:
        left = [
            f"rank {rank} to rank {to}, round {e.round}, chunk {e.send_chunk}"
            for (rank, to), messages in self.mail.items()
            for e in messages
        ]
        if left:
            raise ScheduleError(f"{self.what}: messages left over: {'; '.join(left)}")

    def _deadlock(self) -> NoReturn:
        lines = (
            f"rank {rank} waits for rank {e.recv_from}, round {e.round}, chunk {e.recv_chunk}"
            for rank, e in self.local.items()
        )
        raise ScheduleError(f"{self.what}: deadlock: {'; '.join(lines)}")

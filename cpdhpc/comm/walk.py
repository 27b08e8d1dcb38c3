"""Runs the programs of an all-reduce on clocks, with wires that only take time.

A rank has one processor, one port out and one port in. A message leaves when it is encoded and
both ports are free, and occupies them until it arrives. The processor spends time on its bytes
when they are sent, and when they are received.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..formats import TILE, tiles
from .chunk import Piece, Plan
from .executor import program
from .machine import Machine
from .program import Exchange, Program, ScheduleError
from .step import Layout
from .timed import Spent
from .wire import Array


@dataclass
class _Rank:
    """A rank's clocks and what it can do next.

    busy_s: of the processor, the port out and the port in
    ready: (time, piece) at which a program can go on; closed_s: of each piece, when it has ended
    and its messages have left; expected: bytes of the message in, by piece
    """

    clock_s: float = 0.0
    out_free_s: float = 0.0
    in_free_s: float = 0.0
    busy_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    opened: int = 0
    version: int = 0
    bytes_sent: int = 0
    ready: list[tuple[float, int]] = field(default_factory=list)
    programs: dict[int, Program[int]] = field(default_factory=dict)
    leaving_s: dict[int, float] = field(default_factory=dict)
    closed_s: dict[int, float] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    expected_share: dict[int, float] = field(default_factory=dict)
    first_open: int = 0  # all pieces before it are closed
    free_s: float = 0.0  # since when they are

    def work(self, time_s: float) -> None:
        """Spend time of the processor."""
        self.clock_s += time_s
        self.busy_s[0] += time_s

    def close(self, piece: int) -> None:
        """Note that a piece has ended."""
        self.closed_s[piece] = max(self.clock_s, self.leaving_s.pop(piece))
        while self.first_open in self.closed_s:
            self.free_s = max(self.free_s, self.closed_s.pop(self.first_open))
            self.first_open += 1

    def next_s(self, pieces: int, window: int) -> float | None:
        """Return when the rank can next do something."""
        times = [self.ready[0][0]] if self.ready else []
        if self.opened < pieces and self.opened < window:
            times.append(0.0)
        elif self.opened < pieces and self.opened - self.first_open < window:
            times.append(self.free_s)
        return max(self.clock_s, min(times)) if times else None


class Walk:
    """The clocks of all ranks, or of rank 0 that stands for all, while they run a plan.

    share: of the chunks that hold data, where rank 0 is alone; a message, and what is done for it,
    counts for that share, but at least for a chunk
    pieces: those to walk; alone: whether every rank does the same at the same time, so that what
    rank 0 receives was sent when rank 0 sends; memory: float32[n], read and written by nobody
    """

    def __init__(
        self,
        machine: Machine,
        plan: Plan,
        spent: Spent,
        pieces: Sequence[Piece],
        memory: Array,
        alone: bool,
        share: float = 1.0,
    ) -> None:
        self.machine, self.plan, self.spent, self.pieces = machine, plan, spent, pieces
        self.memory, self.alone, self.share = memory, alone, share
        self.bytes = np.zeros(tiles(memory.size + 1) * (4 * TILE + 1), np.uint8)  # any payload
        self.ranks = [_Rank() for _ in range(1 if alone else len(plan.nodes))]
        self.ends_s = [0.0] * len(pieces)
        self.ended = 0
        self.layout = Layout(plan.nodes)
        self.window = plan.schedule.window(len(plan.nodes))
        self.mail: dict[tuple[int, int, int], deque[float]] = {}  # (piece, from, to): arrivals
        self.waiting: dict[tuple[int, int], int] = {}  # (piece, rank): from
        self.agenda: list[tuple[float, int, int]] = []  # (time, rank, version)

    def run(self) -> list[float]:
        """Return when each piece is complete on all ranks. Raises ScheduleError for a deadlock."""
        for rank in range(len(self.ranks)):
            self._plan_next(rank)
        while self.agenda:
            time_s, rank, version = heapq.heappop(self.agenda)
            if version == self.ranks[rank].version:
                self._act(rank, time_s)
        if self.ended < len(self.ranks) * len(self.pieces):
            raise ScheduleError(f"predict: deadlock: (piece, rank): from {self.waiting}")
        return self.ends_s

    def _plan_next(self, rank: int) -> None:
        state = self.ranks[rank]
        state.version += 1
        time_s = state.next_s(len(self.pieces), self.window)
        if time_s is not None:
            heapq.heappush(self.agenda, (time_s, rank, state.version))

    def _act(self, rank: int, time_s: float) -> None:
        """Resume what can go on, else open a piece, as the engine does."""
        state = self.ranks[rank]
        state.clock_s = time_s
        if state.ready and state.ready[0][0] <= time_s:
            piece = heapq.heappop(state.ready)[1]
            size = state.expected[piece]
            state.work(state.expected_share[piece] * size * self.machine.host_s)
            self._advance(rank, piece, self._take(size))
        else:
            piece, state.opened = state.opened, state.opened + 1
            state.leaving_s[piece] = time_s
            state.programs[piece] = program(
                self.plan, self.pieces[piece], rank, self.memory, self.memory, self._take
            )
            self._advance(rank, piece, None)
        self._plan_next(rank)

    def _take(self, size_bytes: int) -> Array:
        return self.bytes[:size_bytes]

    def _advance(self, rank: int, piece: int, received: Array | None) -> None:
        """Resume a program up to its next exchange, as the engine does."""
        state = self.ranks[rank]
        program = state.programs[piece]
        self.spent.seconds = 0.0
        try:
            exchange = next(program) if received is None else program.send(received)
        except StopIteration:
            state.work(self.spent.seconds * self._share(self.plan.schedule.chunks(self.layout)))
            self._end(rank, piece)
            return
        share = self._share(len(exchange.send_chunks))
        state.work(self.spent.seconds * share + self.machine.step_s)
        size = 0 if exchange.payload is None else exchange.payload.size
        if exchange.send_to is not None and size:
            state.bytes_sent += size
            state.work(size * share * self.machine.host_s)
            if not self.alone:
                self._send(rank, exchange.send_to, piece, size)
        self._receive(rank, piece, exchange)

    def _share(self, chunks: int) -> float:
        """Return which part of so many chunks is data: one of them at least."""
        return max(self.share, 1 / max(1, chunks))

    def _end(self, rank: int, piece: int) -> None:
        state = self.ranks[rank]
        del state.programs[piece]
        self.ended += 1
        self.ends_s[piece] = max(self.ends_s[piece], state.clock_s)
        state.close(piece)

    def _send(self, rank: int, to: int, piece: int, size: int) -> None:
        sender, receiver = self.ranks[rank], self.ranks[to]
        start_s = max(sender.clock_s, sender.out_free_s, receiver.in_free_s)
        travel_s = self.machine.alpha_s + size * self.machine.beta_s
        arrival_s = start_s + travel_s
        sender.busy_s[1] += travel_s
        receiver.busy_s[2] += travel_s
        sender.out_free_s = receiver.in_free_s = sender.leaving_s[piece] = arrival_s
        if self.waiting.get((piece, to)) == rank:
            del self.waiting[piece, to]
            heapq.heappush(receiver.ready, (arrival_s, piece))
            self._plan_next(to)
        else:
            self.mail.setdefault((piece, rank, to), deque()).append(arrival_s)

    def _receive(self, rank: int, piece: int, exchange: Exchange) -> None:
        state, source = self.ranks[rank], exchange.recv_from
        share = self._share(len(exchange.recv_chunks))
        state.expected[piece] = 0 if source is None else exchange.nbytes
        state.expected_share[piece] = share
        if source is None or exchange.nbytes == 0:
            arrival_s = state.clock_s
        elif self.alone:
            travel_s = self.machine.alpha_s + share * exchange.nbytes * self.machine.beta_s
            arrival_s = max(state.clock_s, state.in_free_s) + travel_s
            state.busy_s[2] += travel_s
            state.in_free_s = state.leaving_s[piece] = arrival_s
        elif messages := self.mail.get((piece, source, rank)):
            arrival_s = messages.popleft()
        else:
            self.waiting[piece, rank] = source
            return
        heapq.heappush(state.ready, (arrival_s, piece))

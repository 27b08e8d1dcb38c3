"""Predicted time of an all-reduce: its programs run on clocks, with kernels that only take time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..formats import SHARED, TILE, tiles
from ..ops.payloads import Array
from .engine import Exchange, Program, ScheduleError
from .method import AUTO, Machine, Method, Segment, as_machine
from .rank_program import Piece, Plan, program
from .schedules import SCHEDULES, Layout, Schedule


@dataclass
class Kernels:
    """Stand for those of a wire, and only take time; seconds: since somebody last looked."""

    machine: Machine
    seconds: float = 0.0

    def copy(self, target: Array, source: Array) -> None:
        """Take the time of a copy."""
        self.seconds += self.machine.copy_s * 4 * source.size

    def add(self, x: Array, y: Array, out: Array) -> None:
        """Take the time of an addition."""
        self.seconds += self.machine.gamma_s * 4 * x.size

    def subtract(self, x: Array, y: Array, out: Array) -> None:
        """Take no time: it is not in the model."""

    def encode_tiles(self, x: Array, *_: Any, **__: Any) -> None:
        """Take the time of encoding."""
        self.seconds += self.machine.encode_s * 4 * x.size

    def decode_tiles(self, *_: Any, out: Array) -> int:
        """Take the time of decoding."""
        self.seconds += self.machine.decode_s * 4 * out.size
        return 0

    def decode_add_tiles(self, words: Array, shifts: Array, fmt: Any, x: Array, out: Array) -> None:
        """Take the time of decoding into a sum."""
        self.seconds += self.machine.decode_add_s * 4 * x.size

    def decode_add_encode_tiles(
        self,
        words: Array,
        shifts: Array,
        cast: Any,
        x: Array,
        *_: Any,
        out: Array | None,
        **__: Any,
    ) -> int:
        """Take the time of a hop, and of decoding to out."""
        decode_s = 0.0 if out is None else self.machine.decode_s
        self.seconds += (self.machine.hop_s + decode_s) * 4 * x.size
        return 0

    def pack_trits(self, *_: Any) -> None:
        """Take no time: it is in that of encoding."""

    unpack_trits = pack_trits

    def decode_integers_tiles(
        self, words: Array, bits: int, shifts: Array, fmt: Any, out: Array
    ) -> int:
        """Take the time of decoding."""
        return self.decode_tiles(out=out)

    def add_integers_tiles(
        self, a: Array, a_bits: int, b: Array, b_bits: int, fmt: Any, out: Array, bits: int
    ) -> None:
        """Take the time of a hop."""
        self.seconds += self.machine.hop_s * 4 * (8 * out.size // bits)

    def add_encode_integers_tiles(
        self, words: Array, bits: int, cast: Any, x: Array, *_: Any, **__: Any
    ) -> None:
        """Take the time of a hop."""
        self.seconds += self.machine.hop_s * 4 * x.size


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


class Simulation:
    """The clocks of all ranks, or of rank 0 that stands for all, while they run a plan.

    share: of the chunks that hold data, where rank 0 is alone; a message, and what is done for it,
    counts for that share, but at least for a chunk
    pieces: those to simulate; alone: whether every rank does the same at the same time, so that
    what rank 0 receives was sent when rank 0 sends; memory: float32[n], read and written by nobody
    """

    def __init__(
        self,
        machine: Machine,
        plan: Plan,
        kernels: Kernels,
        pieces: Sequence[Piece],
        memory: Array,
        alone: bool,
        share: float = 1.0,
    ) -> None:
        self.machine, self.plan, self.kernels, self.pieces = machine, plan, kernels, pieces
        self.memory, self.alone, self.share = memory, alone, share
        self.bytes = np.zeros(tiles(memory.size + 1) * 5 * TILE, np.uint8)  # any payload
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
        self.kernels.seconds = 0.0
        try:
            exchange = next(program) if received is None else program.send(received)
        except StopIteration:
            state.work(self.kernels.seconds * self._share(self.plan.schedule.chunks(self.layout)))
            self._end(rank, piece)
            return
        share = self._share(len(exchange.send_chunks))
        state.work(self.kernels.seconds * share + self.machine.step_s)
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


PIECES = 4  # that are simulated at least
PROGRAMS = 1 << 13  # up to so many, pieces times ranks, more are simulated: up to WINDOWS windows
WINDOWS = 4
ALL_RANKS = 8  # up to here all ranks are simulated even where one can stand for all


class Prediction(NamedTuple):
    """time_s of a call; wire_bytes: that leave a rank, the mean over ranks.

    simulated: the number of ranks whose steps were simulated: all, or one that stands for all
    """

    time_s: float
    wire_bytes: int
    simulated: int


def predict(machine: Machine, method: Method, nodes: tuple[int, ...], n: int) -> Prediction:
    """Return the predicted time of method's all-reduce of n values per rank.

    nodes: the node of each rank, numbered in the order of first ranks: hier's steps depend on it
    Source: alpha-beta-gamma model of Thakur, Rabenseifner, Gropp: IJHPCA 19(1), 2005, simulated
    step by step. Not in it: contention of links, ranks that share a processor, subtractions.
    Exact sums widen as they travel; to add integers takes as long as a hop.
    Raises ValueError for algorithm "mpi", whose steps are the library's, and for "auto".
    """
    if method.algorithm not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ValueError(f"predict: algorithm={method.algorithm!r}: known are {known}")
    if method.is_small(len(nodes), n):  # recorded: its steps are messages and kernels alone
        machine = replace(machine, step_s=0.0)
    schedule = SCHEDULES[method.algorithm]
    one = len(nodes) > ALL_RANKS and _all_alike(schedule, nodes)
    simulation, pieces, share = _simulation(machine, method, nodes, n, one)
    ends_s = simulation.run()
    time_s = max(ends_s)
    if pieces > len(ends_s):
        time_s += (pieces - len(ends_s)) * _period_s(simulation, ends_s)
    sent = sum(rank.bytes_sent for rank in simulation.ranks) / len(simulation.ranks)
    return Prediction(
        time_s=_before_s(machine, method, len(nodes), n) + time_s,
        wire_bytes=round(sent * share * pieces / len(ends_s)),
        simulated=len(simulation.ranks),
    )


def _period_s(simulation: Simulation, ends_s: Sequence[float]) -> float:
    """Return how long each further piece takes: what the busiest processor or port needs for one.

    Or the time between the ends of the last ones, where that is longer: as a window that is full.
    """
    half = len(ends_s) // 2
    between_s = (ends_s[-1] - ends_s[half - 1]) / (len(ends_s) - half)
    busy_s = max(max(rank.busy_s) for rank in simulation.ranks) / len(ends_s)
    return max(between_s, busy_s)


def _before_s(machine: Machine, method: Method, ranks: int, n: int) -> float:
    """Return the time of the call itself: comparing the arguments, for aps the largest values."""
    aps = method.fmt is not None and method.parsed_scaling.kind == "aps"
    agreement_s = (ranks - 1).bit_length() * machine.alpha_s
    return machine.call_s + (1 + aps) * agreement_s + aps * machine.copy_s * 4 * n


def _simulation(
    machine: Machine, method: Method, nodes: tuple[int, ...], n: int, one: bool
) -> tuple[Simulation, int, float]:
    """Return the simulation of the first pieces, how many there are, and the share that is data.

    Where one rank stands for all, every chunk is as large as the largest: in whole tiles.
    """
    chunks = SCHEDULES[method.algorithm].chunks(Layout(nodes))
    padded = chunks * TILE * -(-tiles(n) // chunks) if one and chunks > 1 else n
    memory = np.zeros(padded, np.float32)  # never touched: a promise of memory, no more
    shifts = [] if method.fmt is None or method.parsed_scaling.kind in SHARED else [0]
    segments = [Segment("x", 0, padded)][: len(shifts)]
    plan = method.plan(nodes, memory, segments, (shifts, shifts), 0)
    wire = plan.wire
    share = wire.size_bytes(n) / max(1, wire.size_bytes(padded))
    if padded > n and n < TILE:  # then a message is no tile either
        machine = replace(
            machine, beta_s=machine.beta_s * wire.size_bytes(n) / wire.size_bytes(TILE)
        )
    pieces = plan.pieces(padded)
    most = min(WINDOWS * plan.schedule.window(len(nodes)), PROGRAMS // (1 if one else len(nodes)))
    first = pieces[: max(PIECES, most)]
    kernels = Kernels(machine)
    timed = replace(plan, wire=replace(wire, kernels=kernels))
    simulation = Simulation(machine, timed, kernels, first, memory, one, share)
    return simulation, len(pieces), share


@lru_cache(maxsize=64)
def _all_alike(schedule: Schedule, nodes: tuple[int, ...]) -> bool:
    """Whether every rank sends and receives in every step, of the same kinds and numbers.

    Then all clocks are equal, and one rank stands for all. A few ranks are looked at.
    """
    ranks = len(nodes)
    looked_at = sorted({0, 1, 2, ranks // 3, ranks // 2, ranks - 2, ranks - 1} & {*range(ranks)})
    first = None
    for rank in looked_at:
        steps = list(schedule.steps(rank, Layout(nodes)))
        if any(step.send_to is None or step.recv_from is None for step in steps):
            return False
        kinds = [(step.kind, len(step.send_chunks), len(step.recv_chunks)) for step in steps]
        first = kinds if first is None else first
        if kinds != first:
            return False
    return True


@lru_cache(maxsize=1024)
def choose(method: Method, nodes: tuple[int, ...], n: int) -> Method:
    """Return a method of algorithm "auto" with the algorithm that is predicted to be fastest.

    A function of its arguments alone, so the same on all ranks; ties go to the first in SCHEDULES.
    """
    machine = as_machine(method.machine)
    found: dict[str, Method] = {}
    for name, schedule in SCHEDULES.items():
        if method.accumulate is None or method.accumulate in schedule.accumulates:
            found[name] = replace(method, algorithm=name)
    if method.algorithm != AUTO or not found:
        raise ValueError(f"choose: {method}: nothing to choose from")
    return min(found.values(), key=lambda each: predict(machine, each, nodes, n).time_s)

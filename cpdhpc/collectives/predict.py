"""Predictions for an all-reduce: its time, and the error of repeatedly rounded sums.

For the time, its programs run on simulated clocks, with kernels that only take time. For the error,
one sum is computed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..formats import SHARED, TILE, tiles
from ..methods import GROW, USUAL
from ..ops.payloads import Array, Packed
from ..randomness import random_key
from .blocks import Piece, Share
from .engine import Exchange, Program, ScheduleError
from .method import AUTO, Machine, Method, Segment, as_machine
from .rank_program import CollectivePlan, program
from .recorded import parts_of
from .schedules import SCHEDULES, Algorithm, NodeLayout, RoundedSums


@dataclass
class TimedKernels:
    """Stand-ins for a wire's kernels that only take time; seconds: since the last reading.

    x, out: float32[n], neither read nor written. Reads of x and writes to out, each once in full,
    go to memory as far as the cache does not hold both arrays, and take that time in addition
    """

    machine: Machine
    x: Array
    out: Array
    seconds: float = 0.0

    def __post_init__(self) -> None:
        machine, size_bytes = self.machine, max(1, self.x.nbytes + self.out.nbytes)
        self.memory_s = max(0.0, 1 - machine.cache_bytes / size_bytes) * machine.memory_s
        self.near_s = min(1.0, machine.own_cache_bytes / size_bytes) * machine.near_s

    def _work(self, time_s: float, n: int, read: Sequence[Array], out: Array | None = None) -> int:
        """Add the time of n values in the cache, and the additional time of those in memory."""
        far = sum(np.may_share_memory(each, self.x) for each in read)
        far += out is not None and np.may_share_memory(out, self.out)
        self.seconds += 4 * n * (time_s + far * self.memory_s)
        return 0

    def copy(self, target: Array, source: Array) -> None:
        """Add the time of a copy, of float32 or of bytes."""
        self._work(self.machine.copy_s, source.nbytes // 4, [source], target)

    def add(self, x: Array, y: Array, out: Array) -> None:
        """Add the time of an addition."""
        self._work(self.machine.gamma_s, x.size, [x, y], out)

    def subtract(self, x: Array, y: Array, out: Array) -> None:
        """Add no time: it is not in the model."""

    def encode_tiles(self, x: Array, *_: Any, **__: Any) -> None:
        """Add the time of encoding."""
        self._work(self.machine.encode_s, x.size, [x])

    def decode_tiles(self, *_: Any, out: Array) -> int:
        """Add the time of decoding."""
        return self._work(self.machine.decode_s, out.size, [], out)

    def decode_add_tiles(self, words: Array, shifts: Array, fmt: Any, x: Array, out: Array) -> None:
        """Add the time of decoding into a sum."""
        self._work(self.machine.decode_add_s, x.size, [x], out)

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
        """Add the time of a hop, and of decoding to out."""
        decode_s = 0.0 if out is None else self.machine.decode_s
        return self._work(self.machine.hop_s + decode_s, x.size, [x], out)

    def encode_two_scales(self, x: Array, *_: Any, **__: Any) -> None:
        """Take the time of encoding: two passes where others have one are not in the model."""
        self.encode_tiles(x)

    def decode_two_scales(self, *_: Any, out: Array, more: Array | None) -> int:
        """Take the time of decoding, or into a sum."""
        if more is None:
            return self.decode_tiles(out=out)
        return self._work(self.machine.decode_add_s, more.size, [more], out)

    def pack_trits(self, *_: Any) -> None:
        """Add no time: it is included in that of encoding."""

    unpack_trits = pack_trits

    def decode_integers_tiles(
        self, words: Array, bits: int, shifts: Array, fmt: Any, out: Array
    ) -> int:
        """Add the time of decoding."""
        return self.decode_tiles(out=out)

    def add_integers_tiles(
        self, a: Array, a_bits: int, b: Array, b_bits: int, fmt: Any, out: Array, bits: int
    ) -> None:
        """Add the time of a hop."""
        self._work(self.machine.hop_s, 8 * out.size // bits, [])

    def add_encode_integers_tiles(
        self, words: Array, bits: int, cast: Any, x: Array, *_: Any, **__: Any
    ) -> None:
        """Add the time of a hop."""
        self._work(self.machine.hop_s, x.size, [x])


@dataclass
class _Rank:
    """A rank's clocks and its next possible actions.

    busy_s: of the processor, the send port and the receive port
    ready: (time, piece) at which a program can continue; closed_s: for each piece, when it has
    ended and its messages have been sent; expected: by piece, the message in, and whether it comes
    from another node
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
    expected: dict[int, tuple[Array, bool]] = field(default_factory=dict)
    expected_share: dict[int, float] = field(default_factory=dict)
    first_open: int = 0  # all pieces before it are closed
    free_s: float = 0.0  # time of that

    def work(self, time_s: float) -> None:
        """Add time of the processor."""
        self.clock_s += time_s
        self.busy_s[0] += time_s

    def close(self, piece: int) -> None:
        """Record that a piece has ended."""
        self.closed_s[piece] = max(self.clock_s, self.leaving_s.pop(piece))
        while self.first_open in self.closed_s:
            self.free_s = max(self.free_s, self.closed_s.pop(self.first_open))
            self.first_open += 1

    def next_s(self, pieces: int, window: int) -> float | None:
        """Return the time of the rank's next action."""
        times = [self.ready[0][0]] if self.ready else []
        if self.opened < pieces and self.opened < window:
            times.append(0.0)
        elif self.opened < pieces and self.opened - self.first_open < window:
            times.append(self.free_s)
        return max(self.clock_s, min(times)) if times else None


class Simulation:
    """The clocks of all ranks, or of rank 0 as the representative of all, while they run a plan.

    share: of the chunks that hold data, if only rank 0 is simulated; a message, and the work on it,
    counts for that share, but at least for a chunk
    pieces: those to simulate; near: for each round, whether a message stays in its node, if every
    rank does the same at the same time, so that rank 0 receives what was sent when rank 0 sends
    """

    def __init__(
        self,
        machine: Machine,
        plan: CollectivePlan,
        kernels: TimedKernels,
        pieces: Sequence[Piece],
        near: Sequence[bool] | None,
        share: float = 1.0,
    ) -> None:
        self.machine, self.plan, self.kernels, self.pieces = machine, plan, kernels, pieces
        self.near, self.share = near, share
        self.bytes = np.zeros(tiles(plan.blocks.size + 1) * 5 * TILE, np.uint8)  # any payload
        self.ranks = [_Rank() for _ in range(len(plan.nodes) if near is None else 1)]
        self.ends_s = [0.0] * len(pieces)
        self.ended = 0
        self.layout = NodeLayout(plan.nodes)
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
        """Resume a program that can continue, else open a piece, as the engine does."""
        state = self.ranks[rank]
        state.clock_s = time_s
        if state.ready and state.ready[0][0] <= time_s:
            piece = heapq.heappop(state.ready)[1]
            message, is_far = state.expected[piece]
            byte_s = self.machine.host_s if is_far else self.kernels.near_s
            state.work(state.expected_share[piece] * message.size * byte_s)
            self._advance(rank, piece, message)
        else:
            piece, state.opened = state.opened, state.opened + 1
            state.leaving_s[piece] = time_s
            state.programs[piece] = program(
                self.plan, self.pieces[piece], rank, self.kernels.x, self.kernels.out, self._take
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
        size = 0 if exchange.payload is None else exchange.payload.size
        if exchange.send_to is not None and exchange.payload is not None and size:
            state.bytes_sent += size
            if self._is_far(rank, exchange.send_to, exchange.round):
                state.work(size * share * self.machine.host_s)
            elif self._is_given(exchange.payload):  # others cannot read it in place
                self.kernels.copy(self._take(size), exchange.payload)
        state.work(self.kernels.seconds * share + self.machine.step_s)
        if exchange.send_to is not None and size and self.near is None:
            self._send(rank, exchange.send_to, piece, size, exchange.round)
        self._receive(rank, piece, exchange)

    def _is_far(self, rank: int, other: int, number: int) -> bool:
        """Whether a message of a round goes to another node."""
        if self.near is not None:
            return not self.near[number]
        return self.plan.nodes[rank] != self.plan.nodes[other]

    def _is_given(self, payload: Array) -> bool:
        return any(
            np.may_share_memory(payload, each) for each in (self.kernels.x, self.kernels.out)
        )

    def _share(self, chunks: int) -> float:
        """Return the fraction of so many chunks that is data: at least one of them."""
        return max(self.share, 1 / max(1, chunks))

    def _end(self, rank: int, piece: int) -> None:
        state = self.ranks[rank]
        del state.programs[piece]
        self.ended += 1
        self.ends_s[piece] = max(self.ends_s[piece], state.clock_s)
        state.close(piece)

    def _send(self, rank: int, to: int, piece: int, size: int, number: int) -> None:
        sender, receiver = self.ranks[rank], self.ranks[to]
        if self._is_far(rank, to, number):
            start_s = max(sender.clock_s, sender.out_free_s, receiver.in_free_s)
            travel_s = self.machine.alpha_s + size * self.machine.beta_s
            arrival_s = start_s + travel_s
            sender.busy_s[1] += travel_s
            receiver.busy_s[2] += travel_s
            sender.out_free_s = receiver.in_free_s = sender.leaving_s[piece] = arrival_s
        else:
            arrival_s = sender.clock_s
        if self.waiting.get((piece, to)) == rank:
            del self.waiting[piece, to]
            heapq.heappush(receiver.ready, (arrival_s, piece))
            self._plan_next(to)
        else:
            self.mail.setdefault((piece, rank, to), deque()).append(arrival_s)

    def _receive(self, rank: int, piece: int, exchange: Exchange) -> None:
        state, source = self.ranks[rank], exchange.recv_from
        share = self._share(len(exchange.recv_chunks))
        state.expected[piece] = self._take(0), False
        state.expected_share[piece] = share
        is_far = source is not None and self._is_far(rank, source, exchange.round)
        if source is not None:
            place = exchange.place if is_far else None
            state.expected[piece] = self._take(exchange.nbytes) if place is None else place, is_far
        if source is None or exchange.nbytes == 0 or (self.near is not None and not is_far):
            arrival_s = state.clock_s
        elif self.near is not None:
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


PIECES = 4  # simulated at least
PROGRAMS = 1 << 13  # pieces times ranks: up to so many, up to WINDOWS windows are simulated
WINDOWS = 4
ALL_RANKS = 8  # up to here all ranks are simulated even if one represents all


class Prediction(NamedTuple):
    """time_s of a call; wire_bytes: that leave a rank, the mean over ranks.

    simulated: the number of simulated ranks: all, or one that represents all
    """

    time_s: float
    wire_bytes: int
    simulated: int


def predict(machine: Machine, method: Method, nodes: tuple[int, ...], n: int) -> Prediction:
    """Return the predicted time of method's all-reduce of n values per rank.

    Or of another collective: of n values in all, in even blocks; of all_to_all, per rank.

    nodes: the node of each rank, numbered in the order of first ranks: hier's steps depend on it
    Source: alpha-beta-gamma model of Thakur, Rabenseifner, Gropp: IJHPCA 19(1), 2005, simulated
    step by step, as a call list. Not included: contention of links, ranks that share a processor,
    subtractions. Exact sums widen while they travel; adding integers takes as long as a hop.
    Raises ValueError for algorithm "mpi", whose steps are the library's, and for "auto".
    """
    if method.algorithm == USUAL:
        method = replace(method, algorithm=method.usual(nodes, 4 * n))
    if method.algorithm not in SCHEDULES:
        known = f"known are {', '.join(SCHEDULES)}"
        raise ArgumentError("predict", "algorithm", method.algorithm, known)
    schedule = SCHEDULES[method.algorithm]
    collective = method.blocks_of(n, len(nodes)).share
    near = _all_alike(schedule, collective, nodes) if len(nodes) > ALL_RANKS else None
    simulation, pieces, share = _simulation(machine, method, nodes, n, near)
    ends_s = simulation.run()
    time_s = max(ends_s)
    if pieces > len(ends_s):
        time_s += (pieces - len(ends_s)) * _period_s(simulation, ends_s)
    sent = sum(rank.bytes_sent for rank in simulation.ranks) / len(simulation.ranks)
    return Prediction(
        time_s=_before_s(machine, method, nodes, n) + time_s,
        wire_bytes=round(sent * share * pieces / len(ends_s)),
        simulated=len(simulation.ranks),
    )


def _period_s(simulation: Simulation, ends_s: Sequence[float]) -> float:
    """Return the time of each further piece: the longest use of a processor or port for one.

    Or the time between the ends of the last ones if that is longer, as with a full window.
    """
    half = len(ends_s) // 2
    between_s = (ends_s[-1] - ends_s[half - 1]) / (len(ends_s) - half)
    busy_s = max(max(rank.busy_s) for rank in simulation.ranks) / len(ends_s)
    return max(between_s, busy_s)


def _before_s(machine: Machine, method: Method, nodes: tuple[int, ...], n: int) -> float:
    """Return the time of the call itself: comparing arguments, and for aps the largest values."""
    aps = method.fmt is not None and method.parsed_scaling.kind == "aps"
    agreement_s = (len(nodes) - 1).bit_length() * machine.alpha_s
    compared = len(set(nodes)) > 1  # within a node only words in memory are compared
    return machine.call_s + (compared + aps) * agreement_s + aps * machine.copy_s * 4 * n


def _simulation(
    machine: Machine, method: Method, nodes: tuple[int, ...], n: int, near: Sequence[bool] | None
) -> tuple[Simulation, int, float]:
    """Return the simulation of the first pieces, their number, and the share of data in chunks.

    If one rank represents all, every chunk is as large as the largest, in whole tiles.
    """
    one, ranks = near is not None, len(nodes)
    chunks = SCHEDULES[method.algorithm].chunks(NodeLayout(nodes))
    if not method.blocks_of(n, ranks).share.whole:
        chunks = len(method.blocks_of(n, ranks).counts)
    padded = chunks * TILE * -(-tiles(n) // chunks) if one and chunks > 1 else n
    blocks = method.blocks_of(padded, ranks)
    sizes = [blocks.sizes(rank, ranks) for rank in (range(1) if one else range(ranks))]
    # Never touched: only address space is reserved.
    x, out = (np.zeros(max(each), np.float32) for each in zip(*sizes, strict=True))
    shifts = [] if method.fmt is None or method.parsed_scaling.kind in SHARED else [0]
    segments = [Segment("x", 0, padded)][: len(shifts)]
    plan = method.plan(nodes, x, segments, (shifts, shifts), 0, blocks)
    wire = plan.wire
    share = wire.size_bytes(n) / max(1, wire.size_bytes(padded))
    if padded > n and n < TILE:  # then messages are smaller than a tile, too
        machine = replace(
            machine, beta_s=machine.beta_s * wire.size_bytes(n) / wire.size_bytes(TILE)
        )
    pieces = parts_of(plan, len(set(nodes)) == 1)
    most = min(WINDOWS * plan.schedule.window(len(nodes)), PROGRAMS // (1 if one else len(nodes)))
    first = pieces[: max(PIECES, most)]
    kernels = TimedKernels(machine, x, out)
    timed = replace(plan, wire=replace(wire, kernels=kernels))
    simulation = Simulation(machine, timed, kernels, first, near, share)
    return simulation, len(pieces), share


@lru_cache(maxsize=64)
def _all_alike(schedule: Algorithm, share: Share, nodes: tuple[int, ...]) -> Sequence[bool] | None:
    """Return for each step whether its messages stay in their nodes, if all ranks do the same.

    That is the case if every rank sends and receives in every step, messages of the same kinds and
    sizes. Then all clocks are equal, and one rank represents all. Only a few ranks are checked.
    """
    ranks = len(nodes)
    looked_at = sorted({0, 1, 2, ranks // 3, ranks // 2, ranks - 2, ranks - 1} & {*range(ranks)})
    first: list[Any] | None = None
    near: list[bool] = []
    for rank in looked_at:
        steps = list(share.steps(schedule, rank, NodeLayout(nodes), 0))
        if any(step.send_to is None or step.recv_from is None for step in steps):
            return None
        kinds = [(step.kind, len(step.send_chunks), len(step.recv_chunks)) for step in steps]
        first = kinds if first is None else first
        if kinds != first:
            return None
        own = [nodes[step.send_to or 0] == nodes[rank] for step in steps]
        near = [a and b for a, b in zip(near, own, strict=True)] if near else own
    return near


MOST_SUMMED = 4096  # ranks in the computed sum: with more, the error is at least as large


class ExpectedErrors(NamedTuple):
    """Relative errors: of the whole sum, and of rounding once.

    kind: of the contributions, a key of DATA
    """

    whole: float
    once: float
    kind: str


DATA = {"of a common direction and noise": 1.0, "of noise alone": 0.0}  # weight of the direction
NOISE = 3.0


@lru_cache(maxsize=256)
def expected_error(wire: Packed, sums: RoundedSums) -> ExpectedErrors:
    """Return the larger error of sums of 1,024 values by a wire, each tile with its own shift.

    A rank's contribution is a direction that all share plus three times as much noise, or only
    noise, as in docs/measurements/accuracy.md. It takes about 40 us per rank, for at most
    MOST_SUMMED ranks.
    """
    sums = sums.at_most(MOST_SUMMED)
    return max(_error(replace(wire, fit=True), sums, kind) for kind in DATA)


def _error(wire: Packed, sums: RoundedSums, kind: str) -> ExpectedErrors:
    rng, numbers = np.random.default_rng(0), count()
    common, exact = DATA[kind] * rng.standard_normal(TILE), np.zeros(TILE)

    def contribution() -> Array:
        x = (common + NOISE * rng.standard_normal(TILE)).astype(np.float32)
        exact[...] += x
        return x

    def rounded(x: Array, terms: int) -> Array:
        used, out = wire.of(terms), np.empty(TILE, np.float32)
        payload = np.empty(used.size_bytes(TILE), np.uint8)
        used.encode(x, None, random_key(0, next(numbers)), 0, payload)
        used.decode(payload, None, out)
        return out

    def total(chains: Sequence[int]) -> tuple[Array, int]:
        """Return a sum of sums, and the number of contributions in it."""
        if not chains:
            parts = [rounded(contribution(), 1) for _ in range(sums.held)] or [contribution()]
            return np.asarray(np.sum(parts, 0, np.float32)), len(parts)
        sum_, terms = total(chains[:-1])
        for _ in range(chains[-1] - 1):
            part, more = total(chains[:-1])
            sum_, terms = rounded(sum_, terms) + part, terms + more
        return sum_, terms

    with np.errstate(all="ignore"):
        found, _ = total(sums.chains)
        normal = np.random.default_rng(1).standard_normal(TILE)
        whole, once = (
            float(np.linalg.norm(rounded(x.astype(np.float32), 1) - x0) / np.linalg.norm(x0))
            for x, x0 in ((found, exact), (normal, normal))
        )
        return ExpectedErrors(whole, once, kind)


LONG = 5  # terms of a sum below which its error is not computed
WORSE = 3  # times the error of one rounding: larger errors of a sum are reported


def stagnation(method: Method, nodes: tuple[int, ...]) -> str | None:
    """Return a warning with the expected error of a sum, or None if it does not grow with ranks.

    nodes: the node of each rank
    It grows if sums of more than a few terms are rounded before each addition.
    """
    sums, wire = method.rounded_sums(nodes), method.payloads
    if sums is None or sums.longest < LONG or not isinstance(wire, Packed):
        return None
    if method.accumulating == GROW:
        few = NodeLayout(nodes[:MOST_SUMMED])
        wire = replace(wire, growth=SCHEDULES[method.algorithm].growth(few))
    whole, once, kind = expected_error(wire, sums)
    if whole < WORSE * once:
        return None
    assert method.fmt is not None, "it is packed"
    return (
        f"{method.call}: algorithm={method.algorithm!r}, accumulate={method.accumulating!r}: the "
        f"sum of {len(nodes)} ranks in {method.fmt.name}, {kind}, is expected to have a relative "
        f"error of {whole:.2g}, one rounding {once:.2g}: algorithm='usual' avoids that"
    )


ALIKE = 1.05  # times the smallest prediction: closer times count as equal


def fastest(times_s: Mapping[str, float]) -> str:
    """Return the first schedule whose predicted time is within ALIKE of the smallest.

    So another fit of the same machine seldom changes the choice, and with it the bits.
    """
    least_s = min(times_s.values())
    return next(name for name in SCHEDULES if times_s.get(name, inf) <= ALIKE * least_s)


@lru_cache(maxsize=1024)
def choose(method: Method, nodes: tuple[int, ...], n: int) -> Method:
    """Return a method of algorithm "auto" with the algorithm that is predicted to be fastest.

    Among those whose error does not grow with ranks (see stagnation), if there are any.
    Depends only on its arguments, so it is the same on all ranks.
    """
    machine = as_machine(method.machine)
    methods: dict[str, Method] = {}
    for name, schedule in SCHEDULES.items():
        if method.accumulate is None or method.accumulate in schedule.accumulates:
            methods[name] = replace(method, algorithm=name)
    if method.algorithm != AUTO or not methods:
        raise ValueError(f"choose: {method}: nothing to choose from")
    good = {name: each for name, each in methods.items() if stagnation(each, nodes) is None}
    methods = good or methods
    times_s = {name: predict(machine, each, nodes, n).time_s for name, each in methods.items()}
    return methods[fastest(times_s)]

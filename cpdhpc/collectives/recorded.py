"""All-reduces written down once as kernels and persistent requests on arrays that stay the same.

A world keeps such a recording for each small method and size that comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..ops.payloads import Array, Exact, Packed, Raw, Wire
from ..world.mpi import SPINS
from ..world.ranks import Ranks, Wait
from .engine import Exchange, fresh, give_up, why_receive, why_send
from .method import Method, Segment, shift_bytes
from .rank_program import Plan, program

Call = Callable[[], Any]
LOOKS = range(SPINS)  # at a message, before the world waits for it


class _Round(NamedTuple):
    """A message to wait for, and what is done when it is there."""

    done: Callable[[], bool]
    wait: Wait
    calls: list[Call]


class Tape:
    """What the rank of this process does in an all-reduce of one piece, from start to end.

    Its program, that of executor.py, runs once, on wires that write down what they are asked for
    instead of doing it. So every schedule can be written down, and what is done later are the
    calls of the program in its order, on arrays that are made here, with persistent requests.
    plan: of a method that repeats; its shifts may be overwritten from run to run
    x, out: float32[n], that do not overlap: where the values and the result will be
    what: named in messages; freed: whether run is an error
    """

    def __init__(self, world: Ranks, plan: Plan, x: Array, out: Array, what: str) -> None:
        self.plan, self.x, self.out = plan, x, out
        self.sent_bytes, self.sent, self.freed = 0, 0, False
        self._world, self._rank, self._what = world, world.hosted.start, what
        self._first: list[Call] = []
        self._calls = self._first  # to which a call is added
        self._rounds: list[_Round] = []
        self._sends: list[_Round] = []
        self._bad = 0  # values of the result that are not finite, in this run
        self._record()
        self._first[:0] = [each.wait.requests[0].Start for each in self._rounds]
        if self._rounds or self._sends:
            world.tapes.add(self)

    def _record(self) -> None:
        """Run the program up to its end, and write it down."""
        (piece,) = self.plan.pieces(self.x.size)
        plan = replace(self.plan, wire=_taped(self.plan.wire, self), copy=self._copy)
        take = partial(fresh, self.x)
        steps = program(plan, piece, self._rank, self.x, self.out, take)
        received = None
        while True:
            try:
                exchange = next(steps) if received is None else steps.send(received)
            except StopIteration:
                return
            self._send(exchange)
            received = self._receive(exchange)

    def _copy(self, place: Array, payload: Array) -> None:
        self.call(place.size, np.copyto, place, payload)

    def call(self, n: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Write down a call, unless it is about nothing: n values."""
        if n:
            self._calls.append(partial(function, *arguments))

    def count(self, out: Array, function: Callable[..., int], *arguments: Any) -> None:
        """Write down a call that decodes into out; what is not finite counts in the result only."""
        if np.may_share_memory(out, self.out):
            self.call(out.size, self._add_up, function, *arguments)
        else:
            self.call(out.size, function, *arguments)

    def _add_up(self, function: Callable[..., int], *arguments: Any) -> None:
        self._bad += function(*arguments)

    def _send(self, exchange: Exchange) -> None:
        to, payload = exchange.send_to, exchange.payload
        if to is None or payload is None or payload.size == 0:
            return
        self.sent, self.sent_bytes = self.sent + 1, self.sent_bytes + payload.size
        for request in self._world.send_init(self._rank, to, payload):
            self._calls.append(request.Start)
            wait = Wait([request], self._rank, why_send(self._what, exchange))
            self._sends.append(_Round(request.Test, wait, []))

    def _receive(self, exchange: Exchange) -> Array:
        """Return where the message in will be."""
        source = exchange.recv_from
        if source is None or exchange.nbytes == 0:
            return fresh(self.x, 0)
        place = exchange.place
        buffer = fresh(self.x, exchange.nbytes) if place is None else place
        for request in self._world.recv_init(source, self._rank, buffer):
            self._calls = []
            wait = Wait([request], self._rank, why_receive(self._what, exchange))
            self._rounds.append(_Round(request.Test, wait, self._calls))
        return buffer

    def run(self) -> int:
        """Do it: from x as it is now to out; return how many values are not finite. Collective.

        Raises RankFailure, or ends the job, as engine.run does; RuntimeError where it is freed or
        did not get to its end before.
        """
        if self.freed:
            raise RuntimeError(f"{self._what}: is freed, or was ended by a failure")
        self._bad = 0
        try:
            for call in self._first:
                call()
            self._go_through(self._rounds)
            self._go_through(self._sends)
        except BaseException as error:
            self.freed = bool(self._rounds or self._sends)  # which may be under way
            if isinstance(error, Exception):
                give_up(self._world, error, self._what)
            raise
        self._world.bytes_sent[0] += self.sent_bytes
        self._world.messages_sent[0] += self.sent
        return self._bad

    def _go_through(self, rounds: list[_Round]) -> None:
        for done, wait, calls in rounds:
            for _ in LOOKS:
                if done():
                    break
            else:
                self._world.wait_any([wait])
            for call in calls:
                call()

    def free(self) -> None:
        """Free the requests; the tape cannot be run any more."""
        self.freed = True
        self._world.tapes.discard(self)
        for each in (*self._rounds, *self._sends):
            each.wait.requests[0].Free()
        self._rounds, self._sends = [], []


@dataclass(frozen=True)
class _TapedRaw(Raw):
    """A raw wire that writes down its operations; they are those of Raw on fixed views."""

    tape: Tape

    def encode(self, x: Array, shifts: Any, key: Any, offset: int, payload: Array) -> None:
        self.tape.call(x.size, np.copyto, payload.view(np.float32), x)

    def decode(self, payload: Array, shifts: Any, out: Array) -> int:
        self.tape.call(out.size, np.copyto, out, payload.view(np.float32))
        return 0

    def add(self, payload: Array, shifts: Any, x: Array, out: Array) -> None:
        self.tape.call(x.size, np.add, x, payload.view(np.float32), out)

    def add_encode(
        self,
        came: Array,
        came_shifts: Any,
        x: Array,
        shifts: Any,
        key: Any,
        offset: int,
        payload: Array,
        out: Array | None,
    ) -> int:
        self.tape.call(x.size, np.add, x, came.view(np.float32), payload.view(np.float32))
        return 0 if out is None else self.decode(payload, shifts, out)


@dataclass(frozen=True)
class _TapedPacked(Packed):
    """A packed wire that writes down its operations."""

    tape: Tape

    def encode(self, *arguments: Any, **_: Any) -> None:
        self.tape.call(arguments[0].size, super().encode, *arguments)

    def decode(self, *arguments: Any, **_: Any) -> int:
        self.tape.count(arguments[2], super().decode, *arguments)
        return 0

    def add(self, *arguments: Any, **_: Any) -> None:
        self.tape.call(arguments[2].size, super().add, *arguments)

    def add_encode(self, *arguments: Any, **_: Any) -> int:
        out = arguments[7]
        if out is None:
            self.tape.call(arguments[2].size, super().add_encode, *arguments)
        else:
            self.tape.count(out, super().add_encode, *arguments)
        return 0


@dataclass(frozen=True, kw_only=True)
class _TapedExact(Exact):
    """A wire of exact sums that writes down its operations."""

    tape: Tape

    def encode(self, *arguments: Any, **_: Any) -> None:
        self.tape.call(arguments[0].size, super().encode, *arguments)

    def decode(self, *arguments: Any, **_: Any) -> int:
        self.tape.count(arguments[2], super().decode, *arguments)
        return 0

    def add(self, *arguments: Any, **_: Any) -> None:
        self.tape.call(arguments[0].size, super().add, *arguments)

    def add_encode(self, *arguments: Any, **_: Any) -> None:
        self.tape.call(arguments[1].size, super().add_encode, *arguments)


def _taped(wire: Wire, tape: Tape) -> Wire:
    """Return a wire like this one that only writes down what it is asked for."""
    if isinstance(wire, Raw):
        return _TapedRaw(tape)
    if isinstance(wire, Packed):
        return _TapedPacked(wire.cast, wire.fit, tape)
    return _TapedExact(wire.cast, wire.trits, wire.terms, tape=tape)


SMALL_BYTES = 1 << 16  # of float32: copies to and from the tape cost little up to here
MOST_RANKS = 64  # a tape has a request for each message, up to four for each other rank
MOST_BYTES = 1 << 20  # over all ranks, whose contributions it may hold
KEPT = 64  # methods and sizes, those that were used last


@dataclass
class _Entry:
    """What a world knows of a method and a size: the nodes and the number of its calls."""

    nodes: tuple[int, ...]
    calls: int = 0
    tape: Tape | None = None


def is_small(method: Method, ranks: int, n: int) -> bool:
    """Whether repeated all-reduces of n values are tapes, where each process has one rank."""
    fits = 4 * n <= SMALL_BYTES and 4 * n * ranks <= MOST_BYTES and ranks <= MOST_RANKS
    return fits and method.repeats


def kept_tape(
    world: Ranks,
    method: Method,
    x: Array,
    segments: Sequence[Segment],
    shifts: tuple[Sequence[int], Sequence[int]],
) -> Tape | None:
    """Return the tape for arrays like x with these shifts, from the second call on, if it is small.

    A function of the calls, so the same on all processes, as it must be: programs may exchange
    notes of where payloads lie instead. The arguments are those of Method.plan.
    """
    alone, on_cpu = world.virtual_ranks == 1, isinstance(x, np.ndarray)
    if not (alone and on_cpu and is_small(method, world.ranks, x.size)):
        return None
    entry = _entry(world, (method, x.size))
    entry.calls += 1
    if entry.calls == 2:
        plan = method.plan(world.nodes, x, segments, shifts, 0)
        arrays = np.empty(x.size, np.float32), np.empty(x.size, np.float32)
        entry.tape = Tape(world, plan, *arrays, f"allreduce {method.algorithm}")
    elif entry.tape is not None and method.shares_shifts:
        plan = entry.tape.plan
        for place, each in zip((plan.sent_shifts, plan.result_shifts), shifts, strict=True):
            assert place is not None, "they are what the ranks share"
            place[:] = shift_bytes(each, segments, x.size, x)
    return entry.tape


def _entry(world: Ranks, key: tuple[Method, int]) -> _Entry:
    """Return the entry of a method and a size; forget the one that has not been used longest."""
    entry: _Entry | None = world.kept.pop(key, None)
    if entry is None or entry.nodes is not world.nodes:
        _free(entry)
        entry = _Entry(world.nodes)
    world.kept[key] = entry
    if len(world.kept) > KEPT:
        _free(world.kept.pop(next(iter(world.kept))))
    return entry


def _free(entry: _Entry | None) -> None:
    if entry is not None and entry.tape is not None:
        entry.tape.free()

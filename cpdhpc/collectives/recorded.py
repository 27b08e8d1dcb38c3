"""All-reduces written down once as kernels and persistent requests on arrays that stay the same.

A world keeps such a recording for each small method and size that comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..ops import backend_of
from ..ops.payloads import Array
from ..world.ending import POLLS
from ..world.ranks import Ranks, Wait
from .engine import Exchange, fresh, give_up, wait_to_receive, wait_to_send
from .method import Method, Segment, shift_bytes
from .rank_program import Plan, program

Call = Callable[[], Any]
POLLED = range(POLLS)  # how often a message is asked for before the world waits for it


class _Round(NamedTuple):
    """A message to wait for, and what is done when it is there."""

    done: Callable[[], bool]
    wait: Wait
    calls: list[Call]


class Recording:
    """What the rank of this process does in an all-reduce of one piece, from start to end.

    Its program runs once, on a wire whose kernels write down what they are asked for instead of
    doing it. So every schedule can be recorded, and what is done later are the calls of the
    program in its order, on arrays that are made here, with persistent requests.
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
            world.cache.hold(self)

    def _record(self) -> None:
        """Run the program up to its end, and write it down."""
        (piece,) = self.plan.pieces(self.x.size)
        wire = replace(self.plan.wire, kernels=_Recorder(self))
        plan = replace(self.plan, wire=wire, copy=partial(self.add, np.copyto))
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

    def add(self, kernel: Callable[..., Any], *arguments: Any, **options: Any) -> int:
        """Write down a call of a kernel, unless it is about nothing.

        What it finds not finite in its out counts where that is in the result; returns 0.
        """
        if all(each.size for each in arguments if isinstance(each, np.ndarray)):
            out, call = options.get("out"), partial(kernel, *arguments, **options)
            counts = out is not None and np.may_share_memory(out, self.out)
            self._calls.append(partial(self._count, call) if counts else call)
        return 0

    def _count(self, call: Callable[[], int]) -> None:
        self._bad += call()

    def _send(self, exchange: Exchange) -> None:
        to, payload = exchange.send_to, exchange.payload
        if to is None or payload is None or payload.size == 0:
            return
        self.sent, self.sent_bytes = self.sent + 1, self.sent_bytes + payload.size
        for request in self._world.send_init(self._rank, to, payload):
            self._calls.append(request.Start)
            wait = wait_to_send([request], self._rank, self._what, exchange)
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
            wait = wait_to_receive([request], self._rank, self._what, exchange)
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
            for _ in POLLED:
                if done():
                    break
            else:
                self._world.wait_any([wait])
            for call in calls:
                call()

    def free(self) -> None:
        """Free the requests; the recording cannot be run any more."""
        self.freed = True
        self._world.cache.release(self)
        for each in (*self._rounds, *self._sends):
            each.wait.requests[0].Free()
        self._rounds, self._sends = [], []


class _Recorder:
    """Stands for the kernels of a wire, and writes down what is asked of them."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._kernels = recording, backend_of(recording.x)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return partial(self._recording.add, getattr(self._kernels, name))


KEPT = 64  # methods and sizes, those that were used last


@dataclass
class _Entry:
    """What a world knows of a method and a size: the nodes and the number of its calls."""

    nodes: tuple[int, ...]
    calls: int = 0
    recording: Recording | None = None

    def free(self) -> None:
        if self.recording is not None:
            self.recording.free()


class Recordings(dict[tuple[Method, int], _Entry]):
    """The entries of a world for methods and sizes, those used last at the end."""

    def entry(self, method: Method, n: int, nodes: tuple[int, ...]) -> _Entry:
        """Return the entry of a method and a size; forget the one that was not used longest."""
        entry = self.pop((method, n), None)
        if entry is None or entry.nodes is not nodes:
            if entry is not None:
                entry.free()
            entry = _Entry(nodes)
        self[method, n] = entry
        if len(self) > KEPT:
            self.pop(next(iter(self))).free()
        return entry


def recording_of(
    world: Ranks,
    method: Method,
    x: Array,
    segments: Sequence[Segment],
    shifts: tuple[Sequence[int], Sequence[int]],
) -> Recording | None:
    """Return the recording for arrays like x with these shifts, from the second call on.

    A function of the calls, so the same on all processes, as it must be: programs may exchange
    notes of where payloads lie instead. The arguments are those of Method.plan; method.is_small.
    """
    entry = world.cache.get(Recordings, Recordings).entry(method, x.size, world.nodes)
    entry.calls += 1
    if entry.calls == 2:
        plan = method.plan(world.nodes, x, segments, shifts, 0)
        arrays = np.empty(x.size, np.float32), np.empty(x.size, np.float32)
        entry.recording = Recording(world, plan, *arrays, f"allreduce {method.algorithm}")
    elif entry.recording is not None and method.shares_shifts:
        plan = entry.recording.plan
        for place, each in zip((plan.sent_shifts, plan.result_shifts), shifts, strict=True):
            assert place is not None, "they are what the ranks share"
            place[:] = shift_bytes(each, segments, x.size, x)
    return entry.recording

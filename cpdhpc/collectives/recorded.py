"""Repeated collectives: recorded once as compiled kernels and messages, then run many times.

A call list is such a recording, which runs without the interpreter; the functions that it is
compiled of are described in kernels/cpu_call_list_calls.h. A world keeps recordings by method and
size, and recognises calls by their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy import empty, float32, ndarray

from .. import _cpu
from .._cpu import run_agreed, run_list
from ..methods import check_whole
from ..ops import cpu, kernel_threads
from ..ops.cpu import ABSENT, FEW_LOOKS, LOOKS, OVERLAPS, STRANGE, UNLIKE, WAITING
from ..ops.payloads import Array
from ..randomness import random_key
from ..world import timeline
from ..world.mpi import World, as_world
from ..world.node_memory import NOTE_BYTES, Shared, round_trip_ns
from ..world.ranks import Ranks, Wait
from .blocks import DataBlocks, Piece
from .checks import is_finite, raise_nonfinite
from .engine import BufferPool, Exchange, fresh, give_up, wait_to_receive, wait_to_send
from .method import Method, Reduced, Segment, Shifts, shift_bytes
from .rank_program import CollectivePlan, program

WORD_BYTES = 8
PART_VALUES = 1 << 16  # of a chunk that are processed at a time inside a node: fits in the cache
STREAMED_BYTES = 1 << 24  # results of this size or more are written past the caches
FAR_BYTES = 1 << 12  # of float32: from here on the distance of cores matters
FAR_NS = 180  # round trip of a word: 100 through a cache, 300 between two chiplets of an EPYC
MOST_PARTS = 128  # as recording each takes about 0.2 ms
FOLLOWED_BYTES = 1 << 20  # of float32: above, a copy takes longer than making new requests


KEPT = 64  # most recently used methods and sizes
# Of 62 bits, so that hardly any equals a digest of check_alike, of 56. Two numbers, so that an
# iteration of one recording never equals an iteration of another.
DIGEST, ITERATION, MASK = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, (1 << 62) - 1

# What kernels are in a timeline, those of wires being encode.
DOING = {
    "copy": timeline.COPY,
    "copy_past_caches": timeline.COPY,
    "add": timeline.COMPUTE,
    "divide": timeline.COMPUTE,
}
LISTS = list, tuple
new_reduced = partial(tuple.__new__, Reduced)  # takes half as long as Reduced


class Followed(NamedTuple):
    """A message in a run's x or out: its requests are renewed if these arrays have moved.

    make: (payload, stream) -> requests; of: which array, 0 or 1
    """

    requests: list[Any]
    make: Callable[[Array, int], list[Any]]
    stream: int
    of: int
    start: int
    stop: int


class RecordingKernels:
    """Takes the place of a wire's kernels and records the calls instead.

    calls: of make_list, with a segment; out: its result, in which non-finite values are counted
    streams: whether copies to out bypass the caches, so that its lines are not read
    """

    def __init__(self, calls: Any, out: Array, streams: bool) -> None:
        self._list, self._out, self._streams = calls, out, streams

    def __getattr__(self, name: str) -> Callable[..., int]:
        return partial(self._write, getattr(cpu, name))

    def add(self, a: Array, b: Array, out: Array) -> int:
        """Add float32 values."""
        return self._write(_cpu.add, 1, a, b, out)

    def subtract(self, a: Array, b: Array, out: Array) -> int:
        """Write a - b, as a + b / -1, which has the same bits; out is not a."""
        self.divide(b, -1.0, out)
        return self.add(a, out, out)

    def copy(self, out: Array, x: Array) -> int:
        """Copy values or bytes."""
        if self._streams and np.may_share_memory(out, self._out):
            return self.copy_past_caches(out, x)
        return self._write(_cpu.copy, 1, x, out)

    def copy_past_caches(self, out: Array, x: Array) -> int:
        """Copy values or bytes to memory, for readers that share no cache with this core."""
        return self._write(_cpu.copy_past_caches, 1, x, out)

    def divide(self, x: Array, divisor: float, out: Array, counts: bool = False) -> int:
        """Divide float32 values; counts: whether non-finite quotients are counted."""
        return self._write(_cpu.divide, 1, x, divisor, out, counts=counts)

    def _write(
        self, kernel: Callable[..., Any], *arguments: Any, counts: bool = False, **options: Any
    ) -> int:
        """Record a call, unless its arrays are empty; return 0, as nothing is counted yet."""
        if all(each.size for each in arguments if isinstance(each, np.ndarray)):
            out = options.get("out")
            counts = counts or (out is not None and np.may_share_memory(out, self._out))
            _cpu.record(self._list, counts, DOING.get(kernel.__name__, timeline.ENCODE))
            try:
                kernel(*arguments, **options)
            finally:
                _cpu.record(None, False)
        return 0


def parts_of(plan: CollectivePlan, in_node: bool) -> list[Piece]:
    """Return the parts of the data: pieces, cut smaller if no message leaves the node."""
    pieces = plan.pieces()
    if not in_node:
        return list(pieces)
    parts = []
    for piece in pieces:
        longest = plan.blocks.longest(plan.schedule, plan.nodes, piece)
        count = max(1, min(-(-longest // PART_VALUES), MOST_PARTS // len(pieces)))
        parts += [piece._replace(part=i, parts=count) for i in range(count)]
    return parts


class RecordedCall:
    """One process's part in a collective, from start to end, recorded. Collective.

    Its program runs once for each part of the data, on a wire whose kernels are recorded instead
    of run. So every schedule can be recorded. Payloads for processes of this node lie in shared
    memory, and words there signal that they are ready; others travel by persistent requests. The
    resulting call list runs later without the interpreter.
    x, out: default arrays of run; must not overlap
    segments, shifts, blocks: see Method.plan; adapt sets other shifts
    moves: whether each run has arrays of its own, and follows a comparison of all processes. Then
        all such recordings use the same memory; messages in x and out are copied, or if they are
        long, their requests are renewed for the arrays
    freed: whether run is an error; what: named in messages
    """

    def __init__(
        self,
        world: Ranks,
        method: Method,
        x: Array,
        out: Array,
        segments: Sequence[Segment],
        shifts: Shifts,
        *,
        moves: bool,
        blocks: DataBlocks | None = None,
    ) -> None:
        self._method, self.x, self.out, self._moves = method, x, out, moves
        plan = method.plan(world.nodes, x, segments, shifts, 0, blocks)
        self.plan = replace(plan, slots={} if method.is_random else None)
        self.freed, self.what = False, f"{method.call} {method.algorithm}"
        self._sent, self._sent_bytes = 0, 0
        self._world, self._rank = world, world.hosted.start
        self._of_mpi = world if isinstance(world, World) else None  # otherwise without requests
        self._divisor, self._unseen = method.divisor(world.ranks), method.result_unseen
        self._shared: Shared | None = world.shared()
        self._near = () if self._shared is None else self._shared.near
        self._lease = 0 if self._shared is None else self._shared.open_lease()
        self._taken: list[Array] = []  # from the shared memory
        self._requests: list[Any] = []
        self._followed: list[Followed] = []
        self._places = self._places_of(x, out)  # that the requests refer to
        self._notes: list[Wait] = []  # messages with the places of payloads, being sent
        self._waits: list[Wait] = []  # by label
        self._found, self._lends = 0, False
        self._iteration: int | None = None  # whose random numbers lie in the plan's slots
        world.cache.free_dropped()
        try:
            self._record()
        except Exception as error:
            give_up(world, error, self.what)
        self._differs = bool(self.plan.slots or self._followed)  # whether runs adjust it
        if self._requests or self._shared is not None:
            world.cache.hold(self)

    def _record(self) -> None:
        """Run the programs of all parts up to their ends, and record them."""
        world = self._world
        parts = parts_of(self.plan, world.board is not None)
        # One part uses two slots in turn, so that a run need not wait for the last run's readers.
        turns = 2 if len(parts) == 1 and world.board is not None and not self._moves else 1
        window = self.plan.schedule.window(world.ranks)
        slots = min(window, len(parts) * turns)
        self._ended = [self._word() for _ in range(slots)]
        # Results larger than caches are written past them, unless they are divided afterwards.
        streams = self.out.nbytes >= STREAMED_BYTES and self._divisor is None
        self._list = _cpu.make_list(self.x, self.out, tuple(self._all_ended()))
        self._kernels = RecordingKernels(self._list, self.out, streams)
        self._far = self._is_far()
        pools = [(self._pool(slot, self._far), self._pool(slot, False)) for slot in range(slots)]
        wire = replace(self.plan.wire, kernels=self._kernels)
        plan = replace(self.plan, wire=wire, copy=self._kernels.copy)
        for number, part in enumerate(parts * turns):
            slot = number % slots
            _cpu.begin_segment(self._list, slot)
            for pool in pools[slot]:
                pool.rewind()
            self._record_part(plan, part, number, *pools[slot])
        self._world_waits(self._notes)
        sent = world.bytes_sent[:1], self._sent_bytes // turns
        _cpu.end_list(
            self._list, turns, self._lends, *sent, world.messages_sent[:1], self._sent // turns
        )

    def _record_part(
        self, plan: CollectivePlan, part: Piece, number: int, pool: BufferPool, mailbox: BufferPool
    ) -> None:
        steps = program(plan, part, self._rank, self.x, self.out, pool.take)
        ends: list[tuple[int, Wait]] = []  # of messages sent by requests
        received = None
        while True:
            try:
                exchange = next(steps) if received is None else steps.send(received)
            except StopIteration:
                break
            if part.part == 0:  # one message of the engine is sent in several parts here
                self._sent += exchange.payload is not None and exchange.payload.size > 0
            self._send(exchange, number, mailbox, ends)
            received = self._receive(exchange, number, pool)
        for address, wait in ends:
            _cpu.add_test(self._list, address, self._label(wait))
        if self._divisor is not None:
            for place in self.plan.places(self._rank, part).values():
                if place.out is None:
                    continue
                values = self.out[place.out : place.out + place.n]
                self._kernels.divide(values, float(self._divisor), values, self._unseen)

    def _is_far(self) -> bool:
        """Return whether two neighbours in a node have no cache in common. Collective.

        Then payloads are made in a cache of this core and copied past it for the others: fetching
        lines from another core's cache takes three times as long as from memory.
        """
        if 4 * self.plan.blocks.size < FAR_BYTES:  # the same on all ranks
            return False
        return round_trip_ns(self._world, f"{self.what}: round trip") > FAR_NS

    def _pool(self, slot: int, own: bool) -> BufferPool:
        """Return the source of a slot's payloads; own: memory that is not shared."""
        make: Callable[[int], Array] = partial(fresh, self.x)
        if not own and self._near and self._shared is not None:
            make = self._shared.take if self._moves else self._take
        if not self._moves:
            return BufferPool(make)
        return self._world.cache.get((RecordedCall, slot, own), lambda: BufferPool(make))

    def _send(
        self, exchange: Exchange, number: int, mailbox: BufferPool, ends: list[tuple[int, Wait]]
    ) -> None:
        to, payload = exchange.send_to, exchange.payload
        if to is None or payload is None or payload.size == 0:
            return
        self._sent_bytes += payload.size
        if self._moves and self._is_given(payload) and (to in self._near or not self._follows):
            payload = self._copied(payload, mailbox)
        if to in self._near:
            assert self._shared is not None, "otherwise no process is near"
            note = self._shared.note(payload)
            is_given = self._is_given(payload)
            if self._divisor is not None and np.may_share_memory(payload, self.out):  # divided then
                note = None
            self._lends = self._lends or (is_given and note is not None)
            if note is None:
                note = self._shared.note(self._copied(payload, mailbox))
            word = self._word()
            _cpu.add_word(self._list, word, -1)
            message = np.concatenate([note, self._shared.note(word)])
            requests = self._world.isend(self._rank, to, message)
            self._notes.append(wait_to_send(requests, self._rank, self.what, exchange))
            return
        for request in self._init(partial(self._world.send_init, self._rank, to), payload, number):
            address = self._handle_of(request)
            _cpu.add_start(self._list, address)
            ends.append((address, wait_to_send([request], self._rank, self.what, exchange)))

    def _receive(self, exchange: Exchange, number: int, pool: BufferPool) -> Array:
        """Return the place of the message in."""
        source = exchange.recv_from
        if source is None or exchange.nbytes == 0:
            return fresh(self.x, 0)
        if source in self._near:
            assert self._shared is not None, "otherwise no process is near"
            note = np.empty(2 * NOTE_BYTES, np.uint8)
            requests = self._world.irecv(source, self._rank, note)
            wait = wait_to_receive(requests, self._rank, self.what, exchange)
            self._world_waits([wait])
            word = self._shared.payload(note[NOTE_BYTES:])
            _cpu.add_word(self._list, word, self._label(wait))
            return self._shared.payload(note[:NOTE_BYTES])
        buffer = exchange.place if self._follows or not self._moves else None
        buffer = pool.take(exchange.nbytes) if buffer is None else buffer
        for request in self._init(
            partial(self._world.recv_init, source, self._rank), buffer, number
        ):
            address = self._handle_of(request)
            # Not before the segment: over TCP the whole then took 1.4 times as long.
            _cpu.add_start(self._list, address)
            wait = wait_to_receive([request], self._rank, self.what, exchange)
            _cpu.add_test(self._list, address, self._label(wait))
        return buffer

    @property
    def _follows(self) -> bool:
        return self._moves and max(self.x.nbytes, self.out.nbytes) > FOLLOWED_BYTES

    def _init(
        self, make: Callable[[Array, int], list[Any]], message: Array, stream: int
    ) -> list[Any]:
        """Return persistent requests for a message, renewed later if it lies in x or out."""
        requests = make(message, stream)
        self._requests += requests
        if self._follows and self._is_given(message):
            place = self._places_of(message)[0]
            of = int(np.may_share_memory(message, self.out))
            start = place - self._places[of]
            stop = start + message.size
            self._followed.append(Followed(requests, make, stream, of, start, stop))
        return requests

    @staticmethod
    def _places_of(*arrays: Array) -> tuple[int, ...]:
        return tuple(each.__array_interface__["data"][0] for each in arrays)

    def _follow(self, x: Array, out: Array) -> None:
        """Renew the requests for messages in x and out, if these arrays have moved."""
        places = self._places_of(x, out)
        if not self._followed or places == self._places:
            return
        assert self._of_mpi is not None, "requests are MPI's"
        memory = x.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8)
        for each in self._followed:
            made = each.make(memory[each.of][each.start : each.stop], each.stream)
            for request, new in zip(each.requests, made, strict=True):
                request.Free()
                self._of_mpi.give_handle(request, new)
        self._places = places

    def _handle_of(self, request: Any) -> int:
        assert self._of_mpi is not None, "requests are MPI's"
        return self._of_mpi.handle_of(request)

    def _copied(self, payload: Array, mailbox: BufferPool) -> Array:
        copy = mailbox.take(payload.size)
        (self._kernels.copy_past_caches if self._far else self._kernels.copy)(copy, payload)
        return copy

    def _is_given(self, message: Array) -> bool:
        """Whether a message lies in x or out."""
        return np.may_share_memory(message, self.x) or np.may_share_memory(message, self.out)

    def _label(self, wait: Wait) -> int:
        self._waits.append(wait)
        return len(self._waits) - 1

    def _world_waits(self, waits: Sequence[Wait]) -> None:
        for wait in waits:
            if not self._world.done(wait):
                self._world.wait_any([wait])

    def _take(self, size_bytes: int) -> Array:
        """Return shared memory of the node, if there are processes to share it with."""
        if not self._near:
            return fresh(self.x, size_bytes)
        assert self._shared is not None, "otherwise no process is near"
        self._taken.append(self._shared.take(size_bytes))
        return self._taken[-1]

    def _word(self) -> Array:
        word = self._take(WORD_BYTES)
        word[:] = 0
        return word

    def _all_ended(self) -> list[tuple[Array, ...]]:
        """Return for each slot the words in which the node's processes count finished parts.

        Collective.
        """
        if self._shared is None:
            return [(word,) for word in self._ended]
        notes = [self._shared.note(word) for word in self._ended]
        everyone = self._world.gather((notes, self._shared.untold), self.what)
        self._shared.hear([untold for _, untold in everyone], self._world.process)
        return [
            (word, *(self._shared.payload(everyone[process][0][slot]) for process in self._near))
            for slot, word in enumerate(self._ended)
        ]

    def adapt(self, segments: Sequence[Segment], shifts: Shifts) -> None:
        """Let runs scale by these shifts of segments."""
        plan = self.plan
        for place, each in zip((plan.sent_shifts, plan.result_shifts), shifts, strict=True):
            if place is not None:
                place[:] = shift_bytes(each, segments, plan.blocks.size, self.x)

    def _draw(self, iteration: int) -> None:
        """Set the random numbers of an iteration for later runs."""
        if iteration != self._iteration:
            for path, slot in (self.plan.slots or {}).items():
                slot[:] = random_key(self._method.seed, iteration, *path)
            self._iteration = iteration

    def run(self, x: Array | None = None, out: Array | None = None, iteration: int = 0) -> int:
        """Run from the current x to out; return the number of non-finite values. Collective.

        x, out: C-contiguous, of the recorded sizes; other arrays only if the recording moves
        iteration: of the random numbers
        Returns OVERLAPS, with nothing done, if out shares memory with x.
        Raises RankFailure, or ends the job, as engine.run does; RuntimeError if it is freed or an
        earlier run failed.
        """
        if self.freed:
            raise RuntimeError(f"{self.what}: is freed, or was ended by a failure")
        x, out = self.x if x is None else x, self.out if out is None else out
        if self._differs:
            self._draw(iteration)
            self._follow(x, out)
        try:  # as in run_agreed: a common function would cost the smallest calls a few percent
            result = run_list(self._list, kernel_threads(), self._looks(LOOKS), x, out)
            if result == WAITING:
                result = self._awaited()
        except BaseException as error:
            self._give_up(error)
        return self._bad_values(out) if result == 0 else result

    def run_agreed(
        self, number: int, xs: Sequence[Array], outs: Sequence[Array], iteration: int
    ) -> int:
        """Do the same as run, once all processes of the node agree on the number. Collective.

        The recording moves, and is not freed. May also return, with nothing done, UNLIKE if they
        do not agree, and STRANGE if xs or outs is not a list or tuple of one NumPy array that run
        takes; the other processes do not learn of the latter.
        """
        board = self._world.board
        if self._differs:
            self._draw(iteration)
        try:
            result = run_agreed(board.calls, number, self._list, kernel_threads(), LOOKS, xs, outs)
            if result == WAITING:
                result = self._awaited()
        except BaseException as error:
            self._give_up(error)
        if result == ABSENT:
            return self.run(xs[0], outs[0], iteration) if board.wait(self.what) else UNLIKE
        return self._bad_values(outs[0]) if result == 0 else result

    def _looks(self, most: int) -> int:
        """Return how often a run looks in vain before it waits: 0 if the world sleeps then."""
        return 0 if self._world.pause_s else most

    def _awaited(self) -> int:
        """Return the result of the current run, which waits for others."""
        self._world.wait_any([Wait([self], self._rank, self._reason)])
        return self._found

    def _give_up(self, error: BaseException) -> NoReturn:
        self.freed = bool(self._waits)  # messages may be in progress
        if isinstance(error, Exception):
            give_up(self._world, self._explained(error), self.what)
        raise error

    def _bad_values(self, out: Array) -> int:
        """Return 1 if the result is not finite and no kernel has checked it."""
        seen = not self._unseen or self._divisor is not None
        return int(not seen and not is_finite(out.reshape(-1)))

    def Test(self) -> bool:
        """Continue the current run; return whether it has ended: like a request of MPI's."""
        self._found = _cpu.resume_list(self._list, self._looks(FEW_LOOKS))
        return self._found != WAITING

    def _reason(self) -> str:
        labels = _cpu.waits_of(self._list)
        if not labels:
            return f"{self.what}: waited {{:.1f}} s for the ranks of this node to have read a part"
        reason = self._waits[labels[0]].reason
        return reason if isinstance(reason, str) else reason()

    def _explained(self, error: Exception) -> Exception:
        """Return MPI's own error for a failed request, if there is one, else the error."""
        try:
            for request in self._requests:
                request.Test()
        except Exception as own:
            return own
        return error

    def free(self) -> None:
        """Free the requests, and leave the node's memory; it cannot be run any more."""
        if self._shared is not None:
            self._shared.leave(self._lease, self._taken)
        self.freed, self._shared = True, None
        self._world.cache.release(self)
        for request in self._requests:
            request.Free()
        self._requests, self._taken, self._waits = [], [], []
        self._list = None

    def is_idle(self) -> bool:
        """Whether free would not wait, which is always so."""
        return True

    def drop(self) -> None:
        """Free it, from any thread and at any time, for example by a garbage collector."""
        if self._requests:  # MPI must not be called now: the next recording does it
            self._world.cache.drop(self)
        else:
            self.free()


@dataclass
class MethodCalls:
    """A world's data on a method and a size: the nodes and the number of its calls."""

    nodes: tuple[int, ...]
    calls: int = 0
    recording: RecordedCall | None = None
    digest: int = 0  # of the recording, the same on all processes

    def free(self) -> None:
        """Free the recording."""
        if self.recording is not None:
            self.recording.free()


def with_iteration(digest: int, iteration: int) -> int:
    """Return the digest, of 62 bits, of a recording's call with an iteration."""
    return (digest + ITERATION * iteration) & MASK | 1 if iteration else digest


@dataclass(slots=True)
class Known:
    """The preparation of an all-reduce that is recognised by its arguments."""

    nodes: tuple[int, ...]
    recording: RecordedCall
    digest: int  # of the recording
    keeps: object  # a reference, if the call is recognised by this object's identity
    segments: tuple[Segment, ...]
    outcome: tuple[tuple[int, ...], tuple[int, ...], str]  # the fields of Reduced except arrays


class Recordings(dict[tuple[Method, int | DataBlocks], MethodCalls]):
    """A world's entries for methods and sizes, the last used ones at the end.

    A size is that of an all-reduce, or the blocks of another collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made = 0
        self._arrays = BufferPool(partial(np.empty, dtype=np.uint8))

    def entry(self, method: Method, n: int | DataBlocks, nodes: tuple[int, ...]) -> MethodCalls:
        """Return the entry of a method and a size; forget the least recently used one."""
        entry = self.pop((method, n), None)
        if entry is None or entry.nodes is not nodes:
            if entry is not None:
                entry.free()
            entry = MethodCalls(nodes)
        self[method, n] = entry
        if len(self) > KEPT:
            self.pop(next(iter(self))).free()
        return entry

    def digest(self, method: Method, data: int | DataBlocks, nodes: tuple[int, ...]) -> int:
        """Return the digest of calls of a method and a size; the same on all processes.

        Also for calls that are not recorded.
        """
        entry = self.entry(method, data, nodes)
        entry.digest = entry.digest or self.next_digest()
        return entry.digest

    def next_digest(self) -> int:
        """Return the digest of a new recording, the same on all processes."""
        self._made += 1
        return DIGEST * self._made & MASK | 1

    def arrays(self, x_bytes: int, out_bytes: int) -> tuple[Array, Array]:
        """Return x and out, uint8, for recording: shared by all recordings, never accessed."""
        self._arrays.rewind()
        return self._arrays.take(x_bytes), self._arrays.take(out_bytes)


def recording_of(
    world: Ranks,
    method: Method,
    x: Array,
    segments: Sequence[Segment],
    shifts: Shifts,
    out: Array | None = None,
    blocks: DataBlocks | None = None,
) -> RecordedCall | None:
    """Return the recording for arrays like x with these shifts, from the second call on.

    out, blocks: of a collective other than an all-reduce, whose out differs from x
    Returns None if a call is not recorded. Depends only on the calls, so that the result is the
    same on all processes, which is required. Collective.
    For the other arguments see Method.plan.
    """
    is_list = world.virtual_ranks == 1 and isinstance(x, np.ndarray)
    if not (is_list and method.is_recorded(world.nodes)):
        return None
    recordings = world.cache.get(Recordings, Recordings)
    entry = recordings.entry(method, blocks or x.size, world.nodes)
    entry.calls += 1
    if entry.calls == 2:
        taken = recordings.arrays(x.nbytes, x.nbytes if out is None else out.nbytes)
        a, b = (each.view(x.dtype) for each in taken)
        entry.recording = RecordedCall(
            world, method, a, b, segments, shifts, moves=True, blocks=blocks
        )
        entry.digest = recordings.next_digest()
    elif entry.recording is not None and method.shares_shifts:
        entry.recording.adapt(segments, shifts)
    return entry.recording


def forget(world: Ranks, method: Method, n: int) -> None:
    """Forget a method and a size: later calls are recorded anew. Collective."""
    entry = world.cache.get(Recordings, Recordings).pop((method, n), None)
    if entry is not None:
        entry.free()


def are_plain(xs: Any, outs: Any) -> bool:
    """Whether xs is one NumPy array, and outs one or None."""
    if type(xs) not in LISTS or len(xs) != 1 or type(xs[0]) is not ndarray:
        return False
    return outs is None or (type(outs) in LISTS and len(outs) == 1 and type(outs[0]) is ndarray)


def listed(segments: Any) -> Any:
    """Return segments as a tuple, if they are a list."""
    return tuple(segments) if type(segments) is list else segments


def know(
    world: Ranks,
    what: Hashable,
    keeps: object,
    method: Method,
    x: Array,
    segments: Any,
    parts: tuple[Segment, ...],
    reduced: Reduced,
) -> None:
    """Let later calls with these arguments run at once, if they consist only of a recording.

    what: the other arguments; keeps: the object whose identity is in what; x: an array of the call
    segments: as passed; parts: checked; reduced: the result of the call
    """
    if world.board is None or not (segments is None or type(segments) in LISTS):
        return
    entry = world.cache.get(Recordings, Recordings).get((method, x.size))
    if entry is None or entry.recording is None:
        return
    if not (method.shares_shifts or method.hides_nonfinite):
        whole = parts or (Segment("x", 0, x.size),)
        known = Known(entry.nodes, entry.recording, entry.digest, keeps, whole, reduced[1:])
        with suppress(TypeError):  # segments may be lists, which cannot be hashed
            keep(world.board.known, (what, x.shape, listed(segments)), known)


def know_as(world: Ranks, what: Hashable, other: Hashable, x: Array) -> None:
    """Let a call without segments that is recognised by other be recognised by what, too."""
    if world.board is not None and (other, x.shape, None) in world.board.known:
        keep(world.board.known, (what, x.shape, None), world.board.known[other, x.shape, None])


def keep(calls: dict[Hashable, Any], key: Hashable, known: object) -> None:
    """Keep the preparation of a call; forget all if there are too many."""
    if len(calls) >= KEPT:
        calls.clear()
    calls[key] = known


def run_known(
    world: Ranks,
    what: Hashable,
    segments: Any,
    iteration: object,
    xs: Sequence[Any],
    outs: Sequence[Any] | None,
    agreed: int = 0,
) -> Reduced | None:
    """Run a call whose arguments were seen before, without checking them. Collective.

    what: the other arguments; iteration, agreed: compared over the ranks, and nothing else
    Returns None, with nothing done, if the call is not recognised here or elsewhere, or other ranks
    make another call. Raises the NonFiniteGradient of run.
    """
    # A third of the time of a 4 KiB call is spent here: avoid every function call.
    board = world.board
    if board is None or board.has_failed or world.account is not None or world.lent_by is not None:
        return None
    try:
        x = xs[0]
        known = board.known[what, x.shape, segments if segments is None else listed(segments)]
    except Exception:  # errors of the arguments are raised later
        return None
    recording, number = known.recording, known.digest
    if recording.freed or world.nodes is not known.nodes or type(iteration) is not int:
        return None
    if iteration:
        if iteration >> 62:  # more bits than digests distinguish
            return None
        number = with_iteration(number, iteration)
    if agreed:
        number = (number ^ agreed) & MASK | 1
    totals = (empty(x.shape, float32),) if outs is None else outs
    bad = recording.run_agreed(number, xs, totals, iteration)
    if bad == OVERLAPS:
        totals = (empty(x.shape, float32),)
        bad = recording.run_agreed(number, xs, totals, iteration)
    if bad:
        if bad == UNLIKE:
            board.has_failed = True  # a guess was wrong
        if bad in (UNLIKE, STRANGE):
            return None
        raise_nonfinite(world, [x.reshape(-1)], known.segments, totals[0].reshape(-1))
    if outs is not None and totals is not outs:
        np.copyto(outs[0], totals[0])
        totals = outs
    sent_shifts, result_shifts, algorithm = known.outcome
    return new_reduced(((totals[0],), sent_shifts, result_shifts, algorithm))


def empty_shared(world: Any, shape: int | Sequence[int]) -> Array:
    """Return an array, float32[shape], that the processes of this node can read in place.

    Prepared all-reduces of such arrays need no copies for other processes. If memory cannot be
    shared, it is an ordinary array. The memory belongs to the world: it is reused for another array
    once no rank has this one, or a view of it. Collective.
    world: World, Loopback or an mpi4py communicator; shape: may differ between ranks
    Raises TypeError, ValueError or MemoryError on all ranks for a shape that is wrong, or too
    large, on any.
    """
    ranks = as_world(world, "empty_shared")
    shared, array, taken = ranks.shared(), np.empty(0, np.float32), np.empty(0, np.uint8)
    lease = 0 if shared is None else shared.open_lease()
    if shared is not None:
        shared.hear(ranks.gather(shared.untold, "empty_shared"), ranks.process)
    error: Exception | None = None
    try:
        sides = list(shape) if isinstance(shape, Iterable) else [shape]
        for side in sides:
            check_whole("empty_shared", "shape", side, 0)
        size_bytes = math.prod(map(int, sides), start=array.itemsize)
        check_whole("empty_shared", "bytes of the array", size_bytes, 0)
        taken = np.empty(size_bytes, np.uint8) if shared is None else shared.take(size_bytes)
        memory = taken if shared is None else shared.lent(lease, taken)
        array = memory.view(np.float32).reshape(sides)
    except (TypeError, ValueError) as wrong:
        error = wrong
    except (OSError, MemoryError) as wrong:
        error = MemoryError(f"empty_shared: shape={shape}: {wrong}")
    if shared is not None and not array.size:
        shared.leave(lease, [taken])
    ranks.agree(error, "empty_shared", of_call=True)
    return array

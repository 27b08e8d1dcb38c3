"""All-reduces that come again: written down once, as compiled kernels and messages, run often.

A call list is all that without the interpreter; kernels/cpu_call_list_calls.h says what each of its
compiled functions does. A world keeps them by method and size, and knows calls by their arguments.
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
from .blocks import Blocks, Piece
from .checks import is_finite, raise_nonfinite
from .engine import BufferPool, Exchange, fresh, give_up, wait_to_receive, wait_to_send
from .method import Method, Reduced, Segment, Shifts, shift_bytes
from .rank_program import Plan, program

WORD_BYTES = 8
PART_VALUES = 1 << 16  # of a chunk, that is worked on at a time inside a node: stays in the cache
STREAMED_BYTES = 1 << 24  # of a result from which on it is written past the caches
FAR_BYTES = 1 << 12  # of float32, from which on it matters whether processes are far apart
FAR_NS = 180  # a word there and back: 100 by way of a cache, 300 between two chiplets of an EPYC
MOST_PARTS = 128  # as each takes some 0.2 ms to be written down
FOLLOWED_BYTES = 1 << 20  # of float32: to copy more takes longer than to make requests anew


KEPT = 64  # methods and sizes, those that were used last
# Of 62 bits, so that hardly one is a digest of check_alike, of 56. Two numbers, so that no
# iteration of one recording is one of another.
DIGEST, ITERATION, MASK = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, (1 << 62) - 1

# What kernels are in a timeline, those of wires being encode.
DOING = {
    "copy": timeline.COPY,
    "copy_past_caches": timeline.COPY,
    "add": timeline.COMPUTE,
    "divide": timeline.COMPUTE,
}
LISTS = list, tuple
new_reduced = partial(tuple.__new__, Reduced)  # in half the time that Reduced takes


class Followed(NamedTuple):
    """A message in x or out of a run: requests that are made anew where these lie elsewhere.

    make: (payload, stream) -> requests; of: which array, 0 or 1
    """

    requests: list[Any]
    make: Callable[[Array, int], list[Any]]
    stream: int
    of: int
    start: int
    stop: int


class Kernels:
    """Stands for the kernels of a wire, and has what is asked of them written down.

    calls: of make_list, with a segment; out: its result, where what is not finite counts
    streams: whether copies to out go past the caches, so that its lines are not read
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
        """Copy values or bytes to memory, for whoever has no cache in common with this core."""
        return self._write(_cpu.copy_past_caches, 1, x, out)

    def divide(self, x: Array, divisor: float, out: Array, counts: bool = False) -> int:
        """Divide float32 values; counts: whether those that are not finite then are counted."""
        return self._write(_cpu.divide, 1, x, divisor, out, counts=counts)

    def _write(
        self, kernel: Callable[..., Any], *arguments: Any, counts: bool = False, **options: Any
    ) -> int:
        """Write down a call, unless it is about nothing; return 0, as nothing is found yet."""
        if all(each.size for each in arguments if isinstance(each, np.ndarray)):
            out = options.get("out")
            counts = counts or (out is not None and np.may_share_memory(out, self._out))
            _cpu.record(self._list, counts, DOING.get(kernel.__name__, timeline.ENCODE))
            try:
                kernel(*arguments, **options)
            finally:
                _cpu.record(None, False)
        return 0


def parts_of(plan: Plan, in_node: bool) -> list[Piece]:
    """Return the parts of the data: pieces, cut smaller where no message leaves the node."""
    pieces = plan.pieces()
    if not in_node:
        return list(pieces)
    found = []
    for piece in pieces:
        longest = plan.blocks.longest(plan.schedule, plan.nodes, piece)
        count = max(1, min(-(-longest // PART_VALUES), MOST_PARTS // len(pieces)))
        found += [piece._replace(part=i, parts=count) for i in range(count)]
    return found


class Recording:
    """What the rank of this process does in a collective, from start to end. Collective.

    Its program runs once for each part of the data, on a wire whose kernels are written down
    instead of done. So every schedule can be recorded. Payloads for processes of this node lie in
    memory that they share, and words there tell that they are ready; others go by persistent
    requests. What is done later is the call list of all that, without the interpreter.
    x, out: that do not overlap: what run takes by default
    segments, shifts, blocks: as Method.plan; adapt gives other shifts
    moves: whether each run has arrays of its own, and follows a meeting of all processes. Then
        memory is that of all such recordings; messages in x and out are copied, or long ones'
        requests follow the arrays
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
        blocks: Blocks | None = None,
    ) -> None:
        self._method, self.x, self.out, self._moves = method, x, out, moves
        plan = method.plan(world.nodes, x, segments, shifts, 0, blocks)
        self.plan = replace(plan, slots={} if method.is_random else None)
        self.freed, self.what = False, f"{method.call} {method.algorithm}"
        self._sent, self._sent_bytes = 0, 0
        self._world, self._rank = world, world.hosted.start
        self._of_mpi = world if isinstance(world, World) else None  # else there are no requests
        self._divisor, self._unseen = method.divisor(world.ranks), method.result_unseen
        self._shared: Shared | None = world.shared()
        self._near = () if self._shared is None else self._shared.near
        self._lease = 0 if self._shared is None else self._shared.open_lease()
        self._taken: list[Array] = []  # of the memory that is shared
        self._requests: list[Any] = []
        self._followed: list[Followed] = []
        self._places = self._places_of(x, out)  # that the requests know
        self._notes: list[Wait] = []  # of where payloads lie, on their way
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
        """Run the programs of all parts up to their ends, and write them down."""
        world = self._world
        parts = parts_of(self.plan, world.board is not None)
        # One part has two slots by turns, so that a run need not wait for the readers of the last.
        turns = 2 if len(parts) == 1 and world.board is not None and not self._moves else 1
        window = self.plan.schedule.window(world.ranks)
        slots = min(window, len(parts) * turns)
        self._ended = [self._word() for _ in range(slots)]
        # What no cache holds is written past them, unless it is divided afterwards.
        streams = self.out.nbytes >= STREAMED_BYTES and self._divisor is None
        self._list = _cpu.make_list(self.x, self.out, tuple(self._all_ended()))
        self._kernels = Kernels(self._list, self.out, streams)
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
        self, plan: Plan, part: Piece, number: int, pool: BufferPool, mailbox: BufferPool
    ) -> None:
        steps = program(plan, part, self._rank, self.x, self.out, pool.take)
        ends: list[tuple[int, Wait]] = []  # of what is sent by requests
        received = None
        while True:
            try:
                exchange = next(steps) if received is None else steps.send(received)
            except StopIteration:
                break
            if part.part == 0:  # what the engine calls a message goes in parts here
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

        What is sent is then made in a cache of this core, and copied past it for the others: to
        fetch lines from a cache of another core takes three times as long as from memory.
        """
        if 4 * self.plan.blocks.size < FAR_BYTES:  # the same on all ranks
            return False
        return round_trip_ns(self._world, f"{self.what}: round trip") > FAR_NS

    def _pool(self, slot: int, own: bool) -> BufferPool:
        """Return where the payloads of a slot are taken from; own: memory that is not shared."""
        make: Callable[[int], Array] = partial(fresh, self.x)
        if not own and self._near and self._shared is not None:
            make = self._shared.take if self._moves else self._take
        if not self._moves:
            return BufferPool(make)
        return self._world.cache.get((Recording, slot, own), lambda: BufferPool(make))

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
            assert self._shared is not None, "else nobody is near"
            note = self._shared.note(payload)
            given = self._is_given(payload)
            if self._divisor is not None and np.may_share_memory(payload, self.out):  # divided then
                note = None
            self._lends = self._lends or (given and note is not None)
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
        """Return where the message in will be."""
        source = exchange.recv_from
        if source is None or exchange.nbytes == 0:
            return fresh(self.x, 0)
        if source in self._near:
            assert self._shared is not None, "else nobody is near"
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
            # Not in front of the segment: over TCP the whole then took 1.4 times as long.
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
        """Return persistent requests for a message, which follow it if it lies in x or out."""
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
        """Make the requests for messages in x and out anew, where these lie elsewhere now."""
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
        """Return memory that the node shares, where there is somebody to share it with."""
        if not self._near:
            return fresh(self.x, size_bytes)
        assert self._shared is not None, "else nobody is near"
        self._taken.append(self._shared.take(size_bytes))
        return self._taken[-1]

    def _word(self) -> Array:
        word = self._take(WORD_BYTES)
        word[:] = 0
        return word

    def _all_ended(self) -> list[tuple[Array, ...]]:
        """Return for each slot the words by which the processes of the node tell what they ended.

        Collective.
        """
        if self._shared is None:
            return [(word,) for word in self._ended]
        notes = [self._shared.note(word) for word in self._ended]
        told = self._world.gather((notes, self._shared.untold), self.what)
        self._shared.hear([untold for _, untold in told], self._world.process)
        return [
            (word, *(self._shared.payload(told[process][0][slot]) for process in self._near))
            for slot, word in enumerate(self._ended)
        ]

    def adapt(self, segments: Sequence[Segment], shifts: Shifts) -> None:
        """Let runs scale by these shifts of segments."""
        plan = self.plan
        for place, each in zip((plan.sent_shifts, plan.result_shifts), shifts, strict=True):
            if place is not None:
                place[:] = shift_bytes(each, segments, plan.blocks.size, self.x)

    def _draw(self, iteration: int) -> None:
        """Let runs round by the random numbers of an iteration."""
        if iteration != self._iteration:
            for path, slot in (self.plan.slots or {}).items():
                slot[:] = random_key(self._method.seed, iteration, *path)
            self._iteration = iteration

    def run(self, x: Array | None = None, out: Array | None = None, iteration: int = 0) -> int:
        """Do it: from x as it is now to out; return how many values are not finite. Collective.

        x, out: C-contiguous, of the sizes that were recorded; others only if it moves
        iteration: of the random numbers
        Returns OVERLAPS, with nothing done, where out has memory of x.
        Raises RankFailure, or ends the job, as engine.run does; RuntimeError where it is freed or
        did not get to its end before.
        """
        if self.freed:
            raise RuntimeError(f"{self.what}: is freed, or was ended by a failure")
        x, out = self.x if x is None else x, self.out if out is None else out
        if self._differs:
            self._draw(iteration)
            self._follow(x, out)
        try:  # as in run_agreed: a function for both would cost the smallest calls some percent
            found = run_list(self._list, kernel_threads(), self._looks(LOOKS), x, out)
            if found == WAITING:
                found = self._awaited()
        except BaseException as error:
            self._give_up(error)
        return self._bad_values(out) if found == 0 else found

    def run_agreed(
        self, number: int, xs: Sequence[Array], outs: Sequence[Array], iteration: int
    ) -> int:
        """Do what run does, once all processes of the node have given the same number. Collective.

        The recording moves, and is not freed. Returns also, with nothing done, UNLIKE where they
        have not, and STRANGE where xs or outs is not a list or tuple of one NumPy array that run
        takes, which the others are not told.
        """
        board = self._world.board
        if self._differs:
            self._draw(iteration)
        try:
            found = run_agreed(board.calls, number, self._list, kernel_threads(), LOOKS, xs, outs)
            if found == WAITING:
                found = self._awaited()
        except BaseException as error:
            self._give_up(error)
        if found == ABSENT:
            return self.run(xs[0], outs[0], iteration) if board.wait(self.what) else UNLIKE
        return self._bad_values(outs[0]) if found == 0 else found

    def _looks(self, most: int) -> int:
        """Return how many looks in vain a run has: none where the world sleeps between them."""
        return 0 if self._world.pause_s else most

    def _awaited(self) -> int:
        """Return what the run under way comes to, which waits for others."""
        self._world.wait_any([Wait([self], self._rank, self._reason)])
        return self._found

    def _give_up(self, error: BaseException) -> NoReturn:
        self.freed = bool(self._waits)  # messages may be under way
        if isinstance(error, Exception):
            give_up(self._world, self._explained(error), self.what)
        raise error

    def _bad_values(self, out: Array) -> int:
        """Return 1 where the result is not finite, which no kernel has seen."""
        seen = not self._unseen or self._divisor is not None
        return int(not seen and not is_finite(out.reshape(-1)))

    def Test(self) -> bool:
        """Go on with the run under way; whether it is at its end: as a request of MPI's."""
        self._found = _cpu.resume_list(self._list, self._looks(FEW_LOOKS))
        return self._found != WAITING

    def _reason(self) -> str:
        labels = _cpu.waits_of(self._list)
        if not labels:
            return f"{self.what}: waited {{:.1f}} s for the ranks of this node to have read a part"
        reason = self._waits[labels[0]].reason
        return reason if isinstance(reason, str) else reason()

    def _explained(self, error: Exception) -> Exception:
        """Return what MPI says of an error, if it is one of MPI's."""
        try:
            for request in self._requests:
                request.Test()
        except Exception as found:
            return found
        return error

    def free(self) -> None:
        """Free the requests, and leave memory of the node; it cannot be run any more."""
        if self._shared is not None:
            self._shared.leave(self._lease, self._taken)
        self.freed, self._shared = True, None
        self._world.cache.release(self)
        for request in self._requests:
            request.Free()
        self._requests, self._taken, self._waits = [], [], []
        self._list = None

    def is_idle(self) -> bool:
        """Whether free waits for nobody, which it never does."""
        return True

    def drop(self) -> None:
        """Free it, from any thread and at any time, as a garbage collector may."""
        if self._requests:  # MPI is not to be called now: the next recording does it
            self._world.cache.drop(self)
        else:
            self.free()


@dataclass
class Entry:
    """What a world knows of a method and a size: the nodes and the number of its calls."""

    nodes: tuple[int, ...]
    calls: int = 0
    recording: Recording | None = None
    digest: int = 0  # of the recording, the same on all processes

    def free(self) -> None:
        """Free the recording."""
        if self.recording is not None:
            self.recording.free()


def with_iteration(digest: int, iteration: int) -> int:
    """Return the digest of a call of a recording, of one of 62 bits."""
    return (digest + ITERATION * iteration) & MASK | 1 if iteration else digest


@dataclass(slots=True)
class Known:
    """What a call of an all-reduce comes to that is known by its arguments."""

    nodes: tuple[int, ...]
    recording: Recording
    digest: int  # of the recording
    keeps: object  # as it may be known by its identity
    segments: tuple[Segment, ...]
    told: tuple[tuple[int, ...], tuple[int, ...], str]  # of Reduced, but for the arrays


class Recordings(dict[tuple[Method, int | Blocks], Entry]):
    """The entries of a world for methods and sizes, those used last at the end.

    A size is that of an all-reduce, or the blocks of another collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made = 0
        self._arrays = BufferPool(partial(np.empty, dtype=np.uint8))

    def entry(self, method: Method, n: int | Blocks, nodes: tuple[int, ...]) -> Entry:
        """Return the entry of a method and a size; forget the one that was not used longest."""
        entry = self.pop((method, n), None)
        if entry is None or entry.nodes is not nodes:
            if entry is not None:
                entry.free()
            entry = Entry(nodes)
        self[method, n] = entry
        if len(self) > KEPT:
            self.pop(next(iter(self))).free()
        return entry

    def digest(self, method: Method, data: int | Blocks, nodes: tuple[int, ...]) -> int:
        """Return the digest of calls of a method and a size; the same on all processes.

        Of those that are not recorded, too.
        """
        entry = self.entry(method, data, nodes)
        entry.digest = entry.digest or self.next_digest()
        return entry.digest

    def next_digest(self) -> int:
        """Return the digest of one more recording, the same on all processes."""
        self._made += 1
        return DIGEST * self._made & MASK | 1

    def arrays(self, x_bytes: int, out_bytes: int) -> tuple[Array, Array]:
        """Return x and out, uint8, to record: all recordings have the same, and touch none."""
        self._arrays.rewind()
        return self._arrays.take(x_bytes), self._arrays.take(out_bytes)


def recording_of(
    world: Ranks,
    method: Method,
    x: Array,
    segments: Sequence[Segment],
    shifts: Shifts,
    out: Array | None = None,
    blocks: Blocks | None = None,
) -> Recording | None:
    """Return the recording for arrays like x with these shifts, from the second call on.

    out, blocks: of a collective other than an all-reduce, whose out is no array like x
    None where a call is not recorded. A function of the calls, so the same on all processes, as it
    must be. Collective.
    The other arguments are those of Method.plan.
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
        entry.recording = Recording(
            world, method, a, b, segments, shifts, moves=True, blocks=blocks
        )
        entry.digest = recordings.next_digest()
    elif entry.recording is not None and method.shares_shifts:
        entry.recording.adapt(segments, shifts)
    return entry.recording


def forget(world: Ranks, method: Method, n: int) -> None:
    """Forget a method and a size: calls that come again are recorded anew. Collective."""
    entry = world.cache.get(Recordings, Recordings).pop((method, n), None)
    if entry is not None:
        entry.free()


def are_plain(xs: Any, outs: Any) -> bool:
    """Whether these are one NumPy array, and none or one."""
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
    """Let a call with these arguments be run at once from now on, if it is a recording alone.

    what: the other arguments; keeps: what that knows by its identity; x: an array of the call
    segments: as given; parts: what they are; reduced: what the call gave
    """
    if world.board is None or not (segments is None or type(segments) in LISTS):
        return
    entry = world.cache.get(Recordings, Recordings).get((method, x.size))
    if entry is None or entry.recording is None:
        return
    if not (method.shares_shifts or method.hides_nonfinite):
        whole = parts or (Segment("x", 0, x.size),)
        told = Known(entry.nodes, entry.recording, entry.digest, keeps, whole, reduced[1:])
        with suppress(TypeError):  # segments may be lists, which cannot be hashed
            keep(world.board.known, (what, x.shape, listed(segments)), told)


def know_as(world: Ranks, what: Hashable, other: Hashable, x: Array) -> None:
    """Let a call without segments that is known by other be known by what, too."""
    if world.board is not None and (other, x.shape, None) in world.board.known:
        keep(world.board.known, (what, x.shape, None), world.board.known[other, x.shape, None])


def keep(calls: dict[Hashable, Any], key: Hashable, known: object) -> None:
    """Keep what is known of a call; forget all where it is too much."""
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
    """Run a call whose arguments were seen before, without a look at them. Collective.

    what: the other arguments; iteration, agreed: compared over the ranks, if nothing else
    Returns None, with nothing done, where it is not known here or elsewhere, or others are about
    to do something else. Raises NonFiniteGradient, as run.
    """
    # It is a third of a call of 4 KiB: no function is called that need not be.
    board = world.board
    if board is None or board.has_failed or world.account is not None or world.lent_by is not None:
        return None
    try:
        x = xs[0]
        known = board.known[what, x.shape, segments if segments is None else listed(segments)]
    except Exception:  # whatever is wrong with the arguments is said later
        return None
    recording, number = known.recording, known.digest
    if recording.freed or world.nodes is not known.nodes or type(iteration) is not int:
        return None
    if iteration:
        if iteration >> 62:  # more than digests tell
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
    sent_shifts, result_shifts, algorithm = known.told
    return new_reduced(((totals[0],), sent_shifts, result_shifts, algorithm))


def empty_shared(world: Any, shape: int | Sequence[int]) -> Array:
    """Return an array, float32[shape], that the processes of this node can read where it lies.

    Prepared all-reduces of such arrays copy nothing for the others. Where memory cannot be shared
    it is like any other. Its memory is the world's: another array gets it once no rank has this
    one, or a view of it, any more. Collective.
    world: World, Loopback or an mpi4py communicator; shape: may differ between ranks
    Raises, on all ranks alike, TypeError, ValueError or MemoryError for a shape that is wrong, or
    too large, on any.
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
            check_whole("empty_shared: shape", side, 0)
        size_bytes = math.prod(map(int, sides), start=array.itemsize)
        check_whole("empty_shared: bytes of the array", size_bytes, 0)
        taken = np.empty(size_bytes, np.uint8) if shared is None else shared.take(size_bytes)
        found = taken if shared is None else shared.lent(lease, taken)
        array = found.view(np.float32).reshape(sides)
    except (TypeError, ValueError) as wrong:
        error = wrong
    except (OSError, MemoryError) as wrong:
        error = MemoryError(f"empty_shared: shape={shape}: {wrong}")
    if shared is not None and not array.size:
        shared.leave(lease, [taken])
    ranks.agree(error, "empty_shared", of_call=True)
    return array

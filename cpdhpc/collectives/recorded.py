"""All-reduces written down once, as compiled kernels and messages, and run time after time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ..methods import check_whole
from ..ops import call_list
from ..ops.call_list import ABSENT, FEW_LOOKS, LOOKS, UNLIKE, WAITING, Kernels, run_agreed, run_list
from ..ops.payloads import Array
from ..ops.threads import kernel_threads
from ..randomness import random_key
from ..world.mpi import World, as_world
from ..world.node_memory import NOTE_BYTES, Shared, round_trip_ns
from ..world.ranks import Ranks, Wait
from .checks import is_finite
from .engine import BufferPool, Exchange, fresh, give_up, wait_to_receive, wait_to_send
from .method import Method, Segment, Shifts, shift_bytes
from .rank_program import Piece, Plan, program, spans

WORD_BYTES = 8
PART_VALUES = 1 << 16  # of a chunk, that is worked on at a time inside a node: stays in the cache
STREAMED_BYTES = 1 << 24  # of a result from which on it is written past the caches
FAR_BYTES = 1 << 12  # of float32, from which on it matters whether processes are far apart
FAR_NS = 180  # a word there and back: 100 by way of a cache, 300 between two chiplets of an EPYC
MOST_PARTS = 128  # as each takes some 0.2 ms to be written down
FOLLOWED_BYTES = 1 << 20  # of float32: to copy more takes longer than to make requests anew


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


def parts_of(plan: Plan, n: int, in_node: bool) -> list[Piece]:
    """Return the parts of n values: pieces, cut smaller where no message leaves the node."""
    pieces = plan.pieces(n)
    if not in_node:
        return list(pieces)
    found = []
    for piece in pieces:
        longest = max(stop - start for start, stop in spans(plan, piece))
        count = max(1, min(-(-longest // PART_VALUES), MOST_PARTS // len(pieces)))
        found += [piece._replace(part=i, parts=count) for i in range(count)]
    return found


class Recording:
    """What the rank of this process does in an all-reduce, from start to end. Collective.

    Its program runs once for each part of the data, on a wire whose kernels are written down
    instead of done. So every schedule can be recorded. Payloads for processes of this node lie in
    memory that they share, and words there tell that they are ready; others go by persistent
    requests. What is done later is the call list of all that, without the interpreter.
    x, out: float32[n], that do not overlap: what run takes by default
    segments, shifts: as Method.plan; adapt gives others
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
    ) -> None:
        self._method, self.x, self.out, self._moves = method, x, out, moves
        plan = method.plan(world.nodes, x, segments, shifts, 0)
        self.plan = replace(plan, slots={} if method.is_random else None)
        self.freed, self.what = False, f"allreduce {method.algorithm}"
        self._sent, self._sent_bytes = 0, 0
        self._world, self._rank = world, world.hosted.start
        self._mpi: Any = world.plain_mpi()[0] if isinstance(world, World) else None
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
        parts = parts_of(self.plan, self.x.size, world.board is not None)
        # One part has two slots by turns, so that a run need not wait for the readers of the last.
        turns = 2 if len(parts) == 1 and world.board is not None and not self._moves else 1
        window = self.plan.schedule.window(world.ranks)
        slots = min(window, len(parts) * turns)
        self._ended = [self._word() for _ in range(slots)]
        # What no cache holds is written past them, unless it is divided afterwards.
        streams = self.out.nbytes >= STREAMED_BYTES and self._divisor is None
        self._list = call_list.make_list(self.x, self.out, tuple(self._all_ended()))
        self._kernels = Kernels(self._list, self.out, streams)
        self._far = self._is_far()
        pools = [(self._pool(slot, self._far), self._pool(slot, False)) for slot in range(slots)]
        wire = replace(self.plan.wire, kernels=self._kernels)
        plan = replace(self.plan, wire=wire, copy=self._kernels.copy)
        for number, part in enumerate(parts * turns):
            slot = number % slots
            call_list.begin_segment(self._list, slot)
            for pool in pools[slot]:
                pool.rewind()
            self._record_part(plan, part, number, *pools[slot])
        self._world_waits(self._notes)
        sent = world.bytes_sent[:1], self._sent_bytes // turns
        call_list.end_list(
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
            call_list.add_test(self._list, address, self._label(wait))
        if self._divisor is not None:
            for start, stop in spans(self.plan, part):
                values = self.out[start:stop]
                self._kernels.divide(values, float(self._divisor), values)

    def _is_far(self) -> bool:
        """Return whether two neighbours in a node have no cache in common. Collective.

        What is sent is then made in a cache of this core, and copied past it for the others: to
        fetch lines from a cache of another core takes three times as long as from memory.
        """
        if self.x.nbytes < FAR_BYTES:
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
            call_list.add_word(self._list, word, -1)
            message = np.concatenate([note, self._shared.note(word)])
            requests = self._world.isend(self._rank, to, message)
            self._notes.append(wait_to_send(requests, self._rank, self.what, exchange))
            return
        for request in self._init(partial(self._world.send_init, self._rank, to), payload, number):
            address = call_list.handle_of(self._mpi, request)
            call_list.add_start(self._list, address)
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
            call_list.add_word(self._list, word, self._label(wait))
            return self._shared.payload(note[:NOTE_BYTES])
        buffer = exchange.place if self._follows or not self._moves else None
        buffer = pool.take(exchange.nbytes) if buffer is None else buffer
        for request in self._init(
            partial(self._world.recv_init, source, self._rank), buffer, number
        ):
            address = call_list.handle_of(self._mpi, request)
            # Not in front of the segment: over TCP the whole then took 1.4 times as long.
            call_list.add_start(self._list, address)
            wait = wait_to_receive([request], self._rank, self.what, exchange)
            call_list.add_test(self._list, address, self._label(wait))
        return buffer

    @property
    def _follows(self) -> bool:
        return self._moves and self.x.nbytes > FOLLOWED_BYTES

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
        memory = x.view(np.uint8), out.view(np.uint8)
        for each in self._followed:
            made = each.make(memory[each.of][each.start : each.stop], each.stream)
            for request, new in zip(each.requests, made, strict=True):
                request.Free()
                call_list.give_handle(self._mpi, request, new)
        self._places = places

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
                place[:] = shift_bytes(each, segments, self.x.size, self.x)

    def _draw(self, iteration: int) -> None:
        """Let runs round by the random numbers of an iteration."""
        if iteration != self._iteration:
            for path, slot in (self.plan.slots or {}).items():
                slot[:] = random_key(self._method.seed, iteration, *path)
            self._iteration = iteration

    def run(self, x: Array | None = None, out: Array | None = None, iteration: int = 0) -> int:
        """Do it: from x as it is now to out; return how many values are not finite. Collective.

        x, out: float32[n], C-contiguous; others than those of the recording only if it moves
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
        return self._bad_values(out) if found == 0 and self._unseen else found

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
        return self._bad_values(outs[0]) if found == 0 and self._unseen else found

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
        """Return 1 where the result is not finite, which the kernels do not see."""
        return int(not is_finite(out))

    def Test(self) -> bool:
        """Go on with the run under way; whether it is at its end: as a request of MPI's."""
        self._found = call_list.resume_list(self._list, self._looks(FEW_LOOKS))
        return self._found != WAITING

    def _reason(self) -> str:
        labels = call_list.waits_of(self._list)
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

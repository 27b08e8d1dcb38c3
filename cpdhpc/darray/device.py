"""Channels for arrays on a GPU: a launch, messages, and a launch after them.

All messages of a call lie in one piece of memory, so that one kernel packs them and one copy moves
them to pinned host memory, from where they go to the mailboxes; received messages take the reverse
path. If MPI takes GPU memory, mailboxes carry only headers and MPI moves the cells directly.

A launch reads a table of boxes of cells. Each cell is written once, as the sum of its terms in
their order, so nothing within a launch waits. kernels/cuda_moves.h reads the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..collectives.rank_program import NO_KEY
from ..formats import TILE, packed_bytes, shift_count, tiles
from ..ops import backend_of
from ..ops.moves import MEMORY, OUT, Side, X
from ..ops.payloads import Packed
from ..world.gpu_messages import Direct, Staged
from ..world.node_memory import ALIGNED_BYTES
from ..world.ranks import Ranks
from .compiled import Receiving, Sending, ghost, ghosts_of, side_of
from .copies import Addresses, Array, Bytes, Copy, Transfer
from .layout import Box
from .mailbox import SLOTS
from .windows import Message, RankPieces

if TYPE_CHECKING:
    from ..ops.gpu_runtime import Streams

PROGRAMS = 16  # kept by a channel, one for each set of strides


class MessageOffsets:
    """Offsets of the messages of one direction, in the buffer of cells and in the encoded buffer.

    places: messages, and the offset of the first cell of each
    parts: for each message, the slices of the encoded buffer that are its payload
    cells_bytes, size_bytes: of the two buffers
    """

    def __init__(self, messages: Sequence[Message], cell_bytes: int, wire: Packed | None) -> None:
        sizes = [message.cells * cell_bytes for message in messages]
        if wire is None:
            starts = [*accumulate((-(-n // ALIGNED_BYTES) * ALIGNED_BYTES for n in sizes),
                                  initial=0)]  # fmt: skip
            self.parts = [[slice(a, a + n)] for a, n in zip(starts, sizes, strict=False)]
            self.cells_bytes = self.size_bytes = starts[-1]
        else:  # each message begins with a tile, so that one call encodes all
            ends = [*accumulate((tiles(n // 4) for n in sizes), initial=0)]
            starts, border = [end * TILE * 4 for end in ends], _words(ends[-1], wire)
            self.parts = [
                [slice(_words(a, wire), _words(b, wire)),
                 slice(border + _shifts(a, wire), border + _shifts(b, wire))]
                for a, b in pairwise(ends)
            ]  # fmt: skip
            self.cells_bytes = starts[-1]
            self.size_bytes = wire.size_bytes(ends[-1] * TILE)
        self.places = list(zip(messages, starts, strict=False))


def _words(count: int, wire: Packed) -> int:
    """Return the bytes of the codes of so many tiles."""
    return packed_bytes(count * TILE, wire.cast.fmt.bits)


def _shifts(count: int, wire: Packed) -> int:
    return shift_count(count * TILE, wire.shared)


class SlotMemory:
    """GPU memory for the calls of one slot, written and read in turns.

    cells, travelling: of those sent and those received; the same if the wire is raw
    sends, receives: MPI's requests if MPI takes this memory
    landing, landed: pinned memory that a copy to the GPU reads; the event when it has been read
    done: the event when all launches of the slot have finished with its memory and its tables
    """

    def __init__(
        self, ways: tuple[MessageOffsets, MessageOffsets], raw: bool, streams: Streams
    ) -> None:
        from ..ops import gpu_runtime

        self.cells = [gpu_runtime.zeros(way.cells_bytes) for way in ways]
        travelling = [gpu_runtime.zeros(0 if raw else way.size_bytes) for way in ways]
        self.travelling = self.cells if raw else travelling
        self.sends: list[Any] = []
        self.receives: list[list[Any]] = []
        self.landing: Bytes = np.empty(0, np.uint8)
        self.landed = self.done = streams.mark()


class DeviceProgram(NamedTuple):
    """The launches for arrays of some strides, and their tables on the GPU."""

    tables: LaunchTables
    begin: Array | None
    finish: Array | None


class DeviceChannel:
    """The calls of a channel on one GPU, in the current stream of the arrays' library.

    carrier: of the world, for the GPU; the other arguments are the channel's
    elements: of frames, as bytes; stream: of the plan's messages
    """

    def __init__(
        self,
        world: Ranks,
        what: str,
        carrier: Direct | Staged,
        pieces: RankPieces,
        operation: Transfer,
        sending: Sending,
        receiving: Receiving,
        wire: Packed | None,
        elements: Sequence[Bytes],
        dtype: str,
        cell_bytes: int,
        stream: int,
    ) -> None:
        self._world, self._what, self._carrier, self._pieces = world, what, carrier, pieces
        self._operation, self._sending, self._receiving = operation, sending, receiving
        self._wire, self._elements, self._dtype, self._stream = wire, elements, dtype, stream
        self._direct, self._streams = isinstance(carrier, Direct), carrier.streams
        self._out = MessageOffsets([message for _, message in sending], cell_bytes, wire)
        self._in = MessageOffsets([message for _, message in receiving], cell_bytes, wire)
        self._programs: dict[Any, DeviceProgram] = {}
        ways = self._out, self._in
        self._rooms = [SlotMemory(ways, wire is None, self._streams) for _ in range(SLOTS)]

    def begin(self, slot: int, serial: int, number: int, x: Addresses, out: Addresses) -> None:
        """Pack and send; do the work that needs no message.

        Waits until the GPU has packed: MPI moves messages while the GPU and the caller continue.
        """
        room = self._rooms[slot]
        self._await_sends(room)
        program = self._program(x, out)
        self._streams.follow(room.done)  # the call before may have been in another stream
        self._launch(program.tables.begin, program.begin, x, out, room.cells[0])
        payload = room.travelling[0]
        if self._wire is not None and payload.size:
            self._wire.encode(room.cells[0].view(np.float32), None, NO_KEY, 0, payload)
        room.done = self._streams.mark()
        if self._direct:
            self._send_directly(room, slot, serial, number)
        elif self._sending:
            self._send_staged(room, slot, serial, number)

    def _send_staged(self, room: SlotMemory, slot: int, serial: int, number: int) -> None:
        """Copy all messages to the host at once, and from there into their mailboxes."""
        host: Bytes = np.empty(0, np.uint8)
        if room.travelling[0].size:
            host, copied = self._streams.start_to_host(room.travelling[0], room.done)
            self._wait([copied], "the GPU")
        for (outbox, _), parts in zip(self._sending, self._out.parts, strict=True):
            outbox.reserve(slot, serial)
            memory, start = outbox.payload(slot), 0
            for part in (host[each] for each in parts):
                memory[start : start + part.size] = part
                start += part.size
            outbox.send(slot, serial, number)

    def _send_directly(self, room: SlotMemory, slot: int, serial: int, number: int) -> None:
        """Pass all sends and receives to MPI, once the GPU has finished with their memory."""
        if not self._sending and not self._receiving:
            return
        self._wait([room.done], "the GPU")
        here = self._world.rank
        room.receives = [
            [request for part in parts for request in
             self._world.irecv(inbox.other, here, room.travelling[1][part], self._stream)]
            for (inbox, _), parts in zip(self._receiving, self._in.parts, strict=True)
        ]  # fmt: skip
        for (outbox, _), parts in zip(self._sending, self._out.parts, strict=True):
            outbox.reserve(slot, serial)
            outbox.send(slot, serial, number)
            for part in parts:
                payload = room.travelling[0][part]
                room.sends += self._world.isend(here, outbox.other, payload, self._stream)

    def _await_sends(self, room: SlotMemory) -> None:
        if room.sends:
            others = ", ".join(str(outbox.other) for outbox, _ in self._sending)
            self._wait(room.sends, f"ranks {others} to receive")
            room.sends = []

    def come(self, slot: int) -> bool:
        """Whether all cells that MPI moves have come; gives MPI time to move them."""
        room = self._rooms[slot]
        complete = [request.Test() for each in (room.sends, *room.receives) for request in each]
        return all(complete[len(room.sends) :])

    def finish(self, slot: int, serial: int, number: int, x: Addresses, out: Addresses) -> None:
        """Unpack the messages."""
        room, program = self._rooms[slot], self._program(x, out)
        cells, travelled = room.cells[1], room.travelling[1]
        if not self._direct and travelled.size:
            self._wait([room.landed], "the GPU")  # complete long ago
            room.landing = self._streams.pinned(travelled.size)
        for i, ((inbox, _), parts) in enumerate(zip(self._receiving, self._in.parts, strict=True)):
            inbox.receive(slot, serial, number)
            if self._direct:
                inbox.wait(room.receives[i])
            elif travelled.size:
                memory, start = inbox.payload(slot), 0
                for part in (room.landing[each] for each in parts):
                    part[:] = memory[start : start + part.size]
                    start += part.size
            inbox.release(slot, serial)
        if not self._direct and travelled.size:
            room.landed = self._streams.start_to_device(room.landing, travelled, room.done)
            self._streams.follow(room.landed)
        if self._wire is not None and travelled.size:
            self._wire.decode(travelled, None, cells.view(np.float32))
        self._launch(program.tables.finish, program.finish, x, out, cells)
        room.done, room.receives = self._streams.mark(), []

    def _program(self, x: Addresses, out: Addresses) -> DeviceProgram:
        """Return the launches for arrays with the same offset and strides."""
        from ..ops import gpu_runtime

        places = x.ctypes.data, out.ctypes.data
        in_place = np.may_share_memory(x, out)
        key = x.strides, out.strides, in_place, gcd(WIDEST_BYTES, *places)
        if key not in self._programs:
            if len(self._programs) == PROGRAMS:
                for room in self._rooms:
                    gpu_runtime.wait(room.done)  # the GPU may read a table until then
                del self._programs[next(iter(self._programs))]
            made = tables(
                self._operation, self._pieces, self._out.places, self._in.places,
                self._elements, x, out, self._dtype,
            )  # fmt: skip
            there = [None if t is None else gpu_runtime.to_device(t.numbers) for t in made]
            self._programs[key] = DeviceProgram(made, *there)
        return self._programs[key]

    def _launch(
        self, table: BoxTable | None, numbers: Array, x: Addresses, out: Addresses, memory: Array
    ) -> None:
        if table is not None:
            where = x.ctypes.data, out.ctypes.data, memory
            backend_of(numbers).move_boxes(table.kind, numbers, table.boxes, table.units, *where)

    def _wait(self, requests: Sequence[Any], whom: str) -> None:
        self._carrier.wait(list(requests), self._what, whom)

    def free(self) -> None:
        """Wait until nothing reads or writes the memory."""
        from ..ops import gpu_runtime

        for room in self._rooms:
            self._await_sends(room)
            gpu_runtime.wait(room.landed)
            gpu_runtime.wait(room.done)


TABLE = 3  # base for fill values in the table itself; X, OUT and MEMORY are 0..2
BEGINS = 4  # added to the base of a term that begins a partial sum; as in cuda_moves.h
AXES = 6  # of a box, with that of the units
WIDEST_BYTES = 16  # of a unit that is copied
COPIES = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}  # bytes of a unit -> kind of move_boxes
SUMS = {  # dtype -> kind of move_boxes, and bytes of a unit
    **{f"{sign}int{8 * n}": (5 + i, n) for i, n in enumerate((1, 2, 4, 8)) for sign in ("", "u")},
    **{"float32": (9, 4), "complex64": (9, 4), "float64": (10, 8), "complex128": (10, 8)},
    **{"float16": (11, 2), "bfloat16": (12, 2)},
}


class BoxTable(NamedTuple):
    """The input of a launch, int64[n]: the kind of its units, and how many boxes and units."""

    kind: int
    numbers: npt.NDArray[np.int64]
    boxes: int
    units: int


class Region(NamedTuple):
    """Cells that are written once, and the terms that are summed into them.

    terms: arrays of the target's shape, each with whether a partial sum begins there
    """

    box: Box
    target: Addresses
    terms: tuple[tuple[Addresses, bool], ...]

    def part(self, box: Box) -> Region:
        """Return a part of the cells."""
        place = box.slices(self.box.start)
        terms = tuple((term[place], begins) for term, begins in self.terms)
        return Region(box, self.target[place], terms)


def each_once(copies: Iterable[Copy], regions: Sequence[Region] = ()) -> list[Region]:
    """Return regions with the copies merged in: additions extend the terms of earlier regions."""
    disjoint = list(regions)
    for box, target, terms, adds in copies:
        sources = [np.broadcast_to(term, target.shape) for term in terms]
        new = Region(box, target, tuple((t, adds and i == 0) for i, t in enumerate(sources)))
        if not adds:
            disjoint.append(new)
            continue
        before, disjoint = disjoint, []
        for region in before:
            both = region.box.intersect(box)
            disjoint += [region.part(rest) for rest in region.box.without(both)]
            if not both.empty:
                part = region.part(both)
                disjoint.append(part._replace(terms=part.terms + new.part(both).terms))
    return disjoint


class LaunchTables(NamedTuple):
    """Both launches of an operation; None for one without work."""

    begin: BoxTable | None
    finish: BoxTable | None


Places = Sequence[tuple[Message, int]]  # messages, and the offset of the first cell of each


def tables(
    operation: Transfer,
    pieces: RankPieces,
    sent: Places,
    received: Places,
    elements: Sequence[Bytes],
    x: Addresses,
    out: Addresses,
    dtype: str,
) -> LaunchTables:
    """Return the launches of an operation. elements: of the frame, as bytes."""
    sides = [Side(TABLE, i * WIDEST_BYTES, ()) for i in range(len(elements))]
    frame, is_copy = ghosts_of(operation, pieces, x, out, sides), operation.is_copy
    n = prod(frame.owned.shape[pieces.owned.ndim :])

    def payload(message: Message, offset: int) -> Addresses:
        return ghost(MEMORY, offset, (message.cells * n,), x.itemsize)

    packed = [operation.pack(frame, each, payload(each, at)) for each, at in sent]
    unpacked = [operation.unpack(frame, each, payload(each, at)) for each, at in received]
    itself = Region(pieces.owned, frame.owned, ((frame.owned, False),))
    base = [] if is_copy else [itself]
    begin = each_once(operation.own(frame), base if pieces.halo_only else [])
    begin += each_once(chain(*packed))
    finish = each_once(chain(*unpacked), base)
    ahead = x.ctypes.data - out.ctypes.data if np.may_share_memory(x, out) else None
    unit_bytes = gcd(WIDEST_BYTES, x.ctypes.data, out.ctypes.data) if is_copy else SUMS[dtype][1]

    def table(regions: Sequence[Region]) -> BoxTable | None:
        left = [region for region in regions if not _is_there(region, ahead)]
        return _table(left, x.itemsize, unit_bytes, elements, None if is_copy else dtype)

    return LaunchTables(table(begin), table(finish))


def _is_there(region: Region, ahead: int | None) -> bool:
    """Whether the cells already have their value. ahead: bytes from out to x, None if apart."""
    target, term = side_of(region.target), side_of(region.terms[0][0])
    moved = {OUT: 0, X: ahead}.get(term.base)
    if moved is None or len(region.terms) > 1 or target.base != OUT:
        return False
    steps = zip(region.target.shape, term.strides, target.strides, strict=True)
    return term.offset + moved == target.offset and all(n == 1 or a == b for n, a, b in steps)


class _Loops(NamedTuple):
    """A box for the kernel: for each axis (count, stride of target, of each term), in bytes."""

    target: Side
    terms: tuple[Side, ...]
    axes: list[tuple[int, tuple[int, ...]]]


def _loops(region: Region, itemsize: int, still: bool) -> Iterator[_Loops]:
    """Yield boxes of at most AXES axes, the last one of contiguous bytes.

    still: whether units are whole elements, so that a fill value has no stride within one
    """
    shape, target = region.target.shape, side_of(region.target)
    if 0 in shape:
        return
    pairs = [(side_of(term), begins) for term, begins in region.terms]
    terms = tuple(side._replace(base=side.base + BEGINS * begins) for side, begins in pairs)
    sides = (target, *terms)
    axes = [(itemsize, tuple(int(not still or s.base % BEGINS != TABLE) for s in sides))]
    strides = [side.strides for side in sides]
    along = sorted(zip(shape, *strides, strict=True), key=lambda axis: abs(axis[1]))
    for n, *steps in along:  # neighbouring threads write neighbouring cells
        inner, below = axes[0]
        if n > 1 and tuple(steps) == tuple(inner * step for step in below):
            axes[0] = n * inner, below
        elif n > 1:
            axes.insert(0, (n, tuple(steps)))
    yield from _unrolled(target, terms, axes)


def _unrolled(
    target: Side, terms: tuple[Side, ...], axes: list[tuple[int, tuple[int, ...]]]
) -> Iterator[_Loops]:
    if len(axes) <= AXES:
        yield _Loops(target, terms, axes)
        return
    n, steps = axes[0]
    for i in range(n):
        sides = [
            side._replace(offset=side.offset + i * step)
            for side, step in zip((target, *terms), steps, strict=True)
        ]
        yield from _unrolled(sides[0], tuple(sides[1:]), axes[1:])


def _table(
    regions: Sequence[Region],
    itemsize: int,
    unit_bytes: int,
    elements: Sequence[Bytes],
    added: str | None,
) -> BoxTable | None:
    """Return the table of some regions; added: the dtype of sums, None if cells are copied."""
    boxes = [loops for each in regions for loops in _loops(each, itemsize, still=True)]
    if not boxes:
        return None
    for box in boxes if added is None else ():
        sides = (side for side in (box.target, *box.terms) if side.base % BEGINS != TABLE)
        steps = (step for _, each in box.axes[:-1] for step in each)
        unit_bytes = gcd(unit_bytes, box.axes[-1][0], *steps, *(side.offset for side in sides))
    if unit_bytes < itemsize:
        boxes = [loops for each in regions for loops in _loops(each, itemsize, still=False)]
    heads, terms, units = list[list[int]](), list[list[int]](), 0
    for box in boxes:
        counts, strides = _by_units(box, unit_bytes)
        heads.append([units, len(terms), box.target.base, box.target.offset, *counts, *strides[0]])
        terms += [[t.base, t.offset, *s] for t, s in zip(box.terms, strides[1:], strict=True)]
        units += int(np.prod(counts))
    heads.append([units, len(terms), *[0] * (len(heads[0]) - 2)])
    behind = 8 * (sum(map(len, heads)) + sum(map(len, terms)))  # bytes, where the values are
    for term in terms:
        term[1] += behind if term[0] % BEGINS == TABLE else 0
    wide = [np.resize(value, WIDEST_BYTES) for value in elements]
    numbers = np.array([n for row in (*heads, *terms) for n in row], np.int64)
    numbers = np.concatenate([numbers, *(value.view(np.int64) for value in wide)])
    kind = COPIES[unit_bytes] if added is None else SUMS[added][0]
    return BoxTable(kind, numbers, len(boxes), units)


def _by_units(box: _Loops, unit_bytes: int) -> tuple[list[int], list[list[int]]]:
    """Return the counts of AXES axes, and the strides of the target and of each term."""
    (size_bytes, moves), outer = box.axes[-1], box.axes[:-1]
    axes = [*outer, (size_bytes // unit_bytes, tuple(unit_bytes * step for step in moves))]
    axes = [(1, (0,) * len(moves))] * (AXES - len(axes)) + axes
    return [n for n, _ in axes], [list(side) for side in zip(*(s for _, s in axes), strict=True)]

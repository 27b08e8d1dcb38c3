"""What a channel does where arrays are on a GPU: a launch, messages, and a launch behind them.

All messages of a call lie in one piece of memory, so that one kernel packs them and one copy takes
them down to pinned memory, from which they go to the mailboxes; those that come take the same way
back. Where MPI takes GPU memory, mailboxes carry heads alone, and cells go straight to MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..formats import TILE, packed_bytes, shift_count, tiles
from ..ops import backend_of
from ..ops.payloads import Packed
from ..world.gpu_messages import Direct, Staged
from ..world.node_memory import ALIGNED_BYTES
from ..world.ranks import Ranks
from .by_slices import Addresses, Array, Bytes
from .compiled import Operation, Receiving, Sending
from .device_moves import WIDEST_BYTES, Place, Table, Tables, tables
from .mailbox import SLOTS
from .windows import Message, RankPieces

if TYPE_CHECKING:
    from ..ops.gpu_runtime import Streams

NO_KEY = (0, 0)  # of random bits: wires round to the nearest
PROGRAMS = 16  # of a channel: for so many strides


class Way:
    """Where the messages of one direction lie, among cells and in what travels.

    places: of the cells; parts: of each message, the slices of what travels that are its payload
    cells_bytes, size_bytes: of all
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
        self.places = [Place(*each) for each in zip(messages, starts, strict=False)]


def _words(count: int, wire: Packed) -> int:
    """Return the bytes of the codes of so many tiles."""
    return packed_bytes(count * TILE, wire.cast.fmt.bits)


def _shifts(count: int, wire: Packed) -> int:
    return shift_count(count * TILE, wire.shared)


class Room:
    """Memory of the GPU for the calls of a slot, which is written and read in turns.

    cells, travelling: of those sent and those received; the same where the wire is raw
    sends, receives: requests of MPI where it takes this memory
    landing, landed: pinned memory that a copy up reads, and when it has been read
    done: when all that was launched for the slot has read and written its memory and its tables
    """

    def __init__(self, ways: tuple[Way, Way], raw: bool, streams: Streams) -> None:
        from ..ops import gpu_runtime

        self.cells = [gpu_runtime.zeros(way.cells_bytes) for way in ways]
        travelling = [gpu_runtime.zeros(0 if raw else way.size_bytes) for way in ways]
        self.travelling = self.cells if raw else travelling
        self.sends: list[Any] = []
        self.receives: list[list[Any]] = []
        self.landing: Bytes = np.empty(0, np.uint8)
        self.landed = self.done = streams.mark()


class Program(NamedTuple):
    """The launches for arrays of some strides, and their tables on the GPU."""

    tables: Tables
    begin: Array | None
    finish: Array | None


class DeviceChannel:
    """The calls of a channel on one GPU, in its library's current stream.

    carrier: of the world, for the GPU; the other arguments are the channel's
    values: the element that each fill writes; stream: of the plan's messages
    """

    def __init__(
        self,
        world: Ranks,
        what: str,
        carrier: Direct | Staged,
        pieces: RankPieces,
        operation: Operation,
        sending: Sending,
        receiving: Receiving,
        wire: Packed | None,
        values: Sequence[Bytes],
        dtype: str,
        cell_bytes: int,
        stream: int,
    ) -> None:
        self._world, self._what, self._carrier, self._pieces = world, what, carrier, pieces
        self._operation, self._sending, self._receiving = operation, sending, receiving
        self._wire, self._values, self._dtype, self._stream = wire, values, dtype, stream
        self._direct, self._streams = isinstance(carrier, Direct), carrier.streams
        self._out = Way([message for _, message in sending], cell_bytes, wire)
        self._in = Way([message for _, message in receiving], cell_bytes, wire)
        self._programs: dict[Any, Program] = {}
        ways = self._out, self._in
        self._rooms = [Room(ways, wire is None, self._streams) for _ in range(SLOTS)]

    def begin(self, slot: int, serial: int, number: int, x: Addresses, out: Addresses) -> None:
        """Pack and send; do what needs no message.

        Waits until the GPU has packed: MPI moves messages while the GPU and the caller go on.
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

    def _send_staged(self, room: Room, slot: int, serial: int, number: int) -> None:
        """Copy all messages down at once, and then into their mailboxes."""
        host: Bytes = np.empty(0, np.uint8)
        if room.travelling[0].size:
            host, copied = self._streams.to_host(room.travelling[0], room.done)
            self._wait([copied], "the GPU")
        for (outbox, _), parts in zip(self._sending, self._out.parts, strict=True):
            outbox.reserve(slot, serial)
            memory, start = outbox.payload(slot), 0
            for part in (host[each] for each in parts):
                memory[start : start + part.size] = part
                start += part.size
            outbox.send(slot, serial, number)

    def _send_directly(self, room: Room, slot: int, serial: int, number: int) -> None:
        """Give MPI all messages that leave and come, once the GPU is done with their memory."""
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

    def _await_sends(self, room: Room) -> None:
        if room.sends:
            others = ", ".join(str(outbox.other) for outbox, _ in self._sending)
            self._wait(room.sends, f"ranks {others} to receive")
            room.sends = []

    def come(self, slot: int) -> bool:
        """Whether all cells that MPI brings have come; gives it the time to move them."""
        room = self._rooms[slot]
        asked = [request.Test() for each in (room.sends, *room.receives) for request in each]
        return all(asked[len(room.sends) :])

    def finish(self, slot: int, serial: int, number: int, x: Addresses, out: Addresses) -> None:
        """Take in the messages."""
        room, program = self._rooms[slot], self._program(x, out)
        cells, travelled = room.cells[1], room.travelling[1]
        if not self._direct and travelled.size:
            self._wait([room.landed], "the GPU")  # done long ago
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
            room.landed = self._streams.to_device(room.landing, travelled, room.done)
            self._streams.follow(room.landed)
        if self._wire is not None and travelled.size:
            self._wire.decode(travelled, None, cells.view(np.float32))
        self._launch(program.tables.finish, program.finish, x, out, cells)
        room.done, room.receives = self._streams.mark(), []

    def _program(self, x: Addresses, out: Addresses) -> Program:
        """Return the launches for arrays that lie as these do."""
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
                self._pieces, self._out.places, self._in.places, self._values, x, out,
                self._dtype, self._operation.is_copy,
            )  # fmt: skip
            there = [None if t is None else gpu_runtime.to_device(t.numbers) for t in made]
            self._programs[key] = Program(made, *there)
        return self._programs[key]

    def _launch(
        self, table: Table | None, numbers: Array, x: Addresses, out: Addresses, memory: Array
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

"""Channels: the lanes of a plan for one operation, dtype and shape of cells, and their use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ..ops.moves import ADDED
from ..ops.payloads import Packed
from . import compiled
from .array_kinds import NUMPY, Array, Kind
from .by_slices import Source
from .compiled import ACCUMULATE, EXCHANGE, Operation, Plain, Program
from .mailbox import SLOTS, Incoming, Outgoing, Purpose
from .windows import Piece

if TYPE_CHECKING:
    from .plan import Message, WindowPlan

Bytes = npt.NDArray[np.uint8]
PROGRAMS = 16  # of a channel: for so many strides
NO_KEY = (0, 0)  # of random bits: wires round to the nearest


@dataclass
class Call:
    """One exchange under way: x and out as they came, and as NumPy arrays where they are that."""

    kind: Kind
    x: Array
    out: Array
    plain: tuple[Plain, Plain] | None
    number: int = 0
    serial: int = 0

    @property
    def slot(self) -> int:
        """The slot that its messages take."""
        return self.serial % SLOTS

    @property
    def sliced(self) -> tuple[Kind, Array, Array]:
        """The kind, x and out for slices: NumPy's for torch where it can: torch adds fewer."""
        if self.plain is None or self.kind is NUMPY or self.kind.dtype(self.x) == "bfloat16":
            return self.kind, self.x, self.out
        return NUMPY, *self.plain

    @property
    def run(self) -> tuple[int, int, Plain, Plain]:
        """What a program is run with."""
        assert self.plain is not None, "programs are of NumPy arrays"
        return self.serial, self.number, *self.plain


@dataclass
class Channel:
    """Lanes, and programs by the strides of arrays.

    wire: None for the cells' own bytes; like: an array of the kind and dtype
    serial: of the last call that was begun; open: serials of calls that are not finished
    """

    plan: WindowPlan
    operation: Operation
    kind: Kind
    like: Array
    trail: tuple[int, ...]
    wire: Packed | None
    serial: int = 0
    open: set[int] = field(default_factory=set)
    programs: dict[Any, Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, name = self.plan, self.operation.name
        self.dtype, self.itemsize = self.kind.dtype(self.like), self.kind.itemsize(self.like)
        self.compiled = self.wire is None and (self.operation is EXCHANGE or self.dtype in ADDED)
        key = f"{name} of {self.dtype}, further axes {self.trail}, wire {plan.wire}"
        self.mark = (crc32(key.encode()) >> 1) << 32  # in front of the numbers of calls
        purpose = Purpose(plan.stream, f"{name} of plan {plan.name!r}", key)
        sent, received = self.operation.sent(plan), self.operation.received(plan)

        def lane(make: Any, message: Message) -> Any:
            size = self.payload_bytes(message)
            return make(plan.world, message.rank, size, purpose, plan.world.shared())

        self.receiving = [(lane(Incoming, each), each.pieces) for each in received]
        self.sending = [(lane(Outgoing, each), each.pieces) for each in sent]
        self.requesting = [lane for lane, _ in self.receiving if lane.requests]
        self.sent_bytes = sum(lane.size_bytes for lane, _ in self.sending)
        self.sent = len(self.sending)
        self.bytes_counter = plan.world.bytes_sent.data  # faster than the arrays
        self.messages_counter = plan.world.messages_sent.data
        self.temporary = np.empty(
            max((self.raw_bytes(each) for each in (*sent, *received)), default=0), np.uint8
        )

    def raw_bytes(self, message: Message) -> int:
        """Return the bytes of a message's cells."""
        return message.cells * prod(self.trail) * self.itemsize

    def payload_bytes(self, message: Message) -> int:
        """Return the bytes of a message on the wire."""
        n = self.raw_bytes(message)
        return n if self.wire is None else self.wire.size_bytes(n // self.itemsize)

    def element(self, value: complex) -> Bytes:
        """Return the bytes of a value as an element."""
        return self.kind.element(self.like, value)

    def cut(self, kind: Kind) -> Source:
        """Return what slices need to know."""
        return Source(self.plan.owned, self.plan.window, kind)

    def prepare(self, call: Call) -> None:
        """Give a call its number, before anything is sent.

        Raises RuntimeError where the slots are taken, ValueError where the arrays overlap.
        """
        call.serial = self.serial + 1
        if call.serial - SLOTS in self.open:
            raise RuntimeError(
                f"{self.operation.name} of plan {self.plan.name!r}: {SLOTS} are under way already: "
                "finish one first"
            )
        if call.plain and not self.apart(*call.plain):
            raise ValueError(
                f"{self.operation.name}: out overlaps what is given: it may only have that, or be "
                "that, as the part of the window that this rank owns"
            )
        self.serial = call.serial
        self.open.add(call.serial)

    def apart(self, x: Plain, out: Plain) -> bool:
        """Whether two arrays share nothing, or one is the owned part of the other."""
        if not np.may_share_memory(x, out):
            return True
        own, all_ = (out, x) if self.operation is ACCUMULATE else (x, out)
        part = self.plan.inside(all_) if self.plan.window.contains(self.plan.owned) else None
        return part is not None and _same(part, own)

    def begin(self, call: Call) -> None:
        """Pack and send; do what needs no message."""
        program = self.program(call)
        for incoming, _ in self.receiving:
            incoming.start(call.slot)
        if program is None:
            self._begin_by_slices(call)
        else:
            program.run(program.slots[call.slot].begin, *call.run)
        self.count()

    def count(self) -> None:
        """Count the messages of a call."""
        self.bytes_counter[0] += self.sent_bytes
        self.messages_counter[0] += self.sent

    def _begin_by_slices(self, call: Call) -> None:
        kind, x, out = call.sliced
        cut = self.cut(kind)
        for lane, pieces in self.sending:
            lane.reserve(call.slot, call.serial)
            payload = lane.payload(call.slot)
            memory = self._values(pieces, payload)
            values = kind.stage(x, memory)
            self.operation.pack(cut, pieces, x, values)
            kind.pull(values, memory)
            if self.wire is not None:
                self.wire.encode(memory.view(np.float32), None, NO_KEY, 0, payload)
            lane.send(call.slot, call.serial, call.number)
        self.operation.own(cut, self.plan, x, out)

    def progress(self, call: Call) -> bool:
        """Whether all messages of a call have come; MPI is asked for each, so that it goes on."""
        for outgoing, _ in self.sending:
            outgoing.moved(call.slot)
        return all([incoming.has_come(call.slot, call.serial) for incoming, _ in self.receiving])

    def finish(self, call: Call) -> None:
        """Take in the messages, in the order of the ranks."""
        program = self.program(call)
        for lane, _ in self.receiving:
            lane.connect()
        if program is None:
            self._finish_by_slices(call)
        else:
            program.run(program.slots[call.slot].finish, *call.run)
        self.open.remove(call.serial)

    def _finish_by_slices(self, call: Call) -> None:
        kind, _, out = call.sliced
        cut = self.cut(kind)
        for lane, pieces in self.receiving:
            lane.receive(call.slot, call.serial, call.number)
            payload = lane.payload(call.slot)
            memory = self._values(pieces, payload)
            if self.wire is not None:
                self.wire.decode(payload, None, memory.view(np.float32))
            values = kind.stage(out, memory)
            kind.push(values, memory)
            self.operation.unpack(cut, pieces, values, out)
            lane.release(call.slot, call.serial)

    def _values(self, pieces: Sequence[Piece], payload: Bytes) -> Bytes:
        """Return memory for the cells of a message: its payload, unless the wire changes them."""
        if self.wire is None:
            return payload
        cells = sum(piece.source.size for piece in pieces)
        return self.temporary[: cells * prod(self.trail) * self.itemsize]

    def program(self, call: Call) -> Program | None:
        """Return the program for arrays of such strides, if the channel has programs.

        It has when its lanes are connected, which the first call does.
        """
        if not (call.plain and self.compiled and all(lane.memory is not None for lane, _ in
                                                     self.receiving)):  # fmt: skip
            return None
        x, out = call.plain
        key = x.strides, out.strides
        if key not in self.programs:
            reverse = self.operation is ACCUMULATE
            owned, window = self.plan.owned, self.plan.window
            frame = compiled.frame_of(owned, window, x, out, self.dtype, reverse)
            if len(self.programs) == PROGRAMS:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = Program(self, frame, x, out)
        return self.programs[key]

    def free(self) -> None:
        """Wait until the others have read everything, and free requests and memory."""
        self.programs.clear()
        for outgoing, _ in self.sending:
            outgoing.close(self.serial)
        for incoming, _ in self.receiving:
            incoming.connect()
            incoming.free()


def _same(one: Plain, other: Plain) -> bool:
    """Whether two arrays are the same elements."""
    alike = one.shape == other.shape and one.strides == other.strides
    return alike and one.ctypes.data == other.ctypes.data

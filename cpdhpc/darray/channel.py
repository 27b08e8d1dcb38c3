"""Channels: a plan's mailboxes for one operation, dtype and cell shape, and the calls on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar
from weakref import ref
from zlib import crc32

import numpy as np

from ..collectives.rank_program import NO_KEY
from ..ops.moves import ADDED
from ..ops.payloads import Packed
from ..world import timeline
from ..world.gpu_messages import Direct, Staged
from ..world.ranks import Ranks
from .compiled import Plain, Program
from .copies import EXCHANGE, NUMPY, Addresses, Array, ArrayBackend, Bytes, Frame, Transfer, do
from .device import PROGRAMS, DeviceChannel
from .mailbox import SLOTS, Inbox, Mailbox, Outbox, Purpose
from .windows import Message, RankPieces

AnyMailbox = TypeVar("AnyMailbox", bound=Mailbox)


@dataclass
class Call:
    """One exchange in progress: x and out as the caller passed them.

    plain: both as NumPy arrays, if they are in host memory; addresses: theirs if on a GPU
    carrier: moves arrays of their GPU
    """

    backend: ArrayBackend
    x: Array
    out: Array
    plain: tuple[Plain, Plain] | None
    addresses: tuple[Addresses, Addresses] | None = None
    carrier: Direct | Staged | None = None
    number: int = 0
    serial: int = 0

    @property
    def slot(self) -> int:
        """The mailbox slot of its messages."""
        return self.serial % SLOTS

    @property
    def sliced(self) -> tuple[ArrayBackend, Array, Array]:
        """The backend, x and out for slices: NumPy's for torch tensors too if dtypes permit."""
        backend = self.backend
        if self.plain is None or backend is NUMPY or backend.dtype(self.x) == "bfloat16":
            return backend, self.x, self.out
        return NUMPY, *self.plain

    @property
    def run(self) -> tuple[int, int, Plain, Plain]:
        """The arguments with which a program is run."""
        assert self.plain is not None, "programs take NumPy arrays"
        return self.serial, self.number, *self.plain


@dataclass
class PlanChannel:
    """Mailboxes, and programs by the strides of arrays.

    pieces, stream, name, wire_name: of the plan; like: an array of the backend and dtype
    trail: further axes of the arrays; wire: None if cells travel unchanged
    direct: whether MPI reads cells from GPU memory and mailboxes carry only headers
    serial: of the last call that began; open: serials of unfinished calls
    """

    world: Ranks
    pieces: RankPieces
    stream: int
    name: str
    wire_name: str
    operation: Transfer
    backend: ArrayBackend
    like: Array
    trail: tuple[int, ...]
    wire: Packed | None
    direct: bool
    serial: int = 0
    open: set[int] = field(default_factory=set)
    programs: dict[Any, Program] = field(default_factory=dict)
    on_gpu: dict[int, DeviceChannel] = field(default_factory=dict)  # by the GPU's number

    def __post_init__(self) -> None:
        world, name = self.world, self.operation.name
        self.what = f"{name} of plan {self.name!r}"
        self.dtype, self.itemsize = self.backend.dtype(self.like), self.backend.itemsize(self.like)
        self.compiled = self.wire is None and (self.operation is EXCHANGE or self.dtype in ADDED)
        key = f"{name} of {self.dtype}, further axes {self.trail}, wire {self.wire_name}"
        key += ", from GPU memory" if self.direct else ""
        self.number_prefix = (crc32(key.encode()) >> 1) << 32  # upper bits of call numbers
        purpose = Purpose(self.stream, self.what, key)
        sent, received = self.operation.sent(self.pieces), self.operation.received(self.pieces)

        def mailbox(make: type[AnyMailbox], message: Message) -> AnyMailbox:
            size_bytes = 0 if self.direct else self.payload_bytes(message)
            return make(world, message.rank, size_bytes, purpose, world.shared())

        self.receiving = [(mailbox(Inbox, each), each) for each in received]
        self.sending = [(mailbox(Outbox, each), each) for each in sent]
        self.sent_bytes = sum(map(self.payload_bytes, sent))
        self.bytes_counter = world.bytes_sent.data  # faster to index than the array
        self.messages_counter = world.messages_sent.data
        most_bytes = max((self.cells_bytes(each) for each in (*sent, *received)), default=0)
        self.temporary = np.empty(most_bytes, np.uint8)

    def cells_bytes(self, message: Message) -> int:
        """Return the size in bytes of a message's cells."""
        return message.cells * prod(self.trail) * self.itemsize

    def payload_bytes(self, message: Message) -> int:
        """Return the size in bytes of a message on the wire."""
        n = self.cells_bytes(message)
        return n if self.wire is None else self.wire.size_bytes(n // self.itemsize)

    def frame(self, call: Call) -> Frame:
        """Return the frame of a call by slices."""
        backend, x, out = call.sliced
        elements = [backend.stage(out, each) for each in self.elements()]
        return self.operation.frame(self.pieces, backend, x, out, elements)

    def prepare(self, call: Call) -> None:
        """Give a call its serial number, before anything is sent.

        Raises RuntimeError if all slots are taken, ValueError if the arrays overlap.
        """
        call.serial = self.serial + 1
        if call.serial - SLOTS in self.open:
            raise RuntimeError(f"{self.what}: {SLOTS} are under way already: finish one first")
        arrays = call.plain or call.addresses
        if arrays and not self.apart(*arrays):
            raise ValueError(
                f"{self.operation.name}: out overlaps the input: it may only contain the input, or "
                "be contained in it, as the part of the window that this rank owns"
            )
        self.serial = call.serial
        self.open.add(call.serial)

    def apart(self, x: Plain | Addresses, out: Plain | Addresses) -> bool:
        """Whether two arrays share no memory, or one is the owned part of the other."""
        if not np.may_share_memory(x, out):
            return True
        pieces = self.pieces
        own, whole = (x, out) if self.operation is EXCHANGE else (out, x)
        holds = not pieces.halo_only and pieces.window.contains(pieces.owned)
        part = pieces.inside(whole) if holds else None
        return part is not None and _same(part, own)

    def begin(self, call: Call) -> None:
        """Pack and send; do the work that needs no message."""
        program = self.program(call)
        for inbox, _ in self.receiving:
            inbox.start(call.slot)
        if call.addresses:
            with call.backend.in_stream(call.x):
                self.device(call).begin(call.slot, call.serial, call.number, *call.addresses)
        elif program is None:
            self._begin_by_slices(call)
        else:
            program.run(program.slots[call.slot].begin, *call.run)
        self.count()

    def count(self) -> None:
        """Count the messages of a call."""
        self.bytes_counter[0] += self.sent_bytes
        self.messages_counter[0] += len(self.sending)

    def _begin_by_slices(self, call: Call) -> None:
        frame = self.frame(call)
        for outbox, message in self.sending:
            outbox.reserve(call.slot, call.serial)
            since = timeline.began()
            payload = outbox.payload(call.slot)
            memory = self._cells_of(message, payload)
            values = frame.backend.stage(frame.owned, memory)
            do(self.operation.pack(frame, message, values))
            if self.wire is not None:
                self.wire.encode(memory.view(np.float32), None, NO_KEY, 0, payload)
            timeline.done(self._packs, since, payload.size)
            since = timeline.began()
            outbox.send(call.slot, call.serial, call.number)
            timeline.done(timeline.SEND, since, payload.size)
        do(self.operation.own(frame))

    def progress(self, call: Call) -> bool:
        """Whether all messages of a call have come; asks MPI about each, so that MPI progresses."""
        for outbox, _ in self.sending:
            outbox.moved(call.slot)
        come = [inbox.has_come(call.slot, call.serial) for inbox, _ in self.receiving]
        come += [device.come(call.slot) for device in self.on_gpu.values()]
        return all(come)

    def finish(self, call: Call) -> None:
        """Unpack the messages, in the order of the ranks."""
        program = self.program(call)
        for inbox, _ in self.receiving:
            inbox.connect()
        if call.addresses:
            with call.backend.in_stream(call.x):
                self.device(call).finish(call.slot, call.serial, call.number, *call.addresses)
        elif program is None:
            self._finish_by_slices(call)
        else:
            program.run(program.slots[call.slot].finish, *call.run)
        self.open.remove(call.serial)

    def _finish_by_slices(self, call: Call) -> None:
        frame = self.frame(call)
        for inbox, message in self.receiving:
            since = timeline.began()
            inbox.receive(call.slot, call.serial, call.number)
            timeline.done(timeline.WAIT, since)
            payload, since = inbox.payload(call.slot), timeline.began()
            memory = self._cells_of(message, payload)
            if self.wire is not None:
                self.wire.decode(payload, None, memory.view(np.float32))
            values = frame.backend.stage(frame.owned, memory)
            do(self.operation.unpack(frame, message, values))
            timeline.done(self._packs, since, payload.size)
            inbox.release(call.slot, call.serial)

    @property
    def _packs(self) -> int:
        """What packing a message is in a timeline."""
        return timeline.COPY if self.wire is None else timeline.ENCODE

    def _cells_of(self, message: Message, payload: Bytes) -> Bytes:
        """Return memory for a message's cells: its payload, unless the wire encodes them."""
        return payload if self.wire is None else self.temporary[: self.cells_bytes(message)]

    def program(self, call: Call) -> Program | None:
        """Return the program for these strides, or None before the mailboxes are connected.

        The first call connects them.
        """
        if call.plain is None or not self.compiled:
            return None
        if any(inbox.memory is None for inbox, _ in self.receiving):
            return None
        x, out = call.plain
        key = x.strides, out.strides
        if key not in self.programs:
            if len(self.programs) == PROGRAMS:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = Program(
                self.operation, self.pieces, self.sending, self.receiving, self.elements(),
                x, out, self.dtype,
            )  # fmt: skip
        return self.programs[key]

    def elements(self) -> list[Bytes]:
        """Return the value of each fill of an exchange, as bytes; zero for sums."""
        fills = [each.value for each in self.pieces.fills] if self.operation.is_copy else [0]
        return [self.backend.element(self.like, value) for value in fills]

    def device(self, call: Call) -> DeviceChannel:
        """Return the channel of the GPU that holds a call's arrays, in its current stream."""
        carrier, number = call.carrier, call.backend.device(call.x)
        assert carrier is not None, "calls on a GPU have a carrier"
        carrier.begin()
        if number not in self.on_gpu:
            self.on_gpu[number] = DeviceChannel(
                self.world, self.what, carrier, self.pieces, self.operation, self.sending,
                self.receiving, self.wire, self.elements(), self.dtype,
                prod(self.trail) * self.itemsize, self.stream,
            )  # fmt: skip
        return self.on_gpu[number]

    def is_idle(self) -> bool:
        """Whether free would return without waiting for another rank."""
        return (
            all(outbox.is_read(self.serial) for outbox, _ in self.sending)
            and not self.open
            and all(
                inbox.connected or all([request.Test() for request in inbox.greeting])
                for inbox, _ in self.receiving
            )
        )

    def free(self) -> None:
        """Wait until the other ranks have read everything; free requests and memory."""
        self.programs.clear()
        for device in self.on_gpu.values():
            device.free()
        for outbox, _ in self.sending:
            outbox.close(self.serial)
        for inbox, _ in self.receiving:
            inbox.connect()
            inbox.free()


class Kept:
    """A plan's channels, with requests and memory that other ranks may still be reading.

    Freed with the plan; if the plan is dropped, when its world makes a later one.
    channels: by operation, dtype, further axes and whether MPI takes GPU memory
    last: by operation; freed: whether calls are errors; broken: the error that ended it, if any
    """

    def __init__(self, world: Ranks, name: str) -> None:
        self.world, self.name, self.freed, self.broken = world, name, False, ""
        self.channels: dict[tuple[str, str, tuple[int, ...], bool], PlanChannel] = {}
        self.last: dict[str, Any] = {}

    @property
    def is_open(self) -> bool:
        """Whether a call is in progress."""
        return any(channel.open for channel in self.channels.values()) and not self.broken

    def is_idle(self) -> bool:
        """Whether free would not wait; False if MPI finds a failure, which later calls report."""
        try:
            return bool(self.broken) or all(each.is_idle() for each in self.channels.values())
        except Exception as error:
            self.world.failure(error, f"plan {self.name!r}: free")
            return False

    def free(self) -> None:
        """Free requests and memory. Raises RuntimeError as WindowPlan.free does."""
        if self.is_open:
            raise RuntimeError(f"plan {self.name!r}: free: a call is in progress: finish it first")
        self.freed = True
        self.world.cache.release(self)
        if not self.broken:
            for channel in self.channels.values():
                channel.free()
        self.channels.clear()
        self.last.clear()


def drop(reference: ref[Kept]) -> None:
    """Let the rest of a dropped plan be freed once that waits for no other rank."""
    resources = reference()
    if resources is not None:
        resources.world.cache.drop(resources)


def _same(one: Plain, other: Plain) -> bool:
    """Whether two arrays are views of the same elements."""
    alike = one.shape == other.shape and one.strides == other.strides
    return alike and one.ctypes.data == other.ctypes.data

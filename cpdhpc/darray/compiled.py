"""Exchange and accumulate compiled: lists of copies and sums cut where MPI has something to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import moves
from ..ops.moves import MEMORY, OUT, Row, Side, X, run_moves
from . import by_slices
from .array_kinds import Array
from .by_slices import Source
from .layout import Box
from .mailbox import HEAD_BYTES, SLOTS, Lane
from .windows import Fill, Piece

if TYPE_CHECKING:
    from .channel import Channel
    from .plan import Message, WindowPlan

Plain = npt.NDArray[np.generic]


class Frame(NamedTuple):
    """The arrays of a program: what their boxes and strides are.

    owned, window: the boxes of the plan; one: the bases of the arrays that lie on them
    strides: of these two arrays, in bytes; trail: further axes
    """

    owned: Box
    window: Box
    on_owned: int
    on_window: int
    owned_strides: Sequence[int]
    window_strides: Sequence[int]
    trail: tuple[int, ...]
    itemsize: int
    dtype: str

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell, with all its further axes."""
        return self.itemsize * prod(self.trail)

    def source(self, piece: Piece) -> Side:
        """Return where a piece lies in the array on the owned box; axes of step 0 do not move."""
        strides, ndim = list(self.owned_strides), self.owned.ndim
        ahead = _offset(strides, piece.source.start, self.owned.start)
        for axis in range(ndim):
            strides[axis] *= abs(piece.steps[axis])
        return Side(self.on_owned, ahead, strides)

    def target(self, piece: Piece) -> Side:
        """Return where a piece lies in the array on the window, in the order of its source."""
        strides, box = list(self.window_strides), piece.target
        ahead = _offset(strides, box.start, self.window.start)
        for axis, step in enumerate(piece.steps):
            if step < 0:
                ahead += (box.shape[axis] - 1) * strides[axis]
                strides[axis] *= -1
        return Side(self.on_window, ahead, strides)

    def message(self, base: int, offset: int, piece: Piece) -> Side:
        """Return where a piece lies in a message; axes of step 0 do not move."""
        strides, step = list[int](), self.itemsize
        for n in reversed(piece.source.shape + self.trail):
            strides.insert(0, step)
            step *= n
        for axis in range(self.owned.ndim):
            strides[axis] *= abs(piece.steps[axis])
        return Side(base, offset, strides)


def _offset(strides: Sequence[int], start: Sequence[int], origin: Sequence[int]) -> int:
    pairs = zip(strides, start, origin, strict=False)
    return sum(stride * (a - o) for stride, a, o in pairs)


Pack = Callable[[Frame, Piece, int, int], list[Row]]  # (frame, piece, base, offset of the message)


def in_message(
    frame: Frame, pieces: Sequence[Piece], rows: Pack, base: int, offset: int
) -> Iterator[Row]:
    """Yield the rows of all pieces of a message that begins at an offset."""
    for piece in pieces:
        yield from rows(frame, piece, base, offset)
        offset += piece.source.size * frame.cell_bytes


def pack_cells(frame: Frame, piece: Piece, base: int, offset: int) -> list[Row]:
    """Return the rows that copy owned cells into a message."""
    shape = piece.source.shape + frame.trail
    to = frame.message(base, offset, piece)
    return moves.copy(shape, frame.itemsize, frame.source(piece), to)


def unpack_cells(frame: Frame, piece: Piece, base: int, offset: int) -> list[Row]:
    """Return the rows that copy a message to where it shows in a window."""
    shape = piece.target.shape + frame.trail
    came = frame.message(base, offset, piece)
    return moves.copy(shape, frame.itemsize, came, frame.target(piece))


def pack_sums(frame: Frame, piece: Piece, base: int, offset: int) -> list[Row]:
    """Return the rows that copy cells of a window into a message, sums where one shows often."""
    shape, to = piece.source.shape + frame.trail, frame.message(base, offset, piece)
    side, rows = frame.target(piece), list[Row]()
    for place in piece.repeats():
        ahead = sum((s.start or 0) * d for s, d in zip(place, side.strides, strict=False))
        start = Side(side.base, side.offset + ahead, side.strides)
        if rows:
            rows += moves.add(shape, frame.itemsize, start, to, frame.dtype)
        else:
            rows += moves.copy(shape, frame.itemsize, start, to)
    return rows


def add_sums(frame: Frame, piece: Piece, base: int, offset: int) -> list[Row]:
    """Return the rows that add a message to owned cells."""
    shape = piece.source.shape + frame.trail
    came = frame.message(base, offset, piece)
    return moves.add(shape, frame.itemsize, came, frame.source(piece), frame.dtype)


def show_own(
    frame: Frame, local: Sequence[Piece], fills: Sequence[tuple[Fill, int]], base: int
) -> Iterator[Row]:
    """Yield the rows that fill, and that copy own cells to where they show in the window.

    fills: with the offset of the element in the memory of a base
    """
    for fill, offset in fills:
        side = frame.target(_whole(fill.target))
        shape = fill.target.shape + frame.trail
        yield from moves.fill(shape, frame.itemsize, Side(base, offset, ()), side)
    for piece in local:
        shape = piece.target.shape + frame.trail
        yield from moves.copy(shape, frame.itemsize, frame.source(piece), frame.target(piece))


def sum_own(
    frame: Frame, local: Sequence[Piece], uncovered: Sequence[Box], base: int
) -> Iterator[Row]:
    """Yield the rows that begin the sums with own cells. base: memory, an element of zeros first.

    Behind the element there is room for the largest piece.
    """
    for box in uncovered:
        side, shape = frame.source(_whole(box)), box.shape + frame.trail
        yield from moves.fill(shape, frame.itemsize, Side(base, 0, ()), side)
    for piece in local:
        shape = piece.source.shape + frame.trail
        if piece.is_itself:
            yield from moves.copy(shape, frame.itemsize, frame.target(piece), frame.source(piece))
    for piece in local:
        if not piece.is_itself:
            yield from pack_sums(frame, piece, base, frame.itemsize)
            yield from add_sums(frame, piece, base, frame.itemsize)


def _whole(box: Box) -> Piece:
    return Piece(box, box, (1,) * box.ndim)


def inside(frame: Frame) -> int:
    """Return how many bytes behind out x may lie, as the owned part of a window; or NOWHERE."""
    steps = zip(frame.owned.shape + frame.trail, frame.owned_strides, frame.window_strides,
                strict=True)  # fmt: skip
    if not frame.window.contains(frame.owned) or any(n > 1 and a != b for n, a, b in steps):
        return moves.NOWHERE
    ahead = _offset(frame.window_strides, frame.owned.start, frame.window.start)
    return ahead if frame.on_window == OUT else -ahead


def frame_of(owned: Box, window: Box, x: Plain, out: Plain, dtype: str, reverse: bool) -> Frame:
    """Return the frame of two arrays. reverse: x lies on the window, out on the owned box."""
    trail, itemsize = x.shape[owned.ndim :], x.itemsize
    if reverse:
        return Frame(owned, window, OUT, X, out.strides, x.strides, trail, itemsize, dtype)
    return Frame(owned, window, X, OUT, x.strides, out.strides, trail, itemsize, dtype)


LOOKS = 200  # at a word, before the world waits for it
LENT_RUN = 1024  # bytes that lie together: shorter runs are not the kernel's to deal out
Bytes = npt.NDArray[np.uint8]


class Span(NamedTuple):
    """Rows first..last; before them requests of a lane must be complete, behind them they start."""

    first: int
    last: int
    before: Lane | None = None
    after: Lane | None = None


class Order(NamedTuple):
    """The spans up to the end of begin, those of finish, and those of both in one go."""

    begin: list[Span]
    finish: list[Span]
    whole: list[Span]


class Program:
    """An operation on arrays of given strides, on a channel whose lanes are connected.

    slots: the spans for each slot; compiled: what run_moves takes
    ends: for each slot the first row of a call, the one up to which MPI is not needed, and the
        one behind the last
    """

    def __init__(self, channel: Channel, frame: Frame, x: Plain, out: Plain) -> None:
        self._channel, self._frame = channel, frame
        self._lanes: list[Lane] = [lane for lane, _ in (*channel.sending, *channel.receiving)]
        room, self._own = channel.operation.own_rows(channel, frame)
        self._list: list[Row] = []
        self.slots = [self._order(slot) for slot in range(SLOTS)]
        self._rows = moves.rows(self._list)
        self._needs_mpi = any(lane.requests for lane in self._lanes)
        self.ends = [_ends(order.whole, self._needs_mpi) for order in self.slots]
        memory = (room, *(lane.room for lane in self._lanes))
        self.compiled = moves.make_moves(self._rows, memory, x, out, inside(frame))

    def _order(self, slot: int) -> Order:
        """Add the rows of a slot; return their spans."""
        sending, receiving = self._channel.sending, self._channel.receiving
        begin = [self._packing(slot, i) for i in range(len(sending))]
        begin.append(self._span(self._own))
        finish = [self._unpacking(slot, i) for i in range(len(receiving))]
        lent = [i for i in range(len(sending)) if self._is_lent(i)]
        if not lent:
            return Order(_joined(begin), _joined(finish), _joined(begin + finish))
        whole = [
            self._lending(slot, i) if i in lent else self._packing(slot, i)
            for i in range(len(sending))
        ]
        whole.append(self._span(self._own))
        whole += [self._unpacking(slot, i) for i in range(len(receiving))]
        whole += [self._settling(slot, i) for i in lent]
        return Order(_joined(begin), _joined(finish), _joined(whole))

    def _packed(self, slot: int, i: int) -> list[Row]:
        """Return the rows that pack a message."""
        lane, pieces = self._channel.sending[i]
        base, start = MEMORY + 1 + i, lane.head_at(slot) + HEAD_BYTES
        pack = self._channel.operation.pack_rows
        return list(in_message(self._frame, pieces, pack, base, start))

    def _is_lent(self, i: int) -> bool:
        """Whether a message is lent when begin and finish are one call: it lies together in x."""
        lane, _ = self._channel.sending[i]
        return lane.lends and self._channel.operation.is_copy and moves.is_run(self._packed(0, i))

    def _lending(self, slot: int, i: int) -> Span:
        """Add the rows that post a message where it is."""
        lane, _ = self._channel.sending[i]
        base, head = MEMORY + 1 + i, lane.head_at(slot)
        free = moves.await_(base, lane.word_at(slot), -SLOTS, is_message=False)
        return self._span([free, moves.lend(base, head, self._packed(slot, i)[0])])

    def _settling(self, slot: int, i: int) -> Span:
        """Add the rows that wait until a loan was read, or pack the message after all."""
        lane, _ = self._channel.sending[i]
        base, head, read = MEMORY + 1 + i, lane.head_at(slot), lane.word_at(slot)
        packed = self._packed(slot, i)
        done = moves.await_(base, read, 0, is_message=False)
        late = [*packed, moves.recall(base, head), done]
        return self._span([moves.settle(base, head, read, len(late)), *late])

    def _span(
        self, rows: Iterable[Row], before: Lane | None = None, after: Lane | None = None
    ) -> Span:
        first = len(self._list)
        self._list += rows
        return Span(first, len(self._list), before, after)

    def _packing(self, slot: int, i: int) -> Span:
        """Add the rows that pack a message and post it."""
        lane, _ = self._channel.sending[i]
        base, head, rows = MEMORY + 1 + i, lane.head_at(slot), list[Row]()
        if not lane.requests:
            rows.append(moves.await_(base, lane.word_at(slot), -SLOTS, is_message=False))
        rows += self._packed(slot, i)
        rows.append(moves.post(base, head))
        return self._span(rows, *((lane, lane) if lane.requests else ()))

    def _unpacking(self, slot: int, i: int) -> Span:
        """Add the rows that wait for a message and unpack it."""
        lane, pieces = self._channel.receiving[i]
        base, head = MEMORY + 1 + len(self._channel.sending) + i, lane.head_at(slot)
        rows = [moves.await_(base, head, 0, is_message=True)]
        unpack, payload = self._channel.operation.unpack_rows, head + HEAD_BYTES
        unpacked = list(in_message(self._frame, pieces, unpack, base, payload))
        if lane.lends:
            rows.append(self._taking(lane, base, head, unpacked))
        rows += unpacked
        if not lane.requests:
            rows.append(moves.post(base, lane.word_at(slot)))
        return self._span(rows, lane if lane.requests else None)

    def _taking(self, lane: Any, base: int, head: int, unpacked: Sequence[Row]) -> Row:
        """Return the row that reads a message that was lent: to where it belongs, or to here."""
        if self._channel.operation.is_copy and len(unpacked) == 1 and unpacked[0][6] >= LENT_RUN:
            return moves.take(lane.process, base, head, unpacked[0], 1)
        payload = Side(base, head + HEAD_BYTES, (1,))
        here = moves.copy((lane.size_bytes,), 1, payload, payload)[0]
        return moves.take(lane.process, base, head, here, 0)

    def run(self, spans: Sequence[Span], serial: int, number: int, x: Plain, out: Plain) -> None:
        """Do spans. The arrays have the strides that the program was made for."""
        slot = serial % SLOTS
        for span in spans:
            if span.before is not None:
                span.before.arrive(slot)
            row = span.first
            while row != span.last:
                found = run_moves(self.compiled, row, span.last, serial, number, LOOKS, x, out)
                assert found is not None, "the arrays have been looked at"
                row = found if found == span.last else self._wait(found, serial, number)
            if span.after is not None:
                span.after.start(slot)

    def rest(self, found: int, serial: int, number: int, x: Plain, out: Plain) -> None:
        """Go on at a row that waits, or where MPI is needed."""
        order = self.slots[serial % SLOTS]
        if self._needs_mpi:
            for lane in self._channel.requesting:
                lane.start(serial % SLOTS)
            self.run(order.whole, serial, number, x, out)
        else:
            row = self._wait(found, serial, number)
            self.run([Span(row, order.whole[0].last)], serial, number, x, out)

    def _wait(self, found: int, serial: int, number: int) -> int:
        """Wait for what a row waits for, and return the row; see run_moves."""
        index = found if found >= 0 else -1 - found
        row = self._rows[index]
        if row["op"] == moves.TAKE:
            lane = self._lanes[int(row["source"]) - MEMORY - 1]
            lane.stop(f"cannot read what rank {lane.other} lends")
        lane, offset = self._lanes[int(row["target"]) - MEMORY - 1], int(row["target_offset"])
        if found < 0:
            lane.differs(offset, number)
        lane.wait_word(offset, serial + int(row["value"]))
        return index


def _ends(whole: Sequence[Span], needs_mpi: bool) -> tuple[int, int, int]:
    """Return what Program.ends holds of a slot."""
    return whole[0].first, whole[0].first if needs_mpi else whole[-1].last, whole[-1].last


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Join spans without requests to the ones before."""
    joined: list[Span] = []
    for span in spans:
        if joined and span.before is None and joined[-1].after is joined[-1].before is None:
            joined[-1] = Span(joined[-1].first, span.last, None, span.after)
        else:
            joined.append(span)
    return joined


@dataclass(frozen=True)
class Operation:
    """An exchange or its transpose, by slices and by rows of moves.

    sent, received: the messages of a plan; own: what needs no message
    is_copy: whether cells travel and arrive as they are
    """

    name: str
    sent: Callable[[WindowPlan], Sequence[Message]]
    received: Callable[[WindowPlan], Sequence[Message]]
    pack: Callable[[Source, Sequence[Piece], Array, Array], None]
    unpack: Callable[[Source, Sequence[Piece], Array, Array], None]
    own: Callable[[Source, WindowPlan, Array, Array], None]
    pack_rows: Pack
    unpack_rows: Pack
    own_rows: Callable[[Channel, Frame], tuple[Bytes, Iterable[Row]]]
    is_copy: bool


def _show_own(channel: Channel, frame: Frame) -> tuple[Bytes, list[Row]]:
    elements = [channel.element(fill.value) for fill in channel.plan.fills]
    room = np.concatenate([*elements, np.zeros(1, np.uint8)])
    fills = [(fill, i * frame.itemsize) for i, fill in enumerate(channel.plan.fills)]
    return room, list(show_own(frame, channel.plan.local, fills, MEMORY))


def _sum_own(channel: Channel, frame: Frame) -> tuple[Bytes, list[Row]]:
    largest = max((piece.source.size for piece in channel.plan.local), default=0)
    room = np.zeros(frame.itemsize + largest * frame.cell_bytes, np.uint8)
    return room, list(sum_own(frame, channel.plan.local, channel.plan.uncovered, MEMORY))


EXCHANGE = Operation(
    "exchange",
    lambda plan: plan.sends,
    lambda plan: plan.recvs,
    by_slices.pack_cells,
    by_slices.unpack_cells,
    by_slices.show_own,
    pack_cells,
    unpack_cells,
    _show_own,
    is_copy=True,
)
ACCUMULATE = Operation(
    "accumulate",
    lambda plan: plan.recvs,
    lambda plan: plan.sends,
    by_slices.pack_sums,
    by_slices.add_sums,
    by_slices.sum_own,
    pack_sums,
    add_sums,
    _sum_own,
    is_copy=False,
)

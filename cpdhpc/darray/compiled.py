"""Exchange and accumulate compiled: lists of copies and sums cut where MPI has something to do.

EXCHANGE and ACCUMULATE, at the end, are the two operations: each sends what the other receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import moves
from ..ops.moves import MEMORY, OUT, Row, Side, X, run_moves
from . import by_slices
from .by_slices import Array, Bytes, Cut
from .layout import Box
from .mailbox import HEAD_BYTES, SLOTS, Inbox, Mailbox, Outbox
from .windows import Message, Piece, RankPieces

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
    message = frame.message(base, offset, piece)
    return moves.copy(shape, frame.itemsize, message, frame.target(piece))


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
    message = frame.message(base, offset, piece)
    return moves.add(shape, frame.itemsize, message, frame.source(piece), frame.dtype)


Own = tuple[Bytes, list[Row]]  # memory, which rows know as the base MEMORY, and the rows


def show_own(frame: Frame, pieces: RankPieces, values: Sequence[Bytes]) -> Own:
    """Return what fills, and copies own cells to where they show in the window.

    values: the element that each fill writes
    """
    rows = list[Row]()
    for i, fill in enumerate(pieces.fills):
        side = frame.target(_whole(fill.target))
        shape = fill.target.shape + frame.trail
        rows += moves.fill(shape, frame.itemsize, Side(MEMORY, i * frame.itemsize, ()), side)
    for piece in pieces.local:
        shape = piece.target.shape + frame.trail
        rows += moves.copy(shape, frame.itemsize, frame.source(piece), frame.target(piece))
    return np.concatenate([*values, np.zeros(1, np.uint8)]), rows


def sum_own(frame: Frame, pieces: RankPieces, values: Sequence[Bytes]) -> Own:
    """Return what begins the sums with own cells.

    Its memory is an element of zeros, and behind it room for the largest piece.
    """
    rows, local = list[Row](), pieces.local
    for box in pieces.uncovered:
        side, shape = frame.source(_whole(box)), box.shape + frame.trail
        rows += moves.fill(shape, frame.itemsize, Side(MEMORY, 0, ()), side)
    for piece in local:
        shape = piece.source.shape + frame.trail
        if piece.is_itself:
            rows += moves.copy(shape, frame.itemsize, frame.target(piece), frame.source(piece))
    for piece in local:
        if not piece.is_itself:
            rows += pack_sums(frame, piece, MEMORY, frame.itemsize)
            rows += add_sums(frame, piece, MEMORY, frame.itemsize)
    largest = max((piece.source.size for piece in local), default=0)
    return np.zeros(frame.itemsize + largest * frame.cell_bytes, np.uint8), rows


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


def frame_of(pieces: RankPieces, x: Plain, out: Plain, dtype: str, from_owned: bool) -> Frame:
    """Return the frame of two arrays. from_owned: x lies on the owned box, out on the window."""
    owned, window = pieces.owned, pieces.window
    trail, itemsize = x.shape[owned.ndim :], x.itemsize
    if from_owned:
        return Frame(owned, window, X, OUT, x.strides, out.strides, trail, itemsize, dtype)
    return Frame(owned, window, OUT, X, out.strides, x.strides, trail, itemsize, dtype)


POLLS = 200  # of a word, before the world waits for it
LENT_RUN = 1024  # bytes that lie together: shorter runs are not worth the kernel's help
Sending = Sequence[tuple[Outbox, Message]]  # what travels through each mailbox
Receiving = Sequence[tuple[Inbox, Message]]


class Span(NamedTuple):
    """Rows first..last, and the mailboxes whose requests must be complete before, start behind."""

    first: int
    last: int
    before: Mailbox | None = None
    after: Mailbox | None = None


class Order(NamedTuple):
    """The spans up to the end of begin, those of finish, and those of both in one go."""

    begin: list[Span]
    finish: list[Span]
    whole: list[Span]


class Program:
    """An operation on arrays of given strides, through mailboxes that are connected.

    sending, receiving: the mailboxes; fill_values: the element that each fill of the pieces writes
    slots: the spans for each slot; compiled: what run_moves takes
    ends: for each slot the first row of a call, the one up to which MPI is not needed, and the
        one behind the last
    """

    def __init__(
        self,
        operation: Operation,
        pieces: RankPieces,
        sending: Sending,
        receiving: Receiving,
        fill_values: Sequence[Bytes],
        x: Plain,
        out: Plain,
        dtype: str,
    ) -> None:
        self._operation, self._sending, self._receiving = operation, sending, receiving
        self._frame = frame_of(pieces, x, out, dtype, operation.is_copy)
        self._mailboxes: list[Mailbox] = [each for each, _ in (*sending, *receiving)]
        memory, self._own = operation.own_rows(self._frame, pieces, fill_values)
        self._list: list[Row] = []
        self.slots = [self._order(slot) for slot in range(SLOTS)]
        self._rows = moves.rows(self._list)
        self._needs_mpi = any(each.requests for each in self._mailboxes)
        self.ends = [_ends(order.whole, self._needs_mpi) for order in self.slots]
        memories = (memory, *(each.room for each in self._mailboxes))
        self.compiled = moves.make_moves(self._rows, memories, x, out, inside(self._frame))

    def _order(self, slot: int) -> Order:
        """Add the rows of a slot; return their spans."""
        sending, receiving = self._sending, self._receiving
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
        mailbox, message = self._sending[i]
        base, start = MEMORY + 1 + i, mailbox.head_at(slot) + HEAD_BYTES
        pack = self._operation.pack_rows
        return list(in_message(self._frame, message.pieces, pack, base, start))

    def _is_lent(self, i: int) -> bool:
        """Whether a message is lent when begin and finish are one call: it lies together in x."""
        mailbox, _ = self._sending[i]
        return mailbox.lends and self._operation.is_copy and moves.is_run(self._packed(0, i))

    def _lending(self, slot: int, i: int) -> Span:
        """Add the rows that post a message where it is."""
        mailbox, _ = self._sending[i]
        base, head = MEMORY + 1 + i, mailbox.head_at(slot)
        free = moves.await_(base, mailbox.word_at(slot), -SLOTS, is_message=False)
        return self._span([free, moves.lend(base, head, self._packed(slot, i)[0])])

    def _settling(self, slot: int, i: int) -> Span:
        """Add the rows that wait until a loan was read, or pack the message after all."""
        mailbox, _ = self._sending[i]
        base, head, read = MEMORY + 1 + i, mailbox.head_at(slot), mailbox.word_at(slot)
        packed = self._packed(slot, i)
        done = moves.await_(base, read, 0, is_message=False)
        late = [*packed, moves.recall(base, head), done]
        return self._span([moves.settle(base, head, read, len(late)), *late])

    def _span(
        self, rows: Iterable[Row], before: Mailbox | None = None, after: Mailbox | None = None
    ) -> Span:
        first = len(self._list)
        self._list += rows
        return Span(first, len(self._list), before, after)

    def _packing(self, slot: int, i: int) -> Span:
        """Add the rows that pack a message and post it."""
        mailbox, _ = self._sending[i]
        base, head, rows = MEMORY + 1 + i, mailbox.head_at(slot), list[Row]()
        if not mailbox.requests:
            rows.append(moves.await_(base, mailbox.word_at(slot), -SLOTS, is_message=False))
        rows += self._packed(slot, i)
        rows.append(moves.post(base, head))
        return self._span(rows, *((mailbox, mailbox) if mailbox.requests else ()))

    def _unpacking(self, slot: int, i: int) -> Span:
        """Add the rows that wait for a message and unpack it."""
        mailbox, message = self._receiving[i]
        base, head = MEMORY + 1 + len(self._sending) + i, mailbox.head_at(slot)
        rows = [moves.await_(base, head, 0, is_message=True)]
        unpack, payload = self._operation.unpack_rows, head + HEAD_BYTES
        unpacked = list(in_message(self._frame, message.pieces, unpack, base, payload))
        if mailbox.lends:
            rows.append(self._taking(mailbox, base, head, unpacked))
        rows += unpacked
        if not mailbox.requests:
            rows.append(moves.post(base, mailbox.word_at(slot)))
        return self._span(rows, mailbox if mailbox.requests else None)

    def _taking(self, mailbox: Inbox, base: int, head: int, unpacked: Sequence[Row]) -> Row:
        """Return the row that reads a message that was lent: to where it belongs, or to here."""
        if self._operation.is_copy and len(unpacked) == 1 and unpacked[0][6] >= LENT_RUN:
            return moves.take(mailbox.process, base, head, unpacked[0], 1)
        payload = Side(base, head + HEAD_BYTES, (1,))
        here = moves.copy((mailbox.size_bytes,), 1, payload, payload)[0]
        return moves.take(mailbox.process, base, head, here, 0)

    def run(self, spans: Sequence[Span], serial: int, number: int, x: Plain, out: Plain) -> None:
        """Do spans. The arrays have the strides that the program was made for."""
        slot = serial % SLOTS
        for span in spans:
            if span.before is not None:
                span.before.arrive(slot)
            row = span.first
            while row != span.last:
                found = run_moves(self.compiled, row, span.last, serial, number, POLLS, x, out)
                assert found is not None, "the arrays have been looked at"
                row = found if found == span.last else self._wait(found, serial, number)
            if span.after is not None:
                span.after.start(slot)

    def rest(self, found: int, serial: int, number: int, x: Plain, out: Plain) -> None:
        """Go on at a row that waits, or where MPI is needed."""
        order = self.slots[serial % SLOTS]
        if self._needs_mpi:
            for inbox, _ in self._receiving:
                inbox.start(serial % SLOTS)
            self.run(order.whole, serial, number, x, out)
        else:
            row = self._wait(found, serial, number)
            self.run([Span(row, order.whole[0].last)], serial, number, x, out)

    def _wait(self, found: int, serial: int, number: int) -> int:
        """Wait for what a row waits for, and return the row; see run_moves."""
        index = found if found >= 0 else -1 - found
        row = self._rows[index]
        if row["op"] == moves.TAKE:
            mailbox = self._mailboxes[int(row["source"]) - MEMORY - 1]
            mailbox.stop(f"cannot read what rank {mailbox.other} lends")
        mailbox, offset = (
            self._mailboxes[int(row["target"]) - MEMORY - 1],
            int(row["target_offset"]),
        )
        if found < 0:
            mailbox.differs(offset, number)
        mailbox.wait_word(offset, serial + int(row["value"]))
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

    sent, received: the messages of a rank; own: what needs no message
    is_copy: whether cells travel and arrive as they are, from the owned box to the window
    """

    name: str
    sent: Callable[[RankPieces], Sequence[Message]]
    received: Callable[[RankPieces], Sequence[Message]]
    pack: Callable[[Cut, Sequence[Piece], Array, Array], None]
    unpack: Callable[[Cut, Sequence[Piece], Array, Array], None]
    own: Callable[[Cut, RankPieces, Array, Array], None]
    pack_rows: Pack
    unpack_rows: Pack
    own_rows: Callable[[Frame, RankPieces, Sequence[Bytes]], Own]
    is_copy: bool


EXCHANGE = Operation(
    "exchange",
    lambda pieces: pieces.sends,
    lambda pieces: pieces.recvs,
    by_slices.pack_cells,
    by_slices.unpack_cells,
    by_slices.show_own,
    pack_cells,
    unpack_cells,
    show_own,
    is_copy=True,
)
ACCUMULATE = Operation(
    "accumulate",
    lambda pieces: pieces.recvs,
    lambda pieces: pieces.sends,
    by_slices.pack_sums,
    by_slices.add_sums,
    by_slices.sum_own,
    pack_sums,
    add_sums,
    sum_own,
    is_copy=False,
)

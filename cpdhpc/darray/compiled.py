"""Compiled operations: lists of copies and sums, cut at the points that need MPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import moves
from ..ops.moves import MEMORY, OUT, Move, Side, X, run_moves
from .copies import NUMPY, Addresses, Bytes, Copy, Frame, Transfer, addressed
from .mailbox import HEAD_BYTES, SLOTS, Inbox, Mailbox, Outbox
from .windows import Message, RankPieces

Plain = npt.NDArray[np.generic]
SPACE = 1 << 44  # bytes of address space for each array's ghost: larger than any array


def ghost(
    base: int,
    offset: int,
    shape: Sequence[int],
    itemsize: int,
    strides: Sequence[int] | None = None,
) -> Addresses:
    """Return a stand-in that records an array's place relative to a base; see side_of.

    Its memory must not be read.
    """
    return addressed((base + 1) * SPACE + offset, shape, itemsize, strides)


def side_of(view: Addresses) -> Side:
    """Return the place of a part of a ghost."""
    address = int(view.__array_interface__["data"][0])
    base, offset = divmod(address + SPACE // 2, SPACE)
    return Side(base - 1, offset - SPACE // 2, view.strides)


def ghosts_of(
    operation: Transfer, pieces: RankPieces, x: Addresses, out: Addresses, elements: Sequence[Side]
) -> Frame:
    """Return a frame of ghosts for arrays with the layout of x and out, and for elements."""
    size = x.itemsize
    source, result = (
        ghost(base, 0, each.shape, size, each.strides) for base, each in ((X, x), (OUT, out))
    )
    ones = [ghost(each.base, each.offset, (1,), size) for each in elements]
    return operation.frame(pieces, NUMPY, source, result, ones)


def rows_of(copies: Iterable[Copy], itemsize: int, dtype: str, spare: int) -> list[Move]:
    """Return the rows that perform copies between ghosts.

    spare: offset in MEMORY with room for a sum of many terms before it is added to its target
    """
    rows = list[Move]()
    for _, box, terms, adds in copies:
        arrays = [box, *(np.broadcast_to(term, box.shape) for term in terms)]
        # The innermost loop runs along the axis with the smallest strides, in any axis order.
        along = np.abs([array.strides for array in arrays]).max(0, initial=0)
        arrays = [array.transpose(np.argsort(-along, kind="stable")) for array in arrays]
        shape = arrays[0].shape
        target, first, *others = map(side_of, arrays)
        total = side_of(ghost(MEMORY, spare, shape, itemsize)) if adds and others else target
        if adds and not others:
            rows += moves.add(shape, itemsize, first, target, dtype)
            continue
        begin = moves.fill if first.base == MEMORY else moves.copy
        rows += begin(shape, itemsize, first, total)
        for term in others:
            rows += moves.add(shape, itemsize, term, total, dtype)
        if adds:
            rows += moves.add(shape, itemsize, total, target, dtype)
    return rows


def inside(operation: Transfer, frame: Frame) -> int:
    """Return the offset in bytes of x in out if x may be the window's owned part; or NOWHERE."""
    pieces, owned = frame.pieces, frame.owned
    if pieces.halo_only or pieces.owned.empty or not pieces.window.contains(pieces.owned):
        return moves.NOWHERE
    part = pieces.inside(frame.window)
    steps = zip(owned.shape, owned.strides, part.strides, strict=True)
    if any(n > 1 and a != b for n, a, b in steps):
        return moves.NOWHERE
    return side_of(part).offset * (1 if operation.is_copy else -1)


POLLS = 200  # of a word, before the world waits for it
LENT_RUN = 1024  # contiguous bytes: for shorter runs a copy by the kernel does not pay
Sending = Sequence[tuple[Outbox, Message]]  # each mailbox and its message
Receiving = Sequence[tuple[Inbox, Message]]


class Span(NamedTuple):
    """Rows first..last; mailboxes whose requests must complete before, and those to start after."""

    first: int
    last: int
    before: Mailbox | None = None
    after: Mailbox | None = None


class Order(NamedTuple):
    """The spans of begin, those of finish, and those of both in one call."""

    begin: list[Span]
    finish: list[Span]
    whole: list[Span]


class Program:
    """An operation on arrays of fixed strides, through connected mailboxes.

    sending, receiving: the mailboxes; elements: of the frame, as bytes
    slots: the spans for each slot; compiled: the argument of run_moves
    ends: for each slot the first row of a call, the first row that needs MPI, and the row after
        the last
    """

    def __init__(
        self,
        operation: Transfer,
        pieces: RankPieces,
        sending: Sending,
        receiving: Receiving,
        elements: Sequence[Bytes],
        x: Plain,
        out: Plain,
        dtype: str,
    ) -> None:
        self._operation, self._sending, self._receiving = operation, sending, receiving
        self._itemsize, self._dtype = x.itemsize, dtype
        sides = [Side(MEMORY, i * x.itemsize, ()) for i in range(len(elements))]
        self._frame = ghosts_of(operation, pieces, x, out, sides)
        self._mailboxes: list[Mailbox] = [each for each, _ in (*sending, *receiving)]
        own, self._spare = list(operation.own(self._frame)), len(elements) * x.itemsize
        self._own = self._rows_of(own)
        room = max((each.target.nbytes for each in own if each.adds), default=1)
        memory = np.concatenate([*elements, np.zeros(room, np.uint8)])
        self._list: list[Move] = []
        self.slots = [self._order(slot) for slot in range(SLOTS)]
        self._rows = moves.rows(self._list)
        self._needs_mpi = any(each.requests for each in self._mailboxes)
        spans = [(order.whole[0].first, order.whole[-1].last) for order in self.slots]
        self.ends = [(first, first if self._needs_mpi else last, last) for first, last in spans]
        memories = (memory, *(each.room for each in self._mailboxes))
        self.compiled = moves.make_moves(
            self._rows, memories, x, out, inside(operation, self._frame)
        )

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

    def _packed(self, slot: int, i: int) -> list[Move]:
        """Return the rows that pack a message."""
        mailbox, message = self._sending[i]
        payload = self._payload(MEMORY + 1 + i, mailbox.head_at(slot), mailbox)
        return self._rows_of(self._operation.pack(self._frame, message, payload))

    def _payload(self, base: int, head: int, mailbox: Mailbox) -> Addresses:
        """Return the ghost of a payload."""
        n = mailbox.size_bytes // self._itemsize
        return ghost(base, head + HEAD_BYTES, (n,), self._itemsize)

    def _rows_of(self, copies: Iterable[Copy]) -> list[Move]:
        return rows_of(copies, self._itemsize, self._dtype, self._spare)

    def _is_lent(self, i: int) -> bool:
        """Whether a message is read in place if begin and finish are one call: contiguous in x."""
        mailbox, _ = self._sending[i]
        return mailbox.lends and self._operation.is_copy and moves.is_run(self._packed(0, i))

    def _lending(self, slot: int, i: int) -> Span:
        """Add the rows that offer a message in place, without packing it."""
        mailbox, _ = self._sending[i]
        base, head = MEMORY + 1 + i, mailbox.head_at(slot)
        free = moves.await_(base, mailbox.word_at(slot), -SLOTS, is_message=False)
        return self._span([free, moves.lend(base, head, self._packed(slot, i)[0])])

    def _settling(self, slot: int, i: int) -> Span:
        """Add the rows that wait until an offered message was read, or pack it after all."""
        mailbox, _ = self._sending[i]
        base, head, read = MEMORY + 1 + i, mailbox.head_at(slot), mailbox.word_at(slot)
        packed = self._packed(slot, i)
        done = moves.await_(base, read, 0, is_message=False)
        late = [*packed, moves.recall(base, head), done]
        return self._span([moves.settle(base, head, read, len(late)), *late])

    def _span(
        self, rows: Iterable[Move], before: Mailbox | None = None, after: Mailbox | None = None
    ) -> Span:
        first = len(self._list)
        self._list += rows
        return Span(first, len(self._list), before, after)

    def _packing(self, slot: int, i: int) -> Span:
        """Add the rows that pack a message and post it."""
        mailbox, _ = self._sending[i]
        base, head, rows = MEMORY + 1 + i, mailbox.head_at(slot), list[Move]()
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
        payload = self._payload(base, head, mailbox)
        unpacked = self._rows_of(self._operation.unpack(self._frame, message, payload))
        if mailbox.lends:
            rows.append(self._taking(mailbox, base, head, unpacked))
        rows += unpacked
        if not mailbox.requests:
            rows.append(moves.post(base, mailbox.word_at(slot)))
        return self._span(rows, mailbox if mailbox.requests else None)

    def _taking(self, mailbox: Inbox, base: int, head: int, unpacked: Sequence[Move]) -> Move:
        """Return the row that reads an offered message: into its target, or into own memory."""
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
                done = run_moves(self.compiled, row, span.last, serial, number, POLLS, x, out)
                assert done is not None, "the arrays were checked before"
                row = done if done == span.last else self._wait(done, serial, number)
            if span.after is not None:
                span.after.start(slot)

    def rest(self, done: int, serial: int, number: int, x: Plain, out: Plain) -> None:
        """Continue at a row that waits, or that needs MPI."""
        order = self.slots[serial % SLOTS]
        if self._needs_mpi:
            for inbox, _ in self._receiving:
                inbox.start(serial % SLOTS)
            self.run(order.whole, serial, number, x, out)
        else:
            row = self._wait(done, serial, number)
            self.run([Span(row, order.whole[0].last)], serial, number, x, out)

    def _wait(self, done: int, serial: int, number: int) -> int:
        """Wait for the event of a row, and return the row; see run_moves."""
        index = done if done >= 0 else -1 - done
        row = self._rows[index]
        if row["op"] == moves.TAKE:
            mailbox = self._mailboxes[int(row["source"]) - MEMORY - 1]
            mailbox.stop(f"cannot read what rank {mailbox.other} lends")
        mailbox = self._mailboxes[int(row["target"]) - MEMORY - 1]
        offset = int(row["target_offset"])
        if done < 0:
            mailbox.differs(offset, number)
        mailbox.wait_word(offset, serial + int(row["value"]))
        return index


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Join spans that have no requests to the spans before."""
    joined: list[Span] = []
    for span in spans:
        if joined and span.before is None and joined[-1].after is joined[-1].before is None:
            joined[-1] = Span(joined[-1].first, span.last, None, span.after)
        else:
            joined.append(span)
    return joined

"""Programs of one channel: the rows of its moves, cut where MPI has something to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import moves
from ..ops.moves import MEMORY, Row, Side, run_moves
from . import moving
from .lane import HEAD_BYTES, SLOTS, Lane
from .moving import Frame, Plain

if TYPE_CHECKING:
    from .channel import Channel

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
        self.compiled = moves.make_moves(self._rows, memory, x, out, moving.inside(frame))

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
        return list(moving.in_message(self._frame, pieces, pack, base, start))

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
        unpacked = list(moving.in_message(self._frame, pieces, unpack, base, payload))
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

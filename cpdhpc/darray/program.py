"""Programs of one channel: the rows of its moves, cut where MPI has something to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import moves
from ..ops.moves import MEMORY, Row, run_moves
from . import moving
from .lane import HEAD_BYTES, SLOTS, Lane
from .moving import Frame, Plain

if TYPE_CHECKING:
    from .channel import Channel

LOOKS = 200  # at a word, before the world waits for it
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

    slots: the spans for each slot
    """

    def __init__(self, channel: Channel, frame: Frame, x: Plain, out: Plain) -> None:
        self._channel, self._frame = channel, frame
        self._lanes: list[Lane] = [lane for lane, _ in (*channel.sending, *channel.receiving)]
        room, self._own = channel.operation.own_rows(channel, frame)
        self._list: list[Row] = []
        self.slots = [self._order(slot) for slot in range(SLOTS)]
        self._rows = moves.rows(self._list)
        self._needs_mpi = any(lane.requests for lane in self._lanes)
        self._ends = [_ends(order.whole, self._needs_mpi) for order in self.slots]  # of first
        memory = (room, *(lane.room for lane in self._lanes))
        self._compiled = moves.make_moves(self._rows, memory, x, out, moving.inside(frame))

    def _order(self, slot: int) -> Order:
        """Add the rows of a slot; return their spans."""
        begin = [self._packing(slot, i) for i in range(len(self._channel.sending))]
        begin.append(self._span(self._own))
        finish = [self._unpacking(slot, i) for i in range(len(self._channel.receiving))]
        return Order(_joined(begin), _joined(finish), _joined(begin + finish))

    def _span(
        self, rows: Iterable[Row], before: Lane | None = None, after: Lane | None = None
    ) -> Span:
        first = len(self._list)
        self._list += rows
        return Span(first, len(self._list), before, after)

    def _packing(self, slot: int, i: int) -> Span:
        """Add the rows that pack a message and post it."""
        lane, pieces = self._channel.sending[i]
        base, head, rows = MEMORY + 1 + i, lane.head_at(slot), list[Row]()
        if not lane.requests:
            rows.append(moves.await_(base, lane.word_at(slot), -SLOTS, is_message=False))
        pack = self._channel.operation.pack_rows
        rows += moving.in_message(self._frame, pieces, pack, base, head + HEAD_BYTES)
        rows.append(moves.post(base, head))
        return self._span(rows, *((lane, lane) if lane.requests else ()))

    def _unpacking(self, slot: int, i: int) -> Span:
        """Add the rows that wait for a message and unpack it."""
        lane, pieces = self._channel.receiving[i]
        base, head = MEMORY + 1 + len(self._channel.sending) + i, lane.head_at(slot)
        rows = [moves.await_(base, head, 0, is_message=True)]
        unpack = self._channel.operation.unpack_rows
        rows += moving.in_message(self._frame, pieces, unpack, base, head + HEAD_BYTES)
        if not lane.requests:
            rows.append(moves.post(base, lane.word_at(slot)))
        return self._span(rows, lane if lane.requests else None)

    def run(self, spans: Sequence[Span], serial: int, number: int, x: Plain, out: Plain) -> None:
        """Do spans. The arrays have the strides that the program was made for."""
        slot = serial % SLOTS
        for span in spans:
            if span.before is not None:
                span.before.arrive(slot)
            row = span.first
            while row != span.last:
                found = run_moves(self._compiled, row, span.last, serial, number, LOOKS, x, out)
                assert found is not None, "the arrays have been looked at"
                row = found if found == span.last else self._wait(found, serial, number)
            if span.after is not None:
                span.after.start(slot)

    def first(self, serial: int, number: int, x: Plain, out: Plain) -> tuple[int | None, int]:
        """Do all rows up to the first that must wait; return that, and the row behind the last.

        The first is None where x or out has other strides, and nothing was done.
        Raises ValueError, having done nothing, where the arrays overlap.
        """
        first, stop, last = self._ends[serial % SLOTS]
        return run_moves(self._compiled, first, stop, serial, number, LOOKS, x, out), last

    def rest(self, found: int, serial: int, number: int, x: Plain, out: Plain) -> None:
        """Go on where first has stopped."""
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
        lane, offset = self._lanes[int(row["target"]) - MEMORY - 1], int(row["target_offset"])
        if found < 0:
            lane.differs(offset, number)
        lane.wait_word(offset, serial + int(row["value"]))
        return index


def _ends(whole: Sequence[Span], needs_mpi: bool) -> tuple[int, int, int]:
    """Return the first row, the one up to which MPI is not needed, and the one behind the last."""
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

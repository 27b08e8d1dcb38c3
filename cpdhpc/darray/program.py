"""Programs of one channel: the rows of its moves, cut where MPI has something to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import moves
from ..ops.moves import MEMORY, Row
from . import moving
from .lane import HEAD_BYTES, SLOTS, Incoming, Lane, Outgoing
from .moving import Frame, Pack, Plain
from .windows import Piece

if TYPE_CHECKING:
    from .channel import Channel

LOOKS = 200  # at a word, before the world waits for it
Bytes = npt.NDArray[np.uint8]


class Span(NamedTuple):
    """Rows first..last, and the lane whose MPI requests come before or after them, if any."""

    lane: Lane | None
    first: int
    last: int


class _Rows:
    """Rows while they are collected, in spans, and which lane a row waits for."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.spans: list[Span] = []
        self.waits: dict[int, Lane] = {}

    def extend(self, rows: Iterable[Row], lane: Lane | None = None) -> None:
        """Add rows; those of lanes without requests join the span before."""
        first = len(self.rows)
        self.rows += rows
        needs = lane if lane is not None and lane.requests else None
        if needs is None and self.spans and self.spans[-1].lane is None:
            first = self.spans.pop().first
        self.spans.append(Span(needs, first, len(self.rows)))

    def wait(self, lane: Lane, row: Row) -> Row:
        """Return an AWAIT that will be the next row but for those that are there."""
        self.waits[len(self.rows)] = lane
        return row


class Program:
    """One half of an exchange on arrays of given strides: up to its end or from there on.

    spans: of each slot; waits: row -> the lane that it waits for
    """

    def __init__(
        self, parts: Sequence[_Rows], memory: Sequence[Bytes], x: Plain, out: Plain, inside: int
    ) -> None:
        rows, self.spans = list[Row](), list[list[Span]]()
        self.waits: dict[int, Lane] = {}
        for part in parts:
            ahead = len(rows)
            self.spans.append([Span(s.lane, s.first + ahead, s.last + ahead) for s in part.spans])
            self.waits |= {row + ahead: lane for row, lane in part.waits.items()}
            rows += part.rows
        self.compiled = moves.make_moves(moves.table(rows), tuple(memory), x, out, inside)

    def run(self, span: Span, slot: int, serial: int, number: int, x: Plain, out: Plain) -> None:
        """Do the rows of a span, waiting where they must."""
        row = span.first
        while True:
            found = moves.run_moves(self.compiled, row, span.last, serial, number, LOOKS, x, out)
            assert found is not None, "programs are kept by strides"
            if found == span.last:
                return
            row = found if found >= 0 else -1 - found
            lane = self.waits[row]
            if isinstance(lane, Outgoing):
                lane.reserve(slot, serial)
            elif isinstance(lane, Incoming):
                lane.receive(slot, serial, number)


def begin_program(channel: Channel, frame: Frame, x: Plain, out: Plain) -> Program:
    """Return the program that packs and posts all messages, and does what needs none."""
    room, own = channel.operation.own_rows(channel, frame)
    parts = []
    for slot in range(SLOTS):
        part = _Rows()
        for base, (lane, pieces) in enumerate(channel.sending, MEMORY + 1):
            pack = channel.operation.pack_rows
            part.extend(_packing(part, pack, frame, lane, pieces, base, slot), lane)
        part.extend(own)
        parts.append(part)
    memory = [room, *(lane.room for lane, _ in channel.sending)]
    return Program(parts, memory, x, out, moving.inside(frame))


def _packing(
    part: _Rows,
    pack: Pack,
    frame: Frame,
    lane: Outgoing,
    pieces: Sequence[Piece],
    base: int,
    slot: int,
) -> list[Row]:
    """Return the rows that pack a message and post it."""
    rows, head = list[Row](), lane.head_at(slot)
    if not lane.requests:
        rows.append(part.wait(lane, moves.await_(base, lane.word_at(slot), -SLOTS, False)))
    rows += moving.in_message(frame, pieces, pack, base, head + HEAD_BYTES)
    return [*rows, moves.post(base, head)]


def finish_program(channel: Channel, frame: Frame, out: Plain) -> Program:
    """Return the program that takes in the messages, in the order of the ranks."""
    parts = []
    for slot in range(SLOTS):
        part = _Rows()
        for base, (lane, pieces) in enumerate(channel.receiving, MEMORY):
            head, unpack = lane.head_at(slot), channel.operation.unpack_rows
            rows = [part.wait(lane, moves.await_(base, head, 0, True))]
            rows += moving.in_message(frame, pieces, unpack, base, head + HEAD_BYTES)
            if not lane.requests:
                rows.append(moves.post(base, lane.word_at(slot)))
            part.extend(rows, lane)
        parts.append(part)
    memory = [lane.room for lane, _ in channel.receiving]
    return Program(parts, memory, out, out, 0)  # x is not needed any more

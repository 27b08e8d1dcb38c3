"""Shared memory of a node in which ranks compare their calls and exchange small values.

Each rank writes to its own area. This has a slot for each of a few calls: the call's number, text
and values, and the number of the last call that the rank has read. So a small call needs no
message.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from ...ops.moves import load_acquire, store_release
from ...world.node_memory import NAME as FIRST_BLOCK
from ...world.node_memory import NOTE_BYTES, Name, Shared

Array = Any

SLOTS = 4  # calls that may be under way at a time
MOST_RANKS = 8
HEAD_BYTES = 192  # of three cache lines: number, ends of values, number of the last call read
NUMBER, ENDS, READ = 0, 8, 16  # words of 8 bytes in the head
TEXT_BYTES = 256  # of a call: its text, cut, and a digest of the whole text
VALUES_BYTES = 1 << 16
LENGTHS_BYTES = 1024  # of the lengths before the values of an all_to_all
HOST_BYTES = 16  # of a digest of the host's name
PLACE_BYTES = HOST_BYTES + FIRST_BLOCK.size + NOTE_BYTES
AREA_BYTES = SLOTS * (HEAD_BYTES + TEXT_BYTES + LENGTHS_BYTES + VALUES_BYTES)


class Memory:
    """The area of this rank, which other ranks of the node can map."""

    def __init__(self) -> None:
        self._shared = Shared(AREA_BYTES + 4096)  # and the header of the first block
        self._area = self._shared.take(AREA_BYTES)  # zeros

    @property
    def place(self) -> bytes:
        """The address of the area for other ranks, PLACE_BYTES long."""
        note = self._shared.note(self._area)
        assert note is not None, "the area is in shared memory"
        host = blake2b(socket.gethostname().encode(), digest_size=HOST_BYTES).digest()
        return host + FIRST_BLOCK.pack(*self._shared.name) + note.tobytes()

    def board(self, rank: int, places: Sequence[bytes]) -> Board | None:
        """Return the board of all ranks, given their places; None if one is on another node."""
        if len({place[:HOST_BYTES] for place in places}) > 1:
            return None
        areas = []
        for other, place in enumerate(places):
            if other == rank:
                areas.append(self._area)
                continue
            name = Name(*FIRST_BLOCK.unpack(place[HOST_BYTES:-NOTE_BYTES]))
            if not self._shared.meet(other, name):
                return None  # on another node, or not permitted
            areas.append(self._shared.payload(np.frombuffer(place[-NOTE_BYTES:], np.uint8)))
        return Board(rank, areas)

    def free(self) -> None:
        """Let no other process map the area any more."""
        self._shared.free()


class Slot:
    """A call's slot in the area of a rank."""

    def __init__(self, area: Array) -> None:
        words = memoryview(area[:HEAD_BYTES].view(np.int64))
        self.number, self.read = words[NUMBER : NUMBER + 1], words[READ : READ + 1]
        self.ends = words[ENDS : ENDS + MOST_RANKS]
        self.text = memoryview(area[HEAD_BYTES : HEAD_BYTES + TEXT_BYTES])
        self.values = memoryview(area[HEAD_BYTES + TEXT_BYTES :])


class Board:
    """The areas of all ranks, for comparing calls and exchanging values.

    areas: by rank. Calls have the numbers 1, 2, ... in their order.
    """

    def __init__(self, rank: int, areas: Sequence[Array]) -> None:
        self._rank, each = rank, AREA_BYTES // SLOTS
        self._slots = [
            [Slot(area[i * each : (i + 1) * each]) for area in areas] for i in range(SLOTS)
        ]

    def is_free(self, number: int, rank: int) -> bool:
        """Whether a rank has read the call that had this one's slot before."""
        last = number - SLOTS
        return last <= 0 or load_acquire(self._slots[number % SLOTS][rank].read) >= last

    def post(self, number: int, words: bytes, values: Any, parts: Sequence[Any] | None) -> None:
        """Write a call to its slot, which is free: text, and values for all or a part a rank."""
        mine = self._slots[number % SLOTS][self._rank]
        mine.text[:] = words
        if parts is None:
            mine.ends[0] = len(values)
            mine.values[: len(values)] = values
        else:
            start = 0
            for rank, part in enumerate(parts):
                stop = start + len(part)
                mine.values[start:stop] = part
                mine.ends[rank] = start = stop
        store_release(mine.number, number)

    def has_come(self, number: int, rank: int) -> bool:
        """Whether a rank has posted the call."""
        return load_acquire(self._slots[number % SLOTS][rank].number) == number

    def text(self, number: int, rank: int) -> bytes:
        """Return the text that a rank has posted."""
        return bytes(self._slots[number % SLOTS][rank].text)

    def values(self, number: int, rank: int, *, in_parts: bool) -> bytearray:
        """Return the values that a rank has posted; in_parts: its part for this rank."""
        slot, me = self._slots[number % SLOTS][rank], self._rank
        if not in_parts:
            return bytearray(slot.values[: slot.ends[0]])
        return bytearray(slot.values[slot.ends[me - 1] if me else 0 : slot.ends[me]])

    def leave(self, number: int) -> None:
        """Mark a call as read, so that others may reuse its slot; also for one that failed."""
        mine = self._slots[number % SLOTS][self._rank].read
        if mine[0] < number:
            store_release(mine, number)

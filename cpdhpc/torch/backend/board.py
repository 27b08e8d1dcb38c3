"""Shared memory of a node in which ranks compare their calls and exchange values.

Each rank writes to its own area. This has a slot for each of a few calls: the call's text, and
values in turns, each in one of two places. Two words tell how far the rank has come: the last
turn that it has written, and the last that it has read. So a call needs no message.
kernels/cpu_exchange_calls.h has the turns.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from ..._cpu import copy, make_exchange, run_exchange
from ...ops.moves import load_acquire, store_release
from ...world.node_memory import NAME as FIRST_BLOCK
from ...world.node_memory import NOTE_BYTES, Name, Shared

Array = Any
Bytes = Any  # memory: of mpi4py, or a memoryview

# The layout of an area, as cpu_exchange_calls.h has it.
SLOTS = 4  # calls that may be under way at a time
PLACES = 2  # of a slot: others read one while this rank writes the other
MOST_RANKS = 8
WRITTEN, READ = 0, 8  # words of 8 bytes in the head: two cache lines
HEAD_BYTES = 128
TEXT_BYTES = 256  # of a call: its text, cut, and a digest of the whole text
NOTE_ROOM = 1024  # of the lengths in an all_to_all
VALUES_BYTES = 1 << 19  # of a place. Places are larger than a core's second cache together
SLOT_BYTES = HEAD_BYTES + TEXT_BYTES + NOTE_ROOM + PLACES * VALUES_BYTES
AREA_BYTES = SLOTS * SLOT_BYTES
TURNS = 40  # bits of a stamp for a call's turns: a stamp is the call's number, then the turn's
LEFT = (1 << TURNS) - 1  # instead of a turn: all are read
ENDED, BUSY, AWAITS, UNLIKE_TEXT, UNLIKE_NOTES, TAKES = range(6)  # the last bits of a state
REASON_BITS = AHEAD_BITS = 4

HOST_BYTES = 16  # of a digest of the host's name
PLACE_BYTES = HOST_BYTES + FIRST_BLOCK.size + NOTE_BYTES

SHORT_BYTES = 1 << 13  # copied with the interpreter's lock held


def move(source: Bytes, target: Bytes) -> None:
    """Copy memory to other memory of the same length."""
    if len(source) <= SHORT_BYTES:
        target[:] = source
    else:
        copy(1, source, target)


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
        self.written, self.read = words[WRITTEN : WRITTEN + 1], words[READ : READ + 1]
        start = HEAD_BYTES + TEXT_BYTES
        self.text = memoryview(area[HEAD_BYTES:start])
        self.note = memoryview(area[start : start + NOTE_ROOM])
        values = memoryview(area[start + NOTE_ROOM :])
        self.places = [values[i * VALUES_BYTES : (i + 1) * VALUES_BYTES] for i in range(PLACES)]


class Board:
    """The areas of all ranks, for comparing calls and exchanging values.

    areas: by rank. Calls have the numbers 1, 2, ... in their order, and turns 0, 1, ...
    run: run_exchange of the module of kernels, without its first argument
    """

    def __init__(self, rank: int, areas: Sequence[Array]) -> None:
        self._slots = [
            [Slot(area[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for area in areas]
            for i in range(SLOTS)
        ]
        self._own = [each[rank] for each in self._slots]
        self.run = partial(run_exchange, make_exchange(rank, tuple(areas)))

    def is_free(self, number: int, turn: int, rank: int) -> bool:
        """Whether a rank has read the values that had this turn's place before."""
        if turn >= PLACES:
            wanted = (number << TURNS) + turn - PLACES
        elif number > SLOTS:
            wanted = (number - SLOTS << TURNS) + LEFT
        else:
            return True
        return load_acquire(self._slots[number % SLOTS][rank].read) >= wanted

    def has_come(self, number: int, turn: int, rank: int) -> bool:
        """Whether a rank has written a turn."""
        return load_acquire(self._slots[number % SLOTS][rank].written) >= (number << TURNS) + turn

    def text(self, number: int, rank: int) -> bytes:
        """Return the text that a rank has told."""
        return bytes(self._slots[number % SLOTS][rank].text)

    def note(self, number: int, rank: int, size: int) -> bytes:
        """Return the note that a rank has told, of that size."""
        return bytes(self._slots[number % SLOTS][rank].note[:size])

    def values(self, number: int, turn: int, rank: int) -> memoryview:
        """Return the place of a rank's values, until the turn is marked as read."""
        return self._slots[number % SLOTS][rank].places[(number // SLOTS + turn) % PLACES]

    def mark(self, number: int, turn: int) -> None:
        """Mark a turn as read, so that others may reuse its place; LEFT: the whole call."""
        mine, stamp = self._own[number % SLOTS].read, (number << TURNS) + turn
        if mine[0] < stamp:
            store_release(mine, stamp)

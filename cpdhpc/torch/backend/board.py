"""Shared memory of a node in which ranks compare their calls and exchange values.

Each rank writes to its own area. This has a slot for each of a few calls: the call's text, and
values in turns, each in one of two places. Two words tell how far the rank has come: the last
turn that it has written, and the last that it has read. So a call needs no message.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from ..._cpu import copy, copy_past_caches
from ...ops.moves import load_acquire, store_release
from ...world.node_memory import NAME as FIRST_BLOCK
from ...world.node_memory import NOTE_BYTES, Name, Shared

Array = Any
Bytes = Any  # memory: of mpi4py, or a memoryview

SLOTS = 4  # calls that may be under way at a time
PLACES = 2  # of a slot: others read one while this rank writes the other
MOST_RANKS = 8
WRITTEN, DIGEST, READ = 0, 1, 8  # words of 8 bytes in the head: two cache lines
HEAD_BYTES = 128
TEXT_BYTES = 256  # of a call: its text, cut, and a digest of the whole text
NOTE_ROOM = 1024  # of the lengths in an all_to_all
VALUES_BYTES = 1 << 19  # of a place. Places are larger than a core's second cache together
SLOT_BYTES = HEAD_BYTES + TEXT_BYTES + NOTE_ROOM + PLACES * VALUES_BYTES
AREA_BYTES = SLOTS * SLOT_BYTES
TURNS = 40  # bits of a stamp for a call's turns: a stamp is the call's number, then the turn's
LEFT = (1 << TURNS) - 1  # instead of a turn: all are read
HOST_BYTES = 16  # of a digest of the host's name
PLACE_BYTES = HOST_BYTES + FIRST_BLOCK.size + NOTE_BYTES

SHORT_BYTES = 1 << 13  # copied with the interpreter's lock held
TIMED_BYTES = 1 << 15  # of a copy from which the way of copying is chosen
SLOW_NS = 0.25  # for a byte: a core writes one in 0.03 to 0.12, or in 0.5 if another core, with
# which it has no cache in common, has just read it. Copies past the caches take 0.04 to 0.08 then.
RETRIED = 200  # slow copies are tried again after so many, as virtual machines change their cores


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
        self.written, self.digest = words[WRITTEN : WRITTEN + 1], words[DIGEST : DIGEST + 1]
        self.read = words[READ : READ + 1]
        start = HEAD_BYTES + TEXT_BYTES
        self.text = memoryview(area[HEAD_BYTES:start])
        self.note = memoryview(area[start : start + NOTE_ROOM])
        values = memoryview(area[start + NOTE_ROOM :])
        self.places = [values[i * VALUES_BYTES : (i + 1) * VALUES_BYTES] for i in range(PLACES)]


class Board:
    """The areas of all ranks, for comparing calls and exchanging values.

    areas: by rank. Calls have the numbers 1, 2, ... in their order, and turns 0, 1, ...
    """

    def __init__(self, rank: int, areas: Sequence[Array]) -> None:
        self._slots = [
            [Slot(area[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for area in areas]
            for i in range(SLOTS)
        ]
        self._own = [each[rank] for each in self._slots]
        self._slow = 0  # copies that are still made past the caches

    def is_free(self, number: int, turn: int, rank: int) -> bool:
        """Whether a rank has read the values that had this turn's place before."""
        if turn >= PLACES:
            wanted = (number << TURNS) + turn - PLACES
        elif number > SLOTS:
            wanted = (number - SLOTS << TURNS) + LEFT
        else:
            return True
        return load_acquire(self._slots[number % SLOTS][rank].read) >= wanted

    def write(self, number: int, turn: int, values: Bytes, start: int = 0) -> None:
        """Write values to the turn's place, which is free, from start."""
        place = self._own[number % SLOTS].places[(number // SLOTS + turn) % PLACES]
        size = len(values)
        if size <= SHORT_BYTES:
            place[start : start + size] = values
        elif size < TIMED_BYTES:
            copy(1, values, place[start : start + size])
        elif self._slow:
            self._slow -= 1
            copy_past_caches(1, values, place[start : start + size])
        else:
            begun_ns = time.perf_counter_ns()
            copy(1, values, place[start : start + size])
            if time.perf_counter_ns() - begun_ns > SLOW_NS * size:
                self._slow = RETRIED

    def tell(self, number: int, words: bytes, digest: int, note: bytes) -> None:
        """Write a call's text, its digest, and a note for the other ranks."""
        mine = self._own[number % SLOTS]
        mine.text[:] = words
        if note:
            mine.note[: len(note)] = note
        mine.digest[0] = digest

    def post(self, number: int, turn: int) -> None:
        """Mark a turn as written."""
        store_release(self._own[number % SLOTS].written, (number << TURNS) + turn)

    def has_come(self, number: int, turn: int, rank: int) -> bool:
        """Whether a rank has written a turn."""
        return load_acquire(self._slots[number % SLOTS][rank].written) >= (number << TURNS) + turn

    def digest(self, number: int, rank: int) -> int:
        """Return the digest of the text that a rank has told."""
        return int(self._slots[number % SLOTS][rank].digest[0])

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

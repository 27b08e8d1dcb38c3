"""Mailboxes: fixed buffers that carry cells from one rank to another, call after call.

A mailbox has two slots, used in turn, so that a message can be packed while the previous one is
still read. A slot is a header (serial number, number of the call, loan) and a payload. If the two
processes share memory, the slots lie there: the sender writes them, the receiver reads them, and
two words before the slots hold the last serial that was read from each. A long contiguous message
may then be lent, that is, the receiver reads it from the sender's array (loans.h). Without shared
memory slots are private and travel by persistent requests. A mailbox's first message describes its
purpose and its place in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ..ops.moves import load_acquire, read_loan, store_release
from ..world.node_memory import ALIGNED_BYTES, NOTE_BYTES, Shared
from ..world.ranks import Ranks, Wait
from .windows import Message

Bytes = npt.NDArray[np.uint8]

SLOTS = 2
HEAD_BYTES = ALIGNED_BYTES  # before a payload: serial, number, loan, int64 each
LOAN = 16  # offset of the loan in the header, in bytes
LENT_BYTES = 1 << 16  # the shortest message for which a copy by the kernel pays
MOST_LENT_BYTES = 1 << 30  # the kernel reads less than 2 GiB in one call
HELLO_BYTES = 512  # of the first message: a reference to shared memory, then words


class Word(NamedTuple):
    """A request, like MPI's, that is complete when a word of shared memory reaches a value."""

    memory: Bytes
    value: int

    def Test(self) -> bool:
        """Whether the word has reached the value."""
        return load_acquire(self.memory) >= self.value


class Purpose(NamedTuple):
    """The use of a mailbox: the plan's stream of messages, and words for errors.

    what: for example "exchange of plan 'pixels'"; key: of the channel, "float32 (3,), wire raw"
    """

    stream: int
    what: str
    key: str


class Mailbox:
    """One direction between this rank and another.

    other: the rank; size_bytes: of a payload; shared: memory shared with the other, or None
    memory: words and slots, once they are known
    """

    doing = ""  # the other's action that completes the requests of a slot

    def __init__(
        self, world: Ranks, other: int, size_bytes: int, purpose: Purpose, shared: Shared | None
    ) -> None:
        self.world, self.other, self.purpose = world, other, purpose
        self.shared = shared if shared is not None and other in shared.near else None
        self.size_bytes = size_bytes
        self.slot_bytes = HEAD_BYTES + -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.total_bytes = SLOTS * (ALIGNED_BYTES + self.slot_bytes)
        self.memory: Bytes | None = None
        self.hello = np.zeros(HELLO_BYTES, np.uint8)
        self.greeting: list[Any] = []  # requests of the first message
        self.requests: list[list[Any]] = []  # persistent ones of each slot

    def word_at(self, slot: int) -> int:
        """Return the address of the word that holds the last serial read from a slot."""
        return slot * ALIGNED_BYTES

    def head_at(self, slot: int) -> int:
        """Return the address of a slot."""
        return SLOTS * ALIGNED_BYTES + slot * self.slot_bytes

    def payload(self, slot: int) -> Bytes:
        """Return the payload of a slot."""
        start = self.head_at(slot) + HEAD_BYTES
        return self.room[start : start + self.size_bytes]

    @property
    def lends(self) -> bool:
        """Whether a message may be lent: read by the receiver from the sender's array."""
        fits = LENT_BYTES <= self.size_bytes <= MOST_LENT_BYTES
        return fits and self.shared is not None and self.shared.lends

    @property
    def room(self) -> Bytes:
        """The words and the slots."""
        assert self.memory is not None, "mailboxes are connected before they are used"
        return self.memory

    def word(self, offset: int) -> Bytes:
        """Return the word at an offset."""
        return self.room[offset : offset + 8]

    def wait_word(self, offset: int, value: int) -> None:
        """Wait until a word has reached a value."""
        word = Word(self.word(offset), value)
        if not word.Test():
            self.wait([word], "" if offset >= self.head_at(0) else " to read what came before")

    def differs(self, head: int, number: int) -> NoReturn:
        """End the job: the message that came belongs to a different call."""
        there = load_acquire(self.word(head + 8))
        same = "" if there >> 32 == number >> 32 else ", of another shape or dtype"
        self.stop(
            f"rank {self.other} is at number {there & 0xFFFFFFFF}{same}, "
            f"this rank at number {number & 0xFFFFFFFF} ({self.purpose.key})"
        )

    def message(self, slot: int) -> Bytes:
        """Return the header and the payload of a slot, which travel together."""
        start = self.head_at(slot)
        return self.room[start : start + HEAD_BYTES + self.size_bytes]

    def wait(self, requests: list[Any], doing: str = "") -> None:
        """Wait for requests; the time-out names both ranks."""
        reason = f"{self.purpose.what}: waited {{:.1f}} s for rank {self.other}{doing}"
        self.world.wait_any([Wait(requests, self.world.rank, reason)])

    def stop(self, problem: str) -> NoReturn:
        """End the job: the ranks make different calls."""
        self.world.abort(f"{self.purpose.what}: {problem}")

    def start(self, slot: int) -> None:
        """Start the requests of a slot, if there are any."""
        for request in self.requests[slot] if self.requests else ():
            request.Start()

    def arrive(self, slot: int) -> None:
        """Wait for the requests of a slot, if there are any."""
        if self.requests and not all([request.Test() for request in self.requests[slot]]):
            self.wait(self.requests[slot], self.doing)

    def moved(self, slot: int) -> bool:
        """Whether the requests of a slot are complete, and the first message of the mailbox."""
        requests = [*self.greeting, *(self.requests[slot] if self.requests else ())]
        return all([request.Test() for request in requests])

    def free(self) -> None:
        """Free the persistent requests."""
        for each in self.requests:
            for request in each:
                request.Free()
        self.requests = []


class Outbox(Mailbox):
    """A mailbox through which this rank sends."""

    doing = " to receive"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.shared is None:
            self.memory = np.zeros(self.total_bytes, np.uint8)
            init = partial(self.world.send_init, self.world.rank, self.other)
            self.requests = [init(self.message(slot), self.purpose.stream) for slot in range(SLOTS)]
        else:
            self.memory = self.shared.take(self.total_bytes)
            self.memory[: self.head_at(0)] = 0
            for slot in range(SLOTS):
                self.message(slot)[:HEAD_BYTES] = 0
            note = self.shared.note(self.memory)
            assert note is not None, "what it gives is shared"
            self.hello[:NOTE_BYTES] = note
        _write(self.hello, self.purpose.key)
        self.greeting = self.world.isend(
            self.world.rank, self.other, self.hello, self.purpose.stream
        )

    def reserve(self, slot: int, serial: int) -> None:
        """Wait until a slot may be written for a serial."""
        if self.shared is None:
            self.arrive(slot)
        else:
            self.wait_word(self.word_at(slot), serial - SLOTS)

    def send(self, slot: int, serial: int, number: int) -> None:
        """Send what the payload of a slot holds."""
        head = self.head_at(slot)
        store_release(self.word(head + 8), number)
        store_release(self.word(head + LOAN), 0)
        store_release(self.word(head), serial)
        self.start(slot)

    def is_read(self, serial: int) -> bool:
        """Whether the other has read all up to a serial, so that close does not wait."""
        if not all([request.Test() for request in self.greeting]):
            return False
        if self.shared is None:
            return all([request.Test() for each in self.requests for request in each])
        return all(load_acquire(self.word(self.word_at(n % SLOTS))) >= n for n in _last(serial))

    def close(self, serial: int) -> None:
        """Wait until all has been read, and free the memory."""
        self.wait(self.greeting)
        for last in _last(serial):
            self.reserve(last % SLOTS, last + SLOTS)
        if self.shared is not None:
            self.shared.give_back([self.room])
        self.free()


def _last(serial: int) -> range:
    """Return the serials that slots hold, up to the last one."""
    return range(max(1, serial - SLOTS + 1), serial + 1)


class Inbox(Mailbox):
    """A mailbox through which this rank receives."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.greeting = self.world.irecv(
            self.other, self.world.rank, self.hello, self.purpose.stream
        )
        self.connected, self.process = False, 0  # process: number in the operating system
        if self.shared is None:
            self.memory = np.zeros(self.total_bytes, np.uint8)
            init = partial(self.world.recv_init, self.other, self.world.rank)
            self.requests = [init(self.message(slot), self.purpose.stream) for slot in range(SLOTS)]

    def connect(self) -> None:
        """Wait for the first message of the mailbox, and check what it is for."""
        if self.connected:
            return
        self.wait(self.greeting, f" to begin the first one of {self.purpose.key}")
        _compare(self.world, self.other, self.hello, self.purpose)
        if self.shared is not None:
            self.memory = self.shared.payload(self.hello[:NOTE_BYTES])
            self.process = self.shared.process(self.hello[:NOTE_BYTES])
        self.connected = True

    def has_come(self, slot: int, serial: int) -> bool:
        """Whether the message of a serial has come, without waiting."""
        if not self.moved(slot):
            return False
        self.connect()
        return load_acquire(self.word(self.head_at(slot))) >= serial

    def receive(self, slot: int, serial: int, number: int) -> None:
        """Wait for the message of a serial; end the job if its call number differs."""
        head = self.head_at(slot)
        self.arrive(slot)
        self.wait_word(head, serial)
        if load_acquire(self.word(head + 8)) != number:
            self.differs(head, number)
        if load_acquire(self.word(head + LOAN)):  # if recalled, the sender packs the same bytes
            read_loan(self.process, self.room[head : head + HEAD_BYTES], self.payload(slot))

    def release(self, slot: int, serial: int) -> None:
        """Mark a slot as read, for the sender."""
        if self.shared is not None:
            store_release(self.word(self.word_at(slot)), serial)


def greet(
    world: Ranks, sent: Sequence[Message], received: Sequence[Message], purpose: Purpose
) -> None:
    """Announce a call to the ranks of messages, before a step that all ranks must do together.

    If a rank announces another call, the job ends. That includes ranks that wait in their first
    mailbox for its first message, which has the same form.
    """
    here, reason = world.rank, f"{purpose.what}: waited {{:.1f}} s for rank"
    mine = np.zeros(HELLO_BYTES, np.uint8)
    _write(mine, purpose.key)
    theirs = {each.rank: np.zeros(HELLO_BYTES, np.uint8) for each in received}
    came = {rank: world.irecv(rank, here, theirs[rank], purpose.stream) for rank in theirs}
    gone = {each.rank: world.isend(here, each.rank, mine, purpose.stream) for each in sent}
    for rank, requests in came.items():
        world.wait_any([Wait(requests, here, f"{reason} {rank} to begin one of {purpose.key}")])
        _compare(world, rank, theirs[rank], purpose)
    for rank, requests in gone.items():
        world.wait_any([Wait(requests, here, f"{reason} {rank} to receive")])


def _write(hello: Bytes, key: str) -> None:
    text = key.encode()[: HELLO_BYTES - NOTE_BYTES]
    hello[NOTE_BYTES : NOTE_BYTES + len(text)] = np.frombuffer(text, np.uint8)


def _compare(world: Ranks, other: int, hello: Bytes, purpose: Purpose) -> None:
    """End the job if a first message announces something else."""
    theirs = hello[NOTE_BYTES:].tobytes().rstrip(b"\0").decode(errors="replace")
    if theirs != purpose.key[: HELLO_BYTES - NOTE_BYTES]:
        world.abort(f"{purpose.what}: rank {other} has {theirs}, this rank {purpose.key}")

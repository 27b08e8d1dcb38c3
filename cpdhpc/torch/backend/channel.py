"""The communicator of a process group, and the messages of one of its calls."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from ...world.mpi import MESSAGE_BYTES, running_mpi
from .board import (
    AHEAD_BITS,
    AWAITS,
    ENDED,
    LEFT,
    REASON_BITS,
    TAKES,
    TEXT_BYTES,
    UNLIKE_NOTES,
    UNLIKE_TEXT,
    VALUES_BYTES,
    Board,
)
from .progress import CALLS, Broken, Step, Until, Waits

Memory = Any  # of mpi4py: bytes at an address
Take = Callable[[list[Memory]], None]
Portions = tuple[int, ...]  # of memory: a rank, the start in its place, the address and the size

NEAR = 8  # most ranks that send their calls to one another; more compare digests in rounds
LEAST_TAGS = 32768  # guaranteed by MPI
DIGEST_BYTES = 16
INLINE_BYTES = 3584  # of values in the message of a call's text, which MPI sends eagerly
ROOM_BYTES = TEXT_BYTES + INLINE_BYTES
REFUSED = "refused: "
REFUSED_BYTES = REFUSED.encode()


class Mismatch(RuntimeError):
    """Calls that differ between the ranks of a group, or one that a rank has refused."""


class Awaited(Protocol):
    """A receive whose message has not come."""

    def precedes(self, other: Any) -> bool:
        """Whether a message for another receive must be left to this one."""

    def take(self) -> bool:
        """Take a message if one has come."""


class Channel:
    """A group's own communicator. Construction is collective over its members.

    members: the processes of MPI's world, in the order of the group's ranks
    name: the same on all members
    """

    board: Board | None = None  # if all members are on one node

    def __init__(self, members: Sequence[int], name: str) -> None:
        self.name = name
        self.mpi = running_mpi()
        world = self.mpi.COMM_WORLD
        every = world.Get_group()
        group = every.Incl(list(members))
        self.comm = world.Create_group(group, zlib.crc32(name.encode()) % LEAST_TAGS)
        group.Free()
        every.Free()
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.most_tag = (world.Get_attr(self.mpi.TAG_UB) - 1) // 2
        self._byte = self.mpi.BYTE
        self._isend, self._irecv = self.comm.Isend, self.comm.Irecv
        self._address = self.mpi.memory.fromaddress
        # The next rank first, so that not all send to the same rank at once.
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self.awaited = list[Awaited]()  # in the order of their calls
        self._matching = threading.Lock()
        self._calls = count(1)  # whose next is atomic, so threads get different numbers

    def free(self) -> None:
        """Free the communicator; later messages are RuntimeError. Collective."""
        self._isend = self._irecv = gone
        self.awaited.clear()
        self.comm.Free()
        self.board = None

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Return the memory of a contiguous tensor, which the caller must keep alive."""
        return self._address(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def test_all(self, requests: list[Any]) -> bool:
        """Whether all requests are complete. Raises Broken."""
        try:
            if len(requests) == 1:
                return bool(requests[0].Test())
            if not isinstance(requests[0], self.mpi.Request):
                return all([request.Test() for request in requests])
            return bool(self.mpi.Request.Testall(requests))
        except self.mpi.Exception as error:
            raise Broken(str(error)) from None

    def send(self, memory: Memory, to: int, tag: int) -> list[Any]:
        """Start to send to a rank; return the requests."""
        if len(memory) <= MESSAGE_BYTES:
            return [self._isend([memory, self._byte], to, tag)]
        return [self._isend([each, self._byte], to, tag) for each in cut(memory)]

    def match(self) -> None:
        """Let receives take the messages that have come, in the order of their calls."""
        with self._matching:
            left = list[Awaited]()
            for each in list(self.awaited):
                if any(other.precedes(each) for other in left) or not each.take():
                    left.append(each)
                else:
                    self.awaited.remove(each)

    def leave(self, receive: Awaited) -> None:
        """Let a receive take no message any more."""
        with self._matching:
            if receive in self.awaited:
                self.awaited.remove(receive)

    def receive(self, memory: Memory, source: int, tag: int) -> list[Any]:
        """Start to receive from a rank; return the requests."""
        if len(memory) <= MESSAGE_BYTES:
            return [self._irecv([memory, self._byte], source, tag)]
        return [self._irecv([each, self._byte], source, tag) for each in cut(memory)]

    def next_call(self) -> Link:
        """Return the link of the next collective call.

        Calls are matched by their order, which is the same on all members; those in callbacks by
        their path.
        """
        half = self.most_tag // 2
        if CALLS.path:
            CALLS.made += 1
            path = f"{CALLS.path}.{CALLS.made}"
            return Link(self, path, half + zlib.crc32(f"{self.name}:{path}".encode()) % half, 0)
        number, state = CALLS.begun or (next(self._calls), 0)
        CALLS.begun = None
        link = Link(self, f"{self.name}:{number}", number % half, number)
        link.state = state
        return link

    def begin(self, looks: int, text: str, *turns: Any) -> bool:
        """Make the next call in one exchange; return whether it has ended.

        text, turns: the arguments of Link.exchange. If it has not ended after a number of looks,
        the next link of this thread is that of the same call, whose first exchange continues it.
        """
        assert self.board is not None, "all ranks are on one node"
        (count, each, gives, takes, own, kind, fold, note), number = turns, next(self._calls)
        state = self.board.run(
            0, looks, number, 0, count, each, True, False, *packed(text), note, gives, takes,
            own, kind, fold,
        )  # fmt: skip
        if state & (1 << REASON_BITS) - 1 == UNLIKE_NOTES:
            state += UNLIKE_TEXT - UNLIKE_NOTES  # the link compares again, and deals with it
        if state:
            CALLS.begun = number, state
        return not state


def gone(*_: Any) -> NoReturn:
    """Raise RuntimeError, in place of the messages of a destroyed group."""
    raise RuntimeError("the process group was destroyed")


def cut(memory: Memory) -> list[Memory]:
    """Return memory in pieces, each of at most one message."""
    return [memory[i : i + MESSAGE_BYTES] for i in range(0, len(memory), MESSAGE_BYTES)]


class Link:
    """The messages of one collective call, or its turns in the memory of a node.

    path: unique among the calls of all groups; number: of the call, 0 for those in callbacks
    board: the memory of the node, if all ranks share one
    room_bytes: most values that can accompany the text; ends: called at the end of the call
    looks: times that a board is read in vain before the program yields
    state: of turns that have begun, see begin
    """

    def __init__(self, channel: Channel, path: str, tag: int, number: int) -> None:
        self.channel, self.path, self._number = channel, path, number
        self.board = channel.board if number else None
        self.rank, self.size = channel.rank, channel.size
        self.memory = channel.memory
        self.others = channel.others
        self.tag, self.looks, self.state, self._turns = 2 * tag, 0, 0, 0
        self.ends: list[Callable[[], None]] = []
        if self.board is not None:
            self.room_bytes = VALUES_BYTES
            self.ends.append(partial(self.board.mark, number, LEFT))
        else:
            self.room_bytes = INLINE_BYTES if channel.size <= NEAR else -1

    def step(self) -> Moves:
        """Return a step without messages, to which they are added."""
        return Moves(self)

    def agree(self, text: str, inline: Memory = b"", take: Take | None = None) -> Waits:
        """Compare the text of a call over the ranks.

        inline: this rank's values for all ranks, room_bytes at most
        take: called with the values of each rank, of which nothing may be kept
        Neither is for the memory of a node, nor for more than NEAR ranks, whose values need their
        own messages.
        Raises Mismatch on all ranks if texts differ or one begins with REFUSED.
        """
        if self.board is not None:
            yield from self.exchange(text, leaves=True)
        elif self.size > NEAR:
            yield from self._agree_in_rounds(packed(text)[0])
        else:
            found = yield from self.agree_by_messages(text, [inline] * self.size)
            if take is not None:
                take(found)

    def agree_by_messages(self, text: str, given: Sequence[Memory]) -> Waits:
        """Compare the text of a call; return the values that each rank has for this one.

        given: this rank's values for each, INLINE_BYTES at most
        """
        words, _ = packed(text)
        moves, found = self.step(), [bytearray(ROOM_BYTES) for _ in range(self.size)]
        for rank in self.others:
            moves.receive(found[rank], rank)
        for rank in self.others:
            moves.send(words + bytes(given[rank]), rank)
        found[self.rank] = bytearray(words + bytes(given[self.rank]))
        yield moves
        if words.startswith(REFUSED_BYTES) or not all([data.startswith(words) for data in found]):
            raise Mismatch(difference([bytes(data[:TEXT_BYTES]) for data in found], self.path))
        return [memoryview(data)[TEXT_BYTES:] for data in found]

    def exchange(
        self,
        text: str,
        count: int = 1,
        each: int = VALUES_BYTES,
        gives: Portions = (),
        takes: Portions = (),
        *,
        own: Portions = (),
        kind: int = 0,
        fold: Portions = (),
        take: Callable[[int, list[Memory]], None] | None = None,
        note: bytes = b"",
        renewed: Callable[[list[bytes]], int] | None = None,
        held: object = None,
        leaves: bool = False,
    ) -> Waits:
        """Exchange values in turns in the memory of the node; first of all, compare texts.

        gives, takes, own, fold: portions of memory, see run_exchange in cpu_exchange_calls.h; of
            each the bytes first to first + each, for first = 0, each, ..., are in a turn
        take: called in each turn, with first and the memory of each rank, in which the values that
            it gives have their places
        note, renewed: the latter is called with the notes of all ranks if these differ, and returns
            the number of turns
        held: kept until the end; leaves: whether there are no more turns
        Raises Mismatch on all ranks if texts differ or one begins with REFUSED.
        """
        board, number, base = self.board, self._number, self._turns
        assert board is not None, "all ranks are on one node"
        words, digest = packed(text)
        state, self.state = self.state, 0
        while True:
            state = board.run(
                state, self.looks, number, base, count, each, leaves, take is not None,
                words, digest, note, gives, takes, own, kind, fold,
            )  # fmt: skip
            reason, taken = state & (1 << REASON_BITS) - 1, state >> REASON_BITS + AHEAD_BITS
            if reason == ENDED:
                break
            if reason == UNLIKE_TEXT:
                texts = [board.text(number, rank) for rank in range(self.size)]
                texts[self.rank] = words  # that of the board may be of a later call
                raise Mismatch(difference(texts, self.path))
            if reason == UNLIKE_NOTES:
                assert renewed is not None, "notes can differ"
                notes = [board.note(number, rank, len(note)) for rank in range(self.size)]
                notes[self.rank] = note
                count = renewed(notes)
            elif reason == TAKES:
                assert take is not None, "turns end for it"
                found = [board.values(number, base + taken, rank) for rank in range(self.size)]
                take(taken * each, found)
            else:
                happened = board.has_come if reason == AWAITS else board.is_free
                yield self._until(happened, base + taken)
        self._turns += count

    def _until(self, happened: Callable[[int, int, int], bool], turn: int) -> Step:
        """Return a step that waits until a condition of the board is true for all other ranks."""
        number, others = self._number, self.others
        return Step([Until(partial(happened, number, turn, each)) for each in others], others)

    def _agree_in_rounds(self, words: bytes) -> Waits:
        """Compare the largest and smallest digests, over twice as many ranks in each round.

        Source: Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988.
        """
        digest = int.from_bytes(words[-DIGEST_BYTES:][:7], "little")
        mine = np.array([digest, -digest, words.startswith(REFUSED_BYTES)], np.int64)
        span = 1
        while span < self.size:
            moves, other = self.step(), np.empty_like(mine)
            moves.receive(other.data.cast("B"), (self.rank - span) % self.size)
            moves.send(mine.tobytes(), (self.rank + span) % self.size)
            yield moves
            mine = np.maximum(mine, other)
            span *= 2
        if mine[0] == -mine[1] and not mine[2]:
            return
        texts = [bytearray(TEXT_BYTES) for _ in range(self.size)]
        texts[self.rank], moves = bytearray(words), self.step()
        for rank in self.others:
            moves.receive(texts[rank], rank)
            moves.send(words, rank)
        yield moves
        raise Mismatch(difference(list(map(bytes, texts)), self.path))


class Moves(Step):
    """Messages of a call that travel at the same time: a step of its program."""

    __slots__ = ("_link",)

    def __init__(self, link: Link) -> None:
        super().__init__([], [])
        self._link = link

    def send(self, memory: Memory, to: int) -> None:
        """Start to send memory; nothing is sent if it is empty."""
        self._add(self._link.channel.send, memory, to)

    def receive(self, memory: Memory, source: int) -> None:
        """Start to receive into memory; no message is expected if it is empty."""
        self._add(self._link.channel.receive, memory, source)

    def _add(self, start: Callable[..., list[Any]], memory: Memory, rank: int) -> None:
        if len(memory):
            requests = start(memory, rank, self._link.tag)
            self.requests += requests
            self.ranks += [rank] * len(requests)


def portions(given: Iterable[tuple[int, int, Memory]]) -> Portions:
    """Return portions of memory, each given as a rank, the start in its place, and the memory."""
    return tuple(
        [n for rank, start, x in given if len(x) for n in (rank, start, x.address, len(x))]
    )


@lru_cache(4096)
def packed(text: str) -> tuple[bytes, int]:
    """Return a call's text as TEXT_BYTES bytes, and a number, which differ if the texts do.

    The number is 0 for a call that is refused.
    """
    data = text.encode()
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
    number = 0 if text.startswith(REFUSED) else int.from_bytes(digest[:7], "little") + 1
    return data[: TEXT_BYTES - DIGEST_BYTES].ljust(
        TEXT_BYTES - DIGEST_BYTES, b"\0"
    ) + digest, number


def unpacked(data: bytes) -> str:
    """Return the text, which may be cut."""
    return data[:-DIGEST_BYTES].rstrip(b"\0").decode(errors="replace")


def difference(texts: Sequence[bytes], path: str) -> str:
    """Return the message for calls that differ, or one that was refused; texts: by rank."""
    words = [unpacked(each) for each in texts]
    for rank, each in enumerate(words):
        if each.startswith(REFUSED):
            return f"rank {rank} | {each.removeprefix(REFUSED)}"
    other = next(i for i, each in enumerate(texts) if each != texts[0])
    return (
        f"call {path} of the process group differs: {words[0]} on rank 0, "
        f"{words[other]} on rank {other}"
    )

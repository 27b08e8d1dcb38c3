"""Memory that the processes of a node share: a sender writes it, receivers read it in place.

A message in shared memory is passed as a note: the process, block and offset where it lies.
Buffers that are used by all processes together form a lease: they are reused only after all
processes have left it. At the board, a few words per process, processes compare their next calls
without a message.
MPI's own paths between two processes of a node copy: once with the help of the kernel, page by
page, otherwise twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
from collections.abc import Collection, Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

from .._cpu import absent_from, make_board, meet, meet_again, round_trip
from ..ops.cpu import FEW_LOOKS, LOOKS, WAITING, read_memory
from .ranks import Array, Ranks, Wait

BLOCK_BYTES = 8 << 20  # the smallest block that is requested from the system
ALIGNED_BYTES = 64  # a cache line, so that no two processes write into the same one
NOTE_BYTES = 32  # process, descriptor, offset, size, int64 each
SECRET_BYTES = 16  # at the beginning of a process's first block
BOARD = slice(ALIGNED_BYTES, 3 * ALIGNED_BYTES)  # in a process's first block


class Name(NamedTuple):
    """A process's first block, and its secret, in the block and at an address of the process."""

    pid: int
    descriptor: int
    address: int
    secret: bytes


# As it travels, always of the same size: the sent bytes are counted, and must be the same in each
# run.
NAME = struct.Struct(f"<3q{SECRET_BYTES}s")


class Block(NamedTuple):
    """The memory of one file descriptor of one process, mapped into this process."""

    pid: int
    descriptor: int
    memory: Array
    address: int


class Shared:
    """The blocks of this process, and those of other processes of its node that it has met.

    boards: the boards of the node's other processes, by process
    lends: whether all processes of the node can also read one another's own memory
    """

    lends = False

    def __init__(self, size_bytes: int = BLOCK_BYTES) -> None:
        self._blocks: list[Block] = []
        self._near_pids: set[int] = set()
        finalize(self, _orphan, self._near_pids, self._blocks).atexit = False
        self._met: dict[tuple[int, int], Block] = {}
        self._free: list[tuple[int, int, int]] = []  # block, start and stop of free memory
        self._new_block(size_bytes)
        first = self.take(BOARD.stop)
        self.secret = first[:SECRET_BYTES]
        self.secret[:] = np.frombuffer(secrets.token_bytes(SECRET_BYTES), np.uint8)
        self.boards: dict[int, Array] = {}
        self._leases = 0
        self._left: dict[int, list[Array]] = {}  # lease -> its arrays, left by this process
        self._untold: set[int] = set()  # leases left here, not yet announced to the others
        self._left_by: dict[int, set[int]] = {}  # lease -> processes that announced leaving it
        self._measured = 0  # how often round trips were measured
        self._unread: set[int] = set()  # processes whose own memory cannot be read

    @property
    def name(self) -> Name:
        """The data with which another process finds the first block, and recognises it."""
        first = self._blocks[0]
        return Name(first.pid, first.descriptor, first.address, self.secret.tobytes())

    def meet(self, process: int, name: Name) -> bool:
        """Map the first block of another process; return whether its secret is right."""
        pid, descriptor, address, secret = name
        try:
            memory = self._block(pid, descriptor).memory
        except OSError:
            return False
        self.boards[process] = memory[BOARD]
        self._near_pids.add(pid)
        copied = np.zeros(SECRET_BYTES, np.uint8)
        try:
            read_memory(pid, address, copied)
        except OSError:
            self._unread.add(process)
        if copied.tobytes() != secret:
            self._unread.add(process)
        return memory[:SECRET_BYTES].tobytes() == secret

    @property
    def near(self) -> Collection[int]:
        """The other processes of this node, which can all map this one's memory."""
        return self.boards.keys()

    @property
    def board(self) -> Array:
        """The words in which this process announces its next call."""
        return self._blocks[0].memory[BOARD]

    def round_trip_ns(self, process: int) -> int:
        """Return the longest round-trip time of a word to the neighbours, in ns; 0 if unknown.

        All processes of the node call it at the same time, for example after a collective call.
        process: the number of this one; neighbours have the next lower and higher one
        """
        line = sorted([process, *self.boards])
        if len(line) > (os.cpu_count() or 1):
            return 0
        place, longest = line.index(process), 0
        self._measured += 1
        for first in range(2):  # pairs that begin at even positions, then those at odd ones
            other = place + (1 if place % 2 == first else -1)
            if 0 <= other < len(line):
                theirs, leads = self.boards[line[other]], place < other
                longest = max(longest, round_trip(self.board, theirs, leads, self._measured))
        return longest

    @property
    def reads(self) -> bool:
        """Whether this process can read the memory of all processes that it has met."""
        return not self._unread

    def take(self, size_bytes: int) -> Array:
        """Return uint8[size_bytes] that the others can read, for as long as this object lives."""
        room = _room(size_bytes)
        fits = (i for i, (_, start, stop) in enumerate(self._free) if stop - start >= room)
        place = next(fits, None)
        if place is None:
            self._new_block(max(room, BLOCK_BYTES))
            place = len(self._free) - 1
        number, start, stop = self._free[place]
        self._free[place] = number, start + room, stop
        return self._blocks[number].memory[start : start + size_bytes]

    def give_back(self, taken: Sequence[Array]) -> None:
        """Return arrays to the free memory; no other process may still read them."""
        spans = self._free
        for each in taken:
            address = each.__array_interface__["data"][0]
            for number, block in enumerate(self._blocks):
                start = address - block.address
                if 0 <= start < block.memory.size:
                    spans.append((number, start, start + _room(each.size)))
        self._free = []
        for number, start, stop in sorted(spans):
            if self._free and self._free[-1][::2] == (number, start):
                self._free[-1] = number, self._free[-1][1], stop
            elif start < stop:
                self._free.append((number, start, stop))

    def open_lease(self) -> int:
        """Return the number of a new lease: arrays that are reused after all have left it.

        Collective, without a message.
        """
        self._leases += 1
        return self._leases

    def lent(self, lease: int, taken: Array) -> Array:
        """Return the same memory, not empty; the lease is left when its last view is gone."""
        owner = (ctypes.c_uint8 * taken.size).from_address(taken.ctypes.data)
        finalize(owner, self.leave, lease, [taken]).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    def leave(self, lease: int, taken: list[Array]) -> None:
        """Record that this process no longer uses a lease; taken: its own arrays in it."""
        self._left[lease] = taken
        self._untold.add(lease)

    @property
    def untold(self) -> list[int]:
        """The leases that this process has left, not yet announced to the others."""
        return sorted(self._untold)

    def hear(self, lists: Sequence[Sequence[int]], process: int) -> None:
        """Free the leases that all have left; process: this one."""
        self._untold.difference_update(lists[process])
        for number, leases in enumerate(lists):
            for lease in leases:
                self._left_by.setdefault(lease, set()).add(number)
        for lease in [each for each, by in self._left_by.items() if len(by) == len(lists)]:
            del self._left_by[lease]
            self.give_back(self._left.pop(lease))

    def note(self, payload: Array) -> Array | None:
        """Return the note of a payload, uint8[NOTE_BYTES]; None if it is not in shared memory."""
        address = payload.__array_interface__["data"][0]
        for block in (*self._blocks, *self._met.values()):
            offset = address - block.address
            if 0 <= offset <= block.memory.size - payload.size:
                numbers = block.pid, block.descriptor, offset, payload.size
                return np.array(numbers, np.int64).view(np.uint8)
        return None

    def payload(self, note: Array) -> Array:
        """Return the payload of a received note: another process's memory, read-only."""
        pid, descriptor, offset, size = note.view(np.int64).tolist()
        return self._block(pid, descriptor).memory[offset : offset + size]

    def process(self, note: Array) -> int:
        """Return the operating system's number of the process that wrote a note."""
        return int(note.view(np.int64)[0])

    def free(self) -> None:
        """Release the memory; processes that have mapped it keep their mapping."""
        for block in self._blocks:
            os.close(block.descriptor)
        self._blocks.clear()

    def _new_block(self, size_bytes: int) -> None:
        """Add new memory. It has no name in any file system, so nothing remains after the end."""
        descriptor = os.memfd_create("cpdhpc")
        try:
            os.ftruncate(descriptor, size_bytes)
            block = _mapped(os.getpid(), descriptor, descriptor)
        except Exception:
            os.close(descriptor)
            raise
        self._free.append((len(self._blocks), 0, size_bytes))
        self._blocks.append(block)

    def _block(self, pid: int, descriptor: int) -> Block:
        """Return a block of another process, mapped on first use."""
        if (pid, descriptor) not in self._met:
            path = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
            try:
                self._met[pid, descriptor] = _mapped(pid, descriptor, path)
            finally:
                os.close(path)
        return self._met[pid, descriptor]


# Of dropped memory: the processes that may still have to map it, and its descriptors here.
_orphans: list[tuple[set[int], list[int]]] = []


def _orphan(pids: set[int], blocks: list[Block]) -> None:
    """Keep descriptors until they can be closed; freed memory has none."""
    _orphans.append((pids, [block.descriptor for block in blocks]))


def _close_orphans(pids: set[int]) -> None:
    """Close the descriptors whose processes are all in another collective call by now."""
    for _ in range(len(_orphans)):
        try:
            others, descriptors = _orphans.pop(0)
        except IndexError:  # another thread, with a world of its own, has taken the rest
            return
        if others <= pids:
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            _orphans.append((others, descriptors))


def _room(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _mapped(pid: int, descriptor: int, here: int) -> Block:
    """Map memory by the system's own call: Python's keeps a descriptor for each."""
    size = os.fstat(here).st_size
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, size, access, mmap.MAP_SHARED, here, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _libc().madvise(address, size, mmap.MADV_HUGEPAGE)
    owner = (ctypes.c_uint8 * size).from_address(address)
    finalize(owner, _libc().munmap, address, size).atexit = False
    return Block(pid, descriptor, np.frombuffer(memoryview(owner), np.uint8), address)


_FAILED = ctypes.c_void_p(-1).value


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, with the types of what is called here."""
    library = ctypes.CDLL(None, use_errno=True)
    number, place, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    library.mmap.argtypes = place, size, number, number, number, ctypes.c_long
    library.mmap.restype = place
    library.madvise.argtypes = place, size, number
    library.munmap.argtypes = place, size
    return library


def round_trip_ns(world: Ranks, what: str = "round trip") -> int:
    """Return the longest round-trip time of a word between neighbours in a node, in ns.

    0 if it is unknown. what: the call, for time-out messages. Collective.
    """
    shared = world.shared()
    own = 0 if shared is None else shared.round_trip_ns(world.process)
    return int(world.max(np.array([own], np.int64), what)[0])


class CallBoard:
    """Compares the next calls of all processes of a world on one node, without a message.

    Each process writes a number, and reads the others' numbers.
    calls: of make_board; has_failed: whether a guess was wrong, so that the next answer is False
    known: by arguments, the calls that need no further check once the numbers agree
    """

    def __init__(self, world: Ranks, shared: Shared) -> None:
        self._world, self._processes = world, list(shared.boards)
        self.calls = make_board((shared.board, *shared.boards.values()))
        self._found = 0
        self.has_failed = False
        self.known: dict[Hashable, Any] = {}

    def agrees(self, number: int, what: str, *, first: bool = False) -> bool:
        """Return whether all processes write the same number, which is not 0. Collective.

        what: the call, for messages. first: the number is a guess, made before all arguments were
        compared; if it differs, the next answer is False too
        """
        if self.has_failed:
            self.has_failed = False
            return False
        result = meet(self.calls, number, LOOKS)
        if result == WAITING:
            result = self.wait(what)
        self.has_failed = first and not result
        return bool(result)

    def wait(self, what: str) -> bool:
        """Wait for processes that have not come; return whether all have the same number."""
        wait = Wait([self], self._world.rank, lambda: self._reason(what))
        try:
            self._world.wait_any([wait])
        except Exception as error:
            raise self._world.failure(error, what) or error from None
        return bool(self._found)

    def Test(self) -> bool:
        """Whether all have come: like a request of MPI's."""
        self._found = meet_again(self.calls, FEW_LOOKS)
        return self._found != WAITING

    def _reason(self, what: str) -> str:
        absent = [self._processes[place - 1] for place in absent_from(self.calls)]
        return f"{what}: waited {{:.1f}} s for rank {', '.join(map(str, absent))}"


def share(world: Ranks, wanted: bool) -> tuple[Shared | None, str]:
    """Return the memory that a node's processes share, or None, and the reason. Collective.

    wanted: by this process; all must want it, and reach all others of their node
    """
    firsts = world.nodes[:: world.virtual_ranks]
    if len(set(firsts)) == len(firsts) > 1:  # a lone process meets nobody and guesses right
        return None, "one process per node"
    shared, problem = None, "" if wanted else "not wanted"
    try:
        shared = Shared() if wanted else None
    except (OSError, AttributeError) as error:  # memfd_create is Linux's
        problem = f"process {world.process}: {error}"
    names = world.gather((shared and NAME.pack(*shared.name), problem), "shared memory")
    _close_orphans({Name(*NAME.unpack(name)).pid for name, _ in names if name})
    near = [
        i
        for i in range(world.processes)
        if firsts[i] == firsts[world.process] and i != world.process
    ]
    if shared is not None and all(name for name, _ in names):
        missed = [i for i in near if not shared.meet(i, Name(*NAME.unpack(names[i][0])))]
        if missed:
            problem = f"process {world.process} cannot map the memory of process {missed[0]}"
    everyone = world.gather((problem, shared is not None and shared.reads), "shared memory")
    problems = [each for each, _ in everyone if each]
    if problems:
        if shared is not None:
            shared.free()
        return None, problems[0]
    assert shared is not None, "otherwise there is a problem"
    shared.lends = all(reads for _, reads in everyone)
    if len(near) == world.processes - 1:
        world.board = CallBoard(world, shared)
    return shared, "memory that the processes of a node share"

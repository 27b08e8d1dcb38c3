"""Worlds of MPI processes; the only file that imports mpi4py, and only when it is used."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from .ranks import Array, Ranks, Wait, numbered

MESSAGE_BYTES = 1 << 30  # longer ones go in pieces: Open MPI 5 counts with 31 bits
STREAMS = 64  # that have tags of their own; more than are under way at a time
GRACE_S = 1.0  # after a time-out: for the others to tell that they wait too
ALARM_PERIOD_S = 0.1  # how often those who wait look for the time-out of another

Lines = Callable[[float, list[int]], list[str]]  # (seconds waited, absent processes) -> message


def _mpi() -> Any:
    """Import MPI, which starts it unless mpi4py.rc says otherwise."""
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "finalized already" if MPI.Is_finalized() else "not initialized"
        raise RuntimeError(f"World: MPI is {state}")
    return MPI


def _pieces(array: Array, limit: int) -> list[Array]:
    """Cut an array's bytes, uint8[n], into pieces that one message can hold."""
    return [array[i : i + limit] for i in range(0, array.size, limit)]


class World(Ranks):
    """The ranks of an MPI communicator, or virtual_ranks times as many. Collective.

    comm: an mpi4py intra-communicator, None for COMM_WORLD; a duplicate of it is used
    timeout_s: a wait that takes longer ends the job, and says who waited for whom
    Raises TypeError for other communicators, ValueError for numbers out of range, RuntimeError
    where MPI is not running.
    """

    def __init__(
        self, comm: Any = None, *, virtual_ranks: int = 1, timeout_s: float = 600.0
    ) -> None:
        self._mpi = _mpi()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, self._mpi.Intracomm) or comm == self._mpi.COMM_NULL:
            raise TypeError(f"World: comm is {comm!r}: must be an mpi4py intra-communicator")
        super().__init__(comm.Get_rank(), comm.Get_size(), virtual_ranks)
        if not timeout_s > 0:
            raise ValueError(f"World: timeout_s={timeout_s}: must be more than 0")
        self._alarm_tag = STREAMS * virtual_ranks**2  # those below are messages'
        if self._alarm_tag > self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB):
            raise ValueError(f"World: virtual_ranks={virtual_ranks}: too many for MPI's tags")
        self.timeout_s = timeout_s
        self._comm = comm.Dup()
        here = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        firsts = comm.allgather(here.allreduce(self.rank, self._mpi.MIN))  # a node's first process
        self.nodes = numbered([first for first in firsts for _ in range(virtual_ranks)])
        here.Free()

    def free(self) -> None:
        """Free the duplicated communicator; the world cannot be used any more. Collective."""
        self._comm.Free()

    def barrier(self, what: str = "barrier") -> None:
        """Wait for all processes. Collective."""
        self._complete(self._comm.Ibarrier(), what)

    def broadcast(self, array: Array, what: str = "broadcast") -> None:
        """Overwrite array, C-contiguous and of one size everywhere, by process 0's. Collective."""
        if not array.flags.c_contiguous:
            raise ValueError(f"broadcast: array has strides {array.strides}: must be C-contiguous")
        for piece in _pieces(array.reshape(-1).view(np.uint8), MESSAGE_BYTES):
            self._complete(self._comm.Ibcast([piece, self._mpi.BYTE], 0), what)
            self.collective_bytes += piece.size

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Return the small Python values of all processes in order. Collective."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        size, sizes = np.array([data.size], np.int64), np.empty(self.size, np.int64)
        self._complete(self._comm.Iallgather(size, sizes), what)
        everything = np.empty(int(sizes.sum()), np.uint8)
        request = self._comm.Iallgatherv(
            [data, self._mpi.BYTE], [everything, sizes.tolist(), self._mpi.BYTE]
        )
        self._complete(request, what)
        self.collective_bytes += data.size + size.nbytes
        ends = np.cumsum(sizes)
        return [
            pickle.loads(everything[end - size : end].tobytes())
            for end, size in zip(ends, sizes, strict=True)
        ]

    def max(self, values: Array, what: str = "max") -> Array:
        """Return the element-wise maximum over processes; int64[n], n alike. Collective."""
        result = np.empty_like(values)
        self._complete(self._comm.Iallreduce(values, result, self._mpi.MAX), what)
        self.collective_bytes += values.nbytes
        return result

    def sum_by_mpi(self, array: Array) -> None:
        """Sum float32[n] over processes in place by MPI_Allreduce. Collective.

        It blocks and has no time-out: it is the baseline, and MPI's non-blocking variant may be
        another algorithm.
        """
        for piece in _pieces(array, MESSAGE_BYTES):
            self._comm.Allreduce(self._mpi.IN_PLACE, piece, self._mpi.SUM)
        self.collective_bytes += array.nbytes

    def isend(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Start to send from a hosted rank to one of another process; return the requests."""
        process, tag = to // self.virtual_ranks, self._tag(rank, to, stream)
        return [
            self._comm.Isend([piece, self._mpi.BYTE], process, tag)
            for piece in _pieces(payload, MESSAGE_BYTES)
        ]

    def irecv(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Start to receive for a hosted rank from one of another process; return the requests."""
        process, tag = source // self.virtual_ranks, self._tag(source, rank, stream)
        return [
            self._comm.Irecv([piece, self._mpi.BYTE], process, tag)
            for piece in _pieces(buffer, MESSAGE_BYTES)
        ]

    def _tag(self, source: int, to: int, stream: int) -> int:
        """Tell the ranks of two processes apart, and streams; MPI keeps the order within a tag."""
        pair = source % self.virtual_ranks * self.virtual_ranks + to % self.virtual_ranks
        return stream % STREAMS * self.virtual_ranks**2 + pair

    def done(self, wait: Wait) -> bool:
        """Whether all requests are complete."""
        return bool(self._mpi.Request.Testall(wait.requests))

    def wait_any(self, waits: Sequence[Wait]) -> None:
        """Return once a wait is done; after the time-out end the job with all the reasons."""
        self._poll(
            lambda: any(map(self.done, waits)),
            lambda waited_s, absent: [
                f"rank {wait.rank} | {wait.reason.format(waited_s)}" for wait in waits
            ],
        )

    def _complete(self, request: Any, what: str) -> None:
        """Wait for a collective operation of MPI."""
        name = "rank" if self.virtual_ranks == 1 else "process"
        self._poll(
            request.Test,
            lambda waited_s, absent: [
                f"{name} {self.rank} | {what}: waited {waited_s:.1f} s for {name} "
                + (", ".join(map(str, absent)) or "unknown (all wait, in different calls)")
            ],
        )

    def _poll(self, done: Callable[[], bool], lines: Lines) -> None:
        """Wait until done; give up when the time is over, here or at another process."""
        start_s = time.monotonic()
        look_s = start_s + min(ALARM_PERIOD_S, self.timeout_s)
        while not done():
            os.sched_yield()
            now_s = time.monotonic()
            if now_s < look_s:
                continue
            look_s = now_s + ALARM_PERIOD_S
            alarm = self._comm.Iprobe(self._mpi.ANY_SOURCE, self._alarm_tag)
            if alarm or now_s - start_s > self.timeout_s:
                self._give_up(now_s - start_s, lines)

    def _give_up(self, waited_s: float, lines: Lines) -> NoReturn:
        """Tell the others, who then give up too; print who waits for whom; end the job."""
        others = [process for process in range(self.size) if process != self.rank]
        nothing = [np.empty(0, np.uint8), self._mpi.BYTE]
        alarms = [self._comm.Isend(nothing, process, self._alarm_tag) for process in others]
        absent, end_s = set(others), time.monotonic() + GRACE_S
        status = self._mpi.Status()
        while time.monotonic() < end_s:
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._alarm_tag, status):
                self._comm.Recv(nothing, status.Get_source(), self._alarm_tag)
                absent.discard(status.Get_source())
            os.sched_yield()
        self._say(lines(waited_s, sorted(absent)))
        time.sleep(GRACE_S)  # for the lines of the others
        del alarms
        self._end()

    def abort(self, message: str) -> NoReturn:
        """Print "rank R | message" to stderr and end the job, all processes of it."""
        self._say([f"rank {self.hosted.start} | {message}"])
        self._end()

    def _say(self, lines: list[str]) -> None:
        sys.stderr.write("".join(line + "\n" for line in lines))  # at once: others write too
        sys.stderr.flush()

    def _end(self) -> NoReturn:
        sys.stdout.flush()
        self._comm.Abort(1)
        raise SystemExit(1)  # in case MPI_Abort returns


_keyval: list[int] = []  # of the attribute that holds a communicator's world


def _forget(comm: Any, keyval: int, world: World) -> None:
    """Free a world together with its communicator, but not when MPI itself ends."""
    mpi = _mpi()
    if comm not in (mpi.COMM_WORLD, mpi.COMM_SELF):
        world.free()


def as_world(world_or_comm: Any) -> Ranks:
    """Return a world as it is, or the one world of an mpi4py communicator.

    Collective: the first time that a communicator is given. Raises TypeError for anything else.
    """
    if isinstance(world_or_comm, Ranks):
        return world_or_comm
    mpi = _mpi()
    if not isinstance(world_or_comm, mpi.Intracomm):
        raise TypeError(
            f"as_world: {type(world_or_comm).__name__}: known are World, Loopback and an mpi4py "
            "intra-communicator"
        )
    if not _keyval:
        _keyval.append(mpi.Comm.Create_keyval(delete_fn=_forget))
    world = world_or_comm.Get_attr(_keyval[0])
    if world is None:
        world = World(world_or_comm)
        world_or_comm.Set_attr(_keyval[0], world)
    assert isinstance(world, World)
    return world


def library_version() -> str:
    """Return the name and version of the MPI library, its first line."""
    text = str(_mpi().Get_library_version())
    return text.partition("\n")[0].partition(",")[0].rstrip("\0 ")


def abort_job(message: str) -> NoReturn:
    """Print message to stderr and end the job: all processes of it where MPI is running."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    running = sys.modules.get("mpi4py.MPI")  # importing it here would start MPI
    if running is not None and running.Is_initialized() and not running.Is_finalized():
        running.COMM_WORLD.Abort(1)
    raise SystemExit(1)

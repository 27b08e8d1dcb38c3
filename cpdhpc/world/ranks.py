"""The interface of all worlds of ranks, and the world of one process, without MPI."""

from __future__ import annotations

import pickle
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError, Refused, UserError, reworded
from ..methods import check_whole

T = TypeVar("T")


class RankFailure(RuntimeError):
    """Processes died during a call; World.shrink returns a world without them.

    processes: those known here to be dead; may be empty if another process reported the death
    call: the call that this process was in. The arrays to be summed are unchanged, unless one was
    passed as out.
    """

    def __init__(self, processes: Sequence[int], call: str) -> None:
        self.processes, self.call = tuple(processes), call
        super().__init__(self.processes, call)

    def __str__(self) -> str:
        who = ", ".join(map(str, self.processes)) or "unknown (another process saw it)"
        return f"{self.call}: process {who} died; World.shrink() goes on without"


Array = npt.NDArray[Any]


SECONDS = "{:.1f}"  # the only placeholder in a reason; its other braces (keys, shapes) are text


class Wait(NamedTuple):
    """Requests that a rank waits for; reason, a text or a function of none, contains SECONDS."""

    requests: list[Any]
    rank: int
    reason: str | Callable[[], str]

    def line(self, waited_s: float) -> str:
        """Return the message for a wait that took too long."""
        on_gpu = any(getattr(request, "waits_for_gpu", False) for request in self.requests)
        where = "; its own GPU is not done yet" if on_gpu else ""
        reason = self.reason if isinstance(self.reason, str) else self.reason()
        return f"rank {self.rank} | {reason.replace(SECONDS, f'{waited_s:.1f}')}{where}"


class Freeable(Protocol):
    """An object with resources that must be freed."""

    def free(self) -> None:
        """Free it."""

    def is_idle(self) -> bool:
        """Whether free would not wait."""


class Cache:
    """Objects that callers keep with a world from one call to the next, until it is freed.

    Each caller's keys begin with a name or a class of its own.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._held: set[Freeable] = set()
        self._dropped: list[Freeable] = []

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object under key; on first use the result of make."""
        value: T | None = self._kept.get(key)
        if value is None:
            value = self._kept[key] = make()
        return value

    def items(self) -> list[tuple[Hashable, Any]]:
        """Return all keys and objects."""
        return list(self._kept.items())

    @property
    def held(self) -> int:
        """How many objects would be freed."""
        return len(self._held)

    def hold(self, thing: Freeable) -> None:
        """Free an object at the latest with the world, for example its persistent requests."""
        self._held.add(thing)

    def release(self, thing: Freeable) -> None:
        """Forget an object that frees itself; to be called from its free."""
        self._held.discard(thing)

    def drop(self, thing: Freeable) -> None:
        """Let a held object be freed by a later free_dropped; from any thread."""
        self._dropped.append(thing)

    def free_dropped(self) -> None:
        """Free dropped objects whose free does not wait."""
        for _ in range(len(self._dropped)):
            thing = self._dropped.pop(0)
            if thing.is_idle():
                thing.free()
            else:
                self._dropped.append(thing)

    def free(self) -> None:
        """Free held objects, and forget all others."""
        self._dropped.clear()
        for thing in list(self._held):
            thing.free()
        self._kept.clear()


class Ranks(ABC):
    """Ranks, assigned to processes in blocks of virtual_ranks.

    process, processes: this process and the number of processes; ranks: number of ranks
    hosted: the ranks that this process runs; rank: the first of them; size: the number of ranks,
        by MPI's name
    nodes: the node of each rank, numbered in the order of first ranks; one if nothing is known
    bytes_sent, messages_sent: int64[virtual_ranks], sent by each hosted rank to other ranks,
        including those of the same process
    collective_bytes: passed by this process to MPI's own collectives; 0 for one process
    chosen: the algorithms that "usual" and "auto" have chosen in all-reduces
    cache: objects that callers keep between calls: buffers, recordings, carriers of GPU arrays
    timeout_s: the longest time of a wait
    gpu_direct: whether GPU arrays may be passed to MPI directly
    gpu_aware: whether MPI takes them, and how that was found out; None before it is asked for
    shares_gpus: whether processes of a node share GPUs and may, as use_gpu was told
    has_mpi: whether sum_by_mpi is MPI_Allreduce
    thread_level: MPI's thread level: "single", "funneled", "serialized" or "multiple"
    refusal: the error of another process that ended a wait here, see refuse; or None
    postponed: the error to be raised after the current call, see refuse; or None
    lent_by: the thread that must not communicate at the moment, as another does it; or None
    lent_to: the reducer or hook whose gradients are being reduced; or None
    pause_s: sleep of a waiting process between two looks, while another thread computes on the
        core; 0: it only yields the core
    board: shared memory in which all processes compare their calls, once shared() was called;
        None if they are on several nodes, or share no memory
    account: called with the name, arguments and numbers of each collective of cpdhpc.collectives
        before it starts; or None
    """

    has_mpi = True
    thread_level = "multiple"
    timeout_s = 600.0
    gpu_direct = True
    shares_gpus = False
    gpu_aware: tuple[bool, str] | None = None
    refusal: Exception | None = None
    postponed: Exception | None = None
    lent_by: int | None = None
    lent_to: object = None
    pause_s = 0.0
    account: Callable[[str, Mapping[str, object], Sequence[int]], None] | None = None
    board: Any = None

    def __init__(self, process: int, processes: int, virtual_ranks: int) -> None:
        check_whole("World", "virtual_ranks", virtual_ranks, 1)
        self.process, self.processes, self.virtual_ranks = process, processes, virtual_ranks
        self.ranks = self.size = processes * virtual_ranks
        self.nodes: tuple[int, ...] = (0,) * self.ranks
        self.hosted = range(process * virtual_ranks, (process + 1) * virtual_ranks)
        self.rank = self.hosted.start
        self.bytes_sent = np.zeros(virtual_ranks, np.int64)
        self.messages_sent = np.zeros(virtual_ranks, np.int64)
        self.collective_bytes = 0
        self.chosen: set[str] = set()
        self.cache = Cache()
        self._streams = 0

    def hosts(self, rank: int) -> bool:
        """Whether a rank is run by this process."""
        return rank in self.hosted

    def open_stream(self) -> int:
        """Return a stream that nothing else uses. Collective, without a message."""
        self._streams += 1
        return -self._streams

    def count(self, rank: int, size_bytes: int) -> None:
        """Count a message that a hosted rank sends."""
        self.bytes_sent[rank - self.hosted.start] += size_bytes
        self.messages_sent[rank - self.hosted.start] += 1

    def check_thread(self) -> None:
        """Raise RuntimeError in the thread that has lent the world to another one."""
        if self.lent_by == threading.get_ident():
            raise RuntimeError(
                "World: a gradient is being reduced in another thread: call reduce() first"
            )

    def agree(self, error: Exception | None, what: str = "agree", *, of_call: bool = False) -> None:
        """Raise the lowest process's error on all processes, if any has one. Collective.

        of_call: whether the error is about arguments, which may be wrong on one rank only: see
        named. An error that cannot be pickled becomes a RuntimeError with the same text. is_agreed
        recognises the raised error.
        """
        if not self.max(np.array([error is not None], np.int64), what)[0]:
            return
        errors = [each and pickle.loads(each) for each in self.gather(portable(error), what)]
        first = next(each for each in errors if each is not None)
        raised = named(errors, self.virtual_ranks) if of_call else first
        vars(raised)[AGREED] = True
        raise raised from error

    def agreed(
        self,
        make: Callable[[], T],
        what: str = "agree",
        told: type[Exception] | tuple[type[Exception], ...] = UserError,
    ) -> T:
        """Return the result of make, which contains no collective of this world. Collective.

        told: the classes of errors that are raised on all processes; others are raised locally
        Raises the lowest process's error on all processes, with its rank unless all have the same.
        """
        value, error = None, None
        try:
            value = make()
        except told as wrong:
            error = wrong
        self.agree(error, what, of_call=True)
        return cast(T, value)

    def gather_from(self, make: Callable[[], T], what: str) -> list[T]:
        """Return all processes' results of make, which contains no collective. Collective.

        Results are small Python values. Raises the lowest process's error on all processes, with
        its rank at the front.
        """
        value, error = None, None
        try:
            value = make()
        except Exception as wrong:
            error = portable(of_rank(self.rank, wrong))
        everyone = self.gather((value, error), what)
        for _, each in everyone:
            if each is not None:
                raise pickle.loads(each)
        return [value for value, _ in everyone]

    def on_first(self, make: Callable[[], T], what: str = "on_first") -> T:
        """Return process 0's result of make, which contains no collective. Collective.

        The result is a small Python value. Raises make's UserError or OSError on all processes.
        """
        errors = OSError, UserError
        value = self.agreed(lambda: make() if self.process == 0 else None, what, errors)
        first: T = self.gather(value, what)[0]
        return first

    def failure(self, error: Exception, what: str) -> RankFailure | None:
        """Return the failure of a process that caused an error, or None for other errors."""
        return None

    def shared(self) -> Any:
        """Return the memory that this node's processes share, or None. Collective."""
        return None

    def refuse(self, error: Exception, *, behind: bool = False) -> tuple[Exception, bool]:
        """Return the error that all processes are to raise, and whether all of them refused.

        For a process that finds a call wrong before it has sent anything, while others may wait
        for its messages: these raise the error from their waits, and it stays as refusal.
        behind: this process still does the call, so that no message is left over, and all raise
            the postponed error after it
        """
        self.postponed = error if behind else self.postponed
        return error, True

    def take_postponed(self) -> Exception:
        """Return the postponed error and clear it."""
        error, self.postponed = self.postponed, None
        assert error is not None, "the caller has seen it"
        return error

    def __deepcopy__(self, memo: object) -> Self:
        """Return the same world: copies of objects that communicate share the communicator."""
        return self

    @abstractmethod
    def split(self, group: int) -> Ranks:
        """Return the world of the processes with the same group, in their order. Collective.

        Raises ValueError on all processes for a negative group.
        """

    @abstractmethod
    def free(self) -> None:
        """Free what the world holds; it cannot be used any more. Collective."""

    @abstractmethod
    def barrier(self, what: str = "barrier", pause_s: float = 0.0) -> None:
        """Wait for all processes. Collective. pause_s: sleep between looks, for long waits."""

    @abstractmethod
    def broadcast(self, array: Array, what: str = "broadcast") -> None:
        """Overwrite array, C-contiguous and of one size everywhere, by process 0's. Collective."""

    @abstractmethod
    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Return the small Python values of all processes in order. Collective."""

    @abstractmethod
    def max(self, values: Array, what: str = "max") -> Array:
        """Return the element-wise maximum over processes; int64[n], the same n. Collective."""

    @abstractmethod
    def sum_by_mpi(self, array: Array, source: Array | None = None) -> None:
        """Sum float32[n] over processes by MPI_Allreduce. Collective.

        Sums source, or array itself, into array, which must not share memory with source.
        """

    @abstractmethod
    def isend(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Start to send from a hosted rank to one of another process; return the requests.

        stream: distinguishes messages between the same two ranks; order is kept within a stream.
            Pieces have streams of 0 or more, open_stream returns negative ones
        """

    @abstractmethod
    def irecv(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Start to receive for a hosted rank from one of another process; return the requests."""

    @abstractmethod
    def send_init(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Return persistent requests to send from a hosted rank to one of another process.

        They have Start, Test and Free; starting them all, in order, sends the current bytes.
        """

    @abstractmethod
    def recv_init(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Return persistent requests to receive for a hosted rank from another process's."""

    @abstractmethod
    def write_box(
        self, path: Path, offset: int, shape: Sequence[int], start: Sequence[int], box: Array
    ) -> None:
        """Write this process's box of an array in a file, together with all processes' boxes.

        offset: of the array's first byte; shape: of the array; start: of the box in it
        box: any dtype, C-contiguous; the boxes are disjoint, some may be empty
        Collective. Raises OSError on all processes if one cannot write, or path is a link.
        """

    @abstractmethod
    def done(self, wait: Wait) -> bool:
        """Whether all requests are complete."""

    @abstractmethod
    def wait_any(self, waits: Sequence[Wait]) -> None:
        """Return once a wait is complete; after the time-out end the job, printing all reasons."""

    @abstractmethod
    def abort(self, message: str) -> NoReturn:
        """Print "rank R | message" to stderr and end the job, all processes of it."""


def of_rank(rank: int, error: Exception) -> Exception:
    """Return an error of the same type with the rank at the front, unless one is there."""
    text = str(error) if str(error).startswith("rank ") else f"rank {rank} | {error}"
    try:
        return reworded(error, text)
    except TypeError:  # its constructor takes other arguments
        return RuntimeError(f"rank {rank} | {type(error).__name__}: {error}")


ARGUMENT_ERRORS = TypeError, ValueError, MemoryError


AGREED = "raised_on_all_ranks"  # an attribute of errors


def is_agreed(error: Exception) -> bool:
    """Whether an error is one that agree has raised on all processes."""
    return AGREED in vars(error)


def named(errors: Sequence[Exception | None], virtual_ranks: int) -> Exception:
    """Return the first of the processes' errors, some of which are None.

    One of ARGUMENT_ERRORS has its rank at the front, unless all processes have the same.
    """
    process, error = next((i, each) for i, each in enumerate(errors) if each is not None)
    if len({str(each) for each in errors}) > 1 and isinstance(error, ARGUMENT_ERRORS):
        return of_rank(process * virtual_ranks, error)
    return error


def portable(error: Exception | None) -> bytes | None:
    """Return an error pickled; one that cannot be becomes a RuntimeError with the same text.

    A value that cannot be pickled becomes its text.
    """
    if error is None:
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        if isinstance(error, Refused) and error.value is not error.shown:
            error = reworded(error, str(error))
            error.value = error.shown
            return portable(error)
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


def check_process_list(processes: object, count: int) -> None:
    """Raise TypeError or ValueError unless these are some of count processes, each once."""
    if not isinstance(processes, Sequence) or isinstance(processes, str):
        allowed = "must be a list or range"
        raise ArgumentTypeError("World.part", "processes", processes, allowed)
    for process in processes:
        check_whole("World.part", "process", process, 0, count)
    if not 0 < len(processes) == len(set(processes)):
        allowed = "must be some, each once"
        raise ArgumentError("World.part", "processes", list(processes), allowed)


def numbered(nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the number of each rank's node, in the order of first ranks, from any names."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(nodes))}
    return tuple(numbers[name] for name in nodes)


class Loopback(Ranks):
    """A world of virtual_ranks ranks in this one process; needs no MPI.

    nodes: the number or name of the node of each rank, all on one by default
    Raises ValueError if there is not one for each rank.
    """

    has_mpi = False

    def __init__(self, virtual_ranks: int = 1, *, nodes: Sequence[Hashable] | None = None) -> None:
        super().__init__(0, 1, virtual_ranks)
        if nodes is not None:
            try:
                self.nodes = numbered(nodes)
            except TypeError:
                allowed = "must be a list of numbers or names"
                raise ArgumentTypeError("Loopback", "nodes", nodes, allowed) from None
            if len(nodes) != self.ranks:
                allowed = f"must be {self.ranks}, one per rank"
                raise ArgumentError("Loopback", "nodes", nodes, allowed)

    def split(self, group: int) -> Loopback:
        """Return a world of the same number of ranks in this process."""
        check_whole("World.split", "group", group, 0, 2**31)
        return Loopback(self.virtual_ranks, nodes=self.nodes)

    def free(self) -> None:
        """Free what the world holds."""
        self.cache.free()

    def barrier(self, what: str = "barrier", pause_s: float = 0.0) -> None:
        """Return at once."""

    def broadcast(self, array: Array, what: str = "broadcast") -> None:
        """Leave the array as it is."""

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Return [value]."""
        return [value]

    def max(self, values: Array, what: str = "max") -> Array:
        """Return a copy."""
        return values.copy()

    def sum_by_mpi(self, array: Array, source: Array | None = None) -> None:
        """Copy the source, if there is one, into the array."""
        if source is not None:
            array[:] = source

    def isend(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Raise ValueError: there is no other process."""
        raise ValueError(f"Loopback: rank {rank} sends to rank {to} of 0..{self.ranks - 1}")

    def irecv(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Raise ValueError: there is no other process."""
        raise ValueError(f"Loopback: rank {rank} receives from {source} of 0..{self.ranks - 1}")

    send_init, recv_init = isend, irecv

    def write_box(
        self, path: Path, offset: int, shape: Sequence[int], start: Sequence[int], box: Array
    ) -> None:
        """Write the box."""
        if not box.size:
            return
        from ..whole_files import open_own

        whole = box.shape == tuple(shape)
        with open(path, "r+b", opener=open_own) as file:
            for row in [()] if whole else np.ndindex(box.shape[:-1]):  # contiguous runs
                at = np.array(start) + [*row, *[0] * (box.ndim - len(row))]
                number = int(np.ravel_multi_index(tuple(at), tuple(shape)))
                file.seek(offset + number * box.itemsize)
                file.write(box[row].data)

    def done(self, wait: Wait) -> bool:
        """Return True."""
        return True

    def wait_any(self, waits: Sequence[Wait]) -> None:
        """Return at once."""

    def abort(self, message: str) -> NoReturn:
        """Print "rank 0 | message" to stderr and raise SystemExit(1)."""
        sys.stderr.write(f"rank 0 | {message}\n")
        raise SystemExit(1)

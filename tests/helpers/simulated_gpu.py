"""A GPU without a GPU: CuPy's streams, events and memory, as late and as careless as allowed.

Work given to a stream is done only while somebody looks at an event or waits, one piece at a time,
in an order drawn by chance within what streams and events promise. Memory that is freed is
overwritten: pinned memory at once, that of the GPU when some is next taken in the same stream, in
the order of that stream, as pools of CuPy and torch hand it out then. So whoever reads too early,
writes too early or lets go too early gets wrong numbers.
"""

from __future__ import annotations

import atexit
import random
import tempfile
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any, NoReturn

import numpy as np

GARBAGE = 0xA5
MARGIN = 64  # bytes before and after a piece of memory, which nobody may write


class Ticket:
    """Whether the work before a record of an event is done."""

    done = False

    def set(self) -> None:
        self.done = True


class Error(RuntimeError):
    """CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA error {status}")


Error.__module__ = "cupy_backends.cuda.api.runtime"  # as CuPy's
UNSUPPORTED, INVALIDATED, ISOLATION, CAPTURED = 900, 901, 905, 907  # cudaErrorStreamCapture...
RELAXED = 2  # cudaStreamCaptureModeRelaxed


@cache
def folder() -> str:
    """Return the folder of what CuPy has compiled, which goes with the process."""
    kept = tempfile.TemporaryDirectory(prefix="cupy-")
    atexit.register(kept.cleanup)
    return kept.name


class Graph:
    """cupy.cuda.Graph: work as it was captured, which launches give a stream time after time.

    memory: what was taken meanwhile; copies: (kind, address, bytes) that copies read and write
    """

    def __init__(self, gpu: Gpu, mode: int) -> None:
        self.gpu, self.mode, self.valid = gpu, mode, True
        self.work: list[Callable[[], Any]] = []
        self.memory: list[weakref.ref[Owner]] = []
        self.copies: list[tuple[str, int, int]] = []

    def fail(self, status: int) -> NoReturn:
        """Raise an error of CUDA's that spoils the capture."""
        self.valid = False
        raise Error(status)

    def launch(self, stream: Stream | None = None) -> None:
        """cudaGraphLaunch."""
        gpu, stream = self.gpu, stream or self.gpu.current[-1]
        if gpu.fault:
            raise Error(gpu.fault)
        assert stream.graph is None, "a graph in a graph: not simulated"
        assert all(each() is not None for each in self.memory), "a graph's memory was let go"
        for copy in self.copies:
            gpu.find(*copy)
        gpu.graphs += 1
        for work in self.work:
            stream.work.append(work)


class Gpu:
    """All streams, and who does their work.

    aware: whether MPI may be given this GPU's memory, which is the host's
    closed: whether its memory cannot be shared by CUDA IPC, as torch's expandable segments
    compiled, folder: modules so far, and where CuPy keeps them; capability, toolkit: see NVRTC
    copies_last: do the work of other streams only when the null stream cannot go on
    count, device_id: GPUs that this process sees, and the current one of them
        which each thread has its own of, as of the current stream
    first: the place on the bus of the first of them
    foreign: memory of the GPU that another library has taken
    launched, copied: how often each kernel was launched, and copies to and from pinned memory
    graphs: how many were launched; loaded: kernels that were launched outside of captures
    fault: the status that every call returns from now on, as after an illegal access; 0 for none
    stalled: a stream whose work is not done but when somebody waits for all of it
    let_go: memory that was freed, by whose pool it is and the stream that it was taken in
    """

    def __init__(self, seed: int = 0) -> None:
        self.aware = self.copies_last = self.closed = False
        self.count, self.first = 1, 0
        self.compiled, self.capability, self.toolkit = 0, 90, 13
        self.folder = folder()
        self.lock, self.fault = threading.RLock(), 0
        self.launched: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self.graphs, self.loaded = 0, set[str]()
        self.of_thread = threading.local()
        self.stalled: Stream | None = None
        self.random = random.Random(seed)
        self.streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self.queues: list[Queue] = []
        self.destroyed: list[int] = []  # addresses of streams, which later ones may have
        self.events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self.numbers = count(1)
        self.null = Stream(self, 0)
        self.memory: dict[str, dict[int, np.ndarray]] = {"device": {}, "pinned": {}}
        self.let_go: dict[tuple[str, int], list[np.ndarray]] = {}
        self.foreign: weakref.WeakSet[Owner] = weakref.WeakSet()

    @property
    def current(self) -> list[Stream]:
        """The current stream of this thread, behind those that it comes back to."""
        return self.of_thread.__dict__.setdefault("streams", [self.null])

    def of_torch(self) -> list[Stream]:
        """The current stream of torch in this thread, which is not CuPy's of itself."""
        return self.of_thread.__dict__.setdefault("torch", [self.null])

    @property
    def device_id(self) -> int:
        """The current GPU of this thread, the first one at first."""
        return self.of_thread.__dict__.setdefault("device", 0)

    @device_id.setter
    def device_id(self, number: int) -> None:
        self.of_thread.device = number

    def give(self, work: Callable[[], Any], stream: Stream | None = None) -> None:
        """Give a stream work, CuPy's current one by default."""
        (stream or self.current[-1]).put(work)

    def launch(self, name: str, work: Callable[[], Any], devices: Iterable[int] = ()) -> None:
        """Launch a kernel in CuPy's current stream; the first time it is loaded.

        devices: of its arrays, and the one that it was loaded on: all must be the current one
        """
        others = {*devices, self.current[-1].device()} - {self.device_id}
        assert not others, f"{name}: of GPU {others}, launched on GPU {self.device_id}"
        graph = self.current[-1].graph
        if graph is not None and name not in self.loaded:
            graph.fail(UNSUPPORTED)  # by drivers for CUDA before 12.3
        if graph is None:
            self.loaded.add(name)
        self.launched[name] += 1
        self.give(work)

    def step(self) -> bool:
        """Do one piece of work of any stream that can go on; return whether there was one."""
        with self.lock:
            stalled = None if self.stalled is None else self.stalled.work
            ready = [each for each in self.queues if each is not stalled and each.ready()]
            if ready:
                (ready[0] if self.copies_last else self.random.choice(ready)).popleft()()
            return bool(ready)

    def finish(self, stream: Stream) -> None:
        """Wait for a stream; others may go on or not."""
        if stream.graph is not None:
            stream.graph.fail(UNSUPPORTED)
        with self.lock:
            self.stalled = None
            while stream.work:
                assert self.step() or not stream.work, "streams wait for one another for ever"

    def delay(self) -> None:
        """Keep the current stream busy for longer than any copy takes."""
        self.current[-1].work.extend([int] * 200)

    def query(self, event: int) -> int:
        """cudaEventQuery: 0 or cudaErrorNotReady; the work goes on a little."""
        if self.fault:
            return self.fault
        ticket = self.events[event].ticket
        if isinstance(ticket, Graph):
            ticket.fail(CAPTURED)
        if ticket is None or ticket.done:
            return 0
        self.step()
        return 600

    def copy(self, to: int, source: int, size_bytes: int, kind: int, stream: int) -> None:
        """cudaMemcpyAsync: between memory of the GPU and pinned memory."""
        down = {2: True, 1: False}[kind]
        self.copied["down" if down else "up"] += 1
        sides = ("pinned", "device") if down else ("device", "pinned")
        places = (sides[0], to, size_bytes), (sides[1], source, size_bytes)
        target, origin = (self.find(*place) for place in places)
        graph = self.streams[stream].graph
        if graph is not None:
            graph.copies += places
        self.streams[stream].put(lambda: np.copyto(target, origin))

    def find(self, kind: str, address: int, size_bytes: int) -> np.ndarray:
        """Return the bytes at an address, which must lie in one piece of memory of this kind."""
        others = {owner.raw.ctypes.data: owner.raw for owner in self.foreign}
        for start, raw in (self.memory[kind] | (others if kind == "device" else {})).items():
            if start <= address and address + size_bytes <= start + raw.size:
                return raw[address - start : address - start + size_bytes]
        raise AssertionError(f"{size_bytes} bytes at {address:x} are not {kind} memory")

    def take(self, kind: str, size_bytes: int, free: Callable[[np.ndarray], None]) -> Owner:
        """Return new memory; free is called with it once nobody refers to it any more."""
        whole = np.full(size_bytes + 2 * MARGIN, GARBAGE, np.uint8)
        raw = whole[MARGIN : MARGIN + max(1, size_bytes)]
        owner = Owner(raw[:size_bytes], self.device_id, whole)
        pool, address = self.memory[kind], raw.ctypes.data
        pool[address] = raw

        def finalize() -> None:
            free(pool.pop(address))

        weakref.finalize(owner, finalize).atexit = False
        return owner

    def pinned(self, shape: int, dtype: Any) -> np.ndarray:
        """cupyx.empty_pinned."""
        owner = self.take("pinned", shape * np.dtype(dtype).itemsize, spoil)
        return np.asarray(owner).view(dtype)

    def device(self, size_bytes: int) -> Owner:
        """Return memory of the GPU, which may be some that was freed in this stream."""
        stream = self.current[-1]
        if stream.graph is not None and stream.graph.mode != RELAXED:
            stream.graph.fail(UNSUPPORTED)  # by cudaMalloc, which the pool may have to call
        if size_bytes:
            self.hand_out("cupy", stream)
        free = self.let_go.setdefault(("cupy", stream.ptr), []).append
        owner = self.take("device", size_bytes, free)
        if stream.graph is not None:
            stream.graph.memory.append(weakref.ref(owner))
        return owner

    def hand_out(self, pool: str, stream: Stream) -> None:
        """Overwrite, in the order of a stream, what was freed in it: somebody has it from now on.

        A pool gives a part of it; which one is not said, so that it is all here. CuPy: memory.pyx,
        _Arena and SingleDeviceMemoryPool; torch: CUDACachingAllocator.cpp, BlockPool.
        """
        freed = self.let_go.setdefault((pool, stream.ptr), [])
        while freed:
            stream.put(partial(spoil, freed.pop()))

    @property
    def allocator(self) -> Callable[[int], Owner]:
        """This thread's, the pool by default."""
        return self.of_thread.__dict__.setdefault("allocator", self.device)

    @contextmanager
    def using_allocator(self, allocator: Callable[[int], Owner]) -> Iterator[None]:
        """cupy.cuda.using_allocator."""
        before, self.of_thread.allocator = self.allocator, allocator
        try:
            yield
        finally:
            self.of_thread.allocator = before


def spoil(raw: np.ndarray) -> None:
    raw[:] = GARBAGE


class Owner:
    """What keeps memory from being freed; work that was given to a stream does not.

    of: what keeps that of another library, which does not keep this
    """

    def __init__(
        self, raw: np.ndarray, device: int, whole: np.ndarray | None, of: object = None
    ) -> None:
        self.raw, self.device, self.whole, self.of = raw, device, whole, of
        self.__array_interface__ = raw.__array_interface__


def check_bounds(raw: np.ndarray, whole: np.ndarray | None, who: str) -> None:
    """Fail where something was written beside an owner's memory, unless another library's."""
    if whole is None:
        return
    before, after = whole[:MARGIN], whole[MARGIN + raw.size :]
    assert (before == GARBAGE).all() and (after == GARBAGE).all(), f"{who} wrote out of bounds"


class Queue(deque[Any]):
    """Work in order, and tickets that it waits for. ended: whether no more will come"""

    ended = False

    def ready(self) -> bool:
        """Whether there is work that need not wait for another stream."""
        while self and isinstance(self[0], Ticket) and self[0].done:
            self.popleft()
        return bool(self) and not isinstance(self[0], Ticket)


class Stream:
    """cupy.cuda.Stream: work in order, and waits for events in it.

    Destroyed, what it was given goes on, and another may get its address.
    """

    def __init__(self, gpu: Gpu, ptr: int | None = None) -> None:
        self.device_id = 0 if ptr == 0 else gpu.device_id
        if ptr is None:
            ptr = gpu.destroyed.pop() if gpu.destroyed else next(gpu.numbers)
        self.gpu, self.ptr, self.work = gpu, ptr, Queue()
        self.graph: Graph | None = None  # that captures what it is given
        gpu.streams[self.ptr] = self
        gpu.queues = [each for each in gpu.queues if each or not each.ended] + [self.work]
        weakref.finalize(self, end, gpu, ptr, self.work).atexit = False

    def device(self) -> int:
        """The GPU whose stream it is; each has a null stream."""
        return self.device_id if self.ptr else self.gpu.device_id

    def put(self, work: Callable[[], Any]) -> None:
        """Take work, or capture it."""
        (self.work if self.graph is None else self.graph.work).append(work)

    def begin_capture(self, mode: int | None = None) -> None:
        """cudaStreamBeginCapture, by default relaxed, as CuPy's."""
        if not self.ptr:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self.gpu.fault or self.graph is not None:
            raise Error(self.gpu.fault or 401)  # cudaErrorIllegalState
        self.graph = Graph(self.gpu, RELAXED if mode is None else mode)

    def end_capture(self) -> Graph:
        """cudaStreamEndCapture."""
        graph, self.graph = self.graph, None
        if graph is None:
            raise Error(401)
        if not graph.valid or self.gpu.fault:
            raise Error(self.gpu.fault or INVALIDATED)
        return graph

    def is_capturing(self) -> bool:
        return self.graph is not None

    def wait_event(self, event: Event) -> None:
        if self.graph is not None or isinstance(event.ticket, Graph):  # forks are not simulated
            graph = self.graph or event.ticket
            assert isinstance(graph, Graph)
            graph.fail(ISOLATION)
        if event.ticket is not None:
            self.work.append(event.ticket)

    def synchronize(self) -> None:
        self.gpu.finish(self)

    def __enter__(self) -> Stream:
        self.gpu.current.append(self)
        return self

    def __exit__(self, *args: object) -> None:
        self.gpu.current.pop()


def end(gpu: Gpu, ptr: int, work: Queue) -> None:
    """cudaStreamDestroy."""
    work.ended = True
    gpu.destroyed.append(ptr)


class Event:
    """cupy.cuda.Event."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.ptr, self.device_id = gpu, next(gpu.numbers), gpu.device_id
        self.ticket: Ticket | Graph | None = None
        gpu.events[self.ptr] = self

    def record(self, stream: Stream) -> None:
        assert stream.device() == self.device_id, "an event of another GPU's stream"
        if stream.graph is not None:
            self.ticket = stream.graph
            return
        self.ticket = Ticket()
        stream.work.append(self.ticket.set)

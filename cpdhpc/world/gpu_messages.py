"""Messages of GPU arrays: directly if MPI takes GPU memory, else through pinned host memory."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..methods import check_bool
from ..ops import to_host
from .ranks import Array, Cache, Ranks, Wait

if TYPE_CHECKING:
    from ..ops.gpu_runtime import Event, Streams

SIZE_BYTES = 1 << 20  # of the trial; more than MPI libraries send with the envelope


def use_gpu(world: Ranks, *, oversubscribe: bool = False) -> int:
    """Make a GPU that no other process of the node has the current one; return its number.

    It is that of CuPy, and of torch if that is loaded: call it before model.cuda(), or pass the
    number, as in model.to(f"cuda:{use_gpu(world)}"). A process that sees one GPU (under Slurm's
    --gpus-per-task, for example) takes that; one that has chosen a GPU other than the first, in
    torch or CuPy, keeps it. World does the same for CuPy, without raising errors, if CuPy is
    already loaded. Each thread selects the GPU by cupy.cuda.Device(number).use() and
    torch.cuda.set_device(number). Collective.
    oversubscribe: processes may share a GPU; then reducers and hooks on this world allow it, too
    Raises UserError on all processes if one sees no GPU, or shares one and any process does not
    allow that; TypeError for a wrong argument.
    """
    if not isinstance(world, Ranks):
        raise TypeError(f"use_gpu: world is {type(world).__name__}: must be a World")
    world.agreed(lambda: check_bool("use_gpu", "oversubscribe", oversubscribe), told=TypeError)
    number, address = use_own_gpu(world, with_torch=True)
    lacks = "has no CuPy: pip install 'cpdhpc[gpu]'" if find_spec("cupy") is None else "sees no GPU"
    if address:
        from ..ops import gpu_runtime

        if lacks := gpu_runtime.unsupported():
            address = ""
    answers = world.gather((address, lacks, oversubscribe), "GPU")
    for process, (gpu, why, _) in enumerate(answers):
        if not gpu:
            raise UserError(f"use_gpu: process {process} {why}")
    shared = sharing(world, [gpu for gpu, _, _ in answers])
    if shared and not all(allowed for _, _, allowed in answers):
        raise UserError(
            f"use_gpu: processes {', '.join(shared)} would share GPUs of their node: "
            "start fewer, or allow it: oversubscribe=True, bench --oversubscribe-gpus, in a job "
            "train.oversubscribe_gpus = true"
        )
    world.shares_gpus = bool(shared)
    return number


def check_gpus(world: Ranks, function: str, device: int, memory: int) -> None:
    """Raise UserError on all processes unless each has a GPU of its own, and memory MPI can take.

    Processes of a node may share one after use_gpu(oversubscribe=True). If MPI takes GPU memory, it
    gets another library's memory directly, and shares memory within a node by CUDA IPC. Collective.
    function: for the error; device: the number of the GPU that this process computes on; memory:
        an address there
    """
    if world.processes < 2:
        return
    from ..ops import gpu_runtime

    def place() -> tuple[str, str, bool, bool]:
        can_be_shared = gpu_runtime.can_be_shared(memory)
        return gpu_runtime.address_of(device), f"cuda:{device}", world.shares_gpus, can_be_shared

    places = world.gather_from(place, function)
    closed = [process for process, each in enumerate(places) if not each[3]]
    if closed and gpu_aware(world).yes:
        raise UserError(
            f"{function}: memory of torch on process {closed[0]} cannot be shared by CUDA IPC, as "
            "MPI does: leave expandable_segments and cudaMallocAsync out of "
            "PYTORCH_CUDA_ALLOC_CONF, or let arrays be staged: World(gpu_direct=False), "
            "train.gpu_direct = 'never'"
        )
    shared = sharing(world, [each[0] for each in places])
    if shared and not all(each[2] for each in places):
        named = ", ".join(places[int(each)][1] for each in shared)
        raise UserError(
            f"{function}: model: processes {', '.join(shared)} of a node share a GPU ({named}): "
            'move it by model.to(f"cuda:{use_gpu(world)}"), or allow it: '
            "use_gpu(world, oversubscribe=True)"
        )


def sharing(world: Ranks, addresses: Sequence[str]) -> list[str]:
    """Return the numbers of the processes whose GPU another process of their node has too.

    addresses: of the GPU of each process, "" for none
    """
    places = [*zip(world.nodes[:: world.virtual_ranks], addresses, strict=True)]
    return [
        str(process) for process, place in enumerate(places) if place[1] and places.count(place) > 1
    ]


def use_own_gpu(world: Ranks, *, with_torch: bool = False) -> tuple[int, str]:
    """Give this process a GPU of its own in CuPy; return number and address, or (-1, "").

    with_torch: select it in torch too, if that is loaded; torch's choice then has precedence
    """
    if find_spec("cupy") is None:
        return -1, ""
    from ..ops import gpu_runtime

    gpu_runtime.wait_at_most(world.timeout_s)
    nodes = world.nodes[:: world.virtual_ranks]
    place = nodes[: world.process].count(nodes[world.process])
    if not with_torch or "torch" not in sys.modules:
        return gpu_runtime.use_device(place)
    from ..ops import tensors

    found = gpu_runtime.use_device(place, tensors.current_gpu())
    if found[1]:
        tensors.use_gpu(found[0])
    return found


TRIAL = "GPU memory: waited {:.1f} s for MPI's trial; World(gpu_direct=False) skips it"


class Answer(NamedTuple):
    """yes or no, and the reason."""

    yes: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.yes else 'no'} ({self.why})"


def gpu_aware(world: Ranks) -> Answer:
    """Return whether MPI takes GPU memory on all processes; asked once per world. Collective."""
    if world.gpu_aware is None:
        world.gpu_aware = find_out(world)
    return Answer(*world.gpu_aware)


def find_out(world: Ranks) -> Answer:
    """Query the library, then try. Collective.

    The library is queried first, as a trial crashes if it does not support GPUs: a no is final.
    A yes is tried, because it may only describe how the library was built.
    """
    answers = [Answer(*each) for each in world.gather(tuple(_ask(world)), "GPU-aware MPI")]
    for answer in answers:
        if not answer.yes:
            return answer
    if world.processes < 2:
        return Answer(True, f"{answers[0].why}; not tried, which needs 2 processes")
    if exchange(world):
        return Answer(True, f"{answers[0].why}; each process sent GPU memory to the next")
    return Answer(False, f"{answers[0].why} says yes, but GPU memory arrived changed")


def _ask(world: Ranks) -> Answer:
    return query() if world.gpu_direct else Answer(False, "the world has gpu_direct=False")


def exchange(world: Ranks) -> bool:
    """Send GPU memory from each process to the next; return whether all arrived. Collective."""
    from ..ops import gpu_runtime

    count, each = world.processes, world.virtual_ranks
    following, previous = (world.process + 1) % count, (world.process - 1) % count
    mine = gpu_runtime.to_device(_pattern(world.process))
    theirs = gpu_runtime.to_device(np.zeros(SIZE_BYTES, np.uint8))
    here, to, source = (process * each for process in (world.process, following, previous))
    requests = world.irecv(source, here, theirs) + world.isend(here, to, mine)
    world.wait_any([Wait(requests, here, TRIAL)])
    right = np.array_equal(to_host(theirs), _pattern(previous))
    return all(world.gather(right, "GPU-aware MPI"))


def _pattern(process: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return bytes that differ from position to position and between neighbouring processes."""
    return (np.arange(SIZE_BYTES) % 251 + process % 5 + 1).astype(np.uint8)


def query() -> Answer:
    """Ask the MPI library that is loaded in this process whether it takes CUDA memory."""
    paths = loaded("libmpi")
    for path in paths:
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI, MPICH, MVAPICH, ParaStation
            if library.MPIX_Query_cuda_support() and _switched_off():
                return Answer(False, "opal_cuda_support is off")
            return Answer(bool(library.MPIX_Query_cuda_support()), "MPIX_Query_cuda_support")
        if hasattr(library, "MPIX_GPU_query_support"):  # Cray's MPICH
            flag = ctypes.c_int(0)
            failed = library.MPIX_GPU_query_support(0, ctypes.byref(flag))  # 0 is CUDA
            return Answer(not failed and bool(flag.value), "MPIX_GPU_query_support")
    names = ", ".join(Path(path).name for path in paths)
    return Answer(False, f"{names} has no query for it" if names else "no libmpi is loaded")


def _switched_off() -> bool:
    """Whether CUDA support is off in Open MPI 4, whose query only reports how it was built."""
    for path in loaded("libopen-pal"):
        try:
            return not ctypes.c_bool.in_dll(ctypes.CDLL(path), "opal_cuda_support").value
        except ValueError:  # Open MPI 5 has no such variable: its query reports what is in use
            continue
    return False


def loaded(start: str) -> list[str]:
    """Return the paths of libraries in this process's memory map whose name begins with start."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = dict.fromkeys(line[line.index("/") :] for line in lines if "/" in line)
    return [path for path in paths if Path(path).name.startswith(start) and ".so" in path]


class Delayed:
    """A message that MPI gets once an event has come; a request like MPI's."""

    def __init__(
        self, carrier: Carrier, event: Event, start: Callable[[], list[Any]], keep: Array | None
    ) -> None:
        self._carrier, self._start = carrier, start
        self._keep = keep  # read by a copy until the event; if freed, others could write there
        self.event: Event | None = event
        self.requests: list[Any] = []

    @property
    def waits_for_gpu(self) -> bool:
        """Whether the wait is for the GPU, not for another rank."""
        return self.event is not None

    def start(self) -> bool:
        """Pass the message to MPI if the event has come; return whether it has."""
        if self.event is not None and self.event.Test():
            self.requests, self.event, self._keep = self._start(), None, None
        return self.event is None

    def Test(self) -> bool:
        """Whether the message is complete; starts all messages that can be started."""
        self._carrier.progress()
        return self.event is None and all([request.Test() for request in self.requests])


class Landing:
    """A message into pinned memory, then a copy from there to the GPU; a request like MPI's."""

    def __init__(self, carrier: Carrier, requests: list[Any], copy: Callable[[], Event]) -> None:
        self._carrier, self._requests, self._copy = carrier, requests, copy
        self._event: Event | None = None

    @property
    def waits_for_gpu(self) -> bool:
        """Whether the wait is for the GPU, not for another rank."""
        return self._event is not None

    def Test(self) -> bool:
        """Whether the message is in GPU memory; starts all messages that can be started."""
        self._carrier.progress()
        if self._event is None and all([request.Test() for request in self._requests]):
            self._event = self._copy()
        return self._event is not None and self._event.Test()


class Carrier:
    """Sends and receives arrays of one GPU for a world, in the order of the calls.

    MPI knows nothing of streams: it may read a send buffer and write a receive buffer at once. So a
    message starts when the caller's stream has reached the point of the call: then its values
    have been computed, and the old content of the buffer is no longer needed. Nothing waits here:
    each test of a request, of any message, starts all messages that are ready.
    cache: buffers for the stream of the last call: freed memory returns to the stream that
        allocated it, so another stream gets buffers of its own
    """

    def __init__(self, world: Ranks, streams: Streams) -> None:
        self._world, self.streams = world, streams
        self.cache = Cache()
        self._delayed: deque[Delayed] = deque()

    def begin(self) -> None:
        """Begin a call in CuPy's current stream."""
        if self.streams.begin():
            self.cache.free()

    def progress(self) -> None:
        """Start the messages whose events have come, in the order of the calls."""
        while self._delayed and self._delayed[0].start():
            self._delayed.popleft()

    def delay(
        self, event: Event, start: Callable[[], list[Any]], keep: Array | None = None
    ) -> list[Any]:
        """Return requests of a message that starts after an event and all earlier messages."""
        message = Delayed(self, event, start, keep)
        self._delayed.append(message)
        self.progress()
        return [message]

    def wait(self, requests: list[Any], what: str, whom: str = "the GPU") -> None:
        """Wait for requests, at most for the world's time-out."""
        reason = f"{what}: waited {{:.1f}} s for {whom}"
        self._world.wait_any([Wait(requests, self._world.hosted.start, reason)])


class Direct(Carrier):
    """Passes GPU memory to MPI directly."""

    def isend(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Start to send, as Ranks.isend, the content of payload at this point of the stream."""
        start = partial(self._world.isend, rank, to, payload, stream)
        return self.delay(self.streams.mark(), start)

    def irecv(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Start to receive, as Ranks.irecv, when the caller's stream has finished with buffer."""
        start = partial(self._world.irecv, source, rank, buffer, stream)
        return self.delay(self.streams.mark(), start)

    def sum_by_mpi(self, array: Array, source: Array | None = None) -> None:
        """Sum over processes, as Ranks.sum_by_mpi. Collective."""
        self.wait([self.streams.mark()], "MPI_Allreduce")
        self._world.sum_by_mpi(array, source)


class Staged(Carrier):
    """Sends GPU memory through pinned host memory, and receives through it.

    Copies have streams of their own, so those of one message run while another travels and the
    kernels of a third run: the engine has several pieces of the data in progress.
    """

    def isend(self, rank: int, to: int, payload: Array, stream: int = 0) -> list[Any]:
        """Start to send, as Ranks.isend, the content of payload at this point of the stream."""
        host, copied = self.streams.start_to_host(payload, self.streams.mark())
        return self.delay(copied, partial(self._world.isend, rank, to, host, stream), payload)

    def irecv(self, source: int, rank: int, buffer: Array, stream: int = 0) -> list[Any]:
        """Start to receive, as Ranks.irecv; buffer is written after the caller's stream."""
        host = self.streams.pinned(buffer.size)
        requests = self._world.irecv(source, rank, host, stream)
        copy = partial(self.streams.start_to_device, host, buffer, self.streams.mark())
        return [Landing(self, requests, copy)]

    def sum_by_mpi(self, array: Array, source: Array | None = None) -> None:
        """Sum over processes, as Ranks.sum_by_mpi. Collective."""
        if array.size == 0:
            return
        what, sent = "MPI_Allreduce", array if source is None else source
        host, copied = self.streams.start_to_host(sent.view(np.uint8), self.streams.mark())
        self.wait([copied], what)
        self._world.sum_by_mpi(host.view(np.float32))
        landed = self.streams.start_to_device(host, array.view(np.uint8), self.streams.mark())
        self.wait([landed], what)


def carrier_of_gpu(world: Ranks) -> Direct | Staged:
    """Return the carrier of arrays on CuPy's current GPU, for a new call.

    Collective on a world's first call.
    """
    from ..ops import gpu_runtime

    device = gpu_runtime.current_device()
    gpu_runtime.wait_at_most(world.timeout_s)
    world.shared()  # so that calls are compared in node memory, like those of NumPy arrays
    kind = Direct if world.processes > 1 and gpu_aware(world).yes else Staged
    carrier = world.cache.get(("carrier", device), lambda: kind(world, gpu_runtime.Streams()))
    carrier.begin()
    return carrier

"""Timed and checked calls of all-reduces: of cpdhpc, of other libraries, memcpy; with bounds."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...collectives.allreduce import Allreduce
from ...collectives.collective import Collective
from ...collectives.engine import carrier_of
from ...collectives.recorded import empty_shared
from ...errors import UserError
from ...lazy import Late
from ...methods import MEMCPY
from ...ops import to_host
from ...world.cores import threads_of_rank
from ...world.gpu_messages import use_own_gpu
from ...world.ranks import Ranks
from ..study_data import Factors
from .timing import interleave_ranks, on_device, whole

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ...ops import tensors
else:
    torch, dist, tensors = map(Late, ("torch", "torch.distributed", "cpdhpc.ops.tensors"))

Array = NDArray[np.float32]
LARGEST = 8  # of the integers: their sum is exact in float32 for 2**21 ranks
COPIES = 9  # that are timed, after one to warm up
APART = 97  # places between the windows of two ranks in the common numbers


class Contribution(NamedTuple):
    """A rank's contribution, float32[n], and the sum of all ranks', float64[n], exact to 2**-53."""

    x: Array
    total: NDArray[np.float64]


def windows(n: int, world: Ranks, exact: bool) -> list[Array]:
    """Return float32[n] of each rank: windows of common numbers, which differ.

    exact: whether they are small integers: every order of summation gives their exact sum
    """
    rng, size = np.random.default_rng(0), n + world.ranks * APART
    if exact:
        numbers = rng.integers(-LARGEST, LARGEST + 1, size).astype(np.float32)
    else:
        numbers = rng.standard_normal(size, np.float32)
    return [numbers[rank * APART : rank * APART + n] for rank in range(world.ranks)]


def total_of(arrays: Sequence[Array]) -> NDArray[np.float64]:
    """Return the sum of arrays in float64, rank by rank."""
    total = np.zeros(len(arrays[0]))
    for each in arrays:
        total += each
    return total


def data_of(n: int, world: Ranks, exact: bool) -> Contribution:
    """Return the data of this rank; exact: see windows."""
    every = windows(n, world, exact)
    return Contribution(every[world.hosted.start].copy(), total_of(every))


class CaseArrays:
    """The arrays of n values that the all-reduces of a rank share, each made when first used.

    out: where results go
    """

    def __init__(self, world: Ranks, n: int, device: str) -> None:
        self._world, self._n, self._device = world, n, device
        self._data: dict[bool, Contribution] = {}

    def data(self, exact: bool) -> Contribution:
        """Return integers if sums are to be exact, else normal values."""
        if exact not in self._data:
            made = data_of(self._n, self._world, exact)
            self._data[exact] = made._replace(x=on_device(made.x, self._device))
        return self._data[exact]

    @cached_property
    def out(self) -> Array:
        out: Array = on_device(np.empty(self._n, np.float32), self._device)
        return out

    @cached_property
    def shared(self) -> CaseArrays:
        """The same data in memory that the processes of a node share. Collective.

        Raises UserError on all ranks if they share none.
        """
        if self._world.shared() is None:
            raise UserError("call shared: the processes of a node share no memory here")
        whole_lines = -(-self._n // 16) * 16  # of 64 bytes
        found = CaseArrays(self._world, self._n, self._device)
        rows = empty_shared(self._world, (3, whole_lines))
        for exact, row in zip((True, False), rows, strict=False):
            x, own = row[: self._n], self.data(exact)
            x[:] = own.x
            found._data[exact] = own._replace(x=x)
        found.out = rows[2][: self._n]
        return found

    @cached_property
    def copy_s(self) -> float:
        """The time of a copy by all ranks at once, the least of several. Collective.

        A copy that another program slows down is no bound.
        """
        target = np.empty_like(self.out)

        def copy() -> None:
            target[...] = self.out

        run = whole(copy, target)
        times = interleave_ranks(self._world, {MEMCPY: run}, COPIES)[MEMCPY][1:]
        return float(times.max(axis=1).min())


@dataclass
class TimedCase:
    """A call to time, with its properties.

    name: how errors call it; exact: whether the sum must be exact, and so the data integers
    is_sum: whether it is a sum at all; same: whether all ranks get the same result
    prepare: called before each call, and not timed; free: called after all of them
    method: None for another library's
    chosen: the algorithm that ran; wire_bytes: what left the rank that sent most, NaN if only
        the library knows; error: of the sum, relative, in the Euclidean norm
    """

    name: str
    data: Contribution
    out: Array
    run: Callable[[], object]
    exact: bool = True
    is_sum: bool = True
    same: bool = True
    prepare: Callable[[], object] = lambda: None
    free: Callable[[], object] = lambda: None
    method: Allreduce | Collective | None = None
    chosen: str = ""
    wire_bytes: float = np.nan
    error: float = np.nan

    def check(self, world: Ranks) -> None:
        """Run once and set chosen, wire_bytes and error. Collective.

        Raises ArithmeticError on all processes if ranks that should agree differ in a bit, or a
        result that should be exact is not.
        """
        self.out[...] = np.nan
        sent = world.bytes_sent.copy()
        self.prepare()
        returned: Any = self.run()
        if not self.is_sum:
            return
        sent_bytes = int((world.bytes_sent - sent).max())
        out = to_host(self.out)
        is_right = not self.exact or np.array_equal(out, self.data.total)
        digest = hashlib.blake2b(out.tobytes()).hexdigest() if self.same else ""
        squares = float(np.sum((out - self.data.total) ** 2)), float(np.sum(self.data.total**2))
        found = world.gather((is_right, digest, sent_bytes, *squares), "bench: results")
        right, digests, sizes, wrong, norms = zip(*found, strict=True)
        if len({*digests}) > 1:
            raise ArithmeticError(f"bench: {self.name}: the ranks' results differ")
        if not all(right):
            raise ArithmeticError(f"bench: {self.name}: a result is not exact")
        if self.method is not None:
            self.wire_bytes, self.chosen = max(sizes), getattr(returned, "algorithm", "")
        self.error = float(np.sqrt(sum(wrong) / sum(norms))) if sum(norms) else 0.0


def schedule_case(
    world: Ranks, method: Allreduce, arrays: CaseArrays, call: str = "plain"
) -> TimedCase:
    """Return the case of an all-reduce of ours, called as one of CALLS. Collective."""
    arrays = arrays.shared if call == "shared" else arrays
    data, out = arrays.data(method.fmt is None), arrays.out
    run: Callable[[], object] = lambda: method.run(world, [data.x], [out])  # noqa: E731
    free: Callable[[], object] = lambda: None  # noqa: E731
    if call != "plain":
        prepared = method.prepare(world, [data.x], [out], graphs=call == "graphs")
        run, free = prepared.run, prepared.free
    words = call, method.algorithm, method.wire, method.scaling, method.accumulate
    return TimedCase(
        name=" ".join(str(word) for word in words if word),
        data=data,
        out=out,
        run=whole(run, out),
        exact=method.fmt is None,
        free=free,
        method=method,
    )


Baseline = Callable[[Ranks, CaseArrays], TimedCase]


def _mpi(world: Ranks, arrays: CaseArrays) -> TimedCase:
    """MPI_Allreduce of float32, called without any of ours around it."""
    data, out = arrays.data(True), arrays.out
    return TimedCase("mpi", data, out, lambda: carrier_of(world, out).sum_by_mpi(out, data.x))


def _memcpy(world: Ranks, arrays: CaseArrays) -> TimedCase:
    """Copy the array on all ranks at once: the least that an all-reduce reads and writes."""
    data, out = arrays.data(True), arrays.out

    def run() -> None:
        out[...] = data.x

    return TimedCase(MEMCPY, data, out, whole(run, out), is_sum=False)


def _float32(library: str) -> Baseline:
    """Return the all-reduce of a library of torch.distributed in float32, in place as in DDP."""

    def case(world: Ranks, arrays: CaseArrays) -> TimedCase:
        data, out = arrays.data(True), arrays.out

        def fill() -> None:
            out[...] = data.x

        run = whole(lambda: sum_float32(out), out)
        return TimedCase(library, data, out, run, prepare=whole(fill, out))

    return case


def _half(library: str, dtype: str) -> Baseline:
    """A library of torch.distributed in 16 bits, with the conversions, as DDP's hooks do."""

    def case(world: Ranks, arrays: CaseArrays) -> TimedCase:
        data, out = arrays.data(False), arrays.out
        run = whole(lambda: sum_half(data.x, out, dtype), out)
        return TimedCase(f"{library} {dtype}", data, out, run, exact=False)

    return case


BASELINES: dict[str, Baseline] = {
    "mpi": _mpi,
    MEMCPY: _memcpy,
    "gloo": _float32("gloo"),
    "gloo-bf16": _half("gloo", "bfloat16"),
    "nccl": _float32("nccl"),
    "nccl-bf16": _half("nccl", "bfloat16"),
    "nccl-fp16": _half("nccl", "float16"),
}


def bound_s(world: Ranks, wire_bytes: int, memcpy_s: float, link_s: float) -> float:
    """Return the least time of an all-reduce, from memory and from the links of the nodes.

    wire_bytes: of a rank's data; memcpy_s: for its float32 data by all ranks at once, which read
    and write as much as any all-reduce; link_s: for a byte on a node's link
    2 (N - 1) / N of the bytes leave each of N nodes, if its ranks are summed first. Source:
    Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC
    69(2), 2009, theorem 1.
    """
    nodes = len(set(world.nodes))
    return max(memcpy_s, 2 * (nodes - 1) / nodes * wire_bytes * link_s)


def wire_bytes(factors: Factors) -> int:
    """Return the bytes of a rank's data on the wire."""
    scaling = factors.get("value_scaling") or ("none" if factors["algorithm"] in GROUPS else None)
    method = Allreduce(str(factors["wire"]), scaling=scaling if scaling is None else str(scaling))
    return method.payloads.size_bytes(int(factors["size_bytes"]) // 4)


TIMEOUT_S = 600.0
GROUPS = ("gloo", "nccl")  # of torch.distributed


@contextmanager
def torch_group(world: Ranks, backend: str) -> Iterator[None]:
    """Open torch's default process group over the processes of world, and close it. Collective.

    They find one another by a TCP store of process 0, on a free port.
    backend: gloo, or nccl for arrays on CuPy's current GPU
    """
    torch.set_num_threads(threads_of_rank(world))
    device = None
    if backend == "nccl":
        from ...ops import gpu_runtime

        device = torch.device("cuda", gpu_runtime.current_device())
        torch.cuda.set_device(device)
    apart = len(set(world.gather(socket.gethostname()))) > 1
    interface, address = world.agreed(own_address) if apart else ("lo", "127.0.0.1")
    host = world.gather(address)[0]
    timeout = timedelta(seconds=TIMEOUT_S)

    def store(port: int) -> Any:
        leads = world.process == 0
        return dist.TCPStore(host, port, world.processes, leads, timeout, wait_for_workers=False)  # type: ignore[attr-defined]

    first = store(0) if world.process == 0 else None
    port = world.gather(first.port if first else 0)[0]
    with named_interface(interface if backend == "gloo" and apart else ""):
        dist.init_process_group(
            backend,
            store=first or store(port),
            rank=world.process,
            world_size=world.processes,
            timeout=timeout,
            device_id=device,
        )
    try:
        yield
    finally:
        dist.destroy_process_group()


def own_address() -> tuple[str, str]:
    """Return an interface of this host and its IPv4 address, by which other hosts reach it.

    It is that of the host's name, else the first that is not loopback: a name may be unknown, or
    that of 127.0.1.1. Raises UserError if there is none.
    """
    from ...torch.backend.start import addresses

    named, outward = "", addresses()
    with suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
    for name, each in outward.items():
        if each == named:
            return name, each
    if not outward:
        raise UserError(f"gloo: {socket.gethostname()} has no IPv4 address but loopback's")
    return next(iter(outward.items()))


@contextmanager
def named_interface(name: str) -> Iterator[None]:
    """Let gloo use an interface in the block, "" for its own choice; a user's choice stays."""
    if not name or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name  # torch has no argument for it
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def sum_float32(array: Any) -> None:
    """Sum float32[n], of NumPy or CuPy, over processes in place. Collective."""
    dist.all_reduce(tensors.tensor_of(array))


def sum_half(x: Any, out: Any, dtype: str) -> None:
    """Sum float32[n] over processes into out in bfloat16 or float16, as DDP's hooks. Collective.

    Both conversions are part of it; a division by the number of processes is not.
    """
    small = tensors.tensor_of(x).to(getattr(torch, dtype))
    dist.all_reduce(small)
    tensors.tensor_of(out).copy_(small)


def library_of(baseline: str) -> str:
    """Return the library whose all-reduce a baseline is."""
    return baseline.partition("-")[0]


def missing(world: Ranks, library: str) -> str:
    """Return why a library cannot run on these processes and their GPUs, or "". Collective."""
    if library not in GROUPS:
        return ""
    found = world.gather(_lacks(library))
    reason = next(filter(None, found), "")
    if reason or library != "nccl":
        return reason
    gpus = [
        *zip(world.nodes[:: world.virtual_ranks], world.gather(use_own_gpu(world)), strict=True)
    ]
    return "processes share GPUs" if len({*gpus}) < len(gpus) else ""


def no_torch() -> str:
    """Return why torch cannot be imported in this process, or ""."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError is of a library that it loads
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return "torch is not installed on every process"
        return f"torch cannot be imported: {error}"
    return ""


def _lacks(library: str) -> str:
    """Return why a library of torch.distributed cannot run in this process, or ""."""
    why = no_torch()
    if why or library != "nccl":
        return why
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} is built without NCCL"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def group_of(world: Ranks, baselines: Sequence[str]) -> AbstractContextManager[None]:
    """Return torch's process group if a baseline needs it and none is open. Collective."""
    backend = next((name for name in map(library_of, baselines) if name in GROUPS), None)
    if backend is None:
        return nullcontext()
    return nullcontext() if dist.is_initialized() else torch_group(world, backend)

"""Compiling, checking and launching CUDA kernels; streams, events, graphs and waits."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import cupy
import cupyx
import numpy as np

from ..errors import UserError
from ..formats import (
    LANES,
    SHARED,
    TILE,
    Cast,
    Format,
    Microscaling,
    packed_bytes,
    shift_count,
    tiles,
)
from ..randomness import Key
from ..whole_files import once_for_all
from .cpu import CAST_NUMBERS, cast_numbers, product_numbers
from .cuda_source import OPTIONS, Fixed, codec_source, cuda_source
from .products import Arithmetic, Products

Array = Any  # cupy.ndarray
Result = TypeVar("Result")

_BLOCK = 128  # threads: CPD_WARPS warps of 32
_WARPS = 4  # of a block
_MAX_BLOCKS = 65535
FIXED_CASTS = 256  # of a process; each costs a second of NVRTC at first, and memory of the GPU
LEAST_OF_CUDA_13 = 75  # compute capability; NVIDIA's release notes of CUDA 13.0
DEFAULT_WAIT_S = 600.0  # as the time-out of a World
_most_wait = [DEFAULT_WAIT_S]  # of the process: waits are also where no World is at hand
SPIN_S, MOST_PAUSE_S = 1e-4, 1e-3  # a longer wait sleeps between two looks
NULL = np.uint64(0)  # a null pointer


def current_device() -> int:
    """Return the number of CuPy's current GPU."""
    return int(cupy.cuda.Device().id)


def use_device(place: int, chosen: int = 0) -> tuple[int, str]:
    """Make a GPU CuPy's current one, by the place of this process on its node.

    A current GPU other than number 0 was chosen by the program, and stays.
    chosen: the current GPU of another library, which comes before CuPy's
    Returns its number and its address on the node's bus; -1 and "" if there is none.
    """
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # there is no driver
        return -1, ""
    if count > 1:
        cupy.cuda.Device(chosen or current_device() or place % count).use()
    return current_device(), address_of(current_device())


def unsupported() -> str:
    """Return why kernels cannot be compiled for CuPy's current GPU, "" if they can."""
    if cupy.cuda.runtime.is_hip:
        return "has CuPy for ROCm: the kernels are CUDA's, for NVIDIA's GPUs alone"
    capability, (version, _) = int(compute_capability()), cupy.cuda.nvrtc.getVersion()
    if version >= 13 and capability < LEAST_OF_CUDA_13:
        least = f"{LEAST_OF_CUDA_13 / 10:.1f}"
        return (
            f"has a GPU of compute capability {capability / 10:.1f}, and CUDA {version} compiles "
            f"for {least} or more: pip install 'cpdhpc[gpu12]' in place of gpu13"
        )
    return ""


def can_be_shared(address: int) -> bool:
    """Whether other processes can open memory of the GPU, as MPI does by CUDA IPC."""
    try:
        cupy.cuda.runtime.ipcGetMemHandle(address)
    except cupy.cuda.runtime.CUDARuntimeError:
        return False
    return True


def address_of(device: int) -> str:
    """Return the address of a GPU on its node's bus, the same in all processes of the node."""
    return str(cupy.cuda.Device(device).pci_bus_id)


@cache
def _module(device: int) -> Any:
    return _compiled(cuda_source())


def kept_by_cupy() -> Path:
    """Return the folder of CuPy's cache of compiled kernels, by its documentation."""
    return Path(os.environ.get("CUPY_CACHE_DIR", Path.home() / ".cupy" / "kernel_cache"))


@cache
def _announce(capability: str, folder: Path) -> None:
    print(
        f"cpdhpc: compiling CUDA kernels for compute capability {capability}, up to a minute; "
        f"{folder} keeps them",
        file=sys.stderr,
        flush=True,
    )


def _compiled(source: str) -> Any:
    """Return a module of kernels for CuPy's current GPU, which one process compiles for all.

    NVRTC takes up to a minute; then CuPy keeps the result in its folder. A process that finds
    another compiling waits on a lock in that folder, and loads the result. A process that dies
    releases the lock. If the folder has no locks, each process compiles for itself.
    Raises UserError if kernels cannot be compiled for this GPU.
    """
    if why := unsupported():
        raise UserError(f"cpdhpc: this process {why}")
    module = cupy.RawModule(code=source, options=OPTIONS)
    capability, toolkit = compute_capability(), cupy.cuda.nvrtc.getVersion()
    made_of = repr((source, OPTIONS, capability, toolkit, cupy.__version__))
    name = f"cpdhpc-{hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()}"
    folder = kept_by_cupy()
    with once_for_all(folder / name, _most_wait[0]) as (is_first, done):
        if is_first:
            _announce(capability, folder)
        module.compile()
        done()
    return module


@cache
def _kernel(name: str, device: int) -> Any:
    return _module(device).get_function(name)


@cache
def _codec(fixed: Fixed, device: int) -> Any:
    """Compile the codec for one cast; casts beyond FIXED_CASTS share the kernels for all."""
    if _codec.cache_info().currsize >= FIXED_CASTS:
        return _module(device)
    return _compiled(codec_source(fixed))


@cache
def _codec_kernel(name: str, fixed: Fixed, device: int) -> Any:
    return _codec(fixed, device).get_function(name)


@cache
def _cast_of(cast: Cast, device: int) -> Array:
    found = cast_numbers(cast)
    *plain, address = found[:CAST_NUMBERS]
    table = found[CAST_NUMBERS] if address else np.empty(0, np.int32)
    numbers = np.append(np.array([*plain, table.size], np.int64), table)
    return to_device(numbers.astype(np.int32))


@cache
def _products_of(how: Products, arithmetic: Arithmetic, device: int) -> Array:
    flat = [number for part in product_numbers(how, arithmetic) for number in part]
    return to_device(np.array(flat, np.int64).astype(np.int32))


def products_on_device(how: Products, arithmetic: Arithmetic) -> Array:
    """Return the numbers of a sum of products, int32[37], on CuPy's current GPU."""
    return _products_of(how, arithmetic, current_device())


def cast_on_device(cast: Cast) -> Array:
    """Return the numbers of a cast, the size of its table and the table, int32[18 + size]."""
    return _cast_of(cast, current_device())


def launch(name: str, thread_blocks: int, *args: Any) -> None:
    """Launch a kernel on CuPy's current stream, unless thread_blocks is 0."""
    if thread_blocks:
        _run(_kernel(name, current_device()), thread_blocks, args)


def launch_codec(name: str, n: int, fixed: Fixed, *args: Any) -> None:
    """Launch a kernel of the codec, compiled for its cast, on n values in tiles."""
    if n:
        kernel = _codec_kernel(name, fixed, current_device())
        _run(kernel, tile_blocks(n), (cast_on_device(fixed.cast), np.int32(fixed.blocks), *args))


def _run(kernel: Any, thread_blocks: int, args: tuple[Any, ...]) -> None:
    kernel((min(thread_blocks, _MAX_BLOCKS),), (_BLOCK,), args)


WORD_BYTES = 4  # alignment of packed codes; reading words elsewhere would destroy the context


def check(
    name: str,
    array: Array,
    dtype: type[np.generic],
    size: int | None = None,
    alignment: int | None = None,
) -> None:
    """Raise TypeError or ValueError unless array is contiguous and of this dtype and size.

    It must lie on CuPy's current GPU, at a multiple of alignment bytes, by default of its dtype's.
    """
    if array.dtype != dtype:
        raise TypeError(f"{name}: {array.dtype} given, {np.dtype(dtype)} needed")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: a contiguous array needed")
    if size is not None and array.size != size:
        raise ValueError(f"{name}: {array.size} elements given, {size} needed")
    check_device(f"{name}:", array)
    needed = alignment or array.dtype.itemsize
    if array.size and array.data.ptr % needed:
        came = array.data.ptr
        raise ValueError(f"{name}: begins at {came}: must begin at a multiple of {needed} bytes")


def check_device(what: str, array: Array) -> None:
    """Raise ValueError unless array lies on CuPy's current GPU."""
    here, current = array.device.id, current_device()
    if here != current:
        raise ValueError(f"{what} is on GPU {here}: must be on CuPy's current one, {current}")


def check_words(name: str, array: Array, size_bytes: int) -> None:
    """Raise TypeError or ValueError unless array is packed codes, uint8[size_bytes]."""
    check(name, array, np.uint8, size_bytes, WORD_BYTES)


def check_tiles(words: Array, shifts: Array, n: int, fmt: Format) -> int:
    """Return the runs of a lane's column that have a shift each, 0: a tile has one shift.

    Raises TypeError or ValueError unless words and shifts hold n values of a format.
    """
    check_words("words", words, packed_bytes(n, fmt.bits))
    known = (LANES,) if isinstance(fmt, Microscaling) else SHARED.values()
    found = [size for size in known if shifts.size == shift_count(n, size)]
    check("shifts", shifts, np.uint8, None if found else shift_count(n, next(iter(known))))
    return TILE // LANES // found[0]


def element_blocks(n: int) -> int:
    """Return the number of thread blocks for one element per thread."""
    return -(-n // _BLOCK)


def tile_blocks(n: int) -> int:
    """Return the number of thread blocks for one tile of n values per warp."""
    return warp_blocks(tiles(n))


def warp_blocks(n: int) -> int:
    """Return the number of thread blocks for one element per warp."""
    return -(-n // _WARPS)


def key_numbers(key: Key, offset: int) -> tuple[Any, ...]:
    """Return the key of a random stream, and an offset in it, as arguments of kernels."""
    return np.uint32(key[0]), np.uint32(key[1]), np.uint64(offset)


def counts_or_null(counts: Array | None, n: int) -> Any:
    """Return counts, uint32[tiles(n), 3], or a null pointer for None."""
    if counts is None:
        return NULL
    check("counts", counts, np.uint32, 3 * tiles(n))
    return counts


Host = np.ndarray[Any, np.dtype[Any]]

DONE, NOT_READY = 0, 600  # results of cudaEventQuery; anything else is an error


class Event:
    """The work that has been submitted to a stream until now."""

    def __init__(self, stream: Any) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record(stream)

    def Test(self) -> bool:
        """Whether the work is done; raises CUDARuntimeError if it has failed.

        It has the name of the method of MPI's requests, which are waited for in the same way.
        CuPy's own Event.done mistakes an error for unfinished work.
        """
        status = cupy.cuda.runtime.eventQuery(self._event.ptr)
        if status not in (DONE, NOT_READY):
            raise cupy.cuda.runtime.CUDARuntimeError(status)
        return bool(status == DONE)

    def before(self, stream: Any) -> None:
        """Let all later work of a stream wait, on the GPU, for this work."""
        stream.wait_event(self._event)


class Streams:
    """The caller's stream and two for copies, to the host and back, of one GPU.

    Copies are ordered by events only: these streams wait for no other, nor for the null stream.
    The caller's stream is kept, and a former one until its work is done: a new stream with the same
    address would get the memory that was freed in it, which its work may still read.
    """

    def __init__(self) -> None:
        self._caller: Any = None
        self._left: list[tuple[Any, Event]] = []
        self._down = cupy.cuda.Stream(non_blocking=True)
        self._up = cupy.cuda.Stream(non_blocking=True)

    def begin(self) -> bool:
        """Take CuPy's current stream as the caller's; return whether it was another before."""
        stream = cupy.cuda.get_current_stream()
        if self._caller is not None and self._caller.ptr == stream.ptr:
            return False
        self._left = [each for each in self._left if not each[1].Test()]
        if self._caller is not None:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # another library has destroyed it
                self._left.append((self._caller, self.mark()))
        self._caller = stream
        return True

    def mark(self) -> Event:
        """Return the event of all work submitted to the caller's stream so far."""
        return Event(self._caller)

    def follow(self, event: Event) -> None:
        """Let later work of the caller's stream wait, on the GPU, for an event."""
        event.before(self._caller)

    @staticmethod
    def pinned(size_bytes: int) -> Host:
        """Return page-locked memory, uint8[size_bytes]; CuPy reuses it after it is freed."""
        host: Host = cupyx.empty_pinned(size_bytes, np.uint8)
        return host

    def start_to_host(self, array: Array, after: Event) -> tuple[Host, Event]:
        """Start to copy array, uint8[n], after an event; return pinned uint8[n] and the event."""
        host = self.pinned(array.size)
        after.before(self._down)
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        _copy(host.ctypes.data, array.data.ptr, array.size, kind, self._down)
        return host, Event(self._down)

    def start_to_device(self, host: Host, array: Array, after: Event) -> Event:
        """Start to copy pinned host, uint8[n], into array after an event; return the event."""
        after.before(self._up)
        kind = cupy.cuda.runtime.memcpyHostToDevice
        _copy(array.data.ptr, host.ctypes.data, array.size, kind, self._up)
        return Event(self._up)


def _copy(to: int, source: int, size_bytes: int, kind: int, stream: Any) -> None:
    cupy.cuda.runtime.memcpyAsync(to, source, size_bytes, kind, stream.ptr)


class Graphs:
    """Captures launches as CUDA graphs, and keeps the memory that they read and write.

    A graph has fixed addresses and arguments of kernels and copies. So memory that is allocated
    during the capture, on the GPU or pinned, is kept for as long as this object; CuPy's pool would
    reuse it. Capturing has a stream of its own, as the null stream cannot be captured; a graph goes
    to the stream that is current when it is launched. Waiting for the GPU, or copying pageable
    memory, cannot be captured and is an error. The launches must have run once before: drivers for
    CUDA before 12.3 cannot load kernels during a capture.
    """

    def __init__(self) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._kept: list[Any] = []

    def rehearse(self, launches: Callable[[], Result]) -> Result:
        """Call launches, wait until the GPU has done them, and return its result. Raises as wait.

        They begin after the work of CuPy's current stream, so that they read complete arrays.
        """
        given = Event(cupy.cuda.get_current_stream())
        with self._stream:
            given.before(self._stream)
            found = launches()
            wait(Event(self._stream))
        return found

    def capture(self, launches: Callable[[], Result]) -> tuple[Any, Result]:
        """Return the graph of the work that launches submits, and the result of launches.

        The graph's launch() submits all of it to CuPy's current stream in one call.
        """
        with self._stream, cupy.cuda.using_allocator(self._keep(cupy.cuda.get_allocator())):
            self._stream.begin_capture()  # relaxed, as CuPy does it: memory may be taken
            try:
                found = launches()
            except BaseException:
                with suppress(cupy.cuda.runtime.CUDARuntimeError):  # the capture has failed
                    self._stream.end_capture()
                raise
            return self._stream.end_capture(), found

    def pinned(self, size_bytes: int) -> Host:
        """Return page-locked memory, uint8[size_bytes], that is kept."""
        return self._keep(Streams.pinned)(size_bytes)

    def _keep(self, take: Callable[[int], Result]) -> Callable[[int], Result]:
        def kept(size_bytes: int) -> Result:
            self._kept.append(take(size_bytes))
            found: Result = self._kept[-1]
            return found

        return kept


def copy_down(array: Array, host: Host) -> None:
    """Copy array, uint8[n], to pinned host, uint8[n], in CuPy's current stream."""
    kind, stream = cupy.cuda.runtime.memcpyDeviceToHost, cupy.cuda.get_current_stream()
    _copy(host.ctypes.data, array.data.ptr, array.size, kind, stream)


def copy_up(host: Host, array: Array) -> None:
    """Copy pinned host, uint8[n], to array, uint8[n], in CuPy's current stream."""
    kind, stream = cupy.cuda.runtime.memcpyHostToDevice, cupy.cuda.get_current_stream()
    _copy(array.data.ptr, host.ctypes.data, array.size, kind, stream)


def compute_capability() -> str:
    """Return the compute capability of CuPy's current GPU without its point, as "90"."""
    return str(cupy.cuda.Device().compute_capability)


def device_name() -> str:
    """Return the name of CuPy's current GPU, "" if there is none."""
    try:
        return cupy.cuda.runtime.getDeviceProperties(current_device())["name"].decode()
    except cupy.cuda.runtime.CUDARuntimeError:
        return ""


def to_device(x: Any) -> Array:
    """Return a NumPy array's copy on the GPU, ready for any stream.

    The copy has a stream of its own, as the caller's may be busy for long.
    """
    with cupy.cuda.Stream(non_blocking=True) as stream:
        copy = cupy.asarray(x)
        wait(Event(stream))
    return copy


def zeros(size_bytes: int) -> Array:
    """Return memory of the GPU, uint8[size_bytes], for CuPy's current stream."""
    return cupy.zeros(size_bytes, np.uint8)


def wait_at_most(timeout_s: float) -> None:
    """Set the time-out of wait, to that of a World which is about to use the GPU."""
    _most_wait[0] = timeout_s


def wait(event: Event) -> None:
    """Wait until the GPU has reached an event; all waits for a GPU are here.

    It polls at first, and then sleeps between two looks for a twentieth of the time so far, so that
    the core is free and the wait at most a twentieth longer.
    Raises TimeoutError after the time-out of the last World that used the GPU: CUDA itself would
    wait forever for a GPU that hangs.
    """
    start, most_s = time.monotonic(), _most_wait[0]
    while not event.Test():
        waited_s = time.monotonic() - start
        if waited_s > SPIN_S:
            time.sleep(min(waited_s / 20, MOST_PAUSE_S))
        if waited_s > most_s:
            raise TimeoutError(f"GPU {current_device()}: is at work for more than {most_s:g} s")


def wait_for_stream() -> None:
    """Wait for all work of CuPy's current stream. Raises as wait."""
    wait(Event(cupy.cuda.get_current_stream()))


def to_host(array: Array) -> Host:
    """Return a copy in the host's memory, once CuPy's current stream is done with the array.

    Raises as wait.
    """
    wait_for_stream()
    host: Host = array.get()
    return host


def finished(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls run and waits for CuPy's current stream. Raises as wait."""

    def call() -> Any:
        found = run()
        wait_for_stream()
        return found

    return call


def from_dlpack(x: Any) -> Array:
    """Return the memory of another library's array; CuPy's current stream waits for its writer."""
    return cupy.from_dlpack(x)


@contextmanager
def in_stream(device: int, address: int) -> Iterator[None]:
    """Make a GPU and a stream of another library's CuPy's current ones, in this thread's block."""
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(address, device):
        yield

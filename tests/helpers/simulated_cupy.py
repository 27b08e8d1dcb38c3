"""CuPy's names over the simulated GPU: as much of them as cpdhpc uses, and as strict as CuPy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import compiled_kernels
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from simulated_gpu import Error, Event, Gpu, Owner, Stream

OURS = ("gpu", "gpu_runtime")  # modules of cpdhpc.ops that import cupy


CUDA, LEGACY = 2, 1  # DLPack's numbers of the device, and of the null stream


def without_subnormals(array: Any) -> Any:
    """Return what CuPy's own arithmetic makes of float32, as it is compiled with -ftz=true."""
    if getattr(array, "dtype", None) != np.float32:
        return array
    tiny = np.abs(array) < np.finfo(np.float32).tiny
    return np.where(tiny, np.float32(0), array)


class Arrays:
    """The array functions of one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def give(self, work: Callable[[], Any]) -> None:
        self.gpu.give(work)

    def empty(self, shape: Any, dtype: Any = float) -> ndarray:
        shape, kind = np.empty(shape, []).shape if shape == () else shape, np.dtype(dtype)
        size = int(np.prod(shape, dtype=int))
        owner = self.gpu.allocator(size * kind.itemsize)
        return ndarray(self, owner, owner.raw.view(kind).reshape(shape))

    def zeros(self, shape: Any, dtype: Any = float) -> ndarray:
        out = self.empty(shape, dtype)
        out[...] = 0
        return out

    def empty_like(self, a: ndarray, dtype: Any = None, *, shape: Any = None) -> ndarray:
        return self.empty(a.shape if shape is None else shape, dtype or a.dtype)

    def zeros_like(self, a: ndarray, dtype: Any = None, *, shape: Any = None) -> ndarray:
        return self.full_like(a, 0, dtype, shape=shape)

    def full_like(
        self, a: ndarray, fill_value: Any, dtype: Any = None, *, shape: Any = None
    ) -> ndarray:
        out = self.empty_like(a, dtype, shape=shape)
        out[...] = fill_value
        return out

    def arange(self, stop: int, dtype: Any = int) -> ndarray:
        return self.asarray(np.arange(stop, dtype=dtype))

    def concatenate(self, arrays: Any) -> ndarray:
        return self.move(lambda *each: np.concatenate(each), *arrays)

    def stack(self, arrays: Any, axis: int = 0) -> ndarray:
        return self.move(lambda *each: np.stack(each, axis), *arrays)

    def sort(self, a: ndarray, axis: int = -1) -> ndarray:
        return self.move(lambda each: np.sort(each, axis), a)

    def cumsum(self, a: ndarray, dtype: Any) -> ndarray:
        return self.move(lambda each: np.cumsum(each, dtype=dtype), a)

    def searchsorted(self, a: ndarray, v: ndarray) -> ndarray:
        if a.dtype != v.dtype:
            raise TypeError("Both arrays must have the same type")  # as CuPy's
        return self.compute(np.searchsorted, a, v)

    def flatnonzero(self, a: ndarray) -> ndarray:
        self.gpu.finish(self.gpu.current[-1])  # how many there are has to be known
        return self.asarray(np.flatnonzero(a.memory_view))

    def packbits(self, a: ndarray) -> ndarray:
        return self.move(np.packbits, a)

    def unpackbits(self, a: ndarray) -> ndarray:
        return self.move(np.unpackbits, a)

    def atleast_1d(self, a: ndarray) -> ndarray:
        return a if a.ndim else a.reshape(1)

    def move(self, function: Callable[..., Any], *inputs: ndarray) -> ndarray:
        """Give the stream what does no arithmetic with float32: subnormal numbers stay."""
        given = [each.memory_view for each in inputs]  # a NumPy array has none, as in CuPy
        like = function(*map(np.zeros_like, given))
        out = self.empty(like.shape, like.dtype)
        target = out.memory_view
        self.give(lambda: np.copyto(target, function(*given)))
        return out

    def asarray(self, a: Any) -> ndarray:
        if isinstance(a, ndarray):
            return a
        copy = np.array(a)  # CuPy copies to pinned memory at once
        if self.gpu.current[-1].is_capturing():
            raise RuntimeError("the current stream is capturing: synchronous calls are not allowed")
        out = self.empty(copy.shape, copy.dtype)
        view = out.memory_view
        self.give(lambda: np.copyto(view, copy))
        return out

    def from_dlpack(self, a: Any) -> ndarray:
        """Take what says where its memory is, once the current stream is behind its writer's."""
        assert a.__dlpack_device__() == (CUDA, self.gpu.device_id)
        values = a.__dlpack__(stream=self.gpu.current[-1].ptr or LEGACY)
        raw = values.reshape(-1).view(np.uint8) if values.size else np.empty(0, np.uint8)
        owner = Owner(raw, self.gpu.device_id, None, of=a)
        self.gpu.foreign.add(owner)
        return ndarray(self, owner, values)

    def array(self, a: Any, dtype: Any = None) -> ndarray:
        return a.copy() if isinstance(a, ndarray) else self.asarray(np.array(a, dtype))

    def may_share_memory(self, a: ndarray, b: ndarray) -> bool:
        return np.may_share_memory(a.memory_view, b.memory_view)

    def copyto(self, to: ndarray, source: ndarray) -> None:
        to[...] = source

    def shape(self, a: ndarray) -> tuple[int, ...]:
        return a.shape

    def compute(self, function: Callable[..., Any], *inputs: Any, out: Any = None) -> ndarray:
        """Give the stream an operation of NumPy's on arrays and numbers."""
        for each in inputs:
            if isinstance(each, np.ndarray) and each.ndim:
                raise TypeError("CuPy does not mix its arrays with NumPy's")
        given = [each.memory_view if isinstance(each, ndarray) else each for each in inputs]
        if out is None:
            like = function(*(np.ones_like(each) for each in given))
            out = self.empty(np.shape(like), np.asarray(like).dtype)
        target = out.memory_view

        def work() -> None:
            with np.errstate(all="ignore"):
                target[...] = without_subnormals(function(*map(without_subnormals, given)))

        self.give(work)
        return out


class ndarray(NDArrayOperatorsMixin):
    """An array in the GPU's memory: what it holds is known when its stream has come so far."""

    __array_priority__ = 100

    def __init__(self, arrays: Arrays, owner: Owner, memory_view: np.ndarray) -> None:
        self.arrays, self.owner, self.memory_view = arrays, owner, memory_view
        self.shape, self.dtype, self.size = memory_view.shape, memory_view.dtype, memory_view.size
        self.nbytes, self.strides, self.ndim = (
            memory_view.nbytes, memory_view.strides, memory_view.ndim,
        )  # fmt: skip
        self.flags = SimpleNamespace(c_contiguous=memory_view.flags.c_contiguous)
        self.data = SimpleNamespace(ptr=memory_view.__array_interface__["data"][0])
        self.device = SimpleNamespace(id=owner.device)

    def like(self, memory_view: np.ndarray) -> ndarray:
        assert np.may_share_memory(memory_view, self.memory_view) or not memory_view.size
        return ndarray(self.arrays, self.owner, memory_view)

    def reshape(self, *shape: Any) -> ndarray:
        if not self.flags.c_contiguous:
            return self.copy().reshape(*shape)
        return self.like(self.memory_view.reshape(*shape))

    def view(self, dtype: Any) -> ndarray:
        return self.like(self.memory_view.view(dtype))

    def __getitem__(self, key: Any) -> ndarray:
        if isinstance(key, ndarray):
            if key.dtype == bool:  # how many are chosen has to be known
                self.arrays.gpu.finish(self.arrays.gpu.current[-1])
                key = self.arrays.asarray(np.flatnonzero(key.memory_view))
            return self.arrays.move(lambda x, at: x[at], self, key)
        return self.like(
            self.memory_view[key, ...] if isinstance(key, int) else self.memory_view[key]
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("non-scalar numpy.ndarray cannot be used for fill")
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, ndarray) for each in keys):
            self.scatter(keys, value)
            return
        target = self.memory_view[key]
        given = isinstance(value, ndarray)
        source = value.memory_view if given else np.asarray(value).astype(self.dtype)  # as fill
        self.arrays.give(lambda: np.copyto(target, source))

    def scatter(self, keys: tuple[ndarray, ...], value: Any) -> None:
        """Overwrite values by arrays of indices."""
        target, views = self.memory_view, [each.memory_view for each in keys]
        source = value.memory_view if isinstance(value, ndarray) else value
        self.arrays.give(lambda: target.__setitem__(tuple(views), source))

    def __len__(self) -> int:
        return len(self.memory_view)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def copy(self) -> ndarray:
        return self.arrays.move(np.copy, self)

    def astype(self, dtype: Any) -> ndarray:
        return self.arrays.move(lambda x: x.astype(dtype), self)

    @property
    def T(self) -> ndarray:
        return self.like(self.memory_view.T)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def argmax(self, axis: int) -> ndarray:
        return self.arrays.compute(lambda x: np.argmax(x, axis), self)

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        self.arrays.gpu.finish(self.arrays.gpu.current[-1])
        if out is None:
            return self.memory_view.copy()
        if not out.flags.c_contiguous or (out.shape, out.dtype) != (self.shape, self.dtype):
            raise ValueError("get: out must be C-contiguous, and of this shape and dtype")
        out[...] = self.memory_view
        return out

    def set(self, array: np.ndarray) -> None:
        if not self.flags.c_contiguous or (array.shape, array.dtype) != (self.shape, self.dtype):
            raise ValueError("set: array must be contiguous, and of this shape and dtype")
        if self.arrays.gpu.current[-1].is_capturing():
            raise RuntimeError("the current stream is capturing: synchronous calls are not allowed")
        target = self.memory_view  # pageable memory may be read as late as pinned (HMM, GH200)
        self.arrays.give(lambda: np.copyto(target, array))

    def dlpack(self, stream: int) -> np.ndarray:
        """As __dlpack__, under which name MPI would find it before __cuda_array_interface__."""
        event = Event(self.arrays.gpu)
        event.record(self.arrays.gpu.current[-1])
        self.arrays.gpu.streams[0 if stream == LEGACY else stream].wait_event(event)
        whole = np.asarray(self.owner)  # which keeps the owner
        start = self.data.ptr - whole.ctypes.data if self.size else 0
        return np.ndarray(self.shape, self.dtype, whole.data, start, self.strides)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self.arrays.gpu.aware:
            raise AssertionError("MPI that knows no GPU reads its memory: segmentation fault")
        return self.memory_view.__array_interface__ | {"version": 3, "strides": None}

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        ours = getattr(self.arrays, function.__name__, None)
        if ours is None or not all(issubclass(each, ndarray) for each in types):
            return NotImplemented
        return ours(*args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))
        if method != "__call__" or kwargs:
            return NotImplemented
        return self.arrays.compute(ufunc, *inputs, out=out[0])

    def sum(self, axis: int | None = None, dtype: Any = None) -> ndarray:
        return self.arrays.compute(lambda x: np.sum(x, axis, dtype), self)

    def any(self) -> ndarray:
        return self.arrays.compute(np.any, self)

    def all(self) -> ndarray:
        return self.arrays.compute(np.all, self)

    def max(self, axis: int | None = None) -> ndarray:
        return self.arrays.compute(lambda x: np.max(x, axis), self)

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())


ndarray.__module__ = "cupy"  # as backend_of looks at it


class Device:
    """cupy.cuda.Device: the current one, or one by its number."""

    def __init__(self, gpu: Gpu, number: int | None) -> None:
        self.gpu, self.id = gpu, gpu.device_id if number is None else number
        assert self.id < gpu.count
        self.compute_capability = str(gpu.capability)
        self.pci_bus_id = f"0000:{gpu.first + self.id:02x}:00.0"

    def use(self) -> None:
        self.gpu.device_id = self.id

    def __enter__(self) -> Device:
        self.before, self.gpu.device_id = self.gpu.device_id, self.id
        return self

    def __exit__(self, *args: object) -> None:
        self.gpu.device_id = self.before


class External:
    """cupy.cuda.ExternalStream: another library's stream."""

    def __init__(self, stream: Stream, device: int) -> None:
        self.stream = stream
        assert not stream.ptr or stream.device_id == device

    def __enter__(self) -> Stream:
        return self.stream.__enter__()

    def __exit__(self, *args: object) -> None:
        self.stream.__exit__(*args)


class RawModule:
    """cupy.RawModule: kernels by name, as late as all work."""

    def __init__(self, arrays: Arrays, code: str, options: tuple[str, ...]) -> None:
        self.arrays, self.code = arrays, code

    def compile(self) -> None:
        """Compile, or load what CuPy's folder has."""
        self.arrays.gpu.compiled += 1

    def get_function(self, name: str) -> Callable[..., None]:
        return compiled_kernels.kernel_of(self.arrays.gpu, self.code, name)


def modules(gpu: Gpu) -> tuple[ModuleType, ModuleType]:
    """Return modules cupy and cupyx of a GPU."""
    cupy, cupyx, arrays = ModuleType("cupy"), ModuleType("cupyx"), Arrays(gpu)
    names = (
        "empty", "zeros", "empty_like", "zeros_like", "full_like", "arange", "concatenate",
        "stack", "sort", "cumsum", "flatnonzero", "packbits", "unpackbits", "atleast_1d",
        "array", "asarray", "may_share_memory", "shape", "copyto", "from_dlpack",
    )  # fmt: skip
    vars(cupy).update({name: getattr(arrays, name) for name in names})

    def count() -> int:
        if not gpu.count:
            raise Error(100)
        return gpu.count

    def handle(address: int) -> bytes:
        if gpu.closed:
            raise Error(1)
        return address.to_bytes(64, "little")

    runtime = SimpleNamespace(
        CUDARuntimeError=Error, memcpyHostToDevice=1, memcpyDeviceToHost=2,
        eventQuery=gpu.query, memcpyAsync=gpu.copy,
        getDeviceProperties=lambda number: {"name": b"simulated"},
        getDeviceCount=count, is_hip=False, ipcGetMemHandle=handle,
    )  # fmt: skip
    vars(cupy).update(
        ndarray=ndarray,
        __version__="14.0.0",
        asnumpy=lambda a: a.get(),
        RawModule=lambda code, options: RawModule(arrays, code, options),
        cuda=SimpleNamespace(
            Stream=lambda non_blocking: Stream(gpu),
            ExternalStream=lambda address, device: External(gpu.streams[address], device),
            Event=lambda disable_timing: Event(gpu),
            Device=lambda number=None: Device(gpu, number),
            get_current_stream=lambda: gpu.current[-1],
            get_allocator=lambda: gpu.allocator,
            using_allocator=gpu.using_allocator,
            runtime=runtime,
            nvrtc=SimpleNamespace(getVersion=lambda: (gpu.toolkit, 0)),
        ),
    )
    cupy.__spec__ = ModuleSpec("cupy", None)
    vars(cupyx).update(empty_pinned=gpu.pinned)
    return cupy, cupyx


@contextmanager
def simulated(seed: int = 0) -> Iterator[tuple[Gpu, ModuleType]]:
    """Let cpdhpc find a simulated GPU; yield it and its cupy."""
    ops = importlib.import_module("cpdhpc.ops")
    gpu = Gpu(seed)
    cupy, cupyx = modules(gpu)
    ours = {f"cpdhpc.ops.{name}": sys.modules.pop(f"cpdhpc.ops.{name}", None) for name in OURS}
    before = {name: sys.modules.get(name) for name in ("cupy", "cupyx")} | ours
    attributes = {name: vars(ops).pop(name, None) for name in OURS}
    sys.modules.update(cupy=cupy, cupyx=cupyx)
    runtime = importlib.import_module("cpdhpc.ops.gpu_runtime")
    # A look does some of the work here: who sleeps in between only makes tests slow.
    vars(runtime).update(MOST_PAUSE_S=0.0, kept_by_cupy=lambda: Path(gpu.folder))
    try:
        yield gpu, cupy
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        for name, module in attributes.items():
            vars(ops).pop(name, None)
            if module is not None:
                setattr(ops, name, module)

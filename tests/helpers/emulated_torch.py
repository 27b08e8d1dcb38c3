"""CUDA tensors of a torch without CUDA, on the simulated GPU: pytest -p emulated_torch.

Their values are a CPU tensor's. An operation is done at once, but what it writes is garbage until
the current stream has come to it: who reads in another stream without an event reads that.
Backward runs in the engine's thread of the device, as with CUDA.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import simulated_gpu
from compiled_kernels import built, named
from simulated_gpu import GARBAGE, Event, Gpu

HERE = Path(__file__).parent


def guard(lib: Path) -> Path:
    """Return cuda_guard.cpp compiled against this torch."""
    flags = ["-std=c++20", "-O0", f"-I{lib.parent / 'include'}", f"-L{lib}"]
    torch_s = str((lib / "libc10.so").stat().st_mtime_ns)
    return built((HERE / "cuda_guard.cpp").read_bytes(), torch_s, *flags, "-lc10", "-ltorch_cpu")


def load() -> None:
    """Load the guard before torch looks for CUDA, which it does once."""
    assert "torch" not in sys.modules, "torch was imported before -p emulated_torch"
    os.environ["OMP_NUM_THREADS"] = "1"  # of the engine's thread too, which sums else by several
    found = find_spec("torch")
    assert found and found.origin, "torch is not installed"
    lib = Path(found.origin).parent / "lib"
    for path in [*sorted(lib.glob("libgomp*")), lib / "libc10.so", lib / "libtorch_cpu.so"]:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(guard(lib)), ctypes.RTLD_GLOBAL)


load()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

from cpdhpc.torch import averaging  # noqa: E402

DEVICE = torch.device("cuda", 0)
ON = SimpleNamespace(gpu=Gpu(), kept=set())  # the GPU of now, and torch's streams


class Block:
    """Memory that tensors lie in, and arrays of theirs, for as long as there are any."""


blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()  # by address


def block_of(values: torch.Tensor) -> Block:
    """Return the block that values lie in, a new one of torch's pool for the current stream."""
    storage = values.untyped_storage()
    address = storage.data_ptr()
    block = blocks.get(address)
    if block is None:
        block = blocks[address] = Block()
        if address:
            stream = ON.gpu.of_torch()[-1]
            ON.gpu.hand_out("torch", stream)
            freed = ON.gpu.let_go.setdefault(("torch", stream.ptr), [])
            weakref.finalize(block, free, storage, freed).atexit = False
    return block


def free(storage: torch.UntypedStorage, freed: list[np.ndarray]) -> None:
    """Give memory back to a pool: it may be another tensor's next."""
    raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    raw.storage = storage  # which keeps it
    freed.append(np.frombuffer(raw, np.uint8))


def dense(values: torch.Tensor) -> torch.Tensor:
    """Return the memory of values: of a sparse tensor those that are there."""
    return values if values.layout is torch.strided else values._values()


class CudaTensor(torch.Tensor):
    """A tensor on cuda:0. values: the same on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> CudaTensor:
        place: dict[str, Any] = {"layout": values.layout}  # of gradients of sparse embeddings
        if values.layout is torch.strided:
            place = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), dtype=values.dtype, device=DEVICE, **place
        )
        made.values_on_gpu, made.block = values, block_of(dense(values))
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_on_gpu"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: None, size: Any, stride: Any) -> CudaTensor:
        return CudaTensor(inner["values_on_gpu"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return operate(function, args, kwargs or {})

    def __repr__(self) -> str:
        return f"cuda({self.values_on_gpu})"

    def numpy(self, *args: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def data_ptr(self) -> int:
        address = self.values_on_gpu.data_ptr()
        named[address] = self.values_on_gpu
        return address

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values_on_gpu.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> np.ndarray:
        """Give the memory away, once a stream is behind the current one."""
        event = current().record_event()
        ON.gpu.streams[0 if stream == 1 else stream].wait_event(event)
        return self.values_on_gpu.detach().numpy()


def from_dlpack(array: Any) -> torch.Tensor:
    """torch.utils.dlpack.from_dlpack, of CuPy's arrays."""
    stream = current().cuda_stream
    values = torch.from_numpy(array.dlpack(stream or 1))
    block = blocks.setdefault(values.untyped_storage().data_ptr(), Block())  # not of torch's pool
    made = CudaTensor(values)
    assert made.block is block
    return made


def on_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def operate(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation of torch, in the current stream where it is the GPU's."""
    name, given = function._schema.name, tree_leaves((args, kwargs))
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    ours = [each for each in tensors if isinstance(each, CudaTensor)]
    target = kwargs.get("device")
    made = bool(ours) if target is None else on_gpu(target)
    if not ours and not made:
        return function(*args, **kwargs)
    if name not in ("aten::copy_", "aten::_to_copy"):
        for each in tensors:
            if not isinstance(each, CudaTensor) and each.dim() and ours:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two "
                    f"devices, cuda:0 and cpu! ({name})"
                )
    ON.gpu.finish(ON.gpu.of_torch()[-1])
    if target is not None and torch.device(target).type != "meta":
        kwargs = kwargs | {"device": torch.device("cpu")}
    of = {id(each.values_on_gpu): each for each in ours}
    with torch.no_grad():
        plain = tree_map_only(CudaTensor, lambda each: each.values_on_gpu, (args, kwargs))
        out = function(*plain[0], **plain[1])
        if name == "aten::copy_":
            if isinstance(args[0], CudaTensor):
                hide(plain[0][0])
            return args[0]
        if not made:
            return out
        for values in written(function, *plain, out):
            hide(values)

    def wrapped(values: torch.Tensor) -> torch.Tensor:
        return of[id(values)] if id(values) in of else CudaTensor(values)

    return tree_map_only(torch.Tensor, wrapped, out)


def written(function: Any, args: Any, kwargs: dict[str, Any], out: Any) -> list[torch.Tensor]:
    """Return what an operation has written: results that are no views, and arguments."""
    schema, found = function._schema, []
    outs = out if isinstance(out, tuple) else (out,)
    for what, value in zip(schema.returns, outs, strict=False):
        found += tree_leaves(value) if what.alias_info is None else []
    for i, what in enumerate(schema.arguments):
        if what.alias_info is not None and what.alias_info.is_write:
            found += tree_leaves(args[i] if i < len(args) else kwargs.get(what.name))
    return [each for each in found if isinstance(each, torch.Tensor)]


def hide(values: torch.Tensor) -> None:
    """Let values be garbage until the current stream has come so far."""
    values = dense(values)
    if not values.numel():
        return
    true = values.clone()
    junk = np.full(true.nbytes, GARBAGE, np.uint8)
    values.copy_(torch.from_numpy(junk).view(true.dtype).reshape(true.shape))

    def come() -> None:
        with torch.no_grad():
            values.copy_(true)

    ON.gpu.give(come, ON.gpu.of_torch()[-1])


def whole(tensor: torch.Tensor, real: Any = averaging._is_whole) -> bool:
    """Whether a tensor is one of CUDA's, or one that the reducer takes as whole."""
    return isinstance(tensor, CudaTensor) or real(tensor)


class Cuda(TorchDispatchMode):
    """Lets functions that make tensors make some on cuda:0."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return operate(function, args, kwargs or {})


class Stream:
    """torch.cuda.Stream over one of the simulated GPU."""

    def __init__(self, device: Any = None, of: simulated_gpu.Stream | None = None) -> None:
        self.of = simulated_gpu.Stream(ON.gpu) if of is None else of
        ON.kept.add(self.of)  # torch's are of a pool, and are destroyed never
        self.cuda_stream = self.of.ptr

    def record_event(self) -> Event:
        event = Event(ON.gpu)
        event.record(self.of)
        return event

    def wait_event(self, event: Event) -> None:
        self.of.wait_event(event)

    def wait_stream(self, other: Stream) -> None:
        self.of.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.of.synchronize()


def current(device: Any = None) -> Stream:
    """torch.cuda.current_stream: this thread's, which CuPy's is only where it is told so."""
    return Stream(of=ON.gpu.of_torch()[-1])


@contextmanager
def stream_in_use(stream: Stream) -> Iterator[None]:
    """torch.cuda.stream; in other threads than the test's, functions make tensors there too."""
    ON.gpu.of_torch().append(stream.of)
    try:
        with Cuda():
            yield
    finally:
        ON.gpu.of_torch().pop()


@contextmanager
def device_in_use(device: Any) -> Iterator[None]:
    """torch.cuda.device."""
    assert torch.device(device) == DEVICE
    yield


class Future:
    """torch.futures.Future of a device: who waits is behind the stream that set the result."""

    def __init__(self, *, devices: list[torch.device] | None = None) -> None:
        self.done, self.devices = threading.Event(), devices

    def set_result(self, value: torch.Tensor) -> None:
        self.value, self.event = value, current().record_event()
        self.done.set()

    def wait(self) -> torch.Tensor:
        assert self.done.wait(600)
        if self.devices:
            current().wait_event(self.event)
        return self.value


REPLACED = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda number: None,
    "is_bf16_supported": lambda *args, **kwargs: True,
    "_lazy_init": lambda: None,
    "manual_seed": lambda number: torch.default_generator.manual_seed(number) and None,
    "current_stream": current,
    "stream": stream_in_use,
    "device": device_in_use,
    "Stream": Stream,
}


@contextmanager
def cuda(gpu: Gpu) -> Iterator[None]:
    """Let torch have tensors on a simulated GPU."""
    before, ON.gpu, ON.kept = ON.gpu, gpu, set()
    try:
        with (
            patch.multiple(torch.cuda, **REPLACED),
            patch.object(torch.utils.dlpack, "from_dlpack", from_dlpack),
            patch.object(torch.futures, "Future", Future),
            # CUDA's own tensors have no dispatch; those here do, and are whole all the same.
            patch.object(averaging, "_is_whole", whole),
            Cuda(),
        ):
            yield
    finally:
        ON.gpu = before

"""Tensors of torch as arrays in the same memory, worked on in the same stream of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import numpy.typing as npt
import torch

from . import on_gpu

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = npt.NDArray[Any]

CPU = torch.device("cpu")
PLACES = ("cpu", "cuda")  # types of devices whose memory arrays can share


def array_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a dense tensor as an array: NumPy's, or CuPy's where it is on a GPU."""
    plain = tensor.detach()
    if plain.is_cpu:
        return plain.numpy()
    from . import gpu_runtime

    return gpu_runtime.from_dlpack(plain)


def tensor_of(array: Array) -> torch.Tensor:
    """Return the memory of an array of NumPy or CuPy as a tensor."""
    return torch.utils.dlpack.from_dlpack(array) if on_gpu(array) else torch.from_numpy(array)


def values_of(tensor: torch.Tensor) -> HostArray:
    """Return a tensor's values as a NumPy array: its memory, or a copy where it is on a GPU.

    Raises TimeoutError as gpu_runtime.wait: torch itself waits for ever for a GPU that hangs.
    """
    await_device(tensor.device)
    values: HostArray = tensor.detach().cpu().numpy()
    return values


def listed(tensor: torch.Tensor) -> list[Any]:
    """Return the values of any dtype as a flat list of numbers. Raises as values_of."""
    await_device(tensor.device)
    return list(tensor.detach().flatten().tolist())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8[bytes], a tensor's values in their order, of any strides and dtype."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return uint8[bytes], the values of tensors one after the other."""
    return torch.cat([as_bytes(x) for x in tensors]) if tensors else torch.empty(0).byte()


def of_bytes(data: HostArray, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the dtypes and shapes of others, of the bytes of such; on the CPU."""
    parts = torch.split(torch.from_numpy(data), [x.nbytes for x in like])
    return [  # views must be aligned, and NumPy's empty arrays have strides of 0
        part.clone(memory_format=torch.contiguous_format).view(x.dtype).reshape(x.shape)
        for part, x in zip(parts, like, strict=True)
    ]


def await_device(device: torch.device) -> None:
    """Wait until a device has done what torch's current stream was given. Raises as values_of."""
    if device.type == "cuda":
        from . import gpu_runtime

        with in_stream(device):
            gpu_runtime.wait_for_stream()


def put(values: torch.Tensor, view: Array | torch.Tensor) -> None:
    """Copy floats to where a float32 array or, on a GPU, a tensor has them."""
    if isinstance(view, torch.Tensor):
        view.copy_(values.detach())
    else:  # large ones in half the time of a tensor's copy_
        view[...] = values.detach().float().numpy()


def check_device(what: str, device: torch.device) -> None:
    """Raise ValueError, which begins with what, where no arrays share a device's memory."""
    if device.type not in PLACES:
        raise ValueError(f"{what} is on {device}: should be on cpu or cuda")
    if device.type == "cuda" and find_spec("cupy") is None:
        raise ValueError(f"{what} is on {device}: needs CuPy: pip install 'cpdhpc[gpu]'")


def seed(number: int, device: torch.device) -> None:
    """Let torch draw by a seed, on the CPU and on a device."""
    # torch.manual_seed would also write down the stack for three devices.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def in_stream(device: torch.device) -> AbstractContextManager[None]:
    """Let CuPy work as torch does in the block: on a device, in torch's current stream of it."""
    if device.type == "cpu":
        return nullcontext()
    from . import gpu_runtime

    assert device.index is not None, "tensors know the number of their GPU"
    stream = torch.cuda.current_stream(device)
    return gpu_runtime.in_stream(device.index, int(stream.cuda_stream))


class OwnStream:
    """A stream of a thread's own on a device, beside the one that backward is in.

    On the CPU it is nothing: what was called has been done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Return the event that all work of torch's current stream until now is done."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Let torch and CuPy work in this stream in the block, after an event of mark."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            with in_stream(self.device):
                yield

    def join(self) -> None:
        """Let torch's current stream wait for all that this one was given."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

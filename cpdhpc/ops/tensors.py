"""Tensors of torch as arrays in the same memory, used in the same stream of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import numpy.typing as npt
import torch
from torch.autograd import forward_ad

from . import on_gpu

Array = Any  # numpy.ndarray or cupy.ndarray
HostArray = npt.NDArray[Any]

CPU = torch.device("cpu")
PLACES = ("cpu", "cuda")  # device types with memory that arrays can share


def array_of(tensor: torch.Tensor) -> Array:
    """Return the memory of a dense tensor as an array: NumPy's, or CuPy's if it is on a GPU."""
    plain = tensor.detach()
    if plain.is_cpu:
        return plain.numpy()
    from . import gpu_runtime

    return gpu_runtime.from_dlpack(plain)


def tensor_of(array: Array) -> torch.Tensor:
    """Return the memory of an array of NumPy or CuPy as a tensor."""
    return torch.utils.dlpack.from_dlpack(array) if on_gpu(array) else torch.from_numpy(array)


def values_of(tensor: torch.Tensor) -> HostArray:
    """Return a tensor's values as a NumPy array: its memory, or a copy if it is on a GPU.

    Raises TimeoutError as gpu_runtime.wait: torch itself waits forever for a GPU that hangs.
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
    """Return tensors on the CPU from their bytes, with the dtypes and shapes of others."""
    parts = torch.split(torch.from_numpy(data), [x.nbytes for x in like])
    return [  # views must be aligned, and NumPy's empty arrays have strides of 0
        part.clone(memory_format=torch.contiguous_format).view(x.dtype).reshape(x.shape)
        for part, x in zip(parts, like, strict=True)
    ]


def _differentiates(x: torch.Tensor) -> bool:
    """Whether torch differentiates by a tensor, in either mode; else no Function is needed.

    Within torch.func.grad a tensor requires a gradient, within jvp it has a tangent.
    """
    asked = x.requires_grad and torch.is_grad_enabled()
    return asked or forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


class _Straight(torch.autograd.Function):
    """A rounding of values whose derivative is taken as 1."""

    @staticmethod
    def forward(x: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounded(x)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None

    @staticmethod
    def jvp(context: Any, *tangents: Any) -> torch.Tensor:
        tangent: torch.Tensor = tangents[0].clone()
        return tangent


def straight_through(
    x: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return x rounded, a new tensor; derivatives pass unchanged (straight-through estimator)."""
    if not _differentiates(x):
        return rounded(x)
    found: torch.Tensor = _Straight.apply(x, rounded)  # type: ignore[no-untyped-call]
    return found


Held = tuple[Any, Any]  # formats of all values of two factors
Multiply = Callable[[torch.Tensor, torch.Tensor, Held, int], torch.Tensor]


class _Product(torch.autograd.Function):
    """A product of matrices; both of its gradients are products by the same arithmetic.

    number: 0; for the gradients of product n 2n + 1 and 2n + 2, as keys of random bits
    """

    @staticmethod
    def forward(
        x: torch.Tensor, y: torch.Tensor, multiply: Multiply, held: Held, of_any: Any, number: int
    ) -> torch.Tensor:
        return multiply(x, y, held, number)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, y, *context.how = inputs
        context.save_for_backward(x, y)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y = context.saved_tensors
        multiply, (of_x, of_y), of_any, number = context.how
        (g,), (for_x, for_y, *_) = gradients, context.needs_input_grad
        by = multiply, (of_any, of_y), of_any, 2 * number + 1
        to_x = _Product.apply(g, y.mT, *by) if for_x else None  # type: ignore[no-untyped-call]
        by = multiply, (of_x, of_any), of_any, 2 * number + 2
        to_y = _Product.apply(x.mT, g, *by) if for_y else None  # type: ignore[no-untyped-call]
        return to_x, to_y, None, None, None, None


def product(
    x: torch.Tensor, y: torch.Tensor, multiply: Multiply, held: Held, of_any: Any
) -> torch.Tensor:
    """Return float32[batch, m, n] of float32[batch, m, k] and float32[batch, k, n].

    multiply: takes the factors, formats that hold their values, and the number of the product: 0;
        2n + 1 for the gradient of x of product n, 2n + 2 for that of y
    held: formats of x and y; of_any: format of gradients
    """
    if not (_differentiates(x) or _differentiates(y)):
        return multiply(x, y, held, 0)
    found: torch.Tensor = _Product.apply(x, y, multiply, held, of_any, 0)  # type: ignore[no-untyped-call]
    return found


def await_device(device: torch.device) -> None:
    """Wait until a device has done the work of torch's current stream. Raises as values_of."""
    if device.type == "cuda":
        from . import gpu_runtime

        with in_stream(device):
            gpu_runtime.wait_for_stream()


def check_device(what: str, device: torch.device) -> None:
    """Raise ValueError unless arrays can share a device's memory; what: start of the message."""
    if device.type not in PLACES:
        raise ValueError(f"{what} is on {device}: should be on cpu or cuda")
    if device.type == "cuda" and find_spec("cupy") is None:
        raise ValueError(f"{what} is on {device}: needs CuPy: pip install 'cpdhpc[gpu]'")


def seed(number: int, device: torch.device) -> None:
    """Seed torch's random numbers on the CPU and on a device."""
    # torch.manual_seed would also record the stack, for three devices.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)


def current_gpu() -> int:
    """Return the number of torch's current GPU, 0 if it sees none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def use_gpu(number: int) -> None:
    """Make a GPU torch's current one, which .cuda() and "cuda" mean from then on."""
    if torch.cuda.is_available():
        torch.cuda.set_device(number)


NO_STREAM = nullcontext()


def in_stream(device: torch.device) -> AbstractContextManager[None]:
    """Let CuPy use a device and torch's current stream of it in the block."""
    if device.type == "cpu":
        return NO_STREAM
    from . import gpu_runtime

    assert device.index is not None, "tensors know the number of their GPU"
    stream = torch.cuda.current_stream(device)
    return gpu_runtime.in_stream(device.index, int(stream.cuda_stream))


class OwnStream:
    """A stream of one thread on a device, beside that of backward.

    On the CPU it does nothing, as calls return after their work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """Return the event of all work of torch's current stream until now."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Let torch and CuPy use this stream in the block, after an event of mark."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            with in_stream(self.device):
                yield

    def join(self) -> None:
        """Let torch's current stream wait for all work of this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

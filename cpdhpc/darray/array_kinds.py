"""Kinds of arrays that can be exchanged: NumPy, CuPy, and torch on the CPU or a GPU.

Arrays of all kinds are sliced, assigned and added alike, by operators; here is what differs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..ops import backend_of

Array = Any  # of any kind
Bytes = npt.NDArray[np.uint8]


class Kind(Protocol):
    """What the kinds have in common. like: an array of the kind, dtype and device wanted."""

    def dtype(self, x: Array) -> str:
        """Return the name of the dtype, as float32: the same for all kinds."""

    def itemsize(self, x: Array) -> int:
        """Return the bytes of an element."""

    def check(self, what: str, x: Array) -> None:
        """Raise TypeError where an array of the kind cannot be exchanged."""

    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        """Return a new array."""

    def plain(self, x: Array) -> npt.NDArray[Any] | None:
        """Return the same memory as a NumPy array, maybe of integers; None if it is on a GPU."""

    def host(self, x: Array) -> npt.NDArray[Any]:
        """Return the values as a NumPy array. Raises TypeError where NumPy has no such dtype."""

    def element(self, like: Array, value: complex) -> Bytes:
        """Return the bytes of a value as an element. Raises where the dtype does not take it."""

    def flip(self, x: Array, axes: Sequence[int]) -> Array:
        """Return x backwards along some axes."""

    def sum(self, a: Array, b: Array) -> Array:
        """Return a + b, of one shape, as a new array."""

    def stage(self, like: Array, memory: Bytes) -> Array:
        """Return a flat array for the elements that memory holds: on the CPU memory itself."""

    def pull(self, stage: Array, memory: Bytes) -> None:
        """Copy a stage to memory, where it is not that itself."""

    def push(self, stage: Array, memory: Bytes) -> None:
        """Copy memory to a stage, where it is not that itself."""


class _Numpy:
    def dtype(self, x: Array) -> str:
        return str(x.dtype.name)

    def itemsize(self, x: Array) -> int:
        return int(x.dtype.itemsize)

    def check(self, what: str, x: Array) -> None:
        if x.dtype.hasobject:
            raise TypeError(f"{what} is of {x.dtype}: objects have no bytes that could travel")
        if not x.dtype.isnative:
            raise TypeError(f"{what} is of {x.dtype}: must have this machine's order of bytes")

    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        return np.empty(shape, like.dtype)

    def plain(self, x: Array) -> npt.NDArray[Any] | None:
        if x.dtype.kind in "biufc":
            return np.asarray(x)
        return np.asarray(x).view(f"V{x.dtype.itemsize}")

    def host(self, x: Array) -> npt.NDArray[Any]:
        return np.asarray(x)

    def element(self, like: Array, value: complex) -> Bytes:
        one = np.empty(1, like.dtype)
        one[...] = value
        return one.view(np.uint8)

    def flip(self, x: Array, axes: Sequence[int]) -> Array:
        return x[tuple(slice(None, None, -1 if i in axes else 1) for i in range(x.ndim))]

    def sum(self, a: Array, b: Array) -> Array:
        return a + b

    def stage(self, like: Array, memory: Bytes) -> Array:
        return memory.view(like.dtype)

    def pull(self, stage: Array, memory: Bytes) -> None:
        pass

    def push(self, stage: Array, memory: Bytes) -> None:
        pass


class _Cupy(_Numpy):
    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        return np.empty_like(like, shape=tuple(shape))

    def plain(self, x: Array) -> None:
        return None

    def host(self, x: Array) -> npt.NDArray[Any]:
        return np.asarray(x.get())

    def sum(self, a: Array, b: Array) -> Array:
        """CuPy's own sums of float32 lose subnormal numbers; those of ops do not."""
        if a.dtype.name not in ("float32", "complex64") or not a.size:
            return a + b
        copies = [self.empty(a, a.shape) for _ in range(2)]
        for copy, given in zip(copies, (a, b), strict=True):
            copy[...] = given
        flat = [copy.reshape(-1).view(np.float32) for copy in copies]
        backend_of(flat[0]).add(*flat, out=flat[0])
        return copies[0]

    def stage(self, like: Array, memory: Bytes) -> Array:
        return self.empty(like, (memory.size // like.dtype.itemsize,))

    def pull(self, stage: Array, memory: Bytes) -> None:
        stage.get(out=memory.view(stage.dtype))

    def push(self, stage: Array, memory: Bytes) -> None:
        stage.set(memory.view(stage.dtype))


class _Torch:
    def dtype(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    def itemsize(self, x: Array) -> int:
        return int(x.element_size())

    def check(self, what: str, x: Array) -> None:
        if x.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise TypeError(
                f"{what} requires a gradient, which would be lost: use cpdhpc.darray.autograd"
            )
        if x.layout != sys.modules["torch"].strided or x.is_conj() or x.is_neg():
            raise TypeError(
                f"{what} is {x.layout}, or a view that only conjugates or negates: must be strided "
                "and resolved"
            )

    def empty(self, like: Array, shape: Sequence[int]) -> Array:
        return like.new_empty(tuple(shape))

    def plain(self, x: Array) -> npt.NDArray[Any] | None:
        torch = sys.modules["torch"]
        same = x.detach()
        return np.asarray((same.view(torch.int16) if x.dtype == torch.bfloat16 else same).numpy())

    def host(self, x: Array) -> npt.NDArray[Any]:
        return np.asarray(x.detach().cpu().numpy())

    def element(self, like: Array, value: complex) -> Bytes:
        torch = sys.modules["torch"]
        if like.dtype != torch.bfloat16:
            return NUMPY.element(np.empty(0, self.dtype(like)), value)
        return np.asarray(torch.full((1,), value, dtype=like.dtype).view(torch.uint8).numpy())

    def flip(self, x: Array, axes: Sequence[int]) -> Array:
        return x.flip(tuple(axes)) if axes else x

    def sum(self, a: Array, b: Array) -> Array:
        return a + b

    def stage(self, like: Array, memory: Bytes) -> Array:
        return sys.modules["torch"].from_numpy(memory).view(like.dtype)

    def pull(self, stage: Array, memory: Bytes) -> None:
        pass

    def push(self, stage: Array, memory: Bytes) -> None:
        pass


class _TorchGpu(_Torch):
    def plain(self, x: Array) -> None:
        return None

    def stage(self, like: Array, memory: Bytes) -> Array:
        return like.new_empty((memory.size // like.element_size(),))

    def pull(self, stage: Array, memory: Bytes) -> None:
        super().stage(stage, memory).copy_(stage)

    def push(self, stage: Array, memory: Bytes) -> None:
        stage.copy_(super().stage(stage, memory))


NUMPY, CUPY, TORCH, TORCH_GPU = _Numpy(), _Cupy(), _Torch(), _TorchGpu()


def kind_of(what: str, x: Array) -> Kind:
    """Return the kind of an array. Raises TypeError, naming what, for anything else."""
    if isinstance(x, np.ndarray):
        return NUMPY
    module = type(x).__module__.partition(".")[0]
    if module == "cupy" and hasattr(x, "dtype"):
        return CUPY
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        return TORCH if x.device.type == "cpu" else TORCH_GPU
    raise TypeError(
        f"{what} is {type(x).__name__}: known are arrays of NumPy and CuPy and torch tensors"
    )

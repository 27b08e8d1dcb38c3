"""Tensors as flat memory of the host, for messages."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache

import torch

from ...ops.tensors import await_device
from .programs import Tensor
from .progress import Waits


def plain(tensor: Tensor) -> bool:
    """Whether messages can use the tensor's own memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def flat(tensor: Tensor) -> Tensor:
    """Return a plain tensor with one axis, apart from autograd.

    Autograd may track the tensor itself before the call has ended.
    """
    if tensor.is_inference():
        return _writable(tensor)
    detached = tensor.detach()
    return detached if detached.dim() == 1 else detached.view(-1)


def _writable(tensor: Tensor) -> Tensor:
    """Return a tensor of torch.inference_mode() as one that can be written outside of it."""
    if not tensor.numel():
        return tensor.new_empty(0)
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # keeps it alive
    return torch.frombuffer(memory, dtype=tensor.dtype)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors share memory."""
    start, its = one.data_ptr(), other.data_ptr()
    return start < its + other.nbytes and its < start + one.nbytes


class Hosted:
    """The tensors of one call in the memory of the host, some copied back at its end."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, flat, in its own memory if possible."""
        if plain(tensor):
            return flat(tensor)
        if not tensor.is_cpu:
            say_staged(tensor.device.type)
            await_device(tensor.device)
        return flat(tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous())

    def apart(self, tensor: Tensor, outs: Sequence[Tensor], own: int | None = None) -> Tensor:
        """Return the values of a tensor, flat, in memory that no flat output shares.

        own: the output of this rank, which may be the tensor itself
        """
        values = self.input(tensor)
        start = values.data_ptr()
        for rank, out in enumerate(outs):
            if overlap(values, out) and not (rank == own and out.data_ptr() == start):
                return values.clone()
        return values

    def both(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, flat; changes are copied back at the end."""
        if plain(tensor):
            return flat(tensor)
        values = self.input(tensor)
        self._copy_back(tensor, values)
        return values

    def output(self, tensor: Tensor) -> Tensor:
        """Return flat memory, which is copied to a tensor at the end."""
        if plain(tensor):
            return flat(tensor)
        if not tensor.is_cpu:  # kernels may still read it
            say_staged(tensor.device.type)
            await_device(tensor.device)
        values = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        self._copy_back(tensor, values)
        return values

    def _copy_back(self, tensor: Tensor, values: Tensor) -> None:
        """Copy values to a tensor at the end; one that cannot take them is refused before."""
        axes = zip(tensor.stride(), tensor.shape, strict=True)
        if any(not step and count > 1 for step, count in axes):
            raise ValueError(
                f"output of shape {list(tensor.shape)} has strides {list(tensor.stride())}: must "
                "have memory for each element: pass a clone"
            )
        self._back.append((tensor.detach(), values))

    def around(self, program: Waits) -> Waits:
        """Return a program that copies values back to tensors at its end."""
        return self._then_back(program) if self._back else program

    def _then_back(self, program: Waits) -> Waits:
        yield from program
        for tensor, values in self._back:
            with torch.inference_mode(tensor.is_inference()):  # required for such tensors
                tensor.copy_(values.view(tensor.shape))


@cache
def say_staged(device: str) -> None:
    """Warn, once for each device, that its tensors travel through the memory of the host."""
    warnings.warn(
        f"cpdhpc: tensors on {device} travel through the memory of the host", stacklevel=2
    )

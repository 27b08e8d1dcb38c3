"""Tensors as flat memory of the host, which messages read and write."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from ...ops.tensors import await_device
from .programs import Tensor, Waits


def plain(tensor: Tensor) -> bool:
    """Whether messages can read and write a tensor where it is."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj()


def flat(tensor: Tensor) -> Tensor:
    """Return a plain tensor as one axis."""
    return (tensor.detach() if tensor.requires_grad else tensor).view(-1)


class Hosted:
    """The tensors of one call in the memory of the host, and what goes back at its end."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, flat; its own memory where that is possible."""
        if plain(tensor):
            return flat(tensor)
        if not tensor.is_cpu:
            say_staged(tensor.device.type)
            await_device(tensor.device)
        return tensor.detach().to("cpu").resolve_conj().contiguous().view(-1)

    def both(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, flat, which it gets back."""
        if plain(tensor):
            return flat(tensor)
        values = self.input(tensor)
        self._back.append((tensor.detach(), values))
        return values

    def output(self, tensor: Tensor) -> Tensor:
        """Return flat memory whose values a tensor gets."""
        if plain(tensor):
            return flat(tensor)
        if not tensor.is_cpu:  # what still reads it comes first
            say_staged(tensor.device.type)
            await_device(tensor.device)
        values = torch.empty(tensor.numel(), dtype=tensor.dtype)
        self._back.append((tensor.detach(), values))
        return values

    def around(self, program: Waits) -> Waits:
        """Return a program at whose end tensors get back what they are to have."""
        return self._then_back(program) if self._back else program

    def _then_back(self, program: Waits) -> Waits:
        yield from program
        for tensor, values in self._back:
            tensor.copy_(values.view(tensor.shape))


@cache
def say_staged(device: str) -> None:
    """Warn, once, that tensors of a device travel through the memory of the host."""
    warnings.warn(
        f"cpdhpc: tensors on {device} travel through the memory of the host", stacklevel=2
    )

"""What travels from stage to stage: a format of values, and means in place of neighbours."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ...formats import SHARED, Cast, wire_scaling
from ...ops.payloads import Packed, Raw, parse_wire


class Wire:
    """How values travel: float32[batch, ...] as bytes."""

    def __init__(self, name: str) -> None:
        fmt = parse_wire(name, "stages")
        scaling = SHARED[wire_scaling(name)]
        self._raw = fmt is None
        self._payloads = Raw() if fmt is None else Packed(Cast(fmt), fit=True, shared=scaling)

    def size_bytes(self, count: int) -> int:
        """Return the bytes of so many values."""
        return self._payloads.size_bytes(count)

    def encode(self, x: torch.Tensor) -> npt.NDArray[np.uint8]:
        """Return the bytes of values; raw ones are the tensor's own."""
        values = x.detach().contiguous().numpy().reshape(-1)
        if self._raw:
            return values.view(np.uint8)
        payload = np.empty(self.size_bytes(values.size), np.uint8)
        self._payloads.encode(values, None, (0, 0), 0, payload)
        return payload

    def decode(self, payload: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the values; raw ones are the payload's own memory, not to be changed."""
        if self._raw:
            return torch.from_numpy(payload.view(np.float32)).reshape(shape)
        values = np.empty(int(np.prod(shape)), np.float32)
        self._payloads.decode(payload, None, values)
        return torch.from_numpy(values).reshape(shape)


class Filter:
    """P, which takes means of neighbours, scaled so that P P^T = 1; and its transpose.

    factor: of maps [channels, height, width] squares of factor x factor pixels are one value, of
        other samples so many values of the last axis
    Raises ValueError for samples that the factor does not divide.
    """

    def __init__(self, factor: int, shape: tuple[int, ...]) -> None:
        axes = 2 if len(shape) == 3 else 1
        if any(n % factor for n in shape[-axes:]):
            raise ValueError(
                f"stages.filter={factor}: a cut has samples of {list(shape)}: should divide the "
                f"last {'two axes' if axes == 2 else 'axis'}"
            )
        self.factor, self.axes = factor, axes
        self.shape = (*shape[:-axes], *(n // factor for n in shape[-axes:]))
        self._scale = factor ** (-axes / 2)

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """Return P x of samples [batch, ...]."""
        if self.factor == 1:
            return x
        width = x.shape[-1] // self.factor
        x = x.reshape(*x.shape[:-1], width, self.factor).sum(-1)
        if self.axes == 2:
            x = x.reshape(*x.shape[:-2], -1, self.factor, width).sum(-2)
        return x * self._scale

    def spread(self, p: torch.Tensor) -> torch.Tensor:
        """Return P^T p."""
        if self.factor == 1:
            return p
        for axis in range(-self.axes, 0):
            p = p.repeat_interleave(self.factor, axis)
        return p * self._scale

"""Receptive fields cut out of a window, the sums that put them back, and weighted neighbourhoods.

All tensors have the two axes of the image first and the batch last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Pair = tuple[int, int]


def gather(window: Tensor, counts: Pair, size: int, step: int) -> Tensor:
    """Return float[blocks, size * size * channels, batch], the receptive field of every block.

    window: [(counts - 1) * step + size along both axes, channels, batch]; empty where there are
        no blocks; its backward is scatter
    counts: of blocks along both axes, which are numbered with the second axis fastest
    """
    fields: Tensor = _gather(window, counts, size, step)
    return fields


def scatter(fields: Tensor, counts: Pair, size: int, step: int, shape: Sequence[int]) -> Tensor:
    """Return the window of that shape in which overlapping fields are added; the transpose."""
    window: Tensor = _scatter(fields, counts, size, step, tuple(shape))
    return window


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, window: Tensor, counts: Pair, size: int, step: int) -> Tensor:
        ctx.arguments = counts, size, step, window.shape
        trail = window.shape[2:]
        blocks, inputs = counts[0] * counts[1], size * size * trail[0]
        if not blocks:
            return window.new_empty((0, inputs, trail[1]))
        fields = window.unfold(0, size, step).unfold(1, size, step)
        return fields.permute(0, 1, 4, 5, 2, 3).reshape(blocks, inputs, trail[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter(gradients[0], *ctx.arguments), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fields: Tensor, counts: Pair, size: int, step: int, shape: Sequence[int]
    ) -> Tensor:
        ctx.arguments = counts, size, step
        if not fields.shape[0]:
            return fields.new_zeros(shape)
        high, wide = counts
        parts = fields.reshape(high, wide, size, size, *shape[2:])
        rows = parts.new_zeros((high, size, *shape[1:]))  # along the second axis first
        for j in range(size):
            rows[:, :, j : j + (wide - 1) * step + 1 : step] += parts[:, :, :, j].transpose(1, 2)
        window = parts.new_zeros(shape)
        for i in range(size):
            window[i : i + (high - 1) * step + 1 : step] += rows[:, i]
        return window

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _gather(gradients[0], *ctx.arguments), None, None, None, None


def slide(window: Tensor, counts: Pair, weights: Sequence[float], step: int = 1) -> Tensor:
    """Return the weighted sums over the squares that a window consists of, counts of them.

    weights: along each axis; the weight of a cell is the product of two
    """
    for axis in (0, 1):
        ends = [(k, k + max(0, (counts[axis] - 1) * step + 1)) for k in range(len(weights))]
        parts = (window[_along(axis, slice(a, b, step))] for a, b in ends)
        window = sum(w * part for w, part in zip(weights, parts, strict=True))  # type: ignore[assignment]
    return window.reshape(*counts, *window.shape[2:])  # empty windows are empty along both axes


def _along(axis: int, cut: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (cut,)


_gather: Callable[..., Any] = _Gather.apply  # torch declares apply without types
_scatter: Callable[..., Any] = _Scatter.apply

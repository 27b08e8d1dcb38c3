"""Images without a channel axis at the start of a network."""

from __future__ import annotations

import torch

from .grid import ImageGrid, Shape


class Unflatten(torch.nn.Module):
    """torch.nn.Unflatten(1, (1, height)): gives images [batch, rows, columns] a channel."""

    def __init__(self, layer: torch.nn.Unflatten, grid: ImageGrid, shape: Shape, name: str) -> None:
        super().__init__()

    @staticmethod
    def shape_after(layer: torch.nn.Unflatten, shape: Shape) -> Shape:
        """Return the same size. Raises ValueError for any other use of the layer."""
        if layer.dim != 1 or tuple(layer.unflattened_size) != (1, shape[0]):
            raise ValueError(f"only Unflatten(1, (1, {shape[0]})) can be split, with the height")
        return shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float[batch, 1, rows, columns]."""
        return x.unsqueeze(1)

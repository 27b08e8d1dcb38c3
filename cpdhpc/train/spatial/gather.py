"""The end of the split: every rank of a group gets the whole, by now small, feature maps."""

from __future__ import annotations

import torch

from ...darray import WindowPlan
from ...darray.box import whole
from .grid import ImageGrid, Shape
from .windowed import fetch


class Gather(torch.nn.Module):
    """Gathers the whole maps on every rank of a group, then does a layer. Collective.

    What follows is computed by all ranks of the group alike. Backward adds up their gradients:
    the loss of a group counts as often as it has ranks.
    layer: one without parameters
    """

    def __init__(self, layer: torch.nn.Module, grid: ImageGrid, shape: Shape, name: str) -> None:
        super().__init__()
        self.layer = layer
        self.plan = WindowPlan(grid.group, grid.layout(shape), whole(shape), name=name)

    @staticmethod
    def shape_after(layer: torch.nn.Module, shape: Shape) -> None:
        """Return None: the output is not split any more. Raises ValueError for odd flattening."""
        if isinstance(layer, torch.nn.Flatten):
            axes = layer.start_dim, layer.end_dim
            if axes != (1, -1) and axes != (1, 3):
                raise ValueError("must flatten channels, rows and columns: Flatten(1, -1)")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for the whole maps of this rank's images. Collective."""
        return self.layer(fetch(x, self.plan))

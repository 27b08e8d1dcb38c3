"""Convolution of images that are split over ranks."""

from __future__ import annotations

import torch

from .grid import ImageGrid, Shape
from .sliding import Sliding, pair
from .windowed import Windowed

BOUNDARIES = {"zeros": "zero", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


class Conv2d(Windowed):
    """torch.nn.Conv2d on the owned part of images; it shares the layer's parameters. Collective.

    shape: of the whole input; name: of the layer, in messages
    The gradients of the parameters are this rank's part: their sum over the ranks of a group is
    the gradient of the group's loss (GradientReducer makes it so).
    """

    def __init__(self, layer: torch.nn.Conv2d, grid: ImageGrid, shape: Shape, name: str) -> None:
        boundary = BOUNDARIES[layer.padding_mode]
        super().__init__(grid, shape, _sliding(layer), boundary, name)
        self.weight, self.bias = layer.weight, layer.bias
        self.stride, self.dilation = pair(layer.stride), pair(layer.dilation)
        self.groups = layer.groups

    @staticmethod
    def shape_after(layer: torch.nn.Conv2d, shape: Shape) -> Shape:
        """Return the size of the layer's output. Raises ValueError where it cannot be split."""
        if layer.padding_mode not in BOUNDARIES:
            raise ValueError(f"padding_mode={layer.padding_mode!r}: {', '.join(BOUNDARIES)}")
        return _sliding(layer).outputs(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs float[batch, channels, rows, columns]. Collective."""
        window = self.window(x)
        if self.box.empty:
            return self.nothing(window, self.weight.shape[0], self.weight, self.bias)
        return torch.nn.functional.conv2d(
            window, self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )


def _sliding(layer: torch.nn.Conv2d) -> Sliding:
    size, dilation = pair(layer.kernel_size), pair(layer.dilation)
    if layer.padding == "same":
        reach = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
        before = pair([n // 2 for n in reach])  # the odd cell comes last, as torch has it
        after = pair([n - n // 2 for n in reach])
    else:
        before = after = pair(0 if layer.padding == "valid" else layer.padding)
    return Sliding(size, pair(layer.stride), before, after, dilation)

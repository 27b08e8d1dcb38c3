"""Maximum and average pooling of images that are split over ranks."""

from __future__ import annotations

import torch

from ...darray import Constant
from .grid import ImageGrid, Shape
from .sliding import Sliding, pair
from .windowed import Windowed


class MaxPool2d(Windowed):
    """torch.nn.MaxPool2d on the owned part of images. Collective."""

    def __init__(self, layer: torch.nn.MaxPool2d, grid: ImageGrid, shape: Shape, name: str) -> None:
        super().__init__(grid, shape, _of_max(layer), Constant(float("-inf")), name)
        self.size, self.stride, self.dilation = (
            pair(value) for value in (layer.kernel_size, layer.stride, layer.dilation)
        )

    @staticmethod
    def shape_after(layer: torch.nn.MaxPool2d, shape: Shape) -> Shape:
        """Return the size of the layer's output. Raises ValueError where it cannot be split."""
        if layer.return_indices:
            raise ValueError("return_indices=True: they would count in windows, not in images")
        sliding = _of_max(layer)
        _check_padding(sliding)
        return sliding.outputs(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs float[batch, channels, rows, columns]. Collective."""
        window = self.window(x)
        if self.box.empty:
            return self.nothing(window, x.shape[1])
        return torch.nn.functional.max_pool2d(
            window, self.size, self.stride, dilation=self.dilation
        )


class AvgPool2d(Windowed):
    """torch.nn.AvgPool2d on the owned part of images. Collective."""

    divisor: torch.Tensor

    def __init__(self, layer: torch.nn.AvgPool2d, grid: ImageGrid, shape: Shape, name: str) -> None:
        sliding = _of_average(layer)
        super().__init__(grid, shape, sliding, "zero", name)
        self.size, self.stride = sliding.size, sliding.step
        self.register_buffer("divisor", self._divisor(layer, sliding), persistent=False)

    @staticmethod
    def shape_after(layer: torch.nn.AvgPool2d, shape: Shape) -> Shape:
        """Return the size of the layer's output. Raises ValueError where it cannot be split."""
        sliding = _of_average(layer)
        _check_padding(sliding)
        return sliding.outputs(shape)

    def _divisor(self, layer: torch.nn.AvgPool2d, sliding: Sliding) -> torch.Tensor:
        """Return float64[rows, columns] of the owned outputs: what each sum is divided by.

        Cells beyond the padding, which ceil_mode reaches, never count; padding may count.
        """
        if layer.divisor_override is not None:
            return torch.full(self.box.shape, float(layer.divisor_override), dtype=torch.float64)
        counts = []
        for axis, extent in enumerate(self.inputs.shape):
            padding = sliding.before[axis] if layer.count_include_pad else 0
            first = torch.arange(self.box.start[axis], self.box.stop[axis]) * sliding.step[axis]
            first -= sliding.before[axis]
            last = (first + sliding.size[axis]).clamp(max=extent + padding)
            counts.append((last - first.clamp(min=-padding)).double())
        return counts[0][:, None] * counts[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs float[batch, channels, rows, columns]. Collective."""
        window = self.window(x)
        if self.box.empty:
            return self.nothing(window, x.shape[1])
        sums = torch.nn.functional.avg_pool2d(window, self.size, self.stride, divisor_override=1)
        return sums / self.divisor.to(sums.dtype)


def _of_max(layer: torch.nn.MaxPool2d) -> Sliding:
    padding = pair(layer.padding)
    size, step, dilation = (pair(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    return Sliding(size, step, padding, padding, dilation, layer.ceil_mode)


def _of_average(layer: torch.nn.AvgPool2d) -> Sliding:
    padding = pair(layer.padding)
    size, step = pair(layer.kernel_size), pair(layer.stride)
    return Sliding(size, step, padding, padding, (1, 1), layer.ceil_mode)


def _check_padding(sliding: Sliding) -> None:
    """Raise ValueError where a window could lie outside the image: torch refuses it too."""
    if any(2 * p > k for p, k in zip(sliding.before, sliding.size, strict=True)):
        raise ValueError(f"padding={sliding.before}: at most half of kernel_size={sliding.size}")

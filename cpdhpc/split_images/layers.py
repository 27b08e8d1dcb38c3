"""Layers over parts of images: convolution, pooling, batch norm, and the end of the split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from ..darray.autograd import exchange
from ..darray.layout import Box, Layout, receptive, whole
from ..darray.plan import WindowPlan
from ..darray.windows import Boundary, Constant
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


class Sliding(NamedTuple):
    """A filter of size cells, dilation apart, moved by step; two numbers, rows and columns.

    before, after: cells that the image is padded by; ceil: as torch's ceil_mode of pooling
    """

    size: Shape
    step: Shape
    before: Shape
    after: Shape
    dilation: Shape
    ceil: bool = False

    def outputs(self, shape: Shape) -> Shape:
        """Return the size of the output. Raises ValueError where nothing is left."""
        height, width = (self._extent(shape[axis], axis) for axis in (0, 1))
        if min(height, width) < 1:
            raise ValueError(f"its output is {height} x {width} for an input of {shape}")
        return height, width

    def _extent(self, extent: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.size[axis] - 1) + 1
        step, before = self.step[axis], self.before[axis]
        room = extent + before + self.after[axis] - reach
        if not self.ceil:
            return room // step + 1
        count = -(-room // step) + 1
        # The last window must begin inside the image or the padding before it, as torch has it.
        return count - ((count - 1) * step >= extent + before)

    def window(self, box: Box) -> Box:
        """Return the inputs that the outputs in a box need, padding included."""
        return receptive(box, self.size, self.step, self.before, self.dilation)


def pair(value: Any) -> Shape:
    """Return a size as torch's layers hold it, one number or two, as two."""
    rows, columns = (value, value) if isinstance(value, int) else value
    return int(rows), int(columns)


class Windowed(torch.nn.Module):
    """A layer whose outputs in the owned box are computed from a window of its input. Collective.

    shape: of the whole input; inputs, outputs: who owns what of the whole maps
    box: of the outputs that this rank owns, which may be empty; plan: fetches the input window
    """

    def __init__(
        self, grid: ImageGrid, shape: Shape, sliding: Sliding, boundary: Boundary, name: str
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = grid.layout(shape), grid.layout(sliding.outputs(shape))
        self.box = self.outputs.owner(grid.group.rank)
        self.plan = WindowPlan(
            grid.group, self.inputs, sliding.window(self.box), boundary, name=name
        )

    def window(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input window [batch, channels, rows, columns] of the outputs. Collective.

        x: the owned part of the input. Raises ValueError for another shape.
        """
        return fetch(x, self.plan)

    def nothing(
        self, window: torch.Tensor, channels: int, *parameters: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output of a rank that owns none.

        It hangs on the window and the parameters: backward goes through this rank too, which may
        own cells that others read, and gives its parameters the gradient zero.
        """
        total = sum((p.sum() for p in parameters if p is not None), window.sum())
        return total.expand(window.shape[0], channels, *self.box.shape)


def fetch(x: torch.Tensor, plan: WindowPlan) -> torch.Tensor:
    """Return a plan's window of a map [batch, channels, rows, columns]. Collective."""
    if x.ndim != 4 or tuple(x.shape[2:]) != plan.owned.shape:
        rows, columns = plan.owned.shape
        raise ValueError(
            f"layer {plan.name}: input has shape {tuple(x.shape)}: "
            f"must be [batch, channels, {rows}, {columns}], this rank's part"
        )
    return exchange(x.permute(2, 3, 0, 1), plan).permute(2, 3, 0, 1)


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


class Pool2d(Windowed, ABC):
    """What poolings on the owned part of images have in common. Collective."""

    boundary: Boundary = "zero"

    def __init__(self, layer: Any, grid: ImageGrid, shape: Shape, name: str) -> None:
        sliding = _pooling(layer)
        super().__init__(grid, shape, sliding, self.boundary, name)
        self.size, self.stride, self.dilation = sliding.size, sliding.step, sliding.dilation

    @staticmethod
    def shape_after(layer: Any, shape: Shape) -> Shape:
        """Return the size of the layer's output. Raises ValueError where it cannot be split."""
        if getattr(layer, "return_indices", False):
            raise ValueError("return_indices=True: they would count in windows, not in images")
        sliding = _pooling(layer)
        # A window could lie outside the image: torch refuses it too.
        if any(2 * p > k for p, k in zip(sliding.before, sliding.size, strict=True)):
            padding, size = sliding.before, sliding.size
            raise ValueError(f"padding={padding}: at most half of kernel_size={size}")
        return sliding.outputs(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs float[batch, channels, rows, columns]. Collective."""
        window = self.window(x)
        return self.nothing(window, x.shape[1]) if self.box.empty else self.pooled(window)

    @abstractmethod
    def pooled(self, window: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs of a window."""


class MaxPool2d(Pool2d):
    """torch.nn.MaxPool2d on the owned part of images. Collective."""

    boundary = Constant(float("-inf"))

    def pooled(self, window: torch.Tensor) -> torch.Tensor:
        """Return the largest values."""
        sizes = self.size, self.stride
        return torch.nn.functional.max_pool2d(window, *sizes, dilation=self.dilation)


class AvgPool2d(Pool2d):
    """torch.nn.AvgPool2d on the owned part of images. Collective."""

    divisor: torch.Tensor

    def __init__(self, layer: torch.nn.AvgPool2d, grid: ImageGrid, shape: Shape, name: str) -> None:
        super().__init__(layer, grid, shape, name)
        divisor = self._divisor(layer, _pooling(layer).before)
        self.register_buffer("divisor", divisor, persistent=False)

    def _divisor(self, layer: torch.nn.AvgPool2d, before: Shape) -> torch.Tensor:
        """Return float64[rows, columns] of the owned outputs: what each sum is divided by.

        before: cells of padding. Cells beyond it, which ceil_mode reaches, never count; padding may
        """
        if layer.divisor_override is not None:
            return torch.full(self.box.shape, float(layer.divisor_override), dtype=torch.float64)
        counts = []
        for axis, extent in enumerate(self.inputs.shape):
            padding = before[axis] if layer.count_include_pad else 0
            first = torch.arange(self.box.start[axis], self.box.stop[axis]) * self.stride[axis]
            first -= before[axis]
            last = (first + self.size[axis]).clamp(max=extent + padding)
            counts.append((last - first.clamp(min=-padding)).double())
        return counts[0][:, None] * counts[1]

    def pooled(self, window: torch.Tensor) -> torch.Tensor:
        """Return the means."""
        sizes = self.size, self.stride
        sums = torch.nn.functional.avg_pool2d(window, *sizes, divisor_override=1)
        return sums / self.divisor.to(sums.dtype)


def _pooling(layer: Any) -> Sliding:
    padding, dilation = pair(layer.padding), pair(getattr(layer, "dilation", 1))
    size, step = pair(layer.kernel_size), pair(layer.stride)
    return Sliding(size, step, padding, padding, dilation, layer.ceil_mode)


CELLS = (0, 2, 3)  # the axes of batch, rows and columns


class BatchNorm2d(torch.nn.Module):
    """torch.nn.BatchNorm2d with the statistics of the batches of all ranks. Collective.

    It shares the layer's parameters and buffers. In training all ranks of the world take part,
    also those without images or pixels, and get the same bits; with the running statistics there
    are no messages.
    """

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(
        self, layer: torch.nn.BatchNorm2d, grid: ImageGrid, shape: Shape, name: str
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.momentum = layer.momentum
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(buffer, getattr(layer, buffer))
        ranks = grid.world.size
        layout = Layout.grid((ranks,), (ranks,))
        self.plan = WindowPlan(grid.world, layout, whole((ranks,)), name=name)

    @staticmethod
    def shape_after(layer: torch.nn.BatchNorm2d, shape: Shape) -> Shape:
        """Return the size of the layer's output, that of its input."""
        return shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs float[batch, channels, rows, columns]. Collective.

        Raises ValueError on all ranks alike where a channel has one value in all.
        """
        if self.training or self.running_mean is None or self.running_var is None:
            mean, variance = self._statistics(x)
        else:
            mean, variance = self.running_mean, self.running_var
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = 0 if self.bias is None else self.bias[:, None, None]
        return (x - mean[:, None, None]) * scale[:, None, None] + shift

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance of the channels over all ranks, and update the running ones.

        Each rank tells its number n of values, their mean and their sum of squares about it; what
        differs between means is added to the sum of squares: Chan, Golub and LeVeque, Updating
        formulae and a pairwise algorithm for computing sample variances, 1979, equation 2.1.
        In float64 throughout: torch too adds up float32 so on the CPU.
        """
        values = x.double()
        n = values.new_full((x.shape[1],), x.numel() // max(1, x.shape[1]))
        own_mean = values.sum(CELLS) / n.clamp(min=1)
        squares = (values - own_mean[:, None, None]).square().sum(CELLS)
        everywhere = exchange(torch.stack([n, own_mean, squares])[None], self.plan)
        counts, means, spreads = everywhere.unbind(1)  # [ranks, channels] each
        count = counts[:, :1].sum()
        if self.training and count <= 1:
            raise ValueError(f"layer {self.plan.name}: needs more than one value a channel")
        mean = (counts * means).sum(0) / count
        variance = (spreads + counts * (means - mean).square()).sum(0) / count
        if self.training:
            self._track(mean.detach(), (variance * count / (count - 1)).detach())
        return mean.to(x.dtype), variance.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # the mean of all batches so far
            share = 1 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None:
                running.mul_(1 - share).add_(new.to(running.dtype), alpha=share)

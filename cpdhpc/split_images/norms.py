"""Layers over parts of images that need numbers of all ranks: norms and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.nn import functional

from ..darray.autograd import exchange
from ..darray.layout import Layout, whole
from ..darray.plan import WindowPlan
from ..world.ranks import Ranks
from .grid import ImageGrid, Shape
from .windowed import SplitLayer, check_part


def everyone(world: Ranks, name: str) -> WindowPlan:
    """Return the plan by which each rank's cell shows on all ranks. Collective."""
    layout = Layout.grid((world.size,), (world.size,))
    return WindowPlan(world, layout, whole((world.size,)), name=name)


def moments(
    values: torch.Tensor, axes: Sequence[int], plan: WindowPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the number of values over all ranks, their mean and their variance. Collective.

    values: any part, maybe empty; axes: that are summed over; returns float64 of the other axes
    Each rank tells its number n of values, their mean and their sum of squares about it; what
    differs between means is added to the sum of squares: Chan, Golub and LeVeque, Updating
    formulae and a pairwise algorithm for computing sample variances, 1979, equation 2.1. A rank's
    sums are torch's; those over ranks are in the order of ranks. So all ranks have the same bits.
    In float64 throughout: torch too adds up float32 so on the CPU.
    """
    values = values.double()
    n = prod(values.shape[axis] for axis in axes)
    own_mean = values.sum(tuple(axes), keepdim=True) / max(1, n)
    squares = (values - own_mean).square().sum(tuple(axes))
    own_mean = own_mean.squeeze(tuple(axes))
    number = torch.full_like(own_mean, n)
    everywhere = exchange(torch.stack([number, own_mean, squares])[None], plan)
    counts, means, spreads = everywhere.unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    variance = (spreads + counts * (means - mean).square()).sum(0) / count
    return count, mean, variance


class BatchNorm(SplitLayer):
    """torch.nn.BatchNorm2d or 1d with the statistics of the batches of all ranks. Collective.

    In training all ranks of the world take part, also those without images or pixels, and get the
    same bits; with the running statistics there are no messages.
    """

    same = on_whole = True
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(
        self, layer: Any, grid: ImageGrid, shape: Shape | None, after: Any, name: str
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.momentum = layer.momentum
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(buffer, getattr(layer, buffer))
        self.plan = everyone(grid.world, name)
        self.box = None if shape is None else grid.owned(shape)
        self.copies = grid.sharing if shape is None else 1  # of each value, over the ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised values. Collective.

        Raises ValueError on all ranks alike where a channel has one value in all.
        """
        if self.box is not None:
            check_part(x, self.box, self.plan)
        if self.training or self.running_mean is None or self.running_var is None:
            mean, variance = self._statistics(x)
        else:
            mean, variance = self.running_mean, self.running_var
        shape = (-1, *[1] * (x.ndim - 2))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = 0 if self.bias is None else self.bias.reshape(shape)
        return (x - mean.reshape(shape)) * scale.reshape(shape) + shift

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance of the channels over all ranks, and update the running ones."""
        counts, mean, variance = moments(x, (0, *range(2, x.ndim)), self.plan)
        count = counts[:1].sum() / self.copies
        if self.training and count <= 1:
            raise ValueError(f"layer {self.plan.name}: needs more than one value a channel")
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


class SampleNorm(SplitLayer):
    """Norms of each sample by itself, over groups of channels and all pixels. Collective.

    groups: of channels, given their number
    """

    same = True

    def __init__(self, layer: Any, grid: ImageGrid, shape: Shape, after: Any, name: str) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = layer.weight, layer.bias, layer.eps
        self.plan, self.box = everyone(grid.group, name), grid.owned(shape)

    def groups(self, channels: int) -> int:
        """Return the number of groups: one for each channel."""
        return channels

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what a parameter is for the owned cells: it has one value for each channel."""
        return parameter[:, None, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised values. Collective in the group."""
        check_part(x, self.box, self.plan)
        batch, channels, *_ = x.shape
        groups = self.groups(channels)
        grouped = x.reshape(batch, groups, channels // groups, *x.shape[2:])
        _, mean, variance = moments(grouped, (2, 3, 4), self.plan)
        scale = torch.rsqrt(variance + self.eps).to(x.dtype)[..., None, None, None]
        y = ((grouped - mean.to(x.dtype)[..., None, None, None]) * scale).reshape(x.shape)
        y = y if self.weight is None else y * self.local(self.weight)
        return y if self.bias is None else y + self.local(self.bias)


class InstanceNorm2d(SampleNorm):
    """torch.nn.InstanceNorm2d. Collective."""

    @staticmethod
    def check(layer: Any, shape: Shape) -> None:
        """Raise ValueError for running statistics."""
        if layer.track_running_stats:
            raise ValueError("track_running_stats=True: use False, or BatchNorm2d")


class GroupNorm(SampleNorm):
    """torch.nn.GroupNorm. Collective."""

    def __init__(self, layer: Any, grid: ImageGrid, shape: Shape, after: Any, name: str) -> None:
        super().__init__(layer, grid, shape, after, name)
        self.num_groups = layer.num_groups

    def groups(self, channels: int) -> int:
        """Return the layer's number."""
        return int(self.num_groups)


class LayerNorm(SampleNorm):
    """torch.nn.LayerNorm over rows and columns, or channels too. Collective."""

    def __init__(self, layer: Any, grid: ImageGrid, shape: Shape, after: Any, name: str) -> None:
        super().__init__(layer, grid, shape, after, name)
        self.each_channel = len(layer.normalized_shape) == 2

    @staticmethod
    def check(layer: Any, shape: Shape) -> None:
        """Raise ValueError for a norm of each row."""
        if len(layer.normalized_shape) == 1:
            raise ValueError("normalises each row by itself: use LayerNorm([channels, rows, "
                             "columns]) or GroupNorm(1, channels)")  # fmt: skip

    def groups(self, channels: int) -> int:
        """Return one, or one for each channel."""
        return channels if self.each_channel else 1

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the owned cells of a parameter, which has a value for each cell."""
        rows, columns = self.box.slices((0, 0))
        return parameter[..., rows, columns]


class Dropout(SplitLayer):
    """torch.nn.Dropout and Dropout2d, with the mask of the serial layer. Collective in training.

    Each rank draws the mask of whole maps from torch's generator, as the serial layer does, and
    keeps its part. So the generators of all ranks of a group must stand alike.
    """

    same = on_whole = True

    def __init__(
        self, layer: Any, grid: ImageGrid, shape: Shape | None, after: Any, name: str
    ) -> None:
        super().__init__()
        self.p, self.shape, self.grid, self.layer = layer.p, shape, grid, layer
        self.plan = everyone(grid.group, name)
        self.by_channel = isinstance(layer, torch.nn.Dropout2d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values that stay, scaled, and zeros. Collective in training.

        Raises ValueError on all ranks of the group where torch's generators differ.
        """
        if not self.training or self.p == 0:
            return x
        self._check_generators(x)
        if self.shape is None:
            return self._drawn(x)
        check_part(x, self.grid.owned(self.shape), self.plan)
        size = (1, 1) if self.by_channel else self.shape
        mask = self._drawn(x.new_ones((*x.shape[:2], *size)))
        return x * (mask if self.by_channel else self.grid.cut(mask))

    def _drawn(self, x: torch.Tensor) -> torch.Tensor:
        draw = functional.dropout2d if self.by_channel else functional.dropout
        return draw(x, self.p, training=True)

    def _check_generators(self, x: torch.Tensor) -> None:
        on_cpu = x.device.type == "cpu"
        state = torch.get_rng_state() if on_cpu else torch.cuda.get_rng_state(x.device)
        mine = np.array([crc32(state.numpy().tobytes())], np.int64)
        if len(set(self.plan.exchange(mine).tolist())) > 1:
            raise ValueError(
                f"layer {self.plan.name}: torch's random numbers stand otherwise on ranks that "
                "share images: call torch.manual_seed alike and draw alike on all of them"
            )

"""Norms over all parts of images, by torch's own kernels on each rank's part.

Forward and backward have a message each, of a few numbers a channel, to each rank that shares the
statistics. What comes is put together in float64, in the order of ranks: all have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...darray.layout import Layout, whole
from ...darray.plan import WindowPlan
from ...ops.tensors import values_of
from ...world.ranks import Ranks
from ..autograd import backward_number, exchange, next_number, twice
from .windowed import ImageGrid, Shape, SplitLayer, check_part

Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # number, mean, variance


def everyone(world: Ranks, name: str) -> WindowPlan:
    """Return the plan by which each rank's cell shows on all ranks. Collective."""
    layout = Layout.grid((world.size,), (world.size,))
    return WindowPlan(world, layout, whole((world.size,)), name=name)


def combined(everywhere: torch.Tensor) -> Moments:
    """Return the number of all values, their mean and their variance.

    everywhere: float64[ranks, 3, groups]: of each rank number, mean and variance of its values
    What differs between means is added to the sums of squares: Chan, Golub and LeVeque, Updating
    formulae and a pairwise algorithm for computing sample variances, 1979, equation 2.1.
    """
    counts, means, variances = everywhere.unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return count, mean, (counts * (variances + (means - mean).square())).sum(0) / count


def by_group(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return values [batch, channels, ...] as [batch, groups, values], of size channels each."""
    return x.reshape(x.shape[0], x.shape[1] // size, -1) if x.numel() else x[:, ::size]


def by_channel(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return values [..., groups] as [..., channels], of size channels a group."""
    return values if size == 1 else values.repeat_interleave(size, -1)


def normalised(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    size: int,
    plan: WindowPlan,
) -> tuple[torch.Tensor, Moments]:
    """Return normalised values, and the moments of the values of all ranks. Collective.

    x: [batch, channels, ...], any part, maybe empty; weight, bias: of each channel
    size: of groups of channels, which have moments of their own, float64[groups]
    """
    y, *found = _Norm.apply(x, weight, bias, eps, size, plan)  # type: ignore[no-untyped-call]
    return y, (found[0], found[1], found[2])


class _Norm(torch.autograd.Function):
    """Values normalised over all ranks. Forward and backward are collective."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        size: int,
        plan: WindowPlan,
    ) -> tuple[torch.Tensor, ...]:
        precise = torch.promote_types(x.dtype, torch.float32)
        groups = x.shape[1] // size
        own = x.new_zeros(3, groups, dtype=torch.float64)
        if x.numel():
            values = by_group(x, size).to(precise)
            own[0], (own[1], own[2]) = x.numel() // groups, torch.batch_norm_update_stats(
                values, None, None, 0.0
            )  # fmt: skip
        ctx.number = next_number(plan)
        found = combined(plan.exchange(own[None], number=ctx.number))
        mean, variance = (by_channel(each, size).to(precise) for each in found[1:])
        scale, shift = (each if each is None else each.to(precise) for each in (weight, bias))
        y = functional.batch_norm(x, mean, variance, scale, shift, False, 0.0, eps)
        ctx.save_for_backward(x, weight, bias, found[0], mean, variance)
        ctx.eps, ctx.size, ctx.plan = eps, size, plan
        ctx.mark_non_differentiable(*found)
        return y, *found

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slope, (x, weight, bias, _, mean, variance) = slopes[0], ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # to be differentiated again
            y = _formula(x, weight, bias, ctx.eps, ctx.size, ctx.plan)
            return *twice(y, slope, (x, weight, bias), wanted), None, None, None
        sums = torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():  # of the slope times the normalised value, and of the slope
            sums = torch.ops.aten.native_batch_norm_backward(
                slope, x, mean, mean, variance, None, None, False, ctx.eps, (False, True, True)
            )[1:]
        of_x = _of_values(ctx, slope, x, weight, torch.stack(sums)) if wanted[0] else None
        of_weight, of_bias = (
            each.to(parameter.dtype) if is_wanted else None
            for each, parameter, is_wanted in zip(sums, (weight, bias), wanted[1:], strict=True)
        )
        return of_x, of_weight, of_bias, None, None, None


def _of_values(
    ctx: Any, slope: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, sums: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the values of this rank. Collective.

    With z for normalised values and means over all ranks: rate (w slope - mean(w slope) - z mean(w
    slope z)), which is a sum of slope, x and 1 with factors for each channel.
    """
    count, mean, variance = (each.double() for each in ctx.saved_tensors[3:])
    rate = torch.rsqrt(variance + ctx.eps)
    own = sums.double() if weight is None else sums * weight.double()
    own = own.reshape(2, -1, ctx.size).sum(2) if ctx.size > 1 else own
    everywhere = ctx.plan.exchange(own[None], number=backward_number(ctx.number))
    products, means = by_channel(everywhere.sum(0) / count, ctx.size)
    of_slope = rate if weight is None else rate * weight
    of_x = -rate.square() * products
    factors = torch.stack([-rate * means - of_x * mean, of_slope, of_x])
    factors = factors.to(ctx.saved_tensors[4].dtype).reshape(3, -1, *[1] * (x.ndim - 2))
    return torch.addcmul(factors[0], slope, factors[1]).addcmul_(x, factors[2]).to(x.dtype)


def _formula(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    size: int,
    plan: WindowPlan,
) -> torch.Tensor:
    """Return what normalised does, of operations that can be differentiated twice. Collective."""
    values = by_group(x, size).double()
    own_mean = values.mean((0, 2)) if x.numel() else values.sum((0, *range(2, x.ndim)))
    squares = (values - own_mean[:, None]).square().mean((0, 2)) if x.numel() else own_mean
    number = torch.full_like(own_mean, x.numel() // max(1, len(own_mean)))
    _, *found = combined(exchange(torch.stack([number, own_mean, squares])[None], plan))
    shape = (-1, *[1] * (x.ndim - 2))
    mean, variance = (by_channel(each, size).reshape(shape) for each in found)
    y = (x - mean) * torch.rsqrt(variance + eps)
    y = y if weight is None else y * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)).to(x.dtype)


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
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        y, found = normalised(x, self.weight, self.bias, self.eps, 1, self.plan)
        if self.training:
            self._track(*found)
        return y

    @torch.no_grad()
    def _track(self, counts: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Let running statistics follow. Raises ValueError where there is one value in all."""
        count = float(values_of(counts[0])) / self.copies
        if count <= 1:
            raise ValueError(f"layer {self.plan.name}: needs more than one value a channel")
        if self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = self.momentum
        if share is None:  # the mean of all batches so far
            share = 1 / float(values_of(self.num_batches_tracked))
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised values. Collective in the group."""
        check_part(x, self.box, self.plan)
        return self.normalised(x, self.weight, self.bias)

    def normalised(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the normalised values, with a weight and a bias for each channel."""
        samples, channels, *size = x.shape
        weight, bias = (p if p is None else p.repeat(samples) for p in (weight, bias))
        each = channels // self.groups(channels)
        maps = x.reshape(1, samples * channels, *size)
        return normalised(maps, weight, bias, self.eps, each, self.plan)[0].reshape(x.shape)


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

    def normalised(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the normalised values, with a weight and a bias for each cell."""
        rows, columns = self.box.slices((0, 0))
        y = super().normalised(x, None, None)
        y = y if weight is None else y * weight[..., rows, columns]
        return y if bias is None else y + bias[..., rows, columns]

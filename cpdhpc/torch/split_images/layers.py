"""Layers on parts of images: the table of all, and norms over all parts.

Norms are torch's own kernels on each rank's part. Forward and backward each send one message, of a
few numbers per channel, to each rank that shares the statistics. The received numbers are combined
in float64, in the order of ranks, so all ranks get the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ...darray.layout import Layout, whole
from ...darray.plan import WindowPlan
from ...ops.tensors import values_of
from ...world.ranks import Ranks
from ..autograd import backward_number, exchange, next_number, twice
from .convolution import Conv2d
from .windowed import (
    AvgPool2d,
    ConvTranspose2d,
    Gather,
    ImageGrid,
    MaxPool2d,
    Pad2d,
    PixelShuffle,
    PixelUnshuffle,
    Shape,
    SplitLayer,
    Upsample,
    check_part,
)

CHANNELS_LAST = torch.channels_last
Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # number, mean, variance


def everyone(world: Ranks, name: str) -> WindowPlan:
    """Return the plan that shows each rank's cell on all ranks. Collective."""
    layout = Layout.grid((world.size,), (world.size,))
    return WindowPlan(world, layout, whole((world.size,)), name=name)


def combined(everywhere: torch.Tensor) -> Moments:
    """Return the number of all values, their mean and their variance.

    everywhere: float64[ranks, 3, groups]: each rank's number, mean and variance of its values
    The differences of means are added to the sums of squares: Chan, Golub and LeVeque, Updating
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
    """Return values [..., groups] as [..., channels], of size channels per group."""
    return values if size == 1 else values.repeat_interleave(size, -1)


def in_format_of(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """Return the slope in the memory format of x, copied if it has another.

    Torch 2.13's kernel for norms on the CPU can mistake the format of a slope by the strides of its
    axes of one element, for example if a rank without outputs makes it, and mix up its channels.
    """
    if x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=CHANNELS_LAST):
        return slope.contiguous(memory_format=CHANNELS_LAST)
    return slope.contiguous()


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
    size: number of channels in a group; each group has its own moments, float64[groups]
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
        y = torch.empty_like(x)
        if x.numel():  # torch reads the first weight, but an empty batch may have none
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
            made = partial(_formula, eps=ctx.eps, size=ctx.size, plan=ctx.plan)
            return *twice(made, slope, (x, weight, bias), wanted), None, None, None
        sums = torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():  # of the slope times the normalised value, and of the slope
            rate = torch.rsqrt(variance + ctx.eps)  # an argument of CUDA's kernel, like the mean
            sums = torch.ops.aten.native_batch_norm_backward(
                in_format_of(x, slope),
                x,
                mean,
                mean,
                variance,
                mean,
                rate,
                False,
                ctx.eps,
                (False, True, True),
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
    """Return the same as normalised, by operations that can be differentiated twice. Collective."""
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

    In training all ranks of the world take part, including those without images or pixels, and get
    the same bits; with the running statistics there are no messages.
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

        Raises ValueError on all ranks if a channel has only one value in all.
        """
        if self.box is not None:
            check_part(x, self.box, self.plan)
        if not self.training and self.running_mean is not None:
            y = functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
            if y.requires_grad:
                y.register_hook(partial(in_format_of, x.detach()))  # type: ignore[no-untyped-call]
            return y
        y, found = normalised(x, self.weight, self.bias, self.eps, 1, self.plan)
        if self.training:
            self._track(*found)
        return y

    @torch.no_grad()
    def _track(self, counts: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update running statistics. Raises ValueError if there is only one value in all."""
        count = float(values_of(counts[0])) / self.copies
        if count <= 1:
            raise ValueError(f"layer {self.plan.name}: needs more than one value per channel")
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

    groups: number of groups for a number of channels
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
        """Return the layer's number of groups."""
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


class Dropout(SplitLayer):
    """torch.nn.Dropout and Dropout2d, with the mask of the serial layer. Collective in training.

    Each rank draws the mask of whole maps from torch's generator, as the serial layer does, and
    keeps its part. So the generators of all ranks of a group must have the same state.
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
        """Return the values that are kept, scaled, and zeros. Collective in training.

        Raises ValueError on all ranks of the group if torch's generators differ.
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
                f"layer {self.plan.name}: torch's random state differs between ranks that share "
                "images: use the same torch.manual_seed and the same draws on all of them"
            )


class Unflatten(SplitLayer):
    """torch.nn.Unflatten(1, (1, height)): gives images [batch, rows, columns] a channel axis."""

    def __init__(self, layer: Any, grid: ImageGrid, shape: Shape, after: Any, name: str) -> None:
        super().__init__()

    @staticmethod
    def check(layer: Any, shape: Shape) -> None:
        """Raise ValueError for any other use of the layer."""
        if layer.dim != 1 or tuple(layer.unflattened_size) != (1, shape[0]):
            raise ValueError(f"only Unflatten(1, (1, {shape[0]})) can be split, with the height")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float[batch, 1, rows, columns]."""
        return x.unsqueeze(1)


class EachPixel(SplitLayer):
    """A layer that treats each pixel by itself: it stays unchanged."""

    @staticmethod
    def check(layer: Any, shape: Shape) -> None:
        """Raise ValueError for layers that work along another axis than channels."""
        dim, padding = getattr(layer, "dim", 1), getattr(layer, "padding", ())
        if dim not in (1, -3):
            raise ValueError(f"dim={dim}: must be 1, the channels")
        if any(padding[:4]):
            raise ValueError(f"padding={padding}: must be of channels only: use ConstantPad2d")


CONV = "any stride, dilation, groups, padding (also same), padding_mode"
POOL = "all options but return_indices"
NORM = "statistics over all pixels of a sample, of all ranks that share it"
BATCH = "statistics of the whole batch of all groups"
PIXEL = "unchanged: each pixel by itself; over channels if they take dim=1, or pad channels"
GATHER = "gather the maps first; later layers are computed identically by all ranks of a group"
DROP = "the mask of the serial layer, drawn whole; torch's generators must have the same state"
EACH_PIXEL = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Hardshrink, nn.Softshrink,
    nn.Tanhshrink, nn.Softplus, nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Threshold,
    nn.GLU, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.LocalResponseNorm,
    nn.ChannelShuffle, nn.ConstantPad3d,
)  # fmt: skip
LAYERS: dict[type[nn.Module], tuple[type[SplitLayer], str]] = {
    # layer -> its replacement on parts of images, and a description
    nn.Conv2d: (Conv2d, CONV),
    nn.ConvTranspose2d: (ConvTranspose2d, "any stride, dilation, groups, padding"),
    nn.MaxPool2d: (MaxPool2d, POOL),
    nn.AvgPool2d: (AvgPool2d, POOL),
    nn.Upsample: (Upsample, "nearest, nearest-exact, bilinear, bicubic; for F.interpolate"),
    nn.UpsamplingNearest2d: (Upsample, "see Upsample"),
    nn.UpsamplingBilinear2d: (Upsample, "see Upsample"),
    nn.PixelShuffle: (PixelShuffle, "all"),
    nn.PixelUnshuffle: (PixelUnshuffle, "all"),
    nn.ZeroPad2d: (Pad2d, "also negative paddings"),
    nn.ConstantPad2d: (Pad2d, "also negative paddings"),
    nn.ReflectionPad2d: (Pad2d, "all"),
    nn.ReplicationPad2d: (Pad2d, "all"),
    nn.CircularPad2d: (Pad2d, "all"),
    nn.BatchNorm2d: (BatchNorm, BATCH),
    nn.BatchNorm1d: (BatchNorm, BATCH + "; after a gather"),
    nn.GroupNorm: (GroupNorm, NORM),
    nn.LayerNorm: (LayerNorm, NORM + "; over rows and columns, with or without channels"),
    nn.InstanceNorm2d: (InstanceNorm2d, NORM + "; without track_running_stats"),
    nn.Dropout: (Dropout, DROP),
    nn.Dropout2d: (Dropout, DROP),
    nn.Unflatten: (Unflatten, "(1, (1, height)): at the start, for images without channels"),
    nn.AdaptiveAvgPool2d: (Gather, GATHER),
    nn.AdaptiveMaxPool2d: (Gather, GATHER),
    nn.Flatten: (Gather, GATHER),
    **dict.fromkeys(EACH_PIXEL, (EachPixel, PIXEL)),
}
INSTEAD = {  # layers that cannot be split, and functions over pixels -> advice
    nn.Linear: "gather the maps before it: nn.Flatten(1) or nn.AdaptiveAvgPool2d",
    nn.RReLU: "its random slopes depend on the values of other pixels: use nn.LeakyReLU",
    nn.AlphaDropout: "use nn.Dropout",
    nn.FeatureAlphaDropout: "use nn.Dropout2d",
    nn.SyncBatchNorm: "use nn.BatchNorm2d, which has the statistics of all ranks here",
    "interpolate": "use nn.Upsample",
    "upsample": "use nn.Upsample",
    "pad": "use nn.ZeroPad2d or another padding layer",
    "__getitem__": "use nn.MaxPool2d(1, 2) for x[:, :, ::2, ::2], nn.ZeroPad2d with negative "
    "padding to crop",
    "mean": "use nn.AdaptiveAvgPool2d(1) and nn.Flatten(1)",
    "flatten": "use nn.Flatten(1)",
    "view": "use nn.Flatten(1)",
    "reshape": "use nn.Flatten(1)",
    "pixel_shuffle": "use nn.PixelShuffle",
    "dropout": "use nn.Dropout",
    "dropout2d": "use nn.Dropout2d",
    "adaptive_avg_pool2d": "use nn.AdaptiveAvgPool2d",
    "adaptive_max_pool2d": "use nn.AdaptiveMaxPool2d",
    "max_pool2d": "use nn.MaxPool2d",
    "boolean_dispatch": "use nn.MaxPool2d or nn.AdaptiveMaxPool2d",
    "avg_pool2d": "use nn.AvgPool2d",
    "conv2d": "use nn.Conv2d",
    "conv_transpose2d": "use nn.ConvTranspose2d",
    "batch_norm": "use nn.BatchNorm2d",
    "group_norm": "use nn.GroupNorm",
    "layer_norm": "use nn.LayerNorm",
    "instance_norm": "use nn.InstanceNorm2d",
}
KNOWN = "known are " + ", ".join(sorted(each.__name__ for each in LAYERS))


def page() -> str:
    """Return the table for docs/reference/spatial.md: a line for all layers of one description."""
    rows: dict[tuple[type[SplitLayer], str], list[str]] = {}
    for layer, row in LAYERS.items():
        rows.setdefault(row, []).append(f"`{layer.__name__}`")
    lines = [f"| {', '.join(names)} | {words} |" for (_, words), names in rows.items()]
    return "\n".join(["| layers of `torch.nn` | on parts of images |", "|---|---|", *lines])

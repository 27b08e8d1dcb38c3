"""Layers on parts of images: the table, and norms over all parts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
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
from ..autograd import exchange
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
        if self.training and values_of(count) <= 1:
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
            share = 1 / float(values_of(self.num_batches_tracked))
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


class Unflatten(SplitLayer):
    """torch.nn.Unflatten(1, (1, height)): gives images [batch, rows, columns] a channel."""

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
    """A layer that treats each pixel by itself: it stays as it is."""

    @staticmethod
    def check(layer: Any, shape: Shape) -> None:
        """Raise ValueError for layers over another axis than that of channels."""
        dim = getattr(layer, "dim", 1)
        if dim not in (1, -3):
            raise ValueError(f"dim={dim}: must be 1, the channels")


CONV = "any stride, dilation, groups, padding (also same), padding_mode"
POOL = "all options but return_indices"
NORM = "statistics over all pixels of a sample, of all ranks that share it"
BATCH = "statistics of the whole batch of all groups"
PIXEL = "each pixel by itself: as they are; over channels where they take dim=1"
GATHER = "gather the maps first; what follows is computed by all ranks of a group alike"
DROP = "the mask of the serial layer, drawn whole; torch's generators must stand alike"
EACH_PIXEL = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Hardshrink, nn.Softshrink,
    nn.Tanhshrink, nn.Softplus, nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Threshold,
    nn.GLU, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.LocalResponseNorm,
    nn.ChannelShuffle,
)  # fmt: skip
LAYERS: dict[type[nn.Module], tuple[type[SplitLayer], str]] = {
    # layer -> what does it on parts of images, and in which words
    nn.Conv2d: (Conv2d, CONV),
    nn.ConvTranspose2d: (ConvTranspose2d, "any stride, dilation, groups, padding"),
    nn.MaxPool2d: (MaxPool2d, POOL),
    nn.AvgPool2d: (AvgPool2d, POOL),
    nn.Upsample: (Upsample, "nearest, nearest-exact, bilinear, bicubic; for F.interpolate"),
    nn.UpsamplingNearest2d: (Upsample, "as Upsample"),
    nn.UpsamplingBilinear2d: (Upsample, "as Upsample"),
    nn.PixelShuffle: (PixelShuffle, "all"),
    nn.PixelUnshuffle: (PixelUnshuffle, "all"),
    nn.ZeroPad2d: (Pad2d, "also negative paddings"),
    nn.ConstantPad2d: (Pad2d, "also negative paddings"),
    nn.ReflectionPad2d: (Pad2d, "all"),
    nn.ReplicationPad2d: (Pad2d, "all"),
    nn.CircularPad2d: (Pad2d, "all"),
    nn.BatchNorm2d: (BatchNorm, BATCH),
    nn.BatchNorm1d: (BatchNorm, BATCH + "; behind a gather"),
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
INSTEAD = {  # layers that cannot be split, and functions over pixels -> what to use
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
    """Return the table of the page for users, a line for layers of the same words."""
    rows: dict[tuple[type[SplitLayer], str], list[str]] = {}
    for layer, row in LAYERS.items():
        rows.setdefault(row, []).append(f"`{layer.__name__}`")
    lines = [f"| {', '.join(names)} | {words} |" for (_, words), names in rows.items()]
    return "\n".join(["| layers of `torch.nn` | on parts of images |", "|---|---|", *lines])

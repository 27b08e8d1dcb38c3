"""Layers on parts of images: the table, and norms over all parts."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .convolution import Conv2d
from .norms import BatchNorm, GroupNorm, InstanceNorm2d, LayerNorm, everyone
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
        dim, padding = getattr(layer, "dim", 1), getattr(layer, "padding", ())
        if dim not in (1, -3):
            raise ValueError(f"dim={dim}: must be 1, the channels")
        if any(padding[:4]):
            raise ValueError(f"padding={padding}: must be of channels only: use ConstantPad2d")


CONV = "any stride, dilation, groups, padding (also same), padding_mode"
POOL = "all options but return_indices"
NORM = "statistics over all pixels of a sample, of all ranks that share it"
BATCH = "statistics of the whole batch of all groups"
PIXEL = "each pixel by itself: as they are; over channels where they take dim=1, or pad them"
GATHER = "gather the maps first; what follows is computed by all ranks of a group alike"
DROP = "the mask of the serial layer, drawn whole; torch's generators must stand alike"
EACH_PIXEL = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Hardshrink, nn.Softshrink,
    nn.Tanhshrink, nn.Softplus, nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Threshold,
    nn.GLU, nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d, nn.LocalResponseNorm,
    nn.ChannelShuffle, nn.ConstantPad3d,
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

"""Blocks of residual and recurrent networks and of transformers, as torch modules."""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """after(branch(x) + shortcut(x)); a shortcut or after of None is the identity.

    Source: He et al., Deep residual learning, arXiv 1512.03385, figure 2.
    """

    def __init__(
        self, branch: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut or nn.Identity()
        self.after = after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return float[batch, channels, height, width]."""
        y: Tensor = self.after(self.branch(x) + self.shortcut(x))
        return y


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the size of images, except for its stride."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def normalisation(name: str, channels: int) -> nn.Module:
    """Return batch norm, or group norm of at most 32 groups, Wu, He, arXiv 1803.08494.

    name: "batch" or "group"
    """
    if name == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(gcd(32, channels), channels)


def zero_padded(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """Return the shortcut without weights: every stride-th pixel, and channels of zeros.

    Source: arXiv 1512.03385, section 3.3, option A.
    """
    if inputs == outputs and stride == 1:
        return None
    more = outputs - inputs
    return nn.Sequential(nn.AvgPool2d(1, stride), nn.ConstantPad3d((0, 0, 0, 0, 0, more), 0.0))


def projected(inputs: int, outputs: int, stride: int, norm: str) -> nn.Module | None:
    """Return the shortcut with weights: a convolution of single pixels. The same, option B."""
    if inputs == outputs and stride == 1:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), normalisation(norm, outputs))


def basic(inputs: int, width: int, stride: int, norm: str) -> nn.Module:
    """Return the branch of two convolutions: to width channels. The same, figure 5, left."""
    return nn.Sequential(
        conv(inputs, width, 3, stride),
        normalisation(norm, width),
        nn.ReLU(),
        conv(width, width, 3),
        normalisation(norm, width),
    )


def bottleneck(inputs: int, width: int, stride: int, norm: str) -> nn.Module:
    """Return the branch of three convolutions: to 4 width channels. The same, figure 5, right.

    The stride is that of the second, as in Goyal et al., arXiv 1706.02677, section 5.1.
    """
    return nn.Sequential(
        conv(inputs, width, 1),
        normalisation(norm, width),
        nn.ReLU(),
        conv(width, width, 3, stride),
        normalisation(norm, width),
        nn.ReLU(),
        conv(width, 4 * width, 1),
        normalisation(norm, 4 * width),
    )


def preactivated(inputs: int, width: int, stride: int, norm: str, dropout: float) -> nn.Module:
    """Return a wide network's block, with norm and ReLU before each convolution.

    If the number of channels changes, the shortcut begins after the first norm and ReLU.
    Source: Zagoruyko, Komodakis, Wide residual networks, arXiv 1605.07146, figure 1 (d).
    """
    first = [normalisation(norm, inputs), nn.ReLU()]
    branch = [
        conv(inputs, width, 3, stride),
        normalisation(norm, width),
        nn.ReLU(),
        *([nn.Dropout(dropout)] if dropout else []),
        conv(width, width, 3),
    ]
    if inputs == width and stride == 1:
        return Residual(nn.Sequential(*first, *branch))
    return nn.Sequential(*first, Residual(nn.Sequential(*branch), conv(inputs, width, 1, stride)))


def pooled(channels: int, classes: int) -> list[nn.Module]:
    """Return the last layers: the mean over pixels, and the logits."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def initialised(network: nn.Module) -> nn.Module:
    """Return a network of convolutions, with newly drawn weights.

    Source: He et al., Delving deep into rectifiers, arXiv 1502.01852, section 2.2, backward.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


class ImageRows(nn.Module):
    """Images as sequences of their rows; each row has the values of all channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return float[batch, height, channels * width]."""
        return x if x.dim() == 3 else x.transpose(1, 2).flatten(2)


class Recurrent(nn.LSTM):
    """LSTM that returns the values of its last layer, starting from a state of zeros."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return float[batch, time, hidden]."""
        values: Tensor = super().forward(x)[0]
        return values


class Last(nn.Module):
    """The last element of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """Return float[batch, values] of float[batch, time, values]."""
        return x[:, -1]


class ClassesFirst(nn.Module):
    """Logits of sequences with the class as the second axis, as losses need them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return float[batch, classes, time] of float[batch, time, classes]."""
        return x.transpose(1, 2)


class Positions(nn.Module):
    """Adds learned values to each place of a sequence."""

    def __init__(self, time: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(time, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return float[batch, time, width]."""
        return x + self.weight


class CausalLayer(nn.TransformerEncoderLayer):
    """A transformer layer in which places see only earlier ones, with norms before its parts."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return float[batch, time, width]."""
        return super().forward(x, src_mask=_later(x.shape[1]), is_causal=True)


@cache
def _later(time: int) -> Tensor:
    """Return bool[time, time], true for later places, which each place does not see."""
    return torch.ones(time, time, dtype=torch.bool).triu(1)

"""Networks of few layers, one after the other."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from .base import Model, Positive, image_shape, to_channels

if TYPE_CHECKING:
    import torch


class LeNet(Model):
    """[model] name = "lenet": two convolutions with pooling, two fully connected layers.

    channels: of the two convolutions; hidden: values of the layer between
    Source: LeCun et al., Gradient-based learning applied to document recognition, 1998,
    figure 2, with ReLU, maximum pooling and padding, so that small images keep their size.
    """

    name: Literal["lenet"] = "lenet"
    channels: Annotated[tuple[Positive, Positive], Field(strict=False)] = (16, 32)
    hidden: Positive = 128

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, height, width].

        Raises ValueError for images that two poolings leave nothing of.
        """
        import torch

        inputs, height, width = image_shape("LeNet", sample_shape, 4)
        first, second = self.channels
        return torch.nn.Sequential(
            *to_channels(sample_shape),
            torch.nn.Conv2d(inputs, first, kernel_size=5, padding=2),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(first, second, kernel_size=5, padding=2),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(second * (height // 4) * (width // 4), self.hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(self.hidden, classes),
        )


class Mlp(Model):
    """[model] name = "mlp": fully connected layers with ReLU between them.

    hidden: values of each layer between
    """

    name: Literal["mlp"] = "mlp"
    hidden: Annotated[tuple[Positive, ...], Field(strict=False)] = (64,)

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, height, width]."""
        import torch

        widths = (prod(sample_shape), *self.hidden, classes)
        layers: list[torch.nn.Module] = [torch.nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])


class ResidualMlp(Model):
    """[model] name = "residual_mlp": fully connected blocks, each added to what enters it.

    width: values between blocks; blocks: of two layers each, with ReLU before both
    """

    name: Literal["residual_mlp"] = "residual_mlp"
    width: Positive = 64
    blocks: Positive = 12

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, *sample_shape]."""
        import torch

        from .blocks import Residual

        def layers() -> list[torch.nn.Module]:
            pairs = [(torch.nn.ReLU(), torch.nn.Linear(self.width, self.width)) for _ in range(2)]
            return [layer for pair in pairs for layer in pair]

        return torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(prod(sample_shape), self.width),
            *(Residual(torch.nn.Sequential(*layers())) for _ in range(self.blocks)),
            torch.nn.ReLU(),
            torch.nn.Linear(self.width, classes),
        )

"""What a model of a job file is, and networks of few layers."""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ....config import Positive, Section

if TYPE_CHECKING:
    import torch


class Model(Section):
    """[model]: a network, named in MODELS."""

    @abstractmethod
    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is [batch, *sample_shape].

        classes: 0 where the data does not say. Raises ValueError where it does not go with the
        samples.
        """


def image_shape(model: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Return channels, height and width of images [height, width] or [channels, height, width].

    model: what the error begins with
    Raises ValueError for other shapes, and for images of fewer rows or columns than least.
    """
    if len(shape) not in (2, 3) or min(shape[-2:]) < least:
        raise ValueError(
            f"{model}: inputs of {' x '.join(map(str, shape))}: must be images of at least "
            f"{least} x {least} pixels, channels first"
        )
    return shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1]


def to_channels(shape: tuple[int, ...]) -> list[torch.nn.Module]:
    """Return the layer that gives images of two axes a third, of channels; none for others."""
    import torch

    return [torch.nn.Unflatten(1, (1, shape[0]))] if len(shape) == 2 else []


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


Bits = Annotated[int, Field(ge=1, le=8)]


class QuantizedCnn(Model):
    """[model] name = "quantized_cnn": LeNet of codes, which `cpdhpc export` writes as integers.

    channels: of the two convolutions; hidden: values of the layer between
    weight_bits, activation_bits, input_bits: of the codes; images are 0..1
    """

    name: Literal["quantized_cnn"] = "quantized_cnn"
    channels: Annotated[tuple[Positive, Positive], Field(strict=False)] = (8, 16)
    hidden: Positive = 64
    weight_bits: Annotated[int, Field(ge=2, le=8)] = 4
    activation_bits: Bits = 4
    input_bits: Bits = 8

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network. Raises ValueError for images that two poolings leave nothing of."""
        from torch import nn

        from ....torch.quantized import layers

        inputs, height, width = image_shape("QuantizedCnn", sample_shape, least=4)
        weight, codes = self.weight_bits, self.activation_bits
        first, second = self.channels
        return nn.Sequential(
            layers.QuantizedInput(self.input_bits),
            layers.QuantizedConv2d(inputs, first, kernel_size=5, padding=2, bits=weight),
            layers.QuantizedNorm(first, codes),
            nn.MaxPool2d(2),
            layers.QuantizedConv2d(first, second, kernel_size=5, padding=2, bits=weight),
            layers.QuantizedNorm(second, codes),
            nn.MaxPool2d(2),
            nn.Flatten(),
            layers.QuantizedLinear(second * (height // 4) * (width // 4), self.hidden, weight),
            layers.QuantizedNorm(self.hidden, codes),
            layers.QuantizedOutput(self.hidden, classes, weight, codes),
        )

"""The model of codes that integers compute exactly, see cpdhpc/quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from .base import Model, Positive, image_shape

if TYPE_CHECKING:
    import torch

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

        from ...quantized import layers

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

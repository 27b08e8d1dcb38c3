"""Models: a class and a row in MODELS each."""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..config import Section

if TYPE_CHECKING:
    import torch


class Model(Section):
    """[model]: a network, named in MODELS."""

    @abstractmethod
    def build(self, image_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is [batch, *image_shape].

        classes: 0 where the data does not say. Raises ValueError where it does not go with the
        images.
        """


class LeNet(Model):
    """[model] name = "lenet": two convolutions with pooling, two fully connected layers.

    channels: of the two convolutions; hidden: values of the layer between
    Source: LeCun et al., Gradient-based learning applied to document recognition, 1998,
    figure 2, with ReLU, maximum pooling and padding, so that small images keep their size.
    """

    name: Literal["lenet"] = "lenet"
    channels: Annotated[
        tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], Field(strict=False)
    ] = (16, 32)
    hidden: Annotated[int, Field(ge=1)] = 128

    def build(self, image_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, height, width].

        Raises ValueError for images that two poolings leave nothing of.
        """
        import torch

        if len(image_shape) not in (2, 3) or min(image_shape[-2:]) < 4:
            shape = " x ".join(map(str, image_shape))
            raise ValueError(
                f"LeNet: inputs of {shape}: must be images of at least 4 x 4 pixels, channels first"
            )
        height, width = image_shape[-2:]
        inputs = image_shape[0] if len(image_shape) == 3 else 1
        first, second = self.channels
        gray = [torch.nn.Unflatten(1, (1, height))] if len(image_shape) == 2 else []
        return torch.nn.Sequential(
            *gray,
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


Width = Annotated[int, Field(ge=1)]


class Mlp(Model):
    """[model] name = "mlp": fully connected layers with ReLU between them.

    hidden: values of each layer between
    """

    name: Literal["mlp"] = "mlp"
    hidden: Annotated[tuple[Width, ...], Field(strict=False)] = (64,)

    def build(self, image_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, height, width]."""
        import torch

        widths = (prod(image_shape), *self.hidden, classes)
        layers: list[torch.nn.Module] = [torch.nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])


class ResidualMlp(Model):
    """[model] name = "residual_mlp": fully connected blocks, each added to what enters it.

    width: values between blocks; blocks: of two layers each, with ReLU before both
    """

    name: Literal["residual_mlp"] = "residual_mlp"
    width: Width = 64
    blocks: Annotated[int, Field(ge=1)] = 12

    def build(self, image_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, *image_shape]."""
        import torch

        from .residual import Residual

        def layers() -> list[torch.nn.Module]:
            pairs = [(torch.nn.ReLU(), torch.nn.Linear(self.width, self.width)) for _ in range(2)]
            return [layer for pair in pairs for layer in pair]

        return torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(prod(image_shape), self.width),
            *(Residual(*layers()) for _ in range(self.blocks)),
            torch.nn.ReLU(),
            torch.nn.Linear(self.width, classes),
        )


MODELS: dict[str, type[Model]] = {"mlp": Mlp, "lenet": LeNet, "residual_mlp": ResidualMlp}

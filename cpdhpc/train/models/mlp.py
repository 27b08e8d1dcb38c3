"""A multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, Literal

import torch
from pydantic import Field

from ...config import Section

Width = Annotated[int, Field(ge=1)]


class Mlp(Section):
    """[model] name = "mlp": fully connected layers of hidden values with ReLU between them."""

    name: Literal["mlp"] = "mlp"
    hidden: Annotated[tuple[Width, ...], Field(strict=False)] = (64,)

    def build(self, image_shape: tuple[int, int], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, height, width]."""
        widths = (prod(image_shape), *self.hidden, classes)
        layers: list[torch.nn.Module] = [torch.nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

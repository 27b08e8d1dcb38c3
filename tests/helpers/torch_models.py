"""Models as users of torch write them, small: what a GradientReducer must live with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions with BatchNorm and a short cut. He et al., Deep residual learning, 2016."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet20(nn.Module):
    """The CIFAR network of 20 layers, with fewer channels."""

    def __init__(self, width: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        widths = [width] * 4 + [2 * width] * 3 + [4 * width] * 3
        strides = [1, 1, 1, 2, 1, 1, 2, 1, 1]
        self.blocks = nn.Sequential(*map(Block, widths, widths[1:], strides))
        self.scale = nn.Parameter(torch.tensor(1.0))  # of no dimension, as in many models
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)) * self.scale)


class TiedLstm(nn.Module):
    """A language model whose output layer has the weights of the embedding."""

    def __init__(self, words: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.lstm(self.embedding(x))[0]).transpose(1, 2)


class Transformer(nn.Module):
    """Encoder layers with a causal mask as a buffer, and a layer that forward does not use."""

    mask: torch.Tensor

    def __init__(self, words: int = 11, width: int = 8, length: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool())
        self.head = nn.Linear(width, words)
        self.pooler = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.encoder(self.embedding(x) + self.place, mask=self.mask)
        return self.head(y).transpose(1, 2)


MODELS: dict[str, type[nn.Module]] = {
    "resnet20": ResNet20,
    "lstm": TiedLstm,
    "transformer": Transformer,
}
# The large one on two ranks only: what depends on their number, smaller models show.
NETWORKS = [
    pytest.param(name, marks=pytest.mark.two_ranks) if name == "resnet20" else name
    for name in MODELS
]


def batch(name: str, seed: int, size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for a model of MODELS."""
    generator: Any = torch.Generator().manual_seed(seed)
    if name == "resnet20":
        x = torch.randn(size, 3, 8, 8, generator=generator)
        return x, torch.randint(4, (size,), generator=generator)
    words = torch.randint(11, (size, 6), generator=generator)
    return words[:, :-1], words[:, 1:]

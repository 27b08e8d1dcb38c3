"""Networks as users of torch write them, and small ones that a GradientReducer must live with."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional


class Basic(nn.Module):
    """A residual block; where sizes differ the skip connection is a convolution of 1 x 1."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != planes:
            conv = nn.Conv2d(inputs, planes, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(planes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return functional.relu(out)


class ResNet20(nn.Module):
    """ResNet-20 of He et al. for CIFAR; width 16 there."""

    def __init__(self, width: int = 16, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages, inputs = nn.ModuleList(), width
        for planes, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            strides = (stride, 1, 1)
            blocks = [Basic(inputs if i == 0 else planes, planes, strides[i]) for i in range(3)]
            self.stages.append(nn.Sequential(*blocks))
            inputs = planes
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = stage(x)
        x = self.pool(x)
        return self.fc(torch.flatten(x, 1))


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(2, outputs),
        nn.LeakyReLU(0.1),
        nn.Conv2d(outputs, outputs, 3, padding="same", padding_mode="replicate"),
        nn.InstanceNorm2d(outputs, affine=True),
        nn.SiLU(inplace=True),
    )


class UNet(nn.Module):
    """Two levels: one goes up by a transposed convolution, one by interpolation.

    Images whose sides are multiples of 4.
    """

    def __init__(self, width: int = 4, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        self.inc = double(channels, width)
        self.down = nn.ModuleList([nn.MaxPool2d(2), nn.AvgPool2d(2)])
        self.mid = nn.ModuleList([double(width, 2 * width), double(2 * width, 2 * width)])
        self.up1 = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.dec1, self.dec2 = double(4 * width, width), double(2 * width, width)
        self.attention = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.Sigmoid()
        )
        self.drop, self.out = nn.Dropout2d(0.25), nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.inc(x)
        two = self.mid[0](self.down[0](one))
        three = self.mid[1](self.down[1](two))
        x = self.dec1(torch.cat([two, self.up1(three)], dim=1))
        x = self.dec2(torch.cat([one, self.up2(x)], 1))
        return self.out(self.drop(x * self.attention(x)))


class Scaled(ResNet20):
    """ResNet-20 with fewer channels, and with a parameter of no dimension, as many models have."""

    def __init__(self) -> None:
        super().__init__(width=2, classes=4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


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
    "resnet20": Scaled,
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


def linear(*sizes: int) -> nn.Sequential:
    """Layers of these sizes, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.detach().numpy() for p in model.parameters()]

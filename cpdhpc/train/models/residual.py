"""Residual networks for images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from .plain import Model, Positive, image_shape, to_channels

if TYPE_CHECKING:
    import torch

Norm = Literal["batch", "group"]


def plan(
    inputs: int, width: int, stages: Sequence[int], expansion: int = 1
) -> Iterator[tuple[int, int, int]]:
    """Yield channels of the input, width and stride of each block.

    Each stage but the first begins with a stride of 2 and has twice the width of the one before.
    stages: their blocks; expansion: channels that a block gives, by its width
    """
    for stage, count in enumerate(stages):
        for block in range(count):
            yield inputs, width << stage, 2 if stage and not block else 1
            inputs = expansion * (width << stage)


class CifarResNet(Model):
    """[model] name = "resnet_cifar": the residual network of 6 n + 2 layers for small images.

    n: blocks of each of three stages: 3 is ResNet-20, 5 ResNet-32; width: channels of the first
    norm: "batch", with the statistics of each rank's samples, or "group", of each sample
    Source: He et al., arXiv 1512.03385, section 4.2, with shortcuts without weights.
    """

    name: Literal["resnet_cifar"] = "resnet_cifar"
    n: Positive = 3
    width: Positive = 16
    norm: Norm = "batch"

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, (channels,) height, width].

        Raises ValueError for what is no image of at least 4 x 4 pixels.
        """
        from torch import nn

        from . import blocks

        channels, _, _ = image_shape("ResNet", sample_shape, 4)
        layers: list[nn.Module] = [
            *to_channels(sample_shape),
            blocks.conv(channels, self.width, 3),
            blocks.normalisation(self.norm, self.width),
            nn.ReLU(),
        ]
        for inputs, width, stride in plan(self.width, self.width, [self.n] * 3):
            branch = blocks.basic(inputs, width, stride, self.norm)
            shortcut = blocks.zero_padded(inputs, width, stride)
            layers.append(blocks.Residual(branch, shortcut, nn.ReLU()))
        return blocks.initialised(nn.Sequential(*layers, *blocks.pooled(4 * self.width, classes)))


def _of_whole_blocks(depth: int) -> int:
    if depth % 6 != 4:
        raise ValueError("must be 6 n + 4: 10, 16, 22, 28, ...")
    return depth


class WideResNet(Model):
    """[model] name = "wide_resnet": WRN-depth-widen.

    depth: layers, 6 n + 4; widen: factor on the channels 16, 32, 64 of three stages
    dropout: between the convolutions of a block; norm: as of "resnet_cifar"
    Source: Zagoruyko, Komodakis, arXiv 1605.07146, table 1.
    """

    name: Literal["wide_resnet"] = "wide_resnet"
    depth: Annotated[int, Field(ge=10), AfterValidator(_of_whole_blocks)] = 16
    widen: Positive = 4
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    norm: Norm = "batch"

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network. See CifarResNet."""
        from torch import nn

        from . import blocks

        channels, _, _ = image_shape("WideResNet", sample_shape, 4)
        if self.depth % 6 != 4:
            raise ValueError(
                f"WideResNet: depth={self.depth}: must be 6 n + 4: 10, 16, 22, 28, ..."
            )
        width = 16 * self.widen
        network = nn.Sequential(
            *to_channels(sample_shape),
            blocks.conv(channels, 16, 3),
            *[
                blocks.preactivated(*block, self.norm, self.dropout)
                for block in plan(16, width, [(self.depth - 4) // 6] * 3)
            ],
            blocks.normalisation(self.norm, 4 * width),
            nn.ReLU(),
            *blocks.pooled(4 * width, classes),
        )
        return blocks.initialised(network)


BLOCKS = {  # layers of a network: its blocks by stage, and whether they are bottlenecks
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


class ResNet(Model):
    """[model] name = "resnet": the residual networks for ImageNet.

    depth: layers, in blocks of two convolutions up to 34, of three above
    stem: "imagenet" makes images a quarter as high and wide before the first stage, "cifar" leaves
        them as they are, by a convolution of 3 x 3
    width: channels of the first stage; norm: as of "resnet_cifar"
    Source: He et al., arXiv 1512.03385, table 1.
    """

    name: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 18
    width: Positive = 64
    stem: Literal["imagenet", "cifar"] = "imagenet"
    norm: Norm = "batch"

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network. See CifarResNet."""
        from torch import nn

        from . import blocks

        channels, _, _ = image_shape("ResNet", sample_shape, 4)
        large = self.stem == "imagenet"
        layers: list[nn.Module] = [
            *to_channels(sample_shape),
            blocks.conv(channels, self.width, *((7, 2) if large else (3,))),
            blocks.normalisation(self.norm, self.width),
            nn.ReLU(),
            *([nn.MaxPool2d(3, 2, padding=1)] if large else []),
        ]
        stages, bottlenecks = BLOCKS[self.depth]
        make, expansion = (blocks.bottleneck, 4) if bottlenecks else (blocks.basic, 1)
        for inputs, width, stride in plan(self.width, self.width, stages, expansion):
            branch = make(inputs, width, stride, self.norm)
            shortcut = blocks.projected(inputs, expansion * width, stride, self.norm)
            layers.append(blocks.Residual(branch, shortcut, nn.ReLU()))
        outputs = expansion * (self.width << len(stages) - 1)
        return blocks.initialised(nn.Sequential(*layers, *blocks.pooled(outputs, classes)))

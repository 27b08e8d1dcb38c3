"""Networks of the literature as data: the layers whose gradients travel, and what they compute.

Each is a rule of its architecture, not a list of numbers: a test holds the totals against the
published ones. What has no parameters, as pools and activations, is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

from ..compress.bucket import Bucket


class Layer(NamedTuple):
    """Parameters that are one tensor; shape as torch has it: outputs, inputs, window.

    positions: how often a sample multiplies by each of them in a forward pass
    """

    name: str
    shape: tuple[int, ...]
    positions: int


class Network(NamedTuple):
    """The layers in the order of a forward pass; sample: what a sample is, in the plural."""

    layers: tuple[Layer, ...]
    sample: str

    @property
    def parameters(self) -> int:
        """How many values a gradient has."""
        return sum(prod(layer.shape) for layer in self.layers)

    @property
    def flop(self) -> int:
        """Operations of a sample's forward and backward pass: 2 for each multiplication, 3 times.

        Backward multiplies twice as often: for the gradient of the weights and of the inputs.
        """
        return 6 * sum(prod(layer.shape) * layer.positions for layer in self.layers)

    @property
    def bucket(self) -> Bucket:
        """The layout of a gradient."""
        return Bucket(
            tuple(layer.name for layer in self.layers), tuple(layer.shape for layer in self.layers)
        )


def _weights(name: str, shape: tuple[int, ...], positions: int) -> Iterator[Layer]:
    """Yield a layer's weights and its bias."""
    yield Layer(f"{name}.weight", shape, positions)
    yield Layer(f"{name}.bias", shape[:1], 0)


def _convolution(
    name: str, outputs: int, inputs: int, window: int, side: int, norm: bool = False
) -> Iterator[Layer]:
    """Yield a convolution to side x side pixels, with a bias or else a batch norm behind it."""
    yield from _weights(name, (outputs, inputs, window, window), side * side)
    if norm:  # its two vectors are as long as the bias, which it makes superfluous
        yield Layer(f"{name}.norm", (outputs,), 0)


def alexnet() -> Network:
    """Return AlexNet, whose second, fourth and fifth layer have two groups.

    Source: Krizhevsky, Sutskever, Hinton: ImageNet classification with deep convolutional neural
    networks, NIPS 2012, section 3.5.
    """
    rows = [(96, 3, 11, 55), (256, 48, 5, 27), (384, 256, 3, 13), (384, 192, 3, 13)]
    layers: list[Layer] = []
    for i, row in enumerate([*rows, (256, 192, 3, 13)], 1):
        layers += _convolution(f"conv{i}", *row)
    for i, shape in enumerate([(4096, 256 * 6 * 6), (4096, 4096), (1000, 4096)], 6):
        layers += _weights(f"fc{i}", shape, 1)
    return Network(tuple(layers), "images")


def vgg_a() -> Network:
    """Return VGG-A, of 11 layers.

    Source: Simonyan, Zisserman: Very deep convolutional networks for large-scale image
    recognition, ICLR 2015, table 1.
    """
    layers: list[Layer] = []
    inputs, side = 3, 224
    for i, stage in enumerate([(64,), (128,), (256, 256), (512, 512), (512, 512)], 1):
        for j, outputs in enumerate(stage, 1):
            layers += _convolution(f"conv{i}_{j}", outputs, inputs, 3, side)
            inputs = outputs
        side //= 2
    for i, shape in enumerate([(4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)], 6):
        layers += _weights(f"fc{i}", shape, 1)
    return Network(tuple(layers), "images")


GOOGLENET_MODULES = {  # name -> side, then outputs: 1x1; 3x3 reduced, 3x3; 5x5 reduced, 5x5; pool
    "3a": (28, 64, 96, 128, 16, 32, 32),
    "3b": (28, 128, 128, 192, 32, 96, 64),
    "4a": (14, 192, 96, 208, 16, 48, 64),
    "4b": (14, 160, 112, 224, 24, 64, 64),
    "4c": (14, 128, 128, 256, 24, 64, 64),
    "4d": (14, 112, 144, 288, 32, 64, 64),
    "4e": (14, 256, 160, 320, 32, 128, 128),
    "5a": (7, 256, 160, 320, 32, 128, 128),
    "5b": (7, 384, 192, 384, 48, 128, 128),
}


def googlenet() -> Network:
    """Return GoogLeNet without its auxiliary classifiers.

    Source: Szegedy et al.: Going deeper with convolutions, CVPR 2015, table 1.
    """
    layers = [
        *_convolution("conv1", 64, 3, 7, 112),
        *_convolution("conv2.reduce", 64, 64, 1, 56),
        *_convolution("conv2", 192, 64, 3, 56),
    ]
    inputs = 192
    for name, (side, one, less3, three, less5, five, pool) in GOOGLENET_MODULES.items():
        layers += [
            *_convolution(f"{name}.1x1", one, inputs, 1, side),
            *_convolution(f"{name}.3x3.reduce", less3, inputs, 1, side),
            *_convolution(f"{name}.3x3", three, less3, 3, side),
            *_convolution(f"{name}.5x5.reduce", less5, inputs, 1, side),
            *_convolution(f"{name}.5x5", five, less5, 5, side),
            *_convolution(f"{name}.pool", pool, inputs, 1, side),
        ]
        inputs = one + three + five + pool
    return Network((*layers, *_weights("classifier", (1000, inputs), 1)), "images")


def resnet50() -> Network:
    """Return ResNet-50, that halves images in the 3 x 3 convolution of a block.

    Source: He, Zhang, Ren, Sun: Deep residual learning for image recognition, CVPR 2016, table 1.
    """
    layers = [*_convolution("conv1", 64, 3, 7, 112, norm=True)]
    inputs, side = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, out = 64 << stage, 56 >> stage
        for block in range(blocks):
            name = f"stage{stage + 1}.{block}"
            layers += _convolution(f"{name}.1", width, inputs, 1, side, norm=True)
            layers += _convolution(f"{name}.2", width, width, 3, out, norm=True)
            layers += _convolution(f"{name}.3", 4 * width, width, 1, out, norm=True)
            if block == 0:
                layers += _convolution(f"{name}.skip", 4 * width, inputs, 1, out, norm=True)
            inputs, side = 4 * width, out
    return Network((*layers, *_weights("classifier", (1000, inputs), 1)), "images")


TOKENS = 32  # of a sentence and of its translation, about the mean of WMT's
VOCABULARY = 37_000


def transformer() -> Network:
    """Return the base Transformer for translation, with one embedding for all its ends.

    Attention's products of activations, which have no parameters, are not counted.
    Source: Vaswani et al.: Attention is all you need, NIPS 2017, table 3.
    """
    width, inner = 512, 2048
    layers = [Layer("embedding", (VOCABULARY, width), TOKENS)]
    for part, attentions in (("encoder", 1), ("decoder", 2)):
        for i in range(6):
            name = f"{part}.{i}"
            for j in range(attentions):
                for each in ("query", "key", "value", "out"):
                    layers += _weights(f"{name}.attention{j}.{each}", (width, width), TOKENS)
                layers += _norm(f"{name}.attention{j}", width)
            layers += _weights(f"{name}.inner", (inner, width), TOKENS)
            layers += _weights(f"{name}.outer", (width, inner), TOKENS)
            layers += _norm(name, width)
    return Network(tuple(layers), "sentences")


def _norm(name: str, width: int) -> list[Layer]:
    return [Layer(f"{name}.norm.{each}", (width,), 0) for each in ("weight", "bias")]


NETWORKS: dict[str, Callable[[], Network]] = {
    "alexnet": alexnet,
    "googlenet": googlenet,
    "vgg-a": vgg_a,
    "resnet50": resnet50,
    "transformer": transformer,
}

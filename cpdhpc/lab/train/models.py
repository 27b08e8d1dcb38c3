"""Models of job files: a class and a row in MODELS each; their blocks are in blocks.py."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ...config import Above0, Positive, Section, Share
from ...lazy import Late

if TYPE_CHECKING:
    from torch import nn

    from . import blocks
else:
    nn, blocks = map(Late, ("torch.nn", "cpdhpc.lab.train.blocks"))


class Model(Section):
    """[model]: a network, named in MODELS."""

    @abstractmethod
    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network; its input is [batch, *sample_shape].

        classes: 0 if the data does not define them. Raises ValueError if it does not suit the
        samples.
        """


def image_shape(model: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Return channels, height and width of images [height, width] or [channels, height, width].

    model: prefix of the error
    Raises ValueError for other shapes, and for images of fewer rows or columns than least.
    """
    if len(shape) not in (2, 3) or min(shape[-2:]) < least:
        raise ValueError(
            f"{model}: inputs of {' x '.join(map(str, shape))}: must be images of at least "
            f"{least} x {least} pixels, channels first"
        )
    return shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1]


def to_channels(shape: tuple[int, ...]) -> list[nn.Module]:
    """Return a layer that adds a channel axis to images of two axes; none for others."""
    return [nn.Unflatten(1, (1, shape[0]))] if len(shape) == 2 else []


class LeNet(Model):
    """[model] name = "lenet": two convolutions with pooling, two fully connected layers.

    channels: channels of both convolutions; hidden: values of the hidden layer
    Source: LeCun et al., Gradient-based learning applied to document recognition, 1998,
    figure 2, with ReLU, maximum pooling and padding, so that small images keep their size.
    """

    name: Literal["lenet"] = "lenet"
    channels: Annotated[tuple[Positive, Positive], Field(strict=False)] = (16, 32)
    hidden: Positive = 128

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network; its input is float32[batch, height, width].

        Raises ValueError for images too small for two poolings.
        """
        inputs, height, width = image_shape("LeNet", sample_shape, 4)
        first, second = self.channels
        return nn.Sequential(
            *to_channels(sample_shape),
            nn.Conv2d(inputs, first, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * (height // 4) * (width // 4), self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, classes),
        )


class Mlp(Model):
    """[model] name = "mlp": fully connected layers with ReLU between them.

    hidden: values of each hidden layer
    """

    name: Literal["mlp"] = "mlp"
    hidden: Annotated[tuple[Positive, ...], Field(strict=False)] = (64,)

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network; its input is float32[batch, height, width]."""
        widths = (prod(sample_shape), *self.hidden, classes)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


class ResidualMlp(Model):
    """[model] name = "residual_mlp": fully connected blocks, each added to its input.

    width: values between blocks; blocks: number of blocks of two layers, with ReLU before both
    """

    name: Literal["residual_mlp"] = "residual_mlp"
    width: Positive = 64
    blocks: Positive = 12

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network; its input is float32[batch, *sample_shape]."""

        def layers() -> list[nn.Module]:
            pairs = [(nn.ReLU(), nn.Linear(self.width, self.width)) for _ in range(2)]
            return [layer for pair in pairs for layer in pair]

        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(prod(sample_shape), self.width),
            *(blocks.Residual(nn.Sequential(*layers())) for _ in range(self.blocks)),
            nn.ReLU(),
            nn.Linear(self.width, classes),
        )


Bits = Annotated[int, Field(ge=1, le=8)]


class QuantizedCnn(Model):
    """[model] name = "quantized_cnn": LeNet of codes, which `cpdhpc export` writes as integers.

    channels: channels of both convolutions; hidden: values of the hidden layer
    weight_bits, activation_bits, input_bits: bits of the codes; images are 0..1
    """

    name: Literal["quantized_cnn"] = "quantized_cnn"
    channels: Annotated[tuple[Positive, Positive], Field(strict=False)] = (8, 16)
    hidden: Positive = 64
    weight_bits: Annotated[int, Field(ge=2, le=8)] = 4
    activation_bits: Bits = 4
    input_bits: Bits = 8

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network. Raises ValueError for images too small for two poolings."""
        from ...torch.quantized import layers

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


Norm = Literal["batch", "group"]


def plan(
    inputs: int, width: int, stages: Sequence[int], expansion: int = 1
) -> Iterator[tuple[int, int, int]]:
    """Yield channels of the input, width and stride of each block.

    Each stage but the first begins with a stride of 2 and has twice the width of the one before.
    stages: their blocks; expansion: output channels of a block per width
    """
    for stage, count in enumerate(stages):
        for block in range(count):
            yield inputs, width << stage, 2 if stage and not block else 1
            inputs = expansion * (width << stage)


class CifarResNet(Model):
    """[model] name = "resnet_cifar": the residual network of 6 n + 2 layers for small images.

    n: blocks of each of three stages: 3 is ResNet-20, 5 ResNet-32; width: channels of stage 1
    norm: "batch", with the statistics of each rank's samples, or "group", of each sample
    Source: He et al., arXiv 1512.03385, section 4.2, with shortcuts without weights.
    """

    name: Literal["resnet_cifar"] = "resnet_cifar"
    n: Positive = 3
    width: Positive = 16
    norm: Norm = "batch"

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network; its input is float32[batch, (channels,) height, width].

        Raises ValueError for inputs that are not images of at least 4 x 4 pixels.
        """
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
    dropout: dropout between the convolutions of a block; norm: as for "resnet_cifar"
    Source: Zagoruyko, Komodakis, arXiv 1605.07146, table 1.
    """

    name: Literal["wide_resnet"] = "wide_resnet"
    depth: Annotated[int, Field(ge=10), AfterValidator(_of_whole_blocks)] = 16
    widen: Positive = 4
    dropout: Share = 0.0
    norm: Norm = "batch"

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, _, _ = image_shape("WideResNet", sample_shape, 4)
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
    stem: "imagenet" reduces height and width to a quarter before the first stage, "cifar" keeps
        them, with a convolution of 3 x 3
    width: channels of the first stage; norm: as for "resnet_cifar"
    Source: He et al., arXiv 1512.03385, table 1.
    """

    name: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 18
    width: Positive = 64
    stem: Literal["imagenet", "cifar"] = "imagenet"
    norm: Norm = "batch"

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
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


def sequence_length(model: str, shape: tuple[int, ...]) -> int:
    """Return the length of a sequence. Raises ValueError for samples of another shape."""
    if len(shape) != 1:
        raise ValueError(
            f"{model}: inputs of {' x '.join(map(str, shape))}: must be sequences of classes, "
            "of one axis"
        )
    return shape[0]


class RowLstm(Model):
    """[model] name = "row_lstm": an image's rows, each through a linear layer, go through an LSTM.

    hidden: values of the linear layer and of the LSTM
    Source: You et al., Large-batch training for LSTM and beyond, arXiv 1901.08256, its network for
    MNIST.
    """

    name: Literal["row_lstm"] = "row_lstm"
    hidden: Positive = 128

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network; its input is float32[batch, (channels,) height, width].

        Raises ValueError for inputs that are not images.
        """
        channels, _, width = image_shape("RowLstm", sample_shape, 1)
        return nn.Sequential(
            blocks.ImageRows(),
            nn.Linear(channels * width, self.hidden),
            blocks.Recurrent(self.hidden, self.hidden, batch_first=True),
            blocks.Last(),
            nn.Linear(self.hidden, classes),
        )


class LstmLanguageModel(Model):
    """[model] name = "lstm": predicts the next class at each place of a sequence of classes.

    embedding: values of a class; hidden: values of each layer of the LSTM; layers: their number
    dropout: dropout between, before and after layers; tied: embedding and output share
        weights, Press, Wolf, arXiv 1608.05859
    uniform: weights and biases are initialised in -uniform..uniform
    Every sequence begins with a state of zeros.
    Source: Zaremba et al., Recurrent neural network regularization, arXiv 1409.2329, section 4.1,
    whose small network is the default.
    """

    name: Literal["lstm"] = "lstm"
    embedding: Positive = 200
    hidden: Positive = 200
    layers: Positive = 2
    dropout: Share = 0.0
    tied: bool = False
    uniform: Above0 = 0.1

    @model_validator(mode="after")
    def _tied_have_one_shape(self) -> LstmLanguageModel:
        if self.tied and self.embedding != self.hidden:
            raise ValueError(f"tied=true: embedding={self.embedding}: must be hidden={self.hidden}")
        return self

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network: int64[batch, time] gives float32[batch, classes, time].

        Raises ValueError for samples that are not sequences.
        """
        sequence_length("LstmLanguageModel", sample_shape)
        embedding = nn.Embedding(classes, self.embedding)
        between = self.dropout if self.layers > 1 else 0.0
        recurrent = blocks.Recurrent(
            self.embedding, self.hidden, self.layers, batch_first=True, dropout=between
        )
        last, drop = nn.Linear(self.hidden, classes), nn.Dropout(self.dropout)
        if self.tied:
            last.weight = embedding.weight
        network = nn.Sequential(embedding, drop, recurrent, drop, last, blocks.ClassesFirst())
        for parameter in network.parameters():
            nn.init.uniform_(parameter, -self.uniform, self.uniform)
        return network


class Transformer(Model):
    """[model] name = "transformer": predicts the next class at each place, from all before it.

    width: values of a position; heads: heads of attention, which share the width
    layers: number of layers, each of attention and two linear ones with 4 width values between
    dropout: dropout of the embedding, of attention's weights and after each linear layer
    Source: Vaswani et al., arXiv 1706.03762; norms, GELU and the initial weights, normal numbers of
    deviation 0.02, as in Radford et al., Language models are unsupervised multitask learners,
    2019, section 2.3.
    """

    name: Literal["transformer"] = "transformer"
    width: Positive = 128
    heads: Positive = 4
    layers: Positive = 4
    dropout: Share = 0.1

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Transformer:
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: must be a multiple of heads={self.heads}")
        return self

    def build(self, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the network: int64[batch, time] gives float32[batch, classes, time].

        Raises ValueError for samples that are not sequences.
        """
        time = sequence_length("Transformer", sample_shape)
        network = nn.Sequential(
            nn.Embedding(classes, self.width),
            blocks.Positions(time, self.width),
            nn.Dropout(self.dropout),
            *[blocks.CausalLayer(self.width, self.heads, self.dropout) for _ in range(self.layers)],
            nn.LayerNorm(self.width),
            nn.Linear(self.width, classes),
            blocks.ClassesFirst(),
        )
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return network


MODELS: dict[str, type[Model]] = {
    "mlp": Mlp,
    "lenet": LeNet,
    "quantized_cnn": QuantizedCnn,
    "residual_mlp": ResidualMlp,
    "resnet_cifar": CifarResNet,
    "wide_resnet": WideResNet,
    "resnet": ResNet,
    "row_lstm": RowLstm,
    "lstm": LstmLanguageModel,
    "transformer": Transformer,
}

"""Networks for sequences: of an image's rows, or of classes as characters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from .plain import Model, Positive, image_shape

if TYPE_CHECKING:
    import torch

Share = Annotated[float, Field(ge=0, lt=1)]


def sequence_length(model: str, shape: tuple[int, ...]) -> int:
    """Return the places of a sequence. Raises ValueError for samples of another shape."""
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

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network; its input is float32[batch, (channels,) height, width].

        Raises ValueError for what is no image.
        """
        from torch import nn

        from . import blocks

        channels, _, width = image_shape("RowLstm", sample_shape, 1)
        return nn.Sequential(
            blocks.Rows(),
            nn.Linear(channels * width, self.hidden),
            blocks.Recurrent(self.hidden, self.hidden, batch_first=True),
            blocks.Last(),
            nn.Linear(self.hidden, classes),
        )


class LstmLanguageModel(Model):
    """[model] name = "lstm": says of each place of a sequence of classes what comes next.

    embedding: values of a class; hidden: values of each of the LSTM's layers; layers: their number
    dropout: between layers, and before and behind them; tied: embedding and output share
        weights, Press, Wolf, arXiv 1608.05859
    uniform: weights and biases begin as numbers in -uniform..uniform
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
    uniform: Annotated[float, Field(gt=0)] = 0.1

    @model_validator(mode="after")
    def _tied_have_one_shape(self) -> LstmLanguageModel:
        if self.tied and self.embedding != self.hidden:
            raise ValueError(f"tied=true: embedding={self.embedding}: must be hidden={self.hidden}")
        return self

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network: int64[batch, time] gives float32[batch, classes, time].

        Raises ValueError for samples that are no sequences.
        """
        from torch import nn

        from . import blocks

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
    """[model] name = "transformer": says of each place what comes next, from all before it.

    width: values of a place; heads: parts that attention has of them
    layers: each of attention and two linear layers with 4 width values between, a norm before both
    dropout: of the embedding, of attention's weights and behind each linear layer
    Source: Vaswani et al., arXiv 1706.03762; norms, GELU and the normal numbers of deviation 0.02
    that weights begin with as Radford et al., Language models are unsupervised multitask learners,
    2019, section 2.3, have them.
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

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network: int64[batch, time] gives float32[batch, classes, time].

        Raises ValueError for samples that are no sequences.
        """
        from torch import nn

        from . import blocks

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

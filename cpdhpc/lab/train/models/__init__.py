"""Models: a class and a row in MODELS each."""

from __future__ import annotations

from .networks import CifarResNet, LstmLanguageModel, ResNet, RowLstm, Transformer, WideResNet
from .plain import LeNet, Mlp, Model, QuantizedCnn, ResidualMlp

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

__all__ = [
    "MODELS",
    "CifarResNet",
    "LeNet",
    "LstmLanguageModel",
    "Mlp",
    "Model",
    "QuantizedCnn",
    "ResNet",
    "ResidualMlp",
    "RowLstm",
    "Transformer",
    "WideResNet",
]

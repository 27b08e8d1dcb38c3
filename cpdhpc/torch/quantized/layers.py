"""Layers of torch that train what integers will compute; between them are codes, whole numbers.

Weights are rounded to codes of few bits in each forward, and gradients pass as if they were not
(straight-through estimator: Bengio et al., arXiv 1308.3432). Activations are codes of 0..1, as in
DoReFa-Net (Zhou et al., arXiv 1606.06160). In evaluation, layers compute exactly from codes, so the
integer form cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...errors import UserError
from .integers import (
    MOST_BITS,
    SUMS,
    Flatten,
    Input,
    IntegerConvolution,
    IntegerLinear,
    IntegerNetwork,
    Layer,
    MaxPool,
    fold,
    integer_norm,
)

Array = npt.NDArray[Any]
Range = tuple[Array, Array]  # int64[channels] each: the least and the largest possible integer


class StraightThrough(torch.autograd.Function):
    """A rounding of values, with the gradient of the unrounded values."""

    @staticmethod
    def forward(
        context: Any, values: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the whole numbers."""
        return rounding(values)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient unchanged."""
        return gradients[0], None


def whole(
    values: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor] = torch.round
) -> torch.Tensor:
    """Return values rounded to whole numbers, with a straight-through gradient."""
    rounded: torch.Tensor = StraightThrough.apply(values, rounding)  # type: ignore[no-untyped-call]
    return rounded


def check_bits(layer: str, least: int, **bits: int) -> None:
    """Raise ValueError if bits are not least..8."""
    for name, value in bits.items():
        if not least <= value <= MOST_BITS:
            raise ValueError(f"{layer}: {name}={value}: must be {least}..{MOST_BITS}")


def _check_sums(layer: str, products: int, bits: int) -> None:
    largest = products * (2 ** (bits - 1) - 1) * (2**MOST_BITS - 1)
    if largest >= SUMS:
        raise ValueError(f"{layer}: sums of {products} products overflow int32 at {bits} bits")


def within(x: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """Return values cut to a range, with gradients for those in it, bounds included.

    torch's clamp has none at the bounds from torch 2.15 on: the largest weight is there.
    """
    return torch.where((x >= least) & (x <= most), x, x.detach().clamp(least, most))


def step_of(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the value of one unit of a weight code: codes are -m..m, m = 2^(bits - 1) - 1.

    It gives the largest weight a code, but is at most twice the mean magnitude over sqrt(m), which
    few bits need (Esser et al., Learned Step Size Quantization, arXiv 1902.08153, section 2.1).
    """
    size, most = weight.detach().abs(), 2 ** (bits - 1) - 1
    step = torch.minimum(size.amax() / most, 2 * size.mean() / math.sqrt(most))
    return step.clamp(min=2.0**-100)


def codes_of(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of weights, whole numbers in float32."""
    most = 2 ** (bits - 1) - 1
    bound = most * (1 + 2.0**-22)  # the largest weight may be beyond by two roundings of 2^-24
    return whole(within(weight / step_of(weight, bits), -bound, bound))


def _exactly(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in float32 if it holds every sum of their products exactly, else in float64."""
    largest = x.detach().abs().amax() * codes.detach().abs().flatten(1).sum(1).amax()
    dtype = torch.float32 if largest <= 2**24 else torch.float64
    return x.to(dtype), codes.to(dtype)


class QuantizedInput(nn.Module):
    """Values 0..1 to codes 0..2^bits - 1; images [n, height, width] get a channel.

    Raises UserError in forward if values are outside.
    """

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        check_bits("QuantizedInput", 1, bits=bits)
        self.bits = bits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the codes, whole numbers in float32[n, channels, height, width]."""
        low, high = images.aminmax()
        if not (low >= 0 and high <= 1):
            raise UserError(
                f"QuantizedInput: images: values {low:g}..{high:g}: must be 0..1, without "
                "another normalisation"
            )
        x = whole(images * (2**self.bits - 1))
        return x[:, None] if x.ndim == 3 else x


class QuantizedConv2d(nn.Conv2d):
    """A convolution of codes with weights of few bits, without bias: sums, for a norm."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        bits: int = 4,
    ) -> None:
        check_bits("QuantizedConv2d", 2, bits=bits)
        _check_sums("QuantizedConv2d", inputs * kernel_size**2, bits)
        super().__init__(inputs, outputs, kernel_size, stride, padding, bias=False)
        self.bits = bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums [n, outputs, height, width] of codes [n, inputs, height, width]."""
        codes = codes_of(self.weight, self.bits)
        if not self.training:
            x, codes = _exactly(x, codes)
        return nn.functional.conv2d(x, codes, None, self.stride, self.padding)


class QuantizedLinear(nn.Linear):
    """Products of codes with weights of few bits, without bias: sums, for a norm."""

    def __init__(self, inputs: int, outputs: int, bits: int = 4, bias: bool = False) -> None:
        check_bits(type(self).__name__, 2, bits=bits)
        _check_sums(type(self).__name__, inputs, bits)
        super().__init__(inputs, outputs, bias=bias)
        self.bits = bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums [n, outputs] of codes [n, inputs]."""
        codes = codes_of(self.weight, self.bits)
        if not self.training:
            x, codes = _exactly(x, codes)
        return nn.functional.linear(x, codes)


class QuantizedOutput(QuantizedLinear):
    """The last layer: a bias of whole steps, and scores in units of values.

    input_bits: of the incoming codes
    """

    def __init__(self, inputs: int, classes: int, bits: int = 4, input_bits: int = 4) -> None:
        super().__init__(inputs, classes, bits, bias=True)
        check_bits("QuantizedOutput", 1, input_bits=input_bits)
        self.input_bits = input_bits

    @property
    def step(self) -> torch.Tensor:
        """The value of one unit of the sums."""
        return step_of(self.weight, self.bits) / (2**self.input_bits - 1)

    def bias_codes(self) -> torch.Tensor:
        """Return the bias in steps, whole numbers that fit int32 with the sums."""
        return whole(within(self.bias / self.step, -SUMS / 2, SUMS / 2 - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, classes]; in evaluation float64, so that different sums differ."""
        sums, bias, step = super().forward(x), self.bias_codes(), self.step
        if not self.training:
            sums, bias, step = sums.double(), bias.double(), step.double()
        return (sums + bias) * step


class QuantizedNorm(nn.BatchNorm2d):
    """Batch norm of sums, then codes of 0..1: clip(floor(a x + b + 1/2)) in evaluation.

    Takes [n, channels] and [n, channels, height, width]. Its scale begins as 1/2, not 1: so fewer
    values begin above the largest code, in the range of zero gradients.
    """

    def __init__(self, channels: int, bits: int = 4) -> None:
        check_bits("QuantizedNorm", 1, bits=bits)
        super().__init__(channels)
        nn.init.constant_(self.weight, 0.5)
        self.bits = bits

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim not in (2, 4):
            raise ValueError(f"QuantizedNorm: input has {input.ndim} axes: must be 2 or 4")

    def folded(self) -> tuple[Array, Array]:
        """Return a and b, float64[channels]. Raises the ValueError of fold."""
        assert self.running_mean is not None, "statistics are tracked"
        assert self.running_var is not None, "statistics are tracked"
        gamma, beta = self.weight.detach().numpy(), self.bias.detach().numpy()
        mean, variance = self.running_mean.numpy(), self.running_var.numpy()
        return fold(gamma, beta, mean, variance, self.eps, self.bits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the codes, whole numbers in float32, of x's shape."""
        top = 2**self.bits - 1
        if self.training:
            return whole(within(super().forward(x) * top, 0, top))
        self._check_input_dim(x)
        shape = (-1, *[1] * (x.ndim - 2))
        a, b = (torch.from_numpy(each).reshape(shape) for each in self.folded())
        return within(whole(x.double() * a + b + 0.5, torch.floor), 0, top).float()


def _int8(layer: QuantizedConv2d | QuantizedLinear) -> Array:
    return np.asarray(codes_of(layer.weight, layer.bits).detach().numpy().astype(np.int8))


def _sums(weight: Array, top: int) -> Range:
    """Return the range of the sums of each output for codes 0..top."""
    wide = weight.astype(np.int64).reshape(len(weight), -1) * top
    return np.minimum(wide, 0).sum(1), np.maximum(wide, 0).sum(1)


def _convolution(layer: QuantizedConv2d, given: Range) -> tuple[Layer, Range]:
    weight = _int8(layer)
    made = IntegerConvolution(weight, layer.stride[0], int(layer.padding[0]))
    return made, _sums(weight, int(given[1].max()))


def _linear(layer: QuantizedLinear, given: Range) -> tuple[Layer, Range]:
    weight = _int8(layer)
    bias = np.zeros(len(weight), np.int32)
    if isinstance(layer, QuantizedOutput):
        bias = layer.bias_codes().detach().numpy().astype(np.int32)
    return IntegerLinear(weight, bias), _sums(weight, int(given[1].max()))


def _norm(layer: QuantizedNorm, given: Range) -> tuple[Layer, Range]:
    (a, b), (low, high) = layer.folded(), given
    return integer_norm(a, b, low, high, layer.bits), _codes(layer.bits)


def _maxpool(layer: nn.MaxPool2d, given: Range) -> tuple[Layer, Range]:
    size = layer.kernel_size
    rest = layer.stride, layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices
    if not isinstance(size, int) or rest != (size, 0, 1, False, False):
        raise ValueError("must have one size, its own stride, and no padding")
    return MaxPool(size), given


def _flatten(layer: nn.Flatten, given: Range) -> tuple[Layer, Range]:
    if (layer.start_dim, layer.end_dim) != (1, -1):
        raise ValueError("must keep the first axis alone")
    return Flatten(), given


def _codes(bits: int) -> Range:
    return np.array([0]), np.array([2**bits - 1])


class LayerConversion(NamedTuple):
    """The conversion of a layer to integers: convert(layer, range of the input).

    convert: None for layers that do nothing in evaluation
    """

    takes: str
    gives: str
    convert: Callable[[Any, Range], tuple[Layer, Range]] | None


FORMS: dict[type[nn.Module], LayerConversion] = {
    QuantizedInput: LayerConversion(
        "images", "codes", lambda of, _: (Input(of.bits), _codes(of.bits))
    ),
    QuantizedConv2d: LayerConversion("codes", "sums", _convolution),
    QuantizedLinear: LayerConversion("codes", "sums", _linear),
    QuantizedNorm: LayerConversion("sums", "codes", _norm),
    QuantizedOutput: LayerConversion("codes", "scores", _linear),
    nn.MaxPool2d: LayerConversion("codes", "codes", _maxpool),
    nn.Flatten: LayerConversion("codes", "codes", _flatten),
    nn.Dropout: LayerConversion("codes", "codes", None),
    nn.Identity: LayerConversion("codes", "codes", None),
}
ALLOWED = (
    "a network of integers is a torch.nn.Sequential of layers of cpdhpc.torch.quantized.layers "
    'from QuantizedInput to QuantizedOutput, as [model] name = "quantized_cnn" is'
)


def to_integers(model: nn.Module) -> IntegerNetwork:
    """Return the integer network that gives the same classes as model in evaluation.

    model: a torch.nn.Sequential of rows of FORMS, from QuantizedInput to QuantizedOutput
    Raises ValueError, naming the layer, for others and for sums that overflow.
    """
    layers: list[Layer] = []
    stage, given = "images", _codes(MOST_BITS)
    for name, layer in _layers(model):
        where = f"to_integers: layer {name} ({layer})"
        form = FORMS.get(type(layer))
        if form is None:
            known = ", ".join(each.__name__ for each in FORMS)
            raise ValueError(f"{where}: has no integer form: known are {known}: {ALLOWED}")
        if form.takes != stage:
            raise ValueError(f"{where}: takes {form.takes}: before it are {stage}: {ALLOWED}")
        try:
            if form.convert is not None:
                made, given = form.convert(layer, given)
                layers.append(made)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        stage = form.gives
    if stage != "scores":
        raise ValueError(
            f"to_integers: the last layer gives {stage}: must be a QuantizedOutput: {ALLOWED}"
        )
    return IntegerNetwork(layers)


def _layers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a Sequential and of those in it, by name."""
    if type(model) is not nn.Sequential:
        yield prefix.removesuffix("."), model
        return
    for name, child in model._modules.items():  # named_children skips repeated modules
        assert child is not None, "a Sequential has no holes"
        yield from _layers(child, f"{prefix}{name}.")

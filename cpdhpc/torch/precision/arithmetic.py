"""Torch tensors rounded to formats, and the three products of a layer under its policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...arrays import check_dense, check_floats, memory_of
from ...config import validate
from ...formats import FloatFormat
from ...ops import type_name
from ...randomness import random_key
from ..buffers import STATE
from .policy import LayerPolicy, Sums
from .products import matmul
from .tensors import TensorFormat

Rounded = Callable[[Tensor], Tensor]
FORMATS = {  # a tensor of a layer -> the key of its policy that has the format
    "activations": "activations",
    "weights": "weights",
    "errors": "errors",
    "weight_gradients": "weight_gradients",
    "bias_gradients": "weight_gradients",
    "outputs": "outputs",
}
OPERANDS = {  # a product -> the tensors of its rows and its columns
    "forward": ("activations", "weights"),
    "input_gradient": ("errors", "weights"),
    "weight_gradient": ("errors", "activations"),
    "bias_gradient": ("errors",),
}
SUMMED_AS = {"bias_gradient": "weight_gradient"}  # the policy's key for its summation

IN_FLOAT32 = torch.float32, torch.bfloat16, torch.float16  # dtypes whose values float32 holds


class Quantizer(nn.Module):
    """Rounds tensors of one name to a TensorFormat. It has no gradient of its own.

    In training it adapts scales, and stochastic rounding draws from torch's generator, like dropout
    (`train` seeds that by seed, iteration and rank). In evaluation scales are fixed, and the
    random bits depend on seed and name.
    how: format and scaling; name: of the tensor, for errors too
    """

    def __init__(self, how: TensorFormat, name: str, seed: int = 0) -> None:
        super().__init__()
        self.how, self.name = how, name
        self.key = random_key(seed, crc32(name.encode()))
        if how.learns:
            self.register_buffer(STATE, torch.from_numpy(how.state()))

    def extra_repr(self) -> str:
        """Return the text for printing a model."""
        return f"{self.how.format}, scaling={self.how.scaling}, rounding={self.how.rounding}"

    @torch.no_grad()
    def forward(self, x: Tensor, axis: int = -1) -> Tensor:
        """Return x rounded, or x itself if nothing changes; axis: the axis of blocks.

        x: float32 on the CPU, any shape and strides. Raises TypeError for anything else.
        """
        if not self.how.rounds:
            return x
        check_floats("Quantizer", self.name, x)
        key = self.key
        if self.training and self.how.rounding == "stochastic":
            low, high = torch.randint(1 << 32, (2,)).tolist()
            key = low, high
        values = np.asarray(memory_of(f"Quantizer: {self.name}", x), order="C")
        state = self._buffers.get(STATE)
        known = None if state is None else state.numpy()
        return torch.from_numpy(self.how.round(values, key, axis, known, self.training))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state; if there is none (a float32 checkpoint), the scale adapts anew."""
        state = self._buffers.get(STATE)
        if state is not None and prefix + STATE not in state_dict:
            state_dict[prefix + STATE] = torch.from_numpy(self.how.state())
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Quantized(torch.autograd.Function):
    """A rounding of values, and another of their gradient."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, forward: Rounded | None, backward: Rounded | None
    ) -> Tensor:
        _check_held(x)
        context.backward_by = backward
        return x.view_as(x) if forward is None else in_float32(forward, x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        by = context.backward_by
        return gradient if by is None else in_float32(by, gradient), None, None


def in_float32(by: Rounded, x: Tensor) -> Tensor:
    """Apply a rounding of float32 to values and return them in their own dtype.

    Raises TypeError if float32 cannot hold them.
    """
    _check_held(x)
    return by(x.float()).to(x.dtype)


def _check_held(x: object) -> None:
    """Raise TypeError unless x is a dense tensor whose values float32 can hold."""
    came = x.dtype if isinstance(x, Tensor) else type_name(x)
    if came not in IN_FLOAT32:
        raise TypeError(f"quantize: x is {came}: allowed are float32, bfloat16 and float16 tensors")
    check_dense("quantize: x", x)


Given = str | TensorFormat | nn.Module | None


def quantize(x: Tensor, forward: Given = None, backward: Given = None) -> Tensor:
    """Return x rounded to a format; its gradient is rounded to another, and passes through.

    x: float32, bfloat16 or float16 of any shape, on the CPU; not changed
    forward, backward: names of formats, TensorFormats or Quantizers, which keep the state of
        their scale; None: no rounding
    Stochastic roundings draw from torch's default generator.
    A finite number that is too large becomes infinity or NaN if the format has one of them.
    Raises TypeError for another dtype; ConfigError for an unknown format; RuntimeError if the
    gradient of the gradient is requested. Source: Han et al., arXiv 1911.08907, for the quantizer;
    Bengio et al., arXiv 1308.3432, for the straight-through gradient.
    """
    return through(x, _rounded(forward), _rounded(backward))


def through(x: Tensor, forward: Rounded | None, backward: Rounded | None) -> Tensor:
    """Return x, rounded; its gradient is rounded too, and passes through."""
    if forward is None and backward is None:
        return x
    rounded: Tensor = _Quantized.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return rounded


def _rounded(given: Given) -> Rounded | None:
    if isinstance(given, str):
        given = validate(TensorFormat, {"format": given}, "quantize")
    return Quantizer(given, "quantize") if isinstance(given, TensorFormat) else given


@lru_cache(maxsize=256)
def _held(rows: tuple[TensorFormat | None, ...]) -> FloatFormat | None:
    """Return an IEEE format that contains all values of tensors; None if no small one is known."""
    exp, man = 1, 1  # one mantissa bit at least, so that NaN stays
    for row in rows:
        if row is None or row.scaling != "none" or not isinstance(row.cast.fmt, FloatFormat):
            return None
        fmt = row.cast.fmt
        exp, man = max(exp, fmt.exp + (fmt.special != "ieee")), max(man, fmt.man)
    return FloatFormat(exp, man)


class Arithmetic(nn.Module):
    """The roundings of a layer's tensors and products, with their state.

    name: of the layer; with seed it selects the random bits in evaluation
    A tensor is named by a key of FORMATS, a product by one of OPERANDS.
    """

    def __init__(self, policy: LayerPolicy, name: str = "", seed: int = 0) -> None:
        super().__init__()
        self.policy, self.name = policy, name
        self.key = random_key(seed, crc32(name.encode()))
        rows = {tensor: getattr(policy, key) for tensor, key in FORMATS.items()}
        self.rows: dict[str, TensorFormat] = {key: row for key, row in rows.items() if row}
        for tensor, row in self.rows.items():
            self.add_module(tensor, Quantizer(row, f"{name}.{tensor}", seed))

    @property
    def keeps(self) -> bool:
        """Whether it has state, which belongs in checkpoints."""
        return next(self.buffers(), None) is not None

    def sums(self, product: str) -> Sums | None:
        """Return how a product is summed; None: by torch."""
        sums: Sums | None = getattr(self.policy, SUMMED_AS.get(product, product))
        return None if sums is None or sums.by_torch else sums

    def by_blocks(self, tensor: str) -> bool:
        """Whether a tensor is rounded anew for each product, in blocks along the summed axis."""
        return tensor in self.rows and self.rows[tensor].by_blocks

    def round(self, tensor: str, x: Tensor, axis: int = -1) -> Tensor:
        """Return a tensor in its format; axis: the axis of blocks."""
        rounded: Tensor = self._modules[tensor](x, axis) if tensor in self.rows else x  # type: ignore[misc]
        return rounded

    def rounding(self, tensor: str) -> Rounded | None:
        """Return the rounding of a tensor, with blocks along the last axis; None: no rounding."""
        return self._modules.get(tensor)

    def round_output(self, layer: nn.Module, given: Any, output: Any) -> Any:
        """Return a layer's output in its format, if it is a tensor; a forward hook."""
        self.train(layer.training)
        is_tensor = isinstance(output, Tensor)
        return through(output, self.rounding("outputs"), None) if is_tensor else output

    def once(self, tensor: str, x: Tensor) -> Tensor:
        """Return an operand in its format, unless that is done for each product."""
        return x if self.by_blocks(tensor) else self.round(tensor, x)

    def by_torch(self, product: str) -> bool:
        """Whether torch computes the whole product, of operands that are already rounded."""
        return self.sums(product) is None and not any(map(self.by_blocks, OPERANDS[product]))

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return the products of a's rows and b's columns: float32[batch, m, k], [batch, k, n]."""
        of_rows, of_columns = OPERANDS[name]
        a = self.round(of_rows, a) if self.by_blocks(of_rows) else a
        b = self.round(of_columns, b, -2) if self.by_blocks(of_columns) else b
        held = _held(tuple(map(self.rows.get, OPERANDS[name])))
        return self._summed(name, a, b, held)

    def _summed(self, name: str, a: Tensor, b: Tensor, held: FloatFormat | None) -> Tensor:
        """Return a @ b; held: a format that contains all values, for a faster matmul."""
        sums = self.sums(name)
        if sums is None:
            return torch.matmul(a, b)
        low, high = self.key
        if self.training and sums.rounding == "stochastic":
            low, high = torch.randint(1 << 32, (2,)).tolist()
        summed: Tensor = matmul(a, b, inputs=held, seed=high << 32 | low, **sums.arguments)
        return summed

    def sum_rows(self, rows: Tensor) -> Tensor:
        """Return the sum over m of errors float32[m, n]."""
        if self.by_blocks("errors"):
            rows = self.round("errors", rows, 0)
        held = _held((self.rows.get("errors"),))  # it contains 1
        return self._summed("bias_gradient", rows.new_ones(1, len(rows)), rows, held)[0]


class LayerOperation(ABC):
    """A layer's function of x, weight and bias: by torch, and as products of matrices.

    x, weight: their shapes, set by products()
    The matrices are the operands of Arithmetic.product, see OPERANDS.
    """

    x: torch.Size
    weight: torch.Size

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return torch's result."""

    @abstractmethod
    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> list[Tensor]:
        """Return torch's gradients of x, weight and bias, those selected by mask."""

    @abstractmethod
    def for_forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices of the forward product."""

    @abstractmethod
    def output(self, product: Tensor) -> Tensor:
        """Return the layer's output without a bias, from that product."""

    @abstractmethod
    def for_input(self, g: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices whose product is x's gradient."""

    @abstractmethod
    def input(self, product: Tensor) -> Tensor:
        """Return x's gradient from that product."""

    @abstractmethod
    def for_weight(self, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices whose product is weight's gradient, except for its shape."""

    def of_weight(self, product: Tensor) -> Tensor:
        """Return weight's gradient from that product."""
        return product.reshape(self.weight)

    @abstractmethod
    def rows(self, g: Tensor) -> Tensor:
        """Return g as float32[m, outputs], whose sum over m is bias's gradient."""

    def biased(self, output: Tensor, bias: Tensor) -> Tensor:
        """Return the output with a bias."""
        return output + bias


GRADIENTS = "input_gradient", "weight_gradient", "bias_gradient"


class _Products(torch.autograd.Function):
    """A layer's output and gradients, with each product under its policy."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operation: LayerOperation,
        arithmetic: Arithmetic,
    ) -> Tensor:
        x = arithmetic.once("activations", x)
        context.save_for_backward(x, weight)
        context.operation, context.arithmetic = operation, arithmetic
        if arithmetic.by_torch("forward"):
            return operation.forward(x, weight, bias)
        product = arithmetic.product("forward", *operation.for_forward(x, weight))
        output = operation.output(product)
        return output if bias is None else operation.biased(output, bias)

    @staticmethod
    @once_differentiable
    def backward(context: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors
        operation, arithmetic = context.operation, context.arithmetic
        g = arithmetic.once("errors", g)
        needed = dict(zip(GRADIENTS, context.needs_input_grad, strict=False))
        by_torch = [needed[name] and arithmetic.by_torch(name) for name in GRADIENTS]
        by_products = [needed[name] and not by_torch[i] for i, name in enumerate(GRADIENTS)]
        found: list[Tensor | None] = [None] * 3
        if any(by_torch):
            gradients = operation.gradients(g, x, weight, by_torch)
            found = [gradients[i] if is_there else None for i, is_there in enumerate(by_torch)]
        if by_products[0]:
            matrices = operation.for_input(g, weight)
            found[0] = operation.input(arithmetic.product("input_gradient", *matrices))
        if by_products[1]:
            matrices = operation.for_weight(g, x)
            found[1] = operation.of_weight(arithmetic.product("weight_gradient", *matrices))
        if by_products[2]:
            found[2] = arithmetic.sum_rows(operation.rows(g))
        return *found, None, None


def products(
    operation: LayerOperation,
    arithmetic: Arithmetic,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return a layer's output, in x's dtype, for parameters prepared by parameters().

    operation: of this call alone, as backward reads its shapes
    """
    _check(arithmetic, "x", x)
    operation.x, operation.weight = x.shape, weight.shape
    output: Tensor = _Products.apply(x.float(), weight, bias, operation, arithmetic)  # type: ignore[no-untyped-call]
    return through(output, arithmetic.rounding("outputs"), None).to(x.dtype)


def parameters(
    arithmetic: Arithmetic, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a layer's parameters in float32 and in their format, once for all its products.

    Raises TypeError if weight is not float32, bfloat16 or float16.
    """
    _check(arithmetic, "weight", weight)
    by = None if arithmetic.by_blocks("weights") else arithmetic.rounding("weights")
    weight = through(weight.float(), by, arithmetic.rounding("weight_gradients"))
    if bias is not None:
        bias = through(bias.float(), None, arithmetic.rounding("bias_gradients"))
    return weight, bias


def _check(arithmetic: Arithmetic, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in IN_FLOAT32:
        raise TypeError(
            f"{arithmetic.name}: {name} is {tensor.dtype}: allowed are float32, bfloat16 and "
            "float16, which float32 holds"
        )

"""Layers that obey a policy: torch's bits, its values in float32, and each rounding by gfloat."""

from collections.abc import Iterator
from copy import deepcopy
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from oracles import gfloat_round
from torch import Tensor, nn

from cpdhpc.config import ConfigError, validate
from cpdhpc.formats import Cast, parse_format
from cpdhpc.ops import reference
from cpdhpc.torch import precision
from cpdhpc.torch.precision import Policy, convert, layers, quantize
from cpdhpc.torch.precision.arithmetic import _held
from cpdhpc.torch.precision.tensors import TensorFormat

pytestmark = pytest.mark.usefixtures("one_thread")

Array = np.ndarray[Any, np.dtype[Any]]
UNIT = 2.0**-24  # of rounding to float32
SUMS = ("forward", "input_gradient", "weight_gradient")
FLOAT32 = dict.fromkeys(SUMS, "fp32")
CONVOLUTIONS: list[dict[str, Any]] = [  # options of torch's
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "padding_mode": "reflect"},
    {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2, "padding_mode": "circular"},
    {"kernel_size": 1, "stride": 2, "groups": 4, "padding_mode": "replicate", "bias": False},
    {"kernel_size": 4, "stride": 3, "padding": 5},
]


def policy(*rules: dict[str, Any], **keys: Any) -> Policy:
    return Policy.model_validate({"rule": list(rules), **keys})


def everywhere(**keys: Any) -> Policy:
    return policy({"layers": "*", **keys})


def passed(layer: nn.Module, x: Tensor, g: Tensor | None = None) -> list[Tensor]:
    """What a layer gives, and the gradients of its input and parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if g is None else g)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def cases() -> Iterator[tuple[nn.Module, Tensor]]:
    torch.manual_seed(1)
    yield nn.Linear(7, 5), torch.randn(9, 7)
    yield nn.Linear(7, 5, bias=False), torch.randn(2, 3, 7)
    for axes, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), 1):
        for options in CONVOLUTIONS if axes == 2 else CONVOLUTIONS[1:6:2]:
            yield kind(4, 8, **options), torch.randn(2, 4, *(7, 6, 5)[:axes])
        yield kind(4, 8, 3), torch.randn(4, *(7, 6, 5)[:axes])


def test_without_rounding_layers_have_the_bits_of_torch() -> None:
    """By torch's products: two of them beside our sums."""
    for layer, x in cases():
        wanted = passed(layer, x)
        for own in (("forward",), ("input_gradient",), ("weight_gradient",)):
            ours = convert(
                deepcopy(layer), everywhere(weights="fp32", **dict.fromkeys(own, "fp32"))
            )
            assert isinstance(ours, layers.Obedient)
            found = passed(ours, x)
            exact = {"forward": [0], "input_gradient": [1], "weight_gradient": [2, 3]}
            mine = {at for name in own for at in exact[name]}
            for at, (want, got) in enumerate(zip(wanted, found, strict=True)):
                assert at in mine or torch.equal(want, got), (layer, own, at)


class Block(nn.Module):
    """Dropout in attention, with and without its weights, and between layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5)  # torch scales by sqrt(1 / 3)
        self.lstm = nn.LSTM(6, 6, 2, dropout=0.5)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixture, _ = self.attention(x, x, x)
        quick, _ = self.attention(x, x, mixture, need_weights=False)
        values, _ = self.lstm(quick)
        self.values = values.detach()
        return torch.as_tensor(self.fc(values))


def test_layers_of_which_nothing_is_asked_stay_torchs() -> None:
    """In training, with dropout, and in evaluation."""
    torch.manual_seed(10)
    block, x = Block(), torch.randn(5, 4, 6)
    nothing = {"forward": "torch", "weights": "fp32", "outputs": "fp32"}
    for training in (True, False):
        found = []
        for model in (
            block,
            convert(deepcopy(block), everywhere(**nothing)),
            convert(deepcopy(block), policy({"layers": "fc", "weights": "e4m3"})),
        ):
            torch.manual_seed(11)
            found.append([*passed(model.train(training), x)[:2], model.values])
        assert all(map(torch.equal, found[0], found[1]))
        assert torch.equal(found[0][2], found[2][2])
        assert not torch.equal(found[0][0], found[2][0])


def test_what_comes_before_a_rounded_projection_is_torchs() -> None:
    """Where a rule is for out_proj alone: weights and mixtures of attention have torch's bits."""
    torch.manual_seed(12)
    theirs, x = nn.MultiheadAttention(6, 2, dropout=0.5), torch.randn(5, 4, 6)
    ours = convert(deepcopy(theirs), policy({"layers": "out_proj", "outputs": "e4m3"}))
    assert isinstance(ours, layers.Attention)
    for needed in (True, False):
        torch.manual_seed(13)
        want, weights = theirs(x, x, x, need_weights=needed)
        torch.manual_seed(13)
        got, own = ours(x, x, x, need_weights=needed)
        assert np.array_equal(got.detach().double().numpy(), rounded(want.detach().numpy(), "e4m3"))
        assert weights is own is None or torch.equal(weights, own)


def test_layers_without_a_policy_are_torchs() -> None:
    torch.manual_seed(14)
    x = torch.randn(5, 4, 6)
    for kind, own in ((nn.MultiheadAttention, layers.Attention), (nn.LSTM, layers.Lstm)):
        theirs, ours = kind(6, 2), own(6, 2)
        ours.load_state_dict(theirs.state_dict())
        given = (x, x, x) if own is layers.Attention else (x,)
        assert torch.equal(theirs(*given)[0], ours(*given)[0])


def test_sums_in_float32_are_those_of_torch_in_float64() -> None:
    """Within the error of sums: n u / (1 - n u) of the sum of magnitudes, n roundings of a term.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1. A bias adds one rounding;
    a sum of magnitudes is what the layer makes of magnitudes.
    """
    for layer, x in cases():
        torch.manual_seed(2)
        g = torch.randn_like(layer(x))
        found = passed(convert(deepcopy(layer), everywhere(**FLOAT32)), x, g)
        exact = passed(deepcopy(layer).double(), x.double(), g.double())
        positive = deepcopy(layer).double()
        for p in positive.parameters():
            p.data.abs_()
        magnitudes = passed(positive, x.double().abs(), g.double().abs())
        seen = prod(layer.weight.shape[1:])
        groups = getattr(layer, "groups", 1)
        back = seen // layer.weight.shape[1] * len(layer.weight) // groups
        rows = g.numel() // len(layer.weight)
        # Padding by other than zeros adds gradients of pixels that are copied, at most 2 an axis
        # and side, in float32: 9 more additions are above that for the images here.
        terms = [seen + 1, back + 9, rows + 1, rows]
        for at, (want, got) in enumerate(zip(exact, found, strict=True)):
            n = terms[at] + 1
            bound = n * UNIT / (1 - n * UNIT) * magnitudes[at]
            assert (abs(got.double() - want) <= bound).all(), (layer, at)


def rounded(x: Array, name: str) -> Array:
    return gfloat_round(np.asarray(x, np.float64), parse_format(name))


def summed(a: Array, b: Array, name: str, chunk: int) -> Array:
    """Rows of a times columns of b in ascending order, each product and sum rounded by gfloat.

    float64 is exact: numbers of few bits, within 2**40 of each other.
    """
    total = np.zeros((len(a), b.shape[1]))
    for begin in range(0, a.shape[1], chunk):
        part = np.zeros_like(total)
        for k in range(begin, min(begin + chunk, a.shape[1])):
            part = rounded(part + rounded(a[:, k, None] * b[None, k], name), name)
        total = rounded(total + part, name)
    return total


def columns(x: Array, kernel: int, stride: int, before: int, behind: int) -> Array:
    """What a filter sees of each place of [batch, channels, n, n], by loops over its pixels."""
    around = ((0, 0), (0, 0), (before, behind), (before, behind))
    wide = np.pad(x, around)
    size = (wide.shape[2] - kernel) // stride + 1
    return np.array(
        [
            [
                image[c, i * stride + p, j * stride + q]
                for c in range(x.shape[1])
                for p in range(kernel)
                for q in range(kernel)
            ]
            for image in wide
            for i in range(size)
            for j in range(size)
        ]
    )


FEW_BITS = {
    "weights": "e4m3",
    "activations": "e4m3",
    "errors": "e5m2",
    "weight_gradients": "e5m2",
    "outputs": "e4m3",
    **{key: {"accumulate": "e6m9", "chunk": 8} for key in SUMS},
}


def test_every_rounding_of_a_linear_layer_and_of_a_convolution() -> None:
    """Products of a convolution are those of columns; of errors the pixels lie stride apart."""
    torch.manual_seed(3)
    linear, conv = nn.Linear(19, 4), nn.Conv2d(2, 3, 3, stride=2, padding=1)
    for layer, x, g in (
        (linear, torch.randn(11, 19), torch.randn(11, 4)),
        (conv, torch.randn(2, 2, 6, 6), torch.randn(2, 3, 3, 3)),
    ):
        found = passed(convert(deepcopy(layer), everywhere(**FEW_BITS)), x, g)
        a, w = rounded(x.numpy(), "e4m3"), rounded(layer.weight.detach().numpy(), "e4m3")
        e, bias = rounded(g.numpy(), "e5m2"), layer.bias.detach().numpy()
        seen, back, flipped, rows = a, e, w, e.T
        if layer is conv:
            spread = np.zeros((2, 3, 5, 5))
            spread[:, :, ::2, ::2] = e
            seen, back = columns(a, 3, 2, 1, 1), columns(spread, 3, 1, 1, 2)
            flipped = w[:, :, ::-1, ::-1].transpose(0, 2, 3, 1).reshape(-1, 2)
            rows = e.transpose(1, 0, 2, 3).reshape(3, -1)
        output = summed(seen, w.reshape(len(w), -1).T, "e6m9", 8).astype(np.float32) + bias
        of_x = summed(back, flipped, "e6m9", 8)
        of_w = summed(rows, seen, "e6m9", 8).reshape(w.shape)
        of_b = summed(np.ones((1, rows.shape[1])), rows.T, "e6m9", 8)[0]
        if layer is conv:
            output = output.reshape(2, 3, 3, 3).transpose(0, 3, 1, 2)
            of_x = of_x.reshape(2, 6, 6, 2).transpose(0, 3, 1, 2)
        wanted = [rounded(output, "e4m3"), of_x, rounded(of_w, "e5m2"), rounded(of_b, "e5m2")]
        for want, got in zip(wanted, found, strict=True):
            assert np.array_equal(want, got.double().numpy())


def in_blocks(x: Array) -> Array:
    """MXFP4 along the last axis: OCP Microscaling Formats v1.0, section 6.3."""
    out = np.empty_like(x)
    for begin in range(0, x.shape[-1], 32):
        part = x[..., begin : begin + 32]
        scale = 2.0 ** (np.floor(np.log2(abs(part).max(-1, keepdims=True))) - 2)  # of E2M1: 2**2
        out[..., begin : begin + 32] = scale * gfloat_round(
            part / scale, parse_format("e2m1fn"), overflow="saturate"
        )
    return out


def test_blocks_lie_along_what_each_product_sums() -> None:
    """float64 is exact, and torch's float32 too: 4 bits a number, within 2**9 of each other."""
    torch.manual_seed(5)
    layer = nn.Linear(40, 36)
    x, g = torch.rand(35, 40) + 0.5, torch.rand(35, 36) + 0.5
    keys = dict.fromkeys(("weights", "activations", "errors"), "mxfp4")
    layer.bias.data.zero_()
    _, of_x, of_w, of_b = passed(convert(deepcopy(layer), everywhere(**keys)), x, g)
    a, e = x.double().numpy(), g.double().numpy()
    w = layer.weight.detach().double().numpy()
    assert np.array_equal(of_x.numpy(), in_blocks(e) @ in_blocks(w.T).T)
    assert np.array_equal(of_w.numpy(), in_blocks(e.T) @ in_blocks(a.T).T)
    assert np.array_equal(of_b.numpy(), in_blocks(e.T).sum(1))


@every("names", [("e4m3fn", "e5m2"), ("e3m2fn", "e2m1fn"), ("e3m0", "bf16")])
def test_a_format_that_holds_two_has_all_their_numbers(names: tuple[str, ...]) -> None:
    """matmul is told so, and may then use float32: else bits of e4m3fn, say, would be others."""
    held = _held(tuple(TensorFormat(format=name) for name in names))
    assert held is not None
    for name in names:
        fmt = TensorFormat(format=name).cast.fmt
        values = reference.decode(np.arange(2**fmt.bits, dtype=np.uint32), fmt)
        again = reference.decode(reference.encode(values, Cast(held, "nearest", "inf")), held)
        assert np.array_equal(values, again, equal_nan=True)


def test_sums_take_few_random_bits() -> None:
    """As matmul, and so gfloat: in evaluation the seed follows from the layer's name."""
    torch.manual_seed(15)
    layer, x = nn.Linear(9, 4, bias=False).eval(), torch.randn(6, 9)
    found = []
    for bits in (0, 2):
        sums = {"accumulate": "e4m3", "rounding": "stochastic", "random_bits": bits}
        ours = convert(deepcopy(layer), everywhere(forward=sums))
        assert isinstance(ours, layers.Linear)
        low, high = ours.part("product").key
        found.append(ours(x).detach())
        wanted = precision.matmul(x, layer.weight.detach().t(), seed=high << 32 | low, **sums)
        assert torch.equal(found[-1], wanted)
    assert not torch.equal(*found)
    with pytest.raises(ConfigError, match="random_bits=2: e4m3 allows 0"):
        validate(Policy, {"rule": [{"layers": "*", "forward": {**sums, "rounding": "up"}}]}, "x")


def test_batches_of_matrices_are_broadcast_and_rounded() -> None:
    torch.manual_seed(6)
    a, b = torch.randn(2, 1, 3, 5), torch.randn(4, 5, 6)
    ours = layers.BatchMatmul(policy={"activations": "e4m3", "errors": "e5m2", **FLOAT32})
    one, two = a.clone().requires_grad_(), b.clone().requires_grad_()
    y = ours(one, two)
    assert y.shape == (2, 4, 3, 6)
    g = torch.randn_like(y)
    y.backward(g)
    x, z = (torch.from_numpy(rounded(each.numpy(), "e4m3")) for each in (a, b))
    e = torch.from_numpy(rounded(g.numpy(), "e5m2"))
    wanted = [x @ z, (e @ z.mT).sum(1, keepdim=True), (x.mT @ e).sum(0)]
    for want, got in zip(wanted, (y, one.grad, two.grad), strict=True):
        # at most 6 products and 4 sums of the batch, each term below 2**7
        assert abs(want - got).max() <= 10 * UNIT * 6 * 2**7


ATTENTIONS: list[dict[str, Any]] = [
    {},
    {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True},
    {"bias": False, "kdim": 8, "vdim": 8},
]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((abs(found.detach().double() - exact).max() / abs(exact).max()).detach())


@every("options", ATTENTIONS)
def test_attention_is_that_of_torch(options: dict[str, Any]) -> None:
    """With every mask. 2**-18: 64 roundings, of values not far below the largest."""
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(8, 2, **options)
    ours = convert(deepcopy(theirs), everywhere(**FLOAT32))
    double = deepcopy(theirs).double()
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for x, batch in ((torch.randn(5, 5, 8), 5), (torch.randn(5, 8), 1)):
        ends = torch.zeros(batch, 5, dtype=torch.bool)
        ends[0, -1] = True
        for named in (
            {},
            {"attn_mask": later, "key_padding_mask": ends if x.dim() == 3 else ends[0]},
            {"attn_mask": torch.randn(2 * batch, 5, 5), "average_attn_weights": False},
            {"need_weights": False},
        ):
            exact = {k: v.double() if getattr(v, "is_floating_point", bool)() else v
                     for k, v in named.items()}  # fmt: skip
            got, want = ours(x, x, x, **named), double(*[x.double()] * 3, **exact)
            for mine, other in zip(got, want, strict=True):
                assert (mine is None) == (other is None)
                assert mine is None or mine.shape == other.shape
                assert mine is None or relative(mine, other) <= 2**-18
            got[0].square().sum().backward()
            want[0].square().sum().backward()
    for mine, other in zip(ours.parameters(), double.parameters(), strict=True):
        assert relative(mine.grad, other.grad) <= 2**-18


@every(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"proj_size": 3}]
)
def test_an_lstm_is_that_of_torch(options: dict[str, Any]) -> None:
    """2**-16: sums over times of gradients of both signs lose two bits more than above."""
    torch.manual_seed(8)
    theirs = nn.LSTM(5, 6, **options)
    ours, double = convert(deepcopy(theirs), everywhere(**FLOAT32)), deepcopy(theirs).double()
    for x in (torch.randn(4, 3, 5), torch.randn(4, 5)):
        mine, (h, c) = ours(x)
        other, (p, q) = double(x.double())
        for got, want in ((mine, other), (h, p), (c, q)):
            assert got.shape == want.shape
            assert relative(got, want) <= 2**-18
        mine.square().sum().backward()
        other.square().sum().backward()
    for got, want in zip(ours.parameters(), double.parameters(), strict=True):
        assert relative(got.grad, want.grad) <= 2**-16
    with pytest.raises(TypeError, match="Lstm: x is PackedSequence: must be a tensor"):
        ours(nn.utils.rnn.pack_sequence([torch.randn(3, 5)]))


class Somebodys(torch.Tensor):
    """A subclass whose values are where a tensor's are."""


def test_quantize_rounds_values_and_gradients() -> None:
    x = torch.tensor([0.3, -500.0, 1.06, 0.0], requires_grad=True)
    y = quantize(x, "e4m3", "e5m2")
    assert y.tolist() == [0.3125, -np.inf, 1.0, 0.0]
    y.backward(torch.tensor([0.3, 1.0, -1.1, 3.3]))
    assert x.grad is not None
    assert x.grad.tolist() == [0.3125, 1.0, -1.0, 3.5]
    half = torch.tensor([1.0, 3.3], dtype=torch.bfloat16)
    assert quantize(half, "e2m1fn").dtype is torch.bfloat16
    with pytest.raises(TypeError, match=r"quantize: x is torch\.float64: allowed are float32"):
        quantize(torch.ones(2, dtype=torch.float64), "e4m3")
    for wrong in (
        torch.ones(2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2)]),
        [1.0],
        None,
    ):
        for formats in (("e4m3", None), (None, "e4m3")):
            with pytest.raises(TypeError, match=r"quantize: x is .*: (should be a dense|allowed)"):
                quantize(wrong, *formats)  # type: ignore[arg-type]
    assert quantize(x.detach().as_subclass(Somebodys), "e4m3").tolist() == y.tolist()
    (first,) = torch.autograd.grad(quantize(x, "e4m3").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()

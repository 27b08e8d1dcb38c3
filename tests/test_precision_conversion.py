"""Whole models that obey a policy: what convert keeps of them, and what it refuses."""

import pickle
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from test_models import SEQUENCES, tiny
from test_precision_layers import (
    FEW_BITS,
    FLOAT32,
    SUMS,
    everywhere,
    passed,
    policy,
    rounded,
)
from torch import Tensor, nn

from cpdhpc.config import ConfigError
from cpdhpc.lab.train.models import MODELS
from cpdhpc.torch.precision import convert, quantize

pytestmark = pytest.mark.usefixtures("one_thread")


class Network(nn.Module):
    """A layer under two names, tied weights, a norm, and torch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1
        )
        self.first = self.second = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 9, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.second(self.first(self.encoder(self.embedding(x))))))


def test_a_converted_model_stays_the_same_model() -> None:
    torch.manual_seed(9)
    model = Network()
    plain, keys, x = deepcopy(model), list(model.state_dict()), torch.arange(8).reshape(2, 4)
    found = convert(model, policy({"layers": "*", **FEW_BITS, "outputs": "fp32"}))
    assert found is model
    assert list(model.state_dict()) == keys
    assert model.first is model.second
    assert model.out.weight is model.embedding.weight
    assert type(model.norm) is nn.LayerNorm
    model.load_state_dict(plain.state_dict())
    trained = model(x)
    assert abs(trained - plain(x)).max() > 1e-3
    with torch.no_grad():  # where torch's encoder would go round the layers in it
        assert torch.equal(model.eval()(x), trained)
    assert torch.equal(deepcopy(model)(x), trained)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), trained)
    trained.sum().backward()
    with pytest.raises(ConfigError, match=r"layer '\S+' obeys a policy already: convert once"):
        convert(model, everywhere(weights="e4m3"))


def test_outputs_of_norms_are_rounded_where_a_rule_says_so() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    delayed = {"format": "e4m3", "scaling": "delayed"}
    convert(model, policy({"layers": "1", "outputs": "e3m1"}, {"layers": "0", "outputs": delayed}))
    x = torch.randn(3, 6)
    y, inner = model(x), model[0](x)
    plain = nn.functional.layer_norm(inner, (6,))
    assert np.array_equal(y.detach().double().numpy(), rounded(plain.detach().numpy(), "e3m1"))
    own = [key for key in model.state_dict() if "scale_state" in key]
    assert own == ["0.precision.product.outputs.scale_state"]
    model.load_state_dict(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).state_dict())


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Aside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def test_layers_derived_from_torch() -> None:
    """A forward that asks torch's keeps working; one that computes by itself is not converted."""
    torch.manual_seed(10)
    doubled, x = Doubled(8, 4), torch.randn(5, 8)
    plain = nn.Linear(8, 4)
    plain.load_state_dict(doubled.state_dict())
    rule = {"weights": "e4m3", "forward": "e6m9"}
    assert torch.equal(
        convert(doubled, everywhere(**rule))(x), 2 * convert(plain, everywhere(**rule))(x)
    )
    with pytest.raises(ConfigError, match="'\\*': matches no layer with products: there is none"):
        convert(Aside(8, 4), everywhere(**rule))


def test_chance_is_that_of_torchs_generator_in_training_alone() -> None:
    chance = {"format": "e3m1", "rounding": "stochastic"}
    sums = {"accumulate": "e5m2", "rounding": "stochastic"}
    torch.manual_seed(11)
    keys = dict.fromkeys(("weights", "activations", "errors"), chance)
    layer = convert(nn.Linear(30, 8), everywhere(**keys, **dict.fromkeys(SUMS, sums)))
    x = torch.randn(4, 30)

    def drawn(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return passed(layer, x, torch.linspace(-1, 1, 32).reshape(4, 8))

    assert all(map(torch.equal, drawn(1), drawn(1)))
    assert not any(map(torch.equal, drawn(1), drawn(2)))
    layer.eval()
    state = torch.get_rng_state()
    first = layer(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(layer(x), first)


@every(
    ("model", "rules", "says"),
    [
        (nn.Linear(2, 2).double(), {}, "model: weight is torch.float64: allowed are float32"),
        (nn.Sequential(nn.LazyLinear(2)), {}, "0.weight is not initialised: run a batch through"),
        (nn.Sequential(nn.GRU(2, 2)), {}, "'\\*': matches no layer with products: there is none"),
        (nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)), {"complete": True}, "layer 1 .GRU. keeps"),
    ],
)
def test_models_that_no_policy_can_have(model: nn.Module, rules: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        convert(model, policy({"layers": "*", "weights": "e4m3"}, **rules))


def test_one_layer_under_two_names_has_one_policy() -> None:
    with pytest.raises(ConfigError, match="first and second are one layer, but have differ"):
        convert(
            Network(),
            policy({"layers": "second", "weights": "e4m3"}, {"layers": "first", "weights": "e5m2"}),
        )


def test_half_precision_models_compute_in_float32() -> None:
    torch.manual_seed(12)
    layer, x = nn.Linear(40, 3), torch.randn(2, 40).bfloat16()
    half = deepcopy(layer).bfloat16()
    wide = deepcopy(half).float()
    got = passed(convert(half, everywhere(activations="e4m3", **FLOAT32)), x)
    want = passed(convert(wide, everywhere(activations="e4m3", **FLOAT32)), x.float())
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype is torch.bfloat16
        assert torch.equal(mine, other.bfloat16())


@every("name", sorted({*MODELS} - {"quantized_cnn"}))
def test_every_model_trains_with_few_bits(name: str) -> None:
    torch.manual_seed(13)
    shape = (6,) if name in SEQUENCES else (8, 8)
    model = tiny(name).build(shape, 5)
    x = torch.randint(5, (3, 6)) if name in SEQUENCES else torch.rand(3, 8, 8)
    convert(model, policy({"layers": "*", **FEW_BITS, "outputs": "bf16"}, complete=True))
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_batch_without_samples_goes_through_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2))
    convert(model, everywhere(weights="e4m3", **FLOAT32))
    x = torch.zeros(0, 3, 6, 6, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (0, 4, 4, 4) and x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: quantize(torch.ones(2), "bla"), "quantize: format='bla': known are"),
        (
            lambda: convert(nn.Linear(2, 2), {"rule": [{"layers": "*", "weigths": "e4m3"}]}),
            "convert: unknown key rule.0.weigths: did you mean weights?",
        ),
    ],
)
def test_one_line_tells_what_is_unknown(ask: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask()
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)
    model = nn.Linear(2, 2)
    assert convert(model, {"rule": []}) is model

"""The built-in models: their published sizes, what they compute and refuse, that they learn."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from torch import nn
from torch.nn import functional as F
from training import prepared, run_job, small_data

from cpdhpc.config import ConfigError, validate
from cpdhpc.lab.train import blocks
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.models import MODELS
from cpdhpc.lab.train.samples import InMemory, StreamedData
from cpdhpc.lab.train.training import Training
from cpdhpc.world.ranks import Loopback

pytestmark = pytest.mark.usefixtures("one_thread")

TINY: dict[str, dict[str, Any]] = {  # options of small networks
    "mlp": {"hidden": [8]},
    "lenet": {"channels": [4, 4], "hidden": 8},
    "residual_mlp": {"width": 8, "blocks": 2},
    "quantized_cnn": {"channels": [4, 4], "hidden": 8},
    "resnet_cifar": {"n": 1, "width": 4},
    "wide_resnet": {"depth": 10, "widen": 1, "dropout": 0.1},
    "resnet": {"width": 4, "stem": "cifar"},
    "row_lstm": {"hidden": 16},
    "lstm": {"embedding": 16, "hidden": 16, "layers": 1, "dropout": 0.1, "tied": True},
    "transformer": {"width": 16, "heads": 2, "layers": 1},
}
SEQUENCES = ("lstm", "transformer")
ANY_SHAPE = ("mlp", "residual_mlp")  # take samples of any


def tiny(name: str, **options: Any) -> Any:
    return MODELS[name].model_validate({**TINY[name], **options})


def without_values(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name](**options).build(shape, classes)


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def products(name: str, classes: int, **options: Any) -> int:
    """Multiplications of an image of 224 x 224: a weight has one for each pixel of its output.

    Pixels are those of a network of as many layers of a single channel.
    """
    pixels = []
    thin = MODELS[name](width=1, **options).build((3, 224, 224), 1).eval()
    for layer in thin.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda layer, x, y: pixels.append(y[0, 0].numel()))
    with torch.no_grad():
        thin(torch.zeros(1, 3, 224, 224))
    whole = without_values(name, (3, 224, 224), classes, **options)
    layers = [each for each in whole.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    return sum(n * each.weight.numel() for n, each in zip(pixels, layers, strict=True))


@pytest.mark.parametrize(
    ("depth", "weights", "billions"),
    [
        (18, 11_689_512, 1.814),
        (34, 21_797_672, 3.664),
        (50, 25_557_032, 4.089),
        (101, 44_549_160, 7.801),
        (152, 60_192_808, 11.514),
    ],
)
def test_imagenet_networks_have_torchvisions_sizes(
    depth: int, weights: int, billions: float
) -> None:
    """The "num_params" and "GFLOPS" of torchvision's table of weights."""
    assert parameters(without_values("resnet", (3, 9, 9), 1000, depth=depth)) == weights
    if depth <= 50:
        assert round(products("resnet", 1000, depth=depth) / 1e9, 3) == billions


@every(
    ("name", "options", "millions", "digits"),
    [
        ("resnet_cifar", {"n": 3}, 0.27, 2),  # He et al., table 6
        ("resnet_cifar", {"n": 5}, 0.46, 2),
        ("resnet_cifar", {"n": 9}, 0.85, 2),
        ("wide_resnet", {"depth": 40, "widen": 1}, 0.6, 1),  # Zagoruyko, Komodakis, table 4
        ("wide_resnet", {"depth": 40, "widen": 2}, 2.2, 1),
        ("wide_resnet", {"depth": 16, "widen": 8}, 11.0, 1),
        ("wide_resnet", {"depth": 28, "widen": 10}, 36.5, 1),
    ],
)
def test_cifar_networks_have_the_papers_sizes(
    name: str, options: dict[str, Any], millions: float, digits: int
) -> None:
    network = without_values(name, (3, 32, 32), 10, **options)
    assert round(parameters(network) / 1e6, digits) == millions


def test_sequence_networks_have_the_sizes_of_their_equations() -> None:
    v, h = 10_000, 200  # Zaremba's small network, with torch's two biases a gate
    lstm = MODELS["lstm"]().build((35,), v)
    assert parameters(lstm) == v * h + 2 * (8 * h * h + 8 * h) + h * v + v
    tied = MODELS["lstm"](tied=True).build((35,), v)
    assert parameters(tied) == v * h + 2 * (8 * h * h + 8 * h) + v
    v, w, time = 65, 128, 35  # a layer: q, k, v, output; two of 4 w; their biases; two norms
    layer = 4 * w * w + 8 * w * w + (4 + 4 + 1) * w + 4 * w
    transformer = MODELS["transformer"]().build((time,), v)
    expected = v * w + time * w + 4 * layer + 2 * w + w * v + v
    assert parameters(transformer) == expected


@every("name", MODELS)
def test_models_take_what_they_are_for_and_start_from_the_seed(name: str) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return tiny(name).build(shape, 10)

    images = (8, 8), (9, 5), (3, 10, 12)
    for shape in ((6,), (1,)) if name in SEQUENCES else images:
        model = build(0)
        inputs = torch.zeros(3, *shape, dtype=torch.int64 if name in SEQUENCES else torch.float32)
        outputs = model(inputs)
        assert outputs.shape == (3, 10, *(shape if name in SEQUENCES else ()))
        pairs = list(zip(model.parameters(), build(0).parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
        assert all(a.dtype == torch.float32 for a, _ in pairs)
        others = zip(model.parameters(), build(1).parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in others)


@every("name", sorted({*MODELS} - {*ANY_SHAPE}))
def test_models_refuse_samples_of_other_shapes(name: str) -> None:
    shape = (8, 8) if name in SEQUENCES else (64,)
    text = "x 8: must be sequences" if name in SEQUENCES else "64: must be images of at least"
    with pytest.raises(ValueError, match=text):
        tiny(name).build(shape, 10)


@every(
    ("model", "message"),
    [
        ({"name": "wide_resnet", "depth": 20}, "model.depth=20: must be 6 n + 4"),
        ({"name": "resnet", "depth": 20}, "model.depth=20: should be 18, 34, 50, 101 or 152"),
        ({"name": "lstm", "tied": True, "hidden": 64}, "model.tied=true: embedding=200: must be"),
        ({"name": "transformer", "heads": 3}, "model.width=128: must be a multiple of heads=3"),
    ],
)
def test_options_that_make_no_network_are_one_line(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Job, {"name": "x", "model": model}, "job.toml")
    assert message in str(caught.value)


def test_the_residual_network_computes_the_papers_equations() -> None:
    """ResNet-8 in float64 beside section 4.2 written out; both round a few hundred times."""
    torch.manual_seed(1)
    network = MODELS["resnet_cifar"](n=1, width=4).build((3, 9, 8), 5).double().eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight.data, layer.bias.data, layer.running_mean):
                tensor.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    left = iter([(name, t) for name, t in network.state_dict().items() if "batches" not in name])

    def take(count: int) -> list[torch.Tensor]:
        return [next(left)[1] for _ in range(count)]

    def convolved(x: torch.Tensor, stride: int) -> torch.Tensor:
        weight, gamma, beta, mean, var = (
            t.reshape(-1, 1, 1) if t.dim() == 1 else t for t in take(5)
        )
        padded = F.pad(x, (1, 1, 1, 1))
        windows = padded.unfold(2, 3, stride).unfold(3, 3, stride)
        y = torch.einsum("nchwij,ocij->nohw", windows, weight)
        return gamma * (y - mean) / (var + 1e-5).sqrt() + beta

    x = torch.rand(2, 3, 9, 8, dtype=torch.float64)
    y = convolved(x, 1).clamp(min=0)
    for channels, stride in ((4, 1), (8, 2), (16, 2)):
        shortcut = y[:, :, ::stride, ::stride]
        shortcut = torch.cat([shortcut, shortcut.new_zeros(shortcut.shape)], 1)[:, :channels]
        inner = convolved(y, stride).clamp(min=0)
        y = (convolved(inner, 1) + shortcut).clamp(min=0)
    weight, bias = take(2)
    expected = y.mean((2, 3)) @ weight.T + bias
    assert torch.allclose(network(x), expected, rtol=1e-10, atol=1e-10)


def test_a_preactivated_block_that_adds_nothing_changes_nothing() -> None:
    """Nothing stands behind the sum, so values below 0 pass too."""
    block = blocks.preactivated(4, 4, 1, "batch", 0.0)
    for weight in (each.weight for each in block.modules() if isinstance(each, nn.Conv2d)):
        nn.init.zeros_(weight)
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(x), x)


@every("name", MODELS)
def test_every_weight_has_a_part_in_the_loss(name: str) -> None:
    torch.manual_seed(0)
    shape = (6,) if name in SEQUENCES else (8, 8)
    network = tiny(name).build(shape, 7)
    x = torch.randint(7, (16, 6)) if name in SEQUENCES else torch.rand(16, 8, 8)
    y = torch.randint(7, (16, 6) if name in SEQUENCES else (16,))
    F.cross_entropy(network(x), y).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


def test_group_norm_leaves_samples_to_themselves() -> None:
    """So ranks that share a batch otherwise compute the same, which batch norm does not."""
    for norm, alone in (("group", True), ("batch", False)):
        torch.manual_seed(0)
        network = tiny("resnet_cifar", norm=norm).build((8, 8), 4).double()
        x = torch.rand(6, 8, 8, dtype=torch.float64)
        halves = torch.cat([network(x[:3]), network(x[3:])])
        assert torch.allclose(network(x), halves, rtol=1e-10, atol=1e-12) == alone


@pytest.mark.parametrize("name", SEQUENCES)
def test_places_see_what_is_before_them_and_nothing_behind(name: str) -> None:
    torch.manual_seed(0)
    network = tiny(name, dropout=0.0).build((9,), 7)
    x = torch.randint(7, (1, 9))
    other = x.clone()
    other[0, 4] = (x[0, 4] + 1) % 7
    for mode in (True, False):
        with torch.set_grad_enabled(mode):  # torch has another way through a layer for inference
            changed = (network.train(mode)(x) - network(other)).abs().amax((0, 1)) > 1e-6
        assert changed.tolist() == [False] * 4 + [True] * 5


def test_the_transformer_knows_places() -> None:
    torch.manual_seed(0)
    network = tiny("transformer", dropout=0.0).build((3,), 7)
    first, swapped = network(torch.tensor([[1, 2, 3], [2, 1, 3]]))[:, :, -1]
    assert (first - swapped).abs().max() > 1e-6


def test_rows_have_the_values_of_all_channels() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    rows = blocks.ImageRows()(x)
    assert rows[0, 1].tolist() == [*range(4, 8), *range(16, 20)]
    assert torch.equal(blocks.ImageRows()(x[:, 0]), x[:, 0])


def text(samples: int = 60, time: int = 10, dtype: Any = np.int64) -> StreamedData:
    """Counting modulo 7 from anywhere."""
    counted = (np.random.default_rng(0).integers(0, 7, (samples, 1)) + np.arange(time + 1)) % 7
    x, y = torch.from_numpy(counted[:, :-1].astype(dtype)), torch.from_numpy(counted[:, 1:])
    parts = [InMemory(x[part], y[part]) for part in (slice(0, 40), slice(40, None))]
    return StreamedData(*parts, (time,), 7)


def trained(name: str, directory: Path, **train: Any) -> Training:
    raw = {
        "name": name,
        "model": {"name": name, **TINY[name]},
        "optimizer": {"name": "adam"},
        "train": {"epochs": 4, "batch": 8, "learning_rate": 0.02, "threads": 1, **train},
    }
    job = validate(Job, raw, "test")
    data = text() if name in SEQUENCES else small_data()
    return run_job(job, Loopback(2), directory, data)


def test_samples_of_another_kind_are_one_line(tmp_path: Path) -> None:
    """Of the right shape, so that only the network itself can tell."""
    for name, data in (("mlp", text()), ("lstm", text(dtype=np.float32))):
        job = validate(Job, {"name": "x", "model": {"name": name, **TINY[name]}}, "test")
        with pytest.raises(
            ConfigError, match=r"^x-s0: model: inputs [^\n]*: RuntimeError: [^\n]*$"
        ):
            prepared(job, Loopback(2), tmp_path, data)


@pytest.mark.parametrize("name", ["resnet_cifar", "row_lstm", "lstm", "transformer"])
def test_models_learn_on_virtual_ranks(name: str, tmp_path: Path) -> None:
    """With shared weights, dropout and batch norm; chance has 1 of 8 classes, or of 7."""
    training = trained(name, tmp_path)
    losses = training.record.arrays()["steps"]["loss"]
    assert losses[-5:].mean() < 0.8 * losses[:3].mean()
    assert [*training.record.rows["epochs"][-1].values()][1] > 0.25

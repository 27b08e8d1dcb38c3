"""Integers in place of batch norms and of whole networks: the same results, everywhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from torch import nn
from training import Stop, run_job, small_data, small_job

from cpdhpc import store
from cpdhpc.config import UserError, validate
from cpdhpc.lab.bench.accuracy import differing, drawn, independent
from cpdhpc.lab.cli import main
from cpdhpc.lab.signals import Caught, Interrupted
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.data import Digits
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.setup import prepare
from cpdhpc.lab.train.training import Training
from cpdhpc.torch import quantized
from cpdhpc.torch.quantized import fold, integer_norm, layers
from cpdhpc.world.ranks import Loopback

Array = np.ndarray[Any, Any]
TINY = {"name": "quantized_cnn", "channels": [2, 3], "hidden": 8}


def levels(a: float, b: float, x: Array, bits: int) -> Array:
    """clip(floor(a x + b + 1/2)) in integers of 64 bits: a and b as fractions of 2^d."""
    whole = max(a.as_integer_ratio()[1], b.as_integer_ratio()[1], 2)
    p, q = round(a * whole), round(b * whole)
    assert abs(p) * int(np.abs(x).max()) + abs(q) + whole < 2**62, "the oracle itself overflows"
    return np.clip((p * x + q + whole // 2) // whole, 0, 2**bits - 1)


@pytest.mark.parametrize(
    "most, bits, channels", [(36720, 4, 80), (16384, 4, 60), (16384, 8, 8), (4096, 2, 120)]
)
def test_integers_give_the_same_on_the_whole_range(most: int, bits: int, channels: int) -> None:
    rng = np.random.default_rng(bits)
    a, b = drawn(rng, channels, most, bits)
    assert (a < 0).any() or channels < 10
    a[-1] = 0.0
    norm = integer_norm(a, b, -most, most, bits)
    x = np.arange(-most, most + 1)
    results = norm(np.broadcast_to(x[:, None], (x.size, channels)))
    for channel, (slope, start) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        wanted = levels(slope, start, x, bits)
        assert (results[:, channel] == wanted).all()
        assert (np.clip(np.floor(x * slope + start + 0.5), 0, 2**bits - 1) == wanted).all()  # fold
        assert norm.shift[channel] <= independent(slope, start, most, bits)
    assert norm.widths()["sum"].max() <= 40  # int64 has room


def test_bench_counts_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "batchnorm", "--channels", "5", "--settings", "300:4,90:2"]
    assert main(arguments) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [row[:4] for row in rows] == [["300", "4", "5", "0"], ["90", "2", "5", "0"]]
    a, b = drawn(np.random.default_rng(0), 5, 300, 4)
    norm = integer_norm(a, b, -300, 300, 4)
    assert differing(replace(norm, offset=norm.offset + (1 << norm.shift)), a, b, 300) > 0


def test_no_smaller_shift_would_do() -> None:
    """All A and B that could matter are tried at one shift less; ties too, at a of few bits."""
    rng = np.random.default_rng(0)
    x, most, bits, found = np.arange(-9, 10), 9, 2, 0
    for a in [*(rng.integers(-24, 25, 40) / 16), *rng.normal(0, 0.5, 20).round(9)]:
        b = float(rng.integers(-16, 33)) / 8
        norm = integer_norm(np.array([a]), np.array([b]), -most, most, bits)
        wanted = levels(float(a), b, x, bits)
        assert (norm(x[:, None])[:, 0] == wanted).all()
        shift = int(norm.shift[0]) - 1
        if shift < 0:
            continue
        found += 1
        steepest = 4 << shift  # a step of all levels at once
        slopes = np.arange(-steepest, steepest + 1)[:, None, None]
        starts = np.arange(-steepest * 10, steepest * 10 + 1)[:, None]
        one_of = np.clip((slopes * x + starts) >> shift, 0, 2**bits - 1)
        assert not (one_of == wanted).all(axis=2).any()
    assert found > 20


@every(
    "call, words",
    [
        (lambda: integer_norm(np.ones(1), np.ones(1), 0, 9, 9), "bits=9: must be 1..8"),
        (lambda: integer_norm(np.ones(2), np.array([1, np.nan]), 0, 9, 4), "channel 1: a=1.0, b=n"),
        (lambda: integer_norm(np.ones(1), np.ones(1), 5, 4, 4), "x=5..4: must be finite, and the"),
        (lambda: integer_norm(np.array([1.5]), np.ones(1), 0, 2**62, 4), "overflows int64"),
        (lambda: fold(*np.array([[1, 1], [0, 0], [0, 2e9], [1, 0]]), 1e-30, 4), "fold: channel 1"),
        (lambda: layers.QuantizedLinear(4, 4, bits=1), "QuantizedLinear: bits=1: must be 2..8"),
        (lambda: layers.QuantizedConv2d(9000, 1, 3, bits=8), "81000 products overflow int32 at 8"),
        (lambda: layers.QuantizedNorm(1).eval()(torch.zeros(1, 1, 1)), "3 axes: must be 2 or 4"),
        (
            lambda: layers.QuantizedInput()(torch.tensor([[-0.5]])),
            "values -0.5..-0.5: must be 0..1",
        ),
        (lambda: layers.QuantizedInput()(torch.tensor([[np.nan]])), "values nan..nan: must be 0"),
    ],
)
def test_what_has_no_integer_form_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert words in str(caught.value)


OUTPUT = layers.QuantizedOutput(4, 2)


@every(
    "network, words",
    [
        ([layers.QuantizedInput(), nn.AvgPool2d(2)], "layer 1 (AvgPool2d(kernel_size=2, stride=2"),
        (
            [nn.Flatten()],
            "layer 0 (Flatten(start_dim=1, end_dim=-1)): takes codes: before it are images: a "
            "network of integers is a torch.nn.Sequential of layers of "
            "cpdhpc.torch.quantized.layers",
        ),
        ([layers.QuantizedInput(), layers.QuantizedNorm(1)], "takes sums: before it are codes"),
        ([layers.QuantizedInput(), nn.Sequential(nn.MaxPool2d(3, 2))], "layer 1.0 (MaxPool2d"),
        ([layers.QuantizedInput()], "the last layer gives codes: must be a QuantizedOutput"),
        ([layers.QuantizedInput(), OUTPUT, OUTPUT], "layer 2 (QuantizedOutput"),
    ],
)
def test_models_of_other_layers_are_refused(network: list[nn.Module], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        layers.to_integers(nn.Sequential(*network))
    assert str(caught.value).startswith("to_integers: ")
    assert words in str(caught.value)


@every("weight, codes, given", [(2, 1, 1), (4, 4, 8), (8, 8, 8)])
def test_every_layer_computes_what_its_integers_do(weight: int, codes: int, given: int) -> None:
    """Layer by layer, of strides and channels, with statistics and scales of both signs."""
    torch.manual_seed(weight)
    model = nn.Sequential(
        layers.QuantizedInput(given),
        layers.QuantizedConv2d(3, 4, kernel_size=3, stride=2, padding=1, bits=weight),
        layers.QuantizedNorm(4, codes),
        nn.Sequential(nn.Dropout(), nn.MaxPool2d(2), nn.Flatten()),
        layers.QuantizedLinear(4 * 4 * 3, 6, weight),
        layers.QuantizedNorm(6, codes),
        layers.QuantizedOutput(6, 3, weight, codes),
    )
    for layer in model:
        if isinstance(layer, layers.QuantizedNorm):
            nn.init.normal_(layer.weight)
            nn.init.constant_(layer.bias, 0.5)
            assert layer.running_var is not None
            layer.running_var.uniform_(1, 4).mul_(4.0 ** (given + weight))
    network = layers.to_integers(model.eval())
    leaves = [m for m in model.modules() if not isinstance(m, nn.Sequential | nn.Dropout)]
    x = torch.rand(20, 3, 17, 13)
    integers, last = x.numpy(), leaves[-1]
    assert isinstance(last, layers.QuantizedOutput)
    with torch.no_grad():
        for layer, of_integers in zip(leaves, network.layers, strict=True):
            x, integers = layer(x), of_integers(integers)
            step = float(last.step) if layer is last else 1
            assert np.array_equal(x.numpy(), integers * step), layer
            assert len(np.unique(integers)) > 1 or codes == 1


def test_sums_that_float32_cannot_hold_are_exact_too() -> None:
    torch.manual_seed(0)
    layer = layers.QuantizedLinear(3000, 2, bits=8).eval()
    nn.init.uniform_(layer.weight, 0.5, 0.6)
    x = torch.randint(0, 256, (8, 3000)).float()
    codes = layers.codes_of(layer.weight, 8).detach().numpy().astype(np.int64)
    wanted = x.numpy().astype(np.int64) @ codes.T
    assert wanted.max() > 2**25
    assert np.array_equal(layer(x).detach().numpy(), wanted)


def test_gradients_pass_as_if_nothing_were_rounded() -> None:
    """At 8 bits the gradient of a loss is that of the same layers without codes, but for steps."""
    torch.manual_seed(0)
    conv, norm = layers.QuantizedConv2d(1, 2, 3, bits=8), layers.QuantizedNorm(2, bits=8)
    x = torch.randint(0, 256, (4, 1, 6, 6)).float()
    away = torch.randn(4, 2, 4, 4)
    (norm(conv(x)) * away).sum().backward()
    weight = conv.weight.detach().clone().requires_grad_()
    plain = nn.functional.conv2d(x / 255, weight)
    plain = nn.functional.batch_norm(plain, None, None, torch.full((2,), 0.5), training=True)
    (plain.clamp(0, 1) * 255 * away).sum().backward()
    # Weights are within half a step of 2 max / 254, so 1/254 of the largest; sums of 9 of them.
    assert weight.grad is not None
    assert conv.weight.grad is not None
    difference = (conv.weight.grad - weight.grad).norm() / weight.grad.norm()
    assert difference < 9 / 254


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_have_a_gradient_up_to_the_largest_code(bits: int) -> None:
    """Rounding passes gradients, and weights beyond the largest code by more than rounding none."""
    most = 2 ** (bits - 1) - 1
    for seed in range(50):
        weight = torch.randn(30, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        layers.codes_of(weight, bits).sum().backward()
        step = layers.step_of(weight, bits)
        ratios = weight.detach().double().abs() / step.double()
        inside = ratios <= most * (1 + 2.0**-22)  # rounding may lift the largest by 2^-23
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.where(inside, 1 / step, torch.zeros(30)))


def trained_on_digits(directory: Path) -> Training:
    """A run of one epoch on digits, as its job file says it."""
    model = {"name": "quantized_cnn", "channels": [4, 8]}
    train = {"epochs": 1, "batch": 32, "learning_rate": 0.1, "threads": 1}
    job = validate(Job, {"name": "q", "model": model, "train": train}, "test")
    training = prepare(job, Loopback(1), job.data.load(), Files.of(directory, job))
    run(training, Caught(), Display(False, 1))
    return training


def test_an_exported_network_gives_the_class_of_the_trained_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained_on_digits(tmp_path)
    checkpoint = str(training.files.checkpoint)
    assert main(["export", checkpoint, "--out", str(tmp_path / "int.h5")]) == 0
    assert "599 of 599 test samples: the class of the trained model" in capsys.readouterr().out
    network, data = quantized.load(tmp_path / "int.h5"), Digits().load()
    right = (network.classes(data.test_x) == data.test_y).mean()
    assert right == store.read(training.files.record)[0]["epochs"]["test_accuracy"][-1]
    assert right > 0.5
    pixels = np.rint(data.test_x * 255).astype(np.uint8)
    assert np.array_equal(network(pixels), network(data.test_x))
    assert all(a.dtype.kind in "iu" for g in store.read(tmp_path / "int.h5")[0].values()
               for a in g.values())  # fmt: skip
    for wrong in (pixels.astype(np.int32) * 2, data.test_x - 0.1, data.test_x * np.nan):
        with pytest.raises(UserError, match=r"must be 0\.\."):
            network(wrong)

    def check(words: str, *arguments: str) -> None:
        assert main(["export", *arguments, "--out", str(tmp_path / "no.h5")]) == 2
        shown = capsys.readouterr().err
        assert words in shown
        assert shown.count("\n") == 1
        assert not (tmp_path / "no.h5").exists()

    check("q-s0.h5: is not a checkpoint of cpdhpc train", str(tmp_path / "q-s0.h5"))
    check("only keys of data may be set", checkpoint, "--set", "model.weight_bits=3")
    check("differs from the run's", checkpoint, "--set", "data.split_seed=5")
    with pytest.raises(store.StoreError, match="is not a file of cpdhpc export"):
        quantized.load(training.files.checkpoint)
    monkeypatch.setattr(quantized.IntegerNetwork, "classes", lambda of, x: np.full(len(x), 3))
    check("of 599 test samples get another class by integers", checkpoint)


def test_a_model_of_floats_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for classes, words in ((10, "layer 0 (Flatten("), (8, "tensor 3.bias is (8,) there and (10,)")):
        job = small_job(data={"name": "digits"})
        data = replace(small_data(), classes=classes)
        training = prepare(job, Loopback(1), data, Files.of(tmp_path, job))
        training.data_sample = ""  # as in versions that did not keep it
        training.save("running")
        path = str(training.files.checkpoint)
        assert main(["export", path, "--out", str(tmp_path / "no.h5")]) == 2
        told, shown = capsys.readouterr()
        assert "has no digest of its data" in told or "tensor" in shown
        assert shown.startswith(f"cpdhpc: error: {path}: ")
        assert words in shown
        assert shown.count("\n") == 1


def test_training_is_stopped_and_resumed_with_the_same_bits(tmp_path: Path) -> None:
    job = small_job(model=TINY)
    whole, files = run_job(job, Loopback(2), tmp_path), Files.of(tmp_path / "parts", job)
    files.record.parent.mkdir()
    caught = Caught()
    with pytest.raises(Interrupted):
        run(prepare(job, Loopback(2), small_data(), files), caught, Stop(caught, 3))
    training = prepare(job, Loopback(2), small_data(), files)
    training.resume()
    run(training, Caught(), Display(False, 1))
    for a, b in zip(
        whole.model.state_dict().values(), training.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)

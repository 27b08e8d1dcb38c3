"""Presets: each rounds what its source says, told again here, and each trains."""

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from every import every
from test_tensor_formats import ELEMENTS, blocks_of_ocp, rounded
from training import model_bytes, run_job, small_data, small_job

from cpdhpc import store
from cpdhpc.config import validate
from cpdhpc.lab.signals import Caught, Interrupted
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.setup import prepare
from cpdhpc.torch.precision import Policy, convert
from cpdhpc.torch.precision.policy import PRESETS
from cpdhpc.torch.precision.updates import RoundedUpdates
from cpdhpc.world.ranks import Loopback

Array = np.ndarray[Any, np.dtype[Any]]
Rounding = Callable[[Array, int], Array]
N = 36  # values of an axis: more than a block of 32
ROLES = ("weights", "activations", "outputs", "errors", "weight_gradients")


def to_float(x: Array, exp: int, man: int, top: float, over: float | None = None) -> Array:
    """To nearest, ties to even, in float64, which holds all of it; over: what too large becomes."""
    wide = np.asarray(x, np.float64)
    step = 2.0 ** (np.maximum(np.frexp(wide)[1] - 1, 2 - 2 ** (exp - 1)) - man)
    near = np.rint(wide / step) * step
    limit = np.sign(near) * (top if over is None else over)
    return np.where(np.abs(near) > top, limit, near).astype("f4")


def bf16(x: Array, axis: int) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype("f4")


def fp16(x: Array, axis: int) -> Array:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype("f4")


def e5m2(x: Array, axis: int) -> Array:
    return rounded(x, "e5m2")


def e6m9(x: Array, axis: int = -1) -> Array:
    return to_float(x, 6, 9, (2 - 2.0**-9) * 2.0**31)


def along(x: Array, axis: int, name: str, block: int) -> Array:
    rows = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    return np.moveaxis(blocks_of_ocp(rows, name, block), -1, axis)


def blocks(name: str, block: int) -> Rounding:
    return lambda x, axis: along(x, axis, name, block)


class Delayed:
    """Transformer Engine's: the largest of the last 16 amax is the largest number."""

    def __init__(self, name: str) -> None:
        self.name, self.past = name, deque[np.float32](maxlen=16)

    def __call__(self, x: Array, axis: int) -> Array:
        amax = max(self.past) if self.past else np.abs(x).max()
        self.past.append(np.abs(x).max())
        scale = np.float32(ml_dtypes.finfo(getattr(ml_dtypes, f"float8_{self.name}")).max) / amax
        return rounded(x * scale, self.name) * (np.float32(1) / scale)


class Integers:
    """Of bits, with a power of two: Autoflex's, or Courbariaux's in its first interval."""

    def __init__(self, bits: int, flexpoint: bool) -> None:
        self.bits, self.flexpoint, self.past = bits, flexpoint, list[float]()
        self.most = 2 ** (bits - 1) - 1

    def __call__(self, x: Array, axis: int) -> Array:
        amax = float(np.abs(x).max())
        if self.flexpoint:
            expected = 2 * (fmean(self.past) + 3 * pstdev(self.past)) if self.past else amax
            k = max(k for k in range(-99, 99) if Fraction(expected) * Fraction(2) ** k <= self.most)
            self.past.append(float(np.float32(min(amax, self.most * 2.0**-k))))
        else:
            self.past = self.past or [amax]
            k = self.bits - 1 - math.frexp(self.past[0])[1]
        whole = np.clip(np.rint(x.astype(np.float64) * 2.0**k), -self.most, self.most)
        return (whole * 2.0**-k).astype("f4")


def same(x: Array, axis: int) -> Array:
    return x


def roundings(preset: str) -> dict[str, Rounding]:
    """What a preset does to each tensor of a layer in the middle; same: nothing."""
    nothing: dict[str, Rounding] = dict.fromkeys(ROLES, same)
    operands = ("weights", "activations", "errors")
    if preset in ("bf16", "fp16"):
        return dict.fromkeys(ROLES, bf16 if preset == "bf16" else fp16)
    if preset == "fp8-hybrid":
        formats = dict(zip(operands, ("e4m3fn", "e4m3fn", "e5m2"), strict=True))
        return nothing | {role: Delayed(name) for role, name in formats.items()}
    if preset in ELEMENTS:
        return nothing | dict.fromkeys(operands, blocks(ELEMENTS[preset], 32))
    if preset == "e2m1-stochastic":
        return nothing | dict.fromkeys(operands[:2], blocks("e2m1fn", 16))
    if preset == "wang2018":
        return nothing | dict.fromkeys(operands, e5m2)
    if preset in ("flexpoint16", "courbariaux"):
        flexpoint = preset == "flexpoint16"
        return {role: Integers(16 if flexpoint else 10, flexpoint) for role in ROLES}
    return nothing


def network(preset: str) -> tuple[torch.nn.Sequential, Policy]:
    """Three layers, of which the middle one is looked at."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(N, N, bias=False) for _ in range(3)]
    given: dict[str, Any] = {"preset": preset}
    if preset == "courbariaux":  # its warm-up rounds nothing: tests/test_tensor_formats.py has it
        fixed = {"format": "int10", "scaling": "fixed", "history": 100}
        given["rule"] = [{"layers": "*"} | dict.fromkeys(ROLES, fixed)]
    policy = validate(Policy, given, "test")
    model = convert(torch.nn.Sequential(*layers), policy)
    assert isinstance(model, torch.nn.Sequential)
    return model, policy


def one_a_row(rng: np.random.Generator) -> Array:
    """One value in each row and column: then each sum has one product, and no order."""
    found = np.zeros((N, N), "f4")
    found[np.arange(N), rng.permutation(N)] = rng.uniform(0.5, 2, N) * rng.choice([-1, 1], N)
    return found


@every("preset", [name for name in PRESETS if name != "e2m1-stochastic"])
def test_tensors_are_rounded_as_the_source_has_them(preset: str) -> None:
    """Three steps, in which scales have something to remember."""
    (_, layer, _), _ = network(preset)
    layer.weight.data.mul_(7)
    of, rng = roundings(preset), np.random.default_rng(4)
    sums = e6m9 if preset == "wang2018" else same
    w = layer.weight.detach().numpy()
    for step in range(3):
        x, error = one_a_row(rng) * np.float32(3**step), one_a_row(rng) / np.float32(5**step)
        given = torch.from_numpy(x).requires_grad_()
        layer.weight.grad = None
        y = layer(given)
        weights, inputs, errors = of["weights"](w, 1), of["activations"](x, 1), None
        assert np.array_equal(y.detach().numpy(), of["outputs"](sums(inputs @ weights.T, 1), 1))
        y.backward(torch.from_numpy(error))
        errors = of["errors"](error, 1)
        if preset in ELEMENTS:  # blocks lie along the sums of each product
            weights, inputs = of["weights"](w, 0), of["activations"](x, 0)
        assert np.array_equal(given.grad.numpy(), sums(errors @ weights, 1))
        if preset in ELEMENTS:
            errors = of["errors"](error, 0)
        gradient = of["weight_gradients"](sums(errors.T @ inputs, 1), 1)
        assert np.array_equal(layer.weight.grad.numpy(), gradient), step


def test_errors_of_four_bits_are_rounded_by_chance() -> None:
    """Weights and activations are to nearest; the mean of many errors is the error."""
    (_, layer, _), _ = network("e2m1-stochastic")
    of, x = roundings("e2m1-stochastic"), one_a_row(np.random.default_rng(1))
    given = torch.from_numpy(x).requires_grad_()
    y, w = layer(given), layer.weight.detach().numpy()
    assert np.array_equal(y.detach().numpy(), of["activations"](x, 1) @ of["weights"](w, 1).T)
    error, draws = np.zeros((N, N), "f4"), []
    error[0, :16] = np.linspace(0.05, 1, 16)  # a block
    for _ in range(100):
        layer.weight.grad = None
        layer(torch.eye(N)).backward(torch.from_numpy(error.T.copy()))
        draws.append(layer.weight.grad.numpy()[0, :16].copy())
    # Numbers of e2m1 below its 4, here 1, are 1/8 apart, or 1/4: the deviation of a draw is at
    # most 1/8, of a mean of 100 it is 0.0125; six of them.
    assert np.abs(np.mean(draws, 0) - error[0, :16]).max() < 6 * 0.125 / math.sqrt(100)
    assert len(np.unique(draws, axis=0)) > 50


def test_wang_sums_in_chunks_with_16_bits_at_both_ends_and_steps_by_chance() -> None:
    model, policy = network("wang2018")
    rng = np.random.default_rng(2)
    x = rng.uniform(0.5, 1.5, (3, N)).astype("f4")
    size = 135  # two chunks of 64 and a rest
    long = torch.nn.Sequential(*(torch.nn.Linear(size, 2, bias=False) for _ in range(3)))
    wide = convert(long, policy)[1]
    many = rng.uniform(0.5, 1.5, (1, size)).astype("f4")
    a, b = e5m2(many, 1), e5m2(wide.weight.detach().numpy(), 1)
    expected = np.zeros((1, 2), "f4")
    for i, j in np.ndindex(1, 2):
        for at in range(0, size, 64):
            chunk = np.float32(0)
            for k in range(at, min(at + 64, size)):
                chunk = e6m9(np.float64(chunk) + np.float64(e6m9(np.float64(a[i, k]) * b[j, k])))
            expected[i, j] = e6m9(np.float64(expected[i, j]) + np.float64(chunk))
    assert np.array_equal(wide(torch.from_numpy(many)).detach().numpy(), expected)
    of_layers = [policy.of(name, ["0", "1", "2"]) for name in "012"]
    first, middle, last = of_layers
    assert (first.activations.format, first.weights.format) == ("e6m9", "e5m2")
    assert {last.activations.format, last.weights.format, last.errors.format} == {"e6m9"}
    assert middle.activations.format == "e5m2"
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    RoundedUpdates(optimizer, dict(zip(model.parameters(), of_layers, strict=True)), seed=1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.from_numpy(x)).square().sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            kept = optimizer.state[p]["momentum_buffer"]
            for each in (p, kept):
                values = each.detach().numpy()
                assert np.array_equal(values, e6m9(values))
            exact = old.numpy() - np.float32(0.1) * kept.numpy().astype(np.float64)
            spacing = 2.0 ** (np.frexp(np.abs(exact) + 2.0**-20)[1] - 9)
            # The momentum, too, was rounded by less than its spacing, a tenth of which counts.
            slack = 0.1 * 2.0 ** (np.frexp(np.abs(kept.numpy()) + 2.0**-20)[1] - 9)
            assert (np.abs(p.detach().numpy() - exact) <= spacing + slack).all()


def test_a_preset_brings_loss_scaling_unless_the_job_says_otherwise() -> None:
    fp16 = small_job(precision={"preset": "fp16"})
    assert fp16.train.loss_scaling == "dynamic" and "loss_scaling" in fp16.toml()
    assert small_job(precision={"preset": "wang2018"}).train.loss_scale == 1024
    other = {"loss_scaling": "static", "loss_scale": 8.0}
    said = small_job(precision={"preset": "fp16"}, train=other).train
    assert (said.loss_scaling, said.loss_scale) == ("static", 8.0)
    assert small_job(precision={"preset": "bf16"}).train == small_job().train


SHORT = {"epochs": 2, "batch": 20, "learning_rate": 0.1}


def ended(precision: dict[str, Any], directory: Path) -> tuple[bytes, Array]:
    """The weights after a run of ten steps on two virtual ranks, and the losses."""
    directory.mkdir()
    job = small_job(precision=precision, train=SHORT)
    files = run_job(job, Loopback(virtual_ranks=2), directory).files
    return model_bytes(files.checkpoint), store.read(files.record)[0]["steps"]["loss"]


def test_each_preset_trains(tmp_path: Path) -> None:
    plain, _ = ended({}, tmp_path / "plain")
    for preset in PRESETS:
        weights, losses = ended({"preset": preset}, tmp_path / preset)
        assert losses[-3:].mean() < 0.95 * losses[:3].mean(), preset
        assert (weights == plain) == (preset == "float32"), preset


@pytest.mark.parametrize("preset", ["fp8-hybrid", "flexpoint16"])
def test_what_scales_and_updates_keep_is_in_checkpoints(tmp_path: Path, preset: str) -> None:
    whole, _ = ended({"preset": preset}, tmp_path / "whole")
    job, caught, world = small_job(precision={"preset": preset}, train=SHORT), Caught(), Loopback(2)
    (tmp_path / "cut").mkdir()
    files = Files.of(tmp_path / "cut", job)
    for caught.number in (10, 10, 0):  # two stops behind the first step, then to the end
        training = prepare(job, world, small_data(), files)
        training.resume()
        with pytest.raises(Interrupted) if caught.number else nullcontext():
            run(training, caught, Display(False, 1))
    assert model_bytes(files.checkpoint) == whole

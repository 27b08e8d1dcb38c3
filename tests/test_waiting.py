"""Methods that hold values back: why momentum harms them, and what is said and done about it."""

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from every import every
from reducing import backward, model_of
from training import small_data, small_job

import cpdhpc
from cpdhpc.compress import (
    COMPRESSORS,
    Aggregator,
    Dgc,
    GradientFlow,
    Lgc,
    NoCompression,
    OkTopk,
    OneBit,
    RandomK,
    ScaleCom,
    Strom,
    TopK,
)
from cpdhpc.compress.base import Context
from cpdhpc.compress.bucket import Bucket, State
from cpdhpc.config import ConfigError, read_toml
from cpdhpc.lab.signals import Caught
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import Job, read
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.setup import prepare
from cpdhpc.world.ranks import Loopback

WAITING = ["topk", "randomk", "dgc", "strom", "adacomp", "scalecom", "oktopk", "gradientflow"]
WAITING += ["onebit", "lgc"]
SHAPE = (10, 20)
BUCKET = Bucket(("w",), (SHAPE,))


class Averaged:
    """A method at work on two virtual ranks, of which both have the same gradient."""

    def __init__(self, method: Aggregator, bucket: Bucket = BUCKET, loss_scale: float = 1.0):
        self.method, self.bucket, self.loss_scale = method, bucket, loss_scale
        self.world, self.iteration = Loopback(2), 0
        self.state = State(self.world.hosted, 2)

    def __call__(self, *gradients: Any, epoch: float = 0.0) -> Any:
        flats = [np.asarray(g, np.float32) for g in (gradients * 2)[:2]]
        context = Context(self.world, self.state, 0, self.iteration, epoch, self.loss_scale)
        self.iteration += 1
        return self.method.aggregate(flats, self.bucket, context).flat

    def kept(self, name: str = "residual") -> Any:
        return dict(self.state)["w", name].array


def least_squares(method: Aggregator, rate: float, momentum: float, steps: int = 800) -> float:
    """Return the loss of the last steps, of that of the first one: x^T H x / 2 of 200 values.

    H has 5 curvatures of 1 and 195 of 0.02, in directions drawn by chance. rate: the effective
    one, rate / (1 - momentum) of SGD. It ends where the loss has grown a million times.
    """
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(200, 200)))[0]
    curvature = axes @ np.diag([*[0.02] * 195, *[1.0] * 5]) @ axes.T
    x, v, averaged = rng.normal(size=200), np.zeros(200), Averaged(method)
    losses = [float(x @ curvature @ x)]
    while len(losses) <= steps and losses[-1] < 1e6 * losses[0]:
        v = momentum * v + averaged(curvature @ x).astype(np.float64)
        x = x - rate * (1 - momentum) * v
        losses.append(float(x @ curvature @ x))
    return max(losses[-50:]) / losses[0]


@every("method", [TopK(density=0.1), RandomK()])
def test_momentum_takes_a_rate_from_methods_that_wait_and_gives_it_to_float32(
    method: Aggregator,
) -> None:
    """Without waiting 2 (1 + m) / (1 - m) over the curvature is stable: 2, and 38 with m = 0.9."""
    assert least_squares(NoCompression(), 10.0, 0.9) < 1e-6
    assert least_squares(NoCompression(), 10.0, 0.0) > 1e3
    assert least_squares(method, 1.0, 0.0) < 1e-6
    assert least_squares(method, 1.0, 0.9) > 1e3


def test_the_methods_that_wait_are_these() -> None:
    assert [name for name, row in COMPRESSORS.items() if row().holds_back] == sorted(
        WAITING, key=list(COMPRESSORS).index
    )
    for given in (
        TopK(error_feedback=False),
        RandomK(density=1.0),
        OneBit(error_feedback=False),
        Lgc(density=1),
    ):
        assert not given.holds_back  # nothing waits then


def steps(aggregator: str, build: Any) -> list[str]:
    """Return what two steps of a torch loop warn of."""
    model = model_of()
    optimizer = build(model.parameters())
    reducer = cpdhpc.torch.GradientReducer(model, Loopback(), aggregator)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            backward(model, step)
            reducer.reduce()
            optimizer.step()
    reducer.close()
    return [str(each.message) for each in said]


def test_how_much_momentum_goes_with_a_method_depends_on_what_waits_and_when() -> None:
    most = {name: COMPRESSORS[name]().most_momentum for name in WAITING}
    assert [name for name, momentum in most.items() if momentum == 0] == ["randomk", "scalecom"]
    assert [name for name, momentum in most.items() if momentum == 0.7] == ["dgc", "lgc"]
    assert set(most.values()) == {0, 0.5, 0.7}


SGD, HEAVY = torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}
ADVICE: list[tuple[tuple[str, ...], Any, dict[str, Any], str]] = [  # methods, optimizer, advice
    (("topk", "onebit", "oktopk"), SGD, HEAVY, "SGD momentum=0.5 and lr=0.25"),
    (("topk", "onebit", "oktopk"), SGD, HEAVY | {"nesterov": True}, "SGD momentum=0.5 and lr=0.25"),
    (("topk", "onebit", "oktopk"), SGD, HEAVY | {"dampening": 0.9},
     "SGD momentum=0.5, dampening=0 and lr=0.025"),
    (("topk", "onebit", "oktopk"), torch.optim.Adam, {"lr": 0.05}, "Adam betas=(0.5, 0.999)"),
    (("randomk", "scalecom"), SGD, HEAVY, "SGD momentum=0 and lr=0.5"),
    (("randomk", "scalecom"), SGD, HEAVY | {"nesterov": True},
     "SGD momentum=0, nesterov=False and lr=0.5"),
    (("randomk", "scalecom"), torch.optim.Adam, {"lr": 0.05}, "Adam betas=(0, 0.999)"),
    (("topk", "onebit", "oktopk"), SGD, {"lr": 0.25, "momentum": 0.5}, ""),
    (("randomk",), SGD, {"lr": 0.5}, ""),
    (("none",), SGD, HEAVY, ""),
    (("dgc",), SGD, {"lr": 0.05}, ""),
]  # fmt: skip


@every(("names", "build", "given", "advice"), ADVICE)
def test_a_torch_loop_warns_once_of_momentum(
    names: tuple[str, ...], build: Any, given: dict[str, Any], advice: str
) -> None:
    """Some is allowed where ranks choose the largest."""
    for name in names:
        says = f"GradientReducer: aggregator {name} holds values back: momentum 0.9 loses accuracy"
        said = steps(name, lambda p: build(p, **given))
        assert said == ([f"{says}: give {advice}"] if advice else []), name


JOB = {
    "optimizer": {"momentum": 0.9, "nesterov": True},
    "gradient": {"aggregator": "randomk"},
    "train": {"learning_rate": 0.05, "epochs": 1},
}


def shown(job: Job, directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return what a run shows, on one line, and what its record says of momentum."""
    training = prepare(job, Loopback(2), small_data(), Files.of(directory, job))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the run has said it: the reducer does not once more
        run(training, Caught(), Display(True, 1))
    with h5py.File(training.files.record) as file:
        return " ".join(capsys.readouterr().out.split()), str(file.attrs["advice"])


def test_a_job_says_before_it_trains_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = small_job(**JOB)
    assert job.optimizer.momentum == 0.9  # type: ignore[attr-defined]  # as asked for
    says = (
        "aggregator randomk holds values back: momentum 0.9 loses accuracy: write "
        "optimizer.momentum = 0.0 and optimizer.nesterov = false and train.learning_rate = 0.5"
    )
    out, recorded = shown(job, tmp_path, capsys)
    assert says in out and out.index(says) < out.index("epoch 1") and recorded == says


def test_the_recommended_settings_are_set_told_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = small_job(**(JOB | {"train": {**JOB["train"], "settings": "recommended"}}))
    optimizer: Any = job.optimizer
    assert (optimizer.momentum, optimizer.nesterov, job.train.learning_rate) == (0.0, False, 0.5)
    says = 'aggregator randomk holds values back: train.settings = "recommended": '
    says += "optimizer.momentum = 0.0 and train.learning_rate = 0.5"
    out, recorded = shown(job, tmp_path, capsys)
    assert says in out and recorded == says
    (tmp_path / "again.toml").write_text(job.toml())
    assert read(read_toml(tmp_path / "again.toml"), "again").toml() == job.toml()


def test_settings_change_only_what_waits() -> None:
    recommended = {"train": {"learning_rate": 0.05, "settings": "recommended"}}
    for gradient in ({"aggregator": "none"}, {"aggregator": "topk", "error_feedback": False}):
        job = small_job(gradient=gradient, optimizer={"momentum": 0.9}, **recommended)
        assert (job.optimizer.kept_share, job.train.learning_rate) == (0.9, 0.05)
        assert not job.advice(job.aggregator())
    adam = small_job(gradient={"aggregator": "topk"}, optimizer={"name": "adam"}, **recommended)
    assert adam.optimizer.kept_share == 0.5 and adam.train.learning_rate == 0.05
    less = small_job(gradient={"aggregator": "topk"}, optimizer={"momentum": 0.4}, **recommended)
    assert (less.optimizer.kept_share, less.train.learning_rate) == (0.4, 0.05)
    own = small_job(gradient={"aggregator": "dgc"}, train={"learning_rate": 0.05})
    says = own.advice(own.aggregator())
    assert says.endswith("write gradient.momentum = 0.7 and train.learning_rate = 0.15")
    own = small_job(gradient={"aggregator": "dgc"}, **recommended)
    assert own.gradient == Dgc(momentum=0.7) and own.optimizer.kept_share == 0
    assert own.train.learning_rate == 0.15 and "recommended" in own.advice(own.aggregator())
    with pytest.raises(ConfigError, match="has momentum, and so have the means"):
        small_job(gradient={"aggregator": "dgc"}, optimizer={"momentum": 0.9}, **recommended)
    with pytest.raises(ConfigError, match=r"settings='best'"):
        small_job(train={"settings": "best"})


@every("name", [name for name in WAITING if name not in ("dgc", "lgc")])
def test_until_dense_epochs_the_mean_is_that_of_float32(name: str) -> None:
    rng = np.random.default_rng(1)
    gradients = rng.normal(size=(2, 200)).astype(np.float32)
    chunks = {"chunk_values": 20} if name == "gradientflow" else {}
    averaged = Averaged(COMPRESSORS[name](dense_epochs=2.0, **chunks))
    mean = Averaged(NoCompression())(*gradients)
    for epoch in (0.0, 1.9):
        assert np.array_equal(averaged(*gradients, epoch=epoch), mean)
    assert not np.array_equal(averaged(*gradients, epoch=2.0), mean)


def test_dgc_sends_all_until_dense_epochs_and_masks_only_after_its_warmup() -> None:
    """All is sent, so v is 0 and the momentum goes on: 1, 1.9, 2.71; what is sent loses it last."""
    averaged = Averaged(Dgc(dense_epochs=2.0, warmup=(0.5, 0.5, 0.5), density=0.5))
    ones, total = np.arange(1, 201, dtype=np.float32), 0.0
    for epoch in (0.0, 1.0):
        total = 1 + 0.9 * total
        assert np.allclose(averaged(ones, epoch=epoch), total * ones, rtol=1e-6, atol=0)
    averaged(ones, epoch=2.0)
    assert (averaged.kept("momentum") != 0).all()
    averaged(ones, epoch=3.0)
    assert np.count_nonzero(averaged.kept("momentum")[0]) == 100


def test_strom_follows_the_size_of_gradients() -> None:
    """Of gradients 2**k times as large, or of a loss scale of 2**k, all is 2**k times as large."""
    rng = np.random.default_rng(2)
    gradients = rng.normal(size=(20, 2, 200)).astype(np.float32)
    plain, large, scaled = (Averaged(Strom(), loss_scale=scale) for scale in (1.0, 1.0, 1024.0))
    sent = 0
    for pair in gradients:
        mean = plain(*pair)
        assert np.array_equal(large(*(pair * 1024)), mean * 1024)
        assert np.array_equal(scaled(*(pair * 1024)), mean * 1024)
        sent += np.count_nonzero(mean)
    assert 0 < sent < 20 * 200


def test_strom_s_threshold_is_the_running_root_mean_square_times_a_factor() -> None:
    """Of constant gradients of magnitude 3 it is 2 * 3, which three of them are beyond."""
    averaged, gradient = Averaged(Strom(times_rms=2.0)), np.full(200, -3.0)
    means = [averaged(gradient) for _ in range(3)]
    assert not means[0].any() and not means[1].any()
    assert np.allclose(means[2], -6.0, rtol=2.0**-22, atol=0)  # a root, a product and rounding


@every("method", [ScaleCom(rate=10, beta=0.3), ScaleCom(rate=10, beta=1.0)])
def test_what_scalecom_filters_is_not_lost(method: ScaleCom) -> None:
    """m' = m + beta (g - sent), so that all that was sent + m / beta is the sum of gradients."""
    rng, averaged = np.random.default_rng(3), Averaged(method)
    given, sent = np.zeros(200), np.zeros(200)
    for _ in range(200):
        pair = rng.normal(size=(2, 200)).astype(np.float32) + np.float32(0.1)
        given += pair.astype(np.float64).mean(axis=0)
        sent += averaged(*pair)
    kept = averaged.kept().astype(np.float64).mean(axis=0) / method.beta
    # each of 200 steps rounds about 5 numbers of less than 64, divided by beta, by 2**-24 of them
    assert np.abs(sent + kept - given).max() <= 200 * 5 * 64 / method.beta * 2.0**-24
    assert np.abs(sent - given).max() > 1  # else nothing waits


def test_gradientflow_and_oktopk_take_less_with_momentum_too() -> None:
    for method in (OkTopk(density=0.1), GradientFlow(chunk_values=10)):
        assert least_squares(method, 1.0, 0.9) > 1e3 * least_squares(method, 1.0, 0.0)

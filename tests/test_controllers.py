"""Controllers: the noise scale beside its definition, growing batches, AutoWU, refusals."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from training import run_job, small_data, small_job

from cpdhpc import store
from cpdhpc.config import ConfigError, dump_toml, validate
from cpdhpc.lab.cli import main
from cpdhpc.lab.kinds.train import TRAIN
from cpdhpc.lab.signals import Caught
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import Job, load
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.losses import Diverged
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.samples import epoch_order, shard
from cpdhpc.lab.train.setup import prepare
from cpdhpc.lab.train.step import BUCKETS, sketches
from cpdhpc.torch.controllers import CONTROLLERS, Controller, Norms, Schedule, Settings
from cpdhpc.torch.controllers.adaptive import NoiseScale, moments
from cpdhpc.torch.controllers.autowu import Process, kernel, turning_point
from cpdhpc.world.ranks import Loopback

Array = np.ndarray[Any, Any]


def draw(rng: np.random.Generator, mean: Array, shares: list[int]) -> Norms:
    """What ranks of so many samples each find, whose gradients are mean and noise of deviation 1.

    The mean gradient of b samples has the deviation 1 / sqrt(b).
    """
    noise = rng.normal(0, 1, (len(shares), mean.size)) / np.sqrt(shares)[:, None]
    whole = np.average(mean + noise, axis=0, weights=shares)
    own = np.sum((mean + noise) ** 2, axis=1)
    return Norms(np.array([*own, 0.0]), float(np.sum(whole**2)), np.array([*shares, 0]))


@pytest.mark.parametrize("signal", [0.4, 0.02])
def test_the_noise_scale_of_synthetic_gradients(signal: float) -> None:
    """Early (6 samples, of 219 a step) and late (2,500): within 10 % after 200 steps.

    Of d = 2,000 values |mean|^2 has a deviation of sqrt(2 / d) = 3.2 % of its noise, 2,500 / 219 =
    11 times the signal: 36 % of it a step, and 2.8 % over the 170 steps that weigh with 0.99.
    """
    rng, noise, shares = np.random.default_rng(1), NoiseScale(0.99), [32, 32, 31, 31, 31, 31, 31]
    for _ in range(200):
        noise.observe(draw(rng, np.full(2000, signal), shares))
    assert noise.value == pytest.approx(signal**-2, rel=0.1)


def test_moments_are_unbiased_for_uneven_shares() -> None:
    """9 samples on 4 ranks, one of them idle: the mean of 3,000 estimates of either moment."""
    rng, mean = np.random.default_rng(0), np.array([1.0, -2.0, 0.5])
    found = np.array([moments(draw(rng, mean, [6, 2, 1])) for _ in range(3000)])
    error = found.std(axis=0) / np.sqrt(len(found))
    assert (np.abs(found.mean(axis=0) - [3, 5.25]) < 4 * error).all()
    assert (error < [0.06, 0.1]).all()
    assert np.isnan(moments(Norms(np.ones(2), 1.0, np.array([5, 0])))).all()


ROWS = {
    "none": {"aggregator": "none"},
    "e3m0": {"aggregator": "lowbit", "wire": "e3m0", "error_feedback": True},
    "e8m23": {"aggregator": "lowbit", "wire": "e8m23"},  # sums of float32, by sketches
    "topk": {"aggregator": "topk", "density": 0.01},
    "scaled": {"aggregator": "none"},
}


@pytest.mark.parametrize("row", ROWS)
def test_norms_are_those_before_compression(tmp_path: Path, row: str) -> None:
    """Of the first step, beside plain torch: 25 samples on 3 ranks, then 0 ranks with 2 of them.

    Fewer values than a sketch has buckets: sums of 25 float32 gradients are all that is rounded.
    """
    train = {"epochs": 1, "batch": 25, "loss_scale": 64.0 if row == "scaled" else None}
    job = small_job(controller={"name": "noise_scale"}, gradient=ROWS[row], train=train)
    training = run_job(job, Loopback(3), tmp_path)
    steps = store.read(training.files.record)[0]["steps"]
    model, data = prepare(job, Loopback(1 + 2), small_data(), training.files).model, small_data()
    batch = epoch_order(100, job.seed, 0)[:25]

    def gradient(index: Array) -> Array:
        model.zero_grad()
        logits = model(torch.from_numpy(data.train_x[index]))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(data.train_y[index]))
        loss.backward()  # type: ignore[no-untyped-call]
        parts = [p.grad.double().numpy().ravel() for p in model.parameters() if p.grad is not None]
        return np.concatenate(parts)

    parts = [shard(batch, 3, rank) for rank in range(3)]
    shares = [len(part) for part in parts]
    own = np.array([np.sum(gradient(part) ** 2) for part in parts])
    wanted = moments(Norms(own, float(np.sum(gradient(batch) ** 2)), np.array(shares)))
    assert shares == [9, 8, 8]
    found = steps["gradient_variance"][0], steps["gradient_norm2"][0]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert wanted[0] > 0 > wanted[1] and steps["noise_scale"][0] == np.inf
    assert steps["samples"].tolist() == [25, 25, 25, 25]


@pytest.mark.parametrize(
    ("name", "row"), [("adam", "e8m23"), ("adamp", "none"), ("novograd", "none")]
)
def test_norms_are_those_of_steps_that_are_preconditioned(
    tmp_path: Path, name: str, row: str
) -> None:
    """Of the second step, by P of the first one's gradient alone, in float64 beside plain torch.

    Sums of float32 gradients and their roots are rounded: some 25 * 2**-24 of values that are up to
    1 / eps = 100 times as sure to be seen.
    """
    optimizer = {"name": name, "eps": 0.01}
    job = small_job(
        controller={"name": "noise_scale"}, gradient=ROWS[row], optimizer=optimizer,
        train={"epochs": 1, "batch": 25, "learning_rate": 0.01},
    )  # fmt: skip
    training = run_job(job, Loopback(3), tmp_path)
    steps = store.read(training.files.record)[0]["steps"]
    assert np.isnan(steps["gradient_variance"][0])
    data = small_data()
    model = prepare(job, Loopback(3), data, training.files).model
    order = epoch_order(100, job.seed, 0)

    def gradients(index: Array) -> list[Array]:
        model.zero_grad()
        logits = model(torch.from_numpy(data.train_x[index]))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(data.train_y[index]))
        loss.backward()  # type: ignore[no-untyped-call]
        return [p.grad.double().numpy() for p in model.parameters() if p.grad is not None]

    before = gradients(order[:25])
    factor = {"novograd": lambda g: 1 / (np.linalg.norm(g) + 0.01)}.get(name)
    factors = [factor(g) if factor else 1 / (np.abs(g) + 0.01) for g in before]
    job.optimizer.build(model.parameters(), 0.01).step()

    def squared(index: Array) -> float:
        return sum(float((p * g**2).sum()) for p, g in zip(factors, gradients(index), strict=True))

    parts = [shard(order[25:50], 3, rank) for rank in range(3)]
    own = np.array([squared(part) for part in parts])
    wanted = moments(Norms(own, squared(order[25:50]), np.array([len(part) for part in parts])))
    found = steps["gradient_variance"][1], steps["gradient_norm2"][1]
    assert found == pytest.approx(wanted, rel=100 * 25 * 2**-24)


def test_sketches_have_the_norm_on_average() -> None:
    """200 keys, 20,011 values: the mean is within four deviations of |x|^2, and they differ."""
    x = np.random.default_rng(0).normal(0, 1, 20011).astype(np.float32)
    true = float(np.sum(x.astype(np.float64) ** 2))
    found = [np.sum(sketches([x, 2 * x], (key, 5))[1] ** 2) / 4 for key in range(200)]
    deviation = np.sqrt(2 / BUCKETS) * true
    assert np.std(found) == pytest.approx(deviation, rel=0.25)  # 5 / sqrt(2 * 200)
    assert abs(np.mean(found) - true) < 4 * deviation / np.sqrt(200)


def controller(name: str, batch: int = 8, epochs: int = 10, **options: Any) -> Controller:
    schedule = Schedule(base_batch=8, batch_scaling="linear") if name != "autowu" else Schedule()
    settings = Settings(schedule, 0.1, batch, epochs, 1000)
    return CONTROLLERS[name](**options).build(settings)


def noisy(scale: float) -> Norms:
    """What 4 ranks find in 8 samples where the noise scale is so large, on average."""
    return Norms(np.full(4, 1 + scale / 2), 1 + scale / 8, np.full(4, 2))


def test_the_batch_doubles_up_to_the_noise_scale() -> None:
    """Half of it with share = 0.5, at most max_batch, at least 10 steps apart; and the rate."""
    for options, most in (({}, 64), ({"share": 0.5}, 32), ({"max_batch": 40}, 32)):
        grown = controller("adaptive_batch", smoothing=0.9, **options)
        batches = []
        for i in range(80):
            rate, batch = grown.next(8 * i)
            assert rate == pytest.approx(0.1 * batch / 8)
            batches.append(batch)
            grown.observe_norms(noisy(100))
            grown.observe(8 * (i + 1), 1.0)
        runs = [batches.count(2**k * 8) for k in range(8)]
        assert batches == sorted(batches) and batches[-1] == most
        assert min(run for run in runs if run) >= 10
        grown.observe_norms(None)
        assert np.isnan(grown.telemetry()["gradient_variance"])


def test_a_run_with_a_growing_batch_sees_each_sample_once(tmp_path: Path) -> None:
    options = {"name": "adaptive_batch", "smoothing": 0.5, "share": 1e6, "max_batch": 60}
    training = run_job(small_job(controller=options, train={"batch": 6}), Loopback(3), tmp_path)
    samples = store.read(training.files.record)[0]["steps"]["samples"]
    assert samples.sum() == 200 and samples.max() == 48
    assert training.iteration == len(samples) < 34


@every("least", [0.3, 0.5, 0.8])
def test_autowu_finds_the_least_value_of_a_noisy_v(least: float) -> None:
    """Within 5 % of the horizon."""
    x = np.linspace(0, 1, 600)
    losses = 2 * np.abs(x - least) + np.random.default_rng(3).normal(0, 0.3, 600)
    risen, places = turning_point(losses, 0.95)
    assert risen and abs(places.mean() - least) < 0.05


@every("noise", [1e-6, 1e-2, 10.0])
def test_the_process_is_that_of_dense_matrices(noise: float) -> None:
    """The equations as they stand, of 120 points; 1e-6 leaves 1e-10 of them by its condition."""
    rng, grid = np.random.default_rng(0), np.linspace(0, 1, 40)
    x = np.sort(rng.random(120))
    y = np.abs(x - 0.4) + rng.normal(0, 0.1, 120)
    y -= y.mean()
    gram = kernel(x, x) + noise * np.eye(120)
    solved = np.linalg.solve(gram, kernel(x, grid))
    covariance = kernel(grid, grid) - kernel(grid, x) @ solved
    means, variances = Process(1.0, noise).posterior(x, y, grid)
    wanted = np.diag(covariance) + covariance[-1, -1] - 2 * covariance[-1]
    assert np.abs(means - solved.T @ y).max() < 1e-8
    assert np.abs(variances - wanted).max() < 1e-12

    def unlikely(process: Process) -> float:
        whole = process.variance * (kernel(x, x) + process.noise * np.eye(120))
        return float(np.linalg.slogdet(whole)[1] + y @ np.linalg.solve(whole, y))

    best = Process.likeliest(x, y)
    for factor in (0.8, 1.25):
        assert unlikely(best) < unlikely(Process(factor * best.variance, best.noise))
        assert unlikely(best) < unlikely(Process(best.variance, factor * best.noise))


@pytest.mark.parametrize("slope", [-1.0, 0.0])
def test_autowu_waits_while_the_loss_does_not_rise(slope: float) -> None:
    x = np.linspace(0, 1, 300)
    assert not turning_point(slope * x + np.random.default_rng(0).normal(0, 0.3, 300), 0.95)[0]
    assert not turning_point(np.ones(30), 0.95)[0]
    assert not turning_point(2.3 + np.linspace(0, 0.01, 300), 0.95)[0]  # sure, but too little


def follow(wu: Controller, least: int, steps: int) -> list[float]:
    """Rates of steps of 100 samples whose loss is least at one of them."""
    rates = []
    for i in range(steps):
        rates.append(wu.next(100 * i)[0])
        wu.observe(100 * (i + 1), abs(i - least) / 100)
    return rates


@pytest.mark.parametrize("decay", ["cosine", "constant_cosine"])
def test_autowu_falls_from_the_best_rate_after_patience(decay: str) -> None:
    """20 epochs of 10 steps: from 1e-5 to 1 in 100 steps; the loss is least at step 45.

    At the ends of epochs 5, 6 and 7 it has risen, so the 70th step begins the decay.
    """
    rates = follow(controller("autowu", 100, 20, decay=decay), 45, 200)
    assert rates[:70] == pytest.approx([1e-5 * 10 ** (5 * i / 100) for i in range(70)])
    assert rates[70] == pytest.approx(1e-5 * 10 ** (5 * 45 / 100), rel=10 ** (5 * 2 / 100) - 1)
    first = 160 if decay == "constant_cosine" else 70
    assert rates[70:first] == [rates[70]] * (first - 70)
    shape = [0.5 + 0.5 * np.cos(np.pi * (i - first) / (200 - first)) for i in range(first, 200)]
    assert np.array(rates[first:]) / rates[70] == pytest.approx(shape)


def test_autowu_falls_from_the_highest_rate_where_the_loss_never_rises() -> None:
    rates = follow(controller("autowu", 100, 20, max_rate=0.25), 999, 200)
    assert rates[99] < 0.25 and rates[100] == 0.25 and rates[199] < 1e-4


@every(
    ("tables", "message"),
    [
        ({"controller": {"name": "autowu", "min_rate": 1.0}}, "should be below max_rate=1"),
        ({"controller": {"name": "autowu", "patience": 0}}, "controller.patience"),
        ({"controller": {"name": "autowu"}, "schedule": {"decay": "cosine"}}, "be left out"),
        ({"controller": {"name": "autowu"}, "train": {"learning_rate": 1.0}}, "be left out"),
        ({"controller": {"name": "noise_scale", "smoothing": 1.0}}, "controller.smoothing"),
        ({"controller": {"name": "noise_scale"}, "train": {"batch": 1}}, "should be 2 or more"),
        ({"controller": {"name": "noise_scale"}, "optimizer": {"name": "lamb"}}, "takes the leng"),
        (
            {"controller": {"name": "noise_scale"}, "train": {"image_grid": [2, 1]}},
            "train.image_grid",
        ),
        ({"controller": {"name": "adaptive_batch", "max_batch": 40}}, "twice train.batch=24"),
        ({"controller": {"name": "adaptive"}}, "adaptive_batch"),
    ],
)
def test_bad_tables(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        small_job(**tables)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "table", [{"train": {"learning_rate": 0.1}}, {"schedule": {"decay": "constant"}}]
)
def test_autowu_refuses_a_rate_that_is_the_default_too(tmp_path: Path, table: Any) -> None:
    """Else a study has the same training twice: without the key, and with it."""
    (tmp_path / "job.toml").write_text(dump_toml({"controller": {"name": "autowu"}, **table}))
    with pytest.raises(ConfigError, match=r"job\.toml: .*: should be left out: controller\.name"):
        load(tmp_path / "job.toml")
    factors = {f"{a}.{b}": v for a, row in table.items() for b, v in row.items()}
    said = TRAIN.fits({"controller": {"name": "autowu"}}, factors, 1)
    assert said and "should be left out" in said
    assert TRAIN.fits({"controller": {"name": "schedule"}}, factors, 1) is None
    (tmp_path / "job.toml").write_text('controller.name = "autowu"')
    (job,) = load(tmp_path / "job.toml")
    assert validate(Job, tomllib.loads(job.toml()), "stored") == job  # with all defaults


def test_a_row_of_autowu_loses_the_rate_and_the_schedule_of_the_file(tmp_path: Path) -> None:
    rows = [
        {"name": "auto", "controller": {"name": "autowu"}},
        {"name": "given", "controller": {"name": "autowu"}, "train": {"learning_rate": 0.2}},
        {"name": "steps", "train": {"learning_rate": 0.3}},
    ]
    base = {"train": {"learning_rate": 0.05, "epochs": 3}, "schedule": {"decay": "constant"}}
    (tmp_path / "job.toml").write_text(dump_toml({**base, "compare": [rows[0], rows[2]]}))
    auto, steps = load(tmp_path / "job.toml")
    assert auto.train.epochs == 3 and auto == validate(
        Job, {"name": "auto", "train": {"epochs": 3}, "controller": {"name": "autowu"}}, "alone"
    )
    assert steps.train.learning_rate == 0.3 and steps.schedule.decay == "constant"
    (tmp_path / "job.toml").write_text(dump_toml({**base, "compare": rows}))
    with pytest.raises(ConfigError, match=r"row given: .*train\.learning_rate.*should be left out"):
        load(tmp_path / "job.toml")


def test_one_rank_is_too_few_before_any_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second row of the file: the first one is not trained either."""
    rows = [{"name": "a"}, {"name": "b", "controller": {"name": "adaptive_batch"}}]
    (tmp_path / "job.toml").write_text(dump_toml({"compare": rows}))
    assert main(["train", str(tmp_path / "job.toml"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.strip()
    assert "controller.name='adaptive_batch': 1 rank" in said and "\n" not in said
    assert not list(tmp_path.glob("out/*.h5"))


class Silent(Controller):
    def next(self, samples_seen: int) -> tuple[float, int]:
        return 0.1, 0


def test_a_batch_of_nothing_ends_the_run(tmp_path: Path) -> None:
    """Which would never see all samples."""
    job = small_job()
    training = prepare(job, Loopback(2), small_data(), Files.of(tmp_path, job))
    training.controller = Silent()
    with pytest.raises(Diverged, match="batch 0: are not possible"):
        run(training, Caught(), Display(False, 1))

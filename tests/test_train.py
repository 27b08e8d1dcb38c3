"""Models, schedules, steps, the reducer, the loop."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from training import (
    ROWS,
    SMALL,
    finish,
    model_bytes,
    prepared,
    run_job,
    small_data,
    small_job,
    told,
    write_idx,
)

from cpdhpc import store
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import COMPRESSORS
from cpdhpc.compress.lowbit import LowBit
from cpdhpc.config import ConfigError, dump_toml
from cpdhpc.lab.cli import main
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.command import _check_ranks
from cpdhpc.lab.train.losses import Accuracy, CrossEntropy, Diverged
from cpdhpc.lab.train.models import MODELS
from cpdhpc.lab.train.samples import InMemory
from cpdhpc.lab.train.step import backward, evaluate, exchange, step
from cpdhpc.lab.train.update import AllreduceUpdate
from cpdhpc.torch.controllers import DECAYS, Schedule
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback

HIDDEN: dict[str, Any] = {"mlp": [8], "lenet": 16}
U = 2.0**-24  # unit roundoff of float32

LOSS = CrossEntropy().build()


@pytest.mark.parametrize(("name", "row"), [("mlp", "stochastic"), ("lenet", "aps")])
def test_training_learns_and_repeats_itself_bit_for_bit(
    tmp_path: Path, name: str, row: str
) -> None:
    job = small_job(
        model={"name": name, "hidden": HIDDEN[name]},
        gradient=ROWS[row],
        train={"epochs": 8, "learning_rate": 0.05},
    )
    first = run_job(job, Loopback(virtual_ranks=2), tmp_path / "a")
    again = run_job(job, Loopback(virtual_ranks=2), tmp_path / "b")
    losses = first.record.arrays()["steps"]["loss"]
    assert losses[-5:].mean() < 0.9 * losses[:5].mean()  # of the last and the first epoch
    assert model_bytes(first.files.checkpoint) == model_bytes(again.files.checkpoint)
    assert np.array_equal(losses, again.record.arrays()["steps"]["loss"])


@pytest.fixture(autouse=True)
def directories(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()


@every(("batch", "ranks"), [(8, 1), (8, 4), (7, 3), (5, 8)])
def test_the_mean_over_ranks_is_the_gradient_of_the_batch(batch: int, ranks: int) -> None:
    """For softmax regression, beside the float64 gradient, within what float32 can do.

    The gradient of W is the mean over the batch of d x^T, d = softmax(W x + b) - target.
    A logit sums n + 1 terms whose sizes add up to at most M, so it is off by (n + 2) u M; the
    softmax's relative error is at most twice that and a dozen roundings of its own. The sum over
    the batch, the weights of shards and the mean over ranks add batch + ranks + 4 roundings.
    """
    torch.manual_seed(0)
    model, data = MODELS["mlp"](hidden=()).build((8, 8), 8), small_data()
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    reducer = GradientReducer(model, Loopback(virtual_ranks=ranks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    done = step(AllreduceUpdate(model, optimizer, reducer), InMemory(x, y), np.arange(batch), LOSS)
    weight, bias = (p.detach().numpy().astype(np.float64) for p in model.parameters())
    inputs = data.train_x[:batch].reshape(batch, -1).astype(np.float64)
    logits = inputs @ weight.T + bias
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    d = softmax - np.eye(8)[data.train_y[:batch]]
    largest = (np.abs(inputs) @ np.abs(weight.T) + np.abs(bias)).max()
    of_d = 2 * (inputs.shape[1] + 2) * U * largest + 12 * U
    bound = of_d * np.abs(inputs).mean(0) + (batch + ranks + 4) * U * (
        np.abs(d).T @ np.abs(inputs) / batch
    )
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert (np.abs(gradient.numpy() - d.T @ inputs / batch) <= bound).all()
    loss = -np.log(softmax[np.arange(batch), data.train_y[:batch]]).mean()
    assert math.fsum(done.losses) / ranks == pytest.approx(
        loss, rel=1e-5
    )  # far off if weighted ill


def test_even_shards_are_not_scaled_and_empty_ones_are_zero() -> None:
    torch.manual_seed(0)
    model, data = MODELS["mlp"](hidden=(4,)).build((8, 8), 8), small_data()
    x, y = torch.from_numpy(data.train_x[:4]), torch.from_numpy(data.train_y[:4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = backward(model, optimizer, x, y, LOSS, 4 * 3 / 12)
    assert loss == float(torch.nn.functional.cross_entropy(model(x), y).detach())
    assert backward(model, optimizer, x[:0], y[:0], LOSS) == 0.0
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_counts_every_sample_once_at_any_number_of_ranks() -> None:
    torch.manual_seed(0)
    model, data = MODELS["mlp"]().build((8, 8), 8), small_data()
    x, y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    right = int((model(x).argmax(1) == y).sum())
    losses = []
    for ranks in (1, 3, 64):
        (accuracy,), loss = evaluate(
            model, Loopback(virtual_ranks=ranks), InMemory(x, y), LOSS, [Accuracy()]
        )
        assert accuracy == right / len(y)
        losses.append(loss)
    # logits of different batch shapes differ by a few roundings; a sample too many by 1/40
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_evaluation_is_without_what_only_training_does() -> None:
    """All values of an image are dropped, so while training all logits are the bias."""
    torch.manual_seed(0)
    layers = torch.nn.Flatten(), torch.nn.Dropout(1.0), torch.nn.Linear(64, 8)
    model, data = torch.nn.Sequential(*layers), small_data()
    x, y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    logits = layers[2](x.flatten(1)).detach().double()
    _, loss = evaluate(model, Loopback(), InMemory(x, y), LOSS, [Accuracy()])
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-6)
    assert model.training


def test_a_pulse_carries_losses_times_and_signals() -> None:
    pulse = exchange(Loopback(3), [0.5, -1.0, 2.0], [7, 8], np.array([1, 2, 3]), 15)
    assert pulse.loss == 0.5
    assert pulse.time_ns.tolist() == [7, 8]
    assert pulse.wire_bytes.tolist() == [1, 2, 3]
    assert pulse.signal == 15
    assert math.isnan(exchange(Loopback(1), [math.nan], [0], np.array([0]), 0).loss)


FACTORS = {  # of a decay: at the middle of what follows the warm-up, and at the end
    "constant": (1.0, 1.0),
    "step": (0.5, 0.25),
    "cosine": (0.5, 0.0),
    "polynomial": (0.5, 0.0),
    "exponential": (0.125, 2.0**-6),
}


@every("decay", DECAYS)
def test_schedules_warm_up_then_fall(decay: str) -> None:
    schedule = Schedule(warmup_epochs=2.0, decay=decay, milestones=(4.0, 6.0), gamma=0.5)
    factors = [schedule.factor(epoch / 4, 8, (epoch + 1) / 4) for epoch in range(33)]
    assert factors[:9] == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1]
    assert factors[8:] == sorted(factors[8:], reverse=True)
    found = schedule.factor(5, 8, 5.25), factors[-1]
    assert found == pytest.approx(FACTORS[decay], abs=1e-15)  # cos(pi) is off by a rounding


EXACT = {"none", "lowbit", "onebit", "powersgd", "gradientflow"}  # of equal values


@every("name", COMPRESSORS)
def test_a_plain_loop_adopts_the_reducer(name: str) -> None:
    """Small integers add up exactly: what neither draws nor selects gives the very mean."""
    model = torch.nn.Linear(3, 2, bias=False)
    frozen = torch.nn.Linear(2, 2)
    frozen.requires_grad_(False)
    both = torch.nn.ModuleDict({"a": model, "b": frozen, "unused": torch.nn.Linear(1, 1)})
    reducer = GradientReducer(both, Loopback(virtual_ranks=2), name)
    for hosted, value in enumerate((1.0, 3.0)):
        model.weight.grad = torch.full((2, 3), value)
        reducer.stash(hosted)
    mean = reducer.reduce()
    assert name not in EXACT or torch.equal(model.weight.grad, torch.full((2, 3), 2.0))
    assert torch.equal(model.weight.grad.flatten(), torch.from_numpy(mean.flat[:6]))
    assert both["unused"].weight.grad is None  # on no rank is there one
    assert frozen.weight.grad is None
    assert mean.flat.dtype == np.float32
    assert reducer.bucket.names == ("a.weight", "unused.weight", "unused.bias")


def test_the_reducer_leaves_gradients_alone_where_one_is_not_finite() -> None:
    model = torch.nn.Linear(3, 2)
    reducer = GradientReducer(model, Loopback(), "lowbit", wire="e2m1fn", scaling="none")
    model.weight.grad = torch.ones(2, 3)
    model.bias.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(NonFiniteGradient, match="'bias' on rank 0"):
        reducer.reduce()
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    assert float(model.bias.grad[0]) == 1.0


@every(
    ("aggregator", "options", "says"),
    [
        ("lowbits", {}, "did you mean lowbit"),
        ("lowbit", {"wire": "e9m1"}, "exp is 1..8"),
        ("lowbit", {"wires": "e4m3"}, "wires"),
        (LowBit(), {"wire": "e4m3"}, "the aggregator has its own"),
    ],
)
def test_the_reducer_refuses(aggregator: Any, options: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        GradientReducer(torch.nn.Linear(1, 1), Loopback(), aggregator, **options)


def test_the_reducer_refuses_models_it_cannot_reduce() -> None:
    with pytest.raises(ValueError, match=r"weight is torch\.float64 on cpu"):
        GradientReducer(torch.nn.Linear(1, 1).double(), Loopback())
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        GradientReducer(torch.nn.Linear(1, 1).requires_grad_(False), Loopback())


@every("row", ROWS)
def test_divergence_names_layer_and_rank_and_keeps_the_checkpoint(tmp_path: Path, row: str) -> None:
    job = small_job(gradient=ROWS[row], train={"epochs": 1})
    files = Files.of(tmp_path, job)
    run_job(job, Loopback(2), tmp_path)
    before = files.checkpoint.read_bytes()
    data = small_data()
    data.train_x[:] = np.nan
    training = prepared(job, Loopback(2), files, data)
    with pytest.raises(Diverged, match=r"small-s0: iteration 0: .*'1\.weight'.* on rank 0, 1"):
        finish(training)
    assert files.checkpoint.read_bytes() == before
    assert store.read_attributes(files.record)["status"] == "failed"


def test_a_loss_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 1 alone, with gradients that are finite."""
    import cpdhpc.lab.train.step as steps

    real, calls = steps.backward, []

    def poisoned(*arguments: Any) -> float:
        loss = real(*arguments)
        calls.append(loss)
        return float("inf") if len(calls) == 6 else loss

    monkeypatch.setattr(steps, "backward", poisoned)
    job = small_job(train={"epochs": 1})
    with pytest.raises(Diverged, match="small-s0: iteration 2: the loss is inf"):
        run_job(job, Loopback(2), tmp_path)


def test_a_row_that_diverges_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table, exit status and last line say which; resumed, it is the only one that is tried."""
    write_idx(tmp_path)
    rates = {"before": 0.1, "wild": 1e30, "after": 0.1}
    rows = [{"name": name, "train": {"learning_rate": rate}} for name, rate in rates.items()]
    tables = SMALL | {"data": {"name": "idx", "dir": str(tmp_path)}, "compare": rows}
    (tmp_path / "job.toml").write_text(dump_toml(tables))
    command = ["train", str(tmp_path / "job.toml"), "--out", str(tmp_path / "out")]
    for resumed, options in enumerate(([], ["--resume"])):
        assert main([*command, *options]) == 2
        shown, error = capsys.readouterr()
        assert "wild-s0.h5: failed" in shown
        assert ("[3/3] after-s0: complete" in shown) == (not resumed)
        assert error.count("\n") == 1
        assert error.startswith("cpdhpc: error: 1 of 3 runs: wild-s0: iteration ")
    status = {
        name: store.read_attributes(tmp_path / f"out/{name}-s0.h5")["status"] for name in rates
    }
    assert status == {"before": "complete", "wild": "failed", "after": "complete"}
    (tmp_path / "job.toml").write_text(dump_toml(tables | {"compare": rows[1:2]}))
    assert main([*command[:-1], str(tmp_path / "alone")]) == 2  # none is complete: no table


@pytest.mark.parametrize(("name", "limit"), [("LARGEST_BYTES", 5 * 256), ("KEPT_BYTES", 1)])
def test_evaluation_takes_as_many_samples_as_memory_is_to_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    """The first layer gives 64 values, 256 bytes: 5 of the 40 samples have room, with copies one.

    Sums of 64 products may round otherwise in other chunks, so losses agree to some 64 * 2**-24.
    """
    import cpdhpc.lab.train.step as steps

    copies = {"epsilon": 0.1} if name == "KEPT_BYTES" else {}
    job, sizes = small_job(adversarial=copies, train={"epochs": 1}), list[int]()
    whole = run_job(job, Loopback(1), tmp_path).record.rows["epochs"][0]
    whole.pop("time_s")
    monkeypatch.setattr(steps, name, limit)
    training = prepared(job, Loopback(1), tmp_path)
    training.model.register_forward_hook(
        lambda model, given, output: None if model.training else sizes.append(len(output))
    )
    finish(training)
    assert set(sizes) == {1 if copies else 5}
    found = training.record.rows["epochs"][0]
    assert {name: found[name] for name in whole} == pytest.approx(whole, rel=64 * U)


def test_a_run_that_learns_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, worse in ((1e3, True), (0.1, False)):
        job = small_job(train={"epochs": 3, "learning_rate": rate})
        files = Files.of(tmp_path / str(rate), job)
        files.record.parent.mkdir()
        said = told(prepared(job, Loopback(), files), capsys)
        assert ("no better than guessing" in said) == worse


@pytest.mark.parametrize("base", [0, 50])
def test_a_batch_larger_than_the_data_set_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], base: int
) -> None:
    schedule = {"base_batch": base, "batch_scaling": "linear"} if base else {}
    for batch in (100, 200):
        job = small_job(train={"epochs": 1, "batch": batch}, schedule=schedule)
        said = told(prepared(job, Loopback(), tmp_path), capsys)
        line = "train.batch=200 is more than the 100 samples: a step has these"
        assert (line in said) == (batch == 200)
        assert ("and rates are scaled for it" in said) == (base > 0 and batch == 200)


def test_a_metric_that_is_nan_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "small-s0: test_accuracy is NaN, though the loss is finite: see its metric"
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(Accuracy, "score", lambda self, mean: math.nan)
        job = small_job(train={"epochs": 1})
        assert (line in told(prepared(job, Loopback(), tmp_path), capsys)) == broken


def test_a_run_that_ends_before_scales_are_fixed_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for preset in ("courbariaux", "flexpoint16"):
        job = small_job(name=preset, precision={"preset": preset}, train={"epochs": 1})
        line = f"{preset}-s0: [precision]: warmup=100: fixed scales round nothing in 5 steps\n"
        said = told(prepared(job, Loopback(), tmp_path), capsys)
        assert (line in said) == (preset == "courbariaux")


def test_the_pictures_of_a_lenet_must_not_vanish() -> None:
    with pytest.raises(ValueError, match="inputs of 3 x 8: must be images of at least 4 x 4"):
        MODELS["lenet"]().build((3, 8), 10)


MISFITS: list[tuple[dict[str, Any], list[str], str]] = [  # tables of row b, settings, what is said
    ({"update": {"name": "dsgd"}}, [], "b: update.name='dsgd': graph='exponential' needs 2 ranks"),
    (
        {"update": {"name": "dsgd", "graph": "grid"}},
        ["train.virtual_ranks=2"],
        "b: update.name='dsgd': graph='grid' needs 4 ranks or more",
    ),
    (
        {"adversarial": {"epsilon": 0.1, "alternate": "ranks"}},
        ["train.virtual_ranks=3"],
        "b: adversarial.alternate='ranks': 3 ranks: must be even",
    ),
    (
        {"controller": {"name": "noise_scale"}},
        [],
        "b: controller.name='noise_scale': 1 rank: noise is measured by differences between ranks",
    ),
    (
        {"train": {"overlap": True}},
        ["train.virtual_ranks=2"],
        "--set train.virtual_ranks=2: compare row b: train.overlap=true needs virtual_ranks=1",
    ),
    ({"train": {"virtual_ranks": 1 << 60}}, [], f"b-s0: World: virtual_ranks={1 << 60}: too many"),
]


@every("tables, settings, says", MISFITS)
def test_a_row_that_does_not_go_with_the_ranks_is_named_before_any_trains(
    tables: dict[str, Any],
    settings: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_idx(tmp_path)
    job = {
        "data": {"name": "idx", "dir": str(tmp_path)},
        "optimizer": {"momentum": 0.0},
        "train": {"epochs": 1, "threads": 1, "batch": 6},
        "compare": [{"name": "a"}, {"name": "b", **tables}],
    }
    file, out = tmp_path / "k.toml", tmp_path / "out"
    file.write_text(dump_toml(job))
    more = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", str(file), "--out", str(out), *more]) == 2
    assert says in capsys.readouterr().err
    assert not list(out.glob("*.h5"))


def test_stages_that_do_not_go_with_the_processes_are_told_before_any_row_trains() -> None:
    three = small_job(stages={"count": 3}, model={"hidden": [8, 8]})
    world: Any = SimpleNamespace(processes=2)
    with pytest.raises(ConfigError, match=r"^small-s0: stages\.count=3 on 2 processes: their num"):
        _check_ranks([small_job(), three], world)


@pytest.mark.parametrize(
    ("gradient", "says"),
    [
        ({"aggregator": "lgc", "plain": ["3.weigt"]}, "gradient.plain: no layer is called"),
        ({"aggregator": "topk", "exclude": ["nope"]}, "gradient.exclude: no layer is called"),
        ({"aggregator": "lowbit", "layers": {"no*": "raw"}}, "gradient.layers: no layer matches"),
    ],
)
def test_a_layer_that_a_later_row_has_not_is_told_before_any_row_trains(
    gradient: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of a row that comes first; a row whose names are right trains."""
    write_idx(tmp_path)
    tables = SMALL | {"data": {"name": "idx", "dir": str(tmp_path)}}
    file, out = tmp_path / "job.toml", tmp_path / "out"
    good = {"name": "good", "gradient": {"aggregator": "topk", "exclude": ["1.weight"]}}
    said = []
    for rows in ([{"name": "first"}, good, {"name": "row", "gradient": gradient}], [gradient]):
        alone = {"name": "row", "gradient": gradient}
        of_rows = {"compare": rows} if len(rows) > 1 else alone
        file.write_text(dump_toml(tables | of_rows))
        assert main(["train", str(file), "--out", str(out)]) == 2
        said.append(capsys.readouterr().err)
        assert not list(out.glob("*.h5"))
    assert said[0] == said[1] and said[0].startswith(f"cpdhpc: error: row-s0: {says}")
    file.write_text(dump_toml(tables | {"compare": [{"name": "first"}, good]}))
    assert main(["train", str(file), "--out", str(out)]) == 0

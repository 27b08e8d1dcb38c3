"""Influence of training samples: single samples' gradients, scores, kept weights."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from every import every
from torch import nn
from training import ROOT, model_bytes, prepared, run_job, small_data, small_job, stop

from cpdhpc import store
from cpdhpc.config import ConfigError, UserError, merge, validate
from cpdhpc.lab.commands.report import Outputs, load, report
from cpdhpc.lab.commands.trained import add_influence, run_influence
from cpdhpc.lab.influence.rows import LastLayer, Layers, Projection
from cpdhpc.lab.train import checkpoint
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.job import load as load_jobs
from cpdhpc.lab.train.losses import CrossEntropy, MeanSquares
from cpdhpc.lab.train.models import MODELS
from cpdhpc.lab.train.setup import samples_of
from cpdhpc.world.ranks import Loopback

ENTROPY = CrossEntropy().build()
Gradient = Callable[[int], torch.Tensor]


class Twice(nn.Module):
    """Its last layer is used at five places of a sample, and once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))  # [b, 5, 4]
        return (self.last(h) + self.last(h.mean(1))[:, None]).mean(1)


def normalised(bias: bool = True) -> nn.Module:
    net = nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 3, 3),
        nn.BatchNorm1d(3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(12, 4, bias=bias),
    )
    net[2].running_mean.uniform_(-1, 1)
    return net


def some(*shape: int, n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, *shape, dtype=torch.float64), torch.arange(n) % 4


def by_autograd(
    model: nn.Module, names: list[str], x: torch.Tensor, y: torch.Tensor, loss: Any = ENTROPY
) -> torch.Tensor:
    """A sample after the other: [n, values]."""
    model.eval()
    chosen = [dict(model.named_parameters())[name] for name in names]
    rows = []
    for i in range(len(y)):
        each = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), chosen)
        rows.append(torch.cat([g.flatten() for g in each]))
    return torch.stack(rows)


def assert_products(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Within 1,000 roundings of |a| |b|: no value here is a sum of as many, nor so many deep."""
    bound = 1000 * 2.0**-53 * torch.outer(a.norm(dim=1), b.norm(dim=1))
    assert found.shape == bound.shape
    assert bool(((found - a @ b.T).abs() <= bound).all())
    assert bool((a @ b.T).abs().max() > 0.01)


@every("case", ["bias", "none", "places", "targets"])
def test_the_last_layer_in_closed_form_is_what_autograd_says(case: str) -> None:
    torch.manual_seed(1)
    model, loss = (Twice() if case == "places" else normalised(case == "bias")).double(), ENTROPY
    x, y = some(5, 6) if case == "places" else some(6)
    if case == "targets":  # several a sample
        y, loss = torch.randn(7, 4, dtype=torch.float64), MeanSquares().build()
    layer = LastLayer(model, loss, x[:1])
    assert layer.name == ("last" if case == "places" else "6")
    names = [f"{layer.name}.{name}" for name, _ in layer.layer.named_parameters()]
    expected = by_autograd(model, names, x, y, loss)
    one, losses = layer.rows(x[:3], y[:3])
    other, _ = layer.rows(x[3:], y[3:])
    assert layer.factors == (case != "places")
    assert_products(layer.products(one, other), expected[:3], expected[3:])
    assert torch.allclose(layer.squares(other), (expected[3:] ** 2).sum(1), rtol=1e-12, atol=0)
    assert torch.allclose(layer.dense(other), expected[3:], rtol=1e-11, atol=1e-14)
    mean = float(loss(model(x), y).detach())
    assert abs(float(torch.cat([losses, layer.rows(x[3:], y[3:])[1]]).mean() - mean)) < 1e-14


@pytest.mark.parametrize("names", [[], ["1", "6.bias"]])
def test_chosen_layers_are_what_a_loop_of_autograd_says(names: list[str]) -> None:
    torch.manual_seed(2)
    model = normalised().double()
    model[2].weight.requires_grad_(False)
    x, y = some(6)
    layers = Layers(model, ENTROPY, names)
    assert layers.names == (
        ["1.weight", "1.bias", "6.bias"]
        if names
        else ["1.weight", "1.bias", "2.bias", "6.weight", "6.bias"]
    )
    expected = by_autograd(model, layers.names, x, y)
    rows, _ = layers.rows(x, y)
    assert list(layers.sizes.values()) == [
        dict(model.named_parameters())[name].numel() for name in layers.names
    ]
    assert_products(layers.products(rows, rows[:2]), expected, expected[:2])


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_gradients_of_texts_are_means_over_their_places(name: str) -> None:
    """Layers that vmap goes through one by one; two samples of four classes each."""
    torch.manual_seed(6)
    keys = {"lstm": {"embedding": 3, "hidden": 4}, "transformer": {"width": 4, "heads": 2}}[name]
    model = MODELS[name](**keys).build((4,), 5).double()  # type: ignore[arg-type]
    x, y = torch.randint(0, 5, (2, 2, 4))
    layers, last = Layers(model, ENTROPY), LastLayer(model.eval(), ENTROPY, x)
    expected = by_autograd(model, layers.names, x, y)
    assert_products(layers.products(*[layers.rows(x, y)[0]] * 2), expected, expected)
    names = [f"{last.name}.{each}" for each, _ in last.layer.named_parameters()]
    expected = by_autograd(model, names, x, y)
    assert_products(last.products(*[last.rows(x, y)[0]] * 2), expected, expected)


def test_the_claims_data_has_as_many_wrong_labels_as_it_says() -> None:
    (job, *others) = load_jobs(ROOT / "inputs" / "claim_tracin.toml")
    train, _ = samples_of(job.data.load())
    assert len(others) == 2
    assert job.train.kept_epochs == range(1, 13)
    right = validate(Job, {"name": "x", "data": {"name": "digits"}}, "x").data.load().train_y
    wrong = train.take(np.arange(len(train)), 0)[1].numpy() != right
    assert wrong.sum() == round(0.1 * len(right))
    assert wrong.tolist() == train.dataset.is_wrong.tolist()  # type: ignore[attr-defined]


def test_projections_are_right_on_average() -> None:
    """400 seeds: the mean within four standard errors, the variance below its bound plus that."""
    torch.manual_seed(3)
    a, b = torch.randn(2, 1, 90, dtype=torch.float64)
    b += a
    width, inner = 8, float(a @ b.T)
    found = []
    for seed in range(400):
        projection = Projection({0: 60, 3: 30}, width, seed)
        found.append(float(projection(a) @ projection(b).T))
    bound = (float((a @ a.T) * (b @ b.T)) + inner**2) / width
    error = np.std(found) / 20
    assert abs(np.mean(found) - inner) < 4 * error
    assert 0.5 * bound < np.var(found) < bound * (1 + 4 * (2 / 400) ** 0.5)  # of a chi-square
    alone = Projection({3: 30}, width, 5)(a[:, 60:])
    both = Projection({0: 60, 3: 30}, width, 5)
    zeros = torch.cat([torch.zeros(1, 60), a[:, 60:]], 1)
    assert torch.equal(alone, both(zeros))  # a parameter has its signs whatever is beside it
    assert both._signs(0, 0, 60).abs().unique().numel() == 1


def change(rate: float, steps: int) -> tuple[float, float]:
    """SGD, a sample each step: sum of influences, and what the test loss has fallen by."""
    torch.manual_seed(4)
    data = small_data()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    gradients, told, losses = Layers(model, ENTROPY), 0.0, list[float]()
    for step in range(steps + 1):
        x = torch.from_numpy(np.concatenate([data.train_x[step % 100, None], data.test_x[:20]]))
        y = torch.from_numpy(np.append(data.train_y[step % 100], data.test_y[:20]))
        rows, each = gradients.rows(x.double(), y)
        losses.append(float(each[1:].mean()))
        if step == steps:
            return told, losses[0] - losses[-1]
        told += rate * float(gradients.products(rows[1:], rows[:1]).mean())
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()) - rate * rows[0], model.parameters()
        )
    raise AssertionError


def test_influences_of_all_steps_are_the_change_of_the_loss() -> None:
    """To first order in the rate: the error shrinks with it."""
    errors = []
    for rate, steps in ((1e-3, 300), (1e-2, 30), (0.1, 3)):
        told, fallen = change(rate, steps)
        assert fallen > 0.01
        errors.append(abs(told / fallen - 1))
    assert errors[0] < 0.02
    assert errors[0] < errors[1] / 3 < errors[2] / 9


DECAY = {"decay": "exponential", "gamma": 0.5}


def kept_run(directory: Path, **changes: Any) -> Path:
    """Train on 359 digits, weights kept after each of two epochs; return the directory."""
    tables = {"data": {"name": "digits", "test_share": 0.8}, "schedule": DECAY}
    job = small_job(**merge({**tables, "train": {"keep_every": 1}}, changes))
    run_job(job, Loopback(), directory, job.data.load())
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_run(tmp_path_factory.mktemp("run"))


def influence(*arguments: object) -> dict[str, np.ndarray[Any, Any]]:
    """Run the command; return what it wrote."""
    parser = argparse.ArgumentParser()
    add_influence(parser)
    given = parser.parse_args([str(each) for each in arguments])
    assert run_influence(given, Loopback()) == 0
    out = given.out or given.run_of / "small-s0.influence.h5"
    with xarray.open_dataset(out, engine="h5netcdf") as found:
        assert found.scores.dims == ("test", "train")
        return {str(name): each.values for name, each in found.variables.items()}


def test_weights_are_kept_and_the_run_has_its_bits(tmp_path: Path) -> None:
    """Every second of five epochs; stopped in the last step of the fourth, then resumed."""
    several = {
        "plain": small_job(train={"epochs": 4}, schedule=DECAY),
        "kept": small_job(train={"epochs": 5, "keep_every": 2}, schedule=DECAY),
    }
    for name, job in several.items():
        (tmp_path / name).mkdir()
        whole = run_job(job, Loopback(2), tmp_path / name)
    files = Files.of(tmp_path, job)
    stop(prepared(job, Loopback(2), files), 19)
    run_job(job, Loopback(2), files, resume=True)
    assert model_bytes(files.checkpoint) == model_bytes(whole.files.checkpoint)
    names = [f"small-s0.weights-{epoch}.h5" for epoch in (2, 4)]
    for directory in (tmp_path, tmp_path / "kept"):
        assert sorted(path.name for path in directory.glob("*weights*")) == names
        assert [each.attributes["kind"] for each in load([directory]).runs] == ["run"]
        assert {directory / name for name in names} < {*Files.of(directory, job).written(job)}
    rates = whole.record.arrays()["steps"]["learning_rate"]
    for name, epoch in zip(names, (2, 4), strict=True):
        one, other = (
            checkpoint.load_weights(each / name) for each in (tmp_path, tmp_path / "kept")
        )
        assert one[1] == other[1]
        assert (one[1].epoch, one[1].iteration) == (epoch, 5 * epoch)
        assert one[1].learning_rate == rates[5 * epoch - 1] != rates[5 * epoch]
        assert all(one[0][tensor].tobytes() == x.tobytes() for tensor, x in other[0].items())
    end = store.read(tmp_path / "plain" / "small-s0.checkpoint.h5")[0]["model"]
    assert {k: v.tobytes() for k, v in one[0].items()} == {k: v.tobytes() for k, v in end.items()}


def test_scores_are_the_sum_over_epochs_whatever_the_memory(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a loop of autograd in float64; float32 has 2**-24, and again 1,000 of them."""
    asked = (trained, "--layers", "all", "--train", "7,9:359,0", "--test", "3,500:898:1", "--self")
    found = influence(*asked)
    told = capsys.readouterr().out
    in_parts = influence(*asked, "--memory", 1, "--out", trained / "parts.h5")
    assert "passes over them: 1" in told and "exists" not in told
    assert "passes over them: 6" in capsys.readouterr().out
    influence(*asked, "--out", trained / "parts.h5")
    assert "parts.h5: exists: its scores will be replaced" in capsys.readouterr().out
    for name, values in found.items():
        assert values.tobytes() == in_parts[name].tobytes(), name
    job = validate(Job, {"name": "x", "data": {"name": "digits", "test_share": 0.8}}, "x")
    data = job.data.load()
    train, test = np.r_[7, 9:359, 0], np.r_[3, 500:898]
    assert found["train"].tolist() == train.tolist()
    assert found["test"].tolist() == test.tolist()
    assert found["train_target"].tolist() == data.train_y[train].tolist()
    assert found["test_target"].tolist() == data.test_y[test].tolist()
    shown, n = np.r_[0:3, 348:351], 4
    expected, bound, own = 0.0, 0.0, 0.0
    model = small_job().model.build((8, 8), 10)
    for epoch, rate in ((1, found["learning_rate"][0]), (2, found["learning_rate"][1])):
        kept, here = checkpoint.load_weights(trained / f"small-s0.weights-{epoch}.h5")
        assert here.learning_rate == rate
        model.load_state_dict({name: torch.from_numpy(each) for name, each in kept.items()})
        names = list(kept)
        a, b = (
            by_autograd(model.double(), names, torch.from_numpy(x).double(), torch.from_numpy(y))
            for x, y in (
                (data.test_x[test[:n]], data.test_y[test[:n]]),
                (data.train_x[train[shown]], data.train_y[train[shown]]),
            )
        )
        expected = expected + rate * (a @ b.T)
        bound = bound + rate * 1000 * 2.0**-24 * torch.outer(a.norm(dim=1), b.norm(dim=1))
        own = own + rate * (b**2).sum(1)
        losses = ENTROPY(model(torch.from_numpy(data.train_x[train]).double()),
                         torch.from_numpy(data.train_y[train]), reduction="none")  # fmt: skip
    assert np.all(np.abs(found["scores"][:n, shown] - expected.numpy()) <= bound.numpy())
    assert np.allclose(found["self_influence"][shown], own, rtol=1e-4)
    assert np.allclose(found["train_loss"], losses.detach(), rtol=1e-4, atol=1e-6)
    (_, code, *_) = (ROOT / "docs" / "reference" / "influence.md").read_text().split("```")
    code = code.removeprefix("python").replace("test=7", "test=3")
    exec(code.replace("results/JOB/JOB-s0", str(trained / "small-s0")), {})
    assert "raised their loss most: [" in capsys.readouterr().out
    best = np.argmax(found["scores"][0])
    line = next(line for line in told.splitlines() if "proponents" in line)
    assert line.split()[1] == str(train[best])


def test_self_influence_and_projections_of_the_last_layer(trained: Path) -> None:
    """Self-influence is of whole gradients; projected scores are near: 3,000 sums, seed 0."""
    picture = trained / "a.png"
    whole = influence(trained, "--test", "0:2", "--self", "--epochs", 2, "--png", picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    near = influence(trained, "--test", "0:2", "--self", "--epochs", 2, "--projection", 3000)
    assert whole["epoch"].tolist() == [2]
    assert near["self_influence"].tobytes() == whole["self_influence"].tobytes()
    assert near["scores"].tobytes() != whole["scores"].tobytes()
    assert np.corrcoef(near["scores"].ravel(), whole["scores"].ravel())[0, 1] > 0.99


BAD: dict[str, str] = {
    "--layers nowhere --self": "--layers nowhere: no such layer, .* some of 1, 3$",
    "--layers last 1 --self": "--layers last 1: must be last, all, or names",
    "--test 0:2000": "--test 0:2000: 1438 is not there: must be of 0..1437",
    "--test 3,-1": "-1 is not there",
    "--test 3,3": "nothing, or some twice",
    "--test 5:5": "nothing, or some twice",
    "--test 0:x": "--test 0:x: must be like 0:100",
    "--test 0:1:0": "must be like 0:100|nothing",
    "--train 359 --self": "--train 359: 359 is not there: must be of 0..358",
    "--epochs 3 --self": "no weights of 3: kept are 1, 2",
    "--projection -1 --self": "--projection -1: must be 0 or more",
    "": "give --test",
    "--self --set train.epochs=3": "must be of data",
    "--self --set data.split_seed=1": "differs from the run's",
    "--self --png nowhere/a.png": "nowhere/a.png: nowhere is no directory that can be written",
}


@every("arguments", BAD)
def test_what_cannot_be_found_is_told_in_a_line(trained: Path, arguments: str) -> None:
    with pytest.raises(UserError, match=BAD[arguments]) as told:
        influence(trained, *arguments.split())
    assert "\n" not in str(told.value)


def test_runs_that_kept_nothing_or_other_weights(tmp_path: Path, trained: Path) -> None:
    with pytest.raises(UserError, match="has no records of runs"):
        influence(tmp_path, "--self")
    kept_run(tmp_path, train={"keep_every": 0, "epochs": 2}, model={"hidden": [9]})
    with pytest.raises(UserError, match=r"no weights were kept: train with train\.keep_every"):
        influence(tmp_path, "--self")
    (tmp_path / "small-s0.weights-2.h5").write_bytes(
        (trained / "small-s0.weights-2.h5").read_bytes()
    )
    with pytest.raises(UserError, match=r"model\.hidden is \[8\] there and \[9\] here"):
        influence(tmp_path, "--self")
    (tmp_path / "other.h5").write_bytes((tmp_path / "small-s0.h5").read_bytes())
    with pytest.raises(UserError, match=r"2 runs: name one of other\.h5, small-s0\.h5"):
        influence(tmp_path, "--self")
    with pytest.raises(UserError, match="is no run"):
        influence(trained / "small-s0.weights-2.h5", "--self")


def test_runs_of_a_version_that_had_fewer_keys(tmp_path: Path, trained: Path) -> None:
    notes = store.read_attributes(trained / "small-s0.h5")
    fewer = str(notes["toml"]).replace('loss_scaling = "static"\n', "")
    assert fewer != notes["toml"]
    store.write(tmp_path / "small-s0.h5", {}, notes | {"toml": fewer})
    name = "small-s0.weights-2.h5"
    (tmp_path / name).write_bytes((trained / name).read_bytes())
    assert influence(tmp_path, "--test", "0")["epoch"].tolist() == [2]


def test_a_run_that_has_not_ended_is_told_first(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in trained.glob("small-s0.weights-*.h5"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    notes = store.read_attributes(trained / "small-s0.h5")
    for status, is_told in (("complete", False), ("running", True), ("failed", True)):
        store.write(tmp_path / "small-s0.h5", {}, notes | {"status": status})
        (tmp_path / "small-s0.influence.h5").unlink(missing_ok=True)
        influence(tmp_path, "--test", "0")
        first, *printed = capsys.readouterr().out.splitlines()
        assert (f"has not ended: its status is '{status}'" in first) == is_told
        written = store.read_attributes(tmp_path / "small-s0.influence.h5")
        assert written["run_status"] == status
        assert report([tmp_path / "small-s0.influence.h5"], Outputs(terminal=False)) == 0
        shown = capsys.readouterr().out.splitlines()
        assert [line for line in printed if "proponents" in line and line in shown]


def test_layers_without_a_closed_form_are_refused() -> None:
    x, _ = some(6)
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    tied[1].weight = tied[0].weight
    frozen = normalised().double()
    frozen[6].weight.requires_grad_(False)
    for model, said in (
        (tied, "1 shares its weights"),
        (frozen, "6 was not trained"),
        (normalised()[:5].double(), "no linear layer"),
    ):
        with pytest.raises(ConfigError, match=said):
            LastLayer(model.eval(), ENTROPY, x[:1])


def test_weights_that_are_not_finite_are_told(tmp_path: Path) -> None:
    path = kept_run(tmp_path, train={"epochs": 1}) / "small-s0.weights-1.h5"
    kept, here = checkpoint.load_weights(path)
    model = small_job().model.build((8, 8), 10)
    model.load_state_dict({name: torch.full(each.shape, np.inf) for name, each in kept.items()})
    checkpoint.save_weights(path, model, here)
    with pytest.raises(UserError, match=r"weights-1\.h5: the gradients .* are not finite"):
        influence(tmp_path, "--self")
    assert not list(tmp_path.glob("*influence*"))


def test_a_box_within_an_array_is_written_where_it_belongs(tmp_path: Path) -> None:
    path, whole = tmp_path / "x", np.arange(60.0).reshape(3, 4, 5)
    path.write_bytes(b"head" + whole.tobytes())
    box = -np.ones((2, 3, 2))
    Loopback().write_box(path, 4, whole.shape, (1, 1, 2), box)
    whole[1:3, 1:4, 2:4] = box
    assert path.read_bytes() == b"head" + whole.tobytes()

"""Losses and metrics beside NumPy in float64; what they refuse."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from every import every
from training import SMALL, prepared, run_job, small_data, small_job

from cpdhpc import store
from cpdhpc.config import ConfigError, UserError, dump_toml, validate
from cpdhpc.lab.report.figures import styles
from cpdhpc.lab.report.fits import Score, Trained, score_charts
from cpdhpc.lab.report.trainings import load_run, run_groups, table
from cpdhpc.lab.signals import Caught
from cpdhpc.lab.train.job import Job, load
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.losses import LOSSES, METRICS, Accuracy, CrossEntropy
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.samples import InMemory
from cpdhpc.lab.train.step import evaluate
from cpdhpc.world.ranks import Loopback


def surprise(outputs: np.ndarray, targets: np.ndarray, smoothing: float = 0.0) -> np.ndarray:
    """-sum q log p of outputs [b, classes, T] in float64: q is the target, smoothed."""
    logits = np.moveaxis(outputs.astype(np.float64), 1, -1)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    q = np.eye(logits.shape[-1])[targets] * (1 - smoothing) + smoothing / logits.shape[-1]
    return -(q * log_p).sum(-1)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_cross_entropy_of_several_targets_a_sample(smoothing: float) -> None:
    rng = np.random.default_rng(1)
    outputs, targets = rng.normal(size=(3, 5, 4)).astype(np.float32), rng.integers(0, 5, (3, 4))
    loss = CrossEntropy(label_smoothing=smoothing).build()
    given = torch.from_numpy(outputs), torch.from_numpy(targets)
    each = loss(*given, reduction="none")
    expected = surprise(outputs, targets, smoothing)
    assert each.dtype == torch.float64
    assert each.numpy() == pytest.approx(expected, rel=1e-13)  # some tens of roundings of float64
    assert float(loss(*given)) == pytest.approx(expected.mean(), rel=1e-5)
    if not smoothing:
        assert torch.equal(loss(*given), torch.nn.functional.cross_entropy(*given))


@every("wrong", [-1, -100, 5])
def test_a_target_that_is_no_class_is_named(wrong: int) -> None:
    """-100 is what torch would leave out without a word."""
    x = torch.arange(12.0).reshape(6, 2)
    samples = InMemory(x, torch.tensor([[0, 1]] * 4 + [[0, wrong]] * 2))
    model = torch.nn.Sequential(torch.nn.Linear(2, 10), torch.nn.Unflatten(1, (5, 2)))
    loss, metric = LOSSES["cross_entropy"]().build(), METRICS["accuracy"]()
    with pytest.raises(ConfigError, match=f"item 4: target {wrong}: must be a class, 0 to 4"):
        evaluate(model, Loopback(3), samples, loss, [metric])


@pytest.mark.parametrize("ranks", [1, 3])
def test_scores_are_over_all_targets_of_all_samples(ranks: int) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(7, 4, 3)).astype(np.float32), rng.integers(0, 4, (7, 3))
    samples = InMemory(torch.from_numpy(x), torch.from_numpy(y))
    same, world, expected = torch.nn.Identity(), Loopback(ranks), surprise(x, y).mean()
    smoothed = CrossEntropy(label_smoothing=0.5).build()
    both = METRICS["perplexity"](), METRICS["accuracy"]()
    (told, right), loss = evaluate(same, world, samples, smoothed, both)
    assert told == pytest.approx(np.exp(expected), rel=1e-13)
    assert loss == pytest.approx(surprise(x, y, 0.5).mean(), rel=1e-13)
    assert right == (x.argmax(1) == y).mean()
    squares = InMemory(torch.from_numpy(x), torch.from_numpy(x + y[:, None]))
    (told,), loss = evaluate(same, world, squares, LOSSES["mse"]().build(), [METRICS["loss"]()])
    # the targets are rounded to float32, so a difference of at most 3 by 2**-23 of it
    assert [told, loss] == pytest.approx([np.square(y, dtype=float).mean()] * 2, rel=2**-21)


def test_the_metric_is_that_of_the_loss_where_the_job_names_none() -> None:
    def label(**tables: Any) -> str:
        return validate(Job, {"name": "j", **tables}, "j").metric.label

    assert label() == label(loss={"label_smoothing": 0.1}) == "accuracy"
    assert label(loss={"name": "mse"}) == label(loss={"import": "a.b:c"}) == "loss"
    assert label(loss={"name": "mse"}, metric={"import": "a.b:close"}) == "close"
    with pytest.raises(ConfigError, match="did you mean mse"):
        label(loss={"name": "msE2"})
    with pytest.raises(ConfigError, match="known are " + ", ".join(sorted(METRICS))):
        label(metric={"name": "zzzz"})
    with pytest.raises(ConfigError, match=r"metric.import='a.b:loss': should have another name"):
        label(metric={"import": "a.b:loss"})


@pytest.mark.parametrize(
    ("tables", "column"),
    [({}, ["test_accuracy"]), ({"metric": {"name": "perplexity"}}, ["test_perplexity"]),
     ({"metric": {"name": "loss"}}, [])],
)  # fmt: skip
def test_records_have_the_columns_of_the_metric(
    tmp_path: Path, tables: dict[str, Any], column: list[str]
) -> None:
    job, said = small_job(**tables), list[str]()
    training = prepared(job, Loopback(2), tmp_path)

    class Told(Display):
        def end(self, text: str) -> None:
            said.append(text)

    run(training, Caught(), Told(False, 1))
    epochs = store.read(training.files.record)[0]["epochs"]
    assert {*epochs} == {"epoch", *column, "test_loss", "time_s"}
    if column == ["test_perplexity"]:
        assert epochs[column[0]] == pytest.approx(np.exp(epochs["test_loss"]), rel=1e-13)
    score = {"test_accuracy": "accuracy ", "test_perplexity": "perplexity "}.get(
        *column or [""], ""
    )
    measured = Score.of(job.toml())
    assert measured.lower == job.metric.lower
    (row,) = table(run_groups([load_run(training.files.record)])).rows
    last = epochs[measured.column][-1]
    shown = f"{last:.2%}" if column == ["test_accuracy"] else f"{last:.4g}" if column else ""
    assert f"complete: {score}{shown}" in said[0] and "loss " in said[0]
    assert row[2] == (f"{100 * last:.2f}" if measured.unit else f"{last:.4g}")
    again = prepared(job, Loopback(2), tmp_path)
    again.resume()
    assert again.record.rows["epochs"] == training.record.rows["epochs"]


def test_further_metrics_are_recorded_and_reported(tmp_path: Path) -> None:
    """As a run has them that goes by them; gone on with where their module has moved to."""
    further = [{"name": "perplexity"}, {"import": "thirds_of_labels:third", "better": "lower"}]
    found = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "thirds_of_labels.py").write_text(
            "def third(outputs, targets):\n    return (targets % 3 == 0).float()\n"
        )
        path = tmp_path / place / "job.toml"
        path.write_text(dump_toml(SMALL | {"metrics": further}))
        (job,) = load(path)
        training = run_job(job, Loopback(2), tmp_path, resume=True)
        found.append(store.read(training.files.record)[0]["epochs"])
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    alone = small_job(metric=further[0], name="alone")
    training = run_job(alone, Loopback(2), tmp_path)
    expected = training.record.arrays()["epochs"]["test_perplexity"]
    assert np.array_equal(found[0]["test_perplexity"], expected)
    thirds = (small_data().test_y % 3 == 0).mean()
    assert found[0]["test_third"] == pytest.approx(np.full(2, thirds), rel=1e-13)
    shown = table(run_groups([load_run(tmp_path / f"{job.id}.h5")]))
    assert [column.heading for column in shown.columns][2:5] == [
        *("accuracy\n%", "perplexity", "third")
    ]
    assert shown.rows[0][3:5] == [f"{expected[-1]:.4g}", f"{thirds:.4g}"]


@every("names", [["accuracy"], ["loss"], ["perplexity", "perplexity"]])
def test_a_metric_is_told_once(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"metrics: '{names[-1]}': is there twice"):
        small_job(metrics=[{"name": name} for name in names])


class Missed(Accuracy):
    """A row of METRICS that a user adds: in percent, and less is better."""

    label = "missed"  # type: ignore[misc]
    lower = True  # type: ignore[misc]
    name: Literal["missed"] = "missed"  # type: ignore[assignment]

    def score(self, mean: float) -> float:
        return 1 - mean


def test_reports_show_a_metric_as_its_row_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "missed", Missed)
    job = small_job(metric={"name": "missed"}, metrics=[{"name": "accuracy"}])
    training = run_job(job, Loopback(2), tmp_path)
    assert Score.of(job.toml()) == Score("missed", "%", lower=True, loss_unit="nat")
    shown = table(run_groups([load_run(training.files.record)]))
    epochs = store.read(training.files.record)[0]["epochs"]
    assert epochs["test_missed"] == pytest.approx(1 - epochs["test_accuracy"], abs=1e-15)
    assert [column.heading for column in shown.columns][2:4] == ["missed\n%", "accuracy\n%"]
    assert shown.rows[0][2] == f"{100 * epochs['test_missed'][-1]:.2f}"
    monkeypatch.delitem(METRICS, "missed")  # as where another version reads the record
    assert Score.of(job.toml()) == Score("missed", "", lower=True, loss_unit="nat")


def test_runs_of_other_metrics_or_losses_are_one_line(tmp_path: Path) -> None:
    made = []
    for i, metric in enumerate(("accuracy", "loss")):
        job = small_job(name=f"run{i}", metric={"name": metric})
        made.append(load_run(run_job(job, Loopback(1), tmp_path).files.record))
    says = "run0 has test_accuracy, loss in nat and run1 test_loss, loss in nat: runs of one report"
    with pytest.raises(UserError, match=says):
        table(run_groups(made))


def test_less_is_better_where_the_metric_says_so() -> None:
    """Of three trainings the cheap one and the one of the least perplexity are the front."""
    job = validate(Job, {"name": "j", "metric": {"name": "perplexity"}}, "j")
    drawn = styles("abc")
    none = np.empty(0)
    trained = [
        Trained("", name, drawn[name], np.array([score]), sent, 1.0, none, none, none, none)
        for name, score, sent in (("a", 9.0, 1e3), ("b", 9.5, 2e3), ("c", 2.0, 3e3))
    ]
    unknown = Trained("", "d", drawn["a"], np.array([np.nan]), 1e2, 1.0, none, none, none, none)
    chart = score_charts("t", [unknown, *trained], Score.of(job.toml()))[0]
    front = next(each for each in chart.panels[0].series if each.label == "Pareto front")
    assert (list(front.x)[:2], list(front.y)[:2]) == ([1.0, 3.0], [9.0, 2.0])
    assert chart.name == "perplexity_by_bits"

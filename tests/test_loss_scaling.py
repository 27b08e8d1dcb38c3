"""Loss scaling: what a power of two leaves alone, what overflows, what is skipped on all ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every import every
from training import model_bytes, prepared, run_job, small_job

from cpdhpc import store
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.config import ConfigError
from cpdhpc.lab.signals import Caught, Interrupted
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.record import Record
from cpdhpc.torch import GradientReducer
from cpdhpc.torch.loss_scaling import LEAST, PATIENCE, LossScaler
from cpdhpc.world.ranks import Loopback

OVERFLOWS = {"aggregator": "lowbit", "wire": "e5m2", "scaling": "none", "overflow": "inf"}
SHARDS = [torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[2.0, 1.0], [-1.5, 0.25]])]


def made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.parametrize(
    "gradient",
    [{"aggregator": "none"}, {"aggregator": "lowbit", "wire": "e4m3", "error_feedback": True}],
    ids=lambda gradient: gradient["aggregator"],
)
def test_a_scale_that_nothing_rounds_changes_no_bit(tmp_path: Path, gradient: Any) -> None:
    found = []
    for scale in (1.0, 128.0):
        job = small_job(gradient=gradient, train={"loss_scale": scale})
        training = run_job(job, Loopback(virtual_ranks=2), made(tmp_path / str(scale)))
        found.append(model_bytes(training.files.checkpoint))
    assert found[0] == found[1]
    steps = store.read(training.files.record)[0]["steps"]
    assert set(steps["loss_scale"]) == {128.0} and steps["loss"].max() < 10


def test_overflow_skips_steps_until_gradients_fit_and_resumes(tmp_path: Path) -> None:
    """e5m2 holds 57,344: gradients of about 0.1 overflow until the scale is far below 2**24."""
    job = small_job(
        gradient=OVERFLOWS | {"error_feedback": True},
        train={"loss_scaling": "dynamic", "loss_scale": 2.0**24, "epochs": 4},
    )
    whole = run_job(job, Loopback(virtual_ranks=2), made(tmp_path / "whole"))
    steps = store.read(whole.files.record)[0]["steps"]
    scales, losses = steps["loss_scale"], steps["loss"]
    assert scales[0] == 2.0**24 and 2.0**10 <= scales[-1] <= 2.0**20
    skipped = np.flatnonzero(np.diff(scales) < 0)
    assert np.array_equal(skipped[:4], np.arange(4)) and len(skipped) < 12
    assert losses[-5:].mean() < 0.95 * losses[:5].mean()  # it learns once gradients fit
    caught, files = Caught(), Files.of(made(tmp_path / "cut"), job)
    caught.number = 10
    for again in range(6):  # stopped behind each step, while steps are skipped and later
        training = prepared(job, Loopback(virtual_ranks=2), files)
        training.resume()
        assert training.scaler.scale == scales[again]
        with pytest.raises(Interrupted):
            run(training, caught, Display(False, 1))
    training = run_job(job, Loopback(virtual_ranks=2), files, resume=True)
    assert model_bytes(training.files.checkpoint) == model_bytes(whole.files.checkpoint)


def scaled_reducer(scale: float, **options: Any) -> tuple[torch.nn.Linear, LossScaler]:
    """A model of two layers in buckets of their own, and its scaler."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    reducer = GradientReducer(
        model, Loopback(2), "lowbit", wire="e5m2", scaling="none", overflow="inf",
        error_feedback=True, bucket_mib=1e-6, **options,
    )  # fmt: skip
    return model, LossScaler(reducer, scale, dynamic=True)


def backward(model: torch.nn.Linear, scaler: LossScaler, factor: float = 1.0) -> None:
    for hosted, x in enumerate(SHARDS):
        model.zero_grad()
        (model(x).square().sum() * factor * scaler.scale).backward()
        scaler.reducer.stash(hosted)


def memory(scaler: LossScaler) -> dict[Any, Any]:
    return {key: entry.array / scaler.scale for key, entry in scaler.reducer.state}


def test_a_skipped_step_leaves_all_as_it_was_but_the_scale() -> None:
    """The bias overflows, in the second bucket; the first one's memory is put back too."""
    model, scaler = scaled_reducer(64.0)
    backward(model, scaler)
    assert scaler.reduce() is not None
    before, grads = memory(scaler), [p.grad.clone() for p in model.parameters()]
    assert any(array.any() for array in before.values())
    backward(model, scaler, 1e6)
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad.clone()
    assert scaler.reduce() is None
    assert (scaler.scale, scaler.clean_steps, scaler.reducer.iteration) == (32.0, 0, 2)
    assert all(np.array_equal(before[key], kept) for key, kept in memory(scaler).items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_a_skipped_step_leaves_all_ranks_the_buffers_of_the_first() -> None:
    """As real ranks have them: batch norm has seen the first rank's samples, and no other's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    scaler = LossScaler(GradientReducer(model, Loopback(2)), 2.0, dynamic=True)
    alone = torch.nn.BatchNorm1d(2)
    for factor in (float("inf"), 1.0):
        for hosted, x in enumerate(SHARDS):
            scaler.reducer.begin(hosted)
            model.zero_grad()
            (model(x).sum() * factor).backward()
            scaler.reducer.stash(hosted)
        assert (scaler.reduce() is None) == (factor > 1)
        alone(SHARDS[0])
        for found, expected in zip(model[0].buffers(), alone.buffers(), strict=True):
            assert torch.equal(found, expected)


def test_clean_steps_double_the_scale_and_memory_follows() -> None:
    model, scaler = scaled_reducer(4.0)
    scaler.clean_steps = PATIENCE - 2
    found = []
    for _ in range(3):
        backward(model, scaler)
        assert scaler.reduce() is not None
        found.append((scaler.scale, scaler.clean_steps))
    assert found == [(4.0, PATIENCE - 1), (8.0, 0), (8.0, 1)]
    other = scaled_reducer(2.0)[1]
    other.reducer.load_state_dict(scaler.reducer.state_dict())
    assert other.scale == 8.0
    kept = memory(scaler)
    assert all(np.array_equal(kept[key], each) for key, each in memory(other).items())


def test_what_no_scale_helps_ends_the_run() -> None:
    model, scaler = scaled_reducer(LEAST * 2)
    for outcome in (None, NonFiniteGradient):
        backward(model, scaler, float("nan"))
        if outcome is None:
            assert scaler.reduce() is None
        else:
            with pytest.raises(outcome, match="bias"):
                scaler.reduce()
    static = LossScaler(scaler.reducer, 8.0)
    backward(model, static, float("inf"))
    with pytest.raises(NonFiniteGradient):
        static.reduce()


@every("scale", [0.0, 3.0, -2.0, 2.0**101, float("nan")])
def test_scales_that_are_no_powers_of_two_are_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"train.loss_scale.*should be a (power of two|finite)"):
        small_job(train={"loss_scale": scale})
    reducer = GradientReducer(torch.nn.Linear(2, 2), Loopback())
    with pytest.raises(ValueError, match=r"LossScaler: scale=.*should be a power of two"):
        LossScaler(reducer, scale)


def test_records_of_older_files_have_no_scales() -> None:
    """Nor any other column that came later, which is unknown then."""
    record = Record(1, ["w"])
    row = {"iteration": 0, "samples": 4, "loss": 2.0, "learning_rate": 0.1, "loss_scale": 8.0}
    record.add("steps", row | {"time_s": np.zeros(4), "wire_bytes": np.zeros(1)})
    groups = record.arrays()
    for name in ("loss_scale", "time_s", "samples"):
        del groups["steps"][name]
    record.restore(groups)
    steps = record.arrays()["steps"]
    assert steps["loss_scale"].tolist() == [1.0]
    assert steps["time_s"].shape == (1, 4) and np.isnan(steps["time_s"]).all()
    assert steps["samples"].tolist() == [-1] and steps["loss"].tolist() == [2.0]

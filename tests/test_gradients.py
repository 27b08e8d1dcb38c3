"""Recorded gradients: what every rank computed, whole files, no bit of the run changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reducing import backward, model_of
from training import finish, model_bytes, prepared, run_job, small_data, small_job

from cpdhpc import store
from cpdhpc.config import ConfigError, UserError
from cpdhpc.lab.commands.report import load
from cpdhpc.lab.signals import Caught
from cpdhpc.lab.train import gradients
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import Job
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.samples import epoch_order
from cpdhpc.lab.train.setup import prepare
from cpdhpc.lab.train.update import AllreduceUpdate
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback

RECORDED = (0, 7)


def recording(which: Any = RECORDED, **changes: Any) -> Job:
    return small_job(train={"record_gradients": list(which)}, **changes)


def test_the_gradients_of_each_rank_are_recorded_and_the_run_has_its_bits(tmp_path: Path) -> None:
    """Iteration 0, of 24 samples, by plain torch on each half."""
    for name in ("plain", "recorded"):
        (tmp_path / name).mkdir()
    plain = run_job(small_job(), Loopback(2), tmp_path / "plain")
    done = run_job(recording(), Loopback(2), tmp_path / "recorded")
    assert model_bytes(done.files.checkpoint) == model_bytes(plain.files.checkpoint)
    first, last = (gradients.load(gradients.path_of(done.files.record, i)) for i in RECORDED)
    assert (first.iteration, last.iteration, first.ranks) == (0, 7, 2)
    data, model = (
        small_data(),
        prepare(small_job(), Loopback(), small_data(), Files.of(tmp_path, small_job())).model,
    )
    for rank, part in enumerate(np.split(epoch_order(100, 0, 0)[:24], 2)):
        model.zero_grad()
        x, y = (torch.from_numpy(each[part]) for each in (data.train_x, data.train_y))
        torch.nn.functional.cross_entropy(model(x), y).backward()
        for (name, p), found in zip(model.named_parameters(), first.layers.items(), strict=True):
            assert found[0] == name
            assert np.array_equal(found[1][rank], p.grad.numpy())
    assert [run.attributes["kind"] for run in load([tmp_path / "recorded"]).runs] == ["run"]


def test_a_resumed_run_records_what_comes_and_tells_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With other iterations than before, which changes no bit; two epochs have ten."""
    whole = run_job(recording(), Loopback(2), tmp_path)
    job = small_job(train={"record_gradients": [7, 12, 99], "epochs": 3})
    training = prepared(job, Loopback(2), whole.files)
    training.resume()
    run(training, Caught(), Display(True, 1))
    told = capsys.readouterr().out
    mib = 4 * 2 * (64 * 8 + 8 + 8 * 8 + 8) / 2**20
    assert f"small-s0: records gradients: 3 times {mib:.3g} MiB" in told
    assert "no gradients of iteration 99: not among its 15" in told
    assert gradients.load(gradients.path_of(whole.files.record, 12)).iteration == 12


def test_what_holds_no_gradients_is_told(tmp_path: Path) -> None:
    class Alone(AllreduceUpdate):
        def reduce(self) -> Any:
            self.reducer.iteration -= 1
            return super().reduce()

    job = recording()
    training = prepared(job, Loopback(), tmp_path)
    training.update = Alone(training.model, training.optimizer, training.reducer)
    training.reducer.iteration = 5
    with pytest.raises(ConfigError, match="the update rule Alone averages none"):
        finish(training)
    store.write(tmp_path / "x.h5", {}, {"kind": "run"})
    with pytest.raises(UserError, match=r"x\.h5: has no recorded gradients"):
        gradients.load(tmp_path / "x.h5")
    with pytest.raises(ConfigError, match=r"record_gradients.*-1: should be greater"):
        recording([-1])


def test_layers_of_all_shapes_and_names(tmp_path: Path) -> None:
    """Of no value, of no dimension, with a slash; and a model in half precision."""
    model = model_of()
    model.add_module("a/b", torch.nn.Linear(2, 3).bfloat16())
    model.empty = torch.nn.Parameter(torch.zeros(0, 2))
    model.scalar = torch.nn.Parameter(torch.tensor(3.0))
    reducer = GradientReducer(model, Loopback())
    backward(model[:4], 1)
    model.scalar.grad = torch.tensor(5.0)
    own = [None if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]
    reducer.reduce()
    gradients.save(reducer, tmp_path / "g.h5", 3, "mine")
    found = gradients.load(tmp_path / "g.h5")
    assert (found.iteration, found.source) == (3, "mine")
    assert list(found.layers) == [name for name, _ in model.named_parameters()]
    for (name, p), values in zip(model.named_parameters(), own, strict=True):
        expected = np.zeros(p.shape, np.float32) if values is None else values
        assert found.layers[name].tolist() == [expected.tolist()], name

"""Recordings of layers: what plain torch has, whole files, bounded, no bit of the run changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_store import files_of_at_most
from training import finish, model_bytes, prepared, run_job, small_data, small_job, stop

from cpdhpc import store
from cpdhpc.config import ConfigError, UserError, dump_toml
from cpdhpc.lab.cli import main
from cpdhpc.lab.train import gradients
from cpdhpc.lab.train import job as jobs
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.command import Trainer
from cpdhpc.lab.train.losses import Diverged
from cpdhpc.torch.precision.recorder import Recorder
from cpdhpc.torch.precision.recording import KINDS, Recorded, Tensor, kept_rows, load
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.ranks import Loopback

NN = torch.nn


def network() -> NN.Sequential:
    """A convolution before an activation in place, a layer without float inputs, linear layers."""
    torch.manual_seed(3)
    return NN.Sequential(
        NN.Conv2d(1, 3, 3, padding=1), NN.ReLU(inplace=True), NN.Flatten(), NN.Linear(48, 5)
    )


def samples(rank: int, step: int, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng([rank, step])
    x = rng.normal(size=(count, 1, 4, 4)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(0, 5, count))


def trained(path: Path, steps: int = 3, scale: float = 4.0, **settings: Any) -> list[Any]:
    """Two ranks in a process; return the model before each step, and its means and updates."""
    model, found = network(), list[Any]()
    reducer = GradientReducer(model, Loopback(2), "lowbit", wire="e4m3")
    reducer.loss_scale = scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, path, reducer, **settings) as recorder:
        for step in range(steps):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            for rank in range(2):
                reducer.begin(rank)
                optimizer.zero_grad()
                x, y = samples(rank, step, 4 + rank)
                (NN.functional.cross_entropy(model(x), y) * scale).backward()
                reducer.stash(rank)
            mean = reducer.reduce()
            means = {n: p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            recorder.step(mean)
            after = {n: p.detach() - before[n] for n, p in model.named_parameters()}
            found.append((before, means, after))
    model(samples(0, 0)[0]).sum().backward()  # the hooks are gone
    return found


def by_name(recorded: Recorded, iteration: int) -> dict[tuple[str, str], Tensor]:
    return {(t.kind, t.name): t for t in recorded.tensors if t.iteration == iteration}


def test_recorded_arrays_are_those_of_plain_torch(tmp_path: Path):
    """Activations and errors by autograd.grad, of a network written out as functions."""
    done, path = trained(tmp_path / "r.h5", every=2), tmp_path / "r.h5"
    recorded = load(path)
    assert recorded.iterations == [0, 2]
    assert recorded.layers["0"]["padding"] == [1, 1] and recorded.layers["3"]["type"] == "Linear"
    for step in (0, 2):
        here, (before, means, after) = by_name(recorded, step), done[step]
        assert {kind for kind, _ in here} == set(KINDS)
        own: dict[tuple[str, str], list[np.ndarray]] = {}
        for rank in range(2):
            x, y = samples(rank, step, 4 + rank)
            leaves = {name: value.clone().requires_grad_() for name, value in before.items()}
            conv = NN.functional.conv2d(x, leaves["0.weight"], leaves["0.bias"], padding=1)
            entered = conv.relu().flatten(1)
            last = NN.functional.linear(entered, leaves["3.weight"], leaves["3.bias"])
            loss = NN.functional.cross_entropy(last, y) * 4
            wanted = [conv, last, *leaves.values()]
            errors = torch.autograd.grad(loss, wanted)
            arrays = {("activations", "0"): x, ("activations", "3"): entered}
            arrays |= {("errors", "0"): errors[0], ("errors", "3"): errors[1]}
            arrays |= {("gradients", n): g for n, g in zip(leaves, errors[2:], strict=True)}
            for key, value in arrays.items():
                own.setdefault(key, []).append(value.detach().numpy())
        for (kind, name), each in own.items():
            found = here[kind, name]
            expected = np.stack(each) if kind == "gradients" else np.concatenate(each)
            np.testing.assert_array_equal(found.read(), expected, f"{kind} {name}")
            assert found.loss_scale == 4 and not found.is_thinned
        for kind, values in (("weights", before), ("mean", means), ("updates", after)):
            for name, value in values.items():
                np.testing.assert_array_equal(here[kind, name].read(), value.numpy())


def test_one_process_needs_no_reducer_and_chooses(tmp_path: Path):
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"layers": ("3",), "tensors": ("gradients", "activations"), "iterations": (1, 9)}
    with Recorder(model, tmp_path / "r.h5", **settings) as recorder:
        for step in range(3):
            model.eval()
            model(samples(0, 9)[0].double())  # no part of training
            model.train()
            optimizer.zero_grad()
            for part in range(2):  # gradients are added up
                x, y = samples(part, step)
                NN.functional.cross_entropy(model(x.double()), y).backward()
            own = model[3].weight.grad.float().numpy().copy()
            optimizer.step()
            recorder.step()
            if step == 1:
                gradient = own
    found = by_name(load(tmp_path / "r.h5"), 1)
    assert [*found] == [("gradients", "3.bias"), ("gradients", "3.weight"), ("activations", "3")]
    np.testing.assert_array_equal(found["gradients", "3.weight"].read()[0], gradient)
    assert found["activations", "3"].shape == (8, 48)


def test_arrays_are_bounded_by_refusal_or_by_rows(tmp_path: Path):
    """Bytes of an iteration: two ranks' gradients; mean, weights, updates; 9 samples."""
    parameters = 3 * 9 + 3 + 48 * 5 + 5
    need = 4 * (5 * parameters + 9 * (16 + 48 + 48 + 5))
    limit = need / 2**20
    trained(tmp_path / "fits.h5", iterations=(2,), max_mib=limit)
    with pytest.raises(ConfigError, match=r"1 iterations take 0\.0\d+ MiB: .*, or thin=true"):
        trained(tmp_path / "not.h5", iterations=(2,), max_mib=limit * 0.999)
    assert not (tmp_path / "not.h5").exists()  # so the next run has its place
    trained(tmp_path / "thin.h5", iterations=(2,), max_mib=limit / 3, thin=True, seed=5)
    whole, thin = (by_name(load(tmp_path / f"{name}.h5"), 2) for name in ("fits", "thin"))
    size_bytes = 0
    for key, each in thin.items():
        expected, found = whole[key].read(), each.read()
        size_bytes += found.nbytes
        assert each.rows == whole[key].rows
        if key[0] == "gradients":
            rows = kept_rows(5, expected.shape[1], found.shape[1])
            np.testing.assert_array_equal(found, expected[:, rows])
        elif len(each.rows) == 1:
            np.testing.assert_array_equal(found, expected[kept_rows(5, len(expected), len(found))])
        assert each.is_thinned == (found.shape != expected.shape)
    assert limit / 9 < size_bytes / 2**20 <= limit / 3
    same = thin["activations", "0"].read(), thin["activations", "3"].read()
    assert len(same[0]) == len(same[1]) == len(thin["errors", "3"].read())
    with pytest.raises(ConfigError, match=r"fewer$"):  # a row of each is too much
        trained(tmp_path / "none.h5", iterations=(2,), max_mib=limit / 50, thin=True)


def test_larger_arrays_than_the_first_are_refused_in_time(tmp_path: Path):
    model, settings = network(), {"tensors": ("activations",), "every": 1, "count": 2}
    with Recorder(model, tmp_path / "r.h5", max_mib=0.005, **settings) as recorder:
        model(samples(0, 0)[0])
        recorder.step()
        model(samples(0, 0, 40)[0])
        with pytest.raises(
            ConfigError, match=r"iteration 1 has larger arrays than the first: 0\.0"
        ):
            recorder.step()
    assert load(tmp_path / "r.h5").iterations == [0]


def recording_job(**changes: Any) -> jobs.Job:
    return small_job(**{"record": {"every": 3, "count": 9}} | changes)


def test_a_run_has_its_bits_and_goes_on_with_its_file(tmp_path: Path):
    """Ten iterations, stopped after eight; what the file had beyond a checkpoint comes anew."""
    for name in ("plain", "whole", "stopped"):
        (tmp_path / name).mkdir()
    plain = run_job(small_job(), Loopback(2), tmp_path / "plain")
    whole = run_job(recording_job(), Loopback(2), tmp_path / "whole")
    assert model_bytes(whole.files.checkpoint) == model_bytes(plain.files.checkpoint)
    job = recording_job()
    files = Files.of(tmp_path / "stopped", job)
    training = stop(prepared(job, Loopback(2), files), 5)
    checkpoint = files.checkpoint.read_bytes()
    for _ in range(2):  # the second time from the same checkpoint, as after a kill
        files.checkpoint.write_bytes(checkpoint)
        training = run_job(job, Loopback(2), files, resume=True)
    one, other = (load(each.recording(job)) for each in (whole.files, files))
    assert one.iterations == other.iterations == [0, 3, 6, 9]
    for a, b in zip(one.tensors, other.tensors, strict=True):
        assert (a.kind, a.name, a.iteration, a.rows) == (b.kind, b.name, b.iteration, b.rows)
        np.testing.assert_array_equal(a.read(), b.read())
    changed = recording_job(record={"every": 2})
    training = prepared(changed, Loopback(2), files)
    training.resume()
    with pytest.raises(ConfigError, match=r"recording\.h5: has other settings"):
        finish(training)


def test_gradients_that_are_not_finite_are_there_to_be_looked_at(tmp_path: Path):
    """NaN ends the run before there is a mean."""
    job = recording_job(record={"every": 1})
    training = prepared(job, Loopback(2), tmp_path)
    with torch.no_grad():
        next(iter(training.model.parameters()))[0] = float("inf")
    with pytest.raises(Diverged):
        finish(training)
    found = by_name(load(training.files.recording(job)), 0)
    assert "mean" not in {kind for kind, _ in found}
    assert any(np.isnan(t.read()).any() for (kind, _), t in found.items() if kind == "gradients")


def test_files_of_gradients_are_read_by_the_same_commands(tmp_path: Path):
    """Those of train.record_gradients by replay, recordings by bench compress and rounding."""
    model, path = network(), tmp_path / "one.h5"
    reducer = GradientReducer(model, Loopback())
    with Recorder(model, tmp_path / "all.h5", reducer, every=1) as recorder:
        NN.functional.cross_entropy(model(samples(0, 0)[0]), samples(0, 0)[1]).backward()
        recorder.step(reducer.reduce())
    gradients.save(reducer, path, 0, "mine")
    (whole,), one = gradients.load_all(tmp_path / "all.h5"), gradients.load(path)
    assert (whole.iteration, whole.ranks, whole.loss_scale) == (0, 1, 1.0)
    assert {*whole.layers} == {*one.layers}
    again = {each.name: each for each in load(path).tensors}
    for name, values in one.layers.items():
        np.testing.assert_array_equal(whole.layers[name], values)
        np.testing.assert_array_equal(again[name].read(), values)
        assert again[name].kind == "gradients" and not again[name].is_thinned
    trained(tmp_path / "none.h5", steps=1, iterations=(0,), tensors=("weights",))
    with pytest.raises(UserError, match=r"none\.h5: has no recorded gradients"):
        gradients.load_all(tmp_path / "none.h5")


def test_wrong_settings_and_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, path = network(), tmp_path / "r.h5"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"layers": ("conv*",)}, r"layers: 'conv\*' matches none: known are 0, 3"),
        ({"every": 1, "iterations": (1,)}, "every and iterations: set only one"),
        ({}, "every and iterations: nothing is recorded: set one"),
        ({"tensors": ("gradient",)}, "tensors"),
        ({"max_mib": 0}, "max_mib=0"),
    ]
    for settings, message in cases:
        with pytest.raises(UserError, match=message):
            Recorder(model, path, **settings)
        assert not path.exists()
    with pytest.raises(TypeError, match="evry"):
        Recorder(model, path, evry=1)  # type: ignore[call-arg]
    Recorder(model, path, every=1).close()
    with pytest.raises(ConfigError, match=r"r\.h5: exists already"):
        Recorder(model, path, every=1)
    store.write(tmp_path / "x.h5", {}, {"kind": "run"})
    with pytest.raises(UserError, match=r"x\.h5: is not a recording"):
        load(tmp_path / "x.h5")
    store.write(tmp_path / "x.h5", {"0": {"a": np.zeros(3)}}, {"kind": "recording", "layers": "{}"})
    with pytest.raises(UserError, match=r"x\.h5: is not a recording of this version"):
        load(tmp_path / "x.h5")
    tables: dict[str, dict[str, Any]] = {
        "train.image_grid": {"train": {"image_grid": [1, 2]}},
        "adversarial.epsilon": {"adversarial": {"epsilon": 0.1}},
        "update": {"update": {"name": "localsgd", "period": 2}},
        "stages.count": {"stages": {"count": 2}},
    }
    for key, table in tables.items():
        with pytest.raises(UserError, match=rf"record: does not allow this {key}: must be"):
            recording_job(**table)
    job = small_job(record={"every": 1, "file": "r.h5"}, train={"seeds": [0, 1]})
    (tmp_path / "two.toml").write_text(dump_toml(job.plain()))
    with pytest.raises(UserError, match=r"record\.file='r\.h5': 2 runs would write it"):
        jobs.load(tmp_path / "two.toml")


def test_a_full_disk_leaves_what_was_recorded(tmp_path: Path):
    model, path = network(), tmp_path / "r.h5"
    with Recorder(model, path, tensors=("weights",), every=1) as recorder:
        recorder.step()
        size = path.stat().st_size
        for room in (0, 100, 2000):
            with files_of_at_most(size + room), pytest.raises(UserError, match="cannot be written"):
                recorder.step()
            recorder.begin(1)
    assert load(path).iterations == [0]
    assert [each.name for each in tmp_path.iterdir()] == ["r.h5"]


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path):
    trained(path := tmp_path / "r.h5", iterations=(0,))
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for bit in rng.integers(0, 8 * len(whole), 200):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        with pytest.raises(UserError) as raised:
            load(path)
        assert "\n" not in str(raised.value)


def test_the_command_refuses_what_records_nothing_and_tells_of_an_empty_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Trainer, "data_of", lambda self, job: small_data())
    (tmp_path / "job.toml").write_text(dump_toml(small_job().plain()))
    out, results = tmp_path / "r.h5", tmp_path / "results"
    words = ["precision", "record", str(tmp_path / "job.toml"), "--results", str(results)]
    words += ["--out", str(out)]
    for nothing in (["--every", "0"], ["--iterations", ""], ["--set", "record.every=0"]):
        assert main([*words, *nothing]) == 2
        assert "precision record: small-s0: no iteration would be" in capsys.readouterr().err
        assert not results.exists() and not out.exists()
    assert main([*words, "--iterations", "5000,10"]) == 0
    said = capsys.readouterr().out.splitlines()
    (early,) = (line for line in said if "will be recorded" in line)
    assert early.startswith("small-s0: [record]: none of its 10 iterations, from 0, will")
    assert early.endswith("one to record is 10")
    assert said.index(early) < min(i for i, line in enumerate(said) if ": epoch 1 of" in line)
    assert said[-1] == f"recording: {out}: holds no iteration"
    assert main([*words, "--iterations", "9", "--set", "name=other", "--out", f"{out}x"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"recording: {out}x" and not any("none of its" in line for line in said)

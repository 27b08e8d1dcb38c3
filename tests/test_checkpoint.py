"""A run that is stopped, killed or moved goes on as if nothing had been."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training import ROOT, ROWS, environment, model_bytes, run_job, small_data, small_job, write_idx

from cpdhpc import store
from cpdhpc.cli import main
from cpdhpc.config import UserError, dump_toml
from cpdhpc.signals import STOPPING, Caught, Interrupted, catching
from cpdhpc.train.loop import run
from cpdhpc.train.progress import Display
from cpdhpc.train.setup import Files, prepare
from cpdhpc.world.ranks import Loopback

TELEMETRY_OFTEN = {"train": {"telemetry_every": 3, "checkpoint_every": 1, "epochs": 3}}


class Stop(Display):
    """Raises a flag after some steps, as a signal would."""

    def __init__(self, caught: Caught, after: int) -> None:
        super().__init__(False, 1)
        self.caught, self.after = caught, after

    def step(self, samples: int = 1, note: str | None = None) -> None:
        self.after -= 1
        self.caught.number = signal.SIGTERM if self.after == 0 else 0


@pytest.mark.parametrize(
    ("row", "after"),
    [
        ("float32", 1),
        ("float32", 14),
        ("tile", 6),
        ("aps", 4),
        ("stochastic", 4),
        ("stochastic", 6),
    ],
)
def test_interrupted_and_resumed_is_undisturbed(tmp_path: Path, row: str, after: int) -> None:
    """At the start, at an epoch's end (5 iterations), in the middle of one, and at the very end."""
    job = small_job(gradient=ROWS[row], **TELEMETRY_OFTEN)
    (tmp_path / "a").mkdir()
    whole = run_job(job, Loopback(2), tmp_path / "a")
    files, caught = Files.of(tmp_path, job), Caught()
    training = prepare(job, Loopback(2), small_data(), files)
    with pytest.raises(Interrupted):
        run(training, caught, Stop(caught, after))
    # The flag is seen by the exchange of the next step.
    assert store.read_attributes(files.checkpoint)["iteration"] == after + 1
    assert store.read_attributes(files.record)["status"] == "interrupted"
    training = prepare(job, Loopback(2), small_data(), files)
    training.resume()
    run(training, Caught(), Display(False, 1))
    assert model_bytes(files.checkpoint) == model_bytes(whole.files.checkpoint)
    assert_same_records(files.record, whole.files.record)


def assert_same_records(one: Path, other: Path) -> None:
    """All but the times."""
    left, right = store.read(one)[0], store.read(other)[0]
    for group, columns in left.items():
        for name, column in columns.items():
            if name != "time_s":
                assert column.tobytes() == right[group][name].tobytes(), (group, name)


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({"model": {"hidden": [9]}}, 2, "model.hidden is [8] there and [9] here"),
        ({"train": {"batch": 12}}, 2, "train.batch is 24 there and 12 here"),
        ({"gradient": {"aggregator": "lowbit"}}, 2, "gradient.accumulate|gradient.aggregator"),
    ],
)
def test_checkpoints_of_other_jobs_are_refused(
    tmp_path: Path, changes: dict[str, Any], ranks: int, says: str
) -> None:
    files = Files.of(tmp_path, small_job())
    run_job(small_job(), Loopback(2), tmp_path)
    training = prepare(small_job(**changes), Loopback(ranks), small_data(), files)
    with pytest.raises(UserError) as caught:
        training.resume()
    assert any(part in str(caught.value) for part in says.split("|"))
    assert str(files.checkpoint) in str(caught.value)


def test_settings_that_change_no_bit_may_differ(tmp_path: Path) -> None:
    run_job(small_job(), Loopback(2), tmp_path)
    job = small_job(train={"checkpoint_every": 7, "timeout_s": 5.0, "telemetry_every": 3})
    training = prepare(job, Loopback(2), small_data(), Files.of(tmp_path, job))
    training.resume()
    assert training.ended


@pytest.mark.parametrize("content", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n truncated"])
def test_damaged_checkpoints_are_refused(tmp_path: Path, content: bytes) -> None:
    files = Files.of(tmp_path, small_job())
    files.checkpoint.write_bytes(content)
    training = prepare(small_job(), Loopback(2), small_data(), files)
    with pytest.raises(UserError, match="is not an HDF5 file"):
        training.resume()
    store.write(files.checkpoint, {}, {"kind": "run"})
    with pytest.raises(UserError, match="is no checkpoint"):
        training.resume()


@pytest.mark.parametrize("number", STOPPING)
def test_signals_are_noted_and_handlers_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with catching() as caught:
        assert caught.number == 0
        signal.raise_signal(number)
        assert caught.number == number
    assert signal.getsignal(number) is before


def test_a_killed_run_leaves_files_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL in the middle, at whatever moment it comes."""
    epochs, per_epoch = 15, 10
    write_idx(tmp_path)
    job: dict[str, Any] = {
        "name": "k",
        "data": {"name": "idx", "dir": str(tmp_path)},
        "train": {"epochs": epochs, "batch": 2, "threads": 1, "virtual_ranks": 2},
    }
    file, out, whole = tmp_path / "k.toml", tmp_path / "out", tmp_path / "whole"
    file.write_text(dump_toml(job))
    command = [sys.executable, "-m", "cpdhpc", "train", str(file), "--out", str(out)]
    checkpoint, record = out / "k-s0.checkpoint.h5", out / "k-s0.h5"
    killed = subprocess.Popen(command, env=environment(), cwd=ROOT)
    deadline = time.monotonic() + 600
    while not record.exists() and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert store.read_attributes(record)["status"] == "running"
    assert 0 < store.read_attributes(checkpoint)["iteration"] < epochs * per_epoch
    store.read(record)
    assert main(["train", str(file), "--out", str(out), "--resume"]) == 0
    assert main(["train", str(file), "--out", str(whole)]) == 0
    assert model_bytes(checkpoint) == model_bytes(whole / checkpoint.name)
    assert_same_records(record, whole / record.name)

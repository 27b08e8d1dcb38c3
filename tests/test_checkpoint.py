"""A run that is stopped, killed or moved goes on as if nothing had been."""

import resource
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from every import every
from training import (
    ROOT,
    ROWS,
    assert_same_records,
    finish,
    model_bytes,
    prepared,
    run_job,
    small_data,
    small_job,
    stop,
    write_idx,
)

from cpdhpc import store
from cpdhpc.config import IMPORT_FROM, UserError, dump_toml
from cpdhpc.lab.cli import main
from cpdhpc.lab.signals import STOPPING, catching
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.job import MAY_DIFFER, Job, TrainSettings, keys_of
from cpdhpc.lab.train.optimizers import OPTIMIZERS
from cpdhpc.lab.train.setup import prepare
from cpdhpc.world.ranks import Loopback

TELEMETRY_OFTEN = {
    "train": {"telemetry_every": 3, "checkpoint_every": 1, "epochs": 3, "learning_rate": 0.01}
}


# At the start, in the middle of an epoch (5 iterations), and at the end of one.
MOMENTS = [("float32", 1), ("tile", 6), ("stochastic", 4)]


@pytest.mark.parametrize(
    ("optimizer", "row", "after"),
    [
        *((name, *MOMENTS[i % len(MOMENTS)]) for i, name in enumerate(OPTIMIZERS)),
        ("sgd", "float32", 14),  # at the very end
    ],
)
def test_interrupted_and_resumed_is_undisturbed(
    tmp_path: Path, optimizer: str, row: str, after: int
) -> None:
    """The same bits: whole, or stopped after an iteration and resumed by other processes."""
    decay = {"weight_decay": 0.01, "exclude": "one_dimensional"}
    given = {key: decay[key] for key in decay if key in OPTIMIZERS[optimizer].model_fields}
    job = small_job(gradient=ROWS[row], optimizer={"name": optimizer, **given}, **TELEMETRY_OFTEN)
    (tmp_path / "a").mkdir()
    whole = run_job(job, Loopback(2), tmp_path / "a")
    files = Files.of(tmp_path, job)
    stop(prepared(job, Loopback(2), files), after)
    # The flag is seen by the exchange of the next step.
    assert store.read_attributes(files.checkpoint)["iteration"] == after + 1
    assert store.read_attributes(files.record)["status"] == "interrupted"
    run_job(job, Loopback(2), files, resume=True)
    assert model_bytes(files.checkpoint) == model_bytes(whole.files.checkpoint)
    assert_same_records(files.record, whole.files.record)


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({"model": {"hidden": [9]}}, 2, "model.hidden is [8] there and [9] here"),
        ({"train": {"batch": 12}}, 2, "train.batch is 24 there and 12 here"),
        ({"train": {"loss_scale": 2.0}}, 2, "train.loss_scale is not given there and 2.0 here"),
        ({"gradient": {"aggregator": "lowbit"}}, 2, "gradient.accumulate|gradient.aggregator"),
    ],
)
def test_checkpoints_of_other_jobs_are_refused(
    tmp_path: Path, changes: dict[str, Any], ranks: int, says: str
) -> None:
    files = Files.of(tmp_path, small_job())
    run_job(small_job(), Loopback(2), tmp_path)
    training = prepared(small_job(**changes), Loopback(ranks), files)
    with pytest.raises(UserError) as caught:
        training.resume()
    assert any(part in str(caught.value) for part in says.split("|"))
    assert str(files.checkpoint) in str(caught.value)


def test_a_resumed_run_says_that_its_samples_are_others(tmp_path: Path) -> None:
    job = small_job(train={"epochs": 1})
    run_job(job, Loopback(2), tmp_path)
    for seed, said in ((0, ""), (1, "the samples differ from before")):
        training = prepare(job, Loopback(2), small_data(seed), Files.of(tmp_path, job))
        assert training.resume() == said


def test_settings_that_change_no_bit_may_differ(tmp_path: Path) -> None:
    run_job(small_job(), Loopback(2), tmp_path)
    train = {"checkpoint_every": 7, "timeout_s": 5.0, "telemetry_every": 3}
    job = small_job(train={**train, "keep_every": 1, "record_gradients": [3]})
    training = prepared(job, Loopback(2), tmp_path)
    training.resume()
    assert training.ended


def test_the_page_lists_the_keys_that_may_differ() -> None:
    page = (ROOT / "docs" / "reference" / "checkpoints.md").read_text()
    listed = page.partition("The keys that may differ are")[2].partition("any other is an error")[0]
    tables = {name for name in Job.model_fields if f"`[{name}]`" in listed} - {"train"}
    assert tables == {"loader", "record"}
    keys = {f"train.{name}" for name in TrainSettings.model_fields if f"`{name}`" in listed}
    keys |= {f"{table}.{key}" for table in tables for key in keys_of(table)}
    assert keys == {key for key in MAY_DIFFER if not key.endswith(IMPORT_FROM)}


@every("content", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n truncated"])
def test_damaged_checkpoints_are_refused(tmp_path: Path, content: bytes) -> None:
    files = Files.of(tmp_path, small_job())
    files.checkpoint.write_bytes(content)
    training = prepared(small_job(), Loopback(2), files)
    with pytest.raises(UserError, match="is not an HDF5 file"):
        training.resume()
    store.write(files.checkpoint, {}, {"kind": "run"})
    with pytest.raises(UserError, match="is not a checkpoint"):
        training.resume()


@every("number", STOPPING)
def test_signals_are_noted_and_handlers_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with catching() as caught:
        assert caught.number == 0
        signal.raise_signal(number)
        assert caught.number == number
    assert signal.getsignal(number) is before


def test_a_killed_run_leaves_files_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL in the middle, at whatever moment it comes."""
    write_idx(tmp_path)
    for epochs in (12, 120, 1200):  # more where it has ended before it could be killed
        out = tmp_path / f"out{epochs}"
        if killed_and_resumed(tmp_path, out, epochs):
            return
    raise AssertionError("the run ended before it was killed")


def killed_and_resumed(tmp_path: Path, out: Path, epochs: int) -> bool:
    """Kill a run, resume it and compare; return False where it was through before."""
    per_epoch = 10
    job: dict[str, Any] = {
        "name": "k",
        "data": {"name": "idx", "dir": str(tmp_path)},
        "train": {"epochs": epochs, "batch": 2, "threads": 1, "virtual_ranks": 2},
    }
    file, whole = tmp_path / "k.toml", tmp_path / "whole"
    file.write_text(dump_toml(job))
    checkpoint, record = out / "k-s0.checkpoint.h5", out / "k-s0.h5"
    words = ["train", str(file), "--out", str(out)]
    killed = get_context("fork").Process(target=main, args=(words,))  # which has torch already
    killed.start()
    while not record.exists() and killed.is_alive():
        time.sleep(0.01)
    killed.kill()
    killed.join()
    if killed.exitcode != -signal.SIGKILL:
        assert killed.exitcode == 0
        return False
    assert store.read_attributes(record)["status"] == "running"
    assert 0 < store.read_attributes(checkpoint)["iteration"] < epochs * per_epoch
    store.read(record)
    assert main(["train", str(file), "--out", str(out), "--resume"]) == 0
    assert main(["train", str(file), "--out", str(whole)]) == 0
    assert model_bytes(checkpoint) == model_bytes(whole / checkpoint.name)
    assert_same_records(record, whole / record.name)
    return True


@pytest.mark.parametrize("schedule", [{}, {"decay": "step", "milestones": [1, 3]}])
def test_an_extended_run_is_one_of_that_length(tmp_path: Path, schedule: dict[str, Any]) -> None:
    """Where rates do not depend on the length; telemetry and records included."""
    short, long = ({"train": {"epochs": n, "checkpoint_every": 9}} for n in (2, 4))
    (tmp_path / "a").mkdir()
    whole = run_job(small_job(schedule=schedule, **long), Loopback(2), tmp_path / "a")
    run_job(small_job(schedule=schedule, **short), Loopback(2), tmp_path)
    job = small_job(schedule=schedule, **long)
    training = prepared(job, Loopback(2), tmp_path)
    training.resume()
    assert training.samples_seen == 200 and not training.ended
    finish(training)
    assert model_bytes(training.files.checkpoint) == model_bytes(whole.files.checkpoint)
    assert_same_records(training.files.record, whole.files.record)
    job = small_job(schedule=schedule, **short)
    training = prepared(job, Loopback(2), training.files)
    with pytest.raises(
        UserError, match=r"train\.epochs is 4 there and 2 here: it may be more here, but not less"
    ):
        training.resume()


def test_the_command_extends_runs_and_tells_of_other_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_idx(tmp_path)
    job: dict[str, Any] = {
        "data": {"name": "idx", "dir": str(tmp_path)},
        "train": {"epochs": 1, "threads": 1, "batch": 5},
        "compare": [{"name": "a"}, {"name": "b", "schedule": {"decay": "cosine"}}],
    }
    file, out = tmp_path / "k.toml", tmp_path / "out"
    file.write_text(dump_toml(job))
    command = ["train", str(file), "--out", str(out), "--resume"]
    assert main(command) == 0
    assert main(command) == 0
    assert "0 runs on 1 processes into" in capsys.readouterr().out
    assert main([*command, "--set", "train.epochs=2"]) == 0
    shown = capsys.readouterr().out
    told = "b-s0: it began as a run of 1 epochs, whose learning rates are not those of one of 2"
    assert told in shown and "a-s0: it began" not in shown
    for name in "ab":
        assert len(store.read(out / f"{name}-s0.h5")[0]["epochs"]["epoch"]) == 2
    assert main(command) == 2
    assert "train.epochs is 2 there and 1 here" in capsys.readouterr().err
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("room_bytes", [1000, 10_000])  # for no file, for the state
def test_a_full_disk_leaves_the_checkpoint_of_before(tmp_path: Path, room_bytes: int) -> None:
    job = small_job(gradient={"aggregator": "onebit"}, model={"hidden": [1]})
    training = run_job(job, Loopback(2), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    training.iteration += 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, limits[1]))
    try:
        with pytest.raises(UserError, match=r"\.h5: cannot be written: File too large"):
            training.save("running")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    training = prepared(job, Loopback(2), training.files)
    training.resume()
    assert training.ended

"""A compressor with memory, one file and one row: it trains, resumes, is studied and reported."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from topk import TopK
from training import (
    Stop,
    assert_same_records,
    model_bytes,
    run_job,
    small_data,
    small_job,
    write_idx,
)

from cpdhpc import store
from cpdhpc.compress import COMPRESSORS, Context, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.config import ConfigError, UserError
from cpdhpc.lab.cli import main
from cpdhpc.lab.signals import Caught, Interrupted
from cpdhpc.lab.study.cases import load_study
from cpdhpc.lab.study.collect import collect
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.lab.train.loop import run
from cpdhpc.lab.train.progress import Display
from cpdhpc.lab.train.setup import prepare
from cpdhpc.world.ranks import Loopback

TOPK = {"gradient": {"aggregator": "mytopk", "density": 0.2}}


@pytest.fixture
def row() -> Iterator[None]:
    COMPRESSORS["mytopk"] = TopK
    yield
    del COMPRESSORS["mytopk"]


def test_nothing_is_lost() -> None:
    """What was sent and what is kept is the gradient and what was kept before, exactly."""
    bucket = Bucket(("a", "b"), ((20, 5), (7,)))
    state, world = State(range(4), 4), Loopback(4)
    rng = np.random.default_rng(0)
    before = np.zeros(bucket.size)
    for iteration in range(5):
        flats = [rng.integers(-8, 9, bucket.size).astype(np.float32) for _ in range(4)]
        mean = TopK(density=0.1).aggregate(flats, bucket, Context(world, state, 0, iteration))
        memory = [state.own(name, "residual", (size,)) for name, size in (("a", 100), ("b", 7))]
        kept = np.concatenate([np.sum(of_layer, axis=0) for of_layer in memory])
        assert np.array_equal(4 * mean.flat + kept, np.sum(flats, axis=0) + before)
        before = kept


DGC = {  # it keeps arrays of each rank and one for all
    "gradient": {"aggregator": "dgc", "density": 0.1, "warmup": [0.5], "masking": False},
    "optimizer": {"momentum": 0.0},
}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "buckets": (1, {"bucket_mib": 1e-4}, TOPK),
    "overlap": (1, {"bucket_mib": 1e-4, "overlap": True}, TOPK),
    "virtual ranks": (3, {"bucket_mib": 1e-4}, DGC),
}


@pytest.mark.usefixtures("row")
@pytest.mark.parametrize("case", CASES)
def test_resumed_is_undisturbed(tmp_path: Path, case: str) -> None:
    ranks, train, tables = CASES[case]
    job = small_job(train={"telemetry_every": 2, "epochs": 2, **train}, **tables)
    (tmp_path / "whole").mkdir()
    whole = run_job(job, Loopback(ranks), tmp_path / "whole")
    files, caught = Files.of(tmp_path, job), Caught()
    with pytest.raises(Interrupted):
        run(prepare(job, Loopback(ranks), small_data(), files), caught, Stop(caught, 6))
    training = prepare(job, Loopback(ranks), small_data(), files)
    training.resume()
    run(training, Caught(), Display(False, 1))
    assert model_bytes(files.checkpoint) == model_bytes(whole.files.checkpoint)
    assert_same_records(files.record, whole.files.record)
    assert residuals(training) == residuals(whole)
    assert len(list(tmp_path.glob("*.state-*.h5"))) == 1  # those of other iterations are gone
    losses = store.read(files.record)[0]["steps"]["loss"]
    assert losses[-1] < losses[0]


def residuals(training: Any) -> list[tuple[object, bytes]]:
    return [(key, entry.array.tobytes()) for key, entry in training.reducer.state]


@pytest.mark.usefixtures("row")
@pytest.mark.parametrize("later", [2, 5])
def test_at_another_number_of_ranks_the_sum_is_kept(tmp_path: Path, later: int) -> None:
    """Sums in float64, rounded once: a fourth of a unit in the last place would be seen."""
    job = small_job(train={"epochs": 2}, **TOPK)
    files, caught = Files.of(tmp_path, job), Caught()
    first = prepare(job, Loopback(3), small_data(), files)
    with pytest.raises(Interrupted):
        run(first, caught, Stop(caught, 3))
    sums = {
        key: entry.array.sum(axis=0, dtype=np.float64).astype(np.float32)
        for key, entry in first.reducer.state
    }
    training = prepare(job, Loopback(later), small_data(), files)
    training.resume()
    found = dict(training.reducer.state)
    assert found.keys() == sums.keys()
    for key, entry in found.items():
        assert entry.array.shape[0] == later
        assert np.array_equal(entry.array.sum(axis=0), sums[key])
        assert (np.count_nonzero(entry.array, axis=0) <= 1).all()  # each value with one rank
    run(training, Caught(), Display(False, 1))
    sent = store.read(files.record)[0]["steps"]["wire_bytes"]
    assert sent.shape[1] == max(3, later)
    assert sent[0, :3].all() and not sent[-1, later:].any()


@pytest.mark.usefixtures("row")
@pytest.mark.parametrize("damage", ["missing", "cut", "other", "flips"])
def test_residuals_that_are_lost_are_told(tmp_path: Path, damage: str) -> None:
    job = small_job(**TOPK)
    files = Files.of(tmp_path, job)
    run_job(job, Loopback(2), tmp_path)
    (kept,) = tmp_path.glob("*.state-*.h5")
    content = kept.read_bytes()
    if damage == "missing":
        kept.unlink()
    elif damage == "cut":
        kept.write_bytes(content[:2000])
    elif damage == "other":  # of the same job with another rate
        (tmp_path / "other").mkdir()
        job = small_job(train={"learning_rate": 0.2}, **TOPK)
        run_job(job, Loopback(2), tmp_path / "other")
        shutil.copy(next((tmp_path / "other").glob("*.state-*.h5")), kept)
        job = small_job(**TOPK)
    else:
        rng = np.random.default_rng(0)
        for _ in range(8):
            bad = bytearray(content)
            bad[rng.integers(len(bad))] ^= 1 << int(rng.integers(8))
            kept.write_bytes(bad)
            training = prepare(job, Loopback(2), small_data(), files)
            with pytest.raises(UserError, match=kept.name):
                training.resume()
        bad = bytearray(content)
        bad[len(bad) // 2 :] = bytes(len(bad) - len(bad) // 2)
        kept.write_bytes(bad)
    with pytest.raises(UserError, match=kept.name):
        prepare(job, Loopback(2), small_data(), files).resume()


@pytest.mark.usefixtures("row")
def test_what_is_wrong_is_told_by_the_row() -> None:
    for options, says in (
        ({"aggregator": "mytopc"}, "gradient.aggregator='mytopc': did you mean mytopk"),
        ({"aggregator": "mytopk", "densitty": 1}, "unknown key gradient.densitty: did you mean"),
        ({"aggregator": "mytopk", "density": 2.0}, "gradient.density=2.0: should be less than"),
    ):
        with pytest.raises(ConfigError) as caught:
            small_job(gradient=options)
        assert says in str(caught.value)


@pytest.mark.usefixtures("row", "without_figures")
def test_a_file_and_a_row_train_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_idx(tmp_path)
    job = tmp_path / "job.toml"
    job.write_text(
        f"[data]\nname = 'idx'\ndir = '{tmp_path}'\n[train]\nepochs = 2\nbatch = 5\nthreads = 1\n"
        "virtual_ranks = 2\nbucket_mib = 0.01\n"
        '[[compare]]\nname = "dense"\n[[compare]]\nname = "sparse"\n'
        '[compare.gradient]\naggregator = "mytopk"\ndensity = 0.05\n'
    )
    assert main(["train", str(job), "--out", str(tmp_path / "out")]) == 0
    layers = store.read(tmp_path / "out" / "sparse-s0.h5")[0]["layers"]
    assert np.isfinite(layers["residual_norm"]).all() and (layers["sent_share"] > 0).all()
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "out"), "--html", str(page)]) == 0
    assert "sparse" in capsys.readouterr().out and "sparse" in page.read_text()


@pytest.mark.usefixtures("row")
def test_a_file_and_a_row_are_studied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_idx(tmp_path)
    path, folder = tmp_path / "study.toml", Folder(tmp_path / "folder")
    path.write_text(
        'name = "sparse"\nkind = "train"\n'
        "[sweep]\nranks = [1]\nppn = 2\ngradient.density = [0.02, 0.2]\n"
        '[job.gradient]\naggregator = "mytopk"\n'
        f'[job.data]\nname = "idx"\ndir = "{tmp_path}"\n'
        "[job.train]\nepochs = 1\nbatch = 5\nthreads = 1\n"
    )
    study = load_study(path)
    folder.prepare(study)
    assert main(["batch", str(folder.path), "0"]) == 0
    collect(study, folder)
    assert len(store.read(folder.study_file)[0]["summary"]["n"]) == 2
    assert main(["report", str(folder.path)]) == 0
    assert "density" in capsys.readouterr().out
    assert main(["study", "plan", str(path), "--set", "sweep.gradient.densty=[1.0]"]) == 2
    assert "did you mean gradient.density" in capsys.readouterr().err

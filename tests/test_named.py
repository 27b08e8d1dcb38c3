"""report shows or names every file and folder of ours, and outlives who reads what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every import every
from synthetic_study import write_study
from training import run_job, small_job

from cpdhpc import store
from cpdhpc.lab.autoencoder.training import COLUMNS
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands.report import OF_KIND, Outputs, report
from cpdhpc.lab.report import other_files
from cpdhpc.lab.study.folder import Folder
from cpdhpc.store import Variable
from cpdhpc.world.ranks import Loopback

ROOT = Path(__file__).parent.parent


def told(capsys: pytest.CaptureFixture[str], *words: Path | str) -> tuple[int, str]:
    """Return the status of report, and what it says: lines, or one error."""
    status = main(["report", *map(str, words)])
    shown = capsys.readouterr()
    return status, shown.err if status else shown.out


def test_every_kind_of_file_is_known() -> None:
    """All that the sources write, by their text."""
    pattern = re.compile(
        r"""(?:^(?:KIND|WEIGHTS)(?:, \w+)?(?: = \w+)? = |"kind": )"([a-z ]+)",?""", re.MULTILINE
    )
    sources = (path.read_text() for path in (ROOT / "cpdhpc").rglob("*.py"))
    written = {kind for text in sources for kind in pattern.findall(text)}
    assert {"run", "case", "checkpoint", "influence", "gradients", "replay", "weights"} <= written
    assert written <= {*other_files.KINDS, *OF_KIND}


@every("kind", [*other_files.KINDS, ""])
def test_a_file_that_is_not_drawn_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "a.h5"
    store.write(path, {}, {"kind": kind} if kind else {})
    what = other_files.KINDS.get(kind, other_files.ARRAYS)
    status, said = told(capsys, path)
    if kind == "run":  # one that lacks all
        assert status == 2 and "is not the file of a run" in said
        return
    assert status == 2 and said == f"cpdhpc: error: {path}: {what[0]}: {what[1]}\n"
    status, said = told(capsys, tmp_path)
    assert status == 2
    assert said == f"cpdhpc: error: {tmp_path}: nothing that report shows: 1 file: {what[0]}\n"


def test_text_is_named_by_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "site.toml": ("nodes = 4\nmodules = []\n", "the profile of a site"),
        "policy.toml": ('[[precision.rule]]\nlayers = "*"\nwire = "e4m3"\n', "rules of [prec"),
        "machine.toml": ("[machine]\nlatency_s = 1e-6\n", "the speeds of a machine"),
        "reference.toml": ('study = "a.h5"\ntolerance = 0.1\n', "a reference for a study"),
        "other.toml": ("a = 1\n", "is no TOML file that cpdhpc takes"),
        "a.html": ("<p>", "a page"),
        "soak.log": ("soak: no difference\n", "text, maybe the log"),
        "batch-0.json": ("{}", "what a job of a study has noted: `study status` shows it"),
        "a.bin": ("\x00", "text"),
    }
    for name, (text, says) in files.items():
        (tmp_path / name).write_text(text)
        status, said = told(capsys, tmp_path / name)
        assert status == 2 and says in said and said.count("\n") == 1, name
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    assert "is no file that cpdhpc writes" in told(capsys, tmp_path / "b.bin")[1]
    for path in (ROOT / "inputs").glob("*.toml"):
        what = "the job of an autoencoder" if path.name.startswith("cots") else "a job: `train`"
        text = path.read_text()
        what = "a study as it is asked for" if re.search("^kind =", text, re.MULTILINE) else what
        assert what in told(capsys, path)[1], path


def test_folders_say_what_is_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert told(capsys, tmp_path / "empty")[1].endswith("nothing that report shows: it is empty\n")
    assert told(capsys, tmp_path)[1].endswith("nothing that report shows: folders empty\n")
    folder = Folder(tmp_path / "study")
    folder.cases.mkdir(parents=True)
    folder.study_toml.write_text("kind = 'codec'\n")
    for name in ("cases", "logs", "scripts"):
        (folder.path / name).mkdir(exist_ok=True)
        status, said = told(capsys, folder.path / name)
        assert status == 2 and f"`report {folder.path}` shows the study" in said


def recorded(path: Path) -> None:
    """The record of two layers, of three iterations and two."""
    values: dict[str, Any] = dict.fromkeys(("step", *COLUMNS), np.arange(5.0))
    values |= {"layer": np.array([0, 0, 0, 1, 1]), "iteration": np.array([0, 1, 2, 0, 1])}
    values |= {"loss": np.array([8.0, 4, 2, 6, 3]), "error": np.array([4.0, 2, 1, 3, 1])}
    values |= {"energy": np.full(5, 4.0), "sent_bytes": np.full(5, 2048)}
    values |= {"time_s": np.array([1.0, 2, 9, 4, 6]), "exchange_s": np.full(5, 0.5)}
    columns = {name: Variable(("step",), each, name) for name, each in values.items()}
    store.write(path, {"steps": columns}, {"kind": "autoencoder", "name": "cots", "ranks": 2})


@pytest.mark.usefixtures("without_figures")
def test_an_autoencoder_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "cots.h5")
    store.write(tmp_path / "cots.checkpoint.h5", {}, {"kind": "autoencoder checkpoint"})
    html, figures = tmp_path / "a.html", tmp_path / "figures"
    status, said = told(capsys, tmp_path, "--html", html, "--figures", figures)
    assert status == 0 and "Autoencoder: cots" in said and html.exists()
    rows = [line.split() for line in said.splitlines()]
    assert ["0", "3", "8.000", "2.000", "100", "25.0", "2.00", "s", "500", "ms", "2", "KiB"] in rows
    assert [
        "1",
        "2",
        "6.000",
        "3.000",
        "75.0",
        "25.0",
        "5.00",
        "s",
        "500",
        "ms",
        "2",
        "KiB",
    ] in rows
    assert (figures / "objective_by_iteration.png").exists()


def test_a_probe_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = "layer", "concept"
    columns = {
        "layer": Variable(("layer",), np.arange(1), ""),
        "concept": Variable(("concept",), np.array([3, 8]), ""),
        "accuracy": Variable(axes, np.array([[0.91, 0.72]]), ""),
        "random": Variable(axes, np.array([[0.61, 0.52]]), ""),
        "pixel": Variable(("concept",), np.array([0.6, 0.55]), ""),
        "held_out_error": Variable(("layer",), np.array([0.25]), ""),
    }
    path = tmp_path / "cots.probe.h5"
    store.write(path, {"selectivity": columns}, {"kind": "autoencoder probe"})
    status, said = told(capsys, path)
    assert status == 0 and "error of held-out images 0.2500" in said
    assert [line.split() for line in said.splitlines() if line.split()[:1] in (["3"], ["8"])] == [
        ["3", "60.0", "91.0", "61.0"],
        ["8", "55.0", "72.0", "52.0"],
    ]


def test_no_page_takes_the_place_of_a_file_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which begins with its checksum, not with HDF5's signature."""
    path = write_study(tmp_path / "study.h5", ranks=(2,), sizes=(64,))
    store.write(tmp_path / "data.h5", {}, {"kind": "weights"})
    before = (tmp_path / "data.h5").read_bytes()
    for option, why in (
        ("--html", "is an HDF5 file: not replaced"),
        ("--png", "must end in one of"),
    ):
        status, said = told(capsys, path, option, tmp_path / "data.h5")
        assert status == 2 and f"data.h5: {why}" in said
    assert (tmp_path / "data.h5").read_bytes() == before


def unread(*words: Path | str, pipe_errors: bool = False) -> int:
    """Return the status of a command whose reader has gone before it prints anything."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cpdhpc", *map(str, words)]
    try:
        errors = write if pipe_errors else subprocess.PIPE
        done = subprocess.run(command, stdout=write, stderr=errors, cwd=ROOT, check=False)
    finally:
        os.close(write)
    assert pipe_errors or not done.stderr, done.stderr
    return done.returncode


def test_files_are_written_though_nobody_reads_the_text(tmp_path: Path) -> None:
    """As in report ... | head -1: a page, figures and tables; a replay; a run of a job."""
    study = write_study(tmp_path / "study.h5", ranks=(2,), sizes=(64,))
    html, csv, figures = tmp_path / "a.html", tmp_path / "csv", tmp_path / "figures"
    assert unread("report", study, "--html", html, "--csv", csv, "--figures", figures) == 0
    assert html.exists() and any(csv.iterdir())
    assert unread("report", study, "--html", html, pipe_errors=True) == 0
    assert unread("report", tmp_path / "none.h5", pipe_errors=True) == 2
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "mlp"\nhidden = [4]\n[train]\nepochs = 1\nseeds = [0]\n')
    assert unread("train", job, "--out", tmp_path / "runs") == 0
    (record,) = (tmp_path / "runs").glob("*-s0.h5")
    assert store.read_attributes(record)["status"] == "complete"


@pytest.mark.usefixtures("without_figures")
def test_files_come_before_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Exception):
        """The terminal."""

    def show(*of: Any) -> None:
        raise Gone

    run_job(small_job(train={"epochs": 1}), Loopback(2), tmp_path)
    monkeypatch.setattr("cpdhpc.lab.commands.report.show", show)
    html, png, csv = tmp_path / "a.html", tmp_path / "a.png", tmp_path / "csv"
    with pytest.raises(Gone):
        report([tmp_path], Outputs(html, csv=csv), png)
    assert html.exists() and png.exists() and any(csv.iterdir())

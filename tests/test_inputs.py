"""Every file in inputs/ runs, made small."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import ROOT, write_idx

from cpdhpc.__main__ import main
from cpdhpc.train.job import load

INPUTS = sorted((ROOT / "inputs").glob("train_*.toml"))
SMALL = ("train.epochs=1", "train.seeds=[0]", "train.threads=1", "schedule.warmup_epochs=0")


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.stem)
def test_inputs_run(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_idx(tmp_path)
    settings = [*SMALL, "train.batch=700"]
    if path.stem == "train_mnist":
        settings.append(f"data.dir={tmp_path}")
    arguments = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", str(path), "--out", str(tmp_path / "out"), *arguments]) == 0
    shown = capsys.readouterr().out
    rows = {job.name for job in load(path)}
    assert {line.split()[0] for line in shown.splitlines() if line.split()} >= rows


def test_the_quickstart_compares_what_the_readme_promises() -> None:
    jobs = load(ROOT / "inputs" / "train_digits.toml")
    assert len(jobs) == 27
    assert {job.seed for job in jobs} == {0, 1, 2}

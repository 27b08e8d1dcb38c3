"""What the README says to type is typed here; on two ranks in tests/mpi/test_mpi_readme.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from readme import README, commands, lay_out
from training import ROOT

from cpdhpc.lab.cli import main

pytestmark = pytest.mark.mpi_skip


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one process in their order, and on one rank the training that is reported."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    for words, parallel in commands():
        if words[0] == "train" or not parallel:
            assert main(words) == 0, words
    for name in ("report.png", "report.html", "study.html", "plan.png"):
        assert (tmp_path / "results" / "readme" / name).stat().st_size > 1000, name


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_make_targets_are_there_and_run_by_ci() -> None:
    targets = re.findall(r"^    make ([\w-]+)", README, re.MULTILINE)
    assert targets == ["quickstart", "test"]
    ci = (ROOT / ".ci" / "run").read_text()
    for target in targets:
        assert re.search(rf"^make {target}$", ci, re.MULTILINE)
        subprocess.run(
            ["make", "-n", target], cwd=ROOT, check=True, capture_output=True, env=os.environ
        )


def test_map_names_what_exists() -> None:
    rows = README.split("## Map")[1]
    for name in re.findall(r"`([\w./]+/|cpdhpc/[\w./]+|docs/[\w.]+)`", rows):
        assert any(root.joinpath(name).exists() for root in (ROOT, ROOT / "cpdhpc")), name

"""What the README says to type is typed here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import ROOT, environment, launched

README = (ROOT / "README.md").read_text()
PREFACE = """
import torch
torch.manual_seed(0)
batches = [(torch.rand(8, 64), torch.arange(8)) for _ in range(2)]
"""
ON_TWO_RANKS = [str(ROOT / "slurm" / "mpirun-local"), "2"]
QUICKER = {  # what is added to the commands that measure or train
    "train inputs/train_digits.toml": ["--set", "train.batch=400"],  # 3 iterations, not 38
    "bench allreduce": ["--repeats", "2", "--warmup", "1"],
    "study run": ["--set", "measure.min_repeats=3", "--set", "measure.max_repeats=3"],
}
pytestmark = pytest.mark.mpi_skip


def block(language: str) -> str:
    """The README's one code block in a language."""
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def run(command: list[str], directory: Path) -> str:
    done = launched(command, cwd=directory, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_two_ranks(code: str, directory: Path) -> str:
    return run([*ON_TWO_RANKS, sys.executable, "-m", "mpi4py", "-c", code], directory)


def test_commands(tmp_path: Path) -> None:
    (tmp_path / "inputs").symlink_to(ROOT / "inputs")
    for line in block("sh").splitlines():
        words = shlex.split(line)
        if words[0] == "mpirun":
            assert words[1:3] == ["-n", "2"]
            words = [*ON_TWO_RANKS, *words[3:]]
        words[words.index("python")] = sys.executable
        words += QUICKER.get(" ".join(words[words.index("cpdhpc") + 1 :][:2]), [])
        shown = run(words, tmp_path)
        assert "Traceback" not in shown
    assert {path.name for path in (tmp_path / "results" / "readme").glob("report.*")} == {
        "report.png",
        "report.html",
    }


def test_ten_lines_of_python(tmp_path: Path) -> None:
    code = block("python")
    assert len([line for line in code.splitlines() if line]) <= 10
    shown = on_two_ranks(code, tmp_path)
    assert len(re.findall(r"^[01] \[\d+\] \[", shown, re.MULTILINE)) == 2


def test_four_lines_in_a_torch_loop(tmp_path: Path) -> None:
    lines = block("diff").splitlines()
    added = [line[1:] for line in lines if line.startswith("+")]
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines)
    assert len(added) == 4
    here: dict[str, Any] = {}
    exec(PREFACE + before, here)
    alone = float(here["model"].weight.detach().sum())
    show = "\nprint(float(model.weight.detach().sum()))"
    # Both ranks have the same share here, so the mean gradient is the gradient, but rounded.
    together = on_two_ranks(PREFACE + after + show, tmp_path).split()
    assert len(set(together)) == 1 and len(together) == 2
    assert float(together[0]) != alone
    assert abs(float(together[0]) - alone) < 0.05


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

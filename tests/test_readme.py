"""Commands of the README and of its how-to pages; on two ranks in tests/mpi/test_mpi_readme.py."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from training import ROOT, write_idx

from cpdhpc.lab.cli import main

README = (ROOT / "README.md").read_text()
HOWTO = ROOT / "docs" / "howto"
BATCHES = """
import torch
torch.manual_seed(0)
batches = [(torch.rand(8, 64), torch.arange(8)) for _ in range(2)]
"""
ONE_RUN = 'compare=[{name="tile",gradient={aggregator="lowbit"}}]'
DIGITS = 'name = "digits"\ntest_share = 0.3333'  # with scikit-learn, which is slow to import
SYNTHETIC = "data.name=synthetic"
QUICKER = {  # what is added to the commands that measure or train
    "train inputs/train_digits.toml": ["--set", "train.batch=10", "--set", ONE_RUN]
    + ["--set", "train.epochs=2"],
    "bench codec": ["--mib", "1", "--repeats", "1"],
    "bench allreduce": ["--repeats", "2", "--warmup", "1", "--sizes", "64KiB"],
    "autoencoder inputs/cots_digits.toml": ["--set", "train.iterations=2", "--set", SYNTHETIC],
    "bench halo": ["--repeats", "2"],
    "study run": ["--set", "measure.max_repeats=6", "--set", "sweep={ranks=[2],size_bytes=[64]}"],
}
ON_TWO_RANKS = ["mpirun", "-n", "2"]


def blocks(language: str, text: str = README) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> list[tuple[list[str], bool]]:
    """The commands of try_commands.md without mpirun, made quick, and whether on two ranks."""
    found = []
    (lines,) = blocks("sh", (HOWTO / "try_commands.md").read_text())
    for line in lines.splitlines():
        words = shlex.split(line)
        parallel = words[:3] == ON_TWO_RANKS
        words = words[3:] if parallel else words
        assert words[:3] == ["python", "-m", "cpdhpc"], line
        words = words[3:]
        found.append((words + QUICKER.get(" ".join(words[:2]), []), parallel))
    return found


def diff() -> list[str]:
    """The lines that a torch loop needs."""
    (lines,) = blocks("diff", (HOWTO / "plain_loop.md").read_text())
    return lines.splitlines()


def lay_out(directory: Path) -> None:
    """Write the inputs that the commands read, with other images than the digits."""
    shutil.copytree(ROOT / "inputs", directory / "inputs")
    job = directory / "inputs" / "train_digits.toml"
    assert DIGITS in job.read_text()
    job.write_text(job.read_text().replace(DIGITS, 'name = "idx"\ndir = "images"'))
    (directory / "images").mkdir()
    write_idx(directory / "images")


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


def test_paths_exist() -> None:
    paths = re.findall(r"`([\w./]+/|(?:cpdhpc|docs)/[\w./]+)`", README)
    assert len(paths) > 40
    for path in set(paths) - {"docs/_build/html/index.html"}:  # which `make docs` writes
        assert (ROOT / path).exists() or (ROOT / "cpdhpc" / path).exists(), path

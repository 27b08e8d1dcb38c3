"""What the README says to type is typed here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from training import ROOT, mpirun, write_idx

from cpdhpc.cli import main

README = (ROOT / "README.md").read_text()
BATCHES = """
import torch
torch.manual_seed(0)
batches = [(torch.rand(8, 64), torch.arange(8)) for _ in range(2)]
"""
WEIGHT = "\nprint(float(model.weight.detach().sum()))"
ONE_RUN = 'compare=[{name="tile",gradient={aggregator="lowbit"}}]'
IDX = 'data={name="idx",dir="images"}'  # digits come with scikit-learn, slow to import
QUICKER = {  # what is added to the commands that measure or train
    "train inputs/train_digits.toml": ["--set", "train.batch=10", "--set", ONE_RUN, "--set", IDX],
    "bench allreduce": ["--repeats", "2", "--warmup", "1"],
    "bench halo": ["--repeats", "2"],
    "study run": ["--set", "measure.max_repeats=6", "--set", "sweep={ranks=[2],size_bytes=[64]}"],
}
ON_TWO_RANKS = ["mpirun", "-n", "2"]
RANK = """
import contextlib, io, json, sys
from cpdhpc.cli import main
from cpdhpc.world.mpi import World
world, shown = World(), []
for item in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = exec(item, {}) if isinstance(item, str) else main(item)
    shown.append((status, out.getvalue()))
    world.barrier()
with open(f"shown{world.rank}.json", "w") as file:
    json.dump(shown, file)
"""
pytestmark = pytest.mark.mpi_skip


def block(language: str) -> str:
    """The README's one code block in a language."""
    found = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def commands() -> list[tuple[list[str], bool]]:
    """The README's commands without what starts them, made quick, and whether on two ranks."""
    found = []
    for line in block("sh").splitlines():
        words = shlex.split(line)
        parallel = words[:3] == ON_TWO_RANKS
        words = words[3:] if parallel else words
        assert words[:3] == ["python", "-m", "cpdhpc"], line
        words = words[3:]
        found.append((words + QUICKER.get(" ".join(words[:2]), []), parallel))
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """All that is typed for two ranks, in one mpirun: where, and of each rank what was shown."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / "inputs").symlink_to(ROOT / "inputs")
    (directory / "images").mkdir()
    write_idx(directory / "images")
    loop = "\n".join(line[1:] for line in diff())
    code = [block("python"), BATCHES + loop + WEIGHT]
    items = json.dumps([*code, *(words for words, parallel in commands() if parallel)])
    done = mpirun(2, "-m", "mpi4py", "-c", RANK, items, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory, [json.loads((directory / f"shown{r}.json").read_text()) for r in range(2)]


def diff() -> list[str]:
    return block("diff").splitlines()


def test_commands(
    on_two_ranks: tuple[Path, list[list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, shown = on_two_ranks
    monkeypatch.chdir(directory)
    assert [status for rank in shown for status, _ in rank[2:]] == [0] * 6
    assert all(text for _, text in shown[0][2:])
    for words, parallel in commands():
        assert parallel or main(words) == 0, words
    assert {path.name for path in (directory / "results" / "readme").glob("report.*")} == {
        "report.png",
        "report.html",
    }


def test_ten_lines_of_python(on_two_ranks: tuple[Path, list[list[Any]]]) -> None:
    assert len([line for line in block("python").splitlines() if line]) <= 10
    for number, rank in enumerate(on_two_ranks[1]):
        assert re.search(rf"^{number} \[\d+\] \[", rank[0][1], re.MULTILINE)


def test_four_lines_in_a_torch_loop(on_two_ranks: tuple[Path, list[list[Any]]]) -> None:
    assert len([line for line in diff() if line.startswith("+")]) == 4
    here: dict[str, Any] = {}
    exec(BATCHES + "\n".join(line[1:] for line in diff() if not line.startswith("+")), here)
    alone = float(here["model"].weight.detach().sum())
    # Both ranks have the same share here, so the mean gradient is the gradient, but rounded.
    one, other = (float(rank[1][1]) for rank in on_two_ranks[1])
    assert one == other != alone
    assert abs(one - alone) < 0.05


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

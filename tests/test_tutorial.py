"""What docs/tutorial.md says to save and to type: its files are read, its compressor trains."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from training import ROOT

from cpdhpc.cli import main
from cpdhpc.compress import Context, State
from cpdhpc.compress.bucket import Bucket
from cpdhpc.train.job import load
from cpdhpc.world.ranks import Loopback

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
pytestmark = pytest.mark.mpi_skip


def blocks(language: str) -> list[str]:
    """The page's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("job.toml", "mine.toml", "scaling.toml")
    for name, text in zip(names, blocks("toml"), strict=True):
        (tmp_path / name).write_text(text)
    jobs = load(tmp_path / "job.toml")
    assert len(jobs) == 9 and {job.name for job in jobs} == {"float32", "e4m3", "e3m0"}
    site = ["--site", str(tmp_path / "mine.toml")]
    assert main(["study", "plan", str(tmp_path / "scaling.toml"), *site]) == 0
    shown = capsys.readouterr().out
    assert "18 cases" in shown and "`study run`" not in shown
    assert main(["study", "plan", str(tmp_path / "scaling.toml")]) == 0
    shown = capsys.readouterr().out
    assert "9 of 18 cases need several nodes" in shown and "9 of these 18" in PAGE
    assert main(["scripts", *site, "--out", str(tmp_path / "scripts")]) == 0
    assert "--partition=debug" in (tmp_path / "scripts" / "train.sbatch").read_text()


def test_the_compressor_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent and what is kept is what the gradients were, exactly, on three ranks."""
    module: Any = ModuleType("cpdhpc.compress.mine")
    module.__package__ = "cpdhpc.compress"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(blocks("python")[-1], module.__dict__)
    (made,) = re.findall(r"GradientReducer\(model, world, (Mine\(.*?\))\)", PAGE)
    assert eval(made, module.__dict__) == module.Mine("mine", 0.2)
    bucket, state = Bucket(("a", "b"), ((20, 5), (7,))), State(range(3), 3)
    rng = np.random.default_rng(0)
    gradients = [rng.integers(-8, 9, bucket.size).astype(np.float32) for _ in range(3)]
    context = Context(Loopback(3), state)
    mean = module.Mine(density=0.5).aggregate(gradients, bucket, context).flat
    kept = [state.own(name, "residual", (stop - start,)) for name, start, stop in bucket.segments]
    total = np.concatenate([np.sum(of_layer, axis=0) for of_layer in kept])
    assert 0 < np.count_nonzero(mean) < bucket.size
    # a mean of three is rounded once, so its triple is off by half a unit in the last place
    assert np.abs(3 * mean + total - np.sum(gradients, axis=0)).max() <= 24 * 2.0**-23


def test_pages_that_are_named_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for name in re.findall(r"`(docs/[\w./]+\.(?:md|png))`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
        for name in re.findall(r"\]\(([\w./]+\.(?:png|svg))\)", page.read_text()):
            assert (page.parent / name).exists(), f"{page.name}: {name}"

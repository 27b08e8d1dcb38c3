"""What the README and docs/reference/darray.md say to type for two ranks."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_readme import BATCHES, block, commands, diff, lay_out
from training import ROOT

from cpdhpc.lab.cli import main
from cpdhpc.world.mpi import World

pytestmark = [pytest.mark.mpi, pytest.mark.two_ranks]
DARRAY = (ROOT / "docs" / "reference" / "darray.md").read_text()


@pytest.fixture
def directory(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory of all ranks with the README's inputs."""
    shared = Path(world.gather(str(tmp_path))[0])
    if world.process == 0:
        lay_out(shared)
    world.barrier()
    monkeypatch.chdir(shared)
    return shared


def test_commands(world: World, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in the same processes, as each starts a world of its own."""
    found = {}
    for words, parallel in commands():
        if parallel:
            found[" ".join(words)] = world.gather((main(words), capsys.readouterr().out))
    assert len(found) == 5
    assert not {words: told for words, told in found.items() if [s for s, _ in told] != [0, 0]}
    assert all(told[0][1] for told in found.values())
    for name in ("halo.h5", "allreduce.h5", "filters.png"):
        assert (directory / "results" / "readme" / name).stat().st_size > 1000, name


def test_ten_lines_of_python(world: World) -> None:
    assert len([line for line in block("python").splitlines() if line]) <= 10
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(block("python"), {})
    for number, shown in enumerate(world.gather(out.getvalue())):
        assert re.search(rf"^{number} \[\d+\] \[", shown, re.MULTILINE)
        (texts,) = re.findall(r"^simulated \[(.*?)\] of \[(.*?)\]", shown, re.MULTILINE)
        mean, gradient = (np.array(text.split(), float) for text in texts)
        # Contributions are rounded to 4 significant bits, and so is their mean.
        assert (mean != 0).all() and (abs(mean / gradient - 1) <= (1 + 2**-4) ** 2 - 1).all()


def test_ten_lines_of_arrays(world: World) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DARRAY, re.DOTALL)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    said = "0 of 96 cells of windows wrong"
    for rank, shown in enumerate(world.gather(out.getvalue())):
        assert re.search(rf"^{rank} \(6, 8\) 48\.0 .*{said}", shown, re.MULTILINE), shown


def test_four_lines_in_a_torch_loop(world: World) -> None:
    assert len([line for line in diff() if line.startswith("+")]) == 4
    here: dict[str, Any] = {}
    exec(BATCHES + "\n".join(line[1:] for line in diff()), here)
    one, other = world.gather(float(here["model"].weight.detach().sum()))
    exec(BATCHES + "\n".join(line[1:] for line in diff() if not line.startswith("+")), here)
    alone = float(here["model"].weight.detach().sum())
    # Both ranks have the same share here, so the mean gradient is the gradient, but rounded.
    assert one == other != alone
    assert abs(one - alone) < 0.05

"""The commands and Python of the README, of its how-to pages and of darray.md on two ranks."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_readme import BATCHES, blocks, commands, diff, lay_out
from training import ROOT

import cpdhpc.torch
from cpdhpc.lab.cli import main
from cpdhpc.world.mpi import World

pytestmark = pytest.mark.two_ranks
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
    code, _ = blocks("python")
    assert len([line for line in code.splitlines() if line]) <= 10
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
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


def test_three_lines_for_torch(world: World) -> None:
    _, code = blocks("python")
    assert len([line for line in code.splitlines() if line]) == 3
    here: dict[str, Any] = {"torch": torch}
    exec(code, here)
    try:
        value = torch.full((1 << 15,), 1 + 2.0**-8)  # e4m3 has 1 and 1 + 2**-3 there
        torch.distributed.all_reduce(value)
        assert value.tolist() == [2.0] * value.numel()
        few = torch.full((4,), 1 + 2.0**-8)
        torch.distributed.all_reduce(few)  # below 64 KiB nothing is rounded
        assert few.tolist() == [2 + 2.0**-7] * 4
    finally:
        cpdhpc.torch.set_wires()
        torch.distributed.destroy_process_group()


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

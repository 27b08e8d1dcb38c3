"""What docs/darray.md says is tried here: its ten lines, and the figures of bench layer."""

from __future__ import annotations

import re

import pytest
from training import ROOT, mpirun

from cpdhpc.cli import main

PAGE = (ROOT / "docs" / "darray.md").read_text()
pytestmark = pytest.mark.mpi_skip


def test_ten_lines() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    done = mpirun(2, "-m", "mpi4py", "-c", code)
    assert done.returncode == 0, done.stderr
    said = "0 of 96 cells of windows wrong"
    for rank in "01":
        assert re.search(rf"^{rank} \(6, 8\) 48\.0 .*{said}", done.stdout, re.MULTILINE)


def test_costs_of_the_large_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}\n" in PAGE

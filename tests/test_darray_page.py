"""What docs/darray.md says is tried here: its ten lines, and the figures of bench layer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from test_readme import ON_TWO_RANKS, run
from training import ROOT

from cpdhpc.cli import main

PAGE = (ROOT / "docs" / "darray.md").read_text()
pytestmark = pytest.mark.mpi_skip


def test_ten_lines(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    shown = run([*ON_TWO_RANKS, sys.executable, "-m", "mpi4py", "-c", code], tmp_path)
    said = "0 of 96 cells of windows wrong"
    for rank in "01":
        assert re.search(rf"^{rank} \(6, 8\) 48\.0 .*{said}", shown, re.MULTILINE)


def test_costs_of_the_large_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}\n" in PAGE

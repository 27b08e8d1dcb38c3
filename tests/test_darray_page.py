"""The figures of bench layer in docs/reference/darray.md; its code: test_mpi_readme.py."""

import pytest
from training import ROOT

from cpdhpc.lab.cli import main

PAGE = (ROOT / "docs" / "reference" / "darray.md").read_text()


def test_costs_of_the_large_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}\n" in PAGE

"""info: what is there, and how MPI was asked about GPUs."""

from __future__ import annotations

import pytest

from cpdhpc import info
from cpdhpc.__main__ import main
from cpdhpc.comm import Loopback, device


def test_info_prints_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for name in ("cpdhpc", "MPI library", "processes", "torch threads", "CPU kernels", "GPU"):
        assert name in shown
    assert "GPU-aware MPI" in shown
    assert device.loaded("libmpi"), "info has started MPI"


def test_without_a_gpu_mpi_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "gpu", lambda: "")
    monkeypatch.setattr(info, "find_out", pytest.fail)
    ((_, text),) = info.gpu_rows(Loopback())
    assert text.startswith("no (CuPy and a GPU are not there")


@pytest.mark.parametrize("yes, words", [(False, "staged through pinned"), (True, "as they are")])
def test_how_gpu_arrays_travel_is_shown(
    monkeypatch: pytest.MonkeyPatch, yes: bool, words: str
) -> None:
    monkeypatch.setattr(info, "gpu", lambda: "a GPU")
    monkeypatch.setattr(info, "find_out", lambda world: device.Answer(yes, "the query"))
    rows = dict(info.gpu_rows(Loopback()))
    assert rows["GPU-aware MPI"].endswith("(the query)") and words in rows["GPU arrays"]

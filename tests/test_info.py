"""info: what is there, and how MPI was asked about GPUs."""

from types import SimpleNamespace
from typing import Any

import pytest

from cpdhpc.lab import provenance
from cpdhpc.lab.cli import main
from cpdhpc.world import gpu_messages
from cpdhpc.world.ranks import Loopback


def test_info_prints_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for name in (
        "cpdhpc",
        "MPI library",
        "processes",
        "torch threads",
        "kernel threads",
        "CPU kernels",
        "GPU",
    ):
        assert name in shown
    assert "GPU-aware MPI" in shown
    assert gpu_messages.loaded("libmpi"), "info has started MPI"


def test_without_a_gpu_mpi_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "use_own_gpu", lambda world: (-1, ""))
    monkeypatch.setattr(provenance, "find_out", pytest.fail)
    ((_, text),) = provenance.gpu_rows(Loopback())
    assert text.startswith("no (CuPy and a GPU are not there")


@pytest.mark.parametrize("yes, words", [(False, "staged through pinned"), (True, "as they are")])
def test_how_gpu_arrays_travel_is_shown(
    monkeypatch: pytest.MonkeyPatch, yes: bool, words: str
) -> None:
    monkeypatch.setattr(provenance, "use_own_gpu", lambda world: (2, "0000:41:00.0"))
    monkeypatch.setattr(provenance, "find_out", lambda world: gpu_messages.Answer(yes, "the query"))
    rows = dict(provenance.gpu_rows(Loopback()))
    assert rows["GPU of process"] == "0: 0000:41:00.0"
    assert rows["GPU-aware MPI"].endswith("(the query)") and words in rows["GPU arrays"]


@pytest.mark.parametrize("nodes, told", [((0, 0, 1), "processes 0, 1 share"), ((0, 1, 2), "")])
def test_processes_that_share_a_gpu_are_told(
    monkeypatch: pytest.MonkeyPatch, nodes: tuple[int, ...], told: str
) -> None:
    """Of GPUs with one address on different nodes each has its own."""
    world: Any = SimpleNamespace(
        nodes=nodes, virtual_ranks=1, gather=lambda address, what: [address] * 3
    )
    monkeypatch.setattr(provenance, "use_own_gpu", lambda world: (0, "0000:41:00.0"))
    monkeypatch.setattr(provenance, "find_out", lambda world: gpu_messages.Answer(False, "no"))
    own = dict(provenance.gpu_rows(world))["GPU of process"]
    assert told in own and ("share" in own) == bool(told)

"""info: what is there, and how MPI was asked about GPUs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from cpdhpc import info
from cpdhpc.__main__ import main
from cpdhpc.comm import Loopback


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
    assert info.loaded_library() is not None, "info has started MPI"
    assert info.query().why in ("MPIX_Query_cuda_support", "MPIX_GPU_query_support") or (
        "no query" in info.query().why
    )


def test_without_a_gpu_mpi_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "gpu", lambda: "")
    monkeypatch.setattr(info, "query", pytest.fail)
    assert str(info.gpu_aware(Loopback())).startswith("no (CuPy and a GPU are not there")


@pytest.mark.parametrize("yes", [False, True])
def test_a_library_that_says_no_is_not_tried(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(info, "gpu", lambda: "a GPU")
    monkeypatch.setattr(info, "query", lambda: info.Answer(yes, "the query"))
    monkeypatch.setattr(info, "exchange_on_device", pytest.fail)  # one process cannot try
    answer = info.gpu_aware(Loopback())
    assert answer.yes == yes
    assert ("not tried" in answer.why) == yes


class Fake:
    """A library with one of the two queries."""

    def __init__(self, name: str, value: int) -> None:
        self.value = value
        setattr(self, name, self.cuda if "cuda" in name else self.gpu)

    def cuda(self) -> int:
        return self.value

    def gpu(self, kind: int, flag: object) -> int:
        flag._obj.value = self.value  # type: ignore[attr-defined]
        return 0


@pytest.mark.parametrize("name", ["MPIX_Query_cuda_support", "MPIX_GPU_query_support"])
@pytest.mark.parametrize("value", [0, 1])
def test_both_queries_are_understood(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(info, "loaded_library", lambda: str(Path("libmpi.so.40")))
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Fake(name, value))
    assert info.query() == (bool(value), name)

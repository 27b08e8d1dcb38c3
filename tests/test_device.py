"""Whether MPI takes GPU memory: how the library is asked, and that a no is not tried."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from cpdhpc.world import gpu_messages
from cpdhpc.world.ranks import Loopback


class Library:
    """A library with some of the queries, or the variable of Open MPI 4."""

    def __init__(self, name: str, value: int) -> None:
        self.value = value
        if name:
            setattr(self, name, self.cuda if "cuda" in name else self.gpu)

    def cuda(self) -> int:
        return self.value

    def gpu(self, kind: int, flag: Any) -> int:
        flag._obj.value = self.value
        return 0


@pytest.mark.parametrize("name", ["MPIX_Query_cuda_support", "MPIX_GPU_query_support"])
@pytest.mark.parametrize("value", [0, 1])
def test_both_queries_are_understood(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    libraries = {"libmpi_cxx.so.40": Library("", 0), "libmpi.so.40": Library(name, value)}
    monkeypatch.setattr(
        gpu_messages, "loaded", lambda start: list(libraries) if "mpi" in start else []
    )
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    assert gpu_messages.query() == (bool(value), name)


def test_open_mpi_4_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_messages, "loaded", lambda start: [f"{start}.so.40"])
    library, flag = Library("MPIX_Query_cuda_support", 1), ctypes.c_bool()
    known = SimpleNamespace(in_dll=lambda library, name: flag)
    stand_in = SimpleNamespace(CDLL=lambda path: library, c_bool=known)
    monkeypatch.setattr(gpu_messages, "ctypes", stand_in)
    for flag.value in (False, True):
        assert gpu_messages.query().yes == flag.value


def test_no_query_is_no() -> None:
    assert str(gpu_messages.Answer(False, "why")) == "no (why)"
    assert gpu_messages.loaded("libno-such") == [] and len(gpu_messages.loaded("libpython")) <= 1


def test_a_no_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_messages, "exchange", pytest.fail)  # one process cannot try
    for yes in (False, True):
        monkeypatch.setattr(
            gpu_messages, "query", lambda yes=yes: gpu_messages.Answer(yes, "the query")
        )
        answer = gpu_messages.find_out(Loopback())
        assert answer.yes == yes and ("not tried" in answer.why) == yes
    world = Loopback()
    world.gpu_direct = False
    assert "gpu_direct=False" in gpu_messages.find_out(world).why

"""Fixtures that several files share: implementations of the array operations, a Slurm."""

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gpus import real_cupy
from simulated_cupy import simulated
from simulated_gpu import Gpu
from stand_ins import Slurm

from cpdhpc import _cpu
from cpdhpc.lab.cli import main
from cpdhpc.lab.report.figures import draw
from cpdhpc.lab.verify.outcomes import OnGpu
from cpdhpc.ops import set_kernel_threads


def pytest_configure() -> None:
    """What is loaded and collected stays: the garbage collector need not look at it."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on it looks at what tests make, once that is much."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Files of tests need not outlive a power cut; thousands would wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def _backend(name: str) -> Any:
    if name == "gpu":
        real_cupy()  # first: it skips where there is none
        return OnGpu(importlib.import_module("cpdhpc.ops.gpu"))
    return importlib.import_module(f"cpdhpc.ops.{name}")


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(scope="session", params=["reference", "cpu", GPU])
def ops(request: pytest.FixtureRequest) -> Any:
    """The array operations, once per implementation; all take and give NumPy arrays."""
    return _backend(request.param)


@pytest.fixture(scope="session", params=["cpu", GPU])
def fast_ops(request: pytest.FixtureRequest) -> Any:
    """As ops without the reference: for millions of values, and for comparing with it."""
    return _backend(request.param)


@pytest.fixture(scope="session")
def cupy() -> ModuleType:
    """CuPy, where it and a GPU are there."""
    return real_cupy()


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Stand-ins for Slurm's commands on PATH, in a current directory of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Slurm(tmp_path)


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are put together but not painted: that takes most of their time."""
    for place in ("commands.report", "bench.accuracy", "bench.compress", "bench.throughput"):
        monkeypatch.setattr(
            f"cpdhpc.lab.{place}.image", lambda chart, kind: f"{kind}: {draw(chart)!r}".encode()
        )


@pytest.fixture
def gpu() -> Iterator[tuple[Gpu, ModuleType]]:
    """A simulated GPU and its cupy."""
    with simulated() as found:
        yield found


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch: the same bits of products in all runs, and no threads that wait for others."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=_cpu.clones())
def clone(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the loops that this processor runs, in use; afterwards with one thread again."""
    before = _cpu.clone()
    _cpu.use_clone(request.param)
    yield request.param
    _cpu.use_clone(before)
    set_kernel_threads(1)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the command line; return its status and what it shows, errors last."""

    def call(*words: object) -> tuple[int, str]:
        status = main([*map(str, words)])
        return status, "".join(capsys.readouterr())

    return call

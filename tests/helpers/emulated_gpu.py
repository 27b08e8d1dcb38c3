"""Tests of GPUs on the CPU: pytest -p emulated_gpu runs those marked gpu on the simulated GPU.

CUDA tensors come from emulated_torch, in tests that ask for them.
"""

import importlib
import sys
from contextlib import ExitStack
from typing import Any

import emulated_torch  # noqa: F401  before torch is imported
import pytest
import simulated_cupy
from compiled_kernels import compiled_of, launched, loaded, planted

from cpdhpc.ops.cuda_source import ARITHMETIC, KERNELS, cuda_source

everywhere = ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", nargs=2, metavar=("CODE", "FAULT"), help="change the kernels so")


def pytest_configure(config: pytest.Config) -> None:
    """Give all tests the simulated CuPy."""
    planted.extend(config.getoption("--plant") or ())
    source = cuda_source()
    assert not planted or source.count(planted[0]) == 1, planted[0]
    compiled_of(source)
    everywhere.enter_context(simulated_cupy.simulated())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fixtures find it too."""
    for module in list(sys.modules.values()):
        if hasattr(module, "_cupy"):
            module._cupy = lambda: importlib.import_module("cupy")  # type: ignore[attr-defined]


def pytest_unconfigure(config: pytest.Config) -> None:
    everywhere.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker of xdist tell what it ran."""
    launched["operations"] += sum(each.operations() for each in loaded)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launched"] = dict(launched)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker ran."""
    launched.update(getattr(node, "workeroutput", {}).get("launched", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell which kernels ran how often."""
    counts = ", ".join(f"{name} {launched[name]}" for name in sorted({*launched} - {"operations"}))
    terminalreporter.write_line(f"kernels of cuda_loops.cu on the CPU: {counts}")
    terminalreporter.write_line(f"not run: {sorted({*KERNELS, *ARITHMETIC} - set(launched))}")
    operations = launched["operations"]
    terminalreporter.write_line(f"shuffles, ballots and barriers: {operations}")

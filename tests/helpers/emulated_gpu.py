"""The CUDA kernels themselves on the CPU: pytest -p emulated_gpu puts them under simulated_cupy.

CUDA tensors come from emulated_torch, in tests that ask for them.

kernels/cuda_loops.cu is compiled for the host behind cuda_on_cpu.h, its PTX instructions as C++.
Tests marked gpu then run too, on the simulated GPU.
"""

import ctypes
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import emulated_torch  # before torch is imported
import numpy as np
import pytest
import simulated_cupy
import simulated_kernels
from simulated_gpu import check_bounds

from cpdhpc.ops.cuda_source import ARITHMETIC, KERNELS, cuda_source

HERE = Path(__file__).parent
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing"]
FIXED = re.compile(r"(?m)^#define CPD_FIXED_(CAST|TABLE|BLOCKS|FIT|COUNTED) (.*)\n")
INSTRUCTIONS = {  # PTX -> C++ of the operands
    "mov.b32": "cuda::same_bits<std::remove_reference_t<decltype({0})>>({1})",
    "add.rn.f32": "({1}) + ({2})",
    "sub.rn.f32": "({1}) - ({2})",
    "mul.rn.f32": "({1}) * ({2})",
    "div.rn.f32": "({1}) / ({2})",
    "cvt.f64.f32": "(double)({1})",
    "cvt.rn.f32.f64": "(float)({1})",
    "cvt.f32.f16": "(float)cuda::same_bits<_Float16>({1})",
    "cvt.rn.f16.f32": "cuda::same_bits<unsigned short>((_Float16)({1}))",
    "abs.f32": "std::fabs({1})",
    "max.NaN.f32": "cuda::largest({1}, {2})",
    "fma.rn.f32": "std::fma({1}, {2}, {3})",
    "cvt.rn.satfinite.e4m3x2.f32": "cuda::E4M3::of_two({1}, {2})",
    "cvt.rn.satfinite.e5m2x2.f32": "cuda::E5M2::of_two({1}, {2})",
    "cvt.rn.f16x2.e4m3x2": "cuda::E4M3::halves({1})",
    "cvt.rn.f16x2.e5m2x2": "cuda::E5M2::halves({1})",
}
TRUNCATIONS = {  # what C++ leaves open where the value is too large
    "return (U)(int)x;": "return (U)cuda::toward_zero<int>(x);"
}
SEED = 1
MOST_BLOCKS = 3
SLOTS = 32  # for what a kernel of the codec is compiled for
launched: Counter[str] = Counter()
loaded: list[Any] = []  # libraries: of all kernels, of the codec's that decode and that encode


def on_host(source: str) -> str:
    """Return CUDA source as C++."""
    for cuda, host in TRUNCATIONS.items():
        assert cuda in source, cuda
        source = source.replace(cuda, host)
    while (start := source.find("asm(")) >= 0:
        stop = closing(source, start + 3)
        words = re.match(r'"([\w.]+) %0(?:, %[123])+;" : ', source[start + 4 : stop])
        assert words, source[start : stop + 1]
        operands = []
        at = start + 4 + words.end()
        while at < stop:
            opened = source.index("(", at)
            closed = closing(source, opened)
            operands.append(source[opened + 1 : closed])
            at = closed + 1
        value = INSTRUCTIONS[words[1]].format(*operands)
        source = f"{source[:start]}{operands[0]} = {value}{source[stop + 1 :]}"
    return source


def closing(text: str, opened: int) -> int:
    """Return the place of the parenthesis that closes the one at a place."""
    depth = 0
    for at in range(opened, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    raise AssertionError(text[opened : opened + 80])


def program(source: str) -> str:
    """Return the C++ program of all kernels, behind each a call of it by pointers to arguments."""

    def with_call(found: re.Match[str]) -> str:
        name = found[1]
        given = ", ".join(
            f"*({kind}{'*' * pointer}*)a[{i}]"
            for i, (kind, pointer, _) in enumerate(simulated_kernels.signature(source, name))
        )
        return (
            f"{found[0]}const char* run_{name}(unsigned blocks, void** a) "
            f"{{ return cuda::launch(blocks, [=] {{ {name}({given}); }}); }}\n"
        )

    kernels = re.sub(r"(?ms)^[\w ]*__global__ void (\w+)\(.*?^}\n", with_call, on_host(source))
    return f"""#include "cuda_on_cpu.h"
extern "C" int fixed[{SLOTS}];
int fixed[{SLOTS}];
{kernels}
extern "C" {{
void seed(unsigned number) {{ cuda::chance.seed(number); }}
long operations() {{ return cuda::operations; }}
void only_block(long number) {{ cuda::only = number; }}
}}
"""


def at_run_time(source: str) -> tuple[str, list[int]]:
    """Return the codec's source with what it is compiled for as variables, and their values.

    So one library serves all casts. That NVRTC makes the same of constants is for the PTX to show.
    """
    values: list[int] = []

    def variable(found: re.Match[str]) -> str:
        first = len(values)
        values.extend(int(each) for each in found[2].split(","))
        names = ", ".join(f"fixed[{i}]" for i in range(first, len(values)))
        return f"#define CPD_FIXED_{found[1]} {names}\n"

    source = FIXED.sub(variable, source)
    return source, values


@cache
def compiled_of(source: str) -> Any:
    """Return the compiled kernels of a source, where what is fixed stands as variables."""
    if planted:
        source = source.replace(*planted)
    header = (HERE / "cuda_on_cpu.h").read_text()
    found = ctypes.CDLL(str(emulated_torch.built(program(source).encode(), header, *FLAGS)))
    found.operations.restype = ctypes.c_long
    found.seed(SEED)
    loaded.append(found)
    return found


class RawModule(simulated_cupy.RawModule):
    """cupy.RawModule, whose kernels are those of the source."""

    def get_function(self, name: str) -> Callable[..., None]:
        source, values = at_run_time(self.code)
        kernels = compiled_of(source)
        call = getattr(kernels, f"run_{name}")
        call.restype = ctypes.c_char_p
        parameters = simulated_kernels.signature(self.code, name)
        device = self.arrays.gpu.device_id

        def kernel(grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
            assert 0 < grid[0] <= 65535 and block == (128,)
            simulated_kernels.arguments(self.code, name, args)
            addresses = (int(value) for value in args if isinstance(value, np.uint64))
            kept: list[Any] = [emulated_torch.named.get(address) for address in addresses]
            arrays = [value for value in args if hasattr(value, "owner")]
            memory = [(value.owner.raw, value.owner.whole) for value in arrays]
            pointers = (pointer for _, pointer, _ in parameters)
            cells = [cell(*each) for each in zip(args, pointers, strict=True)]
            # Work beyond so many blocks is done by strides, which no test's sizes would need else.
            blocks = min(grid[0], MOST_BLOCKS)
            devices = [device, *(each.device.id for each in arrays)]
            self.arrays.gpu.launch(name, lambda: run(blocks, cells, memory, kept), devices)

        def run(blocks: int, cells: list[Any], memory: list[Any], kept: list[Any]) -> None:
            fixed = (ctypes.c_int * SLOTS).in_dll(kernels, "fixed")
            fixed[: len(values)] = [ctypes.c_int(each).value for each in values]
            addresses = (ctypes.c_void_p * len(cells))(*(c.ctypes.data for c in cells))
            trouble = call(ctypes.c_uint(blocks), addresses)
            assert trouble is None, f"{name}: {trouble.decode()}"
            for raw, whole in memory:
                check_bounds(raw, whole, name)
            launched[name] += 1

        return kernel


def cell(value: Any, pointer: bool) -> np.ndarray:
    """Return memory that holds an argument: a number, or the address of an array."""
    if not pointer:
        return np.array(value)
    return np.array(value if isinstance(value, np.uint64) else value.data.ptr, np.uint64)


everywhere = ExitStack()
planted: list[str] = []  # a fault: what of the source becomes what


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", nargs=2, metavar=("CODE", "FAULT"), help="change the kernels so")


def pytest_configure(config: pytest.Config) -> None:
    """Give all tests the simulated CuPy, with these kernels."""
    planted.extend(config.getoption("--plant") or ())
    simulated_cupy.RawModule = RawModule  # type: ignore[misc]
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

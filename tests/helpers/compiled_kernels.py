"""The CUDA kernels of the simulated GPU: those of cuda_loops.cu, compiled for the CPU.

The source is compiled behind cuda_on_cpu.h, its PTX instructions as C++. Arguments are checked
against the kernels' signatures.
"""

import ctypes
import hashlib
import re
import subprocess
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from simulated_gpu import Gpu, check_bounds

from cpdhpc.whole_files import once_for_all

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
COMPILING_S = 600.0  # the longest that another process may take
MOST_BLOCKS = 3
SLOTS = 32  # for what a kernel of the codec is compiled for
launched: Counter[str] = Counter()
planted: list[str] = []  # a fault: what of the source becomes what
loaded: list[Any] = []  # libraries: of all kernels, of the codec's that decode and that encode
# Memory of CUDA tensors by its address, which a kernel keeps until it is done.
named: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
POINTERS = {  # C type -> the dtypes that an argument may have, and its alignment
    "float": (("float32",), 4),
    "u8": (("uint8",), 1),
    "u32": (("uint8", "uint32"), 4),
    "u64": (("uint64",), 8),
    "int": (("int32",), 4),
    "i64": (("int64",), 8),
    "double": (("float64",), 8),
    "char": (("uint8",), 1),
}
SCALARS = {
    "int": np.int32, "u32": np.uint32, "u64": np.uint64, "i64": np.int64, "float": np.float32,
    "double": np.float64,
}  # fmt: skip
NULL = ("counts", "out", "nonfinite", "more", "total")  # pointers that may be missing
ADDRESSES = "char"  # what pointers may have that are given as numbers


def signature(source: str, name: str) -> list[tuple[str, bool, str]]:
    """Return (C type, whether a pointer, name) of a kernel's parameters."""
    found = re.search(rf"__global__ void {name}\(([^)]*)\)", source)
    assert found, f"cuda_loops.cu has no kernel {name}"
    parameters = [re.sub(r"\bconst\b", "", each).split() for each in found[1].split(",")]
    return [(kind.strip("*"), "*" in kind, word) for kind, word in parameters]


def arguments(source: str, name: str, args: tuple[Any, ...]) -> SimpleNamespace:
    """Return the arguments by the names of the kernel's parameters, arrays as NumPy's."""
    parameters = signature(source, name)
    assert len(parameters) == len(args), f"{name}: {len(args)} arguments"
    found = SimpleNamespace()
    for (kind, pointer, word), value in zip(parameters, args, strict=True):
        where = f"{name}: {word}"
        if not pointer:
            assert type(value) is SCALARS[kind], f"{where} is {type(value)}"
            setattr(found, word, value.item())
        elif isinstance(value, np.uint64) and kind == ADDRESSES:
            setattr(found, word, value.item())
        elif isinstance(value, np.uint64):
            assert value == 0 and word in NULL, where
            setattr(found, word, None)
        else:
            dtypes, alignment = POINTERS[kind]
            assert value.dtype.name in dtypes and value.data.ptr % alignment == 0, where
            setattr(found, word, value.memory_view)
    return found


def built(code: bytes, key: str, *flags: str) -> Path:
    """Return C++ as a library, which is kept in build/ while code, key and flags stay the same."""
    content = b"\0".join([code, *(each.encode() for each in (key, *flags))])
    made = HERE.parents[1] / "build" / "emulated" / f"{hashlib.sha256(content).hexdigest()[:20]}.so"
    if made.exists():
        return made
    with once_for_all(made.with_suffix(".lock"), COMPILING_S):
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=made.parent) as work:
                source, out = Path(work) / "code.cpp", Path(work) / made.name
                source.write_bytes(code)
                common = ["g++", "-fPIC", "-shared", "-w", f"-I{HERE}"]
                subprocess.run([*common, source, "-o", out, *flags], check=True)
                out.replace(made)
    return made


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
            for i, (kind, pointer, _) in enumerate(signature(source, name))
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
    found = ctypes.CDLL(str(built(program(source).encode(), header, *FLAGS)))
    found.operations.restype = ctypes.c_long
    found.seed(SEED)
    loaded.append(found)
    return found


def kernel_of(gpu: Gpu, code: str, name: str) -> Callable[..., None]:
    """Return what launches a kernel of a source on a simulated GPU."""
    source, values = at_run_time(code)
    device, parameters = gpu.device_id, signature(code, name)

    def kernel(grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        assert 0 < grid[0] <= 65535 and block == (128,)
        arguments(code, name, args)
        addresses = (int(value) for value in args if isinstance(value, np.uint64))
        kept: list[Any] = [named.get(address) for address in addresses]
        arrays = [value for value in args if hasattr(value, "owner")]
        memory = [(value.owner.raw, value.owner.whole) for value in arrays]
        pointers = (pointer for _, pointer, _ in parameters)
        cells = [cell(*each) for each in zip(args, pointers, strict=True)]
        # Work beyond so many blocks is done by strides, which no test's sizes would need else.
        blocks = min(grid[0], MOST_BLOCKS)
        devices = [device, *(each.device.id for each in arrays)]
        gpu.launch(name, lambda: run(blocks, cells, memory, kept), devices)

    def run(blocks: int, cells: list[Any], memory: list[Any], kept: list[Any]) -> None:
        kernels = compiled_of(source)
        call = getattr(kernels, f"run_{name}")
        call.restype = ctypes.c_char_p
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

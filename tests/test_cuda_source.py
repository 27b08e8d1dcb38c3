"""The CUDA kernels compile, on any machine: NVRTC needs no GPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from cpdhpc.ops.cuda_source import ARITHMETIC, KERNELS, OPTIONS, cuda_source


def _nvrtc() -> ctypes.CDLL:
    nvidia = pytest.importorskip("nvidia", reason="NVRTC (nvidia-cuda-nvrtc-cu12) is missing")
    found = [
        path
        for folder in nvidia.__path__
        for path in Path(folder).glob("*/lib/libnvrtc.so*")
        if "alt" not in path.name and "builtins" not in path.name
    ]
    if not found:
        pytest.skip("NVRTC (nvidia-cuda-nvrtc-cu12) is missing")
    return ctypes.CDLL(str(found[0]))


def _compile(source: str, *options: str) -> tuple[str, str]:
    """Return NVRTC's log and PTX."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    name = b"cuda_loops.cu"
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name, 0, None, None)
    assert status == 0
    flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), flags)

    def text(what: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.value.decode()

    log = text("ProgramLog")
    assert not failed, log
    return log, text("PTX")


@pytest.mark.parametrize(
    "architecture",  # no line of ours depends on it
    ["compute_75", pytest.param("compute_90", marks=pytest.mark.slow)],
)
def test_every_kernel_compiles(architecture: str) -> None:
    # CuPy appends -ftz=true, whatever is asked for.
    log, ptx = _compile(cuda_source(), f"-arch={architecture}", *OPTIONS, "-ftz=true")
    assert "warning" not in log
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted((*KERNELS, *ARITHMETIC))
    # Subnormal numbers survive, and no product is fused into a sum.
    arithmetic = re.findall(r"\b((?:add|sub|mul|fma|mad|div)\.[\w.]*f32)\b", ptx)
    assert set(arithmetic) == {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"}


def test_messages_name_our_files() -> None:
    source = cuda_source().replace("p.filled += bits;", "p.filled += bits; oops;", 1)
    with pytest.raises(AssertionError, match=r"kernels/bitpack\.h\(\d+\): error"):
        _compile(source, "-arch=compute_80", *OPTIONS)


def test_kernels_match_the_operations() -> None:
    """The CUDA kernels, the compiled CPU module and the specification have the same names."""
    from cpdhpc import _cpu
    from cpdhpc.ops import cpu, reference

    for name in KERNELS:
        assert callable(getattr(_cpu, name))
        assert callable(getattr(cpu, name))
        assert callable(getattr(reference, name))

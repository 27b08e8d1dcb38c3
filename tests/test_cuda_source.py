"""The CUDA kernels compile, on any machine: NVRTC needs no GPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from cpdhpc.ops.cuda_source import ARITHMETIC, KERNELS, OPTIONS, cuda_source

# What may appear in PTX of float32 and float64: nothing that flushes subnormal numbers or fuses.
# cvt.rzi.ftz: of a subnormal number the integer part is 0 either way.
EXACT = re.compile(
    r"(?:add|sub|mul|div)\.rn\.f(?:32|64)|(?:abs|neg)\.f64|cvt\.rzi\.ftz\.s32\.f32|cvt\.rzi\.s64\.f64"
    r"|cvt\.rn\.f(?:32|64)\.[su](?:32|64)|cvt\.rn\.f32\.f64|cvt\.f64\.f32|setp\.\w+\.f64"
    r"|(?:mov|selp)(?:\.v\d)?\.f(?:32|64)|(?:ld|st)\.\w+(?:\.nc)?(?:\.v\d)?\.f(?:32|64)"
)
VERSIONS = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}


def _nvrtc(version: int) -> ctypes.CDLL:
    missing = f"NVRTC ({VERSIONS[version]}) is missing"
    nvidia = pytest.importorskip("nvidia", reason=missing)
    found = [p for f in nvidia.__path__ for p in Path(f).glob(f"*/lib/libnvrtc.so.{version}")]
    if not found:
        pytest.skip(missing)
    return ctypes.CDLL(str(found[0]))


def _compile(source: str, *options: str, version: int = 12) -> tuple[str, str]:
    """Return NVRTC's log and PTX."""
    nvrtc = _nvrtc(version)
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


QUICK = {(12, 75)}  # the least of instructions


@pytest.mark.parametrize(
    ("version", "architecture"),
    [
        pytest.param(v, a, marks=() if (v, a) in QUICK else pytest.mark.slow)
        for v in VERSIONS
        for a in (75, 80, 86, 89, 90, 100, 103, 120)
    ],
)
def test_every_kernel_compiles_to_exact_instructions(version: int, architecture: int) -> None:
    # CuPy appends -ftz=true, whatever is asked for.
    options = f"-arch=compute_{architecture}", *OPTIONS, "-ftz=true"
    log, ptx = _compile(cuda_source(), *options, version=version)
    assert "warning" not in log
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted((*KERNELS, *ARITHMETIC))
    used = set(re.findall(r"\b([a-z]+\.[\w.]*\bf(?:32|64)\b[\w.]*)", ptx))
    assert {"add.rn.f32", "mul.rn.f32"} < used
    assert {word for word in used if not EXACT.fullmatch(word)} == set()


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

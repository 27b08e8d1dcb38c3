"""NVRTC and nvdisasm for tests: they compile kernels and show their instructions without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

PACKAGES = {
    "lib/libnvrtc.so.12": "nvidia-cuda-nvrtc-cu12",
    "lib/libnvrtc.so.13": "nvidia-cuda-nvrtc",
    "bin/nvdisasm": "nvidia-cuda-nvdisasm",
}
VERSIONS = (12, 13)
FLUSHING = "-ftz=true"  # CuPy appends it, whatever is asked for


def installed(file: str) -> Path:
    """Return where a file of NVIDIA's packages is; skip the test where it is missing."""
    missing = f"{file.rpartition('/')[2]} of {PACKAGES[file]} is missing"
    nvidia = pytest.importorskip("nvidia", reason=missing)
    found = [path for folder in nvidia.__path__ for path in Path(folder).glob(f"*/{file}")]
    if not found:
        pytest.skip(missing)
    return found[0]


@cache
def compiled(source: str, *options: str, version: int = 13) -> tuple[str, bytes]:
    """Return NVRTC's log and what it makes for -arch=compute_N, PTX, or -arch=sm_N, a cubin."""
    nvrtc = ctypes.CDLL(str(installed(f"lib/libnvrtc.so.{version}")))
    program = ctypes.c_void_p()
    name = b"cuda_loops.cu"
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name, 0, None, None)
    assert status == 0
    flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), flags)

    def result(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    log = result("ProgramLog").rstrip(b"\0").decode()
    assert not failed, log
    found = result("PTX" if any("=compute_" in o for o in options) else "CUBIN")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log, found


def ptx_of(source: str, architecture: int, *options: str, version: int = 13) -> str:
    """Return the PTX of a source for an architecture."""
    chosen = (f"-arch=compute_{architecture}", *options, FLUSHING)
    log, found = compiled(source, *chosen, version=version)
    assert "warning" not in log, log
    return found.rstrip(b"\0").decode()


def sass_of(cubin: bytes) -> str:
    """Return what nvdisasm shows of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        command = [str(installed("bin/nvdisasm")), "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

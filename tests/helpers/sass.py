"""What NVRTC makes of kernels, without a GPU: PTX, instructions, and the copy speed they allow.

python tests/helpers/sass.py prints the instructions of the codec's kernels and that speed.
"""

import ctypes
import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import pytest

from cpdhpc.formats import TILE, Cast, parse_format
from cpdhpc.ops.cuda_source import OPTIONS, Fixed, codec_source

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


FORMATS = ("e4m3", "e5m2", "e2m1fn", "bf16")
ARCHITECTURES = (80, 90, 100)
NAMES = {
    "encode_tiles": "encode",
    "decode_tiles": "decode",
    "decode_add_tiles": "decode_add",
    "decode_add_encode_tiles": "hop",
}
CONVERSIONS = ("F2FP.F16.E", "F2FP.SATFINITE.E")  # of codes to numbers, and back
ROWS = 32  # values of a thread in a tile


class Gpu(NamedTuple):
    """NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and DGX B200, as others quote them.

    They give 19.5, 67, 67 and 75 TFLOP/s of float32, twice floats * processors * clock.
    """

    architecture: int
    processors: int
    clock_ghz: float
    memory_tb_s: float
    floats: int  # float32 additions of a processor in a clock


GPUS = {
    "A100": Gpu(80, 108, 1.41, 2.039, 64),
    "H100": Gpu(90, 132, 1.98, 3.35, 128),
    "H200": Gpu(90, 132, 1.98, 4.8, 128),
    "B200": Gpu(100, 148, 1.98, 8.0, 128),
}
COPY = 0.92  # of the memory's rate: what a copy is taken to reach
# Of a processor in a clock: threads that its four schedulers start instructions of, integer
# operations, products of integers. NVIDIA's white papers, as others quote them, give 19.5 TOP/s of
# INT32 for the A100 and 33.5 for the H100, twice 64 * processors * clock. Of the B200 others list
# twice as much: with 64 nothing is promised too high.
ISSUED, INTEGERS, PRODUCTS = 128, 64, 64


class Kernel(NamedTuple):
    """What a thread executes of a kernel for each of its values, and what it needs."""

    total: float
    integers: float
    products: float  # and what ptxas makes of them, so that both units have work
    floats: float
    registers: int
    spilled_bytes: int


def kernels(
    fmt: str, architecture: int, shared: str = "tile", counted: bool = False, version: int = 13
) -> dict[str, Kernel]:
    """Return the four kernels of a format by their names in docs."""
    cast, blocks = Cast(parse_format(fmt)), {"tile": 0, "block32": 1, "block16": 2}[shared]
    found = {}
    for fixed in (Fixed(cast, blocks), Fixed(cast, blocks, True, counted)):
        options = (f"-arch=sm_{architecture}", *OPTIONS, FLUSHING, "--ptxas-options=-v")
        log, cubin = compiled(codec_source(fixed), *options, version=version)
        used = (
            r"Function properties for (\w+)\n.* (\d+) bytes spill stores.*\n.*Used (\d+) registers"
        )
        needs = {name: (int(r), int(s)) for name, s, r in re.findall(used, log)}
        for name, code in functions(sass_of(cubin)).items():
            counts = Counter(kind(each) for each in shortest(code))
            units = (counts.total(), counts["integer"], counts["product"], counts["float"])
            each = [count / ROWS for count in units]
            found[NAMES[name]] = Kernel(*each, *needs[name])
    return {name: found[name] for name in NAMES.values()}


def functions(sass: str) -> dict[str, list[str]]:
    """Return the lines of each kernel, labels and instructions."""
    found = {}
    for name, body in re.findall(
        r"\.text\.(\w+):\n(.*?)(?=\n\.text\.|\n\t\.section|\Z)", sass, re.S
    ):
        lines = re.findall(r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?) ?;", body, re.M)
        found[name] = [label or instruction for label, instruction in lines]
    return found


def shortest(code: list[str]) -> list[str]:
    """Return the instructions of the shortest way round the loop over tiles.

    Each way round encodes or decodes a tile: the shortest is that of a whole tile whose values all
    stay inside the format, and of a hop whose sums are not wanted. Where the GPU converts by
    itself, it is the way that does: another one is that of a tile that is NaN throughout.
    """
    labels = {line: at for at, line in enumerate(code) if line.startswith(".L")}
    jumps = {
        at: labels[target]
        for at, line in enumerate(code)
        for target in re.findall(r"\bBRA.*`\((\.L_x_\d+)\)", line)
    }
    start, end = max(
        ((to, at) for at, to in jumps.items() if to < at), key=lambda each: each[1] - each[0]
    )
    choices = [first_of_each_run(code, word, start, end) for word in CONVERSIONS]
    ways = [
        [way_between(code, jumps, *each) for each in pairwise([start, *places, end])]
        for places in product(*filter(None, choices))
    ]
    parts = min((each for each in ways if all(each)), key=lambda each: sum(map(len, each)))
    way = [*parts[0], *(at for part in parts[1:] for at in part[1:])]
    return [code[at] for at in way if at not in labels.values()]


def first_of_each_run(code: list[str], word: str, start: int, end: int) -> list[int]:
    """Return the places of instructions with a word, the first one after each label."""
    found, is_new = [], True
    for at in range(start, end):
        is_new |= code[at].startswith(".L")
        if is_new and word in code[at]:
            found.append(at)
            is_new = False
    return found


def way_between(code: list[str], jumps: dict[int, int], start: int, end: int) -> list[int]:
    """Return the places on the shortest way from one instruction to another, none without a way."""
    costs, before = {start: 0}, {}
    ahead = [start]
    while ahead:
        at = ahead.pop()
        ways = [jumps[at]] if at in jumps else []
        if at not in jumps or code[at].startswith("@"):
            ways.append(at + 1)
        for to in ways if at != end and "EXIT" not in code[at] else ():
            if to < len(code) and costs[at] + 1 < costs.get(to, len(code)):
                costs[to], before[to] = costs[at] + 1, at
                ahead.append(to)
    if end not in costs:
        return []
    way = [end]
    while way[-1] != start:
        way.append(before[way[-1]])
    return way[::-1]


def kind(instruction: str) -> str:
    """Return the unit that executes an instruction."""
    name = re.sub(r"^@\S+ ", "", instruction).split()[0].partition(".")[0]
    if name in ("FADD", "FMUL", "FFMA"):
        return "float"
    if name == "IMAD":
        return "product"
    others = (
        r"LD.*|ST.*|SHFL|VOTE.*|BRA|BSSY|BSYNC|WARPSYNC|EXIT|NOP|S2.*|U.*|R2U.*|BREAK|NANOSLEEP"
    )
    return "other" if re.fullmatch(others, name) else "integer"


def work_over_copy(gpu: Gpu, kernel: Kernel, value_bytes: float) -> float:
    """Return the time of the unit that has most to do over a copy's of as many bytes.

    Below 1 the kernel is predicted to be as fast as a copy, as memory and units work side by side.
    Products of integers and float32 share a unit.
    """
    clocks = max(
        kernel.total / ISSUED,
        kernel.integers / INTEGERS,
        kernel.products / PRODUCTS + kernel.floats / gpu.floats,
    )
    work_s = clocks / (gpu.processors * gpu.clock_ghz * 1e9)
    return work_s / (value_bytes / (COPY * gpu.memory_tb_s * 1e12))


def moved_bytes(name: str, bits: int) -> float:
    """Return the bytes that a kernel moves for each value: float32 and codes."""
    floats = {"encode": 1, "decode": 1, "decode_add": 2, "hop": 1}
    codes = {"encode": 1, "decode": 1, "decode_add": 1, "hop": 2}
    return 4 * floats[name] + bits / 8 * codes[name] + 1 / TILE


def main() -> None:
    """Print instructions a value (registers); predicted shares of copy speed (work over copy)."""
    names = tuple(NAMES.values())
    table = {(fmt, a): kernels(fmt, a) for fmt in FORMATS for a in ARCHITECTURES}
    print(f"| format | architecture | {' | '.join(names)} |")
    print(f"|---|---|{'---|' * len(names)}")
    for (fmt, architecture), found in table.items():
        cells = [f"{k.total:.1f} ({k.registers})" for k in found.values()]
        print(f"| {fmt} | sm_{architecture} | {' | '.join(cells)} |")
    print(f"\n| GPU | format | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for gpu, sheet in GPUS.items():
        for fmt in FORMATS:
            bits = parse_format(fmt).bits
            found = table[fmt, sheet.architecture].items()
            busy = [work_over_copy(sheet, k, moved_bytes(name, bits)) for name, k in found]
            cells = [f"{min(1, 1 / each):.0%} ({each:.2f})" for each in busy]
            print(f"| {gpu} | {fmt} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

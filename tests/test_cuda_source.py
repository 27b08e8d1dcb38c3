"""The CUDA kernels compile, on any machine: NVRTC needs no GPU."""

from __future__ import annotations

import re

import pytest
import sass
from sass import VERSIONS, compiled, ptx_of

from cpdhpc.ops.cuda_source import ARITHMETIC, KERNELS, OPTIONS, cuda_source

# What may appear in PTX of float32 and float64: nothing that flushes subnormal numbers or fuses.
# cvt.rzi.ftz: of a subnormal number the integer part is 0 either way.
EXACT = re.compile(
    r"(?:add|sub|mul|div)\.rn\.f(?:32|64)|(?:abs|neg)\.f64|cvt\.rzi\.ftz\.s32\.f32|cvt\.rzi\.s64\.f64"
    r"|cvt\.f32\.f16|cvt\.rn\.f16\.f32"
    r"|cvt\.rn\.f(?:32|64)\.[su](?:32|64)|cvt\.rn\.f32\.f64|cvt\.f64\.f32|setp\.\w+\.f64"
    r"|(?:mov|selp)(?:\.v\d)?\.f(?:32|64)|(?:ld|st)\.\w+(?:\.nc)?(?:\.v\d)?\.f(?:32|64)"
)
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
    ptx = ptx_of(cuda_source(), architecture, *OPTIONS, version=version)
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted((*KERNELS, *ARITHMETIC))
    used = set(re.findall(r"\b([a-z]+\.[\w.]*\bf(?:32|64)\b[\w.]*)", ptx))
    assert {"add.rn.f32", "mul.rn.f32"} < used
    assert {word for word in used if not EXACT.fullmatch(word)} == set()


# Of each value: more than this is a step back. docs/performance.md has the table.
MOST_INSTRUCTIONS = {"encode": 18, "decode": 22, "decode_add": 20, "hop": 36}
MOST_REGISTERS = 64


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sass.ARCHITECTURES)
@pytest.mark.parametrize("fmt", sass.FORMATS)
def test_the_codec_takes_few_instructions_and_registers(fmt: str, architecture: int) -> None:
    """Neither do other scalings or counts spill registers."""
    for name, kernel in sass.kernels(fmt, architecture).items():
        assert 10 < kernel.total <= MOST_INSTRUCTIONS[name] + 2 * (architecture != 90), name
        assert kernel.registers <= MOST_REGISTERS and not kernel.spilled_bytes, name
    for shared, counted in (("block16", True), ("tile", True)):
        for name, kernel in sass.kernels(fmt, architecture, shared, counted).items():
            assert kernel.registers <= MOST_REGISTERS and not kernel.spilled_bytes, name


def test_the_shortest_way_round_a_loop_is_counted() -> None:
    code = ["MOV", ".L_x_1", "LDG", "@P0 BRA `(.L_x_2)", "IADD3", "FADD", ".L_x_2", "STG"]
    assert sass.shortest([*code, "@!P1 BRA `(.L_x_1)", "EXIT"]) == [
        "@!P1 BRA `(.L_x_1)", "STG", "@P0 BRA `(.L_x_2)", "LDG",
    ]  # fmt: skip


def test_messages_name_our_files() -> None:
    source = cuda_source().replace("p.filled += bits;", "p.filled += bits; oops;", 1)
    with pytest.raises(AssertionError, match=r"kernels/bitpack\.h\(\d+\): error"):
        compiled(source, "-arch=compute_80", *OPTIONS)


def test_kernels_match_the_operations() -> None:
    """The CUDA kernels, the compiled CPU module and the specification have the same names."""
    from cpdhpc import _cpu
    from cpdhpc.ops import cpu, reference

    for name in KERNELS:
        assert callable(getattr(_cpu, name))
        assert callable(getattr(cpu, name))
        assert callable(getattr(reference, name))

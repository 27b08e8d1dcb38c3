"""The CUDA kernels compile, on any machine: NVRTC needs no GPU."""

import re

import pytest
import sass
from sass import VERSIONS, compiled, ptx_of

from cpdhpc.formats import Cast, parse_format
from cpdhpc.ops.cuda_source import ARITHMETIC, KERNELS, OPTIONS, Fixed, codec_source, cuda_source

# What may appear in PTX of float32 and float64: nothing that flushes subnormal numbers or fuses.
# cvt.rzi.ftz: of a subnormal number the integer part is 0 either way.
EXACT = re.compile(
    r"(?:add|sub|mul|div)\.rn\.f(?:32|64)|(?:abs|neg)\.f64|cvt\.rzi\.ftz\.s32\.f32|cvt\.rzi\.s64\.f64"
    r"|cvt\.f32\.f16|cvt\.rn\.f16\.f32"
    r"|cvt\.rn\.f(?:32|64)\.[su](?:32|64)|cvt\.rn\.f32\.f64|cvt\.f64\.f32|setp\.\w+\.f64"
    r"|(?:mov|selp)(?:\.v\d)?\.f(?:32|64)|(?:ld|st)\.\w+(?:\.nc)?(?:\.v\d)?\.f(?:32|64)"
)
# And where the GPU converts 8 bits by itself: a product that float32 holds may be fused with a sum.
CONVERSIONS = re.compile(
    r"cvt\.rn\.satfinite\.(?:e4m3|e5m2)x2\.f32|abs\.f32|max\.NaN\.f32|fma\.rn\.f32"
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
    assert not inexact(ptx)


def inexact(ptx: str) -> set[str]:
    """Return the instructions of float32 and float64 that are not known to be exact."""
    used = set(re.findall(r"\b([a-z]+\.[\w.]*\bf(?:32|64)\b[\w.]*)", ptx))
    assert {"add.rn.f32", "mul.rn.f32"} < used
    return {word for word in used if not EXACT.fullmatch(word)}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("fmt", ["e4m3", "e4m3fn", "e5m2"])
def test_only_formats_of_8_bits_on_new_gpus_are_converted_by_them(fmt: str, version: int) -> None:
    """By the instructions whose bits tests/helpers/ptx.py has, and no other cast by any."""
    for architecture, is_new in ((80, False), (89, False), (90, True), (100, True), (120, True)):
        for fit in (None, True):
            source = codec_source(Fixed(Cast(parse_format(fmt)), 0, fit))
            found = inexact(ptx_of(source, architecture, *OPTIONS, version=version))
            assert bool(found) == is_new and all(map(CONVERSIONS.fullmatch, found))
    others = [Cast(parse_format(name)) for name in ("e4m2", "e5m2fn", "posit8es1")]
    for cast in others:
        source = codec_source(Fixed(cast, 0, True))
        assert not inexact(ptx_of(source, 90, *OPTIONS, version=version))


# Of each value: more than this is a step back. docs/measurements/codec_gpu.md has the table.
MOST_INSTRUCTIONS = {"encode": 18, "decode": 22, "decode_add": 20, "hop": 36}
MOST_CONVERTED = {"encode": 8, "decode": 7, "decode_add": 8, "hop": 13}  # by the GPU itself
MOST_REGISTERS = 64


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sass.ARCHITECTURES)
@pytest.mark.parametrize("fmt", sass.FORMATS)
def test_the_codec_takes_few_instructions_and_registers(fmt: str, architecture: int) -> None:
    """Neither do other scalings or counts spill registers."""
    converts = architecture >= 90 and fmt in ("e4m3", "e5m2")
    least, most = (5, MOST_CONVERTED) if converts else (10, MOST_INSTRUCTIONS)
    for name, kernel in sass.kernels(fmt, architecture).items():
        assert least < kernel.total <= most[name] + 2 * (architecture != 90), name
        assert kernel.registers <= MOST_REGISTERS and not kernel.spilled_bytes, name
    for shared, counted in (("block16", True), ("tile", True)):
        for name, kernel in sass.kernels(fmt, architecture, shared, counted).items():
            assert kernel.registers <= MOST_REGISTERS and not kernel.spilled_bytes, name


def test_the_shortest_way_round_a_loop_is_counted() -> None:
    code = ["MOV", ".L_x_1", "LDG", "@P0 BRA `(.L_x_2)", "IADD3", "FADD", ".L_x_2", "STG"]
    assert sass.shortest([*code, "@!P1 BRA `(.L_x_1)", "EXIT"]) == [
        "LDG", "@P0 BRA `(.L_x_2)", "STG", "@!P1 BRA `(.L_x_1)",
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

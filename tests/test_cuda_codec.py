"""The codec's kernels for GPUs give the bits of the specification: run, and as PTX by NumPy."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import compiled_kernels
import numpy as np
import ptx
import pytest
import simulated_cupy
from sass import VERSIONS, ptx_of

from cpdhpc.formats import MICROSCALING, Cast, FloatFormat, parse_format
from cpdhpc.lab.verify.outcomes import OnGpu, differing, of_tiles
from cpdhpc.ops import reference
from cpdhpc.ops.cuda_source import OPTIONS

ARCHITECTURES = (75, 90, 100, 120)
ALL = [(version, architecture) for version in VERSIONS for architecture in ARCHITECTURES]
N = 5 * 1024 + 517  # the last tile is not a whole one


def module(version: int, architecture: int, change: Callable[[str], str] = str) -> type:
    """Return a cupy.RawModule whose kernels are run from the PTX of their source."""

    class RawModule(simulated_cupy.RawModule):
        def get_function(self, name: str) -> Callable[..., None]:
            text = ptx_of(change(self.code), architecture, *OPTIONS, version=version)
            kernel = ptx.kernels(text)[name]

            def call(grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
                compiled_kernels.arguments(self.code, name, args)
                arrays = [each.memory_view for each in args if hasattr(each, "memory_view")]
                numbers = [
                    each.data.ptr
                    if hasattr(each, "data") and hasattr(each.data, "ptr")
                    else int(each)
                    for each in args
                ]
                self.arrays.give(lambda: ptx.Run(kernel, *grid, *block, numbers, arrays))

            return call

    return RawModule


@contextmanager
def kernels_of(raw_module: type) -> Iterator[Any]:
    """Yield ops.gpu for NumPy arrays, over these kernels."""
    before = simulated_cupy.RawModule
    simulated_cupy.RawModule = raw_module  # type: ignore[misc]
    try:
        with simulated_cupy.simulated():
            yield OnGpu(importlib.import_module("cpdhpc.ops.gpu"))
    finally:
        simulated_cupy.RawModule = before  # type: ignore[misc]


def directed(fmt: Any) -> np.ndarray:
    """Return values where mistakes show: a kind a tile, and at the end a tile that is cut off."""
    draw = np.random.default_rng(3)
    codes = reference.decode(np.arange(1 << min(fmt.bits, 10), dtype=np.uint32), fmt)
    numbers = np.unique(np.abs(codes[np.isfinite(codes)]))
    middles = (numbers[1:] + numbers[:-1]) / 2
    edges = np.concatenate([numbers, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)])
    ties = np.resize(np.concatenate([edges, -edges]).astype(np.float32), 1024)
    tiny = draw.integers(0, 1 << 23, 1024, np.uint32)  # subnormal, and the largest just above
    tiny[5] = 0x00800001
    near = tiny.copy()  # one of each block has a shift below the largest: others may be rounded up
    near[:32] = near[512:544] = np.ldexp(
        np.float32(1), min(127, fmt.emax - fmt.shift_max + 1)
    ).view("u4")
    wide = draw.integers(0, 0x7F800000, 1024, np.uint32)  # of all exponents
    special = draw.normal(size=1024).astype(np.float32)
    special[[3, 40, 1000]] = np.nan, np.inf, -np.inf
    signs = draw.integers(0, 2, 1024, np.uint32) << np.uint32(31)
    most = fmt.max * draw.normal(size=N - 5120)
    with np.errstate(over="ignore"):
        return np.concatenate(
            [ties, *((each | signs).view(np.float32) for each in (tiny, near, wide)), special, most]
        ).astype(np.float32)


class Case(NamedTuple):
    """A cast, the values that share a shift, whether shifts are chosen and counts kept."""

    cast: Cast
    shared: int
    fit: bool
    counted: bool


def differences(ops: Any, case: Case) -> list[int]:
    """Return which results are not those of the specification; a NaN is as good as another."""
    x, (cast, shared, *how) = directed(case.cast.fmt), case
    options = dict(zip(("fit", "counted"), how, strict=True))
    found = (of_tiles(o, x, x[::-1].copy(), cast, shared, **options) for o in (ops, reference))
    return differing(*found, any_nan=True)


CASES = {
    "nearest": Case(Cast(parse_format("e4m3")), 1024, True, False),
    "stochastic": Case(Cast(parse_format("e4m3"), "stochastic"), 1024, True, True),
    "up": Case(Cast(parse_format("e5m2"), "up"), 32, True, True),
    "blocks": Case(Cast(parse_format("e2m1fn")), 16, True, False),
    "bf16": Case(Cast(parse_format("bf16")), 1024, False, False),
    "infinity": Case(Cast(parse_format("e4m3"), overflow="inf"), 1024, False, True),
    "table": Case(Cast(parse_format("posit8es1"), "stochastic"), 1024, True, False),
    "odd": Case(Cast(parse_format("e3m0"), "odd"), 32, True, False),
    "conversions": Case(Cast(parse_format("e5m2")), 1024, False, False),
    "conversions of blocks": Case(Cast(parse_format("e4m3fn")), 16, True, False),
    "conversions of OCP's blocks": Case(Cast(MICROSCALING["mxfp8"]), 32, True, False),
    "no conversions": Case(Cast(parse_format("e5m2fn")), 1024, True, False),
    "no conversions either": Case(Cast(FloatFormat(4, 3, "none")), 1024, True, False),
    "zero": Case(Cast(parse_format("e6m9"), "zero"), 1024, True, False),
}
QUICK = ((12, 75), "nearest")  # whose code tests/test_cuda_source.py compiles too


@pytest.mark.gpu
@pytest.mark.parametrize("fixed_casts", [0, 256])
@pytest.mark.parametrize("case", CASES)
def test_kernels_give_the_specified_bits(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, case: str, fixed_casts: int
) -> None:
    """Those for one cast, and those for all, which casts beyond the limit share."""
    runtime = importlib.import_module("cpdhpc.ops.gpu_runtime")
    monkeypatch.setattr(runtime, "FIXED_CASTS", fixed_casts)
    for kept in (runtime._codec, runtime._codec_kernel):
        kept.cache_clear()
    try:
        assert not differences(OnGpu(importlib.import_module("cpdhpc.ops.gpu")), CASES[case])
    finally:
        for kept in (runtime._codec, runtime._codec_kernel):
            kept.cache_clear()


# Each version and architecture has a third of the cases.
@pytest.mark.parametrize(
    ("compiler", "case"),
    [
        pytest.param(each, case, marks=() if (each, case) == QUICK else pytest.mark.slow)
        for i, each in enumerate(ALL)
        for case in list(CASES)[i % 3 :: 3]
    ],
)
def test_ptx_gives_the_specified_bits(compiler: tuple[int, int], case: str) -> None:
    with kernels_of(module(*compiler)) as ops:
        assert not differences(ops, CASES[case])


@pytest.mark.slow
def test_ptx_that_flushes_subnormal_numbers_is_noticed() -> None:
    """NVRTC makes abs.ftz.f32 of a mask between moves that it sees through."""

    def seen_through(source: str) -> str:
        return source.replace(
            'asm("mov.b32 %0, %1;" : "=r"(u) : "f"(x));', "u = __float_as_uint(x);"
        ).replace('asm("mov.b32 %0, %1;" : "=f"(x) : "r"(u));', "x = __uint_as_float(u);")

    with kernels_of(module(12, 100, seen_through)) as ops:
        assert differences(ops, CASES["blocks"])


# A kernel for one warp: each lane's word of x, at an offset, goes to its place in out.
PROGRAM = """.visible .entry copy(
\t.param .u64 copy_param_0,
\t.param .u64 copy_param_1
)
{
\tld.param.u64 \t%rd1, [copy_param_0];
\tld.param.u64 \t%rd2, [copy_param_1];
\tmov.u32 \t%r1, %tid.x;
\tsetp.lt.u32 \t%p1, %r1, LANES;
\t@!%p1 bra \t$L__end;
\tmul.wide.u32 \t%rd3, %r1, 4;
\tadd.s64 \t%rd4, %rd1, %rd3;
\tadd.s64 \t%rd5, %rd2, %rd3;
\tld.global.u32 \t%r2, [%rd4+OFFSET];
\tshfl.sync.bfly.b32 \t%r3|%p2, %r2, 1, 31, -1;
\tst.global.u32 \t[%rd5], %r3;
$L__end:
\tret;

}
"""


@pytest.mark.parametrize(
    ("offset", "lanes", "size", "fault"),
    [
        (4, 32, 33, ""),
        (8, 32, 33, "out of bounds"),
        (2, 32, 33, "misaligned"),
        (0, 31, 33, "lanes of a warp part"),
    ],
)
def test_ptx_is_checked(offset: int, lanes: int, size: int, fault: str) -> None:
    text = PROGRAM.replace("OFFSET", str(offset)).replace("LANES", str(lanes))
    x, out = np.arange(size, dtype=np.uint32), np.zeros(32, np.uint32)
    pointers = [each.ctypes.data for each in (x, out)]
    with pytest.raises(ptx.Fault, match=fault) if fault else nullcontext():
        ptx.Run(ptx.kernels(text)["copy"], 1, 32, pointers, [x, out])
        assert out.tolist() == [(lane ^ 1) + offset // 4 for lane in range(32)]

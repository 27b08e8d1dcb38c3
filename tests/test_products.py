"""Products of matrices with chosen roundings: specification, kernels and MPFR agree bit for bit."""

from __future__ import annotations

from typing import Any

import gmpy2
import numpy as np
import pytest

from cpdhpc import quantize, set_kernel_threads
from cpdhpc.formats import Cast, FloatFormat, parse_format
from cpdhpc.ops import cpu, reference
from cpdhpc.ops.products import Products
from cpdhpc.ops.threads import kernel_threads
from cpdhpc.precision import matmul

Array = np.ndarray[Any, np.dtype[Any]]
NAMES = [
    *("e5m10", "e4m3", "e5m2", "e3m0", "e8m7", "e8m23", "e4m3fn"),
    *("e2m1fn", "e6m9", "e8m10", "e7m15", "e1m3", "e5m0", "e2m3fn"),
]


def numbers(rng: np.random.Generator, fmt: FloatFormat, shape: tuple[int, ...]) -> Array:
    """Numbers of a format: any codes, with subnormals and infinity, or of about one size."""
    if rng.random() < 1 / 3:
        return reference.decode(
            rng.integers(0, 1 << fmt.bits, shape).astype(np.uint32).ravel(), fmt
        ).reshape(shape)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12)
    codes = reference.encode(x.astype(np.float32).ravel(), Cast(fmt))
    return reference.decode(codes, fmt).reshape(shape)


def random_products(rng: np.random.Generator) -> tuple[FloatFormat, Products]:
    inputs, *formats = (parse_format(NAMES[i]) for i in rng.integers(len(NAMES), size=4))

    def cast(fmt: FloatFormat) -> Cast:
        rounding = rng.choice(["nearest", "nearest", "nearest", "zero", "stochastic"])
        return Cast(fmt, str(rounding), str(rng.choice(["inf", "saturate"])))  # type: ignore[arg-type]

    product = None if rng.random() < 0.3 else cast(formats[0])
    if rng.random() < 0.25:
        return inputs, Products(cast(formats[1]), product, "pairwise")
    chunk, kahan = int(rng.choice([0, 0, 3, 8])), bool(rng.random() < 0.3)
    between = None if rng.random() < 0.5 else cast(formats[2])
    return inputs, Products(cast(formats[1]), product, "ascending", chunk, between, kahan)


def test_kernels_give_the_bits_of_the_specification(clone: str) -> None:
    """Of random roundings, orders and shapes; in float32 where that is enough, and in float64."""
    rng = np.random.default_rng(len(clone))
    in_float32 = 0
    for _ in range(120):
        inputs, how = random_products(rng)
        batch, m, k, n = rng.integers((1, 0, 0, 0), (3, 7, 20, 20)).tolist()
        a, b = numbers(rng, inputs, (batch, m, k)), numbers(rng, inputs, (batch, k, n))
        key = int(rng.integers(2**32)), int(rng.integers(2**32))
        expected = reference.matmul(a, b, how, key)
        in_float32 += how.single(inputs)
        for got in (cpu.matmul(a, b, how, key, inputs), cpu.matmul(a, b, how, key)):
            assert np.array_equal(got.view(np.uint32), expected.view(np.uint32)), (how, inputs)
    assert in_float32 > 5


def test_every_backend_gives_the_same_bits(ops: Any) -> None:
    rng = np.random.default_rng(11)
    for _ in range(12):
        inputs, how = random_products(rng)
        a, b = numbers(rng, inputs, (2, 5, 9)), numbers(rng, inputs, (2, 9, 19))
        got = ops.matmul(a, b, how, (5, 6))
        expected = reference.matmul(a, b, how, (5, 6))
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32)), how


FAST = [(name, Products(Cast(parse_format(name)), Cast(parse_format(name)), **options))
        for name in ("e5m10", "e4m3", "e5m2", "e3m0", "e2m1fn")
        for options in ({}, {"kahan": True}, {"chunk": 5}, {"order": "pairwise"})]  # type: ignore[arg-type]  # fmt: skip


def test_float32_is_enough_for_common_formats(clone: str) -> None:
    rng = np.random.default_rng(7)
    for name, how in FAST:
        inputs = parse_format(name)
        assert how.single(inputs)
        a, b = numbers(rng, inputs, (1, 6, 33)), numbers(rng, inputs, (1, 33, 18))
        expected = reference.matmul(a, b, how)
        got = cpu.matmul(a, b, how, inputs=inputs)
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32)), (name, how)


def mpfr(fmt: FloatFormat) -> gmpy2.context:
    """Arithmetic that rounds each result to a format of IEEE style."""
    return gmpy2.context(
        precision=fmt.man + 1, emax=fmt.bias + 1, emin=2 - fmt.bias - fmt.man, subnormalize=True
    )


@pytest.mark.parametrize("name", ["e5m10", "e4m3", "e5m2", "e8m7", "e6m9", "e3m4", "e8m23", "e5m1"])
@pytest.mark.parametrize("kahan", [False, True])
def test_each_operation_is_rounded_as_mpfr_does(name: str, kahan: bool) -> None:
    """Sums of 13 terms; MPFR rounds each product, each sum and each step of the compensation."""
    rng = np.random.default_rng(3)
    fmt = parse_format(name)
    a, b = numbers(rng, fmt, (12, 13)), numbers(rng, fmt, (13, 11))
    a[~np.isfinite(a)], b[~np.isfinite(b)] = 1, 1
    got = matmul(a, b, inputs=fmt, accumulate=fmt, kahan=kahan)
    with mpfr(fmt) as context:
        for i in range(12):
            for j in range(11):
                total, rest = gmpy2.mpfr(0), gmpy2.mpfr(0)
                for x, y in zip(a[i].tolist(), b[:, j].tolist(), strict=True):
                    own = context.mul(gmpy2.mpfr(x), gmpy2.mpfr(y))
                    own = context.sub(own, rest) if kahan else own
                    new = context.add(total, own)
                    rest = context.sub(context.sub(new, total), own)
                    total = new
                assert np.array_equal(got[i, j], np.float32(total), equal_nan=True), (i, j)


def test_exact_products_round_once() -> None:
    """1.5 * 1.5 = 2.25 is no e5m1 number; with -2 beside it, it is 0.25 unless it was rounded."""
    a, b = np.float32([[1.5, 1]]), np.float32([[1.5], [-2]])
    assert matmul(a, b, accumulate="e5m1", products="exact")[0, 0] == 0  # 2.25 rounds to 2 at once
    assert matmul(a[:, ::-1], b[::-1], accumulate="e5m1", products="exact")[0, 0] == 0.25
    assert matmul(a[:, ::-1], b[::-1], accumulate="e5m1")[0, 0] == 0


def test_float32_is_that_of_numpy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 9), np.float32), rng.standard_normal((9, 5), np.float32)
    expected = np.zeros((2, 3, 5), np.float32)
    for i in range(9):
        expected += a[:, :, i, None] * b[i]  # one rounding each, in this order
    assert np.array_equal(matmul(a, b), expected)


def test_stochastic_sums_have_no_bias() -> None:
    """Mean of 20,000 sums within 4 standard errors of the exact sum; nearest loses all of it."""
    a, b = np.full((20_000, 64), 1 / 64, np.float32), np.ones((64, 1), np.float32)
    a[:, 0] = 8
    exact = 8 + 63 / 64
    sums = matmul(a, b, accumulate="e5m2", rounding="stochastic", seed=5).astype(np.float64)
    assert abs(sums.mean() - exact) < 4 * sums.std() / np.sqrt(sums.size)
    assert sums.std() > 0 and matmul(a[:1], b, accumulate="e5m2")[0, 0] == 8


def test_chunks_keep_long_sums_of_few_bits() -> None:
    """Wang et al., arXiv 1812.08011, figure 3: in (1, 6, 9), naive sums of positive terms stall.

    A sum of chunks of 64 rounds each term by 2**-10 of at most 64 * 1.5, and each chunk's sum by
    2**-10 of the whole: relative errors of about sqrt(64) and sqrt(n / 64) times 2**-10 / 2, below
    2 % for n up to 16,384.
    """
    rng = np.random.default_rng(1)
    for n, least in ((1024, 0.0), (4096, 0.3), (16_384, 0.8)):
        x = quantize(rng.uniform(0.5, 1.5, (1, n)).astype(np.float32), "e6m9")
        ones, exact = np.ones((n, 1), np.float32), x.astype(np.float64).sum()
        naive, chunked = (
            abs(float(matmul(x, ones, accumulate="e6m9", chunk=chunk)[0, 0]) / exact - 1)
            for chunk in (0, 64)
        )
        assert chunked < 0.02 and chunked < naive and naive >= least


def test_bits_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((3, 300, 40), np.float32), rng.standard_normal((40, 70), np.float32)
    before, found = kernel_threads(), []
    try:
        for threads in (1, 3):
            set_kernel_threads(threads)
            found.append(matmul(a, b, inputs="e4m3", accumulate="e5m2", rounding="stochastic"))
    finally:
        set_kernel_threads(before)
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("shapes", "options", "said"),
    [
        (((2, 3), (4, 5)), {}, "a of (2, 3), b of (4, 5)"),
        (((2, 3), (3,)), {"order": "downwards"}, "order='downwards'"),
        (((2, 3), (3,)), {"order": "pairwise", "kahan": True}, "order='pairwise'"),
        (((2, 3), (3,)), {"between": "fp32"}, "needs chunk"),
        (((2, 3), (3,)), {"accumulate": "e9m3"}, "exp=9"),
        (((2, 3), (3,)), {"chunk": -1}, "chunk=-1"),
    ],
)
def test_what_does_not_go_together(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], said: str
) -> None:
    a, b = (np.ones(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError) as error:
        matmul(a, b, **options)
    assert said in str(error.value)


def test_kinds_and_shapes_are_those_of_numpy() -> None:
    import torch

    a, b = torch.ones(2, 1, 3, 4), torch.ones(5, 4, 6)
    assert matmul(a, b).shape == (2, 5, 3, 6) and isinstance(matmul(a, b), torch.Tensor)
    assert matmul(a, torch.ones(4)).shape == (2, 1, 3)
    assert matmul(torch.ones(4), torch.ones(4)).shape == ()
    assert matmul(np.ones((0, 3), np.float32), np.ones((3, 2), np.float32)).shape == (0, 2)
    with pytest.raises(TypeError, match="matmul: b is ndarray of float64"):
        matmul(np.ones((2, 2), np.float32), np.ones((2, 2)))

"""Products of matrices with chosen roundings: specification, kernels and MPFR agree bit for bit."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import gmpy2
import numpy as np
import oracles
import pytest
from every import every
from gfloat import RoundMode, round_ndarray

from cpdhpc import _cpu, quantize, set_kernel_threads
from cpdhpc.formats import Cast, FloatFormat, Rounding, TableFormat, parse_format
from cpdhpc.ops import cpu, kernel_threads, reference
from cpdhpc.ops.products import Arithmetic, Products
from cpdhpc.randomness import random_key
from cpdhpc.torch.precision import matmul

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDINGS = get_args(Rounding)
NAMES = [
    *("e5m10", "e4m3", "e5m2", "e3m0", "e8m7", "e8m23", "e4m3fn"),
    *("e2m1fn", "e6m9", "e8m10", "e7m15", "e1m3", "e5m0", "e2m3fn"),
]
IEEE = ["e5m10", "e4m3", "e5m2", "e8m7", "e6m9", "e3m4", "e8m23", "e5m1"]


def floats(name: str) -> FloatFormat:
    return Cast(parse_format(name)).float_format


def numbers(rng: np.random.Generator, fmt: FloatFormat, shape: tuple[int, ...]) -> Array:
    """Numbers of a format: any codes, with subnormals and infinity, or of about one size."""
    if rng.random() < 1 / 3:
        return reference.decode(
            rng.integers(0, 1 << fmt.bits, shape).astype(np.uint32).ravel(), fmt
        ).reshape(shape)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12)
    codes = reference.encode(x.astype(np.float32).ravel(), Cast(fmt))
    return reference.decode(codes, fmt).reshape(shape)


def random_products(rng: np.random.Generator) -> tuple[tuple[FloatFormat, FloatFormat], Products]:
    """Formats of both matrices, and how their products are summed; often in one format alone."""
    one, other, *formats = (floats(NAMES[i]) for i in rng.integers(len(NAMES), size=5))
    formats = formats[:1] * 3 if rng.random() < 0.3 else formats
    inputs = one, other if rng.random() < 0.5 else one

    def cast(fmt: FloatFormat) -> Cast:
        rounding: Any = str(rng.choice(["nearest"] * 5 + list(ROUNDINGS)))
        bits = int(rng.integers(0, 9)) if rounding == "stochastic" else 0
        return Cast(fmt, rounding, str(rng.choice(oracles.overflows(fmt))), bits)  # type: ignore[arg-type]

    product = None if rng.random() < 0.3 else cast(formats[0])
    if rng.random() < 0.25:
        return inputs, Products(cast(formats[1]), product, "pairwise")
    chunk, kahan = int(rng.choice([0, 0, 3, 8])), bool(rng.random() < 0.3)
    between = None if rng.random() < 0.5 else cast(formats[2])
    return inputs, Products(cast(formats[1]), product, "ascending", chunk, between, kahan)


def same_bits(x: Array, y: Array) -> bool:
    return np.array_equal(x.view(np.uint32), y.view(np.uint32))


@pytest.fixture
def clones() -> Iterator[Any]:
    """Give what uses each of the CPU's sets of instructions in turn."""
    before = _cpu.clone()
    yield lambda: (_cpu.use_clone(name) or name for name in _cpu.clones())  # type: ignore[func-returns-value]
    _cpu.use_clone(before)


def test_kernels_give_the_bits_of_the_specification(clones: Any) -> None:
    """Of random roundings, orders and shapes, in whatever arithmetic is enough, and in all."""
    rng = np.random.default_rng(9)
    found = Counter[str]()
    for _ in range(160):
        inputs, how = random_products(rng)
        batch, m, k, n = rng.integers((1, 0, 0, 0), (3, 12, 20, 20)).tolist()
        a, b = numbers(rng, inputs[0], (batch, m, k)), numbers(rng, inputs[1], (batch, k, n))
        key = int(rng.integers(2**32)), int(rng.integers(2**32))
        expected = reference.matmul(a, b, how, key)
        found[how.arithmetic(*inputs)] += 1
        for clone in clones():
            for got in (cpu.matmul(a, b, how, key, inputs), cpu.matmul(a, b, how, key)):
                assert same_bits(got, expected), (clone, how, inputs)
    assert min(found[each] for each in get_args(Arithmetic)) > 5, found


def edges(fmt: FloatFormat) -> Array:
    """What is hard to round to a format: its edges, what lies half-way, and the float32 beside."""
    each = [fmt.smallest, 2.0**fmt.emin, 1.0, fmt.max, 2.0 ** (fmt.emax + 1)]
    near = np.array(
        [x * (1 + s * 2.0**-j / 2) for x in each for s in (-1, 1) for j in (fmt.man, fmt.man + 1)]
    )
    with np.errstate(over="ignore"):
        x = np.array(
            [*each, *near, 0.5 * fmt.smallest, 1.5 * fmt.smallest, 1e-45, 3e38], np.float32
        )
        x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))])
    return np.concatenate([x, -x, np.float32([0, -0.0, np.inf, -np.inf, np.nan])])


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_edges_of_formats(clones: Any, rounding: Any) -> None:
    """Products of all edges by one, a tie and a tiny number, then the sums of such products."""
    for name in ("e4m3", "e5m2", "e3m0", "e2m1fn", "e8m7", "e8m23"):
        fmt = floats(name)
        x = edges(fmt)
        y = np.float32([1, -1, 1 + 2.0**-fmt.man, 1.5, fmt.smallest / 2, 2.0**-149])
        pairs = np.stack([np.repeat(x, 8), np.tile(x[:8], x.size)], 1)
        for product in (None, Cast(fmt, rounding)):
            for kahan in (False, True):
                how = Products(Cast(fmt, rounding), product, kahan=kahan)
                for a, b in ((x[:, None], y[None]), (pairs, np.ones((2, 1), np.float32))):
                    expected = reference.matmul(a[None], b[None], how, (3, 4))
                    for clone in clones():
                        got = cpu.matmul(a[None], b[None], how, (3, 4))
                        assert same_bits(got, expected), (clone, name, how)


@pytest.mark.slow
def test_random_bits_wrap_round(clone: str) -> None:
    """Rounding r of output o draws number r * outputs + o: here of more than 32 bits."""
    k, n = 3000, 200_000  # the last product is number 24,000 * 200,000
    a, b = np.zeros((1, 1, k), np.float32), np.zeros((1, k, 8), np.float32)
    a[0, 0, -1], b[0, -1] = 1, 1.3
    cast = Cast(floats("e4m3"), "stochastic")
    b = np.repeat(b, n // 8, 2)
    got = cpu.matmul(a, b, Products(cast), (7, 8))[0, 0]
    index = np.uint64(8 * (k - 1)) * np.uint64(n) + np.arange(n, dtype=np.uint64)
    assert int(index[-1]) > 2**32
    draws = reference.random31((7, 8), index) >> np.uint32(3)
    up = np.float64(np.float32(1.3)) % 0.125 / 0.125 * 2.0**28 // 1 + draws >= 2.0**28
    assert np.array_equal(got, np.where(up, 1.375, 1.25)) and 0.3 < up.mean() < 0.5


def test_every_backend_gives_the_same_bits(ops: Any) -> None:
    rng = np.random.default_rng(11)
    for k in (9, 37) * 6:  # of more than 16 the GPU's blocks load their operands again
        inputs, how = random_products(rng)
        a, b = numbers(rng, inputs[0], (2, 5, k)), numbers(rng, inputs[1], (2, k, 19))
        got = ops.matmul(a, b, how, (5, 6))
        expected = reference.matmul(a, b, how, (5, 6))
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32)), how


FAST = [(name, Products(Cast(floats(name)), Cast(floats(name)), **options))
        for name in ("e5m10", "e4m3", "e5m2", "e3m0", "e2m1fn")
        for options in ({}, {"kahan": True}, {"chunk": 5}, {"order": "pairwise"})]  # type: ignore[arg-type]  # fmt: skip


def test_float32_is_enough_for_common_formats(clones: Any) -> None:
    rng = np.random.default_rng(7)
    for name, how in FAST:
        inputs = floats(name)
        assert how.arithmetic(inputs, inputs) == "float32"
        a, b = numbers(rng, inputs, (1, 6, 33)), numbers(rng, inputs, (1, 33, 18))
        expected = reference.matmul(a, b, how)
        for clone in clones():
            got = cpu.matmul(a, b, how, inputs=(inputs, inputs))
            assert same_bits(got, expected), (clone, name, how)


@every("name", IEEE)
@every("kahan", [False, True])
def test_each_operation_is_rounded_as_mpfr_does(name: str, kahan: bool) -> None:
    """MPFR rounds each product, each sum and each step of the compensation."""
    sums_by_mpfr(name, "nearest", (12, 13, 11), kahan)


@every("rounding", ["zero", "up", "down"])
def test_directed_roundings_are_those_of_mpfr(rounding: Any) -> None:
    sums_by_mpfr("e5m2", rounding, (6, 9, 5))
    sums_by_mpfr("e8m10", rounding, (6, 9, 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", IEEE)
@pytest.mark.parametrize("rounding", oracles.MPFR)
def test_a_hundred_thousand_products_are_those_of_mpfr(name: str, rounding: Any) -> None:
    sums_by_mpfr(name, rounding, (50, 40, 50))


def sums_by_mpfr(
    name: str, rounding: Any, shape: tuple[int, int, int], kahan: bool = False
) -> None:
    m, k, n = shape
    rng = np.random.default_rng(k)
    fmt = floats(name)
    a, b = numbers(rng, fmt, (m, k)), numbers(rng, fmt, (k, n))
    a[~np.isfinite(a)], b[~np.isfinite(b)] = 1, 1
    got = matmul(a, b, inputs=fmt, accumulate=fmt, rounding=rounding, kahan=kahan)
    with oracles.mpfr(fmt, rounding) as context:
        exact = [[[gmpy2.mpfr(v) for v in row] for row in x] for x in (a.tolist(), b.T.tolist())]
        for (i, row), (j, column) in itertools.product(*map(enumerate, exact)):
            total = rest = gmpy2.mpfr(0)
            for x, y in zip(row, column, strict=True):
                own = context.mul(x, y)
                own = context.sub(own, rest) if kahan else own
                new = context.add(total, own)
                rest = context.sub(context.sub(new, total), own)
                total = new
            assert np.array_equal(got[i, j], np.float32(total), equal_nan=True), (i, j)


@every("bits", [1, 4, 20])
def test_stated_random_bits_are_those_of_gfloat(bits: int) -> None:
    """Exact products, rounded once, with the draws that the specification numbers."""
    rng = np.random.default_rng(bits)
    a, b = rng.standard_normal((80, 1), np.float32), rng.standard_normal((1, 50), np.float32)
    how: dict[str, Any] = {"rounding": "stochastic", "random_bits": bits, "seed": 9}
    got = matmul(a, b, accumulate="e4m3", products="exact", **how)
    exact = a.astype(np.float64) * b
    draws = reference.random31(random_key(9), np.arange(exact.size, dtype=np.uint64))
    used = (draws >> np.uint32(31 - bits)).astype(np.int64).reshape(exact.shape)
    info = oracles.gfloat_info(floats("e4m3"))
    expected = round_ndarray(info, exact, RoundMode.StochasticFastest, False, used, bits)
    assert np.array_equal(got, expected)


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


def test_a_sum_does_not_depend_on_its_neighbours() -> None:
    """One of the rows that go together is too large: all are done again. Blocks do not show."""
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((40, 30), np.float32), rng.standard_normal((30, 33), np.float32)
    for name in ("e4m3", "e8m7"):
        whole = matmul(a, b, inputs=name, accumulate=name)
        large = a.copy()
        large[5] *= 2.0**120
        assert np.array_equal(
            np.delete(matmul(large, b, inputs=name, accumulate=name), 5, 0), np.delete(whole, 5, 0)
        )
        for rows, columns in ((slice(3, 12), slice(0, 1)), (slice(39, 40), slice(7, 30))):
            part = matmul(a[rows], b[:, columns], inputs=name, accumulate=name)
            assert np.array_equal(part, whole[rows, columns])


@every("rounding", ROUNDINGS)
def test_nan_in_one_row_hides_no_overflow_of_another(clone: str, rounding: Any) -> None:
    """What was largest before rounding is kept by lane for all rows that go together."""
    a, b = np.ones((1, 4, 6), np.float32), np.ones((1, 6, 2), np.float32)
    a[0, 0, :2], a[0, 1, 2:4], a[0, 2, 5] = 2.0**90, [np.inf, -np.inf], np.nan
    for name in ("e4m3", "e5m10", "e8m7"):
        for product in (None, Cast(floats(name), rounding)):
            how = Products(Cast(floats(name), rounding), product)
            got, expected = (f(a, b, how, (1, 2)) for f in (cpu.matmul, reference.matmul))
            assert same_bits(got, expected), how


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


@every(
    ("shapes", "options", "said"),
    [
        (((2, 3), (4, 5)), {}, "a of (2, 3), b of (4, 5)"),
        (((2, 3), (3,)), {"order": "downwards"}, "order='downwards'"),
        (((2, 3), (3,)), {"order": "pairwise", "kahan": True}, "order='pairwise'"),
        (((2, 3), (3,)), {"between": "fp32"}, "needs chunk"),
        (((2, 3), (3,)), {"accumulate": "e9m3"}, "exp=9"),
        (((2, 3), (3,)), {"chunk": -1}, "chunk=-1"),
        (((2, 3), (3,)), {"rounding": "upwards"}, "rounding='upwards'"),
        (((2, 3), (3,)), {"accumulate": "posit8"}, "posit8es2: products and sums"),
        (((), (3,)), {}, "each needs an axis"),
        (((2, 3), (3,)), {"chunk": 2.5}, "chunk=2.5: must be an integer"),
        (((2, 3), (3,)), {"kahan": "no"}, "kahan='no': must be an integer"),
        (((2, 3), (3,)), {"random_bits": "3"}, "random_bits='3': must be an integer"),
        (((2, 3), (3,)), {"seed": 1.5}, "seed=1.5: must be an integer"),
        (((2, 3), (3,)), {"accumulate": 5}, "5: should be a format or its name"),
        (((2, 3), (3,)), {"inputs": ("e4m3",)}, "one format, or one of a and one of b"),
    ],
)
def test_what_does_not_go_together(
    shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], said: str
) -> None:
    a, b = (np.ones(shape, np.float32) for shape in shapes)
    with pytest.raises((TypeError, ValueError)) as error:
        matmul(a, b, **options)
    assert said in str(error.value)


def test_kinds_and_shapes_are_those_of_numpy() -> None:
    import torch

    a, b = torch.ones(2, 1, 3, 4), torch.ones(5, 4, 6)
    assert matmul(a, b).shape == (2, 5, 3, 6) and isinstance(matmul(a, b), torch.Tensor)
    assert matmul(a, torch.ones(4)).shape == (2, 1, 3)
    assert matmul(torch.ones(4), torch.ones(4)).shape == ()
    assert matmul(np.ones((0, 3), np.float32), np.ones((3, 2), np.float32)).shape == (0, 2)
    for other in (np.ones((2, 2)), np.ones((2, 2), np.int32), np.ones((2, 2), np.float16)):
        with pytest.raises(TypeError, match=f"matmul: b is numpy.ndarray of {other.dtype}"):
            matmul(np.ones((2, 2), np.float32), other)


EMPTY = [((0, 3), (3, 2)), ((2, 0), (0, 4)), ((3, 0, 2), (2, 2)), ((0,), (0,)), ((5,), (2, 5, 0))]


@every("shapes", EMPTY)
def test_axes_without_elements(shapes: Any) -> None:
    a, b = (np.ones(shape, np.float32) for shape in shapes)
    for how in ({}, {"kahan": True}, {"order": "pairwise"}, {"chunk": 2, "rounding": "up"}):
        got = matmul(a, b, accumulate="e4m3", **how)  # type: ignore[arg-type]
        assert got.shape == (a @ b).shape and not got.any()


def test_strides_do_not_matter() -> None:
    import torch

    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((4, 6, 10), np.float32), rng.standard_normal((9, 4), np.float32)
    expected = matmul(
        np.ascontiguousarray(a[:, ::2, 3:7]), np.ascontiguousarray(b.T), accumulate="e4m3"
    )
    assert np.array_equal(matmul(a[:, ::2, 3:7], b.T, accumulate="e4m3"), expected)
    tensors = torch.from_numpy(a)[:, ::2, 3:7], torch.from_numpy(b).T
    assert np.array_equal(matmul(*tensors, accumulate="e4m3").numpy(), expected)


def test_inputs_may_be_tables_and_differ() -> None:
    rng = np.random.default_rng(8)
    a, b = rng.standard_normal((5, 30), np.float32), rng.standard_normal((30, 7), np.float32)
    for pair in (("posit8es1", "posit8es1"), ("lns4m3", "e5m2"), ("takum8", "fp32")):
        x, y = (quantize(v, name) for v, name in zip((a, b), pair, strict=True))
        how = Products(Cast(floats("e5m10")), Cast(floats("e5m10")))
        expected = reference.matmul(x[None], y[None], how)[0]
        assert same_bits(matmul(a, b, inputs=pair, accumulate="e5m10"), expected), pair
    few = TableFormat("few", [0, 1, -1, 0.75])  # their products are exact in float32
    assert how.arithmetic(few, few) == "float32"
    assert same_bits(matmul(a, b, inputs=few), quantize(a, few) @ quantize(b, few))


HOW: list[dict[str, Any]] = [
    {"accumulate": "e6m9"},
    {"inputs": ("e4m3", "e5m2"), "products": "exact", "accumulate": "bf16"},
    {"accumulate": "e5m10", "chunk": 2, "between": "fp32", "overflow": "saturate"},
    {"accumulate": "e4m3", "rounding": "stochastic", "seed": 7},
    {"accumulate": "e6m9", "kahan": True},
]


@every("how", HOW)
def test_gradients_are_products_in_the_same_arithmetic(how: dict[str, Any]) -> None:
    """By the specification, of operands as they were rounded; which the gradients pass by."""
    import torch

    rng = np.random.default_rng(9)
    a, b, g = (rng.standard_normal(s, np.float32) for s in ((5, 8), (8, 6), (5, 6)))
    x, y = (torch.tensor(v, requires_grad=True) for v in (a, b))
    matmul(x, y, **how).backward(torch.from_numpy(g))
    names = how.get("inputs", ("fp32", "fp32"))
    p, q = (quantize(v, name) for v, name in zip((a, b), names, strict=True))
    rest = {k: v for k, v in how.items() if k not in ("inputs", "seed", "accumulate", "products")}
    cast = {k: rest.pop(k) for k in ("rounding", "overflow") if k in rest}
    sums = Cast(floats(how["accumulate"]), **cast)
    each = None if how.get("products") == "exact" else sums
    between = Cast(floats(rest.pop("between")), **cast) if "between" in rest else None
    full = Products(sums, each, "ascending", rest.pop("chunk", 0), between, **rest)
    for number, (found, left, right) in enumerate(((x, g, q.T), (y, p.T, g)), 1):
        key = random_key(how.get("seed", 0), number)
        expected = reference.matmul(left[None], right[None], full, key)[0]
        assert found.grad is not None and same_bits(found.grad.numpy(), expected)


SHAPES = [((3, 4), (4, 2)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,))]
SHAPES += [((2, 1, 3, 4), (5, 4, 6)), ((3, 4), (5, 4, 2)), ((2, 0, 4), (4, 3))]


@every("shapes", SHAPES)
def test_gradients_of_all_shapes_are_those_of_torch(shapes: Any) -> None:
    """Small whole numbers, so that all sums are exact; first and second derivatives."""
    import torch

    torch.manual_seed(0)
    a, b = (torch.randint(-3, 4, shape).float().requires_grad_() for shape in shapes)
    found = []
    for by in (matmul, torch.matmul):
        y = by(a, b)
        first = torch.autograd.grad(y.square().sum(), (a, b), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), (a, b))
        found.append([y, *first, *second])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_only_gradients_that_are_asked_for_are_computed_and_none_is_lost() -> None:
    import torch

    a, b = torch.ones(2, 3), torch.ones(3, 2, requires_grad=True)
    (got,) = torch.autograd.grad(matmul(a, b).sum(), b)
    assert torch.equal(got, torch.full((3, 2), 2.0)) and a.grad is None
    assert torch.equal(torch.func.grad(lambda b: matmul(a, b).sum())(b.detach()), got)
    assert not matmul(a, b.detach()).requires_grad
    with pytest.raises(TypeError, match=r"a is numpy\.ndarray, b is torch\.Tensor: should be"):
        matmul(a.numpy(), b)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda a: matmul(a, b), (a,), (a,))

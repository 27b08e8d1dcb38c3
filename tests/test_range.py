"""What formats do beyond their range: scalings reach all of float32; one rule of overflow."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from every import every

import cpdhpc
from cpdhpc.collectives.allreduce import simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import LowBit
from cpdhpc.compress.payload import decode_sparse, encode_sparse
from cpdhpc.darray.describe import packed_wire
from cpdhpc.formats import (
    INTEGERS,
    MICROSCALING,
    Cast,
    Microscaling,
    packed_bytes,
    parse_format,
    tiles,
)
from cpdhpc.ops import reference
from cpdhpc.ops.payloads import parse_wire
from cpdhpc.torch import precision
from cpdhpc.torch.precision.policy import Rule
from cpdhpc.torch.precision.tensors import TensorFormat, factor_of

FLT_MAX = float(np.finfo(np.float32).max)


TAPERED = ["posit8es1"]
FLOATS = ["e4m3", "e5m2", "e4m3fn", "e3m0", *TAPERED, "lns4m3"]


@every("scaling", ["tile", "block32", "block16", "aps"])
@every("wire", [*FLOATS, "int8", "int16", "ternary"])
def test_contributions_fit_up_to_the_top_of_float32(wire: str, scaling: str) -> None:
    """Rounded in one step, whatever their size: relative errors are those at size 1.

    At 2**127 a rounding upwards would leave float32, so the largest is 1.25 * 2**126.
    """
    if wire not in FLOATS and scaling != "aps":
        return
    base = np.linspace(1, 1.25, 2048, dtype=np.float32)
    zero = np.zeros_like(base)
    small = simulate([base, zero], wire, "ring", scaling)
    for k in (-110, -100, 60, 113, 118, 120, 125, 126):
        room_for_two = wire in FLOATS and scaling == "aps" and k == 126
        if not room_for_two and not (wire in TAPERED and k > 113):
            got = simulate([np.ldexp(base, k), zero], wire, "ring", scaling)
            np.testing.assert_array_equal(got, np.ldexp(small, k), err_msg=str(k))


def test_values_of_the_report_arrive() -> None:
    x, zero = np.full(1024, 1e37, np.float32), np.zeros(1024, np.float32)
    for scaling in ("tile", "aps"):
        got = simulate([x, zero], "e4m3", scaling=scaling)
        assert got == pytest.approx(1e37, rel=2**-4)  # of a spacing of 2**-3
    with pytest.raises(NonFiniteGradient):  # float32 has no such sum
        simulate([np.full(1024, 3e38, np.float32)] * 2, "e4m3", scaling="tile")


@every("size", [1e-45, 1e-42, 1e-38, 1e-20, 1.0, 1e20, 1e37, 3.4e38])
def test_amax_fits_every_tensor(size: float) -> None:
    """Relative errors are at most half a spacing: 2**-4; of subnormals half of their own beside."""
    x = np.array([size, -size, size / 2], np.float32)
    for name in ("e4m3", "e4m3fn", "fp16", "e3m4"):
        for rounding in ("nearest", "up", "down"):
            how = TensorFormat(format=name, scaling="amax", rounding=rounding)
            back = how.round(x)
            assert np.isfinite(back).all(), (name, rounding)
            assert (abs(back - x) <= abs(x) * 2.0**-3 + 2.0**-149).all(), (name, rounding, back)
    assert factor_of(0.0, parse_format("e4m3")) == 1


OVERFLOWS = {  # name -> what 1e9 becomes by default, with "saturate" and with "inf"; None: refused
    "e4m3": (np.inf, 240.0, np.inf),
    "e5m2": (np.inf, 57344.0, np.inf),
    "e4m3fn": (np.nan, 448.0, np.nan),
    "fp16": (np.inf, 65504.0, np.inf),
    "e2m1fn": (6.0, 6.0, None),
    "posit8es1": (4096.0, 4096.0, None),
    "three=[-1,0,1,2]": (2.0, 2.0, None),
    "open=[-inf,0,1,inf]": (np.inf, 1.0, np.inf),
}


def _by_tensor(x: Any, name: str, **options: Any) -> Any:
    return TensorFormat(format=name, **options).round(x)


def _by_wire(x: Any, name: str, **options: Any) -> Any:
    try:
        return simulate([x], name, scaling="none", **options)
    except NonFiniteGradient:  # infinity or NaN on the wire
        return np.full(x.size, OVERFLOWS[name][2], np.float32)


def _by_codes(x: Any, name: str, **options: Any) -> Any:
    return cpdhpc.decode(cpdhpc.encode(x, name, **options), name)


def _by_precision(x: Any, name: str, **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    given = TensorFormat(format=name, **options) if options else name
    return precision.quantize(torch.from_numpy(x), given).numpy()


def _by_matmul(x: Any, name: str, **options: Any) -> Any:
    return precision.matmul(x[:, None], np.ones((1, 1), np.float32), accumulate=name, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "quantize": cpdhpc.quantize,
    "encode": _by_codes,
    "precision.quantize": _by_precision,
    "TensorFormat": _by_tensor,
    "wire": _by_wire,
    "matmul": _by_matmul,
}


@every("way", WAYS)
@every("name", OVERFLOWS)
def test_one_rule_says_what_is_too_large(name: str, way: str) -> None:
    if way == "matmul" and not isinstance(parse_format(name), type(parse_format("e4m3"))):
        return  # sums are rounded to eXmY formats
    x = np.float32([1e9, 1e9])
    plain, saturated, infinite = OVERFLOWS[name]
    for options, wanted in (({}, plain), ({"overflow": "saturate"}, saturated)):
        got = np.ravel(WAYS[way](x, name, **options))
        np.testing.assert_array_equal(got, np.full(2, wanted, np.float32), err_msg=str(options))
    if infinite is None:
        with pytest.raises(ValueError, match=r"must be 'saturate', or left out"):
            WAYS[way](x, name, overflow="inf")
    else:
        got = np.ravel(WAYS[way](x, name, overflow="inf"))
        np.testing.assert_array_equal(got, np.full(2, infinite, np.float32))


ELEMENTS = {
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp8-e5m2": ml_dtypes.float8_e5m2,
    "mxfp6": ml_dtypes.float6_e2m3fn,
    "mxfp6-e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}


def _elements(words: Any, bits: int) -> Any:
    """The codes of a stream of bits, the lowest first, as blocks of 32."""
    if bits == 8:
        return words.reshape(-1, 32)
    each = np.unpackbits(words, bitorder="little").reshape(-1, bits)
    return (each << np.arange(bits)).sum(1).astype(np.uint8).reshape(-1, 32)


@every("name", ELEMENTS)
def test_payloads_of_mx_are_those_of_ocp(ops: Any, name: str) -> None:
    """Elements and scales by ml_dtypes, in order; section 6.3 of the standard."""
    fmt, rng = MICROSCALING[name], np.random.default_rng(5)
    assert isinstance(fmt, Microscaling) and fmt.name == name
    for n, low, high in ((5000, -30, 30), (33, -149, -100), (1500, 90, 127), (1, 0, 1)):
        x = np.ldexp(rng.uniform(-2, 2, n), rng.integers(low, high, n)).astype(np.float32)
        x[np.arange(n) // 32 % 7 == 3] = 0
        x[n // 2] = np.nan if n > 64 else 1
        words = np.zeros(packed_bytes(n, fmt.bits), np.uint8)
        scales = np.zeros(tiles(n) * 32, np.uint8)
        ops.encode_tiles(x, Cast(fmt), words, scales, fit=True)
        blocks = np.zeros(tiles(n) * 1024)
        blocks[:n] = x
        blocks = blocks.reshape(-1, 32)
        amax = np.abs(blocks).max(1)
        marked = np.isnan(amax)
        exponents = np.frexp(np.where(marked, 1, amax))[1] - 1 - fmt.emax
        wanted = 2.0 ** np.where(amax == 0, 0, np.maximum(exponents, -127))
        got = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        assert np.isnan(got[marked]).all() and (got == wanted)[~marked].all()
        exact = np.clip((blocks.T / wanted).T[~marked], -fmt.max, fmt.max).astype(np.float32)
        codes = exact.astype(ELEMENTS[name])
        mask = (1 << fmt.bits) - 1
        found = _elements(words, fmt.bits)[~marked]
        np.testing.assert_array_equal(found, codes.view(np.uint8) & mask)
        out = np.empty(n, np.float32)
        assert ops.decode_tiles(words, scales, fmt, out) == np.isnan(out).sum()
        back = np.full(blocks.shape, np.nan, np.float32)
        back[~marked] = (codes.astype(np.float64).T * wanted[~marked]).T
        np.testing.assert_array_equal(out, back.reshape(-1)[:n])


@every("name", ELEMENTS)
def test_mx_means_one_thing(name: str) -> None:
    """A tensor, a wire of one rank, and values that travel alone are rounded to the same bits."""
    x = np.random.default_rng(3).standard_normal(2000).astype(np.float32) * np.float32(1e9)
    tensor = TensorFormat.model_validate(name).round(x)
    np.testing.assert_array_equal(simulate([x], name), tensor)
    chosen = np.arange(x.size, dtype=np.uint32)
    _, sparse = decode_sparse(encode_sparse(chosen, x, x.size, name), x.size, name)
    np.testing.assert_array_equal(sparse, tensor)
    wire = packed_wire(name)
    assert wire is not None
    payload, out = np.zeros(wire.size_bytes(x.size), np.uint8), np.empty_like(x)
    wire.encode(x, None, (0, 0), 0, payload)
    assert wire.decode(payload, None, out) == 0
    np.testing.assert_array_equal(out, tensor)


SCALED = (*INTEGERS, *MICROSCALING)


@every("name", SCALED)
def test_formats_with_a_scale_are_taken_or_refused_with_the_reason(name: str) -> None:
    """Taken for tensors and wires; refused where a number stands alone."""
    x = np.float32([1, 2, 3])
    assert np.isfinite(TensorFormat.model_validate(name).round(x)).all()
    assert np.isfinite(_by_precision(x, name)).all()
    assert parse_wire(name) is not None and LowBit(wire=name).wire == name
    assert Rule(layers="*", weights=name, wire=name).wire == name  # type: ignore[arg-type]
    assert np.isfinite(simulate([x], name)).all()
    why = "32 neighbours share a scale" if name in MICROSCALING else "integers times a power of two"
    codes, square = np.zeros(3, np.uint8), np.ones((1, 1), np.float32)
    refused: list[Callable[[], Any]] = [
        lambda: parse_format(name),
        lambda: cpdhpc.quantize(x, name),
        lambda: cpdhpc.encode(x, name),
        lambda: cpdhpc.decode(codes, name),
        lambda: precision.matmul(square, square, accumulate=name),
        lambda: precision.matmul(square, square, inputs=name),
        lambda: precision.matmul(square, square, products=name),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=f"{re.escape(repr(name))}: .*{why}.*: .* take it"):
            call()


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parent.parent / "docs" / "explanation" / "kernels.md").read_text()
    for name in ("e4m3", "e4m3fn", "e2m1fn"):
        plain, saturated, _ = OVERFLOWS[name]
        row = f"| `{name}` | {str(plain).replace('inf', 'infinity').replace('nan', 'NaN')} |"
        assert row.replace(".0 ", " ") in page, row
        assert f"{saturated:g}" in page


def test_exact_zeros_rounded_down_are_negative() -> None:
    """IEEE 754-2019, 6.3: x + (-x) is -0 rounded down, else +0; both zeros +0 stay so."""
    a = np.float32([[1.5, -1.5], [0, 0], [0, -0.0]])
    b = np.ones((2, 1), np.float32)
    for how in ("e5m10", "e4m3", "e8m23", "e8m7", "e5m2"):
        for options in ({}, {"chunk": 1}, {"order": "pairwise"}):
            for rounding in ("down", "up", "nearest", "zero"):
                got = precision.matmul(a, b, accumulate=how, rounding=rounding, **options)
                wanted = [True, False, True] if rounding == "down" else [False] * 3
                assert not got.any() and np.signbit(got[:, 0]).tolist() == wanted, (how, rounding)


def test_tables_keep_the_power_of_two_below_the_normal_numbers(ops: Any) -> None:
    """2**-127 is a float32 with one bit, which the search once took for zero."""
    fmt, x = parse_format("posit8es1"), np.float32([2.0**-127, -(2.0**-127), 2.0**-128])
    for k in (0, 100, 127):
        wanted = reference.encode(x, Cast(fmt), shift=k)
        np.testing.assert_array_equal(ops.encode(x, Cast(fmt), shift=k), wanted)
        assert wanted.all()

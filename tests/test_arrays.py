"""The public array functions over NumPy and torch: results, kinds, shapes and errors."""

import re
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from every import every
from refusing import refused

import cpdhpc
from cpdhpc.formats import Cast, FloatFormat, parse_format
from cpdhpc.ops import reference
from cpdhpc.randomness import random_key

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in ldexp")  # in gfloat

KINDS = ["numpy", "torch", pytest.param("cupy", marks=pytest.mark.gpu)]
WIDTHS = {"e2m1fn": "uint8", "e4m3": "uint8", "e4m4": "uint16", "fp16": "uint16", "e6m10": "uint32"}


class Kind:
    """Makes arrays of one kind and turns them back into NumPy's."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module

    def make(self, array: np.ndarray) -> Any:
        return self.module.from_numpy(array) if self.name == "torch" else self.module.array(array)

    def back(self, array: Any) -> np.ndarray:
        assert type(array).__module__.partition(".")[0] == self.name
        return array.get() if self.name == "cupy" else np.asarray(array)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "cupy":
        return Kind("cupy", request.getfixturevalue("cupy"))
    return Kind(request.param, pytest.importorskip(request.param))


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32) * 3


@every("shape", [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (2, 3, 700)])
def test_quantize_keeps_kind_shape_and_input(kind: Kind, shape: tuple[int, ...]) -> None:
    x = np.asarray(values(*shape), np.float32)
    given = kind.make(x.copy())
    got = kind.back(cpdhpc.quantize(given, "e4m3"))
    assert got.dtype == np.float32 and got.shape == shape
    expected = oracles.gfloat_round(x.reshape(-1), parse_format("e4m3")).reshape(shape)
    assert np.array_equal(got, expected)
    assert np.array_equal(kind.back(given), x)


@every("name", [*oracles.ML_DTYPES, "e3m4", "e6m9"])
def test_quantize_rounds_to_the_nearest_number(kind: Kind, name: str) -> None:
    x, fmt = oracles.structured(0, 65536, oracles.SIXTEEN_LOWS[2:3]), parse_format(name)
    x = x[np.isfinite(x)] if fmt.special == "none" else x
    got = kind.back(cpdhpc.quantize(kind.make(x), fmt))
    assert np.array_equal(got, oracles.gfloat_round(x, fmt), equal_nan=True)


def test_rounding_overflow_shift_and_seed(kind: Kind) -> None:
    x, fmt = values(3000), parse_format("e3m2")
    for rounding, overflow, shift, seed in (
        ("zero", "inf", 0, 0),
        ("nearest", "saturate", 5, 0),
        ("stochastic", "inf", -2, 7),
    ):
        cast = Cast(fmt, rounding, overflow)  # type: ignore[arg-type]
        codes = reference.encode(x, cast, shift, random_key(seed))
        words = {"rounding": rounding, "overflow": overflow, "shift": shift, "seed": seed}
        given = kind.make(x)
        assert np.array_equal(kind.back(cpdhpc.encode(given, "e3m2", **words)), codes)
        quantized = kind.back(cpdhpc.quantize(given, "e3m2", **words))
        assert np.array_equal(quantized, reference.decode(codes, fmt, shift))
    draws = [kind.back(cpdhpc.encode(kind.make(x), fmt, "stochastic", seed=s)) for s in (1, 1, 2)]
    assert np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])


@every(("name", "dtype"), WIDTHS.items())
def test_codes_go_round_through_packing(kind: Kind, name: str, dtype: str) -> None:
    fmt, x = parse_format(name), values(5, 411)
    codes = cpdhpc.encode(kind.make(x), name)
    plain = kind.back(codes)
    assert plain.dtype == dtype and plain.shape == x.shape
    packed = cpdhpc.pack(codes, fmt.bits)
    assert kind.back(packed).tobytes() == oracles.pack_integers(plain.reshape(-1), fmt.bits)
    unpacked = cpdhpc.unpack(packed, fmt.bits, x.size)
    assert kind.back(unpacked).dtype == dtype
    assert np.array_equal(kind.back(unpacked), plain.reshape(-1))
    assert np.array_equal(
        kind.back(cpdhpc.decode(codes, name)), kind.back(cpdhpc.quantize(kind.make(x), name))
    )


def test_arrays_that_are_not_contiguous(kind: Kind) -> None:
    x = values(40, 60)
    given = kind.make(x)
    for view, plain in ((given.T, x.T), (given[::3, 1::7], x[::3, 1::7]), (given[5], x[5])):
        got = kind.back(cpdhpc.quantize(view, "e5m2"))
        assert np.array_equal(got, oracles.gfloat_round(plain.copy(), parse_format("e5m2")))
        codes = kind.back(cpdhpc.encode(view, "e5m2"))
        assert np.array_equal(
            codes.view(np.uint8), kind.back(cpdhpc.encode(kind.make(plain.copy()), "e5m2"))
        )


def test_gradients_go_through_quantize_unchanged() -> None:
    """Of values that saturate or become infinite too; derivatives of any order, in both modes."""
    parameter = torch.nn.Parameter(torch.tensor([1.1, 2.6, 1e9]))
    got = cpdhpc.quantize(parameter, "e5m2")
    assert type(got) is torch.Tensor and got.tolist() == [1.0, 2.5, np.inf]
    got.backward(torch.tensor([0.1, -7.0, 3.0]))
    assert torch.equal(parameter.grad, torch.tensor([0.1, -7.0, 3.0]))

    def cubed(x: Any) -> Any:
        return cpdhpc.quantize(x, "e5m2").pow(3).sum()

    x = torch.tensor([1.1, 2.6])  # rounded to 1 and 2.5
    slope = torch.tensor([3.0, 18.75])
    assert torch.equal(torch.func.grad(cubed)(x), slope)
    assert torch.equal(torch.func.jvp(cubed, (x,), (torch.ones(2),))[1], slope.sum())
    twice = torch.func.grad(lambda x: torch.func.grad(cubed)(x).sum())
    assert torch.equal(twice(x), torch.tensor([6.0, 15.0]))
    with torch.no_grad():
        assert not cpdhpc.quantize(parameter, "e5m2").requires_grad
    with pytest.raises(TypeError, match=r"x is torch\.Tensor of torch\.strided, whose val"):
        torch.func.vmap(lambda x: cpdhpc.quantize(x, "e5m2"))(x)


def test_where_a_gradient_would_be_lost_is_an_error() -> None:
    x = torch.nn.Parameter(torch.tensor([1.0, 2.5]))
    says = "x requires a gradient, which would be lost: pass its .detach(), or call within "
    with pytest.raises(TypeError, match=f"^encode: {re.escape(says)}"):
        cpdhpc.encode(x, "e5m2")
    with torch.no_grad():
        codes = cpdhpc.encode(x, "e5m2")
    assert torch.equal(codes, cpdhpc.encode(x.detach(), "e5m2"))
    with refused("allreduce", "x", ".detach()") as caught:
        cpdhpc.allreduce(cpdhpc.Loopback(), x)
    assert "Parameter" in caught.value.state and "requires a gradient" in caught.value.state
    with refused("allreduce", "out", ".detach()"):
        cpdhpc.allreduce(cpdhpc.Loopback(), x.detach(), out=x)
    with torch.no_grad():
        assert cpdhpc.allreduce(cpdhpc.Loopback(2), [x, x], out=x) is x
    assert x.tolist() == [2.0, 5.0]
    loss = x.square().sum()
    with torch.no_grad():
        cpdhpc.allreduce(cpdhpc.Loopback(2), [x, x], out=x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for function, words in ((cpdhpc.quantize, ("e5m2",)), (cpdhpc.encode, ("e5m2",))):
        with pytest.raises(TypeError, match=f"{function.__name__}: x is torch.Tensor of torch.sp"):
            function(torch.ones(2).to_sparse(), *words)


@every(
    "wrong, says",
    [
        ({"rounding": "u"}, "rounding='u': did you mean up?"),
        ({"overflow": 3}, "overflow=3: known are inf, saturate"),
        ({"random_bits": "a"}, "random_bits='a': must be an integer"),
        ({"shift": "a"}, "shift='a': must be an integer"),
        ({"seed": 1.5}, "seed=1.5: must be an integer"),
        ({"seed": 1 << 64}, "seed=18446744073709551616: must be below 18446744073709551616"),
    ],
)
def test_wrong_arguments_name_the_function(wrong: dict[str, Any], says: str) -> None:
    for function in (cpdhpc.quantize, cpdhpc.encode):
        with refused(function.__name__, *wrong) as caught:
            function(values(5), "e4m3", **wrong)
        assert str(caught.value) == f"{function.__name__}: {says}"


@pytest.mark.parametrize("function", [cpdhpc.quantize, cpdhpc.encode])
def test_what_a_format_cannot_hold_is_an_error(kind: Kind, function: Any) -> None:
    for name, special in (
        ("e2m1fn", np.nan),
        ("e2m3fn", -np.inf),
        ("e3m2fn", np.inf),
        ("e3m0", np.nan),
    ):
        x = values(2000)
        x[1999] = special
        what = "NaN" if np.isnan(special) else "infinity"
        message = f"^{function.__name__}: x holds {what}, and {name} has no code for it"
        with pytest.raises(ValueError, match=message):
            function(kind.make(x), name)


def test_nonfinite_values_that_a_format_holds(kind: Kind) -> None:
    x = kind.make(np.array([np.inf, -np.inf, np.nan], np.float32))
    assert kind.back(cpdhpc.quantize(x, "e5m2", "nearest", "saturate"))[:2].tolist() == [
        np.inf,
        -np.inf,
    ]
    assert np.isnan(kind.back(cpdhpc.quantize(x, "e5m2"))[2])
    assert np.isnan(kind.back(cpdhpc.quantize(x, "e4m3fn"))).all()  # has NaN, but no infinity
    assert np.isinf(kind.back(cpdhpc.quantize(x[:2], "e3m0"))).all()


X, CODES = values(4), np.zeros(4, np.uint8)
IN = "allowed are float32 in"
GIVEN: list[tuple[Any, str]] = [
    ([1.0], f"list: {IN}"),
    (1.0, f"float: {IN}"),
    (np.ones(2), rf"numpy\.ndarray of float64: {IN}"),
    (np.ones(2, ">f4"), rf"numpy\.ndarray of >f4: {IN}"),
    (np.ones(2, np.float16), rf"numpy\.ndarray of float16: {IN}"),
    (np.float32(1), rf"numpy\.float32: {IN}"),
    (np.ones(2, np.int32), rf"numpy\.ndarray of int32: {IN}"),
    (torch.ones(2, dtype=torch.bfloat16), rf"torch\.Tensor of bfloat16: {IN}"),
    (torch.ones(2, device="meta"), rf"torch\.Tensor of float32 on meta: {IN}"),
    (torch.ones(2).to_sparse(), r"torch\.Tensor of .*: should be a dense"),
]
WIDE, SHORT = np.ones(2, np.int64), np.ones(2, np.uint16)


@every(
    "name, given, said",
    [
        *((n, (x, "e5m2"), f"x is {said}") for n in ("quantize", "encode") for x, said in GIVEN),
        ("decode", (WIDE, "e5m2"), r"codes is numpy\.ndarray of int64: allowed are uint8, "),
        ("pack", (WIDE, 8), r"codes is numpy\.ndarray of int64: allowed are uint8, "),
        ("unpack", (SHORT, 8, 2), r"packed is numpy\.ndarray of uint16: allowed are uint8 in"),
    ],
)
def test_other_arrays_are_type_errors(name: str, given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: {said}"):
        getattr(cpdhpc, name)(*given)


def test_subclasses_of_tensors_are_tensors_and_nested_ones_refused() -> None:
    with pytest.raises(TypeError, match=r"^quantize: x is torch\.Tensor of .*: should be a dense"):
        cpdhpc.quantize(torch.nested.nested_tensor([torch.ones(2)]), "e5m2")
    x = torch.ones(2).as_subclass(type("Somebodys", (torch.Tensor,), {}))
    assert cpdhpc.quantize(x, "e5m2").tolist() == [1.0, 1.0]


def test_codes_out_of_range_are_errors(kind: Kind) -> None:
    codes = kind.make(np.array([0, 15, 16], np.uint8))
    for name, how in (("decode", "e2m1fn"), ("pack", 4)):
        said = f"^{name}: codes: 16 is too large: 4 bits allow 0..15"
        with pytest.raises(ValueError, match=said):
            getattr(cpdhpc, name)(codes, how)
    assert cpdhpc.pack(codes[:2], 4).shape == (512,)
    top = kind.make(np.array([2**32 - 1], np.uint32))
    assert kind.back(cpdhpc.unpack(cpdhpc.pack(top, 32), 32, 1)).tolist() == [2**32 - 1]


@every(
    "name, array, given, allowed",
    [
        ("quantize", X, {"shift": 1, "fmt": "bf16"}, "bf16 allows 0..0"),
        ("decode", CODES, {"shift": -200, "fmt": "e5m2"}, "e5m2 allows -112..127"),
        ("quantize", X, {"rounding": "upwards", "fmt": FloatFormat(5, 2)}, "known are down"),
        *(("pack", CODES, {"bits": bits}, "1..32 is") for bits in (0, 33, -1)),
        *(("unpack", CODES, {"bits": bits, "n": 4}, "1..32 is") for bits in (0, 33, -1)),
        *(("pack", CODES, {"bits": bits}, "must be an int") for bits in ("3", None, 3.0, True)),
        ("unpack", CODES, {"n": "4", "bits": 8}, "must be an integer"),
        ("unpack", CODES, {"n": -1, "bits": 8}, "0 or more"),
    ],
)
def test_arguments_out_of_range_are_errors(
    name: str, array: Any, given: dict[str, Any], allowed: str
) -> None:
    with refused(name, next(iter(given))) as caught:
        getattr(cpdhpc, name)(array, **given)
    assert allowed in caught.value.allowed


def test_formats_and_sizes_that_are_wrong_are_errors() -> None:
    for call, said in (
        (lambda: cpdhpc.unpack(CODES, 8, 4), "packed has 4 bytes: n=4 codes of 8 bits take 1024"),
        (lambda: cpdhpc.quantize(X, "fp8"), "quantize: 'fp8'"),
        (lambda: cpdhpc.quantize(X, "e4m33"), r"^quantize: exp=4, man=33: exp is 1\.\.8"),
    ):
        with pytest.raises(ValueError, match=said):
            call()

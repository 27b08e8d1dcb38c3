"""Tensors in formats with scales: ml_dtypes, exact fractions and the recipes, told again here."""

import math
from collections import deque
from fractions import Fraction
from statistics import fmean, pstdev
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from every import every

from cpdhpc.config import ConfigError, validate
from cpdhpc.torch import GradientReducer
from cpdhpc.torch.precision.arithmetic import Quantizer
from cpdhpc.torch.precision.tensors import TensorFormat
from cpdhpc.world.ranks import Loopback

Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng
DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "bf16": ml_dtypes.bfloat16,
}
ELEMENTS = {"mxfp8": "e4m3fn", "mxfp8-e5m2": "e5m2", "mxfp6": "e2m3fn", "mxfp4": "e2m1fn"}


def tensor_format(**table: Any) -> TensorFormat:
    return validate(TensorFormat, table, "here")


def rounded(x: Array, name: str) -> Array:
    """To the format of ml_dtypes, to nearest, what is too large being the largest number."""
    dtype = DTYPES[name]
    most = np.float32(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -most, most).astype(dtype).astype(np.float32)


def values(seed: int, shape: tuple[int, ...] = (7, 45), spread: float = 6.0) -> Array:
    rng = RNG(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-spread, spread, shape)).astype("f4")


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@every("name", ["e4m3fn", "e5m2", "e2m1fn"])
def test_amax_and_delayed_scales_are_those_of_the_recipe(name: str) -> None:
    """float32's fmt.max / amax / 2^margin, of this tensor or of the last ones; multiplied, rounded,
    and multiplied by the inverse."""
    top = np.float32(ml_dtypes.finfo(DTYPES[name]).max)

    def expected(x: Array, amax: np.float32, margin: int) -> Array:
        scale = top / amax / np.float32(2**margin)
        return rounded(x * scale, name) * (np.float32(1) / scale)

    for margin in (0, 2):
        x = values(margin)
        now = tensor_format(format=name, scaling="amax", margin=margin)
        assert same(now.round(x), expected(x, np.abs(x).max(), margin))
    for expect in ("max", "recent"):
        how = tensor_format(format=name, scaling="delayed", history=3, margin=1, expect=expect)
        state, past = how.state(), deque[np.float32](maxlen=3)
        for call in range(8):
            x = values(10 + call) * np.float32(4.0 ** RNG(call).integers(-6, 6))
            known = (max(past) if expect == "max" else past[-1]) if past else np.abs(x).max()
            found = how.round(x, state=state, learns=call != 5)  # an evaluation teaches nothing
            assert same(found, expected(x, known, 1)), (expect, call)
            if call != 5:
                past.append(np.abs(x).max())


def blocks_of_ocp(x: Array, name: str, block: int) -> Array:
    """Section 6.3, along the last axis: 2^(floor(log2 amax) - emax) is divided by."""
    out = np.empty_like(x)
    emax = math.frexp(float(ml_dtypes.finfo(DTYPES[name]).max))[1] - 1
    for row, into in zip(x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1]), strict=True):
        for at in range(0, len(row), block):
            part = row[at : at + block]
            largest = float(np.abs(part).max())
            scale = 2.0 ** (math.frexp(largest)[1] - 1 - emax) if largest else 1.0
            into[at : at + block] = rounded((part / scale).astype("f4"), name) * np.float32(scale)
    return out


@every("wire", ELEMENTS)
def test_blocks_have_the_power_of_two_of_ocp(wire: str) -> None:
    x = values(3, (3, 70, 5))
    x[0, :33, 0] = 0
    along_rows = blocks_of_ocp(np.ascontiguousarray(np.moveaxis(x, 1, 2)), ELEMENTS[wire], 32)
    assert same(tensor_format(format=wire).round(x, axis=1), np.moveaxis(along_rows, 2, 1).copy())
    long = values(4, (40, 100))  # several tiles of the kernels
    sixteen = tensor_format(format=ELEMENTS[wire], scaling="block16")
    assert same(sixteen.round(long), blocks_of_ocp(long, ELEMENTS[wire], 16))
    # 1.96875 * 2^8 is above e4m3's largest number, and below the next power of two: it saturates.
    most = float(ml_dtypes.finfo(DTYPES[ELEMENTS[wire]]).max)
    edge = np.float32(1.96875 * 2.0 ** math.floor(math.log2(most)))
    assert tensor_format(format=wire).round(np.array([edge]))[0] == most


def grid(x: Array, bits: int, shift: int) -> Array:
    """To nearest multiple of 2^-shift with ties to even, within +-(2^(bits - 1) - 1) of them."""
    most = 2 ** (bits - 1) - 1
    whole = [max(-most, min(most, round(Fraction(float(v)) * Fraction(2) ** shift))) for v in x]
    exact = np.array([float(Fraction(n) / Fraction(2) ** shift) for n in whole], np.float32)
    return np.copysign(exact, x)  # zeros keep their sign


def test_aps_takes_the_largest_power_of_two_that_fits() -> None:
    for seed in range(4):
        x = values(seed, (50,))
        amax = Fraction(float(np.abs(x).max()))
        shift = max(k for k in range(-40, 60) if amax * Fraction(2) ** k <= 127)
        assert same(tensor_format(format="int8", scaling="aps").round(x), grid(x, 8, shift))


def test_fixed_point_follows_the_share_that_overflows() -> None:
    """Courbariaux: of the calls of an interval, above the rate doubled, else halved where half
    the limit would do as well."""
    rate, limit = 0.1, 8  # |x| < 2^limit
    how = tensor_format(
        format="int10", scaling="fixed", history=2, exponent=limit, overflow_rate=rate
    )
    state, shares, limits = how.state(), [[], []], []
    for call in range(40):
        x = values(call, (60,), 1.0) * np.float32(1 if call < 24 else 64)
        if len(shares[0]) == 2:
            above, above_half = (fmean(each) for each in shares)
            limit += 1 if above > rate else -1 if above_half <= rate else 0
            shares = [[], []]
        assert same(how.round(x, state=state, learns=True), grid(x, 10, 9 - limit)), call
        for row, half in zip(shares, (0, 1), strict=True):
            row.append(fmean(abs(float(v)) > 511 * 2.0 ** (limit - 9 - half) for v in x))
        limits.append(limit)
    assert limits[0] == 8 and min(limits) <= 2 and limits[-1] >= min(limits) + 4
    begins = tensor_format(format="int10", scaling="fixed")
    state = begins.state()
    begins.round(np.zeros(3, np.float32), state=state, learns=True)  # says nothing
    x = np.array([5.0, -1.0, 0.3], np.float32)
    assert same(begins.round(x, state=state, learns=True), grid(x, 10, 6))
    assert same(begins.round(x / 4, state=state, learns=True), grid(x / 4, 10, 6))


def test_fixed_point_begins_where_a_warm_up_in_float32_says() -> None:
    """Courbariaux's first scales: numbers of the first calls fit, though the first one is small."""
    how = tensor_format(format="int10", scaling="fixed", warmup=3)
    state = how.state()
    for size in (0.0, 5.0, 0.7):
        x = np.array([size, -size / 3], np.float32)
        assert same(how.round(x, state=state, learns=False), x)  # evaluation does not count
        assert same(how.round(x, state=state, learns=True), x)
    x = np.array([7.9, -0.3, 1e-4], np.float32)
    assert same(how.round(x, state=state, learns=True), grid(x, 10, 6))
    with pytest.raises(ConfigError, match="warmup and exponent: set only one"):
        tensor_format(format="int10", scaling="fixed", warmup=3, exponent=1)
    with pytest.raises(ConfigError, match="warmup needs scaling fixed"):
        tensor_format(format="int10", scaling="aps", warmup=3)


def test_flexpoint_expects_mean_and_deviations_of_saturated_maxima() -> None:
    how = tensor_format(format="int16", scaling="flexpoint", history=4)
    state, past, saturated = how.state(), deque[float](maxlen=4), 0
    for call in range(14):
        x = values(call, (40,), 1.0) * np.float32(1 if call < 8 else 2.0 ** (3 * (call - 7)))
        amax = float(np.abs(x).max())
        expected = 2 * (fmean(past) + 3 * pstdev(past)) if past else amax
        k = max(k for k in range(-60, 60) if Fraction(expected) * Fraction(2) ** k <= 32767)
        assert same(how.round(x, state=state, learns=True), grid(x, 16, k)), call
        saturated += amax > 32767 * 2.0**-k
        past.append(float(np.float32(min(amax, 32767 * 2.0**-k))))
    assert 0 < saturated < 7  # it follows what grows eightfold a call


INF, NAN = np.inf, np.nan


@every("scaling", ["none", "amax", "delayed", "aps", "fixed", "flexpoint"])
@every(
    ("name", "becomes"),
    [
        ("e5m2", (INF, -INF, NAN)),
        ("e4m3fn", (NAN,) * 3),
        ("int8", (NAN,) * 3),
        ("posit8", (NAN,) * 3),
    ],
)
def test_what_is_not_finite_stays_so_and_teaches_nothing(
    scaling: str, name: str, becomes: tuple[float, ...]
) -> None:
    if name == "int8" and scaling == "none":
        return
    how = tensor_format(format=name, scaling=scaling)
    x = np.array([1.0, INF, -INF, NAN, -1.0], np.float32)
    state = how.state()
    found = how.round(x, state=state, learns=True)
    assert np.array_equal(found[1:4], np.array(becomes, np.float32), equal_nan=True)
    assert found[0] == -found[4] == pytest.approx(1, rel=2**-6)  # int8: 127 / 128
    assert np.isfinite(how.round(np.ones(3, np.float32), state=state)).all()
    assert how.round(np.zeros((0, 3), np.float32), state=state).shape == (0, 3)
    assert not how.round(np.zeros(3, np.float32)).any()


def test_what_outgrows_a_delayed_scale_is_too_large_and_not_infinite() -> None:
    how = tensor_format(format="e4m3fn", scaling="delayed", overflow="saturate")
    state = how.state()
    how.round(np.full(2, 1e-30, np.float32), state=state, learns=True)
    found = how.round(np.array([1e30, -1e30], np.float32), state=state)
    assert found == pytest.approx([1e-30, -1e-30], rel=2**-20)
    extremes = np.array([3.4e38, 1e-45], np.float32)
    assert np.isfinite(tensor_format(format="e4m3fn", scaling="amax").round(extremes)).all()
    marked = tensor_format(format="mxfp8").round(np.array([1.0, INF] + [1.0] * 31, np.float32))
    assert np.isnan(marked[:32]).all() and marked[32] == 1


def test_stochastic_numbers_come_from_torch_in_training_and_from_the_name_else() -> None:
    how = tensor_format(format="e4m3fn", scaling="aps", rounding="stochastic")
    x = torch.full((20000,), 0.3)
    a, b = Quantizer(how, "a"), Quantizer(how, "b")
    torch.manual_seed(5)
    first, second = a(x), a(x)
    torch.manual_seed(5)
    assert torch.equal(b(x), first) and not torch.equal(first, second)
    low, high = 0.28125, 0.3125
    assert set(first.tolist()) == {low, high}
    # Six standard deviations of a mean of 20,000 draws of low or high.
    p = (0.3 - low) / (high - low)
    assert abs(float(first.mean()) - 0.3) < 6 * (high - low) * math.sqrt(p * (1 - p) / 20000)
    a.eval(), b.eval()
    before = torch.get_rng_state()
    assert torch.equal(a(x), a(x)) and not torch.equal(a(x), b(x))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_quantizer_takes_strides_and_refuses_what_it_cannot_round() -> None:
    x = torch.from_numpy(values(1)).t()
    quantizer = Quantizer(tensor_format(format="mxfp4"), "fc.weights")
    by_hand = torch.from_numpy(tensor_format(format="mxfp4").round(x.contiguous().numpy(), axis=0))
    assert torch.equal(quantizer(x, axis=0), by_hand)
    assert quantizer(torch.ones(1).expand(3, 4)).tolist() == [[1.0] * 4] * 3
    with pytest.raises(
        TypeError, match=r"fc\.weights is torch\.Tensor of float64: allowed are float32"
    ):
        quantizer(x.double())
    assert Quantizer(tensor_format(), "x")(x) is x


class Looking(torch.nn.Module):
    """A layer that rounds what comes in, and goes on with it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(1, 1)
        how = tensor_format(format="e4m3", scaling="delayed", history=3)
        self.scale = Quantizer(how, "x")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale(x)
        return self.fc(x)


@pytest.mark.parametrize("mode", ["broadcast", "mean"])
def test_ranks_share_the_largest_of_what_scales_have_seen(mode: Any) -> None:
    """Of virtual ranks, of which one is without samples in a step, as an epoch may end."""
    model = Looking()
    reducer = GradientReducer(model, Loopback(3), buffers=mode)
    for step in ([1.0, -8.0, 2.0], [4.0, 0.5, None], [0.25, 0.25, 0.125]):
        for hosted, x in enumerate(step):
            reducer.begin(hosted)
            model.zero_grad()
            if x is not None:
                model(torch.full((2, 1), x)).sum().backward()
            reducer.stash(hosted)
        reducer.reduce()
    state = model.scale.state_dict()["scale_state"]
    assert state.tolist() == [3, 8, 4, 0.25]


def test_states_are_in_checkpoints_and_one_without_loads() -> None:
    model, other = Looking(), Looking()
    model(torch.full((1, 1), 3.0))
    saved = model.state_dict()
    other.load_state_dict(saved)
    assert other.scale.state_dict()["scale_state"].tolist() == [1, -1, -1, 3]
    plain = {key: value for key, value in saved.items() if key.startswith("fc.")}
    other.load_state_dict(plain)
    assert other.scale.state_dict()["scale_state"].tolist() == [0, -1, -1, -1]
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(plain | {"scale.scale_state": torch.zeros(2)})


@every(
    ("table", "said"),
    [
        ({"format": "f9m1"}, r"format='f9m1': .*known are eXmY"),
        ({"format": "raw"}, "format='raw': 'raw' is not a format"),
        ({"format": "e4m3", "scaling": "dleayed"}, "did you mean delayed"),
        ({"format": "e4m3", "margin": 1}, "margin needs scaling amax or delayed, but it is none"),
        ({"scaling": "aps"}, "fp32 is not rounded: must be none"),
        ({"format": "mxfp8", "scaling": "none"}, "mxfp8 has block32: for another one use e4m3fn"),
        ({"format": "mxfp4", "scaling": "aps"}, "scaling='aps': mxfp4 has block32"),
        ({"format": "e4m3", "rounding": "up-ish"}, "rounding"),
        ({"format": "e4m3", "random_bits": 3}, "random_bits=3: e4m3 allows"),
        ({"format": "e4m3", "scaling": "delayed", "history": 0}, "history=0"),
    ],
)
def test_bad_tables_are_one_line(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        tensor_format(**table)
    assert "\n" not in str(error.value)


def test_a_name_alone_is_a_format_and_mx_names_have_blocks() -> None:
    assert TensorFormat.model_validate("e4m3") == tensor_format(format="e4m3")
    assert TensorFormat.model_validate("mxfp4").scaling == "block32"
    assert tensor_format(format="mxfp4", scaling="block32").scaling == "block32"

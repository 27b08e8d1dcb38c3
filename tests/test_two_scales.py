"""NVFP4 has the bits of its definition, computed anew with ml_dtypes, on CPU, GPU and wires."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import cpdhpc
from cpdhpc.collectives.allreduce import Allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.compress import COMPRESSORS
from cpdhpc.compress.base import Mean
from cpdhpc.compress.bucket import Bucket
from cpdhpc.compress.payload import encode_sparse
from cpdhpc.formats import IN_BLOCKS, NVFP4, Cast, nvfp4_blocks, parse_format, wire_format
from cpdhpc.lab.verify.outcomes import OnGpu
from cpdhpc.ops import cpu, reference
from cpdhpc.ops.payloads import TwoScaled
from cpdhpc.torch.precision.tensors import TensorFormat
from cpdhpc.world.ranks import Loopback

SIZES = (1, 15, 16, 17, 500, 4096, 5003)
NEAREST = Cast(parse_format("e2m1fn"))


def values(n: int, kind: str) -> np.ndarray:
    """Return float32[n]: what scales and elements may be wrong about."""
    draw = np.random.default_rng((n, len(kind)))
    x = draw.normal(size=n).astype(np.float32)
    spread = {"wide": 30, "largest": 0, "tiny": 0}.get(kind, 2)
    x *= np.exp2(draw.integers(-spread, spread + 1, n)).astype(np.float32)
    if kind == "largest":
        x *= np.float32(3e37)
    elif kind == "tiny":
        x *= np.float32(1e-40)
    elif kind == "zeros":
        x[:] = 0
        x[::2] = -0.0
    elif kind == "ties":  # elements of 0.25, 0.75, ... 5, and a block's largest
        x = draw.choice(np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], np.float32), n)
        x[::16] = 6
    return x


KINDS = ("normal", "wide", "largest", "tiny", "zeros", "ties")


def defined(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32, np.ndarray]:
    """Return elements, scales, the scale of all and the numbers, by arXiv 2509.25149."""
    blocks = np.pad(x, (0, -x.size % 16)).reshape(-1, 16)
    with np.errstate(over="ignore", divide="ignore"):
        all_of = np.abs(x).max(initial=0)
        s_enc = np.float32(2688) / all_of if all_of else np.float32(1)
        s_enc = min(s_enc, np.float32(np.finfo(np.float32).max))
        s_dec = np.float32(1) / s_enc
        of_blocks = np.abs(blocks).max(1) / np.float32(6) * s_enc
        e4m3 = np.minimum(of_blocks, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        step = e4m3.astype(np.float32) * s_dec
        factor = np.minimum(np.float32(1) / step, np.float32(np.finfo(np.float32).max))
        scaled = np.clip(blocks * factor[:, None], -6, 6)
    elements = scaled.astype(ml_dtypes.float4_e2m1fn)
    nibbles = elements.view(np.uint8).reshape(-1) & 15
    with np.errstate(over="ignore"):
        numbers = (elements.astype(np.float32) * step[:, None]).reshape(-1)[: x.size]
    return nibbles[::2] | nibbles[1::2] << 4, e4m3.view(np.uint8), s_dec, numbers


def encoded(ops: Any, x: np.ndarray, cast: Cast = NEAREST, **how: Any) -> list[np.ndarray]:
    """Return words, scales, the scale and the numbers."""
    blocks = nvfp4_blocks(x.size)
    words, scales = np.zeros(8 * blocks, np.uint8), np.zeros(blocks, np.uint8)
    scale, out = np.zeros(1, np.float32), np.zeros(x.size, np.float32)
    ops.encode_two_scales(x, cast, words, scales, scale, **how)
    ops.decode_two_scales(words, scales, scale, out)
    return [words, scales, scale, out]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
def test_bits_are_those_of_the_definition(ops: Any, kind: str, n: int) -> None:
    x = values(n, kind)
    words, scales, scale, numbers = encoded(ops, x)
    expected = defined(x)
    assert (words.tobytes(), scales.tobytes(), scale[0]) == (
        expected[0].tobytes(), expected[1].tobytes(), expected[2],
    )  # fmt: skip
    assert numbers.tobytes() == expected[3].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "up", "odd"])
@pytest.mark.parametrize("kind", [*KINDS, "not finite"])
def test_gpus_have_the_bits_of_the_specification(cupy: Any, kind: str, rounding: Any) -> None:
    from cpdhpc.ops import gpu

    cast = Cast(parse_format("e2m1fn"), rounding)
    for n in SIZES:
        x = values(n, kind)
        if kind == "not finite":
            x[:: max(1, n // 3)] = np.nan
            x[n // 2] = -np.inf
        how = {"key": (3, 4), "offset": 2**32 - 5}
        found, expected = (encoded(ops, x, cast, **how) for ops in (OnGpu(gpu), reference))
        for mine, want in zip(found, expected, strict=True):
            both = np.isnan(mine) & np.isnan(want) if mine.dtype == np.float32 else False
            assert (np.where(both, 0, mine) == np.where(both, 0, want)).all()
        more, out = values(n, "normal"), np.zeros((2, n), np.float32)
        for ops, row in zip((OnGpu(gpu), reference), out, strict=True):
            ops.decode_two_scales(*expected[:3], row, more)
        assert np.array_equal(*out, equal_nan=True)


def test_a_block_that_is_not_finite_is_nan_and_others_stay() -> None:
    x = values(64, "normal")
    x[20], x[40] = np.nan, np.inf
    numbers = encoded(cpu, x)[3].reshape(4, 16)
    assert np.isnan(numbers[1:3]).all() and np.isfinite(numbers[[0, 3]]).all()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_tensors_are_rounded_by_blocks_along_an_axis(axis: int) -> None:
    x = values(3 * 37 * 21, "wide").reshape(3, 37, 21)
    found = TensorFormat(format="nvfp4").round(x, axis=axis)
    rows = np.moveaxis(x, axis, -1)
    padded = np.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[-1] % 16)))
    numbers = defined(padded.reshape(-1))[3].reshape(padded.shape)[..., : rows.shape[-1]]
    assert found.tobytes() == np.ascontiguousarray(np.moveaxis(numbers, -1, axis)).tobytes()


def test_payloads_have_elements_scales_and_a_float32_in_this_order() -> None:
    wire = TwoScaled(Cast(NVFP4))
    for n in (0, *SIZES):
        x = values(n, "normal")
        payload = np.full(wire.size_bytes(n), 0xA5, np.uint8)
        wire.encode(x, None, (0, 0), 0, payload)
        if not n:
            continue
        words, scales, scale, numbers = defined(x)
        padding = np.zeros(-scales.size % 4, np.uint8)
        parts = [words, scales, padding, np.array([scale]).view(np.uint8)]
        assert payload.tobytes() == np.concatenate(parts).tobytes()
        out = np.empty(n, np.float32)
        assert wire.decode(payload, None, out) == 0 and out.tobytes() == numbers.tobytes()
    assert wire.size_bytes(1024) == 1024 * 9 // 16 + 4


def test_a_compressor_counts_what_becomes_zero() -> None:
    x = values(4096, "wide")
    bucket = Bucket(("a", "b"), ((1024,), (3072,)), 1024)
    lost = COMPRESSORS["lowbit"](wire="nvfp4").observe(x, bucket, Mean(x, {}))
    zeros = (defined(x)[3] == 0) & (x != 0)
    assert lost["underflow_share"].tolist() == [zeros[:1024].sum(), zeros[1024:].sum()]
    assert zeros.any() and not lost["saturated_share"].any()


@pytest.mark.parametrize("algorithm", ["ring", "direct", "rhd", "hier", "gather"])
def test_sums_are_those_of_a_wire_of_blocks(algorithm: str) -> None:
    """Three roundings at most: each is off by a sixth of a value, or of a step of its block."""
    xs = [values(3000, "normal") for _ in range(4)]
    got = simulate(xs, "nvfp4", algorithm, nodes=(0, 0, 1, 1))
    exact, largest = np.sum(xs, 0), sum(np.abs(x).max() for x in xs)
    assert np.abs(got - exact).max() <= 4 * largest / 6
    with pytest.raises(NonFiniteGradient):
        simulate([x * np.float32(np.nan) for x in xs], "nvfp4", algorithm, nodes=(0, 0, 1, 1))
    again = Allreduce("nvfp4", algorithm).run(Loopback(4), xs).arrays
    assert all(each.tobytes() == again[0].tobytes() for each in again)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Allreduce("nvfp4", accumulate="exact"), "accumulate='exact'"),
        (lambda: Allreduce("nvfp4", accumulate="grow"), "accumulate='grow'"),
        (lambda: COMPRESSORS["topk"](wire="nvfp4"), "goes with all-reduces"),
        (lambda: Allreduce("nvfp4", scaling="tile"), "is scaled by block16"),
        (lambda: parse_format("nvfp4"), "16 neighbours share a scale"),
        (lambda: TensorFormat(format="nvfp4", scaling="block32"), "nvfp4 has block16"),
        (
            lambda: encode_sparse(np.zeros(1, np.uint32), np.zeros(1, np.float32), 3, "nvfp4"),
            "goes with all-reduces",
        ),
    ],
)
def test_what_nvfp4_does_not_go_with_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
    assert wire_format("nvfp4") == NVFP4


MX = {  # elements, their largest exponent
    "mxfp8": (ml_dtypes.float8_e4m3fn, 8),
    "mxfp8-e5m2": (ml_dtypes.float8_e5m2, 15),
    "mxfp4": (ml_dtypes.float4_e2m1fn, 2),
}


def written_elsewhere(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return elements, scales and numbers of MX as ml_dtypes has them: what others write."""
    dtype, emax = MX[name]
    blocks = x.reshape(-1, 32)
    exponents = np.floor(np.log2(np.maximum(np.abs(blocks).max(1), 2.0**-126))) - emax
    scales = np.exp2(exponents).astype(ml_dtypes.float8_e8m0fnu)
    most = float(ml_dtypes.finfo(dtype).max)
    scaled = blocks * np.exp2(-exponents)[:, None].astype(np.float32)
    elements = np.clip(scaled, -most, most).astype(dtype)
    numbers = elements.astype(np.float32) * scales.astype(np.float32)[:, None]
    codes = elements.view(np.uint8).reshape(*x.shape[:-1], -1)
    if name == "mxfp4":
        codes = codes[..., ::2] & 15 | codes[..., 1::2] << 4
    return codes, scales.view(np.uint8).reshape(*x.shape[:-1], -1), numbers.reshape(x.shape)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_bytes_of_mx_are_those_of_other_libraries(name: str, rows: int) -> None:
    """Read from what ml_dtypes writes, and written as it does."""
    x = values(rows * 96, "wide").reshape(rows, 96)
    elements, scales, numbers = written_elsewhere(x, name)
    assert cpdhpc.unpack_blocks(elements, scales, name).tobytes() == numbers.tobytes()
    found = cpdhpc.pack_blocks(x, name)
    assert found.elements.tobytes() == elements.tobytes() and found.elements.shape[0] == rows
    assert found.scales.tobytes() == scales.tobytes() and found.scale is None


def test_bytes_of_nvfp4_are_those_of_its_definition() -> None:
    x = values(7 * 48, "wide").reshape(7, 48)
    words, scales, scale, numbers = defined(x.reshape(-1))
    found = cpdhpc.pack_blocks(torch.from_numpy(x), "nvfp4")
    assert found.elements.numpy().tobytes() == words.tobytes()
    assert found.scales.numpy().tobytes() == scales.tobytes() and found.scale.item() == scale
    again = cpdhpc.unpack_blocks(found.elements, found.scales, "nvfp4", found.scale)
    assert again.shape == (7, 48) and again.numpy().tobytes() == numbers.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_on_gpus_have_the_bytes_of_the_cpu(cupy: Any, name: str) -> None:
    x = values(40 * 96, "wide").reshape(40, 96)
    found, expected = cpdhpc.pack_blocks(cupy.asarray(x), name), cpdhpc.pack_blocks(x, name)
    for mine, want in zip(found, expected, strict=True):
        assert (mine is want is None) or mine.get().tobytes() == want.tobytes()
    again = cpdhpc.unpack_blocks(found[0], found[1], name, found[2])
    numbers = cpdhpc.unpack_blocks(expected[0], expected[1], name, expected[2])
    assert again.get().tobytes() == numbers.tobytes()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cpdhpc.pack_blocks(np.zeros(32, "f4"), "e4m3"), "fmt='e4m3': must be one of"),
        (lambda: cpdhpc.pack_blocks(np.zeros((2, 33), "f4"), "mxfp8"), "a multiple of 32"),
        (lambda: cpdhpc.unpack_blocks(np.zeros(32, "u1"), np.zeros(2, "u1"), "mxfp8"), "32 bytes"),
        (lambda: cpdhpc.unpack_blocks(np.zeros(8, "u1"), np.zeros(1, "u1"), "nvfp4"), "float32"),
        (
            lambda: cpdhpc.unpack_blocks(
                np.zeros(32, "u1"), np.zeros(1, "u1"), "mxfp8", np.ones(1, "f4")
            ),
            "mxfp.* have none",
        ),
    ],
)
def test_blocks_that_do_not_fit_are_refused(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()

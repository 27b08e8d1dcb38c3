"""An exponent for each 32 or 16 values: kernels, payloads, all-reduces, wires of OCP MX."""

import argparse
from itertools import cycle, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from allreduce_oracle import expected
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused
from test_allreduce import WAYS, assert_same_bits, gradients
from test_packing import some_values

from cpdhpc import store
from cpdhpc.collectives import predict
from cpdhpc.collectives.allreduce import Allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import DEFAULT
from cpdhpc.compress import COMPRESSORS
from cpdhpc.darray.describe import packed_wire
from cpdhpc.formats import (
    MICROSCALING,
    SHIFT_NONFINITE,
    TILE,
    Cast,
    Microscaling,
    packed_bytes,
    parse_format,
    shift_count,
    tiles,
    wire_format,
)
from cpdhpc.lab.bench import accuracy as bench_rounding
from cpdhpc.lab.bench import allreduce as bench_allreduce
from cpdhpc.lab.cli import main
from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.verify.outcomes import differing, of_tiles
from cpdhpc.ops import cpu, reference
from cpdhpc.ops.payloads import Packed
from cpdhpc.world.ranks import Loopback

Array = np.ndarray[Any, np.dtype[Any]]
GOLDEN = Path(__file__).parent / "golden"
ROWS = (32, 16)


def blocks_of(x: Array, rows: int) -> Array:
    """x in whole tiles as [tile, block, row, lane]: what shares an exponent lies along axis 2."""
    padded = np.zeros(tiles(x.size) * TILE, x.dtype)
    padded[: x.size] = x
    return padded.reshape(-1, 32 // rows, rows, 32)


def encoded(ops: Any, x: Array, cast: Cast, rows: int, **options: Any) -> tuple[Array, Array]:
    """The words and shifts of x; both held rubbish before."""
    words = np.full(packed_bytes(x.size, cast.fmt.bits), 0xA5, np.uint8)
    shifts = np.full(shift_count(x.size, rows), 0x5A, np.uint8)
    ops.encode_tiles(x, cast, words, shifts, fit=True, **options)
    return words, shifts


def decoded(ops: Any, words: Array, shifts: Array, cast: Cast, n: int) -> Array:
    out = np.empty(n, np.float32)
    ops.decode_tiles(words, shifts, cast.fmt, out)
    return out


def spread_out(n: int, seed: int) -> Array:
    """Values over many binades, zeros and whole blocks of zeros among them. float32[n]"""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * np.exp2(rng.integers(-30, 20, n)) * (rng.random(n) < 0.9)
    x[np.arange(n) % 32 == 7] = 0
    return x.astype(np.float32)


@every("rows", ROWS)
@every("wire", MICROSCALING)
def test_elements_and_scales_are_those_of_ml_dtypes(ops: Any, wire: str, rows: int) -> None:
    """The block's scale is the E8M0 number 254 - shift, its elements those of ml_dtypes.

    The least scale with which nothing saturates: half of it would push the largest value over.
    """
    x, fmt = spread_out(2500, 1), MICROSCALING[wire].element
    words, shifts = encoded(ops, x, Cast(fmt), rows)
    scales = (254 - shifts).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    scales = scales.reshape(-1, 32 // rows, 1, 32)
    exact, element = blocks_of(x.astype(np.float64), rows), np.dtype(oracles_dtype(fmt.name))
    back = (exact / scales).astype(element).astype(np.float64) * scales
    got = blocks_of(decoded(ops, words, shifts, Cast(fmt), x.size), rows)
    np.testing.assert_array_equal(got, back)
    largest, scales = (
        np.abs(exact).max(2, keepdims=True),
        np.where(exact.any(2, keepdims=True), scales, 1),
    )
    most = float(ml_dtypes.finfo(element).max)
    assert (largest <= most * scales).all()
    assert ((largest == 0) | (largest * 2 > most * scales)).all()


def oracles_dtype(name: str) -> Any:
    return getattr(ml_dtypes, oracles.ML_DTYPES[name])


def oracle_bytes(name: str, x: Array, rows: int) -> bytes:
    """The payload by the table of all numbers and Python integers."""
    fmt = parse_format(name)
    grid = oracles.number_grid(fmt)
    packed, stored = bytearray(), bytearray()
    for tile in blocks_of(x.astype(np.float64), rows):
        k = np.full((32 // rows, 1, 32), fmt.shift_max)
        largest = np.abs(tile).max(1, keepdims=True)
        while (over := np.ldexp(largest, k) > grid[-2]).any():
            k -= over
        k[largest == 0] = 0
        sign = np.signbit(tile).astype(np.int64) << (fmt.bits - 1)
        codes = oracles.grid_code(np.ldexp(tile, k), fmt, grid, "nearest") | sign
        packed += oracles.pack_integers(codes.reshape(-1), fmt.bits)
        stored += bytes((k + 127).reshape(-1).tolist())
    return bytes(packed + stored)


@every("rows, name", [(32, "e2m1fn"), (16, "e3m0")])
def test_golden_bytes(ops: Any, rows: int, name: str) -> None:
    """The words, then 32 or 64 shifts a tile, block by block."""
    golden = bytes.fromhex((GOLDEN / f"block{rows}-{name}.hex").read_text())
    x = np.ldexp(some_values(1100), np.arange(1100) % 13)
    assert oracle_bytes(name, x, rows) == golden
    words, shifts = encoded(ops, x, Cast(parse_format(name)), rows)
    assert words.tobytes() + shifts.tobytes() == golden


@every("rows", ROWS)
def test_all_clones_give_the_bits_of_the_reference(clone: str, rows: int) -> None:
    turn = cycle(product(("e2m1fn", "e4m3fn", "e3m0", "e5m2", "bf16"), ("nearest", "stochastic")))
    for n in (0, 1, 33, 1024, 1025, 2500):
        for values in (spread_out, oracles.awkward):
            name, rounding = next(turn)
            x, y, cast = values(n, 1), values(n, 2), Cast(parse_format(name), rounding)
            if n > 1024:
                x[40] = np.nan
            got, wanted = (of_tiles(ops, x, y, cast, rows) for ops in (cpu, reference))
            assert not differing(got, wanted), (n, name, rounding)


@every("wire", MICROSCALING)
def test_all_clones_give_the_bits_of_ocp(clone: str, wire: str) -> None:
    """Scales next to the ends of float32 too, and a block with NaN."""
    turn = cycle(("nearest", "stochastic", "up"))
    for n in (0, 1, 33, 1024, 1025, 2500):
        for values, exponent in ((spread_out, 0), (oracles.awkward, 0), (spread_out, 105),
                                 (spread_out, -125)):  # fmt: skip
            cast = Cast(MICROSCALING[wire], next(turn))
            x, y = (np.ldexp(values(n, seed), exponent).astype(np.float32) for seed in (1, 2))
            if n > 1024:
                x[40] = np.nan
            got, wanted = (of_tiles(ops, x, y, cast, 32) for ops in (cpu, reference))
            assert not differing(got, wanted), (n, cast, values, exponent)


def test_no_byte_beside_ocp_elements_is_written(clone: str) -> None:
    """Of the last tile, which another thread's may follow."""
    for fmt in MICROSCALING.values():
        size, x = packed_bytes(2048, fmt.bits), spread_out(2048, 4)
        room, shifts = np.full(size + 64, 0xA5, np.uint8), np.zeros(64, np.uint8)
        cpu.encode_tiles(x, Cast(fmt), room[:size], shifts, fit=True)
        assert (room[size:] == 0xA5).all() and not (room[size - 64 : size] == 0xA5).all()


def test_ocp_elements_have_4_bits_at_least(clone: str) -> None:
    fmt = Microscaling(1, 1, "none")
    with pytest.raises(ValueError, match="OCP's elements have 3 bits: 4 to 8 allowed"):
        encoded(cpu, spread_out(1024, 4), Cast(fmt), 32)


def test_only_the_block_with_nan_is_nan(ops: Any) -> None:
    x, cast = spread_out(2048, 3), Cast(parse_format("e2m1fn"))
    x[TILE + 20 * 32 + 5] = np.nan
    for rows in ROWS:
        words, shifts = encoded(ops, x, cast, rows)
        marks = (shifts == SHIFT_NONFINITE).reshape(-1, 32 // rows, 1, 32)
        assert marks.sum() == 1 and marks[1, -1, 0, 5] == 1
        got = np.isnan(blocks_of(decoded(ops, words, shifts, cast, x.size), rows))
        assert np.array_equal(got, np.broadcast_to(marks, got.shape))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=70),
    rows=st.sampled_from(ROWS),
    wire=st.sampled_from(sorted(MICROSCALING)),
)
def test_what_a_block_rounds_to_stays_and_is_near(
    values: list[float], rows: int, wire: str
) -> None:
    """Rounded again nothing changes, and the error is at most half a spacing of the top binade.

    A block's largest value is at least half the largest number M, times the scale: so it is at
    most 2**-(man + 1) of the power of two below M, less than twice the block's largest value.
    """
    x, fmt = np.array(values, np.float32), MICROSCALING[wire].element
    once = decoded(cpu, *encoded(cpu, x, Cast(fmt), rows), Cast(fmt), x.size)
    twice = decoded(cpu, *encoded(cpu, once, Cast(fmt), rows), Cast(fmt), x.size)
    assert_same_bits(once, twice)
    largest = np.abs(blocks_of(x.astype(np.float64), rows)).max(2, keepdims=True)
    wrong = np.abs(blocks_of(once.astype(np.float64), rows) - blocks_of(x.astype(np.float64), rows))
    inside = largest < 2.0 ** (fmt.emax - fmt.shift_min)  # beyond, the largest values saturate
    tiny = 2.0 ** (fmt.emin - fmt.man - fmt.shift_max)  # the least number with the largest shift
    assert (~inside | (wrong <= largest * 2.0**-fmt.man + tiny)).all()


def test_payloads_count_their_bytes() -> None:
    """A byte for each block: those of OCP MX have 32 values."""
    for n, whole in ((0, 0), (1, 1), (1024, 1), (1025, 2)):
        for shared, each in ((1024, 1), (32, 32), (16, 64)):
            wire = Packed(Cast(parse_format("e2m1fn")), True, shared)
            assert wire.size_bytes(n) == whole * (512 + each)
    for name, fmt in MICROSCALING.items():
        described = packed_wire(name)
        assert described is not None and wire_format(name) == fmt
        assert described.size_bytes(1) == 128 * fmt.bits + 32


@every("scaling", ["block32", "block16"])
@every("algorithm, accumulate", WAYS)
def test_all_reduces_equal_the_oracle(algorithm: str, accumulate: str, scaling: str) -> None:
    wires = cycle(["e2m1fn", "e4m3fn", "e3m0"])
    for ranks, n in ((3, 2100), (2, 40), (5, 5000)):
        wire, xs = next(wires), gradients(ranks, n)
        for rounding in ("nearest", "stochastic"):
            options: dict[str, Any] = {"rounding": rounding, "seed": 5, "iteration": 2}
            got = simulate(xs, wire, algorithm, scaling, accumulate, **options)
            assert_same_bits(got, expected(xs, wire, algorithm, scaling, accumulate, **options))


def test_bytes_sent_are_those_predicted() -> None:
    for wire, scaling in (("mxfp4", None), ("e3m0", "block16"), ("fp32", "block16")):
        for ranks in (2, 9):  # above 8 one rank stands for all
            method, world, n = Allreduce(wire, scaling=scaling), Loopback(ranks), 1024 * 16 * 9
            method.run(world, gradients(ranks, n))
            sent = predict.predict(DEFAULT, method, world.nodes, n).wire_bytes
            assert sent == round(world.bytes_sent.sum() / ranks), (wire, ranks)


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_what_is_not_finite_is_refused_on_all_ranks(algorithm: str) -> None:
    for value, wire in ((np.nan, "mxfp4"), (np.inf, "mxfp8"), (-np.inf, "mxfp6")):
        xs = gradients(3, 3000)
        xs[1][2000] = value
        with pytest.raises(NonFiniteGradient) as refused:
            simulate(xs, wire, algorithm)
        assert refused.value.ranks == (1,)


def test_benchmarks_and_studies_know_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    bench_allreduce.add_choices(parser)
    options = ["--wires", "raw,mxfp6,e4m3", "--scalings", "tile,block16", "--algorithms", "ring"]
    methods, skipped = bench_allreduce.parse_methods(parser.parse_args(options), None)
    found = {(method.wire, method.parsed_scaling.kind) for method in methods if method.fmt}
    assert found == {("mxfp6", "block32"), ("e4m3", "tile"), ("e4m3", "block16")} and not skipped
    operations = ["encode block32", "decode_add block16", "hop block16"]
    choices = ["--mib", "0.1", "--formats", "e2m1fn", "--repeats", "2"]
    assert main(["bench", "codec", *choices, "--operations", ",".join(operations)]) == 0
    _, _, heads, row, *_ = capsys.readouterr().out.splitlines()
    assert [name for name in operations if name in heads] == operations
    assert row.split()[0] == "e2m1fn" and sum(each[-1] == "x" for each in row.split()) == 3
    assert main(["bench", "codec", *choices, "--operations", "hop block8"]) == 2
    (tmp_path / "s.toml").write_text(
        "kind = 'allreduce'\n[sweep]\nranks = 2\nsize_bytes = [4096, 4100]\n"
        "wire = ['mxfp4', 'e2m1fn']\nvalue_scaling = ['tile', 'block16']\n"
    )
    cases = expand(load_study(tmp_path / "s.toml")).cases
    assert {(c.factors["wire"], c.factors["value_scaling"]) for c in cases} == {
        ("e2m1fn", "tile"), ("e2m1fn", "block16"),
    }  # fmt: skip


def test_errors_of_rounding_by_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where each half of a lane's column has a binade of its own, only its exponent holds it."""
    row, lane = np.divmod(np.arange(2048), 32)
    x = np.ldexp(np.float32(1), 9 * (row // 16) + lane).astype(np.float32)
    x += np.ldexp(x, -1) * (row % 2)  # 1 and 1.5 times the block's own power of two
    fmt = parse_format("e2m1fn")
    assert bench_rounding.error([x, x], fmt, "block16") == 0
    assert 0 < bench_rounding.error([x], fmt, "block32") < bench_rounding.error([x], fmt, "tile")
    assert bench_rounding.error([x], fmt, "tile") < bench_rounding.error([x], fmt, "layer")
    path = tmp_path / "job.gradients-3.h5"
    layers = {"gradients": {"w": np.stack([x, x])}}
    attributes = {
        "kind": "gradients",
        "iteration": 3,
        "ranks": 2,
        "source": "job",
        "loss_scale": 1.0,
    }
    store.write(path, layers, {**attributes, "layers": '["w"]'})
    options = ["--formats", "e2m1fn", "--values", "5000", "--gradients", str(path)]
    assert main(["bench", "rounding", *options]) == 0
    last = capsys.readouterr().out.splitlines()[-1].strip("| ").split(" | ")
    assert last[:2] == ["e2m1fn", "4"] and last[-1] == "0" and float(last[2]) > 0
    store.write(path, {}, {"kind": "run"})
    assert main(["bench", "rounding", *options]) == 2
    assert "train.record_gradients" in capsys.readouterr().err


def test_sums_that_grow_do_not_saturate() -> None:
    """Each hop chooses its exponents anew: 64 equal ranks sum exactly, by doubling."""
    x = np.ldexp(np.float32(1.5), np.arange(2048) % 32).astype(np.float32)
    for algorithm in ("rhd", "tree"):
        np.testing.assert_array_equal(simulate([x] * 64, "e2m1fn", algorithm, "block32"), 64 * x)


@every(
    "choices, argument, allowed",
    [
        ({"wire": "mxfp4", "scaling": "tile"}, "scaling", "scaled by block32: for another scaling"),
        ({"wire": "mxfp6", "accumulate": "exact"}, "scaling", "name its format, e2m3fn"),
        ({"accumulate": "exact", "wire": "e4m3", "scaling": "block32"}, "scaling", "all ranks sh"),
        ({"wire": "int4", "scaling": "block16"}, "scaling", "all ranks share"),
        ({"wire": "e4m3", "scaling": "block8"}, "scaling", "did you mean block"),
        ({"wire": "mxfp5"}, "wire", "did you mean mxfp"),
        ({"wire": "raw", "scaling": "block"}, "scaling", "did you mean block"),
    ],
)
def test_what_does_not_go_together(choices: dict[str, Any], argument: str, allowed: str) -> None:
    for make in (Allreduce, COMPRESSORS["lowbit"])[: 1 if choices["wire"] == "raw" else 2]:
        with refused("allreduce", argument, allowed):
            make(**choices)


def test_wrong_numbers_of_shifts_are_refused() -> None:
    x, cast = spread_out(2048, 1), Cast(parse_format("e2m1fn"))
    words, shifts = encoded(cpu, x, cast, 32)
    out = np.empty_like(x)
    with pytest.raises(ValueError, match="shifts"):
        cpu.decode_tiles(words, shifts[:-1], cast.fmt, out)
    with pytest.raises(ValueError, match="shifts"):  # both as long as words of one kind have
        gone = np.zeros(shift_count(x.size, 16), np.uint8)
        cpu.decode_add_encode_tiles(words, shifts, cast, x, words.copy(), gone)

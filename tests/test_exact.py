"""Exact sums: the bits of the oracle in any algorithm, order, pieces and ranks; refusals."""

import numpy as np
import pytest
from allreduce_oracle import exact_sum, format_of, integers_of, shared_shift, sum_by_fractions
from every import every
from refusing import refused

from cpdhpc.collectives import rank_program
from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient, check_world
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.formats import INTEGERS, packed_bytes, sum_bits, tiles
from cpdhpc.world.ranks import Loopback

INTEGER_WIRES = ["int2", "int3", "int5", "int8", "int16", "ternary"]
FLOAT_WIRES = ["e4m3", "e2m1fn", "e3m0", "e4m3fn", "e3m2"]
WIRES = INTEGER_WIRES + FLOAT_WIRES
SEGMENTS = [Segment("a", 0, 900), Segment("zero", 1024, 1030), Segment("b", 2048, 2300)]
NODES = [0, 1, 1, 0, 2]
ROUNDINGS = ["nearest", "zero", "stochastic"]


def gradients(ranks, n, seed=0):
    """Values over some binades, zeros and ties among them."""
    rng = np.random.default_rng((seed, ranks, n))
    xs = rng.standard_normal((ranks, n)) * np.exp2(rng.integers(-6, 3, (ranks, n)))
    xs[:, ::3] = rng.integers(-16, 17, xs[:, ::3].shape) / 8
    return list(xs.astype(np.float32))


def run(xs, wire, algorithm="ring", scaling=None, **options):
    options.setdefault("nodes", NODES if algorithm == "hier" and len(xs) == 5 else None)
    return simulate(xs, wire, algorithm, scaling, "exact", **options)


def check(xs, wire, expected, scaling=None, algorithms=SCHEDULES, **options):
    """Every algorithm gives what is expected."""
    for algorithm in algorithms:
        assert_same_bits(run(xs, wire, algorithm, scaling, **options), expected)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@every("rounding", ROUNDINGS)
@every("wire", WIRES)
def test_every_algorithm_gives_the_exact_sum(wire, rounding):
    xs = gradients(5, 2300)
    for x in xs:
        x[900:2048] = 0
        x[2048:] *= np.float32(2.0**-30)
    options = {"segments": SEGMENTS, "rounding": rounding, "seed": 3, "iteration": 4}
    expected = exact_sum(xs, wire, **options)
    assert rounding == "zero" or (expected[:900].any() and expected[2048:].any())
    turn = WIRES.index(wire) + ROUNDINGS.index(rounding)
    some = [*SCHEDULES][turn % 3 :: 3]  # all with each wire, and with each rounding
    check(xs, wire, expected, algorithms=some, **options)


@every("wire", INTEGER_WIRES)
def test_fractions_give_the_same(wire):
    xs = gradients(7, 80)
    expected = sum_by_fractions(xs, wire)
    assert_same_bits(exact_sum(xs, wire), expected)
    check(xs, wire, expected)


@every("scaling", ["none", "static:3", "static:-2"])
@every("wire", FLOAT_WIRES)
def test_shifts_from_outside(wire, scaling):
    """Here values saturate."""
    xs = gradients(4, 1100)
    shift = int(scaling[7:] or 0)
    check(xs, wire, exact_sum(xs, wire, shift=shift), scaling)


@every("ranks", [1, 2, 3, 4, 6, 9])
def test_every_number_of_ranks(ranks):
    for n, wire in ((0, "int4"), (1, "ternary"), (1025, "int7"), (3000, "ternary"), (3000, "e4m3")):
        xs = gradients(ranks, n)
        check(xs, wire, exact_sum(xs, wire))


@every("wire", ["int6", "ternary", "e4m3"])
@every("algorithm", SCHEDULES)
def test_no_order_of_ranks_matters_nor_ranks_with_zeros(algorithm, wire):
    """The sum is that of the contributions, however many ranks there are to carry them."""
    xs, zero = gradients(3, 1500), np.zeros(1500, np.float32)
    expected = run(xs, wire, algorithm)
    more = ([*xs, zero], [zero, xs[2], zero, xs[0], zero, xs[1], zero], [*xs, *[zero] * 10])
    for given in (xs[::-1], [xs[1], xs[2], xs[0]], *more):
        assert_same_bits(run(given, wire, algorithm), expected)
    five = gradients(5, 1500)
    assert_same_bits(
        run([five[i] for i in (3, 0, 4, 2, 1)], wire, algorithm), run(five, wire, algorithm)
    )


@every("rounding", ["nearest", "stochastic"])
@every("wire", ["int6", "ternary", "e4m3"])
def test_no_size_of_pieces_matters(wire, rounding, monkeypatch):
    xs = gradients(3, 12000)
    whole = run(xs, wire, rounding=rounding)
    for piece in (1024, 5 * 1024):
        monkeypatch.setattr(rank_program, "PIECE_VALUES", (piece, piece))
        check(xs, wire, whole, rounding=rounding)


def test_ternary_is_int2_in_fewer_bytes():
    xs = gradients(6, 2500)
    worlds = Loopback(6), Loopback(6)
    a, b = (
        allreduce(world, xs, wire, "gather")
        for world, wire in zip(worlds, ("ternary", "int2"), strict=True)
    )
    assert_same_bits(a, b)
    assert worlds[0].bytes_sent.sum() * 256 == worlds[1].bytes_sent.sum() * 205


@every("wire", ["int2", "ternary", "int8", "int16", "e4m3", "e4m3fn"])
@every("algorithm", SCHEDULES)
def test_the_largest_sums_fit(algorithm, wire):
    """All ranks have the largest number, or its negative, so each sum is as wide as can be."""
    fmt = format_of(wire)
    for ranks in (2, 16, 17):
        x = np.array([fmt.max, -fmt.max, 0, fmt.smallest], np.float32)
        scaling = "aps" if wire in INTEGERS else "none"
        got = run([x] * ranks, wire, algorithm, scaling)
        np.testing.assert_array_equal(got.astype(float), x.astype(float) * ranks)


@pytest.mark.parametrize("wire, ranks", [("int16", 800), ("e4m3fn", 260)])
def test_sums_wider_than_float32_round_once(wire, ranks):
    """One rounding at the end: as the oracle, in any algorithm."""
    xs = np.random.default_rng(1).uniform(1, 2, (ranks, 40)).astype(np.float32)
    xs[:20] /= 2**14  # and so sums have low bits too
    shift = shared_shift(xs, wire)
    sums = sum(integers_of(x, wire, shift) for x in xs)
    assert (sums.astype(np.float32).astype(np.int64) != sums).mean() > 0.25
    check(list(xs), wire, exact_sum(xs, wire), algorithms=("tree", "dbtree"))


@every("k", [-40, 60])
@every("wire", WIRES)
def test_aps_commutes_with_powers_of_two(wire, k):
    xs, scale = gradients(5, 1500), np.float32(2.0**k)
    plain, scaled = run(xs, wire), run([x * scale for x in xs], wire)
    assert_same_bits(scaled, plain * scale)
    assert plain.any()


def wire_bytes(n, wire, terms):
    """Bytes of n values: sums as wide as they need, contributions 5 in a byte if ternary."""
    if wire == "ternary" and terms == 1:
        return tiles(n) * 205
    fmt = format_of(wire)
    levels = 2 * terms * fmt.max_integer + 1
    bits = fmt.bits if terms == 1 else (levels - 1).bit_length()  # ceil(log2(levels))
    return packed_bytes(n, bits)


@every("wire", ["int4", "ternary", "e4m3"])
def test_bytes_widen_hop_by_hop(wire):
    """p = 4 ranks, 8 tiles: chunks of 2 tiles in ring and direct, one of 8 in the others."""
    n, p = 8 * 1024, 4
    xs = gradients(p, n)
    part = [wire_bytes(n // p, wire, m) for m in range(p + 1)]
    whole = [wire_bytes(n, wire, m) for m in range(p + 1)]
    expected = {
        "ring": [part[1] + part[2] + part[3] + 3 * part[4]] * p,
        "direct": [3 * part[1] + 3 * part[4]] * p,
        "gather": [3 * whole[1]] * p,
        "tree": [2 * whole[4], whole[1], whole[2] + whole[4], whole[1]],
    }
    for algorithm, sent in expected.items():
        world = Loopback(p)
        allreduce(world, xs, wire, algorithm, accumulate="exact")
        assert world.bytes_sent.tolist() == sent, algorithm
    if wire == "ternary":  # 2 m + 1 levels: 3, 3 and 4 bits
        assert part == [part[0], 410, 2 * 128 * 3, 2 * 128 * 3, 2 * 128 * 4]


@every("algorithm", SCHEDULES)
def test_every_rank_in_place_and_mean(algorithm):
    for wire in ("int8", "ternary"):
        xs = gradients(4, 2500)
        total = run(xs, wire, algorithm)
        mean = run(xs, wire, algorithm, op="mean")
        assert_same_bits(mean, total / np.float32(4))
        Allreduce(wire, algorithm).run(Loopback(4), xs, xs, every=True)
        for x in xs:
            assert_same_bits(x, total)


@every("wire", WIRES)
def test_shifts_are_those_of_the_grid(wire):
    """No integer saturates: the largest value fits, and twice as large it would not."""
    xs = [np.array([v], np.float32) for v in (0.7, -1.3, 0.1)]
    reduced = Allreduce(wire, accumulate="exact").run(Loopback(3), xs)
    assert reduced.sent_shifts == reduced.result_shifts
    fmt, scaled = format_of(wire), 1.3 * 2.0 ** reduced.sent_shifts[0]
    assert fmt.max / 2 < scaled <= fmt.max or (wire not in INTEGERS and scaled <= fmt.max)
    if wire == "ternary":
        assert fmt.smallest * 2.0 ** -reduced.sent_shifts[0] == 2  # 1.3 rounded up


@every("value", [np.nan, np.inf])
@every(
    "wire, scaling",
    [("int8", None), ("ternary", "aps"), ("e4m3", "aps"), ("e4m3", "none"), ("e3m0", "static:1")],
)
def test_nonfinite_values_raise_before_data_moves(wire, scaling, value):
    for algorithm in SCHEDULES:
        xs, world = list(np.ones((3, 2300), np.float32)), Loopback(3)
        xs[1][2200] = value
        with pytest.raises(NonFiniteGradient) as caught:
            allreduce(world, xs, wire, algorithm, scaling, "exact", segments=SEGMENTS)
        assert caught.value.segments == ("b",) and caught.value.ranks == (1,)
        assert world.messages_sent.sum() == 0


def test_a_sum_beyond_float32_has_no_rank():
    for algorithm in SCHEDULES:
        with pytest.raises(NonFiniteGradient, match="the sum"):
            xs = [np.full(9, 3e38, np.float32)] * 2
            simulate(xs, "e4m12", algorithm, accumulate="exact")


@every(
    "options, argument, allowed",
    [
        ({"wire": "int8", "scaling": "tile"}, "scaling", "wire='int8' needs shifts that all"),
        ({"wire": "ternary", "scaling": "none"}, "scaling", "known are aps"),
        ({"wire": "int4", "scaling": "static:1"}, "scaling", "known are aps"),
        ({"wire": "e4m3", "accumulate": "exact", "scaling": "tile"}, "scaling", "static:K, aps"),
        ({"wire": "int8", "accumulate": "requantise"}, "accumulate", "known are exact"),
        ({"wire": "ternary", "accumulate": "float32"}, "accumulate", "known are exact"),
        ({"wire": "int8", "algorithm": "mpi"}, "algorithm", "must be 'raw'"),
        ({"wire": "int8", "overflow": "inf"}, "overflow", "must be 'saturate', or left out"),
        ({"wire": "raw", "accumulate": "exact"}, "accumulate", "float32, requantise"),
        ({"wire": "e5m2", "accumulate": "exact"}, "accumulate", "must be 32 or fewer"),
        ({"wire": "int1"}, "wire", "int16, ternary"),
        ({"wire": "int17"}, "wire", "ternary"),
    ],
)
def test_what_is_refused(options, argument, allowed):
    with refused("allreduce", argument, allowed):
        simulate([np.ones(9, np.float32)] * 3, **options)


def test_the_width_decides_how_many_ranks_may_sum():
    fmt = format_of("e4m3")  # 2**31 - 1 divided by 240 * 512
    assert sum_bits(fmt, 17476) == 32 and sum_bits(fmt, 17477) == 33
    x = np.ones((), np.float32)
    check_world(Allreduce("e4m3", "tree", accumulate="exact"), Loopback(17476))
    with refused("allreduce", "accumulate", "must be 32 or fewer") as caught:
        allreduce(Loopback(17477), [x] * 17477, "e4m3", "tree", accumulate="exact")
    assert "sums of 17477 ranks take 33 bits" in caught.value.state

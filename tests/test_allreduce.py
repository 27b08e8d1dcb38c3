"""simulate gives, bit for bit, what the algorithms written out straight give."""

import weakref
from inspect import signature
from itertools import cycle, product

import numpy as np
import pytest
from allreduce_oracle import expected, shift_by_fractions
from every import every

from cpdhpc.collectives import rank_program
from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.method import Segment, aps_shift
from cpdhpc.collectives.schedules import SCHEDULES, NodeLayout
from cpdhpc.formats import parse_format
from cpdhpc.world.ranks import Loopback

WIRES = ["raw", "e4m3", "e5m2", "e3m0", "e2m1fn", "bf16"]
SCALINGS = ["none", "static", "aps", "tile"]
STATIC = {"bf16": "static:0"}  # e8m7 leaves no other shift
WAYS = [(name, way) for name, row in SCHEDULES.items() for way in row.accumulates]
NODES = [(0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 2, 2, 2, 1)]
SIZES = [0, 1, 1023, 1025, 2500]


def gradients(ranks, n, seed=0):
    """Values over many binades, zeros among them, some tiles all zero."""
    rng = np.random.default_rng((seed, ranks, n))
    xs = rng.standard_normal((ranks, n)) * np.exp2(rng.integers(-12, 3, (ranks, n)))
    xs[rng.random((ranks, n)) < 0.05] = 0
    xs[:, 2048:3072] = 0
    return list(xs.astype(np.float32))


def assert_same_bits(a, b):
    assert a.dtype == b.dtype == np.float32 and a.shape == b.shape
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_every_combination(algorithm, accumulate):
    for wire, scaling in product(WIRES, SCALINGS):
        scaling = STATIC.get(wire, "static:3") if scaling == "static" else scaling
        xs = gradients(3, 2100)
        given = (xs, wire, algorithm, scaling, accumulate)
        got = simulate(*given, overflow="saturate")
        assert_same_bits(got, expected(*given, overflow="saturate"))


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_every_size_and_number_of_ranks(ranks):
    """With every wire and scaling in turn; among them fewer tiles than ranks."""
    turn = cycle(product(SCALINGS, WIRES))
    for _ in range(ranks * len(SIZES) * len(WAYS) % 24):
        next(turn)
    ways = ((n, *way) for n in SIZES for way in WAYS)
    for (n, algorithm, accumulate), (scaling, wire) in zip(ways, turn, strict=False):
        scaling = STATIC.get(wire, "static:3") if scaling == "static" else scaling
        xs = gradients(ranks, n)
        given = (xs, wire, algorithm, scaling, accumulate)
        got = simulate(*given, overflow="saturate")
        assert_same_bits(got, expected(*given, overflow="saturate"))


@every(
    "scaling, rounding, overflow",
    [
        ("static:-2", "zero", "inf"),
        ("aps", "stochastic", "inf"),
        ("tile", "stochastic", "saturate"),
    ],
)
@every("algorithm, accumulate", WAYS)
def test_rounding_and_random_streams(algorithm, accumulate, scaling, rounding, overflow):
    xs = gradients(5, 2500)
    options = {"rounding": rounding, "overflow": overflow, "seed": 7, "iteration": 3}
    got = simulate(xs, "e4m3", algorithm, scaling, accumulate, **options)
    assert_same_bits(got, expected(xs, "e4m3", algorithm, scaling, accumulate, **options))
    if rounding == "stochastic":
        options["iteration"] = 4
        other = simulate(xs, "e4m3", algorithm, scaling, accumulate, **options)
        assert (other != got).any()


@every("nodes", NODES)
@every("accumulate", SCHEDULES["hier"].accumulates)
def test_nodes(accumulate, nodes):
    turn = product(["nearest", "stochastic"], SCALINGS, WIRES)
    parts = 2 * len(NODES)  # of all combinations
    own = [each for i, each in enumerate(turn) if i % parts == 2 * NODES.index(nodes)]
    xs = gradients(len(nodes), 4000)
    for rounding, scaling, wire in own:
        scaling = STATIC.get(wire, "static:3") if scaling == "static" else scaling
        options = {"nodes": nodes, "rounding": rounding, "seed": 3}
        got = simulate(xs, wire, "hier", scaling, accumulate, **options)
        assert_same_bits(got, expected(xs, wire, "hier", scaling, accumulate, **options))


@every("wire, scaling", [("raw", "none"), ("e4m3", "aps"), ("e3m0", "tile")])
def test_hier_is_direct_in_one_node_and_torus_with_nodes_of_one_rank(wire, scaling):
    xs = gradients(11, 12000)
    options = {"rounding": "stochastic", "seed": 3}
    for way in SCHEDULES["hier"].accumulates:
        inside = simulate(xs, wire, "hier", scaling, way, **options)
        alone = "float32" if way == "grow" else way
        assert_same_bits(inside, simulate(xs, wire, "direct", scaling, alone, **options))
    for way in ("requantise", "grow"):
        between = simulate(xs, wire, "hier", scaling, way, nodes=range(11), **options)
        assert_same_bits(between, simulate(xs, wire, "torus", scaling, way, **options))
    ring, torus = (
        simulate(xs[:5], wire, name, scaling, "requantise", **options) for name in ("ring", "torus")
    )
    assert_same_bits(ring, torus)  # 5 ranks are one ring


@every("ranks", [6, 11, 12, 38])
@every("algorithm", [name for name, way in WAYS if way == "grow"])
def test_partial_sums_that_grow(algorithm, ranks):
    """Of so many ranks that there are two levels of rings, even and uneven ones, and more bits."""
    xs = gradients(ranks, 5000)
    for wire, scaling, rounding in (
        ("e2m1fn", "tile", "nearest"),
        ("e4m3", "aps", "stochastic"),
        ("e3m0", "block32", "nearest"),
        ("raw", "none", "nearest"),
    ):
        options = {"rounding": rounding, "seed": 5}
        if algorithm == "hier":
            options["nodes"] = [min(rank // 2, 11) for rank in range(ranks)]
        for accumulate in ("grow", "requantise"):
            arguments = xs, wire, algorithm, scaling, accumulate
            assert_same_bits(simulate(*arguments, **options), expected(*arguments, **options))


@every("algorithm, accumulate", WAYS)
def test_pieces(algorithm, accumulate, monkeypatch):
    """More pieces than are under way at a time; each is cut into chunks by itself."""
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    nodes = [0, 1, 1, 0, 2] if algorithm == "hier" else None
    for wire, rounding in (("raw", "nearest"), ("e4m3", "stochastic")):
        chunks = SCHEDULES[algorithm].chunks(NodeLayout((0,) * 5))
        xs = gradients(5, 5 * 1024 * chunks + 5)
        got = simulate(xs, wire, algorithm, "tile", accumulate, rounding=rounding, nodes=nodes)
        options = {"rounding": rounding, "nodes": nodes, "piece": 1024}
        assert_same_bits(got, expected(xs, wire, algorithm, "tile", accumulate, **options))


@every("algorithm", SCHEDULES)
def test_default_accumulation(algorithm):
    xs = gradients(4, 1500)
    grow = "ring", "biring", "torus", "rhd", "hier"
    default = "grow" if algorithm in grow else "requantise"
    default = "float32" if algorithm == "direct" else default
    assert_same_bits(
        simulate(xs, "e5m2", algorithm), simulate(xs, "e5m2", algorithm, accumulate=default)
    )


@every("algorithm", SCHEDULES)
def test_raw_takes_float32_and_requantise_for_the_same(algorithm):
    xs = gradients(5, 2000)
    a, b = (simulate(xs, algorithm=algorithm, accumulate=a) for a in ("float32", "requantise"))
    assert_same_bits(a, b)
    assert_same_bits(a, simulate(xs, algorithm=algorithm, scaling="none"))


@every("wire, top", [("raw", 1 << 19), ("fp16", 200), ("e4m3", 1)])
@every("algorithm, accumulate", WAYS)
def test_integers_are_summed_exactly(algorithm, accumulate, wire, top):
    """All partial sums of 9 values are integers that the wire holds: no order can matter.

    9 * top stays within 2**24, 2**11 and 2**4. With aps the spacing at the smallest value
    is 2**-shift of that without, and the values keep above the subnormals.
    """
    rng = np.random.default_rng(1)
    xs = rng.integers(-top, top + 1, (9, 1500)).astype(np.float32)
    for scaling in ("none", "aps", "tile"):
        got = simulate(list(xs), wire, algorithm, scaling, accumulate)
        np.testing.assert_array_equal(got, xs.astype(np.int64).sum(0), scaling)


@every("wire", ["raw", "e4m3"])
@every("algorithm, accumulate", WAYS)
def test_all_ranks_end_with_the_same_bits(algorithm, accumulate, wire):
    xs = gradients(7, 5000)
    method = Allreduce(wire, algorithm, "tile", accumulate, rounding="stochastic")
    reduced = method.run(Loopback(7), xs, every=True)
    assert len(reduced.arrays) == 7
    for array in reduced.arrays[1:]:
        assert_same_bits(array, reduced.arrays[0])
    (alone,) = method.run(Loopback(7), xs).arrays
    assert_same_bits(alone, reduced.arrays[0])


@every("headroom", ["n", "sqrt", "none"])
@every("algorithm, accumulate", WAYS)
def test_aps_by_segments(algorithm, accumulate, headroom):
    segments = [
        Segment("a", 0, 700), Segment("empty", 1024, 1024), Segment("b", 1024, 3500),
        Segment("zero", 4096, 4100), Segment("c", 5120, 6000),
    ]  # fmt: skip
    xs = gradients(5, 6000)
    for x in xs:
        x[700:1024] = x[3500:5120] = 0
        x[5120:] *= 2**-20
    options = {"headroom": headroom, "segments": segments}
    method = Allreduce("e4m3", algorithm, "aps", accumulate, headroom=headroom)
    reduced = method.run(Loopback(5), xs, segments=segments)
    assert_same_bits(
        reduced.arrays[0], expected(xs, "e4m3", algorithm, "aps", accumulate, **options)
    )
    fmt = parse_format("e4m3")
    amax = [max(np.abs(x[s.start : s.stop]).max(initial=0) for x in xs) for s in segments]
    assert reduced.result_shifts == tuple(
        shift_by_fractions(each, fmt, 5, headroom) for each in amax
    )
    held = (algorithm, accumulate) == ("hier", "grow") or accumulate == "float32"
    sent = "none" if held else headroom
    assert reduced.sent_shifts == tuple(shift_by_fractions(each, fmt, 5, sent) for each in amax)


@every("headroom", ["n", "sqrt", "none"])
@every("ranks", [1, 3, 8])
def test_aps_shift_is_exact_next_to_powers_of_two(ranks, headroom):
    powers = np.exp2([-149, -127, -126, -17, 0, 1, 127]).astype(np.float32)
    values = [*powers, *np.nextafter(powers, np.float32(0)), *(powers + np.spacing(powers))]
    values += [np.float32(2**k / ranks) for k in range(-5, 5)] + [np.finfo(np.float32).max]
    for fmt in map(parse_format, ("e4m3", "e2m1fn", "bf16")):
        for value in values:
            k = aps_shift(int(np.float32(value).view(np.uint32)), fmt, ranks, headroom)
            assert k == shift_by_fractions(value, fmt, ranks, headroom), (value, fmt.name)


@every("k", [-15, 20])
@every("algorithm, accumulate", WAYS)
def test_aps_commutes_with_powers_of_two(algorithm, accumulate, k):
    xs = gradients(5, 3000)
    scale = np.float32(2.0**k)
    plain, scaled = (
        simulate(each, "e3m0", algorithm, "aps", accumulate)
        for each in (xs, [x * scale for x in xs])
    )
    assert_same_bits(scaled, plain * scale)
    assert plain.any()


@every("wire", ["raw", "e4m3"])
@every("algorithm", SCHEDULES)
def test_out_and_in_place(algorithm, wire):
    xs = gradients(3, 2500)
    kept = [x.copy() for x in xs]
    fresh = simulate(xs, wire, algorithm)
    out = np.full(2500, 7, np.float32)
    assert simulate(xs, wire, algorithm, out=out) is out
    assert_same_bits(out, fresh)
    for x, before in zip(xs, kept, strict=True):
        assert_same_bits(x, before)
    simulate(xs, wire, algorithm, out=xs[1])
    assert_same_bits(xs[1], fresh)
    both = np.concatenate([kept[0], kept[1]])  # an out that shares memory with two inputs
    simulate([both[:2500], both[2500:], kept[2]], wire, algorithm, out=both[1000:3500])
    assert_same_bits(both[1000:3500], fresh)


@every("scaling", ["none", "tile"])
@every("wire", ["raw", "e4m3"])
@every("algorithm, accumulate", WAYS)
def test_every_rank_in_place(algorithm, accumulate, wire, scaling):
    for ranks in (1, 4):
        xs = gradients(ranks, 2500)
        fresh = simulate(xs, wire, algorithm, scaling, accumulate)
        Allreduce(wire, algorithm, scaling, accumulate).run(Loopback(ranks), xs, xs, every=True)
        for x in xs:
            assert_same_bits(x, fresh)


@pytest.mark.parametrize("wire", ["raw", "e5m2"])
def test_mean_shapes_and_order_of_ranks(wire):
    xs = [x.reshape(5, 2, 50) for x in gradients(3, 500)]
    total, mean = (simulate(xs, wire, op=op) for op in ("sum", "mean"))
    assert total.shape == (5, 2, 50)
    assert_same_bits(mean, total / np.float32(3))
    scalars = [np.array(v, np.float32) for v in (1, 2, 4)]
    assert simulate(scalars, wire).shape == () and simulate(scalars, wire) == 7
    assert_same_bits(allreduce(Loopback(), xs[0]), xs[0])


@pytest.mark.parametrize("wire", ["raw", "e4m3"])
def test_a_world_keeps_buffers_but_not_what_it_is_given(wire):
    world, x = Loopback(1), np.ones(5000, np.float32)
    given = weakref.ref(x)
    allreduce(world, x, wire)
    assert world.cache.items()
    del x
    assert given() is None


def test_simulate_has_the_arguments_of_allreduce():
    """But for world and x: with the same defaults, in the same order."""
    own, real = (dict(signature(f).parameters) for f in (simulate, allreduce))
    assert {own.pop("xs").name, own.pop("nodes").name} == {"xs", "nodes"}
    assert {real.pop("world").name, real.pop("x").name} == {"world", "x"}
    assert list(own.values()) == list(real.values())

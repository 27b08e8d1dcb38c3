"""Real runs give the bits of the simulation, however ranks are dealt to processes."""

import hashlib

import numpy as np
import pytest
from refusing import refused

from cpdhpc.collectives import rank_program
from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.schedules import SCHEDULES, NodeLayout
from cpdhpc.formats import TableFormat
from cpdhpc.ops.payloads import Growth, parse_wire
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import numbered

WIRES = ["raw", "e4m3", "e5m2", "e3m0", "e2m1fn", "bf16", "posit6es1"]
SCALINGS = ["none", "static:0", "aps", "tile"]
WAYS = [(name, way) for name, row in SCHEDULES.items() for way in row.accumulates]
N = 2500


def gradients(ranks, n=N):
    """The same arrays on every process."""
    rng = np.random.default_rng((ranks, n))
    return list((rng.standard_normal((ranks, n)) * 2.0 ** rng.integers(-9, 3)).astype(np.float32))


def digest(array):
    return array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def assert_simulated(world, got, xs, *arguments, **options):
    """Every rank got the bits that rank 0 simulates."""
    expected = digest(simulate(xs, *arguments, **options)) if world.process == 0 else None
    found = world.gather((digest(got), expected))
    assert [each for each, _ in found] == [found[0][1]] * world.processes


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_real_is_simulated(world, algorithm, accumulate, scaling):
    """With every other wire, by turns: the simulation itself is tested with all."""
    xs = gradients(world.ranks)
    turn = WAYS.index((algorithm, accumulate)) + SCALINGS.index(scaling)
    for wire in WIRES[turn % 2 :: 2]:
        if accumulate == "grow" and isinstance(parse_wire(wire), TableFormat):
            continue  # refused
        arguments = (wire, algorithm, scaling, accumulate)
        got = allreduce(world, xs[world.process], *arguments)
        assert_simulated(world, got, xs, *arguments)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("algorithm", ["ring", "biring", "torus", "rhd", "hier"])
def test_partial_sums_that_grow(world, algorithm, rounding, monkeypatch):
    """With more bits than so few ranks would take; called, recorded, run again, and prepared."""
    monkeypatch.setattr(
        Growth, "bits", lambda self, terms: terms % 3 + 1 if 1 < terms < self.ranks else 0
    )
    xs = gradients(world.ranks)
    nodes = None if algorithm != "hier" else world.nodes
    for wire, scaling in (
        ("e4m3", "tile"),
        ("e2m1fn", "aps"),
        ("bf16", "none"),
        ("e4m3", "block32"),
    ):
        arguments = (wire, algorithm, scaling, "grow")
        options = {"rounding": rounding, "op": "mean", "iteration": 3}
        method = Allreduce(wire, algorithm, scaling, "grow", "mean", rounding)
        for _ in range(3):
            got = allreduce(world, xs[world.process], *arguments, **options)
            assert_simulated(world, got, xs, *arguments, nodes=nodes, **options)
        with method.prepare(world, [xs[world.process]]) as prepared:
            (got,) = prepared.run(iteration=3).arrays
            assert_simulated(world, got, xs, *arguments, nodes=nodes, **options)


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_stochastic_rounding_by_segments_in_place(world, algorithm, accumulate):
    xs = gradients(world.ranks)
    options = {
        "rounding": "stochastic", "seed": 5, "iteration": 2, "headroom": "sqrt", "op": "mean",
        "segments": [Segment("a", 0, 1000), Segment("b", 1024, N)],
    }  # fmt: skip
    x = xs[world.process].copy()
    assert allreduce(world, x, "e4m3", algorithm, "aps", accumulate, out=x, **options) is x
    assert_simulated(world, x, xs, "e4m3", algorithm, "aps", accumulate, **options)


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_sizes(world, algorithm):
    for n in (0, 1, 1025, 1024 * world.ranks):
        xs = gradients(world.ranks, n)
        for wire in ("raw", "e2m1fn"):
            got = allreduce(world, xs[world.process], wire, algorithm)
            assert_simulated(world, got, xs, wire, algorithm)


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_virtual_ranks(world, algorithm, accumulate):
    many = World(virtual_ranks=3, timeout_s=world.timeout_s)
    xs = gradients(many.ranks)
    mine = [xs[rank] for rank in many.hosted]
    for wire, scaling in (("raw", "none"), ("e4m3", "aps"), ("e5m2", "tile")):
        got = allreduce(many, mine, wire, algorithm, scaling, accumulate)
        assert_simulated(world, got, xs, wire, algorithm, scaling, accumulate)
    method = Allreduce("e4m3", algorithm, "tile", accumulate)
    each = method.run(many, mine, every=True).arrays
    assert len({digest(array) for array in each}) == 1 and len(each) == 3
    assert_simulated(world, each[0], xs, "e4m3", algorithm, "tile", accumulate)
    many.free()


@pytest.mark.parametrize("accumulate", SCHEDULES["hier"].accumulates)
def test_nodes(world, accumulate):
    """Nodes of even and uneven sizes, of neighbours or not, with ranks of several processes."""
    for virtual in (1, 3):
        many = World(virtual_ranks=virtual, timeout_s=world.timeout_s)
        xs = gradients(many.ranks, 7000)
        mine = [xs[rank] for rank in many.hosted]
        for nodes in ([r // 2 for r in range(many.ranks)], [r * r % 3 for r in range(many.ranks)]):
            many.nodes = numbered(nodes)
            for wire, scaling in (("raw", "none"), ("e4m3", "aps"), ("e3m0", "tile")):
                arguments = (wire, "hier", scaling, accumulate)
                got = allreduce(many, mine if virtual > 1 else mine[0], *arguments)
                assert_simulated(world, got, xs, *arguments, nodes=nodes)
        many.free()


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_pieces(world, algorithm, accumulate, monkeypatch):
    """Pieces of one tile in each chunk, more than are under way at a time."""
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    chunks = SCHEDULES[algorithm].chunks(NodeLayout(world.nodes))
    xs = gradients(world.ranks, 6 * 1024 * chunks + 5)
    for wire in ("raw", "e3m0"):
        arguments = (wire, algorithm, "tile", accumulate)
        got = allreduce(world, xs[world.process], *arguments, rounding="stochastic")
        assert_simulated(world, got, xs, *arguments, rounding="stochastic", nodes=world.nodes)


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_bytes_are_those_of_the_simulation(world, algorithm):
    from cpdhpc.world.ranks import Loopback

    xs = gradients(world.ranks)
    simulated = Loopback(world.ranks)
    Allreduce("e4m3", algorithm).run(simulated, xs)
    bytes_before, messages_before = world.bytes_sent.copy(), world.messages_sent.copy()
    allreduce(world, xs[world.process], "e4m3", algorithm)
    assert (world.bytes_sent - bytes_before)[0] == simulated.bytes_sent[world.process]
    assert (world.messages_sent - messages_before)[0] == simulated.messages_sent[world.process]


@pytest.mark.parametrize("virtual", [1, 3])
def test_mpi_sums_integers_exactly(world, virtual):
    many = World(virtual_ranks=virtual, timeout_s=world.timeout_s)
    xs = np.arange(many.ranks * 100, dtype=np.float32).reshape(many.ranks, 10, 10)
    mine = [xs[rank] for rank in many.hosted]
    before = many.collective_bytes
    got = allreduce(many, mine if virtual > 1 else mine[0], algorithm="mpi")
    np.testing.assert_array_equal(got, xs.sum(0))
    least = got.nbytes if world.processes > 1 else 0
    assert many.collective_bytes - before >= least and many.bytes_sent.sum() == 0
    np.testing.assert_array_equal(mine[0], xs[many.hosted.start])
    many.free()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("wire", ["e4m3", "e2m1fn"])
def test_a_nan_on_one_rank_is_named_on_all(world, wire, scaling):
    for algorithm in SCHEDULES:
        x = np.ones(N, np.float32)
        if world.process == world.processes - 1:
            x[2000] = np.nan
        kept = x.copy()
        segments = [Segment("a", 0, 1024), Segment("b", 1024, N)]
        with pytest.raises(NonFiniteGradient) as caught:
            allreduce(world, x, wire, algorithm, scaling, out=x, segments=segments)
        assert caught.value.segments == ("b",) and caught.value.ranks == (world.processes - 1,)
        assert (x.view(np.uint32) == kept.view(np.uint32)).all()


@pytest.mark.parametrize(
    "bad, value",
    [(np.ones(N), "float64"), (np.ones(2 * N, np.float32)[::2], (8,)), (None, "NoneType")],
)
def test_a_bad_array_on_one_rank_fails_on_all_alike(world, bad, value):
    x = bad if world.process == 0 else np.ones(N, np.float32)
    before = world.messages_sent.sum()
    with refused("allreduce", "x", value=value) as caught:
        allreduce(world, x)
    assert isinstance(caught.value, TypeError)
    assert str(caught.value).startswith("rank 0 | ") == (world.processes > 1)
    assert len(set(world.gather(str(caught.value)))) == 1
    assert world.messages_sent.sum() == before


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ_fail_on_all(world):
    first = world.process == 0
    x = np.ones(N, np.float32)
    cases = [
        ({"wire": "e4m3" if first else "e5m2"}, "wire='e4m3' on rank 0, wire='e5m2' on rank 1"),
        ({"iteration": 0 if first else 1}, "iteration=0 on rank 0, iteration=1 on rank 1"),
        ({"segments": [Segment("a" if first else "b", 0, N)]}, "'b'"),
    ]
    for options, words in cases:
        with pytest.raises(ValueError, match=f"arguments differ: .*{words}"):
            allreduce(world, x, **options)
    with refused("allreduce", "algorithm", value="no such"):
        allreduce(world, x, algorithm="ring" if first else "no such")
    with pytest.raises(ValueError, match=r"arguments differ: x\.shape="):
        allreduce(world, x if first else x.reshape(-1, 2))


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_exponents_of_blocks(world, algorithm, accumulate):
    """Small ones, which are recorded, and ones that go through the node's memory."""
    turn = WAYS.index((algorithm, accumulate))
    for n, (wire, scaling) in ((N, ("mxfp4", None)), (30_000, ("e4m3fn", "block16"))):
        options = {"rounding": ("nearest", "stochastic")[turn % 2], "seed": 3, "op": "mean"}
        xs = gradients(world.ranks, n)
        arguments = (wire, algorithm, scaling, accumulate)
        got = allreduce(world, xs[world.process], *arguments, **options)
        assert_simulated(world, got, xs, *arguments, **options, nodes=world.nodes)
    many = World(virtual_ranks=2, timeout_s=world.timeout_s)
    xs = gradients(many.ranks)
    got = allreduce(many, [xs[rank] for rank in many.hosted], "mxfp6", algorithm, None, accumulate)
    assert_simulated(world, got, xs, "mxfp6", algorithm, None, accumulate, nodes=many.nodes)
    many.free()


def test_prepared_calls_with_exponents_of_blocks(world):
    for n in (N, 30_000):
        xs = gradients(world.ranks, n)
        x = xs[world.process].copy()
        with Allreduce("mxfp4", op="mean").prepare(world, [x]) as prepared:
            for _ in range(2):
                got = prepared.run().arrays[0]
                assert_simulated(world, got, xs, "mxfp4", op="mean")
                xs = [2 * each for each in xs]
                x[:] = xs[world.process]


def test_nan_in_a_block_is_told_on_all_ranks(world):
    xs = gradients(world.ranks)
    xs[-1][1500] = np.nan
    told = None
    try:
        allreduce(world, xs[world.process], "mxfp4")
    except NonFiniteGradient as error:
        told = error.ranks
    assert world.gather(told) == [(world.ranks - 1,)] * world.processes

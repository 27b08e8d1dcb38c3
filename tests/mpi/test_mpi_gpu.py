"""GPU arrays through real messages: the bits of the CPU, whatever is late.

The same tests run on a GPU (-m gpu) and on simulated ones, whose work is done as late and
in as odd an order as CUDA allows.
"""

import itertools

import numpy as np
import pytest
from gpus import N, gradients, late, same

from cpdhpc.collectives import rank_program
from cpdhpc.collectives.allreduce import Allreduce, allreduce
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.schedules import SCHEDULES, Layout
from cpdhpc.collectives.simulate import simulate
from cpdhpc.lab.kinds.allreduce_cases import cases_of_size
from cpdhpc.world import gpu_messages

pytestmark = pytest.mark.mpi

WAYS = [(name, way) for name, row in SCHEDULES.items() for way in row.accumulates]
WIRES = [
    ("raw", "none"),
    ("e4m3", "tile"),
    ("e5m2", "aps"),
    ("e2m1fn", "static:1"),
    ("bf16", "none"),
]
EXACT = [("e4m3", "none"), ("int4", "aps"), ("ternary", "aps")]


def check(gpu, xs, *arguments, **options):
    """A call with an array that is still being produced gives the bits of the CPU."""
    got = allreduce(gpu.world, late(gpu, xs[gpu.world.process]), *arguments, **options)
    assert same(got, simulate(xs, *arguments, **options)), (arguments, options)


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_bits_are_those_of_the_cpu(gpu, algorithm, accumulate):
    xs = gradients(gpu.world.ranks)
    for wire, scaling in WIRES:
        check(gpu, xs, wire, algorithm, scaling, accumulate)
    kinds = {type(each) for key, each in gpu.world.cache.items() if key == ("carrier", 0)}
    assert gpu.world.processes == 1 or kinds == {
        gpu_messages.Direct if gpu.direct else gpu_messages.Staged
    }


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_exact_sums(gpu, algorithm):
    xs = gradients(gpu.world.ranks)
    for wire, scaling in EXACT:
        check(gpu, xs, wire, algorithm, scaling, "exact", rounding="stochastic", seed=3)


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_subnormal_numbers_survive(gpu, algorithm, accumulate):
    """Where CuPy's own additions and divisions give zeros."""
    xs = gradients(gpu.world.ranks, 1025, power=-135)
    check(gpu, xs, "raw", algorithm, None, accumulate, "mean")
    check(gpu, xs, "bf16", algorithm, "tile", accumulate, "mean")


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_sizes(gpu, algorithm):
    for n in (0, 1, 1025, 1024 * gpu.world.ranks):
        for wire in ("raw", "e2m1fn"):
            check(gpu, gradients(gpu.world.ranks, n), wire, algorithm)


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_in_place_by_segments(gpu, algorithm):
    world, xs = gpu.world, gradients(gpu.world.ranks)
    options = {
        "rounding": "stochastic", "seed": 5, "iteration": 2, "op": "mean",
        "segments": [Segment("a", 0, 1000), Segment("b", 1024, N)],
    }  # fmt: skip
    x = late(gpu, xs[world.process])
    assert allreduce(world, x, "e4m3", algorithm, "aps", out=x, **options) is x
    assert same(x, simulate(xs, "e4m3", algorithm, "aps", **options))


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_calls_in_a_row_share_buffers(gpu, algorithm, monkeypatch):
    """Many small pieces, and results that are looked at only after all calls."""
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    world = gpu.world
    n = 9 * 1024 * SCHEDULES[algorithm].chunks(Layout(world.nodes)) + 5
    xs = gradients(world.ranks, n)
    calls = list(itertools.product((1, -2, 4), ("raw", "e3m0")))
    got = [
        allreduce(world, late(gpu, xs[world.process] * times), wire, algorithm)
        for times, wire in calls
    ]
    for result, (times, wire) in zip(got, calls, strict=True):
        expected = simulate([x * times for x in xs], wire, algorithm, nodes=world.nodes)
        assert same(result, expected), (times, wire)


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_virtual_ranks(gpu, algorithm):
    world = gpu.world_of(3)
    xs = gradients(world.ranks)
    for wire, scaling in (("raw", "none"), ("e4m3", "aps")):
        mine = [late(gpu, xs[rank]) for rank in world.hosted]
        got = Allreduce(wire, algorithm, scaling).run(world, mine, every=True).arrays
        expected = simulate(xs, wire, algorithm, scaling)
        assert all(same(each, expected) for each in got) and len(got) == 3


def test_prepared(gpu):
    """Of GPU arrays there are no call lists: each run is a whole call, on what they hold then."""
    world, xs = gpu.world, gradients(gpu.world.ranks)
    for wire in ("raw", "e4m3"):
        x = gpu.cupy.zeros(N, np.float32)
        with Allreduce(wire, op="mean").prepare(world, [x]) as prepared:
            assert not prepared.is_fast
            for factor in (1, -2):
                x[...] = late(gpu, factor * xs[world.process])
                expected = simulate([factor * each for each in xs], wire, op="mean")
                assert same(prepared.run().arrays[0], expected)


@pytest.mark.two_ranks
@pytest.mark.parametrize("virtual", [1, 3])
def test_mpi_sums_integers_exactly(gpu, virtual):
    world = gpu.world_of(virtual)
    xs = np.arange(world.ranks * 100, dtype=np.float32).reshape(world.ranks, 100)
    mine = [late(gpu, xs[rank]) for rank in world.hosted]
    got = allreduce(world, mine if virtual > 1 else mine[0], algorithm="mpi")
    assert same(got, xs.sum(0)) and same(mine[0], xs[world.hosted.start])
    assert allreduce(world, [each[:0] for each in mine] if virtual > 1 else mine[0][:0],
                     algorithm="mpi").size == 0  # fmt: skip


def test_a_nan_on_one_rank_is_named_on_all(gpu):
    world = gpu.world
    for wire, algorithm in itertools.product(("e4m3", "e2m1fn", "int4"), SCHEDULES):
        x = np.ones(N, np.float32)
        x[2000] = np.nan if world.process == world.processes - 1 else 1
        segments = [Segment("a", 0, 1024), Segment("b", 1024, N)]
        with pytest.raises(NonFiniteGradient) as caught:
            allreduce(world, late(gpu, x), wire, algorithm, segments=segments)
        assert caught.value.segments == ("b",) and caught.value.ranks == (world.processes - 1,)


@pytest.mark.two_ranks
def test_benchmarks_check_sums_on_the_gpu(gpu):
    """Beside MPI_Allreduce, which takes GPU arrays as they are, or staged."""
    cases = cases_of_size(gpu.world, 4096, [Allreduce("e4m3", "direct")], ["mpi"], "gpu")
    assert isinstance(cases[0].out, gpu.cupy.ndarray)
    cases[0].run()
    assert np.array_equal(cases[0].out.get(), cases[0].data.total)
    assert 0 < cases[1].error < 0.1


def test_arrays_of_two_kinds_are_refused(gpu):
    world, x = gpu.world, np.ones(5, np.float32)
    given = gpu.cupy.asarray(x)
    with pytest.raises(TypeError, match="out is on the CPU: must be on the GPU, as the first"):
        allreduce(world, given, out=x.copy())
    if world.processes > 1:
        with pytest.raises(
            ValueError,
            match=r"arguments differ: x on GPU=False on rank 0, x on GPU=True on rank \d",
        ):
            allreduce(world, given if world.process else x)

"""GPU arrays through real messages: the bits of the CPU, whatever is late.

Plain calls, and CUDA graphs of prepared ones. The same tests run on a GPU (-m gpu) and on simulated
ones, whose work is done as late and in as odd an order as CUDA allows.
"""

import argparse
import gc
import itertools

import numpy as np
import pytest
from gpus import N, gradients, late, same

from cpdhpc.collectives import rank_program
from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.schedules import SCHEDULES, NodeLayout
from cpdhpc.lab.bench.allreduce import add_latency, run_latency
from cpdhpc.lab.kinds.allreduce_cases import BASELINES, CaseArrays, schedule_case
from cpdhpc.ops.payloads import Growth
from cpdhpc.world import gpu_messages

WAYS = [(name, way) for name, row in SCHEDULES.items() for way in row.accumulates]
WIRES = [("raw", None), ("e4m3", "tile"), ("e5m2", "aps"), ("e2m1fn", "static:1"), ("bf16", "none")]
EXACT = [("e4m3", "none"), ("int4", "aps"), ("ternary", "aps")]
PARTS = [Segment("a", 0, 1024), Segment("b", 1024, N)]


def check(gpu, method, n=N, power=0, **options):
    """A call, and a graph's, on an array that is still being produced: both have the CPU's bits."""
    world, xs = gpu.world, gradients(gpu.world.ranks, n, power)

    def right(got, factor):
        given = [np.float32(factor) * x for x in xs]
        wanted = simulate(
            given, method.wire, method.algorithm, method.scaling, method.accumulate, method.op,
            nodes=world.nodes, rounding=method.rounding, seed=method.seed, **options,
        )  # fmt: skip
        return same(got, wanted)

    got = method.run(world, [late(gpu, xs[world.process])], **options).arrays[0]
    assert right(got, 1), method
    if method.is_random:  # a key differs from call to call
        return
    x = gpu.cupy.zeros(n, np.float32)
    with method.prepare(world, [x], graphs=True, **options) as prepared:
        for factor in (1, -2, 0.5):
            gpu.delay()
            x[...] = late(gpu, np.float32(factor) * xs[world.process])
            assert right(prepared.run().arrays[0].copy(), factor), (method, factor)


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_bits_are_those_of_the_cpu(gpu, algorithm, accumulate):
    for wire, scaling in WIRES:
        check(gpu, Allreduce(wire, algorithm, scaling, accumulate))
    kinds = {type(each) for key, each in gpu.world.cache.items() if key == ("carrier", 0)}
    assert gpu.world.processes == 1 or kinds == {
        gpu_messages.Direct if gpu.direct else gpu_messages.Staged
    }


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", ["ring", "direct", "rhd", "hier"])
def test_nvfp4_has_the_bits_of_the_cpu(gpu, algorithm):
    """A payload has a float32 of its own, which is known on the GPU alone."""
    for rounding in ("nearest", "stochastic"):
        check(gpu, Allreduce("nvfp4", algorithm, rounding=rounding, op="mean"))


@pytest.mark.parametrize("algorithm", [name for name, way in WAYS if way == "grow"])
def test_partial_sums_that_grow(gpu, algorithm, monkeypatch):
    """With more bits than so few ranks would take, already in contributions that are not held."""
    least = 2 if algorithm == "hier" else 1
    monkeypatch.setattr(
        Growth, "bits", lambda self, terms: terms % 3 + 1 if least <= terms < self.ranks else 0
    )
    for wire, scaling in (
        ("e4m3", "tile"),
        ("e2m1fn", "aps"),
        ("bf16", "none"),
        ("e4m3", "block32"),
    ):
        for rounding in ("nearest", "zero"):
            check(gpu, Allreduce(wire, algorithm, scaling, "grow", rounding=rounding))


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_exact_sums_means_and_segments(gpu, algorithm):
    for wire, scaling in EXACT:
        check(gpu, Allreduce(wire, algorithm, scaling, "exact", "mean"))
        how = {"rounding": "stochastic", "seed": 3}
        check(gpu, Allreduce(wire, algorithm, scaling, "exact", **how))
    parts = [Segment("a", 0, 1000), Segment("b", 1024, N)]
    check(gpu, Allreduce("e4m3", algorithm, "aps", op="mean"), segments=parts)


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_subnormal_numbers_survive(gpu, algorithm, accumulate):
    """Where CuPy's own additions and divisions give zeros."""
    for wire, scaling in (("raw", None), ("bf16", "tile")):
        check(gpu, Allreduce(wire, algorithm, scaling, accumulate, "mean"), 1025, -135)


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_sizes_and_many_pieces(gpu, algorithm, monkeypatch):
    for n in (0, 1, 1025, 1024 * gpu.world.ranks):
        for wire in ("raw", "e2m1fn"):
            check(gpu, Allreduce(wire, algorithm), n)
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    n = 9 * 1024 * SCHEDULES[algorithm].chunks(NodeLayout(gpu.world.nodes)) + 5
    for wire in ("raw", "e3m0"):
        check(gpu, Allreduce(wire, algorithm), n)


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
    n = 9 * 1024 * SCHEDULES[algorithm].chunks(NodeLayout(world.nodes)) + 5
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
    for wire in ("raw", "e4m3", "nvfp4"):
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
        with pytest.raises(NonFiniteGradient) as caught:
            allreduce(world, late(gpu, x), wire, algorithm, segments=PARTS)
        assert caught.value.segments == ("b",) and caught.value.ranks == (world.processes - 1,)


@pytest.mark.two_ranks
def test_benchmarks_check_sums_on_the_gpu(gpu):
    """Beside MPI_Allreduce, which takes GPU arrays as they are, or staged."""
    arrays = CaseArrays(gpu.world, 1024, "gpu")
    mpi = BASELINES["mpi"](gpu.world, arrays)
    ours = schedule_case(gpu.world, Allreduce("e4m3", "direct"), arrays)
    for case in (ours, mpi):
        case.check(gpu.world)
    assert isinstance(mpi.out, gpu.cupy.ndarray)
    assert np.array_equal(mpi.out.get(), mpi.data.total)
    assert 0 < ours.error < 0.1


def test_arrays_of_two_kinds_are_refused(gpu):
    world, x = gpu.world, np.ones(5, np.float32)
    given = gpu.cupy.asarray(x)
    with pytest.raises(TypeError, match="out is on the CPU: the first is on the GPU"):
        allreduce(world, given, out=x.copy())
    if world.processes > 1:
        with pytest.raises(
            ValueError,
            match=r"arguments differ: x on GPU=False on rank 0, x on GPU=True on rank \d",
        ):
            allreduce(world, given if world.process else x)


@pytest.mark.two_ranks
def test_graphs_in_place_and_in_other_streams(gpu):
    """Who comes with another stream finds it behind the run before."""
    world, xs = gpu.world, gradients(gpu.world.ranks)
    for wire in ("raw", "e4m3"):
        x = gpu.cupy.zeros(N, np.float32)
        with Allreduce(wire, op="mean").prepare(world, [x], [x], graphs=True) as prepared:
            for _ in range(3):
                with gpu.cupy.cuda.Stream(non_blocking=True) as stream:
                    x[...] = late(gpu, xs[world.process])
                    assert prepared.run().arrays[0] is x
                    assert same(x, simulate(xs, wire, op="mean"))
                    stream.synchronize()


@pytest.mark.two_ranks
def test_what_prepare_is_at_work_on_is_waited_for(gpu):
    """In another stream; and prepare itself leaves the result alone."""
    world, xs = gpu.world, gradients(gpu.world.ranks)
    x = late(gpu, xs[world.process])
    out = gpu.cupy.full_like(x, 7)
    gpu.cupy.cuda.get_current_stream().synchronize()
    with gpu.cupy.cuda.Stream(non_blocking=True):
        gpu.delay()
        prepared = Allreduce("e2m1fn", scaling="static:1").prepare(world, [x], [out], graphs=True)
    assert same(out, np.full(N, 7, np.float32))
    with prepared:
        assert same(prepared.run().arrays[0], simulate(xs, "e2m1fn", scaling="static:1"))


@pytest.mark.two_ranks
@pytest.mark.parametrize("place, segment", [(100, "a"), (2000, "b")])
def test_a_nan_in_a_graph_is_named_and_the_next_run_is_right(gpu, place, segment, monkeypatch):
    """In the first piece or in another."""
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    world, xs = gpu.world, gradients(gpu.world.ranks)
    for wire, algorithm in itertools.product(("e4m3", "e2m1fn", "e5m2", "nvfp4"), SCHEDULES):
        x = gpu.cupy.zeros(N, np.float32)
        method = Allreduce(wire, algorithm)
        with method.prepare(world, [x], segments=PARTS, graphs=True) as prepared:
            for value in (np.nan, 1, np.nan):
                given = [each.copy() for each in xs]
                given[-1][place] = value
                x[...] = late(gpu, given[world.process])
                if value == 1:
                    assert same(prepared.run().arrays[0], simulate(given, wire, algorithm))
                    continue
                with pytest.raises(NonFiniteGradient) as caught:
                    prepared.run()
                assert caught.value.segments == (segment,)
                assert caught.value.ranks == (world.processes - 1,)


@pytest.mark.two_ranks
def test_fewer_calls_of_the_driver(gpu):
    """A graph for what lies between two messages, with its copies, and no other launch."""
    if gpu.simulation is None or gpu.world.processes != 2:
        pytest.skip("the simulation counts, on 2 ranks")
    simulation, world = gpu.simulation, gpu.world
    x = gpu.cupy.zeros(N, np.float32)
    # ring: encode; add and encode; decode. Raw values are added, else there are copies alone.
    for wire, launches in (("e4m3", 3), ("raw", 1 if gpu.direct else 3)):
        with Allreduce(wire, "ring").prepare(world, [x], graphs=True) as prepared:
            prepared.run()
            kernels, copies = simulation.launched.copy(), simulation.copied.copy()
            before = simulation.graphs
            prepared.run()
            assert simulation.graphs - before == launches, wire
            assert (simulation.launched, simulation.copied) == (kernels, copies)


@pytest.mark.two_ranks
def test_memory_of_graphs_is_let_go_with_them(gpu):
    if gpu.simulation is None:
        pytest.skip("the simulation knows its memory")
    x = gpu.cupy.zeros(N, np.float32)
    gc.collect()  # what errors of other tests hold
    held = {kind: len(there) for kind, there in gpu.simulation.memory.items()}
    for end in ("freed", "dropped"):
        prepared = Allreduce("e4m3").prepare(gpu.world, [x], graphs=True)
        prepared.run()
        if end == "freed":
            prepared.free()
            with pytest.raises(RuntimeError, match="is freed"):
                prepared.run()
        else:
            del prepared
        gc.collect()
        now = {kind: len(there) for kind, there in gpu.simulation.memory.items()}
        assert now["pinned"] == held["pinned"], end


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_memory_of_a_graph_that_runs_is_kept(gpu, algorithm):
    """A run of raw values leaves before the GPU is done, and free is called at once."""
    world, xs = gpu.world, gradients(gpu.world.ranks)
    x = late(gpu, xs[world.process])
    prepared = Allreduce("raw", algorithm).prepare(world, [x], graphs=True)
    result = prepared.run().arrays[0]
    prepared.free()
    Allreduce("e4m3").prepare(world, [x], graphs=True).free()  # takes memory
    assert same(result, simulate(xs, "raw", algorithm))


REFUSED = {
    "rounding='stochastic': its key differs from call to call": ({"rounding": "stochastic"}, {}),
    "algorithm='mpi': MPI sums by itself": ({"wire": "raw", "algorithm": "mpi"}, {}),
    "x is not on a GPU: graphs need CuPy arrays": ({}, {"host": True}),
    "graphs=1: must be True or False": ({}, {"graphs": 1}),
}


@pytest.mark.two_ranks
@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_captured_is_refused_on_all_ranks(gpu, said):
    """Whatever rank it is on."""
    choices, other = REFUSED[said]
    x = gpu.cupy.zeros(N, np.float32)
    last = gpu.world.process == gpu.world.processes - 1
    x = np.zeros(N, np.float32) if last and "host" in other else x
    graphs = other.get("graphs", True) if last else True
    with pytest.raises((TypeError, ValueError), match=f"Allreduce.prepare: .*{said}"):
        Allreduce(**{"wire": "e4m3"} | choices).prepare(gpu.world, [x], graphs=graphs)


@pytest.mark.two_ranks
def test_virtual_ranks_and_ranks_that_differ_are_refused(gpu):
    world, x = gpu.world_of(2), gpu.cupy.zeros(N, np.float32)
    with pytest.raises(ValueError, match="2 virtual ranks: must be 1 per process"):
        Allreduce().prepare(world, [x, x.copy()], graphs=True)
    if world.processes > 1:
        with pytest.raises(ValueError, match="graphs=True on rank 0, graphs=False on rank 1"):
            Allreduce().prepare(gpu.world, [x], graphs=gpu.world.process == 0)


@pytest.mark.two_ranks
def test_latency_shows_graphs(gpu, capsys):
    parser = argparse.ArgumentParser()
    add_latency(parser)
    given = ["--sizes=8,64", "--repeats=2", "--warmup=1", "--device=gpu", "--oversubscribe-gpus"]
    measured = run_latency(parser.parse_args(given), gpu.world)
    assert gpu.world.process or "graphs" in capsys.readouterr().out
    calls = {point.factors.get("call") for point in measured.points}
    assert calls == {None, "plain", "prepared", "graphs"}

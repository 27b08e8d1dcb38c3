"""Prepared all-reduces as CUDA graphs: the bits of the CPU, and fewer calls of the driver."""

import argparse
import gc
import itertools

import numpy as np
import pytest
from gpus import N, gradients, late, same

from cpdhpc.collectives import rank_program
from cpdhpc.collectives.allreduce import Allreduce, simulate
from cpdhpc.collectives.checks import NonFiniteGradient
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.schedules import SCHEDULES, Layout
from cpdhpc.lab.bench.allreduce import add_latency, run_latency
from cpdhpc.ops.payloads import Growth

pytestmark = pytest.mark.mpi

WAYS = [(name, way) for name, row in SCHEDULES.items() for way in row.accumulates]
WIRES = [("raw", None), ("e4m3", "tile"), ("e5m2", "aps"), ("e2m1fn", "static:1"), ("bf16", "none")]
EXACT = [("e4m3", "none"), ("int4", "aps"), ("ternary", "aps")]


def check(gpu, method, n=N, **options):
    """Runs of other values, whose arrays are still being produced, have the bits of the CPU."""
    world, xs = gpu.world, gradients(gpu.world.ranks, n)
    x = gpu.cupy.zeros(n, np.float32)
    with method.prepare(world, [x], graphs=True, **options) as prepared:
        for factor in (1, -2, 0.5):
            gpu.delay()
            x[...] = late(gpu, factor * xs[world.process])
            got = prepared.run().arrays[0].copy()
            wanted = simulate(
                [np.float32(factor) * each for each in xs], method.wire, method.algorithm,
                method.scaling, method.accumulate, method.op, nodes=world.nodes,
                rounding=method.rounding, **options,
            )  # fmt: skip
            assert same(got, wanted), (method, factor)


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_bits_are_those_of_the_cpu(gpu, algorithm, accumulate):
    for wire, scaling in WIRES:
        check(gpu, Allreduce(wire, algorithm, scaling, accumulate))


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
    parts = [Segment("a", 0, 1000), Segment("b", 1024, N)]
    check(gpu, Allreduce("e4m3", algorithm, "aps", op="mean"), segments=parts)
    check(gpu, Allreduce("raw", algorithm, op="mean"))


@pytest.mark.two_ranks
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_sizes_and_many_pieces(gpu, algorithm, monkeypatch):
    for n in (0, 1, 1025):
        for wire in ("raw", "e4m3"):
            check(gpu, Allreduce(wire, algorithm), n)
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    n = 9 * 1024 * SCHEDULES[algorithm].chunks(Layout(gpu.world.nodes)) + 5
    for wire in ("raw", "e3m0"):
        check(gpu, Allreduce(wire, algorithm), n)


@pytest.mark.two_ranks
def test_in_place_and_in_other_streams(gpu):
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
def test_a_nan_is_named_and_the_next_run_is_right(gpu, place, segment, monkeypatch):
    """In the first piece or in another."""
    monkeypatch.setattr(rank_program, "PIECE_VALUES", (1024, 1024))
    world, xs = gpu.world, gradients(gpu.world.ranks)
    segments = [Segment("a", 0, 1024), Segment("b", 1024, N)]
    for wire, algorithm in itertools.product(("e4m3", "e2m1fn", "e5m2"), SCHEDULES):
        x = gpu.cupy.zeros(N, np.float32)
        method = Allreduce(wire, algorithm)
        with method.prepare(world, [x], segments=segments, graphs=True) as prepared:
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
    "rounding='stochastic': a key differs from call to call": ({"rounding": "stochastic"}, {}),
    "algorithm='mpi': MPI sums by itself": ({"wire": "raw", "algorithm": "mpi"}, {}),
    "x is not on a GPU: graphs are of CuPy arrays": ({}, {"host": True}),
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
    with pytest.raises(ValueError, match="2 virtual ranks: must be 1 a process"):
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

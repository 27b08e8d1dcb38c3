"""GPU arrays through real messages: the bits of the CPU, whatever is late.

The same tests run on a GPU (-m gpu) and on tests/simulated_gpu.py, whose work is done as late and
in as odd an order as CUDA allows.
"""

import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_cupy import simulated

from cpdhpc.comm import (
    SCHEDULES,
    Allreduce,
    Layout,
    NonFiniteGradient,
    Segment,
    World,
    allreduce,
    chunk,
    device,
    simulate,
    staging,
)

pytestmark = pytest.mark.mpi

TIMEOUT_S = 20.0
N = 2500
WAYS = [(name, way) for name, row in SCHEDULES.items() for way in row.accumulates]
WIRES = [
    ("raw", "none"),
    ("e4m3", "tile"),
    ("e5m2", "aps"),
    ("e2m1fn", "static:1"),
    ("bf16", "none"),
]
EXACT = [("e4m3", "none"), ("int4", "aps"), ("ternary", "aps")]
SPIN = """extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}"""


def on_gpu(stack, cupy, direct):
    """CuPy and the machine's GPU."""
    spin = cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (np.int64(1),))  # compiled now, not in the middle of a test
    cupy.cuda.Device().synchronize()
    if direct:
        world = World(timeout_s=TIMEOUT_S)
        answer = device.gpu_aware(world)
        world.free()
        if not answer.yes:
            pytest.skip(f"GPU-aware MPI: {answer}")
    return cupy, lambda: spin((1,), (1,), (np.int64(50_000_000),))  # 25 ms or more


def on_none(stack, direct):
    """A simulated GPU, whose memory MPI may read where it counts as GPU-aware."""
    simulation, cupy = stack.enter_context(simulated())
    simulation.aware = direct
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(
        device, "query", lambda: device.Answer(direct, "simulated")
    )
    return cupy, simulation.delay


KINDS = [
    pytest.param((kind, direct), id=f"{kind}-{'direct' if direct else 'staged'}", marks=marks)
    for kind, marks in (("simulated", ()), ("gpu", pytest.mark.gpu))
    for direct in (False, True)
]


@pytest.fixture(scope="module", params=KINDS)
def gpu(request):
    """cupy, world, delay() of the current stream, up(array); memory that MPI takes, or does not."""
    kind, direct = request.param
    with ExitStack() as stack:
        if kind == "gpu":
            cupy, delay = on_gpu(stack, request.getfixturevalue("cupy"), direct)
        else:
            cupy, delay = on_none(stack, direct)

        def world_of(virtual=1):
            world = World(virtual_ranks=virtual, timeout_s=TIMEOUT_S, gpu_direct=direct)
            stack.callback(world.free)
            return world

        yield SimpleNamespace(
            cupy=cupy, world=world_of(), world_of=world_of, delay=delay, direct=direct,
        )  # fmt: skip


def gradients(ranks, n=N, power=0):
    """The same arrays on every process."""
    rng = np.random.default_rng((ranks, n))
    powers = 2.0 ** (rng.integers(-9, 3) + power)
    return list((rng.standard_normal((ranks, n)) * powers).astype(np.float32))


def late(gpu, array):
    """Return an array on the GPU that is written only after a delay of the current stream."""
    values = gpu.cupy.asarray(array)
    x = gpu.cupy.zeros(array.shape, np.float32)
    gpu.delay()
    x[...] = values
    return x


def same(got, expected):
    return got.get().tobytes() == expected.tobytes()


def check(gpu, xs, *arguments, **options):
    """A call with an array that is still being produced gives the bits of the CPU."""
    got = allreduce(gpu.world, late(gpu, xs[gpu.world.rank]), *arguments, **options)
    assert same(got, simulate(xs, *arguments, **options)), (arguments, options)


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_bits_are_those_of_the_cpu(gpu, algorithm, accumulate):
    xs = gradients(gpu.world.ranks)
    for wire, scaling in WIRES:
        check(gpu, xs, wire, algorithm, scaling, accumulate)
    kinds = {type(carrier) for carrier in gpu.world.carriers.values()}
    assert gpu.world.size == 1 or kinds == {staging.Direct if gpu.direct else staging.Staged}


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_exact_sums(gpu, algorithm):
    xs = gradients(gpu.world.ranks)
    for wire, scaling in EXACT:
        check(gpu, xs, wire, algorithm, scaling, "exact", rounding="stochastic", seed=3)


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_subnormal_numbers_survive(gpu, algorithm, accumulate):
    """Where CuPy's own additions and divisions give zeros."""
    xs = gradients(gpu.world.ranks, 1025, power=-135)
    check(gpu, xs, "raw", algorithm, None, accumulate, "mean")
    check(gpu, xs, "bf16", algorithm, "tile", accumulate, "mean")


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_sizes(gpu, algorithm):
    for n in (0, 1, 1025, 1024 * gpu.world.ranks):
        for wire in ("raw", "e2m1fn"):
            check(gpu, gradients(gpu.world.ranks, n), wire, algorithm)


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_in_place_by_segments(gpu, algorithm):
    world, xs = gpu.world, gradients(gpu.world.ranks)
    options = {
        "rounding": "stochastic", "seed": 5, "iteration": 2, "op": "mean",
        "segments": [Segment("a", 0, 1000), Segment("b", 1024, N)],
    }  # fmt: skip
    x = late(gpu, xs[world.rank])
    assert allreduce(world, x, "e4m3", algorithm, "aps", out=x, **options) is x
    assert same(x, simulate(xs, "e4m3", algorithm, "aps", **options))


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_calls_in_a_row_share_buffers(gpu, algorithm, monkeypatch):
    """Many small pieces, and results that are looked at only after all calls."""
    monkeypatch.setattr(chunk, "PIECE_VALUES", (1024, 1024))
    world = gpu.world
    n = 9 * 1024 * SCHEDULES[algorithm].chunks(Layout(world.nodes)) + 5
    xs = gradients(world.ranks, n)
    calls = list(itertools.product((1, -2, 4), ("raw", "e3m0")))
    got = [
        allreduce(world, late(gpu, xs[world.rank] * times), wire, algorithm)
        for times, wire in calls
    ]
    for result, (times, wire) in zip(got, calls, strict=True):
        expected = simulate([x * times for x in xs], wire, algorithm, nodes=world.nodes)
        assert same(result, expected), (times, wire)


@pytest.mark.parametrize("wire", ["raw", "e4m3"])
def test_each_call_is_in_its_own_stream(gpu, wire):
    """In turn, so that buffers are let go while the other stream is still at work."""
    world, xs = gpu.world, gradients(gpu.world.ranks, 70_000)
    streams = [gpu.cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    expected, got = simulate(xs, wire, "ring"), []
    for stream in (*streams, *streams):
        with stream:
            x = late(gpu, xs[world.rank])
            got.append((stream, allreduce(world, x, wire, "ring")))
            x[...] = 0  # the caller's again
    for stream, result in got:
        with stream:
            assert same(result, expected)


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_virtual_ranks(gpu, algorithm):
    world = gpu.world_of(3)
    xs = gradients(world.ranks)
    for wire, scaling in (("raw", "none"), ("e4m3", "aps")):
        mine = [late(gpu, xs[rank]) for rank in world.hosted]
        got = Allreduce(wire, algorithm, scaling).run(world, mine, every=True).arrays
        expected = simulate(xs, wire, algorithm, scaling)
        assert all(same(each, expected) for each in got) and len(got) == 3


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
        x[2000] = np.nan if world.rank == world.size - 1 else 1
        segments = [Segment("a", 0, 1024), Segment("b", 1024, N)]
        with pytest.raises(NonFiniteGradient) as caught:
            allreduce(world, late(gpu, x), wire, algorithm, segments=segments)
        assert caught.value.segments == ("b",) and caught.value.ranks == (world.size - 1,)


def test_arrays_of_two_kinds_are_refused(gpu):
    world, x = gpu.world, np.ones(5, np.float32)
    given = gpu.cupy.asarray(x)
    with pytest.raises(TypeError, match="out is on the CPU: must be on the GPU"):
        allreduce(world, given, out=x.copy())
    if world.size > 1:
        with pytest.raises(ValueError, match=r"arguments differ.*CPU.*GPU"):
            allreduce(world, given if world.rank else x)


EVENT = "cpdhpc.ops.gpu_streams.Event"
WITHOUT = {  # what is left out -> (where MPI takes GPU memory, where it does not)
    "messages wait for events": (f"{EVENT}.Test", lambda event: True, (True, False)),
    "copies wait for the caller": (f"{EVENT}.before", lambda event, stream: None, (False,)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", WITHOUT)
def test_without_synchronisation_the_numbers_are_wrong(gpu, monkeypatch, what):
    """So the tests above would notice."""
    name, careless, matters = WITHOUT[what]
    if gpu.direct not in matters:
        return
    world = gpu.world_of()
    xs = gradients(world.ranks, 50_000)
    expected = simulate(xs, "raw", "ring")
    assert same(allreduce(world, late(gpu, xs[world.rank]), "raw", "ring"), expected)
    monkeypatch.setattr(name, careless)
    got = allreduce(world, late(gpu, xs[world.rank]), "raw", "ring")
    assert not all(world.gather(same(got, expected)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("answer", [False, True])
def test_memory_that_arrives_changed_is_staged_from_then_on(monkeypatch, answer):
    """A library that says no is not tried; of one that says yes the trial decides."""
    tried = []
    monkeypatch.setattr(device, "query", lambda: device.Answer(answer, "the query"))
    monkeypatch.setattr(device, "to_host", lambda array: tried.append(array))
    with simulated() as (simulation, cupy):
        simulation.aware = answer
        world = World(timeout_s=TIMEOUT_S)
        xs = gradients(world.ranks)
        for _ in range(2):
            got = allreduce(world, cupy.asarray(xs[world.rank]))
            assert same(got, simulate(xs))
            simulation.aware = False
        assert len(tried) == answer and type(world.carriers[0]) is staging.Staged
        words = "the query says yes, but GPU memory arrived changed" if answer else "the query"
        assert world.gpu_aware == (False, words)
        world.free()


@pytest.mark.mpi(min_size=2)
def test_streams_share_no_buffers():
    """A stream may be slow: the next call, in another one, must not write where it still reads."""
    with simulated() as (simulation, cupy):
        world = World(timeout_s=TIMEOUT_S, gpu_direct=False)
        xs = gradients(world.ranks, 5000)
        slow, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with slow:
            first = allreduce(world, cupy.asarray(xs[world.rank]), "raw", "gather")
        simulation.stalled = slow
        with other:
            second = allreduce(world, cupy.asarray(-2 * xs[world.rank]), "raw", "gather")
        for stream, result, factor in ((other, second, -2), (slow, first, 1)):
            with stream:
                assert same(result, simulate([factor * x for x in xs], "raw", "gather"))
        world.free()


@pytest.mark.mpi(min_size=2)
def test_what_is_copied_is_kept(monkeypatch):
    """Virtual ranks let go of payloads when they are sent: somebody must keep them until copied."""

    def forgetful(carrier, event, start, keep=None):
        return delay(carrier, event, start)

    with simulated() as (simulation, cupy):
        simulation.copies_last = True
        world = World(virtual_ranks=2, timeout_s=TIMEOUT_S, gpu_direct=False)
        xs = gradients(world.ranks, 50_000)
        mine = [cupy.asarray(xs[rank]) for rank in world.hosted]
        expected = simulate(xs, "e4m3", "ring")
        assert same(allreduce(world, mine, "e4m3", "ring"), expected)
        delay = staging.Carrier.delay
        monkeypatch.setattr(staging.Carrier, "delay", forgetful)
        got = allreduce(world, mine, "e4m3", "ring")
        assert not all(world.gather(same(got, expected)))
        world.free()

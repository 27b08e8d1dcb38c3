"""GPU arrays through real messages: what is waited for, and that nothing less would do."""

from types import SimpleNamespace

import numpy as np
import pytest
from gpus import TIMEOUT_S, gradients, late, same
from simulated_cupy import simulated

from cpdhpc.collectives.allreduce import allreduce, simulate
from cpdhpc.world import gpu_messages
from cpdhpc.world.mpi import World

pytestmark = pytest.mark.two_ranks


@pytest.mark.parametrize("wire", ["raw", "e4m3"])
def test_each_call_is_in_its_own_stream(gpu, wire):
    """In turn, so that buffers are let go while the other stream is still at work."""
    world, xs = gpu.world, gradients(gpu.world.ranks, 70_000)
    streams = [gpu.cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    expected, got = simulate(xs, wire, "ring"), []
    for stream in (*streams, *streams):
        with stream:
            x = late(gpu, xs[world.process])
            got.append((stream, allreduce(world, x, wire, "ring")))
            x[...] = 0  # the caller's again
    for stream, result in got:
        with stream:
            assert same(result, expected)


EVENT = "cpdhpc.ops.gpu_runtime.Event"
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
        pytest.skip("nothing is copied where MPI takes GPU memory")
    world = gpu.world_of()
    xs = gradients(world.ranks, 50_000)
    expected = simulate(xs, "raw", "ring")
    assert same(allreduce(world, late(gpu, xs[world.process]), "raw", "ring"), expected)
    monkeypatch.setattr(name, careless)
    got = allreduce(world, late(gpu, xs[world.process]), "raw", "ring")
    assert not all(world.gather(same(got, expected)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("answer", [False, True])
def test_memory_that_arrives_changed_is_staged_from_then_on(monkeypatch, answer):
    """A library that says no is not tried; of one that says yes the trial decides."""
    tried = []
    monkeypatch.setattr(gpu_messages, "query", lambda: gpu_messages.Answer(answer, "the query"))
    monkeypatch.setattr(gpu_messages, "to_host", lambda array: tried.append(array))
    with simulated() as (simulation, cupy):
        simulation.aware = answer
        world = World(timeout_s=TIMEOUT_S)
        xs = gradients(world.ranks)
        for _ in range(2):
            got = allreduce(world, cupy.asarray(xs[world.process]))
            assert same(got, simulate(xs))
            simulation.aware = False
        [carrier] = [each for key, each in world.cache.items() if key == ("carrier", 0)]
        assert len(tried) == answer and type(carrier) is gpu_messages.Staged
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
            first = allreduce(world, cupy.asarray(xs[world.process]), "raw", "gather")
        simulation.stalled = slow
        with other:
            second = allreduce(world, cupy.asarray(-2 * xs[world.process]), "raw", "gather")
        for stream, result, factor in ((other, second, -2), (slow, first, 1)):
            with stream:
                assert same(result, simulate([factor * x for x in xs], "raw", "gather"))
        world.free()


@pytest.mark.mpi(min_size=2)
def test_a_stream_that_is_left_stays_until_its_work_is_done():
    """Else a later stream has its address, and with that the memory that it still reads."""
    with simulated() as (simulation, cupy):
        world = World(timeout_s=TIMEOUT_S, gpu_direct=False)
        xs = gradients(world.ranks, 5000)
        slow = cupy.cuda.Stream(non_blocking=True)
        with slow:
            x = cupy.asarray(xs[world.process])
            result = allreduce(world, x, "raw", "gather")
        simulation.stalled = SimpleNamespace(work=slow.work)
        del slow
        with cupy.cuda.Stream(non_blocking=True):
            allreduce(world, cupy.asarray(xs[0]), "raw", "gather")
        with cupy.cuda.Stream(non_blocking=True) as later:
            cupy.empty(1, np.uint8)
        while later.work:
            simulation.step()
        simulation.stalled = None
        while simulation.step():
            pass
        assert same(result, simulate(xs, "raw", "gather"))
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
        delay = gpu_messages.Carrier.delay
        monkeypatch.setattr(gpu_messages.Carrier, "delay", forgetful)
        got = allreduce(world, mine, "e4m3", "ring")
        assert not all(world.gather(same(got, expected)))
        world.free()

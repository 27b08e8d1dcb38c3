"""Payloads in memory that the processes of a node share give the bits that messages give."""

import numpy as np
import pytest
from test_mpi_allreduce import assert_simulated, gradients

from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.blocks import PIECES
from cpdhpc.collectives.recorded import empty_shared
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.world.mpi import World

WAYS = [(name, way) for name, row in SCHEDULES.items() for way in (*row.accumulates, "exact")]
SIZES = (20_000, 1, 70_001, 0, 3_000, 20_000)  # arenas grow, and are written again


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_memory_and_messages_agree(world, messages, algorithm, accumulate, monkeypatch):
    """In many small pieces and parts, and calls after one another without a barrier.

    The first call with a size is the engine's, later ones are a call list.
    """
    monkeypatch.setattr("cpdhpc.collectives.rank_program.PIECE_VALUES", (4096, 8192))
    monkeypatch.setattr("cpdhpc.collectives.recorded.PART_VALUES", 1024)
    assert PIECES > 4, "more pieces than are under way at a time: their arrays are written again"
    for call, n in enumerate(3 * SIZES):
        xs = [np.roll(x, call) for x in gradients(world.ranks, n)]
        arguments = (("raw", "e4m3")[n % 2], algorithm, "aps", accumulate)
        if arguments[0] == "raw" and accumulate not in ("float32", "requantise"):
            arguments = ("e4m3", *arguments[1:])
        results = [allreduce(each, xs[world.process], *arguments) for each in (world, messages)]
        assert np.array_equal(*(result.view(np.uint32) for result in results))
        assert_simulated(world, results[0], xs, *arguments)


def test_memory_is_shared_by_all_of_a_node(world, messages):
    """A process alone has it, too: its calls that come again are run at once as others are."""
    assert messages.shared() is None
    shared = world.shared()
    assert shared is not None
    assert [i in shared.near for i in range(world.processes)] == [
        i != world.process for i in range(world.processes)
    ]


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_arrays_that_the_node_can_read(world, algorithm, monkeypatch):
    """They are read where they lie, and a run ends when nobody reads them any more."""
    monkeypatch.setattr("cpdhpc.collectives.recorded.PART_VALUES", 1024)
    own, n = World(timeout_s=world.timeout_s), 70_001
    x, out = empty_shared(own, (n,)), empty_shared(own, n)
    assert x.dtype == np.float32 and x.shape == (n,) and x.flags.carray
    plain = np.empty(n, np.float32)
    for wire in ("raw", "e4m3"):
        method = Allreduce(wire, algorithm, op="mean")
        with method.prepare(own, [x], [out]) as prepared, method.prepare(own, [x], [x]) as inside:
            for call in range(8):
                xs = [np.roll(each, call) for each in gradients(own.ranks, n)]
                x[:] = plain[:] = xs[own.process]
                wanted = simulate(xs, wire, algorithm, op="mean")
                same = [np.array_equal(prepared.run().arrays[0].view("u4"), wanted.view("u4"))]
                same.append(np.array_equal(x, plain))
                out[:] = -1
                same.append(np.array_equal(inside.run().arrays[0].view("u4"), wanted.view("u4")))
                x[:] = -1
                assert own.gather(all(same), "verdict") == [True] * own.processes
    own.free()


def test_all_share_or_none(world):
    last = world.process == world.processes - 1
    other = World(timeout_s=world.timeout_s, share_memory=not last)
    assert other.shared() is None
    xs = gradients(world.ranks, 3000)
    got = allreduce(other, xs[world.process], "e4m3", "ring")
    assert_simulated(other, got, xs, "e4m3", "ring")
    other.free()


@pytest.mark.parametrize("ending", ["free", "drop", "drop requests"])
def test_memory_of_prepared_calls_is_used_again(world, ending):
    """In sizes that grow, and with one that stays: all that the others know of is taken again."""
    own = World(timeout_s=world.timeout_s, share_memory="requests" not in ending)
    method, blocks, right = Allreduce("e4m3", "ring"), [], []
    kept = method.prepare(own, [np.ones(5000, np.float32)])
    for call in range(60):
        x = np.full(150_000 + 64 * call, own.process + 1, np.float32)
        prepared = method.prepare(own, [x])
        right.append(prepared.run().arrays[0][0] == sum(range(1, own.ranks + 1)))
        if ending == "free":
            prepared.free()
        del prepared
        right.append(kept.run().arrays[0][0] == own.ranks)
        shared = own.shared()
        blocks.append(len(shared._blocks) + len(shared._met) if shared else 0)
    held = own.cache.held <= 2 + (own.processes > 1)
    verdict = own.gather((all(right), held, blocks[-1] == blocks[5]), "verdict")
    own.free()
    assert verdict == [(True, True, True)] * world.processes


def test_memory_stays_while_one_process_has_the_recording(world):
    """Others have freed it, and take more: what is read there is as it was."""
    own = World(timeout_s=world.timeout_s)
    x = np.full(3000, own.process + 1, np.float32)
    first = Allreduce("e4m3", "ring").prepare(own, [x])
    first.run()
    if own.process:
        first.free()
    shared, span = own.shared(), []
    for _ in range(3):
        with Allreduce("e4m3", "ring").prepare(own, [x]) as other:
            span.append({each.ctypes.data for each in other._recording._taken if each.size})
    old = {each.ctypes.data for each in first._recording._taken if each.size}
    left = own.processes == 1 or bool(shared._left_by)
    verdict = own.gather(left and not any(old & each for each in span), "verdict")
    first.free()
    own.free()
    assert verdict == [True] * world.processes


def test_a_freed_world_is_an_error_and_nothing_else(world, capfd):
    """With arguments seen before, prepared, and by the engine: no process is told to end."""
    own = World(timeout_s=world.timeout_s)
    x, calls = np.ones(1000, np.float32), []
    for wire in ("raw", "e4m3"):
        calls += [lambda wire=wire: allreduce(own, x, wire, "ring")]
        for way in ("requantise", "kahan"):
            algorithm = "ring" if way == "requantise" else "direct"
            if wire == "e4m3" or way == "requantise":
                calls.append(Allreduce(wire, algorithm, None, way).prepare(own, [x]).run)
    for call in calls * 4:
        call()
    own.free()
    calls.append(lambda: empty_shared(own, 4))
    for call in calls:
        with pytest.raises(RuntimeError, match="is freed"):
            call()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        (-1, ValueError, "empty_shared: shape=-1: must be 0 or more"),
        ((2, -3), ValueError, "empty_shared: shape=-3: must be 0 or more"),
        ("x", TypeError, "empty_shared: shape='x': must be an integer"),
        (None, TypeError, "empty_shared: shape=None: must be an integer"),
        (1.5, TypeError, "empty_shared: shape=1.5: must be an integer"),
        (1 << 62, ValueError, "empty_shared: bytes of the array"),
        (1 << 58, MemoryError, "empty_shared: shape=288230376151711744"),
    ],
)
def test_a_wrong_shape_on_one_is_an_error_on_all(world, wrong, error, words):
    last = world.process == world.processes - 1
    rank = rf"rank {world.processes - 1} \| " if world.processes > 1 else ""
    with pytest.raises(error, match=f"^{rank}{words}"):
        empty_shared(world, wrong if last else 4)


def test_a_communicator_has_arrays_to_share(world):
    from mpi4py import MPI

    array = empty_shared(MPI.COMM_WORLD, [2, np.int64(3)])
    assert array.shape == (2, 3) and array.dtype == np.float32
    assert empty_shared(MPI.COMM_WORLD, 0).shape == (0,)
    array[:] = world.process
    assert allreduce(MPI.COMM_WORLD, array)[1, 2] == sum(range(world.processes))

"""Payloads in memory that the processes of a node share give the bits that messages give."""

import numpy as np
import pytest
from test_mpi_allreduce import assert_simulated, gradients

from cpdhpc.collectives.allreduce import Allreduce, allreduce, simulate
from cpdhpc.collectives.rank_program import PIECES
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.world.mpi import World
from cpdhpc.world.node_memory import empty_shared

pytestmark = pytest.mark.mpi

WAYS = [(name, way) for name, row in SCHEDULES.items() for way in (*row.accumulates, "exact")]
SIZES = (20_000, 1, 70_001, 0, 3_000, 20_000)  # arenas grow, and are written again


@pytest.fixture(scope="module")
def message_world(world):
    """All ranks, every payload a message."""
    return World(timeout_s=world.timeout_s, share_memory=False)


@pytest.mark.parametrize("algorithm, accumulate", WAYS)
def test_memory_and_messages_agree(world, message_world, algorithm, accumulate, monkeypatch):
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
        results = [
            allreduce(each, xs[world.process], *arguments) for each in (world, message_world)
        ]
        assert np.array_equal(*(result.view(np.uint32) for result in results))
        assert_simulated(world, results[0], xs, *arguments)


def test_memory_is_shared_where_there_is_somebody(world, message_world):
    assert message_world.shared() is None
    shared = world.shared()
    assert (shared is not None) == (world.processes > 1)
    if shared is not None:
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

"""Worlds of MPI processes: collectives, communicators, long messages, shared errors."""

import importlib

import numpy as np
import pytest
from refusing import refused

from cpdhpc.collectives.allreduce import allreduce, simulate
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.config import ConfigError, UserError
from cpdhpc.world.mpi import World, as_world
from cpdhpc.world.ranks import Loopback, numbered


def test_ranks_and_processes(world):
    from mpi4py import MPI

    assert (world.process, world.processes) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert world.ranks == world.processes and list(world.hosted) == [world.process]
    many = World(virtual_ranks=3, timeout_s=world.timeout_s)
    assert many.ranks == 3 * world.processes
    assert world.gather(list(many.hosted)) == [
        [3 * r, 3 * r + 1, 3 * r + 2] for r in range(world.processes)
    ]
    many.free()


def test_nodes_are_the_machines(world):
    from mpi4py import MPI

    assert world.nodes == numbered(world.gather(MPI.Get_processor_name()))
    many = World(virtual_ranks=3, timeout_s=world.timeout_s)
    assert many.nodes == tuple(node for node in world.nodes for _ in range(3))
    many.free()


def test_collectives(world):
    world.barrier()
    values = [{"rank": rank, "text": "x" * rank} for rank in range(world.processes)]
    assert world.gather(values[world.process]) == values
    mine = np.array([world.process, -world.process, 1 << 62], np.int64)
    assert world.max(mine).tolist() == [world.processes - 1, 0, 1 << 62]
    assert mine[0] == world.process
    array = np.full((3, 5), world.process, np.float64)
    world.broadcast(array)
    assert (array == 0).all()
    world.broadcast(np.empty(0))
    with refused("broadcast", "array", "must be C-contiguous"):
        world.broadcast(np.zeros((2, 2)).T)


def test_an_error_on_one_rank_is_raised_on_all(world):
    world.agree(None)
    last = world.processes - 1
    with pytest.raises(KeyError, match="only here"):
        world.agree(KeyError("only here") if world.process == last else None)
    with pytest.raises(ValueError, match="of rank 0"):
        world.agree(ValueError(f"of rank {world.process}"))


def test_what_a_function_raises_on_one_rank_is_raised_on_all(world):
    def refuse(error: type[Exception]) -> int:
        if world.process == world.processes - 1:
            raise error("of the last rank")
        return world.process

    assert world.agreed(lambda: world.process) == world.process
    with pytest.raises(UserError, match="of the last rank"):
        world.agreed(lambda: refuse(ConfigError))
    with pytest.raises(KeyError, match="of the last rank"):
        world.agreed(lambda: refuse(KeyError), "call", (OSError, KeyError))


def test_collective_bytes_are_counted(world):
    before = world.collective_bytes
    world.max(np.zeros(7, np.int64))
    world.broadcast(np.zeros(10, np.float32))
    alone = world.processes == 1  # nothing leaves it
    assert world.collective_bytes - before == (0 if alone else 56 + 40)


@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_long_messages_go_in_pieces(world, monkeypatch, algorithm):
    monkeypatch.setattr(importlib.import_module("cpdhpc.world.mpi"), "MESSAGE_BYTES", 1000)
    xs = list(np.random.default_rng(3).random((world.processes, 3000), np.float32))
    before = world.messages_sent.sum()
    got = allreduce(world, xs[world.process], "e5m2", algorithm)
    np.testing.assert_array_equal(got, simulate(xs, "e5m2", algorithm))
    simulated = Loopback(world.processes)
    allreduce(simulated, xs if world.processes > 1 else xs[0], "e5m2", algorithm)
    assert world.messages_sent.sum() - before == simulated.messages_sent[world.process]
    array = np.arange(700.0) + world.process
    world.broadcast(array)
    np.testing.assert_array_equal(array, np.arange(700.0))
    whole = allreduce(world, np.ones(3001, np.float32), algorithm="mpi")
    assert (whole == world.processes).all()


def test_a_communicator_has_one_world():
    from mpi4py import MPI

    x = np.ones(5, np.float32)
    assert (allreduce(MPI.COMM_WORLD, x) == MPI.COMM_WORLD.size).all()
    assert as_world(MPI.COMM_WORLD, "f") is as_world(MPI.COMM_WORLD, "g")
    assert as_world(MPI.COMM_WORLD, "f") is not as_world(MPI.COMM_SELF, "f")
    assert (allreduce(MPI.COMM_SELF, x, "e4m3") == 1).all()


def test_sub_communicators_at_the_same_time(world):
    from mpi4py import MPI

    xs = list(np.random.default_rng(4).random((world.processes, 2000), np.float32))
    for _ in range(3):
        half = MPI.COMM_WORLD.Split(world.process % 2)
        members = [x for rank, x in enumerate(xs) if rank % 2 == world.process % 2]
        got = allreduce(half, xs[world.process], "e4m3", "direct")
        np.testing.assert_array_equal(got, simulate(members, "e4m3", "direct"))
        half.Free()


def test_other_things_are_no_communicators():
    from mpi4py import MPI

    for wrong in (3, "world", MPI.COMM_NULL):
        with refused("World", "comm", "must be an mpi4py intra-communicator"):
            World(wrong)
    for argument, wrong in (("virtual_ranks", 0), ("virtual_ranks", 1 << 20), ("timeout_s", 0)):
        with refused("World", argument, value=wrong):
            World(**{argument: wrong})


def test_a_part_keeps_the_order_that_is_asked_for(world):
    backwards = list(reversed(range(world.processes)))
    part = world.part(backwards, timeout_s=world.timeout_s)
    assert part.gather(world.process) == backwards
    part.free()
    last = world.part([world.processes - 1])
    assert (last is not None) == (world.process == world.processes - 1)
    if last is not None:
        last.free()


def test_a_freed_world_says_so(world):
    part = world.split(0)
    part.free()
    for call in (part.barrier, part.free, lambda: allreduce(part, np.ones(5, np.float32))):
        with pytest.raises(RuntimeError, match="World: is freed"):
            call()

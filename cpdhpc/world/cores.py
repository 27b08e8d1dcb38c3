"""Threads and cores of a rank, without taking cores from other ranks on its node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from ..ops import omp_num_threads, set_kernel_threads
from ..partition import split
from .node_memory import round_trip_ns
from .ranks import Ranks


def threads_of_rank(world: Ranks) -> int:
    """Return OMP_NUM_THREADS if it is set, else this process's share of its cores. Collective.

    The share is the cores of its affinity mask, divided by the processes that use them.
    Raises UserError on all processes if OMP_NUM_THREADS is wrong on any.
    """
    wanted = world.agreed(omp_num_threads)
    mask = frozenset(os.sched_getaffinity(0))
    mine = (socket.gethostname(), mask)
    sharing = [host == mine[0] and bool(cores & mask) for host, cores in world.gather(mine)]
    return wanted or max(1, len(mask) // sum(sharing))


@contextmanager
def own_cores(world: Ranks) -> Iterator[str]:
    """Bind this process to its share of the cores it may use, until the end. Collective.

    Without this, libraries that sleep while waiting (gloo, for example) let the scheduler put two
    ranks on one core. The next library, if it spins, then waits for time slices: MPI_Allreduce
    takes 20 ms instead of 8 us. Kernels run on one thread per core from then on, or on
    OMP_NUM_THREADS threads.
    Yields a text that describes the binding.
    """
    before = os.sched_getaffinity(0)
    mine = (socket.gethostname(), sorted(before))
    everyone = world.gather(mine)
    sharing = [i for i, each in enumerate(everyone) if each == mine]
    overlap = any(
        host == mine[0] and cores != mine[1] and before & set(cores) for host, cores in everyone
    )
    if overlap or len(sharing) > len(before):
        yield f"ranks share cores: times are of waiting for one another too; {_threads(world)}"
        return
    start, stop = split(len(before), len(sharing), sharing.index(world.process))
    os.sched_setaffinity(0, mine[1][start:stop])
    try:
        own = f"every rank on cores of its own, {stop - start} on process {world.process}"
        yield f"{own}{_distance(world)}; {_threads(world)}"
    finally:
        os.sched_setaffinity(0, before)


def _distance(world: Ranks) -> str:
    """Return a text with the round-trip time between cores of neighbouring ranks. Collective."""
    trip_ns = round_trip_ns(world)
    return f", a word to another and back in {trip_ns} ns" if trip_ns else ""


def _threads(world: Ranks) -> str:
    """Set the number of threads of kernels, and return it as text. Collective."""
    count = threads_of_rank(world)
    set_kernel_threads(count)
    return f"kernels on {count} thread{'s' * (count > 1)}"

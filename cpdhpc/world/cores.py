"""Threads and cores of a rank, without taking them from the others on its node."""

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
    """Return OMP_NUM_THREADS where it is set, else the cores that this process owns. Collective.

    Those are the cores of its affinity mask per process that shares them.
    Raises UserError on all processes alike where OMP_NUM_THREADS is wrong on any.
    """
    wanted = world.agreed(omp_num_threads)
    mask = frozenset(os.sched_getaffinity(0))
    mine = (socket.gethostname(), mask)
    sharing = [host == mine[0] and bool(cores & mask) for host, cores in world.gather(mine)]
    return wanted or max(1, len(mask) // sum(sharing))


@contextmanager
def own_cores(world: Ranks) -> Iterator[str]:
    """Bind this process to its share of the cores it may use, until the end. Collective.

    Libraries that sleep, as gloo, let the scheduler put two ranks on a core, where the next
    library, if it spins, waits for time slices: MPI_Allreduce then takes 20 ms instead of 8 us.
    Kernels run on a thread for each core from then on, or on OMP_NUM_THREADS.
    Yields what became of it, in words.
    """
    before = os.sched_getaffinity(0)
    mine = (socket.gethostname(), sorted(before))
    found = world.gather(mine)
    sharing = [i for i, each in enumerate(found) if each == mine]
    overlap = any(
        host == mine[0] and cores != mine[1] and before & set(cores) for host, cores in found
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
    """Return in words how far the cores of neighbours in a node are apart. Collective."""
    trip_ns = round_trip_ns(world)
    return f", a word to another and back in {trip_ns} ns" if trip_ns else ""


def _threads(world: Ranks) -> str:
    """Set the number of threads of kernels, and return it in words. Collective."""
    count = threads_of_rank(world)
    set_kernel_threads(count)
    return f"kernels on {count} thread{'s' * (count > 1)}"

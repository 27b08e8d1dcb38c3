"""How many threads a process may use without taking cores from the others on its node."""

from __future__ import annotations

import os
import socket

from ..config import UserError
from ..ops.threads import omp_num_threads
from .ranks import Ranks


def threads_of_rank(world: Ranks) -> int:
    """Return OMP_NUM_THREADS where it is set, else the cores that this process owns. Collective.

    Those are the cores of its affinity mask per process that shares them.
    Raises UserError on all processes alike where OMP_NUM_THREADS is wrong on any.
    """
    wanted, error = None, None
    try:
        wanted = omp_num_threads()
    except UserError as found:
        error = found
    world.agree(error)
    mask = frozenset(os.sched_getaffinity(0))
    mine = (socket.gethostname(), mask)
    sharing = [host == mine[0] and bool(cores & mask) for host, cores in world.gather(mine)]
    return wanted or max(1, len(mask) // sum(sharing))

"""How many threads a process may use without taking cores from the others on its node."""

from __future__ import annotations

import os
import socket

from ..comm import Ranks


def threads_of_rank(world: Ranks) -> int:
    """Return the cores of this process's affinity mask per process that shares them. Collective."""
    mask = frozenset(os.sched_getaffinity(0))
    mine = (socket.gethostname(), mask)
    sharing = [host == mine[0] and bool(cores & mask) for host, cores in world.gather(mine)]
    return max(1, len(mask) // sum(sharing))

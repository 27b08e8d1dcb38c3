"""Where cases are measured: some ranks of a job, and what is known of them and their nodes."""

from __future__ import annotations

import json
import os
from functools import cached_property

import numpy as np

from ..bench.machine import ping_pong
from ..provenance import cpu_clone, hosts, identity, versions
from ..study.energy import node_meter
from ..world.mpi import World
from .factors import Outcomes

SLURM = (  # what Slurm says of a job, as far as it is the same for jobs of one kind
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_QOS",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
)
PING_BYTES = [1 << i for i in range(3, 22, 3)]  # 8 B to 2 MiB
PINGS, PING_WARMUP = 10, 2


class Place:
    """Some of the ranks of a job. Collective over them, as is all that it knows.

    cores: what own_cores said of them
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.cores = ""
        self._hosts = hosts(world)
        own = world.hosted.start
        first = world.nodes.index(world.nodes[own]) == own  # of the processes of this node
        self._meter = node_meter() if first else None

    @cached_property
    def seconds_per_byte(self) -> float:
        """Time of a byte between the first and the last rank, by a ping-pong. Collective."""
        return ping_pong(self.world, PING_BYTES, PINGS, PING_WARMUP)[1]

    def read_energy(self) -> float:
        """Return what the counters of the node say, in J; 0 but on its first process of these."""
        return 0.0 if self._meter is None else self._meter.joules()

    def energy_j(self, before: float) -> Outcomes:
        """Return the energy of all nodes since each read_energy, if all count it. Collective."""
        used = self.read_energy() - before
        energy_j = float(np.sum(self.world.gather(used)))
        return {} if np.isnan(energy_j) else {"energy_j": energy_j}

    def environment(self) -> dict[str, str]:
        """Return where this is, the same for all cases of a job that use these ranks.

        On process 0, which writes; the others would only ask the file system the same.
        """
        if self.world.process > 0:
            return {}
        found = environment(self._hosts, self.cores)
        sources = self._meter.sources if self._meter else ""
        return found | ({"energy": sources} if sources else {})


def environment(names: list[str], placement: str) -> dict[str, str]:
    """Return where something was measured; names: of all processes' hosts."""
    slurm = {name: os.environ[name] for name in SLURM if name in os.environ}
    return {
        "hosts": " ".join(dict.fromkeys(names)),
        **identity(),
        "cores": str(os.cpu_count()),
        "placement": placement,
        "versions": json.dumps(versions()),
        "kernels": cpu_clone(),
        "slurm": json.dumps(slurm),
    }

"""Where a case runs: all ranks of the job or some of them, proven to be what was asked for."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from ..bench.fit import ping_pong
from ..comm import World
from ..comm.mpi_library import library_version
from ..config import UserError
from ..provenance import cpu_clone, git_commit, hosts, processor, versions
from ..study.case import Case

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
CURE = (
    "start it by the mpirun that belongs to {library}, or by srun --mpi=pmix (Open MPI) or "
    "--mpi=pmi2 (MPICH)"
)


class PlacementError(UserError):
    """The processes of a job are not where they should be."""


def prove(world: World, nodes: int, ppn: int) -> None:
    """Raise PlacementError unless world is nodes times ppn processes. Collective.

    MPI is asked, not the scheduler: SLURM_PROCID and its like are wrong under mpirun.
    """
    asked = f"asked for were {nodes * ppn} (nodes x ranks per node: {nodes} x {ppn})"
    if world.size != nodes * ppn:
        found = "1 process" if world.size == 1 else f"{world.size} processes"
        alone = "every process is alone: " if world.size == 1 else ""
        cure = CURE.format(library=library_version())
        raise PlacementError(f"batch: MPI has {found}, {asked}: {alone}{cure}")
    counts = Counter(world.nodes)
    if len(counts) != nodes or set(counts.values()) != {ppn}:
        found = " + ".join(map(str, counts.values()))
        raise PlacementError(
            f"batch: MPI has {found} processes, by nodes; {asked}: ask Slurm for "
            f"--nodes={nodes} --ntasks-per-node={ppn}, not for --ntasks alone"
        )


def members(nodes: Sequence[int], case: Case) -> list[int]:
    """Return the processes that measure a case: the first ppn on each of the first nodes.

    nodes: the node of each process
    """
    found = []
    taken: Counter[int] = Counter()
    for process, node in enumerate(nodes):
        if node < case.nodes and taken[node] < case.ppn:
            taken[node] += 1
            found.append(process)
    return found


class Place:
    """Some of the ranks of a job. Collective over them, as is all that it knows.

    cores: what own_cores said of them
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.cores = ""
        self._hosts = hosts(world)

    @cached_property
    def seconds_per_byte(self) -> float:
        """Time of a byte between the first and the last rank, by a ping-pong. Collective."""
        return ping_pong(self.world, PING_BYTES, PINGS, PING_WARMUP)[1]

    def environment(self) -> dict[str, str]:
        """Return where this is, the same for all cases of a job that use these ranks.

        On process 0, which writes; the others would only ask the file system the same.
        """
        if self.world.rank > 0:
            return {}
        slurm = {name: os.environ[name] for name in SLURM if name in os.environ}
        return {
            "hosts": " ".join(dict.fromkeys(self._hosts)),
            "processor": processor(),
            "cores": str(os.cpu_count()),
            "placement": self.cores,
            "mpi_library": library_version(),
            "versions": json.dumps(versions()),
            "kernels": cpu_clone(),
            "git_commit": git_commit(),
            "slurm": json.dumps(slurm),
        }

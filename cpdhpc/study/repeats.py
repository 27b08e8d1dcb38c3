"""Visits with warm-ups and repeats until a median is known well enough, and proof of the ranks."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ..bench.harness import interleave_ranks
from ..bench.machine import ping_pong
from ..config import UserError
from ..kinds.base import Array, Calls, Measuring, Outcomes, Result
from ..provenance import cpu_clone, hosts, identity, versions
from ..signals import Caught
from ..world.cores import own_cores
from ..world.mpi import World, library_version
from .cases import Case
from .energy import node_meter
from .spec import Study
from .statistics import is_enough

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
ADVICE = (
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
    if world.processes != nodes * ppn:
        found = "1 process" if world.processes == 1 else f"{world.processes} processes"
        alone = "every process is alone: " if world.processes == 1 else ""
        advice = ADVICE.format(library=library_version())
        raise PlacementError(f"batch: MPI has {found}, {asked}: {alone}{advice}")
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
        slurm = {name: os.environ[name] for name in SLURM if name in os.environ}
        return {
            "hosts": " ".join(dict.fromkeys(self._hosts)),
            **identity(),
            "cores": str(os.cpu_count()),
            "placement": self.cores,
            "versions": json.dumps(versions()),
            "kernels": cpu_clone(),
            "slurm": json.dumps(slurm),
            **({"energy": self._meter.sources} if self._meter and self._meter.sources else {}),
        }


class TimedCalls(Measuring):
    """A case whose repeats are calls that all ranks do together; calls: see Kind.measure."""

    def __init__(self, study: Study, case: Case, directory: Path, calls: Calls) -> None:
        super().__init__(study, case, directory)
        self.calls, self.measure = calls, study.measure
        self.times_s = np.empty((0, 3))
        self.is_warmup = np.empty(0, np.uint8)
        self.spent_s = self.spent_j = 0.0
        self.outcomes: Outcomes = {}

    @property
    def counted(self) -> Array:
        """Times of the repeats that count, of the slowest rank, float64[n]."""
        times: Array = self.times_s[self.is_warmup == 0, 0]
        return times

    def visit(self, place: Place, caught: Caught) -> None:
        """Make the call ready and time it a few times. Collective."""
        world, measure = place.world, self.measure
        left = measure.max_repeats - len(self.counted)
        with own_cores(world) as cores:
            place.cores = cores
            with self.calls(self.study, self.case, place, not len(self.times_s)) as call:
                before_j = place.read_energy()
                repeats, began_s = min(measure.block, left), time.perf_counter()
                times_s = interleave_ranks(
                    world, {0: call.run}, repeats, measure.warmup, lambda _: call.prepare()
                )[0]
                spent_ns = np.array([int((time.perf_counter() - began_s) * 1e9)])
                energy = place.energy_j(before_j)
        self.outcomes |= call.outcomes
        over_ranks = (times_s.max(axis=1), times_s.min(axis=1), times_s.mean(axis=1))
        self.times_s = np.concatenate([self.times_s, np.stack(over_ranks, axis=1)])
        flags = (np.arange(len(times_s)) < measure.warmup).astype(np.uint8)
        self.is_warmup = np.concatenate([self.is_warmup, flags])
        if energy:
            self.spent_j += float(energy["energy_j"])
            self.outcomes["energy_j"] = self.spent_j / len(self.times_s)
        self.spent_s += float(world.max(spent_ns)[0]) / 1e9
        self.done = self._is_done()  # the same on all ranks, as all it looks at is

    def _is_done(self) -> bool:
        measure, counted = self.measure, self.counted
        if len(counted) < measure.min_repeats:
            return False
        if len(counted) >= measure.max_repeats or self.spent_s >= measure.max_time_s:
            return True
        return is_enough(counted, measure.confidence, measure.relative)

    def result(self, place: Place) -> Result:
        """Return the times of all repeats."""
        return Result(self.times_s, self.is_warmup, self.outcomes, place.environment())

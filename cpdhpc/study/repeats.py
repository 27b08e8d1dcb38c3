"""Visits with warm-ups and repeats until a median is known well enough, and proof of the ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..bench.harness import interleave_ranks
from ..config import UserError
from ..kinds.base import Calls, Measuring
from ..kinds.factors import Array, Case, Outcomes, Result
from ..kinds.place import Place
from ..signals import Caught
from ..world.cores import own_cores
from ..world.mpi import World, library_version
from .spec import Study
from .statistics import is_enough

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

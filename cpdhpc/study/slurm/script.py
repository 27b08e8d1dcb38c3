"""The text of Slurm scripts: a function of the study, the site and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Any

from ..cases import Batch
from ..spec import Study
from .site import LAUNCHERS, Site, launch

MORE_TO_DO = 85  # exit status of ranks that USR1 stopped and that wrote a checkpoint
SPARE = 1.5  # times the estimate of a batch is what its job may take
START_S = 60.0  # for the start of the job and its ranks
COLLECT_MIN = 15


@dataclass(frozen=True)
class Array:
    """Batches of one shape, which run as one array; an element's index is number - offset."""

    nodes: int
    ppn: int
    offset: int
    batches: tuple[Batch, ...]

    @property
    def name(self) -> str:
        """A name for files."""
        return f"{self.nodes}x{self.ppn}" + (f"-from{self.offset}" if self.offset else "")

    @property
    def indices(self) -> str:
        """The indices of the elements, as sbatch --array takes them."""
        return ranges(batch.number - self.offset for batch in self.batches)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, neighbours as ranges: 0-3,7."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [(found[0][1], found[-1][1]) for found in (list(run) for _, run in runs)]
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ends)


def arrays(batches: Iterable[Batch], site: Site) -> list[Array]:
    """Return the arrays that batches run as: one per shape, more where Slurm's are too short."""

    def key(batch: Batch) -> tuple[int, int, int]:
        return batch.nodes, batch.ppn, batch.number // site.max_array * site.max_array

    grouped = groupby(sorted(batches, key=lambda batch: (*key(batch), batch.number)), key)
    return [Array(*shape, tuple(members)) for shape, members in grouped]


def array_script(array: Array, site: Site, study: Study, folder: Path) -> str:
    """Return the script of an array of batches of a study.

    folder: of the study, as the job sees it
    """
    longest_s = max(batch.time_s for batch in array.batches)
    number = '"$SLURM_ARRAY_TASK_ID"'
    if array.offset:
        number = f"$(({array.offset} + SLURM_ARRAY_TASK_ID))"
    return parallel_script(
        "batch",
        site,
        (array.nodes, array.ppn),
        (str(array.nodes * array.ppn), str(array.ppn)),
        name=f"{study.name}-{array.name}",
        time_min=minutes(longest_s, site),
        log=folder / "logs" / "%x-%A_%a.log",
        job_id="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",  # SLURM_JOB_ID may be all elements
        study=study.name,
        folder=folder,
        number=number,
        indices=array.indices,
        throttle=study.run.throttle,
        retries=study.run.retries,
        jobs=len(array.batches),
        cases=sum(len(batch.cases) for batch in array.batches),
    )


def collect_script(site: Site, study: str, folder: Path) -> str:
    """Return the script that gathers what is finished; sbatch is told what it waits for."""
    return _render(
        "collect",
        site=site,
        name=f"{study}-collect",
        nodes=1,
        ppn=1,
        cpus=1,
        gpus=0,
        time_min=COLLECT_MIN,
        log=folder / "logs" / "%x-%j.log",
        study=study,
        folder=folder,
    )


def minutes(time_s: float, site: Site) -> int:
    """Return the time limit of a job, in minutes, for an estimate in seconds."""
    wanted = math.ceil((SPARE * time_s + START_S + site.grace_s) / 60)
    return wanted if site.max_time_min is None else min(wanted, site.max_time_min)


def parallel_script(
    template: str, site: Site, shape: tuple[int, int], counts: tuple[str, str], **values: Any
) -> str:
    """Return a script that starts ranks and forwards signals to them.

    shape: nodes and ranks per node that sbatch is asked for
    counts: the ranks and the ranks per node that start, as words of the shell
    values: what else the template needs
    """
    nodes, ppn = shape
    return _render(
        template,
        site=site,
        nodes=nodes,
        ppn=ppn,
        cpus=site.cpus_per_rank,
        gpus=min(ppn, site.gpus_per_node),
        launch=launch(site.launcher, *counts, site.cpus_per_rank, site.mpi_flags),
        program=LAUNCHERS[site.launcher].program,
        signal=LAUNCHERS[site.launcher].signal,
        more_to_do=MORE_TO_DO,
        **values,
    )


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cpdhpc.study.slurm", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda text: quote(str(text))
    return environment.get_template(f"{template}.sbatch.j2").render(**values)


@dataclass(frozen=True)
class Program:
    """What a script runs. shape: nodes and ranks per node unless sbatch is told another."""

    shape: tuple[int, int]
    time_min: int


PROGRAMS = {  # name of the template and of the script: what it runs
    "train": Program((1, 2), 60),
    "allreduce_scaling": Program((2, 2), 60),
}


def scripts(site: Site) -> dict[str, str]:
    """Return the text of a site's scripts by the names of their files; slurm/ has the defaults'."""
    title = "Open MPI, CPUs" if site == Site() else f"site {site.name}"
    return {f"{name}.sbatch": _script(name, site, title) for name in PROGRAMS}


def _script(name: str, site: Site, title: str) -> str:
    program = PROGRAMS[name]
    return parallel_script(
        name,
        site,
        program.shape,
        ('"$((nodes * ppn))"', '"$ppn"'),
        file=f"{name}.sbatch",
        title=title,
        name=name,
        time_min=program.time_min,
        log=Path("%x-%j.log"),
        job_id="$SLURM_JOB_ID",
        retries=0,
    )

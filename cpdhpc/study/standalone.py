"""python -m cpdhpc scripts: job scripts that are submitted as they are, as those in slurm/."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ..config import UserError
from .script import parallel_script
from .site import Site, add_site, load_site


@dataclass(frozen=True)
class Program:
    """What a script runs. shape: nodes and ranks per node unless sbatch is told another."""

    shape: tuple[int, int]
    time_min: int


PROGRAMS = {  # name of the template and of the script: what it runs
    "train": Program((1, 2), 60),
    "allreduce_scaling": Program((2, 2), 60),
}
VARIANTS = {  # end of the script's name: its launcher, GPUs per node, what is said of it
    "": ("mpirun", 0, "Open MPI, CPUs"),
    "_gpu": ("mpirun", 2, "Open MPI, a GPU for each rank"),
    "_mpich": ("srun-pmi2", 0, "MPICH or Cray MPICH under srun, CPUs"),
    "_mpich_gpu": ("srun-pmi2", 2, "MPICH or Cray MPICH under srun, a GPU for each rank"),
}


def scripts(site: Site | None = None) -> dict[str, str]:
    """Return the text of the scripts by the names of their files.

    site: whose scripts they are; None: those of slurm/, one for each of VARIANTS
    """
    if site is not None:
        found = {f"{name}.sbatch": (name, site, f"site {site.name}") for name in PROGRAMS}
    else:
        found = {
            f"{name}{end}.sbatch": (name, Site(launcher=launcher, gpus_per_node=gpus), title)
            for name in PROGRAMS
            for end, (launcher, gpus, title) in VARIANTS.items()
        }
    return {file: _script(file, *what) for file, what in found.items()}


def _script(file: str, name: str, site: Site, title: str) -> str:
    program = PROGRAMS[name]
    return parallel_script(
        name,
        site,
        program.shape,
        ("$((nodes * ppn))", "$ppn"),
        file=file,
        title=title,
        name=name,
        time_min=program.time_min,
        log=Path("%x-%j.log"),
        job_id="$SLURM_JOB_ID",
        retries=0,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of scripts."""
    add_site(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="where they go")


def run(arguments: argparse.Namespace) -> int:
    """Write the scripts and print their paths.

    Raises UserError where the profile cannot be used, or a file not be written.
    """
    site = None if arguments.site is None else load_site(arguments.site)
    for name, text in scripts(site).items():
        path = arguments.out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        print(path)
    return 0

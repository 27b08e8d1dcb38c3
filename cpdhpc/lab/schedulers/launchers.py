"""Launchers that come with an MPI, and so are there under each scheduler."""

from __future__ import annotations

from ..binding import BINDINGS
from .base import Launcher


def open_mpi(hosts: str = "", cores: str = ":PE={cores}", given: str = "") -> Launcher:
    """Return Open MPI's mpirun, which fills the slots of a node package by package, or by turns.

    hosts: its option for them, "" if it asks the scheduler
    cores: what gives a rank its cores; given: the same if the job has some, in the shell
    """
    return Launcher(
        f"mpirun -n {{ranks}}{hosts} --map-by {{deal}}",
        bind={each: f" --bind-to {each}" for each in BINDINGS}
        | {"": given, "core": f"{given or cores} --bind-to core"},
        distribution=dict.fromkeys(("", "block"), "ppr:{ppn}:node") | {"cyclic": "package"},
        several=given or cores,
    )


def hydra(hosts: str = "", cores: str = ":{cores}", given: str = "") -> Launcher:
    """Return the mpiexec of MPICH and of what descends from it, which binds once. See open_mpi."""
    core = f" -bind-to core{cores}"
    return Launcher(
        f"mpiexec -n {{ranks}}{hosts} -ppn {{ppn}}",
        bind={each: f" -bind-to {each}" for each in BINDINGS} | {"": given, "core": core},
        distribution={"block": " -map-by core", "cyclic": " -map-by socket"},
        several=given or core,
    )

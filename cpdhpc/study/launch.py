"""How MPI programs are started on this machine: as slurm/mpirun-local does it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ..config import UserError

NAMES = ("mpirun", "mpiexec")


class LaunchError(UserError):
    """MPI programs cannot be started here."""


def launcher() -> str:
    """Return the path of the launcher: the first on PATH, else that beside this Python.

    Raises LaunchError where there is none.
    """
    beside = str(Path(sys.executable).parent)
    for path in (None, beside):
        for name in NAMES:
            found = shutil.which(name, path=path)
            if found:
                return found
    raise LaunchError(f"study: neither {' nor '.join(NAMES)} is on PATH or beside {sys.executable}")


def is_open_mpi(path: str) -> bool:
    """Return whether a launcher is Open MPI's. Raises LaunchError where it does not run."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"study: {path} --version: {error}") from None
    return bool(re.search(r"open.mpi|open-mpi|prte", done.stdout + done.stderr, re.IGNORECASE))


def local_command(ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return what to put before a command that runs on so many ranks here, and its environment.

    Allows more ranks than cores, and root, both of which Open MPI refuses unless told; waiting
    ranks give way where ranks share a core.
    """
    path, environment = launcher(), dict(os.environ)
    crowded = ranks > (os.cpu_count() or 1)
    if not is_open_mpi(path):
        environment |= {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"} if crowded else {}
        return [path, "-n", str(ranks)], environment
    environment |= {"OMPI_MCA_mpi_yield_when_idle": "1"} if crowded else {}
    if os.geteuid() == 0:
        for name in ("OMPI", "PRTE"):
            environment |= {f"{name}_ALLOW_RUN_AS_ROOT": "1"}
            environment |= {f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [path, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)], environment

"""Where a result comes from: versions, machine, job, commit."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import cpdhpc

from .ops.threads import kernel_threads

if TYPE_CHECKING:
    from .comm import Ranks

PACKAGES = ("numpy", "torch", "mpi4py", "h5py", "scikit-learn", "pydantic", "cupy-cuda12x")


@cache
def versions() -> dict[str, str]:
    """Return the versions of cpdhpc, Python and the packages that are installed."""
    found = {"cpdhpc": cpdhpc.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def processor() -> str:
    """Return the model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # as on Arm, where the kernel gives no name


def cpu_clone() -> str:
    """Return the name of the processor clone that the compiled kernels run."""
    from . import _cpu

    return str(_cpu.clone())


@cache
def git_commit() -> str:
    """Return the commit of the source tree that the package lies in, "" where it lies in none."""
    source = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(source), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    inside = len(lines) == 2 and Path(lines[0]) == source
    return lines[1] if inside else ""


def hosts(world: Ranks) -> list[str]:
    """Return the host name of every process. Collective."""
    return list(world.gather(socket.gethostname()))


def attributes(world: Ranks) -> dict[str, str | int]:
    """Return what to store beside a result. Collective."""
    from .comm import Loopback
    from .comm.mpi_library import library_version

    names = hosts(world)
    return {
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "mpi_library": "" if isinstance(world, Loopback) else library_version(),
        "processor": processor(),
        "cpu_clone": cpu_clone(),
        "kernel_threads": kernel_threads(),
        "hosts": " ".join(names),
        "processes": world.size,
        "virtual_ranks": world.virtual_ranks,
        "ranks": world.ranks,
        "git_commit": git_commit(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID", ""),
    }

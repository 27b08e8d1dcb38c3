"""Where a result comes from (versions, machine, job, commit): in files, and as cpdhpc info."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .._version import __version__
from ..ops import kernel_threads
from ..world.cores import threads_of_rank
from ..world.gpu_messages import Answer, find_out, sharing, use_own_gpu
from ..world.mpi import library_version
from ..world.ranks import Ranks
from .schedulers import recorded

PACKAGES = (
    *("numpy", "torch", "mpi4py", "h5py", "scikit-learn", "pydantic"),
    *("cupy-cuda12x", "cupy-cuda13x"),
)


@cache
def versions() -> dict[str, str]:
    """Return the versions of cpdhpc, Python and the packages that are installed."""
    found = {"cpdhpc": __version__, "python": platform.python_version()}
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
    from .. import _cpu

    return str(_cpu.clone())


@cache
def git_commit() -> str:
    """Return the commit of the source tree that the package lies in, "" if it lies in none."""
    source = Path(__file__).resolve().parents[2]
    lines = _git(source, "rev-parse", "--show-toplevel", "HEAD")
    inside = len(lines) == 2 and Path(lines[0]) == source
    return lines[1] if inside else ""


def commit_of(directory: Path) -> tuple[str, bool]:
    """Return the commit of the work tree of a directory, and whether files differ from it.

    ("", False) outside of work trees. Files that git does not track are not compared.
    """
    lines = _git(directory, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    text = lines[0] if len(lines) == 1 else ""
    return text.removesuffix("-dirty"), text.endswith("-dirty")


def _git(directory: Path, *words: str) -> list[str]:
    """Return the words that git prints, none if it fails."""
    command = ["git", "--no-optional-locks", "-C", str(directory), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return []


def identity() -> dict[str, str]:
    """Return what times depend on beside the case, in which the cases of a study are to agree."""
    return {"mpi_library": library_version(), "git_commit": git_commit(), **machine()}


def machine() -> dict[str, str]:
    """Return the part of identity that is the machine's: programs are not of this package."""
    return {"processor": processor()}


def difference(before: Mapping[str, Any], own: Mapping[str, str] | None = None) -> str | None:
    """Return in words in what this process differs from an identity, None where in nothing.

    own: its identity, or a part of it
    """
    for name, value in (identity() if own is None else own).items():
        if name in before and before[name] != value:
            return f"{name} {before[name] or 'unknown'}, not {value or 'unknown'}"
    return None


def hosts(world: Ranks) -> list[str]:
    """Return the host name of every process. Collective."""
    return list(world.gather(socket.gethostname()))


def attributes(world: Ranks) -> dict[str, str | int]:
    """Return what to store beside a result. Collective."""
    from ..world.mpi import library_version
    from ..world.ranks import Loopback

    names = hosts(world)
    return {
        "date": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "mpi_library": "" if isinstance(world, Loopback) else library_version(),
        "processor": processor(),
        "cpu_clone": cpu_clone(),
        "kernel_threads": kernel_threads(),
        "hosts": " ".join(names),
        "processes": world.processes,
        "virtual_ranks": world.virtual_ranks,
        "ranks": world.ranks,
        "git_commit": git_commit(),
        **{f"{name}_job_id": each.own_job() for name, each in recorded().items()},
    }


def add_info(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of info: none."""


def run_info(arguments: argparse.Namespace, world: Ranks) -> None:
    """Print a table from process 0. Collective."""
    rows = [*info_rows(world), ("GPU", gpu() or "none"), *gpu_rows(world)]
    if world.process == 0:
        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        Console(soft_wrap=True).print(table)


def info_rows(world: Ranks) -> list[tuple[str, str]]:
    """Return versions, MPI, processes and their cores, by name. Collective."""
    names = hosts(world)
    threads = str(threads_of_rank(world))  # of torch in train, of kernels in train and bench
    return [
        *versions().items(),
        ("MPI library", library_version()),
        ("processes", f"{world.processes} on {', '.join(sorted(set(names)))}"),
        ("cores of this process", str(len(os.sched_getaffinity(0)))),
        ("torch threads", threads if find_spec("torch") else "torch is not installed"),
        ("kernel threads", threads),
        ("CPU kernels", cpu_clone()),
    ]


def gpu() -> str:
    """Return the name of the GPU that CuPy sees, "" where it sees none."""
    if find_spec("cupy") is None:
        return ""
    from ..ops import gpu_runtime

    return gpu_runtime.device_name()


def gpu_rows(world: Ranks) -> list[tuple[str, str]]:
    """Return each process's GPU, whether MPI takes GPU memory, how arrays travel. Collective."""
    _, address = use_own_gpu(world)
    found = world.gather(address, "GPU")
    if not all(found):
        missing = Answer(False, "CuPy and a GPU are not there on every process")
        return [("GPU-aware MPI", str(missing))]
    own = ", ".join(f"{process}: {gpu}" for process, gpu in enumerate(found))
    shared = sharing(world, found)
    own += f" (processes {', '.join(shared)} share GPUs of their node)" if shared else ""
    answer = find_out(world)
    travel = "go to MPI as they are" if answer.yes else "are staged through pinned host memory"
    return [("GPU of process", own), ("GPU-aware MPI", str(answer)), ("GPU arrays", travel)]

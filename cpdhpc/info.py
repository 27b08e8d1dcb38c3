"""What this machine has: python -m cpdhpc info."""

from __future__ import annotations

import os
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table

from . import provenance
from .comm import Ranks
from .comm.device import Answer, find_out
from .comm.mpi_library import library_version
from .comm.threads import threads_of_rank


def print_info(world: Ranks) -> None:
    """Print a table from process 0. Collective."""
    hosts = provenance.hosts(world)
    threads = str(threads_of_rank(world))  # of torch in train, of kernels in train and bench
    rows = [
        *provenance.versions().items(),
        ("MPI library", library_version()),
        ("processes", f"{world.size} on {', '.join(sorted(set(hosts)))}"),
        ("cores of this process", str(len(os.sched_getaffinity(0)))),
        ("torch threads", threads if find_spec("torch") else "torch is not installed"),
        ("kernel threads", threads),
        ("CPU kernels", provenance.cpu_clone()),
        ("GPU", gpu() or "none"),
        *gpu_rows(world),
    ]
    if world.rank == 0:
        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        Console(soft_wrap=True).print(table)


def gpu() -> str:
    """Return the name of the GPU that CuPy sees, "" where it sees none."""
    if find_spec("cupy") is None:
        return ""
    from .ops import gpu_streams

    return gpu_streams.device_name()


def gpu_rows(world: Ranks) -> list[tuple[str, str]]:
    """Return whether MPI takes GPU memory, why, and how GPU arrays travel then. Collective."""
    if not all(world.gather(bool(gpu()), "GPU")):
        missing = Answer(False, "CuPy and a GPU are not there on every process")
        return [("GPU-aware MPI", str(missing))]
    answer = find_out(world)
    travel = "go to MPI as they are" if answer.yes else "are staged through pinned host memory"
    return [("GPU-aware MPI", str(answer)), ("GPU arrays", travel)]

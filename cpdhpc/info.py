"""What this machine has: python -m cpdhpc info."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from . import provenance
from .comm import Ranks
from .comm.ranks import Wait
from .comm.threads import threads_of_rank
from .comm.world import library_version

SIZE = 1 << 20  # bytes; more than MPI libraries send along with the envelope


class Answer(NamedTuple):
    """yes or no, and how it was found out."""

    yes: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.yes else 'no'} ({self.why})"


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
        ("GPU-aware MPI", str(gpu_aware(world))),
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
    from .ops import gpu as operations

    return operations.device_name()


def gpu_aware(world: Ranks) -> Answer:
    """Return whether MPI takes GPU memory. Collective.

    The library is asked first: a no is final, for a trial might crash. A yes is tried, as a
    library may have been built for GPUs but run where it cannot use them.
    """
    found = min(world.gather(bool(gpu())))
    if not found:
        return Answer(False, "CuPy and a GPU are not there on every process")
    asked = [Answer(*each) for each in world.gather(tuple(query()))]
    for answer in asked:
        if not answer.yes:
            return answer
    if world.size < 2:
        return Answer(True, f"{asked[0].why}; not tried, that takes 2 processes")
    return Answer(exchange_on_device(world), "processes 0 and 1 sent GPU memory to each other")


def exchange_on_device(world: Ranks) -> bool:
    """Send GPU memory between processes 0 and 1 and return whether it arrived. Collective."""
    from .ops import gpu as operations

    right = True
    if world.rank < 2:
        other = 1 - world.rank
        mine = operations.to_device(np.full(SIZE, world.rank, np.uint8))
        theirs = operations.to_device(np.full(SIZE, 255, np.uint8))
        requests = world.irecv(other, world.rank, theirs) + world.isend(world.rank, other, mine)
        world.wait_any([Wait(requests, world.rank, "GPU memory: waited {:.1f} s")])
        right = bool((operations.to_host(theirs) == other).all())
    return all(world.gather(right))


def query() -> Answer:
    """Ask the MPI library that is loaded in this process whether it was built for GPUs."""
    path = loaded_library()
    if path is None:
        return Answer(False, "no libmpi is loaded in this process")
    library = ctypes.CDLL(path)
    if hasattr(library, "MPIX_Query_cuda_support"):
        return Answer(bool(library.MPIX_Query_cuda_support()), "MPIX_Query_cuda_support")
    if hasattr(library, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(0, ctypes.byref(flag))  # 0 is CUDA
        return Answer(not failed and bool(flag.value), "MPIX_GPU_query_support")
    return Answer(False, f"{Path(path).name} has no query for it")


def loaded_library() -> str | None:
    """Return the path of the libmpi in this process's memory map."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if Path(path).name.startswith("libmpi.so"):
            return path
    return None

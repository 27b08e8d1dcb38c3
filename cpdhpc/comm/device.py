"""Whether MPI takes GPU memory: the library is asked, then tried."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..ops import to_host
from .ranks import Ranks, Wait

SIZE_BYTES = 1 << 20  # of the trial; more than MPI libraries send along with the envelope


TRIAL = "GPU memory: waited {:.1f} s for the trial of MPI; World(gpu_direct=False) leaves it out"


class Answer(NamedTuple):
    """yes or no, and how it was found out."""

    yes: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.yes else 'no'} ({self.why})"


def gpu_aware(world: Ranks) -> Answer:
    """Return whether MPI takes GPU memory on all processes; a world asks once. Collective."""
    if world.gpu_aware is None:
        world.gpu_aware = find_out(world)
    return Answer(*world.gpu_aware)


def find_out(world: Ranks) -> Answer:
    """Ask the library, then try. Collective.

    The library is asked first, as a trial with one that does not know GPUs crashes: a no is final.
    A yes is tried, because it may say only how the library was built.
    """
    asked = [Answer(*each) for each in world.gather(tuple(_ask(world)), "GPU-aware MPI")]
    for answer in asked:
        if not answer.yes:
            return answer
    if world.size < 2:
        return Answer(True, f"{asked[0].why}; not tried, that takes 2 processes")
    if exchange(world):
        return Answer(True, f"{asked[0].why}; each process sent GPU memory to the next")
    return Answer(False, f"{asked[0].why} says yes, but GPU memory arrived changed")


def _ask(world: Ranks) -> Answer:
    return query() if world.gpu_direct else Answer(False, "the world has gpu_direct=False")


def exchange(world: Ranks) -> bool:
    """Send GPU memory from each process to the next; return whether all arrived. Collective."""
    from ..ops import gpu_streams

    count, each = world.size, world.virtual_ranks
    following, previous = (world.rank + 1) % count, (world.rank - 1) % count
    mine = gpu_streams.to_device(_pattern(world.rank))
    theirs = gpu_streams.to_device(np.zeros(SIZE_BYTES, np.uint8))
    here, to, source = (process * each for process in (world.rank, following, previous))
    requests = world.irecv(source, here, theirs) + world.isend(here, to, mine)
    world.wait_any([Wait(requests, here, TRIAL)])
    right = np.array_equal(to_host(theirs), _pattern(previous))
    return all(world.gather(right, "GPU-aware MPI"))


def _pattern(process: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return bytes that differ from place to place and between neighbours."""
    return (np.arange(SIZE_BYTES) % 251 + process % 5 + 1).astype(np.uint8)


def query() -> Answer:
    """Ask the MPI library that is loaded in this process whether it takes CUDA memory."""
    paths = loaded("libmpi")
    for path in paths:
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI, MPICH, MVAPICH, ParaStation
            if library.MPIX_Query_cuda_support() and _switched_off():
                return Answer(False, "opal_cuda_support is off")
            return Answer(bool(library.MPIX_Query_cuda_support()), "MPIX_Query_cuda_support")
        if hasattr(library, "MPIX_GPU_query_support"):  # Cray's MPICH
            flag = ctypes.c_int(0)
            failed = library.MPIX_GPU_query_support(0, ctypes.byref(flag))  # 0 is CUDA
            return Answer(not failed and bool(flag.value), "MPIX_GPU_query_support")
    names = ", ".join(Path(path).name for path in paths)
    return Answer(False, f"{names} has no query for it" if names else "no libmpi is loaded")


def _switched_off() -> bool:
    """Whether CUDA support is off in Open MPI 4, whose query tells only how it was built."""
    for path in loaded("libopen-pal"):
        try:
            return not ctypes.c_bool.in_dll(ctypes.CDLL(path), "opal_cuda_support").value
        except ValueError:  # Open MPI 5 has no such variable: its query tells what is in use
            continue
    return False


def loaded(start: str) -> list[str]:
    """Return the paths of the libraries in this process's memory map with names that start so."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = dict.fromkeys(line[line.index("/") :] for line in lines if "/" in line)
    return [path for path in paths if Path(path).name.startswith(start) and ".so" in path]

"""Threads on the CPU: how many the kernels use, chosen once for this process; time slices."""

from __future__ import annotations

import os

from .. import _cpu
from ..errors import ArgumentError, UserError

_chosen: list[int] = []  # what set_kernel_threads was given, or what OMP_NUM_THREADS said


def kernel_threads() -> int:
    """Return how many threads share the work on an array of 1 MiB of float32 or more.

    What set_kernel_threads was given last; else OMP_NUM_THREADS as it is at the first call, 1
    where it is not set. Raises UserError, a ValueError, where that is no number from 1 on.
    """
    if not _chosen:
        _chosen.append(omp_num_threads() or 1)
    return _chosen[0]


def set_kernel_threads(count: int) -> None:
    """Have the CPU's operations run on so many threads from now on; no bit of a result changes.

    Threads start when they are first needed, on the cores that the process may use then, and
    sleep while there is nothing to do. Raises ValueError for anything but an int from 1 on.
    """
    if not isinstance(count, int) or count < 1:
        raise ArgumentError("set_kernel_threads", "count", count, "must be an int, 1 or more")
    _chosen[:] = [count]


def omp_num_threads() -> int | None:
    """Return OMP_NUM_THREADS, of a list for nested levels the first; None where it is not set.

    Raises UserError, a ValueError, where it is not a number from 1 on.
    Source: OpenMP 5.2, section 21.1.2.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    first = text.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise UserError(f"OMP_NUM_THREADS={text}: must be a number of threads, 1 or more")
    return int(first)


SLICE_NS = 100_000  # the shortest that Linux has


def take_short_slices() -> bool:
    """Let the calling thread run soon after it wakes, beside another that computes on its core.

    Linux lets a thread end its slice first, of some ms where its clock ticks every 10 ms, unless
    the slices of the one that wakes are shorter. Returns whether it has taken that: from 6.12 on.
    Source: Documentation/scheduler/sched-eevdf.rst of Linux.
    """
    return _cpu.set_time_slice(SLICE_NS)

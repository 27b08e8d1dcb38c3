"""Array operations: one set of functions, three implementations (reference, cpu, gpu)."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import numpy as np

from ..config import UserError


def on_gpu(x: Any) -> bool:
    """Whether x, an array that backend_of knows, lies in GPU memory."""
    return not isinstance(x, np.ndarray)


def to_host(x: Any) -> Any:
    """Return x as a NumPy array: x itself, or a copy of what the current stream makes of it."""
    return x.get() if on_gpu(x) else x


def backend_of(x: Any) -> ModuleType:
    """Return the module whose operations work on x: cpu for NumPy arrays, gpu for CuPy arrays.

    Raises TypeError for anything else.
    """
    if isinstance(x, np.ndarray):
        from . import cpu

        return cpu
    if type(x).__module__.partition(".")[0] == "cupy":
        from . import gpu

        return gpu
    raise TypeError(f"ops: {type(x).__name__}: known are numpy.ndarray and cupy.ndarray")


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
        raise ValueError(f"set_kernel_threads: count={count!r}: must be an int, 1 or more")
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

"""Code that the implementations share: threads of the CPU, layouts, selection by magnitude."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .. import _cpu
from ..errors import ArgumentError, UserError
from ..formats import SHIFT_BIAS, SHIFT_NONFINITE, TILE, Format, tiles

Array = np.ndarray[Any, np.dtype[Any]]
MAGNITUDE = np.uint32(0x7FFFFFFF)  # float32 bits without the sign
Term = Literal["magnitude", "square"]  # terms of a sum, besides the value itself
NONFINITE_BITS = 0x7F800000  # float32 bits of |x| from here on: infinity or NaN

_chosen: list[int] = []  # of set_kernel_threads or OMP_NUM_THREADS; empty at first


def kernel_threads() -> int:
    """Return the number of threads that work on an array of 1 MiB of float32 or more.

    It is the count of the last set_kernel_threads; else OMP_NUM_THREADS at the first call, 1 if it
    is not set. Raises UserError, a ValueError, if that is not a number from 1 on.
    """
    if not _chosen:
        _chosen.append(omp_num_threads() or 1)
    return _chosen[0]


def set_kernel_threads(count: int) -> None:
    """Run the CPU's operations on count threads from now on; no bit of a result changes.

    Threads start when they are first needed, on the cores that the process may use then, and
    sleep while there is no work. Raises ValueError for anything but an int from 1 on.
    """
    if not isinstance(count, int) or count < 1:
        raise ArgumentError("set_kernel_threads", "count", count, "must be an int, 1 or more")
    _chosen[:] = [count]


def omp_num_threads() -> int | None:
    """Return OMP_NUM_THREADS, of a list for nested levels the first; None if it is not set.

    Raises UserError, a ValueError, if it is not a number from 1 on.
    Source: OpenMP 5.2, section 21.1.2.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    first = text.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise UserError(f"OMP_NUM_THREADS={text}: must be a number of threads, 1 or more")
    return int(first)


SLICE_NS = 100_000  # the shortest that Linux allows


def take_short_slices() -> bool:
    """Let the calling thread run soon after it wakes, even if another computes on its core.

    Linux lets the running thread end its slice first, of several ms if the clock ticks every 10 ms,
    unless the waking thread has shorter slices. Returns whether Linux supports it, from 6.12 on.
    Source: Documentation/scheduler/sched-eevdf.rst of Linux.
    """
    return _cpu.set_time_slice(SLICE_NS)


def fitting_shift(amax_bits: Array, fmt: Format) -> Array:
    """Return per tile the stored byte of the largest k with amax * 2**k <= fmt.max.

    With OCP's blocks the largest magnitude keeps fmt's exponent emax, so that it may be above max.
    amax_bits: uint32[tiles] as from amax_tiles; returns uint8[tiles]
    k stays within fmt.shift_min .. fmt.shift_max; all zeros: k = 0, not finite: SHIFT_NONFINITE.
    """
    bits = amax_bits.astype(np.int64)
    exponent = (bits >> 23) - 127
    k = fmt.emax - exponent - ((bits & 0x7FFFFF) > fmt.max_significand)
    k = np.where(bits == 0, 0, np.clip(k, fmt.shift_min, fmt.shift_max))
    return np.where(bits >= NONFINITE_BITS, SHIFT_NONFINITE, k + SHIFT_BIAS).astype(np.uint8)


def stream_words(widths: Array, n: int) -> int:
    """Return the number of words of n codes that pack_stream packs at the widths of their tiles."""
    return 32 * int(widths[:-1].sum(dtype=np.int64)) + _tail_words(widths, n) if n else 0


def _tail_words(widths: Array, n: int) -> int:
    return -(-(n - (tiles(n) - 1) * TILE) * int(widths[-1]) // 32)


def threshold_bits(threshold: float) -> int:
    """Return the bits of the largest float32 that is not above threshold.

    A float32 is above threshold if its bits are larger. Raises ValueError for NaN and negative
    numbers.
    """
    if not threshold >= 0:
        raise ArgumentError("select_above", "threshold", threshold, "must be 0 or more")
    with np.errstate(over="ignore"):
        nearest = np.float32(threshold)
    if float(nearest) > threshold:
        nearest = np.nextafter(nearest, np.float32(-math.inf))
    return int(nearest.view(np.uint32) & MAGNITUDE)


Count = Callable[[Any, int, int, int], Array]  # a backend's count_digits, its result a NumPy array

PASSES = ((20, 2048), (10, 1024), (0, 1024))  # shift and buckets: 11, 10 and 10 of 31 bits


def check_rank(name: str, k: int, n: int, least: int) -> None:
    """Raise ValueError unless k is least..n, and n values have indices of 32 bits."""
    if not least <= k <= n:
        raise ArgumentError(name, "k", k, f"must be {least}..{n}, the number of values")
    check_size(name, n)


def check_size(name: str, n: int) -> None:
    """Raise ValueError unless n values have indices of 32 bits."""
    if n >= 2**32:
        raise ValueError(f"{name}: {n} values: must be below {2**32}")


def radix_select(count: Count, x: Any, k: int) -> int:
    """Return the k-th largest magnitude of x, by histograms of its bits, the highest first.

    k: 1..n. Three passes over x, no sort.
    Source: radix selection, most significant digit first, as Alabi et al.: Fast k-selection
    algorithms for graphics processing units, ACM JEA 17, 2012.
    """
    low = 0
    for shift, buckets in PASSES:
        from_above = np.cumsum(count(x, low, shift, buckets)[::-1], dtype=np.int64)
        at = int(np.searchsorted(from_above, k))
        k -= int(from_above[at - 1]) if at else 0
        low += (buckets - 1 - at) << shift
    return low

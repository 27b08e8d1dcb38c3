"""The k-th largest magnitude and the k largest values, by passes that a backend has kernels for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Count = Callable[[Any, int, int, int], Array]  # a backend's count_digits, its result a NumPy array

PASSES = ((20, 2048), (10, 1024), (0, 1024))  # shift and buckets: 11, 10 and 10 of 31 bits


def check_rank(name: str, k: int, n: int, least: int) -> None:
    """Raise ValueError unless k is least..n, and n values have indices of 32 bits."""
    if not least <= k <= n:
        raise ValueError(f"{name}: k={k}: must be {least}..{n}, the number of values")
    check_size(name, n)


def check_size(name: str, n: int) -> None:
    """Raise ValueError unless n values have indices of 32 bits."""
    if n >= 2**32:
        raise ValueError(f"{name}: {n} values: must be below {2**32}")


def radix_select(count: Count, x: Any, k: int) -> int:
    """Return the k-th largest magnitude of x, by a histogram of some bits of it after the other.

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


def without_last_ties(magnitudes: Array, kth: int, k: int) -> Array:
    """Return where magnitudes, all of them kth or above, are the k largest: int64[k], ascending.

    Of those equal to kth the last ones are left out.
    """
    ties = np.flatnonzero(magnitudes == kth)
    return np.delete(np.arange(magnitudes.size), ties[k - magnitudes.size + ties.size :])

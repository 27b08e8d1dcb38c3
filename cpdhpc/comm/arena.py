"""Buffers for payloads, kept from one run to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def fresh(like: Array, size_bytes: int) -> Array:
    """Return a new uint8[size_bytes] of the kind of like."""
    return np.empty_like(like, shape=(size_bytes,), dtype=np.uint8)


class Arena:
    """Arrays that are taken in the same order time after time, and made only once.

    make: size_bytes -> uint8[size_bytes]
    """

    def __init__(self, make: Callable[[int], Array]) -> None:
        self._make = make
        self._arrays: list[Array] = []
        self._taken = 0

    def take(self, size_bytes: int) -> Array:
        """Return uint8[size_bytes], which is the caller's until the next rewind."""
        if self._taken == len(self._arrays):
            self._arrays.append(self._make(size_bytes))
        elif self._arrays[self._taken].size < size_bytes:  # twice as large: memory may be kept
            self._arrays[self._taken] = self._make(
                max(size_bytes, 2 * self._arrays[self._taken].size)
            )
        self._taken += 1
        return self._arrays[self._taken - 1][:size_bytes]

    def rewind(self) -> None:
        """Begin again with the first array."""
        self._taken = 0

"""The wire of float32 arrays on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ops import backend_of
from ..randomness import Key
from .wire import Array, Raw


@dataclass(frozen=True)
class DeviceRaw(Raw):
    """float32 as it is, with our own additions: CuPy's make subnormal numbers zero."""

    def add(self, payload: Array, shifts: Array | None, x: Array, out: Array) -> None:
        """Write x plus the values into out, which may be x."""
        backend_of(x).add(x, payload.view(np.float32), out)

    def add_encode(
        self,
        came: Array,
        came_shifts: Array | None,
        x: Array,
        shifts: Array | None,
        key: Key,
        offset: int,
        payload: Array,
        out: Array | None,
    ) -> int:
        """Write the bytes of x plus the values into payload, and into out if given; return 0."""
        backend_of(x).add(x, came.view(np.float32), payload.view(np.float32))
        return 0 if out is None else self.decode(payload, shifts, out)

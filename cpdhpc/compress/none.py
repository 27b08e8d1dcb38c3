"""No compression: float32 gradients as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..comm.allreduce import Allreduce
from .base import Aggregator, Array, Bucket, Mean, State, World


@dataclass(frozen=True)
class NoCompression(Aggregator):
    """The mean in float32. algorithm: that of the all-reduce; "mpi" is the library's own.

    Raises ValueError for an unknown algorithm.
    """

    aggregator: Literal["none"] = "none"
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        self._allreduce()

    def _allreduce(self) -> Allreduce:
        return Allreduce(wire="raw", algorithm=self.algorithm, scaling="none", op="mean")

    def aggregate(
        self,
        world: World,
        flats: list[Array],
        bucket: Bucket,
        state: State,
        *,
        seed: int,
        iteration: int,
    ) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        result = self._allreduce().run(world, flats, segments=bucket.segments)
        return Mean(result.array)

    def events(self, flat: Array, bucket: Bucket, shifts: Array | None) -> Array:
        """Return zeros: nothing is encoded. See Aggregator.events."""
        return np.zeros((len(bucket.names), 2), np.int64)

"""TernGrad: gradients of three values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ..collectives.allreduce import Allreduce, configured
from ..collectives.sparse import allgather
from ..formats import INTEGERS, SHIFT_BIAS, Cast, tiles
from ..ops.payloads import Exact
from ..world.ranks import Ranks
from .base import (
    Aggregator,
    Array,
    Context,
    Layers,
    Mean,
    check_known,
    check_place,
    mean_in_float32,
    shared_largest,
)
from .bucket import Bucket

TRITS = Exact(Cast(INTEGERS["ternary"], "stochastic"), trits=True)
UNIT_SHIFT = 1 + SHIFT_BIAS  # the format's numbers are -2, 0 and 2: those of 2 x are wanted


@dataclass(frozen=True)
class TernGrad(Aggregator):
    """The mean of gradients whose values become -s, 0 or s by chance, without bias.

    clip: values beyond so many standard deviations of their layer are cut to them; 0: none are
    bucket_values: so many values of a layer have an s of their own; 0: a layer has one
    share: the s of all ranks is the largest, so that integers are summed: 2 ranks + 1 levels;
        else each rank keeps its own, and gets the values of all others
    exclude: layers that travel in float32; algorithm: of the all-reduces
    Source: Wen et al.: TernGrad, NIPS 2017: equations 1 to 3 (ternary values), section 3.2
    (sharing), section 3.3 (clipping, scalers by layer).
    """

    aggregator: Literal["terngrad"] = "terngrad"
    clip: Annotated[float, Field(ge=0)] = 2.5
    bucket_values: Annotated[int, Field(ge=0)] = 0
    share: bool = True
    exclude: Layers = ()
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        self._allreduce(seed=0)

    def _allreduce(self, seed: int) -> Allreduce:
        return configured(
            wire="ternary", algorithm=self.algorithm, op="mean", rounding="stochastic", seed=seed
        )

    def check_layers(self, names: Collection[str]) -> None:
        """See Aggregator.check_layers."""
        check_known("TernGrad.exclude", self.exclude, names)

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        lengths = self._lengths(bucket)
        check_place(self, context.world, gradients, lengths.size)
        clipped = [self._clipped(gradient, bucket) for gradient in gradients]
        scalers = self._scalers(clipped, lengths, bucket, context.world, gradients)
        for x, scaler in zip(clipped, scalers, strict=True):  # now -1 to 1
            x /= np.repeat(np.where(scaler == 0, np.float32(1), scaler), lengths)
        if self.share:
            method = self._allreduce(context.seed)
            flat = method.run(context.world, clipped, iteration=context.iteration).arrays[0]
            flat *= np.repeat(scalers[0], lengths)
        else:
            flat = self._mean_of_own(clipped, scalers, lengths, context)
        mean_in_float32(gradients, bucket, self.exclude, context, flat, self.algorithm)
        return Mean(flat)

    def _lengths(self, bucket: Bucket) -> Array:
        """Return how many values have a scaler each, int64[scalers], in order."""
        found: list[int] = []
        for _, start, stop in bucket.segments:
            whole = self.bucket_values or max(stop - start, 1)
            found += [min(whole, stop - at) for at in range(start, stop, whole)]
        return np.array(found, np.int64)

    def _clipped(self, gradient: Array, bucket: Bucket) -> Array:
        """Return a copy of a gradient, cut to its layers' deviations; zeros where excluded."""
        out = gradient.copy()
        for name, x in zip(bucket.names, bucket.views(out), strict=True):
            if name in self.exclude:
                x[...] = 0
            elif self.clip and x.size:
                with np.errstate(invalid="ignore"):  # of infinity: the scaler will show it
                    limit = np.float32(self.clip * x.std(dtype=np.float64))
                np.clip(x, -limit, limit, out=x)
        return out

    def _scalers(
        self,
        clipped: list[Array],
        lengths: Array,
        bucket: Bucket,
        world: Ranks,
        gradients: list[Array],
    ) -> list[Array]:
        """Return the largest values of each hosted rank, or of all ranks. Collective."""
        starts = np.cumsum(lengths) - lengths
        own = [np.maximum.reduceat(np.abs(x), starts) if x.size else x for x in clipped]
        largest = shared_largest(world, gradients, bucket, np.max(own, axis=0))
        return [largest] * len(own) if self.share else own

    def _mean_of_own(
        self, clipped: list[Array], scalers: list[Array], lengths: Array, context: Context
    ) -> Array:
        """Return the mean of ternary values with scalers by rank, added in the order of ranks."""
        world, n = context.world, int(lengths.sum())
        shifts, payloads = np.full(tiles(n), UNIT_SHIFT, np.uint8), []
        for rank, x in zip(world.hosted, clipped, strict=True):
            payloads.append(np.empty(TRITS.size_bytes(n), np.uint8))
            TRITS.encode(x, shifts, context.key("ternary", rank), 0, payloads[-1])
        total, terms = np.zeros(n, np.float32), np.empty(n, np.float32)
        for payload, scaler in zip(
            allgather(world, payloads), allgather(world, scalers), strict=True
        ):
            TRITS.decode(payload, shifts, terms)
            total += terms * np.repeat(scaler, lengths)
        return total / np.float32(world.ranks)

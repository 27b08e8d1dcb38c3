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
    BLOCK_VALUES,
    Aggregator,
    Array,
    Context,
    Layers,
    Mean,
    blocks,
    check_known,
    check_place,
    mean_in_float32,
    shared_largest,
    spread,
)
from .bucket import Bucket
from .qsgd import decoded_mean

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
    clip: Annotated[float, Field(ge=0, le=1e6)] = 2.5
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
        ends = self._ends(bucket)
        check_place(self, context.world, gradients, ends.size)
        clipped = [self._clipped(gradient, bucket) for gradient in gradients]
        scalers = self._scalers(clipped, ends, bucket, context.world, gradients)
        for x, scaler in zip(clipped, scalers, strict=True):  # now -1 to 1
            divisors = np.where(scaler == 0, np.float32(1), scaler)
            for part in blocks(x):
                x[part] /= spread(divisors, ends, part)
        if self.share:
            method = self._allreduce(context.seed)
            flat = method.run(context.world, clipped, iteration=context.iteration).arrays[0]
            for part in blocks(flat):
                flat[part] *= spread(scalers[0], ends, part)
        else:
            flat = self._mean_of_own(clipped, scalers, ends, context)
        mean_in_float32(gradients, bucket, self.exclude, context, flat, self.algorithm)
        return Mean(flat)

    def _ends(self, bucket: Bucket) -> Array:
        """Return where the values that have a scaler each end, int64[scalers], in order."""
        found: list[int] = []
        for _, start, stop in bucket.segments:
            whole = self.bucket_values or max(stop - start, 1)
            found += [min(at + whole, stop) for at in range(start, stop, whole)]
        return np.array(found, np.int64)

    def _clipped(self, gradient: Array, bucket: Bucket) -> Array:
        """Return a copy of a gradient, cut to its layers' deviations; zeros where excluded."""
        out = gradient.copy()
        for name, start, stop in bucket.segments:
            x = out[start:stop]
            if name in self.exclude:
                x[...] = 0
            elif self.clip and x.size:
                with np.errstate(invalid="ignore"):  # of infinity: the scaler will show it
                    limit = np.float32(self.clip * _deviation(x))
                for part in blocks(x):
                    np.clip(x[part], -limit, limit, out=x[part])
        return out

    def _scalers(
        self,
        clipped: list[Array],
        ends: Array,
        bucket: Bucket,
        world: Ranks,
        gradients: list[Array],
    ) -> list[Array]:
        """Return the largest values of each hosted rank, or of all ranks. Collective."""
        own = [_maxima(x, ends) for x in clipped]
        largest = shared_largest(world, gradients, bucket, np.max(own, axis=0))
        return [largest] * len(own) if self.share else own

    def _mean_of_own(
        self, clipped: list[Array], scalers: list[Array], ends: Array, context: Context
    ) -> Array:
        """Return the mean of ternary values with scalers by rank, added in the order of ranks."""
        world, n = context.world, clipped[0].size
        shifts, payloads = np.full(tiles(n), UNIT_SHIFT, np.uint8), []
        for rank, x in zip(world.hosted, clipped, strict=True):
            payloads.append(np.empty(TRITS.size_bytes(n), np.uint8))
            TRITS.encode(x, shifts, context.key("ternary", rank), 0, payloads[-1])
        scales = allgather(world, scalers)
        return decoded_mean(TRITS, shifts, allgather(world, payloads), scales, ends, n)


def _deviation(x: Array) -> float:
    """Return x.std(dtype=np.float64) of float32[n], the same bits, without arrays as long as x.

    Squares are added in halves of halves, as NumPy adds those of a whole array.
    """
    mean = x.sum(dtype=np.float64) / x.size

    def squares(start: int, stop: int) -> float:
        if stop - start <= BLOCK_VALUES:
            difference = x[start:stop] - mean
            difference *= difference
            return float(difference.sum())
        half = (stop - start) // 2
        middle = start + half - half % 8
        return squares(start, middle) + squares(middle, stop)

    return float(np.sqrt(squares(0, x.size) / x.size))


def _maxima(x: Array, ends: Array) -> Array:
    """Return the largest magnitude of each run of float32[n], float32[runs]; NaN where one is."""
    found, starts = np.zeros(ends.size, np.float32), np.concatenate([[0], ends])
    for part in blocks(x):
        first, last = np.searchsorted(ends, [part.start, part.stop - 1], side="right")
        own = found[first : last + 1]
        inside = np.maximum(starts[first : last + 1] - part.start, 0)
        np.maximum(own, np.maximum.reduceat(np.abs(x[part]), inside), out=own)
    return found

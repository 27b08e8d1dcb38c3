"""TernGrad: gradients of three values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..collectives.allreduce import Allreduce, configured
from ..collectives.sparse import allgather
from ..formats import INTEGERS, SHIFT_BIAS, Cast, tiles
from ..methods import USUAL
from ..ops import backend_of, on_gpu, placed, to_host
from ..ops.common import MAGNITUDE
from ..ops.payloads import Exact
from ..options import Allowed
from ..world.ranks import Ranks
from .base import (
    Aggregator,
    Array,
    Context,
    Layers,
    Mean,
    blocks,
    check_known,
    check_place,
    checked_mean,
    mean_in_float32,
    shared_largest,
    zeros,
)
from .bucket import Bucket
from .qsgd import decoded_mean

TRITS = Exact(Cast(INTEGERS["ternary"], "stochastic"), trits=True)
UNIT_SHIFT = 1 + SHIFT_BIAS  # the format's numbers are -2, 0 and 2: those of 2 x are wanted


@dataclass(frozen=True)
class TernGrad(Aggregator):
    """The mean of gradients whose values become -s, 0 or s by chance, without bias but for clip.

    clip: values beyond so many standard deviations of their layer are cut to them, unless all
        its values are beyond: alike ones, or a layer of one value, have no outliers; 0: none are.
        The paper's 2.5 cuts many values of gradients with heavy tails, in each step
    bucket_values: so many values of a layer have an s of their own; 0: a layer has one
    share: the s of all ranks is the largest, so that integers are summed: 2 ranks + 1 levels;
        else each rank keeps its own, and gets the values of all others
    exclude: layers that travel in float32; algorithm: of the all-reduces
    Source: Wen et al.: TernGrad, NIPS 2017: equations 1 to 3 (ternary values), section 3.2
    (sharing), section 3.3 (clipping, scalers by layer).
    """

    stateless: ClassVar[bool] = True

    aggregator: Literal["terngrad"] = "terngrad"
    clip: Annotated[float, Allowed(ge=0, le=1e6)] = 6.0
    bucket_values: Annotated[int, Allowed(ge=0)] = 0
    share: bool = True
    exclude: Layers = ()
    algorithm: str = USUAL

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
                backend_of(x).divide_runs(x[part], divisors, ends, x[part], part.start)
        if self.share:
            method = self._allreduce(context.seed)
            flat = method.run(context.world, clipped, iteration=context.iteration).arrays[0]
            for part in blocks(flat):
                backend_of(flat).multiply_runs(flat[part], scalers[0], ends, flat[part], part.start)
        else:
            flat = self._mean_of_own(clipped, scalers, ends, context)
        checked_mean(context.world, flat, gradients, bucket)
        mean_in_float32(gradients, bucket, self.exclude, context, flat, self.algorithm)
        return Mean.finite(flat)

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
                # Of infinity, which the scaler will show; or beyond float32, and all values.
                with np.errstate(over="ignore", invalid="ignore"):
                    limit = np.float32(self.clip * _deviation(x))
                if not _all_beyond(x, limit):
                    _cut(x, limit)
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
        world, n, payloads = context.world, clipped[0].size, []
        shifts = placed(np.full(tiles(n), UNIT_SHIFT, np.uint8), clipped[0])
        for rank, x in zip(world.hosted, clipped, strict=True):
            payload = np.empty_like(x, shape=(TRITS.size_bytes(n),), dtype=np.uint8)
            TRITS.encode(x, shifts, context.key("ternary", rank), 0, payload)
            payloads.append(to_host(payload))
        scales, total = allgather(world, scalers), zeros(n, clipped[0])
        return decoded_mean(TRITS, shifts, allgather(world, payloads), scales, ends, total)


def _deviation(x: Array) -> float:
    """Return x.std(dtype=np.float64) of float32[n], the same bits, without arrays as long as x."""
    kernels = backend_of(x)
    mean = kernels.row_sums(x.reshape(1, -1))[0] / x.size
    return float(np.sqrt(kernels.square_sum(x, mean) / x.size))


def _all_beyond(x: Array, limit: np.float32) -> bool:
    """Whether none of float32[n] is within the limit: of most layers the first block has some."""
    magnitudes = (x[part].view(np.uint32) & np.uint32(MAGNITUDE) for part in blocks(x))
    return not any((each <= limit.view(np.uint32)).any() for each in magnitudes)


def _cut(x: Array, limit: np.float32) -> None:
    """Cut float32[n] to +-limit; where that is not finite, it is beyond all x, or x is not."""
    if on_gpu(x):  # whose minimum of floats makes zeros of subnormal numbers
        if np.isfinite(limit):
            bits = x.view(np.uint32)
            sign = bits & np.uint32(~MAGNITUDE)
            bits[...] = np.minimum(bits & np.uint32(MAGNITUDE), limit.view(np.uint32)) | sign
        return
    for part in blocks(x):
        np.clip(x[part], -limit, limit, out=x[part])


def _maxima(x: Array, ends: Array) -> Array:
    """Return the largest magnitude of each run of float32[n], float32[runs]; NaN where one is."""
    starts = np.concatenate([[0], ends])
    if on_gpu(x):
        return _maxima_on_gpu(x, starts)
    found = np.zeros(ends.size, np.float32)
    for part in blocks(x):
        first, last = np.searchsorted(ends, [part.start, part.stop - 1], side="right")
        own = found[first : last + 1]
        inside = np.maximum(starts[first : last + 1] - part.start, 0)
        np.maximum(own, np.maximum.reduceat(np.abs(x[part]), inside), out=own)
    return found


def _maxima_on_gpu(x: Array, borders: Array) -> Array:
    """Return _maxima of a CuPy array: of equally long runs those of all, of a lone one by tiles."""
    found, sizes = [], np.diff(borders)
    first_of_equals = np.flatnonzero(np.diff(sizes, prepend=-1, append=-1))
    for first, behind in pairwise(first_of_equals):
        part = x[borders[first] : borders[behind]]
        if behind - first == 1:
            rows = backend_of(x).amax_tiles(part).reshape(1, -1)
        else:
            rows = part.view(np.uint32).reshape(behind - first, -1) & np.uint32(MAGNITUDE)
        found.append(to_host(rows.max(axis=1)))
    return np.concatenate([np.empty(0, np.uint32), *found]).view(np.float32)

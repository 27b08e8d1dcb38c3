"""TernGrad: gradients with ternary values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..collectives.allreduce import Allreduce
from ..collectives.method import Segment, configured
from ..collectives.sparse import allgather
from ..formats import INTEGERS, SHIFT_BIAS, Cast, tiles
from ..methods import USUAL
from ..ops import backend_of, placed, to_host
from ..ops.common import MAGNITUDE, NONFINITE_BITS
from ..ops.payloads import Exact
from ..options import Allowed
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
)
from .bucket import Bucket
from .memory import empty_mean, give_spare, take_spare
from .qsgd import decode_mean

TRITS = Exact(Cast(INTEGERS["ternary"], "stochastic"), trits=True)
UNIT_SHIFT = 1 + SHIFT_BIAS  # the format's numbers are -2, 0 and 2: encode 2 x


@dataclass(frozen=True)
class TernGrad(Aggregator):
    """The mean of gradients whose values become -s, 0 or s at random, without bias except for clip.

    clip: limit of values, in standard deviations of their layer; not for a layer whose values all
        exceed it, as equal values or a layer of one do: it has no outliers. 0: no limit. The
        paper's 2.5 clips many values of gradients with heavy tails, in each step
    bucket_values: number of values of a layer with an s of their own; 0: a layer has one s
    share: s is the largest of all ranks, so that integers are summed: 2 ranks + 1 levels; else
        each rank has its own s, and gets the values of all others
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
            Allreduce,
            wire="ternary",
            algorithm=self.algorithm,
            op="mean",
            rounding="stochastic",
            seed=seed,
        )

    def check_layers(self, names: Collection[str]) -> None:
        check_known("TernGrad.exclude", self.exclude, names)

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        world, ends = context.world, self._ends(bucket)
        check_place(self, world, gradients, ends.size)
        limits, own = zip(*(self._limits(x, ends, bucket) for x in gradients), strict=True)
        largest = shared_largest(world, gradients, bucket, np.max(own, axis=0))
        scalers = [largest] * len(own) if self.share else list(own)
        flat = empty_mean(context, bucket, gradients[0])
        if self.share:
            divisors = np.where(scalers[0] == 0, np.float32(1), scalers[0])
            ternary = take_spare(context, "ternary", bucket.size, gradients)
            for x, out, limit in zip(gradients, ternary, limits, strict=True):
                backend_of(x).divide_runs(x, divisors, ends, out, limits=limit)
                for _, start, stop in self._excluded(bucket):
                    out[start:stop] = 0
            method = self._allreduce(context.seed)
            outs = None if context.out is None else [flat]
            flat = method.run(world, ternary, outs, iteration=context.iteration).arrays[0]
            give_spare(context, "ternary", ternary)
            most = backend_of(flat).multiply_runs(flat, scalers[0], ends, flat)
            if most >= NONFINITE_BITS:  # on all ranks or on none
                checked_mean(world, flat, gradients, bucket)
        else:
            self._mean_of_own(gradients, limits, scalers, ends, flat, bucket, context)
        mean_in_float32(gradients, bucket, self.exclude, context, flat, self.algorithm)
        return Mean.finite(flat)

    def _ends(self, bucket: Bucket) -> Array:
        """Return the end of each run of values with one scaler, int64[scalers], ascending."""
        found: list[int] = []
        for _, start, stop in bucket.segments:
            whole = self.bucket_values or max(stop - start, 1)
            found += [min(at + whole, stop) for at in range(start, stop, whole)]
        return np.array(found, np.int64)

    def _excluded(self, bucket: Bucket) -> list[Segment]:
        return [segment for segment in bucket.segments if segment.name in self.exclude]

    def _limits(self, gradient: Array, ends: Array, bucket: Bucket) -> tuple[Array, Array]:
        """Return the limit of each run's values, infinity for none, and its largest value.

        ends: of the runs; returns float32[runs], twice; 0 as the largest of an excluded layer
        """
        limits, largest = (np.full(ends.size, each, np.float32) for each in (np.inf, 0))
        for name, start, stop in bucket.segments:
            if name in self.exclude or start == stop:
                continue
            x, runs = gradient[start:stop], slice(*np.searchsorted(ends, (start, stop), "right"))
            own, total = backend_of(x).run_maxima(x, ends[runs] - start)
            if self.clip:
                # Not finite if a value is infinite, which the caller finds, or if it overflows
                with np.errstate(over="ignore", invalid="ignore"):
                    limit = np.float32(self.clip * _deviation(x, total))
                if np.isfinite(limit) and own.max() > limit and not _all_beyond(x, limit):
                    limits[runs] = limit
            largest[runs] = np.minimum(own, limits[runs])  # NaN stays NaN
        return limits, largest

    def _mean_of_own(
        self,
        gradients: list[Array],
        limits: Sequence[Array],
        scalers: list[Array],
        ends: Array,
        flat: Array,
        bucket: Bucket,
        context: Context,
    ) -> None:
        """Write the mean of ternary values with a scaler of each rank, in the order of ranks."""
        world, n, payloads = context.world, bucket.size, []
        parts = take_spare(context, "ternary", n, gradients)
        shifts = placed(np.full(tiles(n), UNIT_SHIFT, np.uint8), gradients[0])
        for rank, x, limit, scaler, out in zip(
            world.hosted, gradients, limits, scalers, parts, strict=True
        ):
            divisors = np.where(scaler == 0, np.float32(1), scaler)
            backend_of(x).divide_runs(x, divisors, ends, out, limits=limit)
            for _, start, stop in self._excluded(bucket):
                out[start:stop] = 0
            payload = np.empty_like(x, shape=(TRITS.size_bytes(n),), dtype=np.uint8)
            TRITS.encode(out, shifts, context.key("ternary", rank), 0, payload)
            payloads.append(to_host(payload))
        give_spare(context, "ternary", parts)
        scales = allgather(world, scalers)
        decode_mean(TRITS, allgather(world, payloads), scales, ends, flat, gradients, bucket, world)


def _deviation(x: Array, total: float) -> float:
    """Return the bits of x.std(dtype=np.float64), float32[n], whose sum is total."""
    return float(np.sqrt(backend_of(x).square_sum(x, total / x.size) / x.size))


def _all_beyond(x: Array, limit: np.float32) -> bool:
    """Whether no value of float32[n] is within the limit; most layers end in the first block."""
    magnitudes = (x[part].view(np.uint32) & MAGNITUDE for part in blocks(x))
    return not any((each <= limit.view(np.uint32)).any() for each in magnitudes)

"""TernGrad: gradients with ternary values."""

from __future__ import annotations

from collections.abc import Collection
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
        limits = [self._limits(gradient, bucket) for gradient in gradients]
        scalers = self._scalers(gradients, limits, ends, bucket, world)
        flat = empty_mean(context, bucket, gradients[0])
        if self.share:
            divisors = np.where(scalers[0] == 0, np.float32(1), scalers[0])
            ternary = take_spare(context, "ternary", bucket.size, gradients)
            for x, out, limit in zip(gradients, ternary, limits, strict=True):
                spread = self._of_runs(limit, bucket)
                backend_of(x).divide_runs(x, divisors, ends, out, limits=spread)
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

    def _limits(self, gradient: Array, bucket: Bucket) -> Array:
        """Return the limit of each layer's values, float32[layers]; infinity for none."""
        found = np.full(len(bucket.names), np.inf, np.float32)
        for i, (name, start, stop) in enumerate(bucket.segments):
            x = gradient[start:stop]
            if self.clip and x.size and name not in self.exclude:
                # Not finite if a value is infinite, which _scalers finds, or if it overflows
                with np.errstate(over="ignore", invalid="ignore"):
                    limit = np.float32(self.clip * _deviation(x))
                if np.isfinite(limit) and not _all_beyond(x, limit):
                    found[i] = limit
        return found

    def _of_runs(self, each: Array, bucket: Bucket) -> Array:
        """Return its layer's number for each run of _ends: float32[layers] to float32[runs]."""
        whole = self.bucket_values
        counts = [
            -(-(stop - start) // whole) if whole else int(stop > start)
            for _, start, stop in bucket.segments
        ]
        return np.repeat(each, counts)

    def _scalers(
        self, gradients: list[Array], limits: list[Array], ends: Array, bucket: Bucket, world: Ranks
    ) -> list[Array]:
        """Return the largest values of each hosted rank, or of all ranks. Collective."""
        is_out = self._of_runs(np.array([n in self.exclude for n in bucket.names]), bucket)
        own = []
        for x, limit in zip(gradients, limits, strict=True):
            largest = backend_of(x).run_maxima(x, ends)
            cut = np.minimum(largest, self._of_runs(limit, bucket))  # NaN stays NaN
            own.append(np.where(is_out, np.float32(0), cut))
        largest = shared_largest(world, gradients, bucket, np.max(own, axis=0))
        return [largest] * len(own) if self.share else own

    def _mean_of_own(
        self,
        gradients: list[Array],
        limits: list[Array],
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
            spread = self._of_runs(limit, bucket)
            backend_of(x).divide_runs(x, divisors, ends, out, limits=spread)
            for _, start, stop in self._excluded(bucket):
                out[start:stop] = 0
            payload = np.empty_like(x, shape=(TRITS.size_bytes(n),), dtype=np.uint8)
            TRITS.encode(out, shifts, context.key("ternary", rank), 0, payload)
            payloads.append(to_host(payload))
        give_spare(context, "ternary", parts)
        scales = allgather(world, scalers)
        decode_mean(TRITS, allgather(world, payloads), scales, ends, flat, gradients, bucket, world)


def _deviation(x: Array) -> float:
    """Return the bits of x.std(dtype=np.float64), float32[n], without temporary arrays."""
    kernels = backend_of(x)
    mean = kernels.row_sums(x.reshape(1, -1))[0] / x.size
    return float(np.sqrt(kernels.square_sum(x, mean) / x.size))


def _all_beyond(x: Array, limit: np.float32) -> bool:
    """Whether no value of float32[n] is within the limit; most layers end in the first block."""
    magnitudes = (x[part].view(np.uint32) & MAGNITUDE for part in blocks(x))
    return not any((each <= limit.view(np.uint32)).any() for each in magnitudes)

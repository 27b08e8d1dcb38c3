"""QSGD: a norm for a bucket of values, and each value rounded to a few levels of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..collectives.sparse import allgather
from ..formats import INTEGERS, SHIFT_BIAS, Cast
from ..ops import backend_of, to_host
from ..ops.common import NONFINITE_BITS
from ..ops.payloads import Exact
from ..options import Allowed
from ..world.ranks import Ranks
from .base import Aggregator, Array, Context, Mean, check_place, checked_mean, shared_largest
from .bucket import Bucket
from .memory import empty_mean

LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True)
class Qsgd(Aggregator):
    """The mean of gradients, stochastically rounded to levels of their bucket's norm, without bias.

    levels: s: a value becomes the norm times -s/s, ..., 0, ..., s/s
    bucket_values: number of values with a norm of their own
    A value travels in ceil(log2(2 s + 1)) bits, 1.6 for one level, without the paper's Elias
    codes; every rank gets the values of all, and adds them in the order of ranks.
    Source: Alistarh et al.: QSGD, NIPS 2017, equations 3.1 to 3.3; section 4 (buckets).
    """

    stateless: ClassVar[bool] = True

    aggregator: Literal["qsgd"] = "qsgd"
    levels: Annotated[int, Allowed(ge=1, lt=1 << 15)] = 4
    bucket_values: Annotated[int, Allowed(ge=1)] = 512

    def _wire(self) -> Exact:
        bits = self.levels.bit_length() + 1
        return Exact(
            Cast(INTEGERS[f"int{bits}" if bits > 2 else "ternary"], "stochastic"), bits == 2
        )

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        world, n, wire = context.world, bucket.size, self._wire()
        starts = np.arange(0, n, self.bucket_values)
        check_place(self, world, gradients, starts.size)
        norms = [self._norms(gradient, starts) for gradient in gradients]
        shared_largest(world, gradients, bucket, np.max(norms, axis=0))
        # Levels are integers, as multiples of the format's smallest number.
        shift = int(np.log2(wire.cast.fmt.smallest)) + SHIFT_BIAS
        ends, payloads = np.minimum(starts + self.bucket_values, n), []
        for rank, gradient, norm in zip(world.hosted, gradients, norms, strict=True):
            divisors = np.where(norm == 0, np.float32(1), norm)
            payload = np.empty_like(gradient, shape=(wire.size_bytes(n),), dtype=np.uint8)
            backend_of(gradient).encode_runs(
                gradient,
                divisors,
                ends,
                float(self.levels),
                wire.cast,
                shift,
                payload,
                trits=wire.trits,
                key=context.key("levels", rank),
            )
            payloads.append(to_host(payload))
        scales = [norm / np.float32(self.levels) for norm in allgather(world, norms)]
        flat = empty_mean(context, bucket, gradients[0])
        decode_mean(wire, allgather(world, payloads), scales, ends, flat, gradients, bucket, world)
        return Mean.finite(flat)

    def _norms(self, gradient: Array, starts: Array) -> Array:
        """Return the 2-norm of each bucket, float32, no smaller than its largest value.

        For finite values it is at most the largest float32, which leaves the rounding without bias.
        """
        squares = backend_of(gradient).run_sums(gradient, starts, "square")
        norms = np.sqrt(squares)  # float64, finite if all values are
        return np.where(np.isfinite(norms), np.minimum(norms, LARGEST), norms).astype(np.float32)


def decode_mean(
    wire: Exact,
    payloads: Sequence[Array],
    scales: Sequence[Array],
    ends: Array,
    flat: Array,
    gradients: Sequence[Array],
    bucket: Bucket,
    world: Ranks,
) -> None:
    """Write the mean of integers times their scales, added in the order of ranks, into flat.

    payloads: uint8[bytes] of each rank; scales: float32[runs] of each rank; ends: int64[runs], the
    ends of runs; flat: float32[bucket.size]; gradients: for the error
    Raises NonFiniteGradient on all ranks, naming the layers. Collective only if it raises.
    """
    bits = wire.cast.fmt.bits
    most = backend_of(flat).mean_runs(payloads, scales, ends, bits, flat, trits=wire.trits)
    if most >= NONFINITE_BITS:
        checked_mean(world, flat, gradients, bucket)

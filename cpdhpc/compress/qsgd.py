"""QSGD: a norm for a bucket of values, and each value one of a few levels of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from ..collectives.sparse import allgather
from ..formats import INTEGERS, SHIFT_BIAS, Cast, tiles
from ..ops.payloads import Exact
from .base import Aggregator, Array, Context, Mean, check_place, shared_largest
from .bucket import Bucket


@dataclass(frozen=True)
class Qsgd(Aggregator):
    """The mean of gradients rounded by chance to levels of their bucket's norm, without bias.

    levels: s: a value becomes the norm times -s/s, ..., 0, ..., s/s
    bucket_values: so many values have a norm of their own
    A value travels in ceil(log2(2 s + 1)) bits, without the paper's Elias codes; every rank gets
    the values of all, and adds them in the order of ranks.
    Source: Alistarh et al.: QSGD, NIPS 2017, equations 3.1 to 3.3; section 4 (buckets).
    """

    aggregator: Literal["qsgd"] = "qsgd"
    levels: Annotated[int, Field(ge=1, lt=1 << 15)] = 4
    bucket_values: Annotated[int, Field(ge=1)] = 512

    def _wire(self) -> Exact:
        bits = self.levels.bit_length() + 1
        return Exact(
            Cast(INTEGERS[f"int{bits}" if bits > 2 else "ternary"], "stochastic"), bits == 2
        )

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        world, n, wire = context.world, bucket.size, self._wire()
        starts = np.arange(0, n, self.bucket_values)
        check_place(self, world, gradients, starts.size)
        norms = [self._norms(gradient, starts) for gradient in gradients]
        shared_largest(world, gradients, bucket, np.max(norms, axis=0))
        # Levels are integers: multiples of the format's smallest number.
        shift = int(np.log2(wire.cast.fmt.smallest))
        shifts, payloads = np.full(tiles(n), shift + SHIFT_BIAS, np.uint8), []
        for rank, gradient, norm in zip(world.hosted, gradients, norms, strict=True):
            x = gradient / self._spread(np.where(norm == 0, np.float32(1), norm), n)
            x *= np.float32(self.levels)
            payloads.append(np.empty(wire.size_bytes(n), np.uint8))
            wire.encode(x, shifts, context.key("levels", rank), 0, payloads[-1])
        total, terms = np.zeros(n, np.float32), np.empty(n, np.float32)
        for payload, norm in zip(allgather(world, payloads), allgather(world, norms), strict=True):
            wire.decode(payload, shifts, terms)
            total += terms * self._spread(norm / np.float32(self.levels), n)
        return Mean(total / np.float32(world.ranks))

    def _norms(self, gradient: Array, starts: Array) -> Array:
        """Return the 2-norm of each bucket, float32, no smaller than its largest value."""
        squares = (
            np.add.reduceat(np.square(gradient, dtype=np.float64), starts)
            if starts.size
            else starts
        )
        return np.sqrt(squares).astype(np.float32)

    def _spread(self, each: Array, n: int) -> Array:
        return np.repeat(each, self.bucket_values)[:n]

"""QSGD: a norm for a bucket of values, and each value one of a few levels of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..collectives.sparse import allgather
from ..formats import INTEGERS, SHIFT_BIAS, TILE, Cast, tiles
from ..ops import backend_of, placed, to_host
from ..ops.payloads import Exact
from ..options import Allowed
from .base import (
    Aggregator,
    Array,
    Context,
    Mean,
    blocks,
    check_place,
    checked_mean,
    shared_largest,
    zeros,
)
from .bucket import Bucket

LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True)
class Qsgd(Aggregator):
    """The mean of gradients rounded by chance to levels of their bucket's norm, without bias.

    levels: s: a value becomes the norm times -s/s, ..., 0, ..., s/s
    bucket_values: so many values have a norm of their own
    A value travels in ceil(log2(2 s + 1)) bits, of one level in 1.6, without the paper's Elias
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
        """Return the mean over all ranks. See Aggregator.aggregate."""
        world, n, wire = context.world, bucket.size, self._wire()
        starts = np.arange(0, n, self.bucket_values)
        check_place(self, world, gradients, starts.size)
        norms = [self._norms(gradient, starts) for gradient in gradients]
        shared_largest(world, gradients, bucket, np.max(norms, axis=0))
        # Levels are integers: multiples of the format's smallest number.
        shift = int(np.log2(wire.cast.fmt.smallest))
        shifts = placed(np.full(tiles(n), shift + SHIFT_BIAS, np.uint8), gradients[0])
        ends, payloads = np.minimum(starts + self.bucket_values, n), []
        for rank, gradient, norm in zip(world.hosted, gradients, norms, strict=True):
            key, divisors = context.key("levels", rank), np.where(norm == 0, np.float32(1), norm)
            payload = np.empty_like(gradient, shape=(wire.size_bytes(n),), dtype=np.uint8)
            kernels = backend_of(gradient)
            for part in blocks(gradient, TILE):
                x = np.empty_like(gradient[part])
                kernels.divide_runs(gradient[part], divisors, ends, x, part.start)
                kernels.multiply(x, np.float32(self.levels), x)
                words = payload_part(wire, payload, part)
                wire.encode(x, shifts[: tiles(x.size)], key, part.start, words)
            payloads.append(to_host(payload))
        scales = [norm / np.float32(self.levels) for norm in allgather(world, norms)]
        total = zeros(n, gradients[0])
        flat = decoded_mean(wire, shifts, allgather(world, payloads), scales, ends, total)
        return Mean.finite(checked_mean(world, flat, gradients, bucket))

    def _norms(self, gradient: Array, starts: Array) -> Array:
        """Return the 2-norm of each bucket, float32, no smaller than its largest value.

        That of finite values is the largest float32 at most, which keeps them without bias too.
        """
        squares = np.empty(starts.size)
        for part in blocks(gradient, self.bucket_values):
            own = slice(part.start // self.bucket_values, -(-part.stop // self.bucket_values))
            runs = starts[own] - part.start
            squares[own] = backend_of(gradient).run_sums(gradient[part], runs, "square")
        norms = np.sqrt(squares)  # finite, in float64, where all values are
        return np.where(np.isfinite(norms), np.minimum(norms, LARGEST), norms).astype(np.float32)


def decoded_mean(
    wire: Exact,
    shifts: Array,
    payloads: Sequence[Array],
    scales: Sequence[Array],
    ends: Array,
    total: Array,
) -> Array:
    """Return the mean of integers times their scales, added onto total in the order of ranks.

    shifts: uint8[tiles], all alike, where total lies; payloads: uint8[bytes] of each rank
    scales: float32[runs] of each rank, of runs that end at ends, int64[runs]
    total: float32[n], zeros at first
    """
    kernels = backend_of(total)
    for part in blocks(total, TILE):
        into = total[part]
        term = np.empty_like(into)
        with np.errstate(over="ignore", invalid="ignore"):  # whoever has the mean checks it
            for payload, scale in zip(payloads, scales, strict=True):
                words = placed(payload_part(wire, payload, part), total)
                wire.decode(words, shifts[: tiles(into.size)], term)
                kernels.multiply_runs(term, scale, ends, term, part.start)
                kernels.add(into, term, into)
        kernels.divide(into, np.float32(len(payloads)), into)
    return total


def payload_part(wire: Exact, payload: Array, part: slice) -> Array:
    """Return where a slice of values, from a whole tile on, lies in a payload."""
    start = wire.size_bytes(part.start)
    return payload[start : start + wire.size_bytes(part.stop - part.start)]

"""1-bit SGD: the sign of each value, and two values for each output unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..collectives.allreduce import configured
from ..collectives.checks import NonFiniteGradient
from ..collectives.method import Segment
from ..collectives.sparse import allgather
from ..methods import USUAL
from ..ops import backend_of, on_gpu, placed, to_host
from .base import (
    HALF_ULP,
    Aggregator,
    Array,
    Context,
    Mean,
    amax,
    blocks,
    check_place,
    checked_mean,
    mean_in_float32,
    raise_unless_finite,
    shared_largest,
    zeros,
)
from .bucket import Bucket
from .sparse import Epochs


@dataclass(frozen=True)
class OneBit(Aggregator):
    """The mean of gradients whose values are one of two, by their sign.

    The two are the means of the values below 0, and of the others, of an output unit: a row of a
    layer's weights, as torch lays them out. Layers of one dimension travel in float32.
    error_feedback: what is lost is added to a rank's next gradient
    dense_epochs: until then all layers travel in float32
    algorithm: of the all-reduce of layers of one dimension
    Source: Seide et al.: 1-bit stochastic gradient descent, Interspeech 2014, section 3.1.
    """

    aggregator: Literal["onebit"] = "onebit"
    error_feedback: bool = True
    dense_epochs: Epochs = 0.0
    algorithm: str = USUAL

    def __post_init__(self) -> None:
        configured(wire="raw", algorithm=self.algorithm, op="mean")

    @property
    def holds_back(self) -> bool:
        """See Aggregator.holds_back."""
        return self.error_feedback

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        world, flat = context.world, zeros(bucket.size, gradients[0])
        check_place(self, world, gradients)
        coded = [i for i, shape in enumerate(bucket.shapes) if len(shape) > 1 and 0 not in shape]
        coded = [] if context.epoch < self.dense_epochs else coded
        messages: list[tuple[list[Array], list[Array]]] = [([], []) for _ in gradients]
        memory = {
            segment: context.state.own(segment.name, "residual", (size,), like=flat)
            for segment in (bucket.segments[i] for i in coded)
            for size in (segment.stop - segment.start,)
        }
        before = None
        if shared_largest(world, gradients, bucket, amax(gradients))[0] >= HALF_ULP:
            raise_unless_finite(world, _waiting(gradients, memory), bucket)
            before = context.state.copy()
        for i, (segment, residuals) in zip(coded, memory.items(), strict=True):
            _, start, stop = segment
            for (signs, pairs), gradient, residual in zip(
                messages, gradients, residuals, strict=True
            ):
                rows = bucket.shapes[i][0]
                positive, pair = self._encoded(
                    gradient[start:stop].reshape(rows, -1), residual.reshape(rows, -1)
                )
                signs.append(to_host(np.packbits(positive)))
                pairs.append(pair)
        signs_of_all = allgather(world, [_joined(signs, np.uint8) for signs, _ in messages])
        pairs_of_all = allgather(world, [_joined(pairs, np.float32) for _, pairs in messages])
        for sign, pair in zip(signs_of_all, pairs_of_all, strict=True):  # in the order of ranks
            for i in coded:
                _, start, stop = bucket.segments[i]
                rows, size_bytes = bucket.shapes[i][0], -(-(stop - start) // 8)
                bits = np.unpackbits(placed(sign[:size_bytes], flat))
                positive = bits[: stop - start].view(bool)
                _decode_onto(
                    flat[start:stop].reshape(rows, -1), positive.reshape(rows, -1), pair[: 2 * rows]
                )
                sign, pair = sign[size_bytes:], pair[2 * rows :]
        backend_of(flat).divide(flat, np.float32(world.ranks), flat)
        dense = [name for i, name in enumerate(bucket.names) if i not in coded]
        try:
            checked_mean(world, flat, gradients, bucket)
            mean_in_float32(gradients, bucket, dense, context, flat, self.algorithm)
        except NonFiniteGradient:
            for key, entry in before or ():
                context.state.put(key, entry)
            raise
        return Mean.finite(flat)

    def _encoded(self, gradient: Array, residual: Array) -> tuple[Array, Array]:
        """Return whether values are not below 0, bool[rows, columns], and float32[2 rows].

        gradient, residual: float32[rows, columns]; what is lost becomes the residual
        """
        positive, pairs = np.empty_like(gradient, bool), np.empty((len(gradient), 2), np.float32)
        kernels = backend_of(gradient)
        for part in _row_blocks(gradient):
            x = kernels.add(gradient[part], residual[part])
            _find_positive(x, positive[part])
            mask = _mask(positive[part])
            pairs[part] = _pairs(x, mask)
            if self.error_feedback:
                kernels.subtract(x, _decoded(mask, pairs[part]), residual[part])
        return positive, pairs.ravel()


Memory = Mapping[Segment, list[Array]]  # what waits of a layer, of each hosted rank


def _waiting(gradients: Sequence[Array], memory: Memory) -> list[Array]:
    """Return copies of gradients with what waits."""
    found, add = [gradient.copy() for gradient in gradients], backend_of(gradients[0]).add
    with np.errstate(over="ignore"):  # aggregate sees it
        for (_, start, stop), residuals in memory.items():
            for x, residual in zip(found, residuals, strict=True):
                add(x[start:stop], residual, x[start:stop])
    return found


def _decode_onto(x: Array, positive: Array, pairs: Array) -> None:
    """Add to x, float32[rows, columns], what signs and float32[2 rows] stand for."""
    for part in _row_blocks(x):
        more = _decoded(_mask(positive[part]), pairs.reshape(-1, 2)[part])
        with np.errstate(over="ignore", invalid="ignore"):  # the sum is checked as a whole
            backend_of(x).add(x[part], more, x[part])


def _row_blocks(x: Array) -> Iterator[slice]:
    columns = x.shape[1]
    return (slice(p.start // columns, p.stop // columns) for p in blocks(x, columns))


def _find_positive(x: Array, out: Array) -> None:
    """Write whether values are not below 0 into out."""
    if on_gpu(x):  # which compares subnormal numbers as zeros
        bits = x.view(np.int32)
        out[...] = (bits >= 0) | (bits == np.int32(-(1 << 31)))  # -0.0
    else:
        np.greater_equal(x, 0, out=out)


def _mask(positive: Array) -> Array:
    """Return int32 with all bits set where positive is true: & takes less time than np.where."""
    mask = positive.astype(np.int32)
    return np.negative(mask, out=mask)


def _pairs(x: Array, mask: Array) -> Array:
    """Return the means of the values below 0 and of the others, NumPy's float32[rows, 2]."""
    counts = -to_host(mask.sum(axis=1, dtype=np.int32))
    bits, row_sums = x.view(np.int32), backend_of(x).row_sums
    above = row_sums((bits & mask).view(np.float32))
    below = row_sums((bits & ~mask).view(np.float32))
    means = (below / np.maximum(x.shape[1] - counts, 1), above / np.maximum(counts, 1))
    return np.stack(means, axis=1).astype(np.float32)


def _decoded(mask: Array, pairs: Array) -> Array:
    """Return what signs and pairs, float32[rows, 2], stand for: float32[rows, columns]."""
    bits = placed(pairs.view(np.int32), mask)
    below, above = bits[:, :1], bits[:, 1:]
    chosen = mask & (below ^ above)
    chosen ^= below
    return chosen.view(np.float32)


def _joined(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)

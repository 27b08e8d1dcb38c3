"""1-bit SGD: the sign of each value, and two values for each output unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..collectives.allreduce import configured
from ..collectives.sparse import allgather
from .base import (
    Aggregator,
    Array,
    Context,
    Mean,
    check_place,
    mean_in_float32,
    raise_unless_finite,
)
from .bucket import Bucket


@dataclass(frozen=True)
class OneBit(Aggregator):
    """The mean of gradients whose values are one of two, by their sign.

    The two are the means of the values below 0, and of the others, of an output unit: a row of a
    layer's weights, as torch lays them out. Layers of one dimension travel in float32.
    error_feedback: what is lost is added to a rank's next gradient
    algorithm: of the all-reduce of layers of one dimension
    Source: Seide et al.: 1-bit stochastic gradient descent, Interspeech 2014, section 3.1.
    """

    aggregator: Literal["onebit"] = "onebit"
    error_feedback: bool = True
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        configured(wire="raw", algorithm=self.algorithm, op="mean")

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks. See Aggregator.aggregate."""
        world, flat = context.world, np.zeros(bucket.size, np.float32)
        check_place(self, world, gradients)
        raise_unless_finite(world, gradients, bucket)
        coded = [i for i, shape in enumerate(bucket.shapes) if len(shape) > 1 and 0 not in shape]
        messages: list[tuple[list[Array], list[Array]]] = [([], []) for _ in gradients]
        for i in coded:
            name, start, stop = bucket.segments[i]
            memory = context.state.own(name, "residual", (stop - start,))
            for (signs, pairs), gradient, residual in zip(messages, gradients, memory, strict=True):
                x = (gradient[start:stop] + residual).reshape(bucket.shapes[i][0], -1)
                signs.append(np.packbits(x >= 0))
                pairs.append(_pairs(x))
                if self.error_feedback:
                    residual[:] = (x - _decoded(signs[-1], pairs[-1], len(x), x.size)).ravel()
        signs_of_all = allgather(world, [_joined(signs, np.uint8) for signs, _ in messages])
        pairs_of_all = allgather(world, [_joined(pairs, np.float32) for _, pairs in messages])
        for sign, pair in zip(signs_of_all, pairs_of_all, strict=True):  # in the order of ranks
            for i in coded:
                _, start, stop = bucket.segments[i]
                rows, size_bytes = bucket.shapes[i][0], -(-(stop - start) // 8)
                part = _decoded(sign[:size_bytes], pair[: 2 * rows], rows, stop - start)
                flat[start:stop] += part.ravel()
                sign, pair = sign[size_bytes:], pair[2 * rows :]
        flat /= np.float32(world.ranks)
        dense = [name for i, name in enumerate(bucket.names) if i not in coded]
        mean_in_float32(gradients, bucket, dense, context, flat, self.algorithm)
        return Mean(flat)


def _pairs(x: Array) -> Array:
    """Return the means of the values below 0 and of the others, row by row, float32[2 rows]."""
    positive = x >= 0
    counts = positive.sum(axis=1)
    above = np.where(positive, x, 0).sum(axis=1, dtype=np.float64)
    below = np.where(positive, 0, x).sum(axis=1, dtype=np.float64)
    means = (below / np.maximum(x.shape[1] - counts, 1), above / np.maximum(counts, 1))
    return np.stack(means, axis=1).astype(np.float32).ravel()


def _decoded(signs: Array, pairs: Array, rows: int, n: int) -> Array:
    """Return what signs and pairs stand for, float32[rows, n / rows]."""
    positive = np.unpackbits(signs, count=n).view(bool).reshape(rows, -1)
    below, above = pairs.reshape(rows, 2, 1).transpose(1, 0, 2)
    return np.where(positive, above, below)


def _joined(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)

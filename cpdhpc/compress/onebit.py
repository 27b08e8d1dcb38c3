"""1-bit SGD: the sign of each value, and two values for each output unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..collectives.allreduce import configured
from ..collectives.checks import NONFINITE_BITS, NonFiniteGradient
from ..collectives.method import Segment
from ..collectives.sparse import allgather
from ..methods import USUAL
from ..ops import backend_of
from .base import (
    HALF_ULP,
    Aggregator,
    Array,
    Context,
    Mean,
    amax,
    check_place,
    checked_mean,
    mean_in_float32,
    raise_unless_finite,
    shared_largest,
)
from .bucket import Bucket
from .memory import empty_mean
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
        world, flat = context.world, empty_mean(context, bucket, gradients[0])
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
                kept = residual.reshape(rows, -1)
                sign, pair = backend_of(gradient).encode_signs(
                    gradient[start:stop].reshape(rows, -1),
                    kept,
                    kept if self.error_feedback else None,
                )
                signs.append(sign)
                pairs.append(pair.reshape(-1))
        signs_of_all = allgather(world, [_joined(signs, np.uint8) for signs, _ in messages])
        pairs_of_all = allgather(world, [_joined(pairs, np.float32) for _, pairs in messages])
        most, sign_at, pair_at = 0, 0, 0
        for i in coded:
            _, start, stop = bucket.segments[i]
            rows, size_bytes = bucket.shapes[i][0], -(-(stop - start) // 8)
            bits = backend_of(flat).decode_signs(
                [sign[sign_at : sign_at + size_bytes] for sign in signs_of_all],
                [pair[pair_at : pair_at + 2 * rows].reshape(-1, 2) for pair in pairs_of_all],
                flat[start:stop].reshape(rows, -1),
                float(world.ranks),
            )
            most, sign_at, pair_at = max(most, bits), sign_at + size_bytes, pair_at + 2 * rows
        dense = [name for i, name in enumerate(bucket.names) if i not in coded]
        try:
            if most >= NONFINITE_BITS:  # alike on all ranks
                checked_mean(world, _coded_alone(flat, coded, bucket), gradients, bucket)
            mean_in_float32(gradients, bucket, dense, context, flat, self.algorithm)
        except NonFiniteGradient:
            for key, entry in before or ():
                context.state.put(key, entry)
            raise
        return Mean.finite(flat)


Memory = Mapping[Segment, list[Array]]  # what waits of a layer, of each hosted rank


def _waiting(gradients: Sequence[Array], memory: Memory) -> list[Array]:
    """Return copies of gradients with what waits."""
    found, add = [gradient.copy() for gradient in gradients], backend_of(gradients[0]).add
    with np.errstate(over="ignore"):  # aggregate sees it
        for (_, start, stop), residuals in memory.items():
            for x, residual in zip(found, residuals, strict=True):
                add(x[start:stop], residual, x[start:stop])
    return found


def _coded_alone(flat: Array, coded: Sequence[int], bucket: Bucket) -> Array:
    """Return flat with zeros in place of layers that are not coded."""
    out = np.zeros_like(flat)
    for i in coded:
        _, start, stop = bucket.segments[i]
        out[start:stop] = flat[start:stop]
    return out


def _joined(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)

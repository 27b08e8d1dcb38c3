"""1-bit SGD: the sign of each value, and two values for each output unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..collectives.allreduce import Allreduce
from ..collectives.method import Segment, configured
from ..collectives.sparse import allgather
from ..methods import USUAL
from ..ops import backend_of
from ..ops.common import NONFINITE_BITS
from .base import (
    RESIDUAL,
    Aggregator,
    Array,
    Context,
    Mean,
    as_float,
    bits_of_largest,
    check_place,
    checked_mean,
    mean_in_float32,
    shared_largest,
)
from .bucket import Bucket
from .memory import empty_mean, keep, take_spare
from .sparse import Epochs


@dataclass(frozen=True)
class OneBit(Aggregator):
    """The mean of gradients whose values become one of two, by their sign.

    The two are the mean of the values below 0 and that of the others, of each output unit: a row of
    a layer's weights in torch's layout. Layers of one dimension travel in float32.
    error_feedback: the error is added to a rank's next gradient
    dense_epochs: until then all layers travel in float32
    algorithm: algorithm of the all-reduce of layers of one dimension
    Source: Seide et al.: 1-bit stochastic gradient descent, Interspeech 2014, section 3.1.
    """

    aggregator: Literal["onebit"] = "onebit"
    error_feedback: bool = True
    dense_epochs: Epochs = 0.0
    algorithm: str = USUAL

    def __post_init__(self) -> None:
        configured(Allreduce, wire="raw", algorithm=self.algorithm, op="mean")

    @property
    def holds_back(self) -> bool:
        return self.error_feedback

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        world, flat = context.world, empty_mean(context, bucket, gradients[0])
        check_place(self, world, gradients)
        coded = [i for i, shape in enumerate(bucket.shapes) if len(shape) > 1 and 0 not in shape]
        coded = [] if context.epoch < self.dense_epochs else coded
        keeps = self.error_feedback and bool(coded)
        rests = take_spare(context, RESIDUAL, bucket.size, gradients) if keeps else []
        own_signs, own_pairs = self._encoded(gradients, rests, coded, bucket, context)
        signs, pairs = allgather(world, own_signs), allgather(world, own_pairs)
        most, sign_at, pair_at = 0, 0, 0
        for i in coded:
            _, start, stop = bucket.segments[i]
            rows, size_bytes = bucket.shapes[i][0], -(-(stop - start) // 8)
            bits = backend_of(flat).decode_signs(
                [sign[sign_at : sign_at + size_bytes] for sign in signs],
                [pair[pair_at : pair_at + 2 * rows].reshape(-1, 2) for pair in pairs],
                flat[start:stop].reshape(rows, -1),
                float(world.ranks),
            )
            most, sign_at, pair_at = max(most, bits), sign_at + size_bytes, pair_at + 2 * rows
        if most >= NONFINITE_BITS:  # on all ranks or on none
            checked_mean(world, _coded_alone(flat, coded, bucket), gradients, bucket)
        dense = [name for i, name in enumerate(bucket.names) if i not in coded]
        mean_in_float32(gradients, bucket, dense, context, flat, self.algorithm)
        if keeps:
            keep(context, bucket, RESIDUAL, rests, [bucket.names[i] for i in coded])
        return Mean.finite(flat)

    def _encoded(
        self,
        gradients: Sequence[Array],
        rests: Sequence[Array],
        coded: Sequence[int],
        bucket: Bucket,
        context: Context,
    ) -> tuple[list[Array], list[Array]]:
        """Return the signs and pairs of each hosted rank, and write the errors. Collective.

        rests: float32[bucket.size] of each hosted rank, written for coded layers; empty without
            error feedback
        Raises NonFiniteGradient if a gradient, or its sum with the residual, is not finite.
        """
        signs, pairs = [list[Array]() for _ in gradients], [list[Array]() for _ in gradients]
        memory, found = dict[Segment, list[Array]](), [0]
        for i, segment in enumerate(bucket.segments):
            name, start, stop = segment
            if i not in coded:
                found.append(bits_of_largest([x[start:stop] for x in gradients]))
                continue
            shape, n = (bucket.shapes[i][0], -1), stop - start
            if rests:
                memory[segment] = context.state.own(name, RESIDUAL, (n,), like=gradients[0])
            for row, x in enumerate(gradients):
                both = [memory[segment][row], rests[row][start:stop]] if rests else []
                sign, pair, bits = backend_of(x).encode_signs(
                    *(each.reshape(shape) for each in (x[start:stop], *both))
                )
                signs[row].append(sign)
                pairs[row].append(pair.reshape(-1))
                found.append(bits)
        most = max(found)
        sums = _waiting(gradients, memory) if most >= NONFINITE_BITS else gradients
        shared_largest(context.world, sums, bucket, as_float(most))
        return [_joined(each, np.uint8) for each in signs], [
            _joined(each, np.float32) for each in pairs
        ]


Memory = Mapping[Segment, list[Array]]  # a layer's residual of each hosted rank


def _waiting(gradients: Sequence[Array], memory: Memory) -> list[Array]:
    """Return gradients plus residuals."""
    found, add = [gradient.copy() for gradient in gradients], backend_of(gradients[0]).add
    with np.errstate(over="ignore"):  # shared_largest names the layers
        for (_, start, stop), residuals in memory.items():
            for x, residual in zip(found, residuals, strict=True):
                add(x[start:stop], residual, x[start:stop])
    return found


def _coded_alone(flat: Array, coded: Sequence[int], bucket: Bucket) -> Array:
    """Return a copy of flat with zeros for layers that are not coded."""
    out = np.zeros_like(flat)
    for i in coded:
        _, start, stop = bucket.segments[i]
        out[start:stop] = flat[start:stop]
    return out


def _joined(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype)

"""Flexpoint: integers whose shared exponents are predicted from earlier means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from ..collectives.allreduce import Allreduce
from ..collectives.checks import amax_of_segments
from ..collectives.method import Shifts, configured, integer_shift
from ..formats import INTEGERS, TILE
from ..methods import USUAL
from ..options import Allowed
from .base import LOSSES, Aggregator, Array, Column, Context, Mean
from .bucket import NEVER, Bucket
from .lowbit import count_losses

AUTOFLEX = 2.0, 3.0  # factor, and number of standard deviations


def autoflex(known: Sequence[float]) -> float:
    """Return the largest value that is expected after one or more known ones.

    Source: Koester et al., NIPS 2017, algorithm 2, without its term for mantissas of 1.
    """
    margin, deviations = AUTOFLEX
    middle = math.fsum(known) / len(known)  # fsum: one result on all processors
    spread = math.sqrt(math.fsum((each - middle) ** 2 for each in known) / len(known))
    limits = np.finfo(np.float32)
    largest = margin * (middle + deviations * spread)
    return min(max(largest, float(limits.smallest_subnormal)), float(limits.max))


@dataclass(frozen=True)
class Flexpoint(Aggregator):
    """The mean of gradients that travel as integers with predicted exponents.

    The largest value of a layer is predicted from the largest values of its last means, which all
    ranks know: 2 ranks (m + 3 s), with their mean m and standard deviation s. Its exponent is the
    layer's; larger values saturate, and the record counts them. Ranks exchange their largest values
    only until a layer has had a gradient.
    wire: int2 .. int16, whose integers are added exactly; algorithm: of the all-reduce
    history: number of means that a prediction uses
    Source: Koester et al.: Flexpoint: an adaptive numerical format for efficient training of deep
    neural networks, NIPS 2017. Its Autoflex uses the maxima of the tensor itself; a gradient of one
    rank may be ranks times its share of the mean.
    """

    columns: ClassVar[Mapping[str, Column]] = LOSSES
    align: ClassVar[int] = TILE

    aggregator: Literal["flexpoint"] = "flexpoint"
    wire: str = "int16"
    algorithm: str = USUAL
    history: Annotated[int, Allowed(ge=1, le=1024)] = 16

    def __post_init__(self) -> None:
        if self.wire not in INTEGERS or self.wire == "ternary":
            raise ValueError(f"Flexpoint: wire={self.wire!r}: known are int2 .. int16")
        self._allreduce()

    def _allreduce(self) -> Allreduce:
        return configured(Allreduce, wire=self.wire, algorithm=self.algorithm, op="mean")

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:

        def never() -> Array:
            return np.full(self.history, NEVER)

        pasts = [context.state.shared(name, "maxima", never) for name in bucket.names]
        reduced = self._allreduce().run(
            context.world,
            gradients,
            iteration=context.iteration,
            segments=bucket.segments,
            shifts=self._expected(pasts, bucket, context.world.ranks),
        )
        mean = reduced.arrays[0]
        largest = amax_of_segments(mean, bucket.segments).astype(np.uint32).view(np.float32)
        for past, value in zip(pasts, largest, strict=True):
            past[:] = [*past[1:], value]
        return Mean.finite(mean, {"aps_shift": np.array(reduced.sent_shifts, np.float64)})

    def _expected(self, pasts: list[Array], bucket: Bucket, ranks: int) -> Shifts | None:
        """Return the shift of each layer; None if one of them has had no gradient."""
        fmt, shifts = INTEGERS[self.wire], list[int]()
        for past, (_, start, stop) in zip(pasts, bucket.segments, strict=True):
            if start == stop:
                shifts.append(0)
                continue
            known = [each for each in past.tolist() if each != NEVER]
            if not any(known):
                return None
            largest = min(ranks * autoflex(known), float(np.finfo(np.float32).max))
            shifts.append(integer_shift(int(np.float32(largest).view(np.uint32)), fmt))
        return shifts, shifts

    def observe(self, gradient: Array, bucket: Bucket, mean: Mean) -> Mapping[str, Array]:
        """Count what encoding a rank's own gradient loses. See Aggregator.observe."""
        return count_losses(gradient, bucket, self._allreduce(), mean)

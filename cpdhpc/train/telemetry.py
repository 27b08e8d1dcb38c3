"""What rounding does to the gradient of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..compress import Mean
from .reducer import GradientReducer

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layers:
    """What encoding does to the gradients of all ranks, by layer.

    nonzero: int64[layers], how many values are not zero; of these,
    underflow_share, saturated_share: float64[layers], the shares that become zero, that saturate
    aps_shift: float64[layers], k of the scale 2**k, NaN where layers have none
    """

    nonzero: Array
    aps_shift: Array
    underflow_share: Array
    saturated_share: Array


def observe(reducer: GradientReducer, mean: Mean) -> Layers:
    """Return what encoding did in the last reduce. Collective."""
    bucket = reducer.bucket
    counts = np.zeros((len(bucket.names), 3), np.int64)
    for flat in reducer.flats:
        counts[:, :2] += reducer.aggregator.events(flat, bucket, mean.shifts)
        counts[:, 2] += [np.count_nonzero(view) for view in bucket.views(flat)]
    total = np.sum(reducer.world.gather(counts), axis=0)
    saturated, underflowed, nonzero = total.T
    some = np.maximum(nonzero, 1)  # a layer of zeros loses nothing
    unknown = np.full(len(bucket.names), np.nan)
    return Layers(
        nonzero=nonzero,
        aps_shift=unknown if mean.shifts is None else mean.shifts.astype(np.float64),
        underflow_share=underflowed / some,
        saturated_share=saturated / some,
    )

"""What rounding does to the gradient of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..compress import Mean
from .reducer import GradientReducer

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Layers:
    """float64[layers] each: the shift in use (NaN where layers have none), and the shares of the
    non-zero gradient values of all ranks that become zero, or saturate, when they are encoded."""

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
    saturated, underflowed, nonzero = sum(reducer.world.gather(counts)).T
    some = np.maximum(nonzero, 1)  # a layer of zeros loses nothing
    unknown = np.full(len(bucket.names), np.nan)
    return Layers(
        aps_shift=unknown if mean.shifts is None else mean.shifts.astype(np.float64),
        underflow_share=underflowed / some,
        saturated_share=saturated / some,
    )

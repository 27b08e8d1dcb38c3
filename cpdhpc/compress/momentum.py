"""Momentum that a method gives to the mean, the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import numpy as np

from ..collectives.checks import NonFiniteGradient, is_finite
from ..ops import backend_of
from .base import Array, Context
from .bucket import Bucket

MOMENTUM = "momentum"  # its name in a state


def pushed(
    flat: Array, bucket: Bucket, layers: Collection[str], momentum: float, context: Context
) -> dict[str, Array]:
    """Return momentum * m + mean of some layers, new float32[n] each, of which nothing is kept yet.

    flat: the mean, float32[bucket.size]; m: what keep_momenta has kept, 0 at first
    Raises NonFiniteGradient, on all ranks as they have the same mean, for layers where that is
    beyond float32.
    """
    scale, kernels, found, beyond = np.float32(context.loss_scale), backend_of(flat), {}, []
    with np.errstate(over="ignore"):
        for name, start, stop in bucket.segments:
            if name not in layers:
                continue
            x = flat[start:stop]
            kept = _kept(name, x, context)  # which does not follow the scale, as it is shared
            m = kernels.multiply(kept, np.float32(momentum))
            kernels.add(m, kernels.divide(x, scale), m)
            found[name] = kernels.multiply(m, scale, m)
            beyond += [] if is_finite(m) else [name]
    if beyond:
        raise NonFiniteGradient(beyond, [], "float32")
    return found


def keep_momenta(momenta: Mapping[str, Array], context: Context) -> None:
    """Keep what pushed has returned."""
    for name, m in momenta.items():
        kept = _kept(name, m, context)
        backend_of(m).divide(m, np.float32(context.loss_scale), kept)


def _kept(layer: str, x: Array, context: Context) -> Array:
    return context.state.shared(layer, MOMENTUM, partial(np.zeros_like, x), x)

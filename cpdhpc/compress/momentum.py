"""Momentum: that which a method gives to the mean, and how much goes with values that wait.

Reasons: docs/reference/compression.md, "When a method that holds values back may have momentum".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from ..collectives.checks import NonFiniteGradient, is_finite
from ..ops import backend_of
from .base import Aggregator, Array, Context
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


SettingsOf = Literal["given", "recommended"]


def recommended(aggregator: Aggregator) -> Aggregator:
    """Return an aggregator as settings = "recommended" has it: its momentum is not too much."""
    most = aggregator.most_momentum
    if aggregator.holds_back and getattr(aggregator, "momentum", 0.0) > most:
        return replace(aggregator, momentum=most)  # type: ignore[call-arg]  # it is a field
    return aggregator


def rate_with(rate: float, momentum: float, most: float) -> float:
    """Return the learning rate whose steps are as long with the momentum most."""
    return float(f"{rate / (1 - momentum) * (1 - most):.12g}")  # as one would write it: 0.25


def told(aggregator: Aggregator, says: str) -> str:
    """Return the line about an aggregator that holds values back, as jobs and loops tell it."""
    name = getattr(aggregator, "aggregator", type(aggregator).__name__)
    return f"aggregator {name} holds values back: {says}"


def loses(momentum: float, write: str) -> str:
    """Return what told says of a momentum, and what to write in place of it."""
    return f"momentum {momentum:g} loses accuracy: {write}"


def advice_for_loop(aggregator: Aggregator, optimizer: str, group: dict[str, Any]) -> str:
    """Return the line about a parameter group of a torch optimiser; "" if it may stay as it is."""
    most = aggregator.most_momentum
    if not aggregator.holds_back or aggregator.has_momentum:
        return ""
    if (group.get("momentum") or 0) > most:
        momentum = float(group["momentum"])
        sent = 1 - float(group.get("dampening", 0))  # of a gradient that enters the momentum
        rate = rate_with(float(group["lr"]) * sent, momentum, most)
        more = ", dampening=0" if sent < 1 else ""
        more += ", nesterov=False" if group.get("nesterov") and not most else ""
        given = f"momentum={most:g}{more} and lr={rate:g}"
        return told(aggregator, loses(momentum, f"give {optimizer} {given}"))
    if "betas" in group and group["betas"][0] > most:
        first, *others = map(float, group["betas"])
        betas = ", ".join(f"{each:g}" for each in (most, *others))
        return told(aggregator, loses(first, f"give {optimizer} betas=({betas})"))
    return ""

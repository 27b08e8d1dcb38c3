"""Momentum that methods apply to the mean, and limits of momentum for methods with residuals.

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
    """Return momentum * m + mean of some layers, new float32[n] each, to be kept by keep_momenta.

    flat: the mean, float32[bucket.size]; m: the momenta that keep_momenta has kept, 0 at first
    Raises NonFiniteGradient for layers that overflow, on all ranks, as they have the same mean.
    """
    scale, kernels, found, beyond = np.float32(context.loss_scale), backend_of(flat), {}, []
    with np.errstate(over="ignore"):
        for name, start, stop in bucket.segments:
            if name not in layers:
                continue
            x = flat[start:stop]
            kept = _kept(name, x, context)  # without the loss scale, as State.scale skips it
            m = kernels.multiply(kept, np.float32(momentum))
            kernels.add(m, kernels.divide(x, scale), m)
            found[name] = kernels.multiply(m, scale, m)
            beyond += [] if is_finite(m) else [name]
    if beyond:
        raise NonFiniteGradient(beyond, [], "float32")
    return found


def keep_momenta(momenta: Mapping[str, Array], context: Context) -> None:
    """Keep the momenta that pushed has returned."""
    for name, m in momenta.items():
        kept = _kept(name, m, context)
        backend_of(m).divide(m, np.float32(context.loss_scale), kept)


def _kept(layer: str, x: Array, context: Context) -> Array:
    return context.state.shared(layer, MOMENTUM, partial(np.zeros_like, x), x)


SettingsOf = Literal["given", "recommended"]


def recommended(aggregator: Aggregator) -> Aggregator:
    """Return an aggregator with its momentum limited, as settings = "recommended" has it."""
    most = aggregator.most_momentum
    if aggregator.holds_back and getattr(aggregator, "momentum", 0.0) > most:
        return replace(aggregator, momentum=most)  # type: ignore[call-arg]  # it is a field
    return aggregator


def rate_with(rate: float, momentum: float, most: float) -> float:
    """Return the learning rate that gives steps of the same length with the momentum most."""
    return float(f"{rate / (1 - momentum) * (1 - most):.12g}")  # as one would write it: 0.25


def told(aggregator: Aggregator, says: str) -> str:
    """Return the line that jobs and loops print about an aggregator with residuals."""
    name = getattr(aggregator, "aggregator", type(aggregator).__name__)
    return f"aggregator {name} holds values back: {says}"


def loses(momentum: float, write: str) -> str:
    """Return the message about a momentum that is too large, with the text to write instead."""
    return f"momentum {momentum:g} loses accuracy: {write}"


def advice_for_loop(aggregator: Aggregator, optimizer: str, group: dict[str, Any]) -> str:
    """Return advice about a parameter group of a torch optimiser; "" if there is none."""
    most = aggregator.most_momentum
    if not aggregator.holds_back or aggregator.has_momentum:
        return ""
    if (group.get("momentum") or 0) > most:
        momentum = float(group["momentum"])
        sent = 1 - float(group.get("dampening", 0))  # share of a gradient in the momentum
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

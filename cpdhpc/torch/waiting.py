"""What an optimiser should be beside a method that holds values back: one without momentum.

docs/compression.md has why, below "When a method that waits may have momentum".
"""

from __future__ import annotations

from typing import Any

from ..compress.base import Aggregator


def rate_without(rate: float, momentum: float) -> float:
    """Return the learning rate whose steps are without momentum as long as with it."""
    return float(f"{rate / (1 - momentum):.12g}")  # 0.05 and 0.9: 0.5, as one would write it


def told(aggregator: Aggregator, says: str) -> str:
    """Return the line about an aggregator that holds values back, as jobs and loops tell it."""
    name = getattr(aggregator, "aggregator", type(aggregator).__name__)
    return f"aggregator {name} holds values back: {says}"


def loses(momentum: float, write: str) -> str:
    """Return what told says of a momentum, and what to write in place of it."""
    return f"momentum {momentum:g} loses accuracy: {write}"


def advice_for_loop(aggregator: Aggregator, optimizer: str, group: dict[str, Any]) -> str:
    """Return the line about a parameter group of a torch optimiser; "" if it may stay as it is."""
    if not aggregator.holds_back or aggregator.has_momentum:
        return ""
    if group.get("momentum"):
        momentum = float(group["momentum"])
        sent = 1 - float(group.get("dampening", 0))  # of a gradient that enters the momentum
        rate = rate_without(float(group["lr"]) * sent, momentum)
        more = ", nesterov=False" if group.get("nesterov") else ""
        return told(
            aggregator, loses(momentum, f"give {optimizer} momentum=0{more} and lr={rate:g}")
        )
    if "betas" in group and group["betas"][0]:
        first, *others = map(float, group["betas"])
        betas = ", ".join(["0", *(f"{each:g}" for each in others)])
        return told(aggregator, loses(first, f"give {optimizer} betas=({betas})"))
    return ""

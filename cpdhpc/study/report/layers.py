"""Maps of what rounding does to each layer's gradients over a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .axis import Axis
from .chart import Chart
from .panel import Map

Array = npt.NDArray[Any]
KEPT = {  # what is drawn, and how it is called
    "underflow": "non-zero gradient values that become zero on the wire",
    "saturated": "non-zero gradient values that saturate on the wire",
}
LEAST = 0.05  # %: maps without any more are not drawn


@dataclass(frozen=True)
class Observed:
    """What was observed of a training's layers.

    panel: what it shares with others of a figure; iterations: int64[samples]
    values: float64[layers, samples], %, means over seeds
    """

    panel: str
    name: str
    iterations: Array
    layers: Sequence[str]
    values: Array


def layer_charts(title: str, what: str, observed: Sequence[Observed]) -> list[Chart]:
    """Return a figure for each set that shares a panel's name, of those that have any of what."""
    drawn: dict[str, list[Map]] = {}
    for each in observed:
        if each.values.size and np.nan_to_num(each.values).max() >= LEAST:
            at = Axis("iteration")
            panel = Map(each.name, at, Axis(""), each.iterations, each.layers, each.values)
            drawn.setdefault(each.panel, []).append(panel)
    return [
        Chart(
            f"{what}_{panel}".replace(" ", "_").strip("_"),
            f"{title}: {what} by layer" + (f", {panel}" if panel else ""),
            [f"{KEPT[what].capitalize()}, mean over seeds. Maps without any are left out."],
            f"{what.capitalize()} of each layer over the training.",
            maps,
            colours=f"{what} / %",
        )
        for panel, maps in drawn.items()
    ]

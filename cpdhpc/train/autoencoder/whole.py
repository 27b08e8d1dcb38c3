"""Weights as one array, the same for any number of ranks: for files and pictures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ...comm import Ranks
from ...darray import Box, Layout, WindowPlan
from .macro import MacroLayer

Array = npt.NDArray[np.generic]


def collect(world: Ranks, layer: MacroLayer, values: torch.Tensor) -> Array | None:
    """Return [blocks, blocks, maps, inputs] on rank 0, None on others. Collective.

    values: one for each weight of this rank, as layer.weight has them
    """
    layout, first = layer.blocks, world.rank == 0
    window = layout.domain if first else Box((0, 0), (0, 0))
    trail = layer.weight.shape[1:]
    with WindowPlan(world, layout, window, name="collect weights") as plan:
        near = values.detach().reshape(*layer.own_blocks, *trail).numpy()
        found: Array = plan.exchange(np.ascontiguousarray(near)).copy()
    return found if first else None


def deal(world: Ranks, layer: MacroLayer, values: Array | None) -> torch.Tensor:
    """Return this rank's part of what collect returned on rank 0. Collective."""
    layout, trail = layer.blocks, tuple(layer.weight.shape[1:])
    at_first = Layout.at(layout.shape, 0, world.ranks)
    dtype = layer.weight.detach().numpy().dtype
    given = np.empty((0, 0, *trail), dtype) if values is None else values
    with WindowPlan(world, at_first, layout.owner(world.rank), name="deal weights") as plan:
        found = plan.exchange(np.ascontiguousarray(given, dtype)).copy()
    return torch.from_numpy(found).flatten(0, 1)

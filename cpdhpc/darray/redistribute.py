"""From one layout to another: a plan whose windows are the boxes of the other layout."""

from __future__ import annotations

from typing import Any

from ..comm.world import as_world
from .kinds import Array
from .layout import Layout
from .plan import WindowPlan


def redistribute(world: Any, x: Array, layout_from: Layout, layout_to: Layout) -> Array:
    """Return this rank's box in another layout of the same domain. Collective.

    world: as for WindowPlan; x: the array on this rank's box of layout_from
    For many arrays make WindowPlan(world, layout_from, layout_to.owner(rank)) once instead.
    Raises ValueError alike on all ranks where the layouts' domains differ, and as WindowPlan.
    """
    ranks = as_world(world)
    if layout_from.shape != layout_to.shape or layout_to.ranks != ranks.size:
        raise ValueError(
            f"redistribute: layout_to is of {layout_to.shape} over {layout_to.ranks} ranks: must "
            f"be of {layout_from.shape} over {ranks.size}"
        )
    digests = ranks.gather(layout_to.digest, "redistribute")
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if other is not None:
        raise ValueError(f"redistribute: layout_to of rank {other} is not that of rank 0")
    with WindowPlan(ranks, layout_from, layout_to.owner(ranks.rank), name="redistribute") as plan:
        return plan.exchange(x)

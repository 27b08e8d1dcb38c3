"""Distributed arrays: a rank's part together with the layout of all parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..world.mpi import as_world
from ..world.ranks import Ranks
from . import files
from .by_slices import Array, array_backend
from .layout import Box, Layout
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


@dataclass(frozen=True)
class DistArray:
    """This rank's part of an array, and who has the others.

    local: the array on layout.owner(world.rank), any further axes behind; of any kind that
        WindowPlan.exchange takes
    Raises ValueError where local does not have the shape of the box.
    """

    world: Ranks
    layout: Layout
    local: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "world", as_world(self.world))
        if self.layout.ranks != self.world.size:
            raise ValueError(
                f"DistArray: layout has {self.layout.ranks} boxes for {self.world.size} ranks"
            )
        owned = self.layout.owner(self.world.rank).shape
        if tuple(self.local.shape[: len(owned)]) != owned:
            raise ValueError(
                f"DistArray: local has shape {tuple(self.local.shape)}: must begin with {owned}, "
                f"the shape of rank {self.world.rank}'s box"
            )

    @classmethod
    def from_global(cls, world: Any, layout: Layout, array: Array, root: int | None = None) -> Self:
        """Return the distributed array of one that all ranks have, or rank root. Collective.

        array: of the domain's shape, any further axes behind; where there is a root, the others
            give an empty array of this kind and dtype, and of these further axes: (0, 0, 3)
        Raises ValueError where the shape is another.
        """
        ranks = as_world(world)
        if root is None:
            ndim = len(layout.shape)
            if tuple(array.shape[:ndim]) != layout.shape:
                raise ValueError(
                    f"DistArray: array has shape {tuple(array.shape)}: must begin with "
                    f"{layout.shape}"
                )
            place = layout.owner(ranks.rank).slices((0,) * ndim)
            backend, part = array_backend("DistArray: array", array), array[place]
            local = backend.empty(array, tuple(part.shape))
            local[...] = part  # a copy: the array may be changed and freed
            return cls(ranks, layout, local)
        everything = Layout.at(layout.shape, root, ranks.size)
        return cls(ranks, layout, redistribute(ranks, array, everything, layout))

    def gather(self, root: int | None = None) -> Array | None:
        """Return the whole array on all ranks, or on rank root and None elsewhere. Collective.

        Raises ValueError where there is no rank root.
        """
        if root is not None and not 0 <= root < self.world.size:
            raise ValueError(f"DistArray.gather: root={root}: ranks are 0..{self.world.size - 1}")
        here = root is None or root == self.world.rank
        none = (0,) * len(self.layout.shape)
        window = self.layout.domain if here else Box(none, none)
        with WindowPlan(self.world, self.layout, window, name="gather") as plan:
            whole = plan.exchange(self.local)
        return whole if here else None

    def window(self, plan: WindowPlan) -> Array:
        """Return the array on this rank's window of a plan over the same layout. Collective."""
        if plan.layout != self.layout:
            raise ValueError(f"DistArray.window: plan {plan.name!r} is of another layout")
        return plan.exchange(self.local)

    def redistribute(self, layout: Layout) -> DistArray:
        """Return the same array in another layout. Collective."""
        local = redistribute(self.world, self.local, self.layout, layout)
        return DistArray(self.world, layout, local)

    def save(
        self,
        path: Path | str,
        name: str = "data",
        *,
        chunks: tuple[int, ...] | None = None,
        compression: str | None = None,
    ) -> None:
        """Write the array as one dataset of an HDF5 file; see files.save. Collective."""
        host = array_backend("DistArray.save: local", self.local).host(self.local)
        files.save(self.world, Path(path), self.layout, host, name, chunks, compression)

    @classmethod
    def load(cls, world: Any, path: Path | str, layout: Layout, name: str = "data") -> Self:
        """Return a dataset of an HDF5 file as a NumPy array in any layout. Collective.

        Raises UserError alike on all ranks where it is missing or does not fit.
        """
        ranks = as_world(world)
        return cls(ranks, layout, files.load(ranks, Path(path), layout, name))

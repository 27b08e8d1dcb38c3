"""Distributed arrays: a rank's part together with the layout of all parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..world.mpi import as_world
from ..world.ranks import Ranks
from . import files
from .by_slices import Array, array_backend
from .layout import Box, Layout, check_layout
from .plan import WindowPlan


def redistribute(world: Any, x: Array, layout_from: Layout, layout_to: Layout) -> Array:
    """Return this rank's box in another layout of the same domain. Collective.

    world: as for WindowPlan; x: the array on this rank's box of layout_from
    For many arrays make WindowPlan(world, layout_from, layout_to.owner(rank)) once instead.
    Raises ValueError alike on all ranks where the layouts' domains differ, and as WindowPlan.
    """
    ranks = as_world(world)

    def digest() -> str:
        check_layout("redistribute: layout_from", layout_from)
        check_layout("redistribute: layout_to", layout_to)
        if layout_from.shape != layout_to.shape or layout_to.ranks != ranks.size:
            raise ValueError(
                f"redistribute: layout_to is of {layout_to.shape} over {layout_to.ranks} ranks: "
                f"must be of {layout_from.shape} over {ranks.size}"
            )
        return layout_to.digest

    digests = ranks.gather_from(digest, "redistribute")
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if other is not None:
        raise ValueError(f"redistribute: layout_to of rank {other} is not that of rank 0")
    with WindowPlan(ranks, layout_from, layout_to.owner(ranks.rank), name="redistribute") as plan:
        return plan.exchange(x)


def _root(what: str, root: int | None, world: Ranks) -> int | None:
    """Return root. Raises TypeError or ValueError unless it is None or a rank."""
    if root is not None and not isinstance(root, int):
        raise TypeError(f"{what}: root={root!r}: must be a rank or None")
    if root is not None and not 0 <= root < world.size:
        raise ValueError(f"{what}: root={root}: ranks are 0..{world.size - 1}")
    return root


@dataclass(frozen=True)
class DistArray:
    """This rank's part of an array, and who has the others.

    local: the array on layout.owner(world.rank), any further axes behind; of any kind that
        WindowPlan.exchange takes
    Raises TypeError or ValueError where local does not have the shape of the box, on the ranks
    that wait for this one too.
    """

    world: Ranks
    layout: Layout
    local: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "world", as_world(self.world))
        try:
            self._check()
        except (TypeError, ValueError) as error:
            raise self.world.refuse(error)[0] from None

    def _check(self) -> None:
        check_layout("DistArray: layout", self.layout)
        array_backend("DistArray: local", self.local)
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
        Raises TypeError or ValueError alike on all ranks where the shape is another.
        """
        ranks = as_world(world)

        def alike() -> int | None:
            check_layout("DistArray: layout", layout)
            backend = array_backend("DistArray: array", array)
            if root is not None:  # it travels
                backend.check("DistArray: array", array)
            ends = len(layout.shape)
            if (root is None or root == ranks.rank) and tuple(array.shape[:ends]) != layout.shape:
                raise ValueError(
                    f"DistArray: array has shape {tuple(array.shape)}: must begin with "
                    f"{layout.shape}"
                )
            return _root("DistArray", root, ranks)

        roots = ranks.gather_from(alike, "DistArray")
        if roots != roots[:1] * ranks.size:
            raise ValueError(f"DistArray: root differs between ranks: {roots}")
        if root is None:
            ndim = len(layout.shape)
            place = layout.owner(ranks.rank).slices((0,) * ndim)
            backend, part = array_backend("DistArray: array", array), array[place]
            local = backend.empty(array, tuple(part.shape))
            local[...] = part  # a copy: the array may be changed and freed
            return cls(ranks, layout, local)
        everything = Layout.at(layout.shape, root, ranks.size)
        return cls(ranks, layout, redistribute(ranks, array, everything, layout))

    def gather(self, root: int | None = None) -> Array | None:
        """Return the whole array on all ranks, or on rank root and None elsewhere. Collective.

        Raises TypeError or ValueError alike on all ranks where there is no rank root.
        """
        self.world.gather_from(lambda: _root("DistArray.gather", root, self.world), "gather")
        here = root is None or root == self.world.rank
        none = (0,) * len(self.layout.shape)
        window = self.layout.domain if here else Box(none, none)
        with WindowPlan(self.world, self.layout, window, name="gather") as plan:
            whole = plan.exchange(self.local)
        return whole if here else None

    def window(self, plan: WindowPlan) -> Array:
        """Return the array on this rank's window of a plan over the same layout. Collective."""
        if not isinstance(plan, WindowPlan) or plan.layout != self.layout:
            other = (
                "is no WindowPlan" if not isinstance(plan, WindowPlan) else "is of another layout"
            )
            error = ValueError(f"DistArray.window: plan {getattr(plan, 'name', plan)!r} {other}")
            raise self.world.refuse(error)[0]
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
        error: Exception | None = None
        try:
            place = Path(path)
            host = array_backend("DistArray.save: local", self.local).host(self.local)
        except (TypeError, ValueError, RuntimeError) as found:
            error = found
        self.world.agree(error, "save")
        files.save(self.world, place, self.layout, host, name, chunks, compression)

    @classmethod
    def load(cls, world: Any, path: Path | str, layout: Layout, name: str = "data") -> Self:
        """Return a dataset of an HDF5 file as a NumPy array in any layout. Collective.

        Raises UserError alike on all ranks where it is missing or does not fit.
        """
        ranks = as_world(world)
        return cls(ranks, layout, files.load(ranks, path, layout, name))

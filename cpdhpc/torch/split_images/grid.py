"""Which ranks share an image, and which part of every feature map each of them owns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ...darray.layout import Box, Layout
from ...world.mpi import as_world
from ...world.ranks import Ranks

Shape = tuple[int, int]  # height and width in pixels of a whole image or feature map


class ImageGrid:
    """Gives images to groups of ranks, and splits each over rows x columns of ranks. Collective.

    world: a World, Loopback or an mpi4py communicator: all ranks, which hold the same weights
    procs: (rows, columns) of ranks that an image is split over; consecutive ranks are a group
    group: the world of the ranks that share this rank's images
    groups, index: the number of groups, and which of them this rank is in
    Raises TypeError or ValueError on all processes alike unless rows x columns divides the ranks.
    """

    def __init__(self, world: Any, procs: Sequence[int]) -> None:
        self.world: Ranks = as_world(world, "ImageGrid")
        if self.world.virtual_ranks != 1:
            raise ValueError("ImageGrid: world has virtual ranks: needs one rank a process")
        given = self.world.gather_from(lambda: _pair(procs, self.world.size), "ImageGrid")
        self.procs = given[0]
        if given != given[:1] * self.world.size:
            raise ValueError(f"ImageGrid: procs differ between ranks: {given}")
        self.groups, self.index = self.world.size // self.sharing, self.world.rank // self.sharing
        self.group = self.world if self.groups == 1 else self.world.split(self.index)

    @property
    def sharing(self) -> int:
        """The number of ranks that share an image."""
        return prod(self.procs)

    def layout(self, shape: Shape) -> Layout:
        """Return who owns what of a map of this size; ranks beyond its cells own nothing."""
        return Layout.grid(shape, self.procs)

    def owned(self, shape: Shape) -> Box:
        """Return the box of this rank."""
        return self.layout(shape).owner(self.group.rank)

    def cut(self, images: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part of whole images [..., height, width]."""
        height, width = images.shape[-2:]
        rows, columns = self.owned((height, width)).slices((0, 0))
        return images[..., rows, columns]

    def free(self) -> None:
        """Free the world of the group; the grid cannot be used any more. Collective."""
        if self.group is not self.world:
            self.group.free()


def _pair(procs: Sequence[int], ranks: int) -> Shape:
    """Return rows and columns. Raises ValueError unless their product divides the ranks."""
    pair = tuple(procs) if isinstance(procs, Sequence) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and n >= 1 for n in pair):
        raise ValueError(f"ImageGrid: procs={procs}: must be rows and columns, 1 or more each")
    if ranks % prod(pair):
        raise ValueError(
            f"ImageGrid: procs={pair[0]} x {pair[1]} for {ranks} ranks: "
            f"their number must be a multiple of {prod(pair)}"
        )
    return pair[0], pair[1]

"""Arrays of all ranks in one ordinary HDF5 file, written at once, without an HDF5 made for MPI."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import store
from ..config import UserError
from ..world import files
from ..world.ranks import Ranks
from .layout import Layout, check_layout

Array = npt.NDArray[np.generic]
Parts = Mapping[str, tuple[Layout, Array]]


def save(
    world: Ranks,
    path: Path,
    layout: Layout,
    local: Array,
    name: str = "data",
    chunks: tuple[int, ...] | None = None,
    compression: str | None = None,
) -> None:
    """Write a distributed array as one dataset of a file that takes path's place. Collective.

    local: the array on this rank's box, any further axes behind
    name, chunks, compression and errors: as save_all
    """
    save_all(world, path, {name: (layout, local)}, {}, chunks, compression)


def save_all(
    world: Ranks,
    path: Path,
    arrays: Parts,
    attributes: store.Attributes,
    chunks: tuple[int, ...] | None = None,
    compression: str | None = None,
) -> None:
    """Write distributed arrays as datasets of a file that takes path's place. Collective.

    arrays: name, as "group/data", -> layout, and the array on this rank's box, any further axes
        behind; on all ranks the same names in the same order
    attributes: of the file; those of process 0 are written
    chunks, compression: as h5py.Group.create_dataset. With either the ranks write one after the
        other, else all at once: process 0 makes datasets with room for everything, and each
        writes its boxes where the bytes belong, by MPI-IO; all must see the directory
    The file can be read by anyone, and by load on any number of ranks in any layout. Until the
    end path holds what it held before, whatever happens.
    Raises UserError alike on all ranks where the file cannot be written; ValueError where an array
    does not fit, or arguments differ between ranks.
    """
    rooms = _check(world, arrays, (chunks, compression, str(path)))

    def fill(temporary: Path, offsets: files.Offsets) -> None:
        for name, (layout, local) in arrays.items():
            _fill(world, temporary, name, offsets[name], layout, local)

    files.save(world, path, rooms, attributes, fill, chunks, compression)


def _described(
    world: Ranks, name: str, part: tuple[Layout, Array], how: tuple[object, ...]
) -> tuple[Any, ...]:
    """Return what must be the same on all ranks, but for whether the array fits its box."""
    layout, local = part
    ndim = len(layout.shape)
    fits = layout.ranks == world.size and local.shape[:ndim] == layout.owner(world.rank).shape
    return name, fits, local.shape[ndim:], str(local.dtype), how, layout.digest


def _check(world: Ranks, arrays: Parts, how: tuple[object, ...]) -> dict[str, store.Room]:
    """Return the datasets, alike on all ranks; raise the first rank's error on all."""

    def described() -> list[tuple[Any, ...]]:
        return [_described(world, name, part, how) for name, part in arrays.items()]

    everyone = world.gather_from(described, "save")
    for rank, theirs in enumerate(everyone):
        if [each[0] for each in theirs] != [each[0] for each in everyone[0]]:
            raise ValueError(f"save: ranks 0 and {rank} do not give arrays of the same names")
        for each, first in zip(theirs, everyone[0], strict=True):
            if not each[1]:
                raise ValueError(
                    f"save: {each[0]}: the array of rank {rank} does not have the shape of its box"
                )
            if each != first:
                raise ValueError(
                    f"save: {each[0]}: rank 0 has further axes {first[2]} of {first[3]} and "
                    f"chunks, compression, path {first[4]}; rank {rank} has {each[2]} of {each[3]} "
                    f"and {each[4]}, or another layout"
                )
    return {name: _room(layout, local) for name, (layout, local) in arrays.items()}


def _room(layout: Layout, local: Array) -> store.Room:
    note = {"layout": np.array(layout.owners, np.int64), "ranks": layout.ranks}
    return store.Room(layout.shape + local.shape[len(layout.shape) :], local.dtype, note)


def _fill(
    world: Ranks, path: Path, name: str, offset: int | None, layout: Layout, local: Array
) -> None:
    """Write all ranks' boxes of a dataset. Collective."""
    box, trail = layout.owner(world.rank), local.shape[len(layout.shape) :]
    if offset is not None:
        start = box.start + (0,) * len(trail)
        local = np.ascontiguousarray(local)
        world.write_box(path, offset, layout.shape + trail, start, local)
    elif 0 not in trail:
        _in_turns(world, path, name, box.slices((0,) * box.ndim), local)


def _in_turns(world: Ranks, path: Path, name: str, place: tuple[slice, ...], local: Array) -> None:
    """Write the boxes one rank after the other: HDF5 alone knows where chunks go."""
    for rank in range(world.size):
        error: Exception | None = None
        if rank == world.rank and local.size:
            try:
                store.write_box(path, name, place, local)
            except (OSError, UserError) as found:
                error = found
        world.agree(error, f"save: rank {rank} writes")


def load(world: Ranks, path: Path | str, layout: Layout, name: str = "data") -> Array:
    """Return this rank's box of a dataset, in any layout of its first axes. Collective.

    Raises UserError alike on all ranks where file or dataset is missing, damaged or does not fit.
    """
    place = world.gather_from(lambda: Path(path), "load")[world.rank]
    files.check(world, place)
    return read_all(world, place, {name: layout})[name]


def read_all(world: Ranks, path: Path, layouts: Mapping[str, Layout]) -> dict[str, Array]:
    """Return this rank's boxes of datasets of a file that was checked. Collective.

    Raises UserError as load does.
    """
    error: Exception | None = None
    found: dict[str, Array] = {}
    try:
        _, rooms = store.contents(path)
        for name, layout in layouts.items():
            check_layout("load: layout", layout)
            if name not in rooms:
                known = ", ".join(rooms) or "none at all"
                raise UserError(f"load: {path}: has no dataset {name!r}, only {known}")
            shape = rooms[name].shape
            if shape[: len(layout.shape)] != layout.shape or layout.ranks != world.size:
                raise UserError(
                    f"load: {path}: dataset {name!r} has shape {shape}: the layout is of "
                    f"{layout.shape} over {layout.ranks} ranks, here are {world.size}"
                )
            box = layout.owner(world.rank)
            found[name] = store.read_box(path, name, box.slices((0,) * box.ndim))
    except Exception as problem:  # a wrong argument may be anything, and the others wait
        error = problem
    world.agree(error, "load")
    return found

"""Arrays of all ranks in one ordinary HDF5 file, written at once, without an HDF5 made for MPI."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import store
from ..comm.ranks import Ranks
from ..config import UserError
from .layout import Layout

Array = npt.NDArray[np.generic]
MOST_NOTE_BYTES = 60_000  # HDF5 has room for 64 KiB of attributes


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
    chunks, compression: as h5py.Group.create_dataset. With either the ranks write one after the
        other, else all at once: process 0 makes a dataset with room for everything, and each
        writes its box where the bytes belong, by MPI-IO
    The file can be read by anyone, and by load on any number of ranks in any layout. Until the
    end path holds what it held before, whatever happens.
    Raises UserError alike on all ranks where the file cannot be written; ValueError where local
    does not fit, or arguments differ between ranks.
    """
    trail = _check(world, layout, local, (name, chunks, compression))
    shape, box = layout.shape + trail, layout.owner(world.rank)
    place = box.slices((0,) * box.ndim)
    note: dict[str, Any] = {"layout": np.array(layout.owners, np.int64), "ranks": layout.ranks}
    if note["layout"].nbytes > MOST_NOTE_BYTES:
        del note["layout"]
    error: Exception | None = None
    try:
        with store.replacing(path) if world.rank == 0 else nullcontext(path) as temporary:
            arguments = temporary, name, shape, local.dtype, note, chunks, compression
            offset = _on_first(world, lambda: store.create(*arguments))
            temporary = world.gather(temporary, "save")[0]
            if offset is not None:
                start = box.start + (0,) * len(trail)
                world.write_box(temporary, offset, shape, start, np.ascontiguousarray(local))
            elif local.size or 0 not in shape:
                _in_turns(world, temporary, name, place, local)
    except (OSError, UserError) as found:
        error = UserError(f"save: {path}: {found}")
    world.agree(error, "save")


def _check(world: Ranks, layout: Layout, local: Array, how: tuple[object, ...]) -> tuple[int, ...]:
    """Return the further axes, alike on all ranks; raise the first rank's error on all."""
    owned, trail = layout.owner(world.rank).shape, local.shape[len(layout.shape) :]
    fits = layout.ranks == world.size and local.shape[: len(layout.shape)] == owned
    mine = (fits, trail, str(local.dtype), layout.digest, how)
    everyone = world.gather(mine, "save")
    for rank, each in enumerate(everyone):
        if not each[0]:
            raise ValueError(f"save: the array of rank {rank} does not have the shape of its box")
        if each != everyone[0]:
            raise ValueError(
                f"save: rank 0 has further axes {everyone[0][1]} of {everyone[0][2]} and name, "
                f"chunks, compression {everyone[0][4]}; rank {rank} has {each[1]} of {each[2]} and "
                f"{each[4]}, or another layout"
            )
    return trail


def _on_first(world: Ranks, make: Callable[[], int | None]) -> int | None:
    """Return what make returns on process 0; raise its error on all. Collective."""
    value, error = None, None
    try:
        value = make() if world.rank == 0 else None
    except (OSError, UserError) as found:
        error = found
    world.agree(error, "save")
    return world.gather(value, "save")[0]


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


def load(world: Ranks, path: Path, layout: Layout, name: str = "data") -> Array:
    """Return this rank's box of a dataset, in any layout of its first axes. Collective.

    Raises UserError alike on all ranks where file or dataset is missing or does not fit.
    """
    error: Exception | None = None
    local = np.empty(0)
    try:
        shape = store.dataset_shape(path, name)
        if shape[: len(layout.shape)] != layout.shape or layout.ranks != world.size:
            raise UserError(
                f"load: {path}: dataset {name!r} has shape {shape}: the layout is of "
                f"{layout.shape} over {layout.ranks} ranks, here are {world.size}"
            )
        box = layout.owner(world.rank)
        local = store.read_box(path, name, box.slices((0,) * box.ndim))
    except OSError as found:
        error = UserError(f"load: {path}: {found}")
    except UserError as found:
        error = found
    world.agree(error, "load")
    return local

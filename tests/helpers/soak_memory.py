"""What memory soak.py finds in use, and whether there is more of it at the end."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpdhpc.collectives.engine import BufferPool
from cpdhpc.collectives.recorded import Recordings
from cpdhpc.world.mpi import World

# What is no leak. Buffers that are kept grow until the largest of each kind has been drawn, which
# took 25 minutes of 30; objects until all caches of formats and methods are full, as long.
PAGE_BYTES = 4096
SHARE, GROWTH = 0.02, {"kept_mib": 256, "other_mib": 8, "objects": 5000}


class Look(NamedTuple):
    """What a process has in use between two calls.

    kept_mib: buffers that worlds keep, in memory of their own and in memory that the node shares
    other_mib: all other memory of its own; objects: of Python
    """

    kept_mib: float
    other_mib: float
    objects: int


def is_own(world: World, array: np.ndarray[Any, Any]) -> bool:
    """Whether an array is no memory that the node shares, whose blocks are counted as a whole."""
    shared = world.shared()
    return shared is None or shared.note(array) is None


def forget(world: World) -> None:
    """Free what a world has recorded: the last sizes drawn, so between 10 and 500 thousand objects.

    Collective, as all must know the same.
    """
    recordings = world.cache.get(Recordings, Recordings)
    for entry in recordings.values():
        entry.free()
    recordings.clear()
    if world.board is not None:
        world.board.known.clear()


def look(worlds: Collection[World]) -> Look:
    """Look at the memory of this process, without what is recorded. Collective.

    What is free but held by glibc's malloc goes back first: it depends on the last calls. All pages
    that are kept are touched: else they would count as other memory when a call first needs them.
    """
    for world in worlds:
        forget(world)
    kept = [
        array.reshape(-1).view(np.uint8)
        for world in worlds
        for _, each in world.cache.items()
        if isinstance(each, BufferPool)
        for array in each._arrays
        if is_own(world, array)
    ]
    for array in kept:
        array[::PAGE_BYTES] |= 0  # an assignment of itself would be left out
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    own_bytes = 1024 * int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0])
    kept_bytes, shared_bytes = sum(array.nbytes for array in kept), 0
    for world in worlds:
        shared = world.shared()
        shared_bytes += 0 if shared is None else sum(b.memory.nbytes for b in shared._blocks)
    mib = 1 << 20
    objects = sys.getallocatedblocks()
    return Look((kept_bytes + shared_bytes) / mib, (own_bytes - kept_bytes) / mib, objects)


def grown(looks: Sequence[Look]) -> list[str]:
    """Return what there is more of in the last third of the looks than in the middle third."""
    third = len(looks) // 3
    if not third:
        return []
    middle = np.median(looks[-2 * third : -third], axis=0)
    last = np.median(looks[-third:], axis=0)
    return [
        f"{name}: {before:.0f}, then {after:.0f}"
        for name, before, after in zip(Look._fields, middle, last, strict=True)
        if after > before * (1 + SHARE) + GROWTH[name]
    ]

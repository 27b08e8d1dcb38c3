"""Collectives of unrounded values by MPI's own functions: the baseline, and a fast path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ops.payloads import Array
from ..world.mpi import World
from .blocks import DataBlocks

MOST_BYTES = (1 << 31) - 1  # that MPI can count in one call


LISTED_BYTES = 1 << 14  # of all blocks: below, a call list is faster on one node


def is_faster(world: Any, blocks: DataBlocks) -> bool:
    """Whether "usual" uses MPI's own collective for values that are not rounded.

    Depends only on values that are the same on all ranks. If values only move, or are summed on a
    root, MPI copies once and node memory twice; a call list of a few values begins sooner.
    """
    if blocks.name == "reduce_scatter" or not takes(world, blocks):
        return False
    size_bytes = sum(blocks.counts) * np.dtype(blocks.dtype).itemsize
    return size_bytes > LISTED_BYTES or world.board is None


def takes(world: Any, blocks: DataBlocks) -> bool:
    """Whether MPI has such a collective: one rank per process, and at most MOST_BYTES."""
    if not isinstance(world, World) or world.virtual_ranks > 1:
        return False
    mpi, _ = world.plain_mpi()
    dtype = np.dtype(blocks.dtype)
    if blocks.share.sums and dtype.char not in mpi._typedict:
        return False
    return sum(blocks.counts) * dtype.itemsize <= MOST_BYTES


Move = Callable[[Array, Array], object]  # of x and out, [n], of one dtype; an unused one is empty


def mover(world: Any, blocks: DataBlocks) -> Move:
    """Return MPI's collective for the rank of this process, as a function; it is collective.

    It blocks and has no time-out, like World.sum_by_mpi; all ranks have agreed on the call before.
    """
    (mpi, comm), rank, root = world.plain_mpi(), world.process, blocks.root
    counts, ranks, is_root = list(blocks.counts), world.ranks, rank == root
    if blocks.name == "reduce_scatter":
        return lambda x, out: comm.Reduce_scatter(x, out, counts, mpi.SUM)
    if blocks.name == "reduce":
        return lambda x, out: comm.Reduce(x, out if is_root else None, mpi.SUM, root)
    if blocks.name == "broadcast":
        return lambda x, out: comm.Bcast(x if is_root else out, root)
    is_even = len(set(counts)) == 1  # some libraries are faster if all blocks have one size
    if blocks.name == "all_gather":
        if is_even:
            return lambda x, out: comm.Allgather(x, out)
        return lambda x, out: comm.Allgatherv(x, [out, counts])
    if blocks.name == "all_to_all":
        sent, came = counts[rank * ranks :][:ranks], counts[rank::ranks]
        if is_even:
            return lambda x, out: comm.Alltoall(x, out)
        return lambda x, out: comm.Alltoallv([x, sent], [out, came])
    if blocks.name == "gather":
        if is_even:
            return lambda x, out: comm.Gather(x, out if is_root else None, root)
        return lambda x, out: comm.Gatherv(x, [out, counts] if is_root else None, root)
    if is_even:
        return lambda x, out: comm.Scatter(x if is_root else None, out, root)
    return lambda x, out: comm.Scatterv([x, counts] if is_root else None, out, root)

"""Collectives of values that are not rounded, by MPI's own: the baseline, and a fast path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ops.payloads import Array
from ..world.mpi import World
from .blocks import Blocks

MOST_BYTES = (1 << 31) - 1  # that MPI counts in one call


LISTED_BYTES = 1 << 14  # of all blocks, up to which a call list is faster on one node


def is_faster(world: Any, blocks: Blocks) -> bool:
    """Whether MPI's own collective is used where values are not rounded, if none is named.

    A function of what all ranks know. Where values only move, or are summed on a root, it copies
    once what node memory copies twice; a call list of a few values begins sooner.
    """
    if blocks.name == "reduce_scatter" or not takes(world, blocks):
        return False
    size_bytes = sum(blocks.counts) * np.dtype(blocks.dtype).itemsize
    return size_bytes > LISTED_BYTES or world.board is None


def takes(world: Any, blocks: Blocks) -> bool:
    """Whether MPI has such a collective: of one rank a process, and of at most MOST_BYTES."""
    if not isinstance(world, World) or world.virtual_ranks > 1:
        return False
    mpi, _ = world.plain_mpi()
    dtype = np.dtype(blocks.dtype)
    if blocks.share.sums and dtype.char not in mpi._typedict:
        return False
    return sum(blocks.counts) * dtype.itemsize <= MOST_BYTES


Move = Callable[[Array, Array], object]  # of x and out, [n], of one dtype; an unused one is empty


def mover(world: Any, blocks: Blocks) -> Move:
    """Return what does it for the rank of this process by MPI; it is collective.

    It blocks and has no time-out, as World.sum_by_mpi; all ranks have agreed on the call before.
    """
    (mpi, comm), rank, root = world.plain_mpi(), world.process, blocks.root
    counts, ranks, is_root = list(blocks.counts), world.ranks, rank == root
    if blocks.name == "reduce_scatter":
        return lambda x, out: comm.Reduce_scatter(x, out, counts, mpi.SUM)
    if blocks.name == "reduce":
        return lambda x, out: comm.Reduce(x, out if is_root else None, mpi.SUM, root)
    if blocks.name == "broadcast":
        return lambda x, out: comm.Bcast(x if is_root else out, root)
    is_even = len(set(counts)) == 1  # some libraries are faster where all blocks are alike
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

"""Collectives of values that are not rounded, by MPI's own: the baseline, and a fast path."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ops.payloads import Array
from ..world.mpi import World
from .blocks import Blocks

MOST_BYTES = (1 << 31) - 1  # that MPI counts in one call


def takes(world: Any, blocks: Blocks) -> bool:
    """Whether MPI's own collective can be used: a function of what all ranks know."""
    if not isinstance(world, World) or world.virtual_ranks > 1:
        return False
    mpi, _ = world.plain_mpi()
    dtype = np.dtype(blocks.dtype)
    if blocks.share.sums and dtype.char not in mpi._typedict:
        return False
    return sum(blocks.counts) * dtype.itemsize <= MOST_BYTES


def move_by_mpi(world: World, blocks: Blocks, x: Array, out: Array) -> None:
    """Do it for the rank of this process: from x, [n], to out, of one dtype. Collective.

    It blocks and has no time-out, as World.sum_by_mpi; all ranks have agreed on the call before.
    """
    (mpi, comm), rank, root = world.plain_mpi(), world.process, blocks.root
    name, counts = blocks.name, blocks.counts
    world.count_collective(max(x.nbytes, out.nbytes))
    if name == "reduce_scatter":
        comm.Reduce_scatter(x, out, list(counts), mpi.SUM)
    elif name == "reduce":
        comm.Reduce(x, out if rank == root else None, mpi.SUM, root)
    elif name == "broadcast":
        comm.Bcast(x if rank == root else out, root)
    elif len(set(counts)) == 1:  # some libraries are faster where all blocks are alike
        if name == "all_gather":
            comm.Allgather(x, out)
        elif name == "all_to_all":
            comm.Alltoall(x, out)
        elif name == "gather":
            comm.Gather(x, out if rank == root else None, root)
        else:
            comm.Scatter(x if rank == root else None, out, root)
    elif name == "all_gather":
        comm.Allgatherv(x, [out, list(counts)])
    elif name == "all_to_all":
        ranks = world.ranks
        sent, came = counts[rank * ranks :][:ranks], counts[rank::ranks]
        comm.Alltoallv([x, list(sent)], [out, list(came)])
    elif name == "gather":
        comm.Gatherv(x, [out, list(counts)] if rank == root else None, root)
    else:
        comm.Scatterv([x, list(counts)] if rank == root else None, out, root)

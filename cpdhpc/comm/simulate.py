"""All-reduce of many ranks in one process, without MPI: the bits of a real run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy.typing as npt

from .call import allreduce
from .ranks import Loopback

Array = npt.NDArray[Any]


def simulate(
    xs: Sequence[Array], *args: Any, nodes: Sequence[Hashable] | None = None, **kwargs: Any
) -> Array:
    """Return what allreduce gives for ranks that have these arrays, by the very same code.

    xs: one array for each rank; nodes: as Loopback, for algorithm "hier"; the other arguments,
    and errors: as allreduce. Raises ValueError for algorithm "mpi", which has no schedule.
    """
    world = Loopback(len(xs), nodes=nodes)
    return allreduce(world, xs if len(xs) != 1 else xs[0], *args, **kwargs)

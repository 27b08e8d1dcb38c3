"""The all-reduce of many ranks in one process, without MPI, with the bits of a real run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

from ..formats import Format, Overflow, Rounding
from ..methods import USUAL, said_by
from ..ops.payloads import Array
from ..world.ranks import Loopback
from .allreduce import allreduce
from .checks import check_simulated
from .method import Machine, Op, Segment


def simulate(
    xs: Sequence[Array],
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    accumulate: str | None = None,
    op: Op = "sum",
    out: Array | None = None,
    *,
    nodes: Sequence[Hashable] | None = None,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    headroom: str = "n",
    seed: int = 0,
    iteration: int = 0,
    segments: Sequence[Segment] | None = None,
    machine: Machine | str | Path | None = None,
) -> Array:
    """Return what allreduce gives for ranks that have these arrays, by the very same code.

    xs: one array for each rank; nodes: as Loopback, for algorithm "hier"; the other arguments,
    and errors: as allreduce. Raises ValueError for algorithm "mpi", which has no schedule.
    """
    check_simulated(xs)
    try:
        world = Loopback(len(xs), nodes=nodes)
    except (TypeError, ValueError) as error:
        raise said_by("simulate", error) from None
    x = xs if len(xs) != 1 else xs[0]
    return allreduce(
        world, x, wire, algorithm, scaling, accumulate, op, out,
        rounding=rounding, overflow=overflow, random_bits=random_bits, headroom=headroom,
        seed=seed, iteration=iteration, segments=segments, machine=machine,
    )  # fmt: skip

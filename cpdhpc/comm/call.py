"""All-reduce in one call: a method and what it is to sum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..formats import FloatFormat, Overflow, Rounding
from .allreduce import Allreduce
from .machine import Machine
from .method import Op
from .ranks import Array
from .scaling import Segment
from .world import as_world


def allreduce(
    world: Any,
    x: Array | Sequence[Array],
    wire: str | FloatFormat = "raw",
    algorithm: str = "ring",
    scaling: str | None = None,
    accumulate: str | None = None,
    op: Op = "sum",
    out: Array | None = None,
    *,
    rounding: Rounding = "nearest",
    overflow: Overflow = "saturate",
    headroom: str = "n",
    seed: int = 0,
    iteration: int = 0,
    segments: Sequence[Segment] | None = None,
    machine: Machine | str | Path | None = None,
) -> Array:
    """Return the sum, or mean, of all ranks' arrays: the same bits on every rank. Collective.

    world: World, Loopback or an mpi4py communicator
    x: float32, C-contiguous, of one shape everywhere, all NumPy or all CuPy arrays; where the
        world has virtual ranks, a sequence of one array for each; never written, unless out shares
        its memory
    wire: "raw" (float32 bytes), a format's name or a FloatFormat, "int2" .. "int16" (integers
        times a power of two) or "ternary" (-1, 0, 1 times a power of two, 1.6 bits a value)
    algorithm: a name from SCHEDULES ("ring", "rhd", "tree", "dbtree", "direct", "hier", "gather"),
        or "mpi" (MPI_Allreduce, wire "raw"). hier sums inside nodes first: world.nodes. "auto" is
        the one from SCHEDULES that is predicted to be fastest for x on machine: another algorithm
        adds in another order, so its bits depend on size, ranks, nodes and machine
    scaling: "none", "static:K" (by 2**K), "aps" (a shift for each segment from the largest value
        of all ranks), "tile" (a shift for each 1,024 values, sent with them). Wire "raw" is not
        scaled and ignores it. Default: "tile", for exact sums "aps"; integers know only "aps".
    accumulate: "requantise" (round to the wire after each addition), "float32" or "kahan"; None
        for the algorithm's own: float32 for direct and hier, requantise for the others. ring,
        rhd, tree and dbtree know requantise only, and hier rounds between nodes whatever happens
        inside them; for wire "raw" requantise and float32 are the same.
        "exact", in every algorithm: contributions are rounded to one grid for all ranks, and their
        integer sums travel unrounded, as wide as they need, and become float32 at the end. No
        order changes a bit of the result. Integers know only this, float formats where scaling
        is not "tile" and the sums take at most 32 bits.
    op: "mean" divides the sum by the number of ranks, in float32
    out: float32, like x, for the result. Default: a new array. Where it shares memory with x, x is
        untouched on error, at the price of one more copy; else it then holds anything
    rounding, overflow: as formats.Cast
    headroom: what aps leaves room for in the sum of p ranks: "n" p times the largest value,
        "sqrt" sqrt(p) times, "none"; with accumulate "float32" contributions need none, and with
        "exact" nothing does
    seed, iteration: of the random bits of rounding "stochastic"
    segments: the named parts of x, in order, starting on tiles: aps scales each by itself
    machine: for "auto": a Machine, the TOML file of bench fit, or None for DEFAULT of machine.py,
        round figures that were measured nowhere
    Raises, on all ranks alike and before data moves, TypeError and ValueError for arguments that
    are wrong or differ between ranks; NonFiniteGradient on all ranks where a packed wire met NaN
    or infinity. Wire "raw" follows IEEE 754 instead.
    CuPy arrays are worked on in the stream that is CuPy's current one during the call, on its
    current GPU: what the stream was given before may still be producing x, and what it is given
    afterwards may use the result and overwrite x. For raw wires the call returns before the stream
    is done: the host and other streams must wait for it. A torch tensor on a GPU comes in through
    cupy.from_dlpack and out through torch.from_dlpack, which let one stream wait for the other.
    """
    ranks = as_world(world)
    config, error = Allreduce(), None  # with an error the default only serves to raise it
    try:
        config = Allreduce(
            wire, algorithm, scaling, accumulate, op, rounding, overflow, headroom, seed, machine
        )
    except (TypeError, ValueError) as found:
        error = found
    xs: Sequence[Any] = x if ranks.virtual_ranks > 1 and isinstance(x, Sequence) else [x]
    outs = None if out is None else [out]
    reduced = config.run(ranks, xs, outs, iteration=iteration, segments=segments, error=error)
    return reduced.arrays[0]

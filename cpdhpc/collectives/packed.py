"""reduce_scatter, all_gather, all_to_all, broadcast, reduce, gather and scatter, for users."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..formats import Format, Overflow, Rounding
from ..methods import USUAL, said_by
from ..ops.payloads import Array
from ..world.mpi import World, as_world
from .blocks import SHARES
from .checks import name_of_x, note_written, of_tensor
from .collective import Collective, run_known
from .method import Op, configured
from .recorded import listed


def reduce_scatter(
    world: Any,
    x: Any,
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    accumulate: str | None = None,
    op: Op = "sum",
    out: Any = None,
    *,
    counts: Sequence[int] | None = None,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    headroom: str = "n",
    seed: int = 0,
    iteration: int = 0,
) -> Any:
    """Return this rank's block of the sum, or mean, of all ranks' arrays. Collective.

    This is the first half of allreduce: (p - 1) / p of the data leaves each rank. A rank's own
    block is not rounded once more, except for exact sums. all_gather of it, with the same wire,
    gives the bits of allreduce if blocks are whole tiles of 1,024 values.
    world: World, Loopback or an mpi4py communicator
    x: C-contiguous, of one shape everywhere, all NumPy or all CuPy arrays or torch tensors on the
        CPU; with virtual ranks a sequence of one for each; never written, unless out shares its
        memory. float32; with wire "raw" also integers, other floats and complex numbers
    counts: rows of x, along its first axis, for each rank, the same list everywhere; may hold
        zeros. Default: as even as possible, the first ranks one more
    algorithm: "ring", "biring", "torus", "rhd", "direct" or "hier", whose chunks have owners, as in
        allreduce; or "mpi" (MPI_Reduce_scatter, wire "raw"). "usual" is the same as in allreduce,
        except for wire "raw": direct on one node; on several nodes hier, or rhd if no two ranks
        share a node
    out: for the block, [counts[rank], ...], and returned; with virtual ranks one for each
    Other arguments, and errors: see allreduce. "mean" needs floats or complex numbers.
    Returns an array like x; with virtual ranks a list of them.
    """
    make = partial(
        Collective, wire, algorithm, scaling, accumulate, op, rounding, overflow, random_bits,
        headroom, seed=seed, collective="reduce_scatter",
    )  # fmt: skip
    return _run(world, x, out, iteration, make, counts=counts)


def all_gather(
    world: Any,
    x: Any,
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    out: Any = None,
    *,
    counts: Sequence[int] | None = None,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    seed: int = 0,
    iteration: int = 0,
) -> Any:
    """Return the arrays of all ranks, one after another: the same bits on every rank. Collective.

    A value is encoded once, by its rank, which also gets the decoded value, like all others. This
    is the second half of allreduce: a rank sends p - 1 encoded blocks.
    world: World, Loopback or an mpi4py communicator
    x: C-contiguous, of one dtype everywhere, and of one shape except for the rows in counts;
        all NumPy or all CuPy arrays or torch tensors on the CPU; with virtual ranks a sequence of
        one for each. float32; with wire "raw" any dtype without Python objects, of torch too
    counts: rows, along the first axis, of each rank's x, the same list everywhere; may hold zeros.
        Default: those of x, which then are the same on all ranks
    algorithm: "ring", "biring", "torus", "rhd", "direct" or "hier", or "mpi" (MPI_Allgather, wire
        "raw"): the result does not depend on it. "usual" is direct on one node; on several nodes
        hier, or rhd if no two ranks share a node; for wire "raw" it is mpi, except for a few values
        on one node
    scaling: see allreduce; "aps" has one shift for all values
    out: for the result, [sum(counts), ...], and returned. If it shares memory with x, one more
        copy is made
    Other arguments, and errors: see allreduce.
    Returns an array like x: a single one, also with virtual ranks.
    """
    make = partial(
        Collective, wire, algorithm, scaling, rounding=rounding, overflow=overflow,
        random_bits=random_bits, seed=seed, collective="all_gather",
    )  # fmt: skip
    return _run(world, x, out, iteration, make, counts=counts)


def all_to_all(
    world: Any,
    x: Any,
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    out: Any = None,
    *,
    counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    seed: int = 0,
    iteration: int = 0,
) -> Any:
    """Send a block to every rank; return the received ones, in the order of ranks. Collective.

    Each value is encoded once and decoded once, including a rank's block for itself.
    world: World, Loopback or an mpi4py communicator
    x: see all_gather; without counts of one shape everywhere
    counts: rows of x, along its first axis, for each rank. Each rank has its own list, which may
        hold zeros, but either all ranks pass one or none does. Default: the same for all, so the
        number of rows must be a multiple of the ranks
    recv_counts: expected rows from each rank, compared with the senders' counts. Default: any
    algorithm: "direct" (pairwise) or "mpi" (MPI_Alltoall, wire "raw"); "usual" is direct
    out: for the result, [sum of received rows, ...], and returned; with virtual ranks one for each
    With virtual ranks counts and recv_counts are lists of one for each, too.
    Other arguments, and errors: see all_gather.
    Returns an array like x; with virtual ranks a list of them.
    """
    make = partial(
        Collective, wire, algorithm, scaling, rounding=rounding, overflow=overflow,
        random_bits=random_bits, seed=seed, collective="all_to_all",
    )  # fmt: skip
    return _run(world, x, out, iteration, make, counts=counts, recv_counts=recv_counts)


def broadcast(
    world: Any,
    x: Any,
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    out: Any = None,
    *,
    root: int = 0,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    seed: int = 0,
    iteration: int = 0,
) -> Any:
    """Return the root's array: the same bits on every rank. Collective.

    A value is encoded once, by the root, which also gets the decoded value, like all others.
    world: World, Loopback or an mpi4py communicator
    x: of one shape and dtype everywhere, otherwise as for all_gather; read only on the root
    algorithm: "tree" (binomial); "ring" (a chain from the root on, whose ranks each send the data
        once, a piece at a time); "biring", "torus", "rhd", "direct" or "hier" (to the owners of
        chunks, then the all-gather); or "mpi" (MPI_Bcast, wire "raw"): the result does not depend
        on it. "usual" is tree on one node and for at most 64 KiB of float32, otherwise hier, or rhd
        if no two ranks share a node; for wire "raw" it is mpi, except for a few values on one node
    out: for the result, like x, and returned; may be x itself. Default: a new array
    Other arguments, and errors: see all_gather.
    Returns an array like x: a single one, also with virtual ranks.
    """
    make = partial(
        Collective, wire, algorithm, scaling, rounding=rounding, overflow=overflow,
        random_bits=random_bits, seed=seed, collective="broadcast", root=root,
    )  # fmt: skip
    return _run(world, x, out, iteration, make)


def reduce(
    world: Any,
    x: Any,
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    accumulate: str | None = None,
    op: Op = "sum",
    out: Any = None,
    *,
    root: int = 0,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    headroom: str = "n",
    seed: int = 0,
    iteration: int = 0,
) -> Any:
    """Return the sum, or mean, of all ranks' arrays on the root, None elsewhere. Collective.

    It has the bits of allreduce with root 0: sums are rounded to the wire when they travel.
    world: World, Loopback or an mpi4py communicator
    x: see reduce_scatter
    algorithm: "ring", "biring", "torus", "rhd", "direct" or "hier": a reduce-scatter, whose owners
        send their parts to the root; "tree" (binomial, counted from the root on); or "mpi"
        (MPI_Reduce, wire "raw"). For "usual" see reduce_scatter
    out: on the root: for the result, like x, and returned
    Other arguments, and errors: see reduce_scatter.
    """
    make = partial(
        Collective, wire, algorithm, scaling, accumulate, op, rounding, overflow, random_bits,
        headroom, seed=seed, collective="reduce", root=root,
    )  # fmt: skip
    return _run(world, x, out, iteration, make)


def gather(
    world: Any,
    x: Any,
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    out: Any = None,
    *,
    root: int = 0,
    counts: Sequence[int] | None = None,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    seed: int = 0,
    iteration: int = 0,
) -> Any:
    """Return the arrays of all ranks, one after another, on the root, None elsewhere. Collective.

    A value is encoded once, by its rank, and decoded by the root, including the root's own values.
    algorithm: "direct" or "mpi" (MPI_Gather, wire "raw"); "usual" is direct
    out: on the root: for the result, [sum(counts), ...], and returned
    Other arguments, and errors: see all_gather.
    """
    make = partial(
        Collective, wire, algorithm, scaling, rounding=rounding, overflow=overflow,
        random_bits=random_bits, seed=seed, collective="gather", root=root,
    )  # fmt: skip
    return _run(world, x, out, iteration, make, counts=counts)


def scatter(
    world: Any,
    x: Any = None,
    wire: str | Format = "raw",
    algorithm: str = USUAL,
    scaling: str | None = None,
    out: Any = None,
    *,
    root: int = 0,
    counts: Sequence[int] | None = None,
    rounding: Rounding = "nearest",
    overflow: Overflow | None = None,
    random_bits: int = 0,
    seed: int = 0,
    iteration: int = 0,
) -> Any:
    """Return this rank's block of the root's array. Collective.

    A value is encoded once, by the root, and decoded by its rank, including the root's own values.
    x: on the root as for all_gather; None on all other ranks
    counts: rows of x, along its first axis, for each rank, the same list everywhere; may hold
        zeros. Default: as even as possible, the first ranks one more
    algorithm: "direct" or "mpi" (MPI_Scatter, wire "raw"); "usual" is direct
    out: for the block, [counts[rank], ...], and returned; with virtual ranks one for each. It is
        required if x is on a GPU of another rank
    Other arguments, and errors: see all_gather.
    Returns an array like x, a NumPy array on ranks without x; with virtual ranks a list of them.
    """
    make = partial(
        Collective, wire, algorithm, scaling, rounding=rounding, overflow=overflow,
        random_bits=random_bits, seed=seed, collective="scatter", root=root,
    )  # fmt: skip
    return _run(world, x, out, iteration, make, counts=counts)


def _run(
    world: Any,
    x: Any,
    out: Any,
    iteration: int,
    make: partial[Collective],
    counts: Any = None,
    recv_counts: Any = None,
) -> Any:
    """Run the collective that make makes, which raises the errors of options; return its result."""
    name, error = make.keywords["collective"], None
    ranks = world if type(world) is World else as_world(world, name)
    key = *make.args, *make.keywords.values(), listed(counts), listed(recv_counts)
    if (type(x) is np.ndarray or x is None) and make.keywords["seed"].__class__ is int:
        known = run_known(ranks, key, x, out, iteration)
        if known is not None:
            return known[0]
    try:
        method = configured(make.func, *make.args, **make.keywords)
    except Exception as wrong:  # of any class: it must be raised on all ranks
        method, error = Collective(collective=name), wrong
    several, share = ranks.virtual_ranks > 1, SHARES[name]
    arrays = x if several and isinstance(x, Sequence) else [x]
    if several and x is None:
        arrays = [None] * ranks.virtual_ranks
    rooted = share.rooted and not share.same and name != "scatter"
    is_one = not several or share.same or rooted  # whether out and the result are single arrays
    xs: list[Any] = []
    outs: list[Any] | None = None
    try:
        xs = [array_of(name_of_x(ranks, r), each) for r, each in enumerate(arrays, ranks.rank)]
        if out is not None:
            outs = [array_of("out", each) for each in ([out] if is_one else out)]
        if outs is not None and rooted and several:
            outs = [outs[0] if rank == method.root else None for rank in ranks.hosted]
    except Exception as wrong:  # of any class: it must be raised on all ranks
        error = error or said_by(name, wrong)
    results = method.run(
        ranks, xs, outs, counts=counts, recv_counts=recv_counts, iteration=iteration, error=error,
        known_by=key,
    )  # fmt: skip
    if out is None and (type(x) is not np.ndarray or rooted):
        like = next((each for each in arrays if each is not None), None)
        results = [tensor_like(like, each) for each in results]
    elif out is not None:
        pairs = zip(results, [out] * len(results) if is_one else out, strict=True)
        results = [None if r is None else note_written(each) for r, each in pairs]
    if rooted:
        return next((each for each in results if each is not None), None)
    return results[0] if is_one else results


def array_of(name: str, x: Any) -> Any:
    """Return the memory of a torch tensor as a NumPy array; x itself if it is not a tensor.

    A dtype that NumPy does not have (bfloat16, for example) becomes opaque values of the same size.
    Raises the errors of of_tensor.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return x
    sizes = {1: torch.uint8, 2: torch.int16}
    lost = x.requires_grad and torch.is_grad_enabled()  # of_tensor refuses it
    if is_foreign(x) and x.element_size() in sizes and not lost:
        array = of_tensor(name, x.detach().view(sizes[x.element_size()]))
        return array.view(f"V{x.element_size()}")
    return of_tensor(name, x)


def is_foreign(x: Any) -> bool:
    """Whether NumPy has no dtype for a tensor."""
    torch = sys.modules["torch"]
    return bool(x.dtype == torch.bfloat16 or str(x.dtype).startswith("torch.float8"))


def tensor_like(like: Any, array: Array | None) -> Any:
    """Return an array as a tensor of like's dtype if like is a tensor; otherwise itself."""
    torch = sys.modules.get("torch")
    if array is None or torch is None or not isinstance(like, torch.Tensor):
        return array
    if is_foreign(like):
        whole = np.dtype(np.uint8 if array.dtype.itemsize == 1 else np.int16)
        return torch.from_numpy(array.view(whole)).view(like.dtype)
    return torch.from_numpy(array)

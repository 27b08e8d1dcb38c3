"""Timed and checked calls of collectives other than the all-reduce: cpdhpc's and MPI's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...collectives.by_mpi import Move, mover
from ...collectives.collective import Collective
from ...collectives.method import MPI_ALLREDUCE
from ...methods import SUMMING
from ...ops import to_host
from ...world.ranks import Ranks
from .allreduce_cases import LARGEST, Array, Contribution, TimedCase, total_of, windows
from .timing import on_device, whole


class CollectiveData(NamedTuple):
    """Data of a rank. x: float32, or None; result: float64, or None; n: values of the whole."""

    x: Array | None
    result: Any
    n: int


def given(name: str, n: int, world: Ranks, integers: bool) -> CollectiveData:
    """Return the data of this rank: a window of common numbers that differs from other ranks'.

    name: of a collective; n: values of the whole array, for all_to_all of each rank's
    integers: whether they are small integers, whose sums are exact
    """
    ranks, rank = world.ranks, world.rank
    each = n // ranks
    n, block = each * ranks, slice(rank * each, rank * each + each)
    every = windows(n, world, integers)
    x: Any = every[rank].copy()
    result: Any = None
    if name in SUMMING:
        total = total_of(every)
        result = total[block] if name == "reduce_scatter" else total
    elif name == "broadcast":
        result = every[0]
    elif name == "scatter":
        result = every[0][block]
    elif name == "all_to_all":
        result = np.concatenate([window[block] for window in every])
    else:
        x, result = x[:each], np.concatenate([window[:each] for window in every])
    if name in ("reduce", "gather") and rank:
        result = None
    return CollectiveData(None if name == "scatter" and rank else x, result, n)


def collective_case(
    world: Ranks, method: Collective, data: CollectiveData, device: str = "cpu", call: str = "plain"
) -> TimedCase:
    """Return the case of a collective, called as "plain" or "prepared". Collective.

    Algorithm "mpi" is MPI's own call, without any code of cpdhpc around it.
    """
    x = None if data.x is None else on_device(data.x, device)
    result = np.empty(0) if data.result is None else data.result
    out = on_device(np.empty(result.size, np.float32), device)
    outs = [None if data.result is None else out]
    is_mpi = method.algorithm == MPI_ALLREDUCE
    run: Callable[[], object] = lambda: method.run(world, [x], outs)  # noqa: E731
    free: Callable[[], object] = lambda: None  # noqa: E731
    if is_mpi:
        move = mover(world, method.blocks_of(data.n, world.ranks))
        mine = np.empty(0, np.float32) if x is None else x
        if device == "gpu":
            move = _of_gpu(world, move)
        if method.collective == "broadcast":  # in place
            run = lambda: move(out, out)  # noqa: E731
        else:
            run = lambda: move(mine, out)  # noqa: E731
    elif call == "prepared":
        prepared = method.prepare(world, [x], outs)
        run, free = prepared.run, prepared.free

    def fill() -> None:  # MPI's broadcast is in place
        if is_mpi and method.collective == "broadcast" and x is not None and world.rank == 0:
            out[...] = x

    return TimedCase(
        name=f"{call} {method.algorithm}",
        data=Contribution(out if x is None else x, result.astype(np.float64)),
        out=out,
        run=whole(run, out),
        exact=method.fmt is None,
        same=False,
        prepare=whole(fill, out),
        free=free,
        method=None if is_mpi else method,
    )


def _of_gpu(world: Ranks, move: Move) -> Move:
    """Return a move for GPU arrays: by MPI itself if it takes them, else through the host.

    Collective.
    """
    from ...world.gpu_messages import gpu_aware

    if gpu_aware(world).yes:
        return move
    hosts: dict[int, Array] = {}

    def staged(x: Array, out: Array) -> None:
        for array in (x, out):
            if id(array) not in hosts:
                hosts[id(array)] = np.empty(array.shape, array.dtype)
        hosts[id(x)][...] = to_host(x)
        move(hosts[id(x)], hosts[id(out)])
        if out.size:
            out[...] = on_device(hosts[id(out)], "gpu")

    return staged


def pair_case(world: Any, n: int, device: str = "cpu", window: int = 0) -> TimedCase:
    """Return the case of messages of MPI between pairs: rank i and rank i + p / 2. Collective.

    A message of float32[n] goes there and back, for all pairs at once. If window is above 0, so
    many messages go one way, each into memory of its own, and a value goes back.
    """
    (mpi, comm), rank, half = world.plain_mpi(), world.rank, world.ranks // 2
    is_first, other = rank < half, (rank + half) % world.ranks
    numbers = np.arange(n + world.ranks) % LARGEST
    mine, its = (numbers[i : i + n].astype(np.float32) for i in (rank, other))
    result = its[:1] if window and is_first else np.tile(its, (max(1, window), 1))
    x, out = (on_device(each, device) for each in (mine, np.zeros_like(result)))

    def there_and_back(x: Array, out: Array) -> None:
        for sends in (is_first, not is_first):
            if sends:
                comm.Send(x, other)
            else:
                comm.Recv(out, other)

    def one_way(x: Array, out: Array) -> None:
        if is_first:
            mpi.Request.Waitall([comm.Isend(x, other) for _ in range(window)])
            comm.Recv(out, other)
        else:
            mpi.Request.Waitall([comm.Irecv(row, other) for row in out])
            comm.Send(x[:1], other)

    move: Move = one_way if window else there_and_back
    if device == "gpu":
        move = _of_gpu(world, move)
    return TimedCase(
        name=MPI_ALLREDUCE,
        data=Contribution(x, result.astype(np.float64)),
        out=out,
        run=whole(lambda: move(x, out), out),
        same=False,
        prepare=whole(lambda: None, out),  # a GPU is done with what it did to the arrays
    )

"""What others offer for the same: halos as MPI codes write them, torch.distributed's gloo."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..world.cores import threads_of_rank
from ..world.ranks import Ranks

Place = tuple[slice, ...]  # a box of an array, by the first axes
Places = Mapping[int, Sequence[Place]]  # of each rank
NAMED = "fdbBhHiIlLqQFD?"  # dtypes, by NumPy's characters, for which every MPI has a datatype


class Halo(NamedTuple):
    """What a rank's array gives to others and takes from them, in places that are as large.

    array: C-contiguous; sends, receives: of each other rank, or this one, in one order on both
    adds: whether what comes is added to the array, one rank after the other
    """

    array: Array
    sends: Places
    receives: Places
    adds: bool


class Baseline(NamedTuple):
    """An exchange to call any number of times, and what frees its requests and datatypes."""

    run: Callable[[], None]
    free: Callable[[], None]


class Stage:
    """Contiguous memory for the cells of places of an array: of each rank one part."""

    def __init__(self, array: Array, places: Places) -> None:
        self.memory = np.empty(
            sum(array[place].size for each in places.values() for place in each), array.dtype
        )
        self.parts: dict[int, Array] = {}
        self.offsets: dict[int, int] = {}  # bytes
        self._pairs: list[tuple[Array, Array]] = []
        last = 0
        for rank, each in places.items():
            first = last
            for place in each:
                there = array[place]
                part = self.memory[last : last + there.size].reshape(there.shape)
                self._pairs.append((there, part))
                last += there.size
            self.parts[rank], self.offsets[rank] = self.memory[first:last], first * array.itemsize

    def pack(self) -> None:
        """Copy the places into the memory."""
        for there, part in self._pairs:
            part[...] = there

    def unpack(self) -> None:
        """Copy the memory to the places."""
        for there, part in self._pairs:
            there[...] = part

    def add(self) -> None:
        """Add the memory to the places."""
        for there, part in self._pairs:
            there += part


class _Types:
    """Datatypes for the places of an array, freed together."""

    def __init__(self, mpi: Any, array: Array) -> None:
        self._mpi, self._array, self._made = mpi, array, list[Any]()
        if array.dtype.char in NAMED:
            self._element = mpi.Datatype.fromcode(array.dtype.char)
        else:
            self._element = self._keep(mpi.BYTE.Create_contiguous(array.dtype.itemsize))

    def _keep(self, datatype: Any) -> Any:
        self._made.append(datatype)
        return datatype.Commit()

    def of(self, places: Sequence[Place]) -> Any:
        """Return the datatype of places of the array: of one message."""
        types = [self._subarray(place) for place in places]
        if len(types) == 1:
            return types[0]
        once, nowhere = [1] * len(types), [0] * len(types)
        return self._keep(self._mpi.Datatype.Create_struct(once, nowhere, types))

    def _subarray(self, place: Place) -> Any:
        shape = self._array.shape
        cut = [each.indices(n)[:2] for each, n in zip(place, shape, strict=False)]
        cut += [(0, n) for n in shape[len(place) :]]
        sizes, starts = [stop - start for start, stop in cut], [start for start, _ in cut]
        return self._keep(self._element.Create_subarray(list(shape), sizes, starts))

    def flat(self, part: Array) -> Any:
        """Return the datatype of contiguous elements."""
        return self._keep(self._element.Create_contiguous(part.size))

    def Free(self) -> None:
        """Free the datatypes."""
        for datatype in self._made:
            datatype.Free()


class _Ends:
    """The two ends of messages: datatypes of the array, or memory for what is to be added."""

    def __init__(self, mpi: Any, halo: Halo) -> None:
        self._types, array = _Types(mpi, halo.array), halo.array
        self.sends = [([array, 1, self._types.of(p)], rank) for rank, p in halo.sends.items()]
        self.stage = Stage(array, halo.receives) if halo.adds else None
        if self.stage is None:
            self.receives = [
                ([array, 1, self._types.of(p)], rank) for rank, p in halo.receives.items()
            ]
        else:
            self.receives = [
                ([part, 1, self._types.flat(part)], rank) for rank, part in self.stage.parts.items()
            ]

    def add(self) -> None:
        """Add what has come, if that is wanted."""
        if self.stage is not None:
            self.stage.add()

    def Free(self) -> None:
        """Free the datatypes, by the name that MPI's objects have for it."""
        self._types.Free()


def subarrays(mpi: Any, comm: Any, halo: Halo) -> Baseline:
    """Return Isend and Irecv of datatypes of subarrays."""
    ends = _Ends(mpi, halo)

    def run() -> None:
        requests = [comm.Irecv(*each) for each in ends.receives]
        requests += [comm.Isend(*each) for each in ends.sends]
        mpi.Request.Waitall(requests)
        ends.add()

    return Baseline(run, ends.Free)


def persistent(mpi: Any, comm: Any, halo: Halo) -> Baseline:
    """Return the same by persistent requests."""
    ends = _Ends(mpi, halo)
    requests = [comm.Recv_init(*each) for each in ends.receives]
    requests += [comm.Send_init(*each) for each in ends.sends]

    def run() -> None:
        mpi.Prequest.Startall(requests)
        mpi.Request.Waitall(requests)
        ends.add()

    return Baseline(run, lambda: _free(*requests, ends))


def neighbours(mpi: Any, comm: Any, halo: Halo) -> Baseline:
    """Return MPI_Neighbor_alltoallw of datatypes of subarrays, on the graph of the messages."""
    ends = _Ends(mpi, halo)
    graph = comm.Create_dist_graph_adjacent(list(halo.receives), list(halo.sends))

    def end(buffer: Array, sides: Sequence[Any], offsets: Sequence[int]) -> list[Any]:
        return [buffer, ([1] * len(sides), offsets), [side[0][2] for side in sides]]

    nowhere = [0] * len(halo.sends)
    source = end(halo.array, ends.sends, nowhere)
    if ends.stage is None:
        target = end(halo.array, ends.receives, [0] * len(halo.receives))
    else:
        target = end(ends.stage.memory, ends.receives, list(ends.stage.offsets.values()))

    def run() -> None:
        graph.Neighbor_alltoallw(source, target)
        ends.add()

    return Baseline(run, lambda: _free(graph, ends))


def packed(mpi: Any, comm: Any, halo: Halo) -> Baseline:
    """Return slices of NumPy copied to memory that travels by persistent requests, and back."""
    gone, came = Stage(halo.array, halo.sends), Stage(halo.array, halo.receives)
    receives = [comm.Recv_init(_bytes(mpi, part), rank) for rank, part in came.parts.items()]
    sends = [comm.Send_init(_bytes(mpi, part), rank) for rank, part in gone.parts.items()]
    take = came.add if halo.adds else came.unpack

    def run() -> None:
        mpi.Prequest.Startall(receives)
        gone.pack()
        mpi.Prequest.Startall(sends)
        mpi.Request.Waitall(receives)
        take()
        mpi.Request.Waitall(sends)

    return Baseline(run, lambda: _free(*receives, *sends))


def _bytes(mpi: Any, part: Array) -> list[Any]:
    return [part.view(np.uint8), mpi.BYTE]


def _free(*made: Any) -> None:
    for each in made:
        each.Free()


WAYS: dict[str, Callable[[Any, Any, Halo], Baseline]] = {
    "subarray": subarrays,
    "subarray, persistent": persistent,
    "alltoallw": neighbours,
    "packed": packed,
}

Array = npt.NDArray[Any]
TIMEOUT_S = 600.0


@contextmanager
def gloo(world: Ranks) -> Iterator[None]:
    """Open torch's default process group over the processes of world, and close it. Collective.

    They find one another by a TCP store of process 0, on a port that is free.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads_of_rank(world))
    names = world.gather(socket.gethostname())
    host = names[0] if len(set(names)) > 1 else "127.0.0.1"
    timeout = timedelta(seconds=TIMEOUT_S)

    def store(port: int) -> Any:
        leads = world.process == 0
        return dist.TCPStore(host, port, world.processes, leads, timeout, wait_for_workers=False)  # type: ignore[attr-defined]

    first = store(0) if world.process == 0 else None
    port = world.gather(first.port if first else 0)[0]
    dist.init_process_group(
        "gloo",
        store=first or store(port),
        rank=world.process,
        world_size=world.processes,
        timeout=timeout,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def sum_float32(array: Array) -> None:
    """Sum float32[n] over processes in place. Collective."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.from_numpy(array))


def sum_bfloat16(x: Array, out: Array) -> None:
    """Sum float32[n] over processes into out in bfloat16, as DDP's bf16_compress_hook. Collective.

    Conversion there and back is part of it.
    """
    import torch
    import torch.distributed as dist

    small = torch.from_numpy(x).to(torch.bfloat16)
    dist.all_reduce(small)
    torch.from_numpy(out).copy_(small)

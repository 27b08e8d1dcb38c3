"""How process groups are made: the members find one another, and have a communicator."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ...errors import UserError
from ...world.mpi import running_mpi, thread_level
from . import NAME
from .board import MOST_RANKS, Memory
from .channel import Channel
from .group import MpiGroup
from .progress import pause

ADDRESS_BYTES = 256
STORES: list[TCPStore] = []  # one at most, so that no rank loses it while others start
STARTS = count()  # of all processes together, each with keys of its own in one store
START = "start the program by mpirun -n RANKS python ... or srun --mpi=pmix python ..."


def mpi_with(ranks: int) -> Any:
    """Return mpi4py.MPI; raise UserError unless it has at least so many processes, and threads."""
    mpi = running_mpi()
    there = mpi.COMM_WORLD.Get_size()
    if there < ranks:
        raise UserError(
            f"{NAME}: {ranks} ranks, but MPI has {there} process{'es' * (there > 1)}: {START}"
        )
    if thread_level(mpi) != "multiple":
        raise UserError(
            f"{NAME}: MPI gives the thread level {thread_level(mpi)!r}: must be 'multiple', "
            "mpi4py's default, by an MPI library built for threads"
        )
    return mpi


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> tuple[Any, int, int]:
    """Return a store that all processes of MPI reach, the rank and their number. Collective.

    url: "mpi://", which torch may have given rank and world_size
    Raises UserError where MPI has other numbers.
    """
    asked = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
    wanted = asked.get("world_size", int(os.environ.get("WORLD_SIZE", 1)))
    mpi = mpi_with(max(wanted, 1))
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    for name, value in (("rank", rank), ("world_size", size)):
        if asked.get(name, -1) not in (-1, value):
            raise UserError(f"{NAME}: {name}={asked[name]}: is {value} in MPI: leave it out")
    if not STORES:
        STORES.append(shared_store(world, timeout))
    store = PrefixStore(f"start {next(STARTS)}/", STORES[0])
    return store, rank, size


def shared_store(world: Any, timeout: timedelta) -> TCPStore:
    """Return the store of all processes, which rank 0 keeps. Collective over MPI's world.

    Raises RuntimeError where rank 0 does not come in time.
    """
    address = np.zeros(ADDRESS_BYTES, np.uint8)
    store = None
    if world.Get_rank() == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        data = f"{socket.gethostname()} {store.port}".encode()
        address[: len(data)] = np.frombuffer(data, np.uint8)
    request, begun_s = world.Ibcast(address, 0), time.monotonic()
    while not request.Test():
        waited_s = time.monotonic() - begun_s
        if waited_s > timeout.total_seconds():
            raise RuntimeError(f"{NAME}: init_process_group: waited {waited_s:.1f} s for rank 0")
        pause(waited_s)
    if store is None:
        host, port = address.tobytes().rstrip(b"\0").decode().split()
        near = host == socket.gethostname()
        store = TCPStore("localhost" if near else host, int(port), timeout=timeout)
    return store


def create(options: Any) -> MpiGroup:
    """Return the process group of torch's options. Collective over its members."""
    rank, size, store = options.group_rank, options.group_size, options.store
    mpi = mpi_with(size)
    timeout_s = options.timeout.total_seconds()
    memory = Memory() if 1 < size <= MOST_RANKS else None
    place = "" if memory is None else memory.place
    mine = f"{mpi.COMM_WORLD.Get_rank()} {socket.gethostname()} {place}"
    members, board = known_members(options.global_ranks_in_group), None
    if members is None or memory is not None:
        told = [text.split() for text in meet(store, "process", rank, mine, size, timeout_s)]
        members = [int(process) for process, *_ in told]
        if memory is not None:
            near = len({host for _, host, *_ in told}) == 1
            board = memory.board(rank, [place for *_, place in told]) if near else None
            found = meet(store, "board", rank, str(board is not None), size, timeout_s)
            board = board if found == ["True"] * size else None
            memory.free()
    else:
        meet(store, "process", rank, mine, size, timeout_s, read=False)
    channel = Channel(members, str(options.group_id), board)
    return MpiGroup(store, rank, size, channel, members, timeout_s)


def known_members(ranks: Sequence[int]) -> list[int] | None:
    """Return the processes of MPI that are ranks of the default group, if that is of this kind."""
    default = distributed.group.WORLD
    if ranks and isinstance(default, MpiGroup):
        return [default.members[each] for each in ranks]
    return None


def meet(
    store: Any, key: str, rank: int, text: str, size: int, timeout_s: float, *, read: bool = True
) -> list[str]:
    """Return what all ranks of a group say under a key, once all have come; [] unless read.

    Raises RuntimeError, which names those that have not come in timeout_s.
    """
    limit = timedelta(seconds=timeout_s)
    store.set(f"{key}/{rank}", text)
    if store.add(f"{key} come", 1) == size:
        store.set(f"{key} all", "")
    try:
        store.wait([f"{key} all"], limit)
    except Exception as error:
        absent = [r for r in range(size) if not store.check([f"{key}/{r}"])]
        who = ", ".join(map(str, absent))
        raise RuntimeError(
            f"{NAME}: new process group: waited {timeout_s:.1f} s for rank {who}"
        ) from error
    return [store.get(f"{key}/{r}").decode() for r in range(size)] if read else []

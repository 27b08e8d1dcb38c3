"""Creation of process groups: the members find one another and get a communicator."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
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
from .board import MOST_RANKS, PLACE_BYTES, Board, Memory
from .channel import Channel
from .group import MpiGroup
from .progress import pause

ADDRESS_BYTES = 1024
CONNECT_S = 2.0  # for a connection to one of the addresses of a host
SIOCGIFADDR = 0x8915  # the address of a network interface: Linux, netdevice(7)
STORES: list[TCPStore] = []  # at most one, kept alive while other ranks start
STARTS = count()  # numbers of default groups, each with its own keys in the store
START = "start the program by mpirun -n RANKS python ... or srun --mpi=pmix python ..."


def mpi_with(ranks: int) -> Any:
    """Return mpi4py.MPI; raise UserError unless it has so many processes and allows threads."""
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
    """Return a store that all processes of MPI can use, the rank and their number. Collective.

    url: "mpi://", to which torch may have added rank and world_size
    Raises UserError if these differ from MPI's.
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
    """Return the store of all processes, hosted by rank 0. Collective over MPI's world.

    Raises RuntimeError if rank 0 is too late.
    """
    address = np.zeros(ADDRESS_BYTES, np.uint8)
    store = None
    if world.Get_rank() == 0:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        data = " ".join([str(store.port), socket.gethostname(), *addresses().values()]).encode()
        data = data[:ADDRESS_BYTES].rpartition(b" ")[0] if len(data) > ADDRESS_BYTES else data
        address[: len(data)] = np.frombuffer(data, np.uint8)
    late = "init_process_group: waited {:.1f} s for rank 0"
    wait_for(world.Ibcast(address, 0), late, timeout.total_seconds())
    if store is None:
        port, *hosts = address.tobytes().rstrip(b"\0").decode().split()
        store = TCPStore(reachable(hosts, int(port)), int(port), timeout=timeout)
    return store


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each of this host's interfaces, except loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return {name: each for name, each in found.items() if not each.startswith("127.")}


def reachable(hosts: Sequence[str], port: int) -> str:
    """Return the first of a host's name and addresses that accepts a connection.

    Other hosts may not know the name. If none accepts, returns the name, for torch's error.
    """
    for host in (["localhost"] if hosts[0] == socket.gethostname() else []) + [*hosts]:
        with suppress(OSError), socket.create_connection((host, port), CONNECT_S):
            return host
    return hosts[0]


def create(options: Any) -> MpiGroup:
    """Return the process group of torch's options. Collective over its members."""
    rank, size, store = options.group_rank, options.group_size, options.store
    mpi = mpi_with(size)
    timeout_s = options.timeout.total_seconds()
    process, members = mpi.COMM_WORLD.Get_rank(), known_members(options.global_ranks_in_group)
    members = meet(store, rank, size, process, members, timeout_s)
    channel = Channel(members, str(options.group_id))
    if 1 < size <= MOST_RANKS:
        channel.board = board_of(channel, timeout_s)
    return MpiGroup(store, rank, size, channel, members, timeout_s)


def board_of(channel: Channel, timeout_s: float) -> Board | None:
    """Return the board of a channel, None unless its ranks share a node. Collective."""
    memory, board = None, None
    with suppress(OSError, AttributeError):  # only Linux has memfd_create, and may forbid it
        memory = Memory()
    place = bytes(PLACE_BYTES) if memory is None else memory.place
    places = gathered(channel, place, timeout_s)
    if memory is not None and bytes(PLACE_BYTES) not in places:
        with suppress(OSError):
            board = memory.board(channel.rank, places)
    found = gathered(channel, bytes([board is not None]), timeout_s)
    if memory is not None:
        memory.free()
    return board if all(map(any, found)) else None


def gathered(channel: Channel, data: bytes, timeout_s: float) -> list[bytes]:
    """Return the data of all ranks, of equal length. Collective. Raises RuntimeError if late."""
    found = np.empty((channel.size, len(data)), np.uint8)
    request = channel.comm.Iallgather(np.frombuffer(data, np.uint8), found)
    wait_for(request, "new process group: waited {:.1f} s for another rank", timeout_s)
    return [each.tobytes() for each in found]


def wait_for(request: Any, late: str, timeout_s: float) -> None:
    """Wait for a request of MPI. Raises RuntimeError, with the message late, after timeout_s."""
    begun_s = time.monotonic()
    while not request.Test():
        waited_s = time.monotonic() - begun_s
        if waited_s > timeout_s:
            raise RuntimeError(f"{NAME}: {late.format(waited_s)}")
        pause(waited_s)


def known_members(ranks: Sequence[int]) -> list[int] | None:
    """Return the MPI processes of ranks of the default group, None if that is of another kind."""
    default = distributed.group.WORLD
    if ranks and isinstance(default, MpiGroup):
        return [default.members[each] for each in ranks]
    return None


def meet(
    store: Any, rank: int, size: int, process: int, members: list[int] | None, timeout_s: float
) -> list[int]:
    """Return the MPI processes of a group's ranks, once all have arrived.

    members: these processes, if they are known
    Raises RuntimeError, with the missing ranks, after timeout_s.
    """
    limit = timedelta(seconds=timeout_s)
    store.set(f"process/{rank}", str(process))
    if store.add("come", 1) == size:
        store.set("all", "")
    try:
        store.wait(["all"], limit)
    except Exception as error:
        absent = [r for r in range(size) if not store.check([f"process/{r}"])]
        who = ", ".join(map(str, absent))
        raise RuntimeError(
            f"{NAME}: new process group: waited {timeout_s:.1f} s for rank {who}"
        ) from error
    if members is None:
        members = [int(store.get(f"process/{r}")) for r in range(size)]
    return members

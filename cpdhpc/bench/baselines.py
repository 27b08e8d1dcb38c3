"""What torch.distributed offers for all-reduces: its gloo backend, as a baseline."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy.typing as npt

from ..world.cores import threads_of_rank
from ..world.ranks import Ranks

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

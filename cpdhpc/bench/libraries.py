"""All-reduces of other libraries, as baselines: torch.distributed over gloo and NCCL."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from ..world.cores import threads_of_rank
from ..world.gpu_messages import use_own_gpu
from ..world.ranks import Ranks

TIMEOUT_S = 600.0
GROUPS = ("gloo", "nccl")  # of torch.distributed


@contextmanager
def torch_group(world: Ranks, backend: str) -> Iterator[None]:
    """Open torch's default process group over the processes of world, and close it. Collective.

    They find one another by a TCP store of process 0, on a port that is free.
    backend: gloo, or nccl for arrays on CuPy's current GPU
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads_of_rank(world))
    device = None
    if backend == "nccl":
        from ..ops import gpu_runtime

        device = torch.device("cuda", gpu_runtime.current_device())
        torch.cuda.set_device(device)
    names = world.gather(socket.gethostname())
    host = names[0] if len(set(names)) > 1 else "127.0.0.1"
    timeout = timedelta(seconds=TIMEOUT_S)

    def store(port: int) -> Any:
        leads = world.process == 0
        return dist.TCPStore(host, port, world.processes, leads, timeout, wait_for_workers=False)  # type: ignore[attr-defined]

    first = store(0) if world.process == 0 else None
    port = world.gather(first.port if first else 0)[0]
    dist.init_process_group(
        backend,
        store=first or store(port),
        rank=world.process,
        world_size=world.processes,
        timeout=timeout,
        device_id=device,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def sum_float32(array: Any) -> None:
    """Sum float32[n], of NumPy or CuPy, over processes in place. Collective."""
    import torch.distributed as dist

    from ..ops.tensors import tensor_of

    dist.all_reduce(tensor_of(array))


def sum_half(x: Any, out: Any, dtype: str) -> None:
    """Sum float32[n] over processes into out in bfloat16 or float16, as DDP's hooks. Collective.

    Conversion there and back is part of it, and the division by the number of processes is not.
    """
    import torch
    import torch.distributed as dist

    from ..ops.tensors import tensor_of

    small = tensor_of(x).to(getattr(torch, dtype))
    dist.all_reduce(small)
    tensor_of(out).copy_(small)


def library_of(baseline: str) -> str:
    """Return the library whose all-reduce a baseline is."""
    return baseline.partition("-")[0]


def missing(world: Ranks, library: str) -> str:
    """Return why a library cannot run on these processes and their GPUs, or "". Collective."""
    if library not in GROUPS:
        return ""
    found = world.gather(_lacks(library))
    reason = next(filter(None, found), "")
    if reason or library != "nccl":
        return reason
    gpus = [
        *zip(world.nodes[:: world.virtual_ranks], world.gather(use_own_gpu(world)), strict=True)
    ]
    return "processes share GPUs" if len({*gpus}) < len(gpus) else ""


def _lacks(library: str) -> str:
    """Return what a library of torch.distributed lacks in this process, or ""."""
    if find_spec("torch") is None:
        return "torch is not installed on every process"
    if library != "nccl":
        return ""
    import torch

    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} is built without NCCL"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def group_of(world: Ranks, baselines: Sequence[str]) -> AbstractContextManager[None]:
    """Return torch's process group where a baseline needs it. Collective."""
    backend = next((name for name in map(library_of, baselines) if name in GROUPS), None)
    if backend is None:
        return nullcontext()
    return torch_group(world, backend)

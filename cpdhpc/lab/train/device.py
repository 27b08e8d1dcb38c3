"""Where a run computes: on the CPU, or each process on a GPU of its own."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from ...config import UserError
from ...ops.tensors import CPU, await_device
from ...world.cores import threads_of_rank
from ...world.gpu_messages import gpu_aware, use_gpu
from ...world.ranks import Ranks
from .data import Array, Samples

if TYPE_CHECKING:
    from .train_section import Train


def own_device(
    world: Ranks, kind: str, *, oversubscribe: bool = False, gpu_direct: str = "auto"
) -> torch.device:
    """Return the device of this process, which is torch's and CuPy's current one then. Collective.

    kind: cpu or gpu; the others: see train.train_section.Train
    Raises UserError on all processes alike where one has no GPU, or torch or CuPy none for it,
    where several share one that should not, and where MPI is to take GPU memory and does not.
    """
    if kind == "cpu":
        return CPU
    problem = None
    if not torch.cuda.is_available():
        problem = UserError(
            f"train.device='gpu': torch {torch.__version__} finds no GPU on rank {world.rank}"
        )
    world.agree(problem)
    number = use_gpu(world, oversubscribe=oversubscribe)
    if gpu_direct == "required" and world.processes > 1:
        answer = gpu_aware(world)
        if not answer.yes:
            raise UserError(f"train.gpu_direct='required': GPU-aware MPI: {answer}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def own_threads(world: Ranks, wanted: int) -> int:
    """Let torch have so many threads, 0: one for each core of this rank; return them. Collective.

    Raises UserError as threads_of_rank.
    """
    threads = wanted or threads_of_rank(world)
    torch.set_num_threads(threads)
    return threads


def device_of(model: torch.nn.Module) -> torch.device:
    """Return where a model's parameters are."""
    return next((p.device for p in model.parameters()), CPU)


def taken(
    samples: Samples, index: Array, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples int64[b] on a device. See Samples.take."""
    inputs, targets = samples.take(index, seed)
    await_device(device)  # as copies from pageable memory do, without end
    return inputs.to(device), targets.to(device)


def cast_forward(model: torch.nn.Module, train: Train, device: torch.device) -> None:
    """Let a model's forward choose dtypes by torch.autocast, and return float32, if asked for."""
    if train.autocast == "none":
        return
    forward, dtype = model.forward, getattr(torch, train.autocast)

    @wraps(forward)
    def cast(*inputs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            outputs = forward(*inputs)
        return outputs.float() if isinstance(outputs, torch.Tensor) else outputs

    model.forward = cast

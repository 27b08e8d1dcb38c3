"""A small model, its gradients, and an aggregator that notes what it is given."""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from training import ROWS

from cpdhpc.compress.base import Context, Mean
from cpdhpc.compress.bucket import Bucket
from cpdhpc.compress.none import NoCompression

SIZES_MIB = (25.0, 0.005, 1e-6)  # all layers in one bucket, some, and one in each

AGGREGATORS = {
    name: {k: v for k, v in row.items() if k != "aggregator"} for name, row in ROWS.items()
}


@dataclass(frozen=True)
class Noted(NoCompression):
    """Notes which layers it is given, in which thread; fails at a layer if told to."""

    fails_at: str = ""
    calls: list[tuple[str, ...]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def aggregate(self, gradients: list[Any], bucket: Bucket, context: Context) -> Mean:
        self.calls.append(bucket.names)
        self.threads.add(threading.current_thread().name.split("_")[0])
        if self.fails_at in bucket.names:
            raise OSError(f"at {self.fails_at}")
        return super().aggregate(gradients, bucket, context)


def model_of(seed: int = 0) -> torch.nn.Sequential:
    """1,507 parameters in eight tensors."""
    torch.manual_seed(seed)
    sizes = (8, 16, 64, 4, 3)
    return torch.nn.Sequential(*map(torch.nn.Linear, sizes, sizes[1:]))


def backward(model: torch.nn.Module, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(step)
    model.zero_grad()
    model(torch.randn(5, 8, generator=generator)).square().sum().backward()


def gradients(model: torch.nn.Module) -> list[bytes]:
    return [b"" if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]


def active() -> int:
    """Number of threads that reduce."""
    return sum(thread.name.startswith("cpdhpc-reduce") for thread in threading.enumerate())

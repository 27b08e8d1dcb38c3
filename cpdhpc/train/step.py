"""One step of training: a global batch, its gradient on every hosted rank, the mean, the update."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from ..compress import Mean
from .data import shard
from .reducer import GradientReducer

Array = npt.NDArray[Any]

PHASES = ("data", "forward_backward", "reduce", "optimizer")


@dataclass
class Stopwatch:
    """Nanoseconds spent in each phase."""

    time_ns: list[int]
    last_ns: int

    @classmethod
    def start(cls) -> Stopwatch:
        """Return a stopwatch that runs from now on."""
        return cls([0] * len(PHASES), time.perf_counter_ns())

    def lap(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        now = time.perf_counter_ns()
        self.time_ns[PHASES.index(phase)] += now - self.last_ns
        self.last_ns = now


@dataclass(frozen=True)
class Step:
    """losses: of each hosted rank, whose mean over all ranks is the loss of the batch."""

    losses: list[float]
    mean: Mean
    time_ns: list[int]


def step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    reducer: GradientReducer,
    x: torch.Tensor,
    y: torch.Tensor,
    batch: Array,
    sharing: int = 1,
) -> Step:
    """Train on one global batch. Collective.

    x, y: all training samples; batch: int64[b], the same on all ranks
    sharing: consecutive ranks that take the same samples, whose images are split over them
    Raises NonFiniteGradient on all ranks alike, with the model untouched.
    """
    world, watch, losses = reducer.world, Stopwatch.start(), []
    shares = world.ranks // sharing
    for hosted, rank in enumerate(world.hosted):
        index = torch.from_numpy(shard(batch, shares, rank // sharing))
        inputs, targets = x[index], y[index]
        watch.lap("data")
        losses.append(backward(model, optimizer, inputs, targets, batch.size, shares))
        watch.lap("forward_backward")
        if world.virtual_ranks > 1:  # else reduce takes p.grad itself
            reducer.stash(hosted)
        watch.lap("reduce")
    mean = reducer.reduce()
    watch.lap("reduce")
    optimizer.step()
    watch.lap("optimizer")
    return Step(losses, mean, watch.time_ns)


def backward(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    batch: int,
    shares: int,
) -> float:
    """Leave in p.grad the gradient of this rank's share, and return its loss.

    The mean over a share's b samples is weighted by b * shares / batch, so that the mean over
    shares, and over ranks, is the mean over the batch; it is exactly 1 where the batch divides
    evenly.
    """
    optimizer.zero_grad(set_to_none=True)
    if not len(inputs):
        return 0.0
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    loss = loss * (len(inputs) * shares / batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())

"""One step of training: a global batch, its gradient on every hosted rank, the mean, the update."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..compress.base import Mean
from ..partition import split
from ..world.ranks import Ranks
from .data import shard
from .loss_scaling import LossScaler
from .update import Update

Array = npt.NDArray[Any]

_NOTHING = np.iinfo(np.int64).min  # below everything that a process says of its own ranks


@dataclass(frozen=True)
class Exchanged:
    """loss: of the global batch; time_ns: int64[phases], the slowest process's;
    wire_bytes: int64[ranks], sent so far; signal: number of one that any process caught, or 0."""

    loss: float
    time_ns: Array
    wire_bytes: Array
    signal: int


def exchange(
    world: Ranks, losses: list[float], time_ns: list[int], sent: Array, signal: int
) -> Exchanged:
    """Return what all processes say. Collective: one MAX all-reduce of 2 ranks + phases + 1 words.

    losses: one per hosted rank, their mean over all ranks is the loss of the batch
    sent: int64[hosted], cumulative bytes
    """
    ranks, hosted = world.ranks, slice(world.hosted.start, world.hosted.stop)
    words = np.full(2 * ranks + len(time_ns) + 1, _NOTHING, np.int64)
    words[:ranks][hosted] = np.array(losses, np.float64).view(np.int64)  # bits: only one rank's
    words[ranks : 2 * ranks][hosted] = sent
    words[2 * ranks : -1] = time_ns
    words[-1] = signal
    words = world.max(words)
    return Exchanged(
        loss=fsum(words[:ranks].view(np.float64)) / ranks,
        time_ns=words[2 * ranks : -1],
        wire_bytes=words[ranks : 2 * ranks],
        signal=int(words[-1]),
    )


CHUNK = 1000  # samples that go through the model at once


def evaluate(
    model: torch.nn.Module, world: Ranks, x: torch.Tensor, y: torch.Tensor, sharing: int = 1
) -> tuple[float, float]:
    """Return (accuracy, loss), the loss a mean over all samples. Collective.

    Each rank, virtual or not, goes through its own part, so that hosting changes no bit.
    sharing: consecutive ranks that go through a part together, as their images are split
    """
    model.eval()
    shares = [split(len(y), world.ranks // sharing, rank // sharing) for rank in world.hosted]
    parts = [_part(model, x, y, *share) for share in shares]
    model.train()
    everywhere = [part for process in world.gather(parts)[::sharing] for part in process]
    correct = sum(count for count, _ in everywhere)
    return correct / len(y), fsum(loss for _, loss in everywhere) / len(y)


@torch.no_grad()
def _part(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, start: int, stop: int
) -> tuple[int, float]:
    correct, losses = 0, []
    for first in range(start, stop, CHUNK):
        inputs, targets = x[first : min(first + CHUNK, stop)], y[first : min(first + CHUNK, stop)]
        logits = model(inputs)
        correct += int((logits.argmax(1) == targets).sum())
        loss = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
        losses += loss.tolist()
    return correct, fsum(losses)


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
    """losses: of each hosted rank, whose mean over all ranks is the loss of the batch

    mean: None where a gradient overflowed, and the step was skipped
    """

    losses: list[float]
    mean: Mean | None
    time_ns: list[int]


def step(
    update: Update,
    x: torch.Tensor,
    y: torch.Tensor,
    batch: Array,
    sharing: int = 1,
    scaler: LossScaler | None = None,
) -> Step:
    """Train on one global batch. Collective.

    x, y: all training samples; batch: int64[b], the same on all ranks
    sharing: consecutive ranks that take the same samples, whose images are split over them
    scaler: of the loss; None: nothing is scaled or skipped
    Raises on all ranks alike, with the model untouched, NonFiniteGradient and what forward or
    backward raised on any rank; where images are split the latter on that rank alone.
    """
    world, model, watch, losses = update.world, update.model, Stopwatch.start(), []
    shares = world.ranks // sharing
    for hosted, rank in enumerate(world.hosted):
        update.reducer.begin(hosted)
        update.begin(hosted)
        index = torch.from_numpy(shard(batch, shares, rank // sharing))
        inputs, targets = x[index], y[index]
        watch.lap("data")
        try:
            scale = update.reducer.loss_scale
            losses.append(
                backward(model, update.optimizer, inputs, targets, batch.size, shares, scale)
            )
        except Exception as error:
            if sharing > 1:  # forward has messages: the other ranks may wait in it
                raise
            update.reducer.fail(error)
            losses.append(0.0)
        watch.lap("forward_backward")
        update.keep(hosted)
        watch.lap("reduce")
    mean = update.reduce() if scaler is None else scaler.reduce(update.reduce)
    watch.lap("reduce")
    if mean is not None:
        update.step()
    watch.lap("optimizer")
    return Step(losses, mean, watch.time_ns)


def backward(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    batch: int,
    shares: int,
    scale: float = 1.0,
) -> float:
    """Leave in p.grad the gradient of this rank's share times scale, and return its loss.

    The mean over a share's b samples is weighted by b * shares / batch, so that the mean over
    shares, and over ranks, is the mean over the batch; it is exactly 1 where the batch divides
    evenly.
    """
    optimizer.zero_grad(set_to_none=True)
    if not len(inputs):
        return 0.0
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    loss = loss * (len(inputs) * shares / batch)
    loss.backward(torch.full_like(loss, scale))  # type: ignore[no-untyped-call]
    return float(loss.detach())

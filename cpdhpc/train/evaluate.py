"""Accuracy and loss on the test samples, which all ranks share."""

from __future__ import annotations

from math import fsum

import torch

from ..comm import Ranks
from ..partition import split

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

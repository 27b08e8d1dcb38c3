"""What the processes tell each other after every step, in one small all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from ..comm import Ranks

Array = npt.NDArray[Any]

_NOTHING = np.iinfo(np.int64).min  # below everything that a process says of its own ranks


@dataclass(frozen=True)
class Pulse:
    """loss: of the global batch; time_ns: int64[phases], the slowest process's;
    wire_bytes: int64[ranks], sent so far; signal: number of one that any process caught, or 0."""

    loss: float
    time_ns: Array
    wire_bytes: Array
    signal: int


def exchange(
    world: Ranks, losses: list[float], time_ns: list[int], sent: Array, signal: int
) -> Pulse:
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
    return Pulse(
        loss=fsum(words[:ranks].view(np.float64)) / ranks,
        time_ns=words[2 * ranks : -1],
        wire_bytes=words[ranks : 2 * ranks],
        signal=int(words[-1]),
    )

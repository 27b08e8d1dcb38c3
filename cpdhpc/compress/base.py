"""What every way of averaging gradients over the ranks has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..collectives.method import AUTO, Machine, as_machine
from ..world.ranks import Ranks
from .bucket import Bucket

Array = npt.NDArray[Any]
State = dict[str, Array]


@dataclass(frozen=True)
class Mean:
    """The mean gradient, and what it took to get it.

    flat: float32[bucket.size], the same bits on every rank
    shifts: int64[layers], the k of the scale 2**k that each layer was sent with, or None where
        layers have none
    """

    flat: Array
    shifts: Array | None = None


@dataclass(frozen=True)
class Aggregator(ABC):
    """A way of averaging gradients over the ranks: a frozen configuration, stored with results."""

    align: ClassVar[int] = 1  # layers start on multiples of this many values
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    @abstractmethod
    def aggregate(
        self,
        world: Ranks,
        flats: list[Array],
        bucket: Bucket,
        state: State,
        *,
        seed: int,
        iteration: int,
    ) -> Mean:
        """Return the mean over all ranks of their gradients. Collective: all processes call.

        flats: one float32[bucket.size] per hosted rank, as bucket lays them out; unchanged
        state: what the method keeps from one iteration to the next, updated in place
        seed, iteration: choose the random bits of stochastic rounding
        Raises NonFiniteGradient on all ranks alike where a gradient holds NaN or infinity.
        """

    @abstractmethod
    def events(self, flat: Array, bucket: Bucket, shifts: Array | None) -> Array:
        """Return int64[layers, 2]: how many values saturate, and how many become zero, encoded.

        flat: float32[bucket.size], one rank's gradient
        shifts: as aggregate returned them in Mean
        """


def machine_of_auto(
    name: str, algorithm: str, machine: Machine | str | Path | None
) -> Machine | None:
    """Return the machine of algorithm "auto", its file read once; None for the default.

    name: of the class, for errors. Raises ValueError where there is a machine and another
    algorithm; else as comm.machine.as_machine.
    """
    if machine is None:
        return None
    if algorithm != AUTO:
        raise ValueError(
            f"{name}: machine: only algorithm='auto' chooses by it: algorithm={algorithm!r}"
        )
    return as_machine(machine)


def nonfinite_layers(flat: Array, bucket: Bucket) -> list[int]:
    """Return the indices of the layers in which a buffer holds NaN or infinity."""
    return [i for i, view in enumerate(bucket.views(flat)) if not np.isfinite(view).all()]

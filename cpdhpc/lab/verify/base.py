"""What a check is, what it is given and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ...world.mpi import World

Array = np.ndarray[Any, np.dtype[Any]]
DEVICES = {"cpu": "CPU", "gpu": "GPU"}


@dataclass
class Place:
    """Where a check runs: the ranks that are left, and the device of its arrays.

    quick: whether it is to take seconds rather than minutes
    device: "cpu" or "gpu"; asked: the device that the user asked for
    oversubscribe: whether processes of a node may share a GPU
    """

    world: World
    quick: bool
    device: str
    asked: str
    oversubscribe: bool

    def of(self, quick: Any, full: Any) -> Any:
        """Return the first of two values if the check is to be quick, else the second."""
        return quick if self.quick else full


class Ratio(NamedTuple):
    """A time beside that of something else with the same data, in the same run.

    what, beside: what was timed, and beside what; device, size_bytes: of its data
    times_s, beside_s: of the slowest rank, a call each
    low, high: what the speed over that of the other is expected to be; advice: if it is not
    """

    what: str
    beside: str
    device: str
    size_bytes: int
    times_s: Sequence[float]
    beside_s: Sequence[float]
    low: float
    high: float
    advice: str

    @property
    def value(self) -> float:
        """How many times as fast as the other, by medians."""
        return median(self.beside_s) / median(self.times_s)

    @property
    def expected(self) -> bool:
        """Whether the ratio is in its range."""
        return self.low <= self.value <= self.high


@dataclass
class Found:
    """What a check found on a rank.

    counted: comparisons that were made; wrong: what is not as it must be, a line each
    facts: what is there, by name; arrays: of numbers, by name, for pictures
    not_run: why nothing was checked, "" if it was
    """

    counted: int = 0
    wrong: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    not_run: str = ""

    def compare(self, what: str, is_right: bool, count: int = 1) -> None:
        """Count comparisons, and note what they were about if they failed."""
        self.counted += count
        if not is_right:
            self.wrong.append(what)


@dataclass(frozen=True)
class Check:
    """A row of the table of checks: what it shows, in a line, and what does it, on all ranks.

    limit_s: how long it may take, in s, if it is quick and if it is not; on GPUs GPU_LIMIT_S more
    devices: on which it runs, each by itself
    """

    section: str
    what: str
    run: Callable[[Place], Found]
    limit_s: tuple[float, float] = (120.0, 480.0)
    devices: Sequence[str] = ("cpu", "gpu")


GPU_LIMIT_S = 240.0  # for the compiler, which takes seconds for each kernel of a cast
Checks = Mapping[str, Check]

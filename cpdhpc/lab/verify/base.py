"""Checks: their ranks and device, and their results."""

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
class CheckPlace:
    """The ranks and the device on which a check runs.

    world: ranks that still take part; quick: whether the check should take seconds, not minutes
    device: "cpu" or "gpu", for its arrays; asked: the device that the user named
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
    """The times of two things with the same data in the same run.

    what, beside: their names; device, size_bytes: of the data
    times_s, beside_s: of the slowest rank, one for each call
    low, high: limits of the expected ratio of speeds; advice: for a ratio outside them
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
        return median(self.beside_s) / median(self.times_s)

    @property
    def expected(self) -> bool:
        return self.low <= self.value <= self.high


@dataclass
class CheckResult:
    """The results of a check on a rank.

    counted: number of comparisons; wrong: differences, a line each
    facts: descriptions by name; arrays: numbers by name, for figures
    not_run: why nothing was checked, or ""
    """

    counted: int = 0
    wrong: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    not_run: str = ""

    def compare(self, what: str, is_right: bool, count: int = 1) -> None:
        """Count comparisons, and record their subject if they failed."""
        self.counted += count
        if not is_right:
            self.wrong.append(what)


@dataclass(frozen=True)
class Check:
    """A row of the table of checks: its section, its subject in a line, its function of all ranks.

    devices: it runs on each of them
    """

    section: str
    what: str
    run: Callable[[CheckPlace], CheckResult]
    devices: Sequence[str] = ("cpu", "gpu")


QUICK_LIMIT_S, LIMIT_S = 120.0, 480.0  # of a check
GPU_LIMIT_S = 240.0  # more on a GPU, whose compiler takes seconds for each kernel of a cast
Checks = Mapping[str, Check]

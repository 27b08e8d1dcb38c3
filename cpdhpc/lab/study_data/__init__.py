"""Factors of studies, the cases that they make, and what a case gave: plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ...config import ConfigError, among, parse_bytes
from ..binding import BINDINGS, DISTRIBUTIONS

Array = npt.NDArray[Any]
Value = int | float | str | bool
Factors = Mapping[str, Value]
ABSENT = ""  # in a study file: the factor has no value in this case
WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


@dataclass(frozen=True)
class Factor:
    """Something that a study may vary.

    type: int, float, str or bool; units: as in the study file
    default: the value where a study says nothing; None: it must say, ABSENT: the factor is unused
    check: raises ValueError for a value of the right type that cannot be
    """

    long_name: str
    type: type
    units: str = "1"
    default: Value | None = ABSENT
    check: Callable[[Any], object] = lambda value: None

    def parse(self, given: Any) -> Value:
        """Return a value of a study's file; sizes may have a unit. Raises ValueError."""
        value: Any = given
        if self.units == "byte" and isinstance(given, str):
            value = parse_bytes(given)
        if self.type is float and type(value) is int:
            value = float(value)
        if type(value) is not self.type:
            raise ConfigError(f"should be {WORDS[self.type]}")
        if type(value) is int and abs(value) >= 1 << 63:
            raise ConfigError("should be below 2**63")
        self.check(value)
        return cast(Value, value)


def at_least(least: float) -> Callable[[float], None]:
    """Return a check that raises for a number below."""

    def check(value: float) -> None:
        if value < least:
            raise ConfigError(f"should be {least} or more")

    return check


def positive(long_name: str, default: int | None) -> Factor:
    """Return a factor that is an integer, 1 or more."""
    return Factor(long_name, int, default=default, check=at_least(1))


def float32_size(long_name: str) -> Factor:
    """Return the factor that says how many bytes of float32 there are; a study must say it."""

    def check(size_bytes: int) -> None:
        if size_bytes < 4 or size_bytes % 4:
            raise ConfigError("should be a positive multiple of 4 bytes, one float32")

    return Factor(long_name, int, "byte", None, check)


DEVICE = Factor("where arrays are: cpu, gpu", str, check=among(("cpu", "gpu")))


def device_used(given: Factors) -> dict[str, Value]:
    """Return the factor device where it is a GPU: on the CPU a case is what it always was."""
    return {"device": "gpu"} if given.get("device") == "gpu" else {}


SHAPE = {  # factors of every kind; ranks = nodes * ppn
    "nodes": Factor("nodes", int, check=at_least(1)),
    "ppn": Factor("ranks per node", int, check=at_least(1)),
    "ranks": Factor("ranks", int, check=at_least(1)),
}

SEATS = {  # factors of every kind, of which a launcher is told; unused: as it does by itself
    "bind": Factor("what a rank is bound to: none, core, socket, numa", str, check=among(BINDINGS)),
    "distribution": Factor(
        "ranks of a node along its sockets: block, cyclic", str, check=among(DISTRIBUTIONS)
    ),
}


@dataclass(frozen=True)
class Case:
    """A point. factors: those of its kind that it uses; the shape is beside them."""

    id: str
    factors: Factors = field(hash=False)
    nodes: int
    ppn: int

    @property
    def ranks(self) -> int:
        """Number of MPI processes."""
        return self.nodes * self.ppn

    @property
    def seats(self) -> tuple[str, str]:
        """How ranks are bound and distributed, "" for as the launcher does by itself."""
        return str(self.factors.get("bind", "")), str(self.factors.get("distribution", ""))

    @property
    def all_factors(self) -> dict[str, Value]:
        """The factors with nodes, ppn and ranks."""
        return {"nodes": self.nodes, "ppn": self.ppn, "ranks": self.ranks, **self.factors}


Outcomes = dict[str, float | int | str]
Series = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True)
class Result:
    """What a case gave.

    times_s: float64[repeats, 3], of every repeat the slowest rank's time, the fastest's, the mean
    is_warmup: uint8[repeats]
    outcomes: some of study_file.OUTCOMES; environment: where, as text
    series: by group of study_file.SERIES, the columns with "epoch" int64[epochs], or with
        "iteration" int64[samples] and "layer" str[layers]
    """

    times_s: Array
    is_warmup: Array
    outcomes: Mapping[str, float | int | str]
    environment: Mapping[str, str]
    series: Series = field(default_factory=dict)


def over_ranks(times_s: Array, warmup: int) -> tuple[Array, Array]:
    """Return times_s and is_warmup of a Result, of float64[warmup + repeats, processes]."""
    over = times_s.max(axis=1), times_s.min(axis=1), times_s.mean(axis=1)
    return np.stack(over, axis=1), (np.arange(len(times_s)) < warmup).astype(np.uint8)

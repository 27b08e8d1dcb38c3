"""Factors of studies, cases, and results of cases: plain data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ...config import ConfigError, among, parse_bytes
from ..binding import BINDINGS, DISTRIBUTIONS

Array = npt.NDArray[Any]
Value = int | float | str | bool
Factors = Mapping[str, Value]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
ABSENT = ""  # in a study file: the factor has no value in this case
WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by a key of theirs; keys and items keep their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def but(factors: Factors, names: Collection[str]) -> frozenset[tuple[str, Value]]:
    """Return factors without some, as a key for points that differ in these only."""
    return frozenset((k, v) for k, v in factors.items() if k not in names)


@dataclass(frozen=True)
class Factor:
    """A quantity that a study may vary.

    type: int, float, str or bool; units: as in the study file
    default: the value if a study has none; None: the study needs one; ABSENT: it is then unused
    check: raises ValueError for a wrong value of the right type
    """

    long_name: str
    type: type
    units: str = "1"
    default: Value | None = ABSENT
    check: Callable[[Any], object] = lambda value: None

    def parse(self, given: Any) -> Value:
        """Return a value of a study's TOML file; sizes may have a unit. Raises ValueError."""
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
    """Return a check that raises ConfigError for a smaller number."""

    def check(value: float) -> None:
        if value < least:
            raise ConfigError(f"should be {least} or more")

    return check


def positive(long_name: str, default: int | None) -> Factor:
    return Factor(long_name, int, default=default, check=at_least(1))


def float32_size(long_name: str) -> Factor:
    """Return a factor that is a number of bytes of float32, which a study needs."""

    def check(size_bytes: int) -> None:
        if size_bytes < 4 or size_bytes % 4:
            raise ConfigError("should be a positive multiple of 4 bytes, one float32")

    return Factor(long_name, int, "byte", None, check)


DEVICE = Factor("where arrays are: cpu, gpu", str, check=among(("cpu", "gpu")))


def device_used(given: Factors) -> dict[str, Value]:
    """Return the factor device if it is a GPU: on the CPU cases keep the ids of older versions."""
    return {"device": "gpu"} if given.get("device") == "gpu" else {}


SHAPE = {  # factors of every kind; ranks = nodes * ppn
    "nodes": Factor("nodes", int, check=at_least(1)),
    "ppn": Factor("ranks per node", int, check=at_least(1)),
    "ranks": Factor("ranks", int, check=at_least(1)),
}

SEATS = {  # factors of every kind that become options of launchers; unused: their defaults
    "bind": Factor(f"what a rank is bound to: {', '.join(BINDINGS)}", str, check=among(BINDINGS)),
    "distribution": Factor(
        "ranks of a node along its sockets: block, cyclic", str, check=among(DISTRIBUTIONS)
    ),
}


@dataclass(frozen=True)
class Case:
    """A case. factors: those of its kind that it uses, without nodes and ppn."""

    id: str
    factors: Factors = field(hash=False)
    nodes: int
    ppn: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ppn

    @property
    def seats(self) -> tuple[str, str]:
        """How ranks are bound and distributed, "" for the launcher's default."""
        return str(self.factors.get("bind", "")), str(self.factors.get("distribution", ""))

    @property
    def all_factors(self) -> dict[str, Value]:
        return {"nodes": self.nodes, "ppn": self.ppn, "ranks": self.ranks, **self.factors}


Outcomes = dict[str, float | int | str]
Series = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True)
class Result:
    """The result of a case.

    times_s: float64[repeats, 3], of every repeat the slowest rank's time, the fastest's, the mean
    is_warmup: uint8[repeats]
    outcomes: some of study_file.OUTCOMES; environment: of machine, software and job
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

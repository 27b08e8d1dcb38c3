"""What a login node knows of a kind of measurement: its factors, and which of them go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ..config import ConfigError, parse_bytes, suggest

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
        self.check(value)
        return cast(Value, value)


def one_of(names: Iterable[str]) -> Callable[[str], None]:
    """Return a check that raises for a name that is not among these, with a suggestion."""
    known = tuple(names)

    def check(name: str) -> None:
        if name not in known:
            raise ConfigError(suggest(name, known))

    return check


def at_least(least: float) -> Callable[[float], None]:
    """Return a check that raises for a number below."""

    def check(value: float) -> None:
        if value < least:
            raise ConfigError(f"should be {least} or more")

    return check


SHAPE = {  # factors of every kind; ranks = nodes * ppn
    "nodes": Factor("nodes", int, check=at_least(1)),
    "ppn": Factor("ranks per node", int, check=at_least(1)),
    "ranks": Factor("ranks", int, check=at_least(1)),
}


@dataclass(frozen=True)
class Kind:
    """A kind of measurement.

    factors: by name, in the order in which they are shown
    work: the factor that says how large the problem is
    used: (factors, defaults included) -> those that this case uses, made plain, so that two ways
        to say the same are one case; raises ValueError for what cannot work
    fits: (factors that used returned, ranks) -> why so many ranks cannot do it, or None
    time_s: (factors, ranks, repeats) -> about the seconds of so many repeats; 0: nothing is known
    sample: what a repeat is, in words; measuring: the module that measures it in a job
    """

    factors: Mapping[str, Factor]
    work: str
    used: Callable[[Factors], dict[str, Value]]
    fits: Callable[[Factors, int], str | None]
    time_s: Callable[[Factors, int, int], float]
    sample: str
    measuring: str
    needs_job: bool = False
    groups: tuple[str, ...] = field(default=())  # of a study file, besides those of all kinds

"""What a kind of study is: its factors, how a case of it is measured, what a report shows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt

from ..config import ConfigError, Raw, parse_bytes, suggest

if TYPE_CHECKING:
    from ..report.points import Layout, SeedGroup
    from ..report.tables import Section
    from ..signals import Caught
    from ..study.cases import Case
    from ..study.repeats import Place
    from ..study.spec import Study
    from ..study.study_file import StudyFile

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


def positive(long_name: str, default: int | None) -> Factor:
    """Return a factor that is an integer, 1 or more."""
    return Factor(long_name, int, default=default, check=at_least(1))


def float32_size(long_name: str) -> Factor:
    """Return the factor that says how many bytes of float32 there are; a study must say it."""

    def check(size_bytes: int) -> None:
        if size_bytes < 4 or size_bytes % 4:
            raise ConfigError("should be a positive multiple of 4 bytes, one float32")

    return Factor(long_name, int, "byte", None, check)


SHAPE = {  # factors of every kind; ranks = nodes * ppn
    "nodes": Factor("nodes", int, check=at_least(1)),
    "ppn": Factor("ranks per node", int, check=at_least(1)),
    "ranks": Factor("ranks", int, check=at_least(1)),
}

Outcomes = dict[str, float | int | str]
Series = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True)
class Result:
    """What a case gave.

    times_s: float64[repeats, 3], of every repeat the slowest rank's time, the fastest's, the mean
    is_warmup: uint8[repeats]
    outcomes: some of study.case_file.OUTCOMES; environment: where, as text
    series: by group of study.case_file.SERIES, the columns with "epoch" int64[epochs], or with
        "iteration" int64[samples] and "layer" str[layers]
    """

    times_s: Array
    is_warmup: Array
    outcomes: Mapping[str, float | int | str]
    environment: Mapping[str, str]
    series: Series = field(default_factory=dict)


@dataclass
class Call:
    """Something to time. prepare: done before each call, and not timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    outcomes: Outcomes = field(default_factory=dict)


class Measuring(ABC):
    """A case on its way.

    done: whether it has all that it needs; virtual_ranks, timeout_s: of the world that it needs
    """

    done = False
    virtual_ranks = 1
    timeout_s = 600.0

    def __init__(self, study: Study, case: Case, directory: Path) -> None:
        self.study, self.case, self.directory = study, case, directory

    @abstractmethod
    def visit(self, place: Place, caught: Caught) -> None:
        """Measure for a while. Collective over the ranks of the place.

        Raises UserError, ArithmeticError or NonFiniteGradient, on all of them alike, where the
        case cannot be measured; Interrupted where it stopped at a signal and can go on later.
        """

    @abstractmethod
    def result(self, place: Place) -> Result:
        """Return what was measured, once it is done. Collective."""


Calls = Callable[["Study", "Case", "Place", bool], AbstractContextManager[Call]]


@dataclass(frozen=True)
class Kind:
    """A kind of study. Only its plain data is used on login nodes; functions load what they need.

    factors: by name, in the order in which they are shown
    work: the factor that says how large the problem is
    further: (name, a value, the job's tables) -> a factor beyond those, or None where there is no
        such; for what users add to the tables that jobs choose from
    used: (factors, defaults included) -> those that this case uses, made plain, so that two ways
        to say the same are one case; raises ValueError for what cannot work
    fits: (tables of the job, factors that used returned, ranks) -> why so many ranks cannot do it,
        or None; by the models that the job itself reads, so that it finds nothing wrong later
    time_s: (factors, ranks, repeats) -> about the seconds of so many repeats; 0: nothing is known
    sample: what a repeat is, in words
    measure: (study, case, place, check) -> the call that is timed, made ready; with check it is
        first seen to do what it should; collective. A class, where a repeat is no call
    sections: (study file, its points, layout) -> what a report shows besides the scaling
    panels: factors whose words have panels of their own in figures
    """

    factors: Mapping[str, Factor]
    work: str
    used: Callable[[Factors], dict[str, Value]]
    fits: Callable[[Raw, Factors, int], str | None]
    time_s: Callable[[Factors, int, int], float]
    sample: str
    measure: Calls | type[Measuring]
    sections: Callable[[StudyFile, Sequence[SeedGroup], Layout], list[Section]]
    panels: tuple[str, ...]
    needs_job: bool = False
    groups: tuple[str, ...] = ()  # of a study file, besides those of all kinds
    further: Callable[[str, Value, Raw], Factor | None] = lambda name, value, job: None

"""A kind of study: its factors, the measurement of a case, the sections of a report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import Field, model_validator

from ...config import Above0, Positive, Raw, Seconds, Section, Whole, merge
from ..report import tables
from ..report.points import Facets, SeedGroup
from ..study_data import Array, Case, Factor, Factors, Outcomes, Result, Value
from ..study_data.statistics import is_enough
from ..study_data.study_file import StudyFile

if TYPE_CHECKING:
    from ..signals import Caught
    from .place import JobRanks


class Measure(Section):
    """[measure]: how often a case is measured.

    Cases take turns: a visit to a case has warmup calls and then block repeats. After min_repeats
    a case ends if the confidence interval of the median is within relative of it on both sides, or
    if its calls took max_time_s; else it ends after max_repeats.

    warmup: calls before the repeats of a visit, which are kept and flagged; of trainings: steps
    block: repeats of a visit; min_repeats, max_repeats: of a case
    confidence: of the interval of the median
    relative: largest distance of an end of the interval from the median, as a share of the median
    max_time_s: of a case's calls; interleave: cases that take turns; seed: of their order
    """

    warmup: Whole = 2
    block: Positive = 5
    min_repeats: Positive = 10
    max_repeats: Positive = 50
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    relative: Above0 = 0.05
    max_time_s: Seconds = 20.0
    interleave: Positive = 16
    seed: Whole = 0

    @model_validator(mode="after")
    def _repeats_in_order(self) -> Measure:
        if self.min_repeats > self.max_repeats:
            raise ValueError(
                f"min_repeats={self.min_repeats} is more than max_repeats={self.max_repeats}"
            )
        return self

    def is_over(self, repeats: int, spent_s: float, samples: Iterable[Array]) -> bool:
        """Return whether a case ends after so many repeats and so long a time.

        samples: float64[n] of each quantity whose interval decides
        """
        if repeats < self.min_repeats:
            return False
        if repeats >= self.max_repeats or spent_s >= self.max_time_s:
            return True
        return all(is_enough(each, self.confidence, self.relative) for each in samples)


class MeasuredStudy(Protocol):
    """The part of a study.spec.Study that a measurement reads."""

    @property
    def measure(self) -> Measure:
        """The table [measure]."""

    @property
    def job(self) -> Raw:
        """The tables of the job file, {} if the kind has none."""


@dataclass
class Call:
    """Something to time.

    prepare: called before each call, and not timed
    chosen: factors whose values the call itself has chosen
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    outcomes: Outcomes = field(default_factory=dict)
    chosen: Factors = field(default_factory=dict)


class Measuring(ABC):
    """The measurement of a case.

    done: whether it is complete; virtual_ranks, timeout_s: of the world that it needs
    """

    done = False
    virtual_ranks = 1
    timeout_s = 600.0

    def __init__(self, study: MeasuredStudy, case: Case, directory: Path) -> None:
        self.study, self.case, self.directory = study, case, directory

    @abstractmethod
    def visit(self, place: JobRanks, caught: Caught) -> None:
        """Measure for a while. Collective over the ranks of the place.

        Raises UserError, ArithmeticError or NonFiniteGradient on all of them if the case cannot be
        measured; Interrupted if it stopped at a signal and can go on later.
        """

    @abstractmethod
    def result(self, place: JobRanks) -> Result:
        """Return the result, once the measurement is done. Collective."""


def device_of(job: Raw, used: Factors) -> str:
    """Return the factor device. See Kind.device."""
    return str(used.get("device", "cpu"))


BEFORE = "before"  # of place.Launch.kept: the environment of a finished case of the folder


Calls = Callable[[MeasuredStudy, Case, "JobRanks", bool], AbstractContextManager[Call]]


@dataclass(frozen=True)
class Kind:
    """A kind of study. Login nodes use its plain data; functions load packages when called.

    factors: by name, in the order in which they are shown
    work: the factor that is the size of the problem
    further: (name, a value, the job's tables) -> a factor that is not in factors, as a key of a
        user's own table of the job, or None if there is no such factor
    used: (factors, defaults included) -> those that this case uses, in one form for all
        equivalent values; raises ValueError for values that do not go together
    sample: what a repeat is, as text
    measure: (study, case, place, check) -> the call that is timed, after its result was checked if
        check is true; collective. A subclass of Measuring if a repeat is no call
    sections: (study file, its points, layout) -> sections of a report besides the scaling
    fits: (tables of the job, factors that used returned, ranks) -> why so many ranks cannot do it,
        or None. The job's own models decide, so that the job finds no further error
    time_s: (factors, ranks, repeats) -> estimated seconds of so many repeats; 0 if there is no
        estimate, as for trainings: run.case_time_s has one
    panels: factors whose values have panels of their own in figures
    device: (tables of the job, factors that used returned) -> "cpu" or "gpu"
    in_common: (study file) -> the file with one value for quantities that each case measured but
        that do not depend on the case; a report begins with it
    laid_over: (tables of a job, changes) -> the tables with changes laid over them
    own_tables: names of the tables of a study file that are its job
    ready: (these tables, path of the study file) -> the job: checked, and with the content of files
        that they name. Raises ConfigError
    named: (tables of the job) -> the factors that it names, each with the key that does
    of_job: (this kind, tables of the job) -> the kind as it is with such a job
    may_change: keys of the job, as "table.key", that do not affect measurements
    starts_ranks: whether its cases start ranks themselves: a batch is one process, without MPI
    """

    factors: Mapping[str, Factor]
    work: str
    used: Callable[[Factors], dict[str, Value]]
    sample: str
    measure: Calls | type[Measuring]
    sections: Callable[[StudyFile, Sequence[SeedGroup], Facets], list[tables.Section]]
    fits: Callable[[Raw, Factors, int], str | None] = lambda job, used, ranks: None
    time_s: Callable[[Factors, int, int], float] = lambda used, ranks, repeats: 0.0
    panels: tuple[str, ...] = ()
    device: Callable[[Raw, Factors], str] = device_of
    in_common: Callable[[StudyFile], StudyFile] = lambda file: file
    needs_job: bool = False
    laid_over: Callable[[Raw, Raw], Raw] = merge
    groups: tuple[str, ...] = ()  # of a study file, besides those of all kinds
    further: Callable[[str, Value, Raw], Factor | None] = lambda name, value, job: None
    own_tables: tuple[str, ...] = ()
    ready: Callable[[Raw, Path], Raw] = lambda job, path: job
    named: Callable[[Raw], Iterable[tuple[str, str]]] = lambda job: ()
    of_job: Callable[[Kind, Raw], Kind] = lambda kind, job: kind
    may_change: tuple[str, ...] = ()
    starts_ranks: bool = False

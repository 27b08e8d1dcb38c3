"""A study as in its TOML file: factors, how cases are measured, how they become jobs."""

from __future__ import annotations

import hashlib
import warnings
from functools import cached_property
from typing import Annotated, Any, Literal

import simpleeval
from pydantic import AfterValidator, Field, model_validator

from ...config import Above0, ConfigError, Name, Raw, Seconds, Section, Whole, dump_toml, suggest
from ...formats import with_own_formats
from ..kinds import kind_of
from ..kinds.base import Kind, Measure
from ..study_data import ABSENT, SEATS, SHAPE, Factor, Factors

NO_VALUE = simpleeval.InvalidExpression, TypeError, ValueError, ArithmeticError, KeyError
ALLOWED = "allowed are comparisons, and, or, not, in, arithmetic and names of factors"


class Constraint:
    """An expression, as "ranks <= 8" or "not (algorithm == 'tree' and size_bytes > 2**24)".

    It has comparisons, and, or, not, in, arithmetic and names of factors only.
    Raises ConfigError for any other text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._evaluator: Any = simpleeval.EvalWithCompoundTypes(functions={})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an assignment is only warned of
                self._tree = self._evaluator.parse(text)
                if type(self._tree).__name__ == "Assign":
                    raise ConfigError(f"constraints: {text}: compare with ==")
        except (simpleeval.InvalidExpression, SyntaxError):
            raise ConfigError(f"constraints: {text}: is no expression: {ALLOWED}") from None

    def holds(self, factors: Factors) -> bool:
        """Return whether it is true of a case. Raises ConfigError if it has no truth value."""
        self._evaluator.names = _nested(factors)
        try:
            result = self._evaluator.eval(self.text, previously_parsed=self._tree)
        except simpleeval.NameNotDefined as error:
            name = str(getattr(error, "name", ""))
            raise ConfigError(
                f"constraints: {self.text}: unknown factor {name}: {suggest(name, factors)}"
            ) from None
        except (simpleeval.FeatureNotAvailable, simpleeval.FunctionNotDefined):
            raise ConfigError(f"constraints: {self.text}: {ALLOWED}") from None
        except (simpleeval.NumberTooHigh, simpleeval.IterableTooLong):
            raise ConfigError(
                f"constraints: {self.text}: is too large to work out: {ALLOWED}, of smaller numbers"
            ) from None
        except NO_VALUE as error:
            raise ConfigError(f"constraints: {self.text}: {error}") from None
        if not isinstance(result, bool):
            raise ConfigError(f"constraints: {self.text}: is {result!r}: should be true or false")
        return result


def _nested(factors: Factors) -> Raw:
    """Return factors as "gradient.wire" in nested tables, so that expressions can name them."""
    result: Raw = {}
    for name, value in factors.items():  # called for each constraint and point: copies no table
        *tables, last = name.split(".")
        here = result
        for part in tables:
            if not isinstance(here.get(part), dict):
                here[part] = {}
            here = here[part]
        here[last] = value
    return result


class TrainedJob(Section):
    """[train]: the job file of a study of trainings.

    job: path of the job file, relative to the directory of the study file
    target_loss: test loss; the report compares the steps and samples that batches need to reach it;
        default: the least loss that all batches reach
    target_accuracy: test accuracy instead of a loss, %
    tolerance: points below float32 that count as the same accuracy, if the report draws the bits
        that batches need
    """

    job: str = ""
    target_loss: Annotated[float | None, Field(gt=0)] = None
    target_accuracy: Annotated[float | None, Field(gt=0, lt=100)] = None
    tolerance: Above0 = 1.0

    @model_validator(mode="after")
    def _one_target(self) -> TrainedJob:
        if self.target_loss is not None and self.target_accuracy is not None:
            raise ValueError("target_loss and target_accuracy: give one of them")
        return self


class JobBundles(Section):
    """[run]: how cases become jobs.

    bundle: "case": one job for each case; "shape": one job for cases of one shape, up to
        batch_time_s; "nested": one job of the largest shape of each device, whose smaller cases run
        on some of its ranks
    batch_time_s: longest time of all cases of a job
    case_time_s: time of a case, if the kind has no estimate or you know a better one
    throttle: most jobs of the study at a time, 0 for any number; retries: retries of a failed job
    """

    bundle: Literal["case", "shape", "nested"] = "shape"
    batch_time_s: Seconds = 3600.0
    case_time_s: Seconds | None = None
    throttle: Whole = 0
    retries: Whole = 0


def _known_kind(name: str) -> str:
    kind_of(name)
    return name


class Study(Section):
    """The file. sweep, zip, exclude, weak and base have factors of the kind as keys.

    name: part of file names; default: the name of the study file
    kind: kind of study; "package.module:NAME" imports a kind of your own
    scaling: "strong": one problem on more ranks; "weak": a problem that grows with the ranks;
        "throughput": several sizes on the same ranks
    sweep: a list or a value for each factor; cases are their product
    zip: lists of one length that vary together, as one axis of the product
    exclude: values of factors; cases that match all of them are left out
    constraints: expressions of factors that must be true, for example "ranks <= 8"
    weak: values of factors for each rank, with weak scaling
    base: factors of the base point of a speed-up; ranks = "same": as many ranks as the point
    job: the tables of the job file, which load_study puts here
    formats: tables [formats.NAME] of your own formats, as in job files; if a value is such a name,
        the numbers of the format replace it
    """

    name: Name
    kind: Annotated[str, AfterValidator(_known_kind)]
    scaling: Literal["strong", "weak", "throughput"] = "strong"
    constraints: Annotated[tuple[str, ...], Field(strict=False)] = ()
    zip: Annotated[tuple[Raw, ...], Field(strict=False)] = ()
    exclude: Annotated[tuple[Raw, ...], Field(strict=False)] = ()
    sweep: Raw = Field(default_factory=dict)
    weak: Raw = Field(default_factory=dict)
    base: Raw = Field(default_factory=dict)
    measure: Measure = Measure()
    run: JobBundles = JobBundles()
    train: TrainedJob | None = None
    job: Raw = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _own_formats(cls, raw: Any) -> Any:
        return with_own_formats(raw)

    @model_validator(mode="after")
    def _sections_go_together(self) -> Study:
        if (self.scaling == "weak") != bool(self.weak):
            raise ValueError(
                f"scaling={self.scaling!r}: [weak] is needed with scaling='weak', and only there"
            )
        if self.of_kind.needs_job and not ((self.train and self.train.job) or self.job):
            raise ValueError(f"kind={self.kind!r}: needs [train] job = 'FILE.toml', or [job]")
        if self.scaling == "throughput" and not self.of_kind.work:
            raise ValueError("scaling='throughput': needs [command] work, the factor that it is of")
        if not self.of_kind.needs_job and (self.train or self.job):
            raise ValueError(f"kind={self.kind!r}: has no job: [train] and [job] are of trainings")
        return self

    @cached_property
    def of_kind(self) -> Kind:
        """The study's kind, as it is with its job."""
        kind = kind_of(self.kind)
        return kind.of_job(kind, self.job)

    @cached_property
    def factors(self) -> dict[str, Factor]:
        """The kind's factors, and further factors that the sweep names."""
        found = {**self.of_kind.factors, **SEATS}
        tables = (self.sweep, *self.zip, self.weak)
        for name, given in (pair for table in tables for pair in table.items()):
            values = [v for v in (given if isinstance(given, list) else [given]) if v != ABSENT]
            if name not in found and name not in SHAPE and values:
                # A factor with whole numbers and others is of type float.
                value = next((each for each in values if type(each) is float), values[0])
                factor = self.of_kind.further(name, value, self.job)
                found |= {} if factor is None else {name: factor}
        return found

    def toml(self) -> str:
        """Return the study as TOML text with every default filled in."""
        return dump_toml(self.model_dump(mode="python"))

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.toml().encode()).hexdigest()

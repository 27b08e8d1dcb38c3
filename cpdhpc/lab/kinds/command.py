"""Any program as a kind of study: [command] starts it, and users name its factors."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from ...config import ConfigError, Raw, parse_bytes
from ..report.metrics import metric_sections
from ..study_data import ABSENT, Factor, Factors, Value
from ..study_data.study_file import FURTHER, OUTCOMES, SAME_FOR_ALL
from . import command_job
from .base import Kind
from .command_runs import ProgramRuns

COLUMNS = ("point", "repeat", "case_id", "time_s", "min_rank_time_s", "mean_rank_time_s")
HEADINGS = {"repeats", "samples", "median", "least", "greatest", "baseline", "throughput", "time"}
TAKEN = {*COLUMNS, "is_warmup", "environment", *OUTCOMES, *SAME_FOR_ALL, *command_job.FOLDERS}


def _fits(job: Raw, used: Factors, ranks: int) -> str | None:
    """Return why a case cannot be started. See Kind.fits."""
    command = command_job.job_of(job).command
    shape = {"ranks": ranks, "nodes": ranks, "ppn": 1}  # only their type matters for formats
    folders = {command_job.STUDY: command.directory, command_job.BUILD: command.directory}
    try:
        command_job.words(command, {**shape, **used}, folders)
        command_job.variables(command, {**shape, **used}, folders)
        command_job.rendered(command, {**shape, **used})
    except ConfigError as error:
        return str(error)
    return None


def _no_nul(text: str) -> None:
    if "\0" in text:
        raise ConfigError("has a NUL, which neither programs nor files take")


def _further(name: str, value: Value, job: Raw) -> Factor | None:
    """Return the factor of any name, with the type of its first value. See Kind.further."""
    if not command_job.NAME.fullmatch(name):
        raise ConfigError(f"sweep.{name}: should be letters, digits and _, with dots between")
    if name in TAKEN or name.startswith(FURTHER):
        raise ConfigError(f"sweep.{name}: study files have another thing of that name: rename it")
    if name.rpartition(".")[2].replace("_", " ") in HEADINGS:
        raise ConfigError(f"sweep.{name}: reports have a column of that name: rename it")
    if name in job.get("metrics", {}):
        raise ConfigError(f"sweep.{name}: [metrics] has one of that name: rename one of them")
    if name.rpartition(".")[2].endswith("bytes") and _is_size(value):
        return Factor(f"{name}, as the study names it", int, "byte")
    check = _no_nul if isinstance(value, str) else lambda value: None
    return Factor(f"{name}, as the study names it", type(value), check=check)


def _is_size(value: Value) -> bool:
    if isinstance(value, str):
        try:
            parse_bytes(value)
        except ConfigError:
            return False
        return True
    return type(value) is int


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors that a case has. See Kind.used."""
    for name, value in given.items():
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{name} is {value}: should be finite")
    return {name: value for name, value in given.items() if value != ABSENT}


def _of_job(kind: Kind, job: Raw) -> Kind:
    return replace(kind, work=str(job["command"]["work"])) if "command" in job else kind


COMMAND = Kind(
    factors={},
    work="",
    used=_used,
    further=_further,
    named=command_job.named,
    fits=_fits,
    sample="one run of the program: its wall time, or the metric that [command] time names",
    measure=ProgramRuns,
    sections=metric_sections,
    needs_job=True,
    own_tables=("command", "metrics"),
    ready=command_job.ready,
    of_job=_of_job,
    may_change=("command.timeout_s", "command.keep", "command.directory"),
    starts_ranks=True,
)

"""[command] and [metrics] of a study of a program, and their texts with factors filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ... import ordinary
from ...config import Above0, ConfigError, Raw, Section, suggest, validate
from ..study_data import Factors
from ..study_data.study_file import WALL

if TYPE_CHECKING:
    from jinja2 import Template

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
FOLDERS = STUDY, BUILD = "study", "build"  # fields of argv and the like that are no factors
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
Text = str | int | float | bool


def _regex(text: str) -> str:
    try:
        re.compile(text, re.MULTILINE)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


Regex = Annotated[str, AfterValidator(_regex)]


class RunMetric(Section):
    """[metrics.NAME]: a number of each run, found by one of regex, json, csv and hdf5.

    regex: regular expression, whose one group is the number; ^ and $ match at lines of the output
    json: "FILE:a.b.0": keys and indices from the outermost to the innermost
    csv: "FILE:column"; the first line names the columns; FILE.tsv has tabs
    hdf5: "FILE:/path": path of a dataset
    unit: unit of the number, "1" for none
    better: "lower" or "higher": a case ends once its median is known well enough, and --compare
        judges it; "": it is recorded and shown
    take: number that several values of a run give: "one": several are an error; "first", "last",
        "min", "max", "sum", "mean", "median"; "all": each is a repeat
    """

    regex: Regex = ""
    json_: Annotated[str, Field(alias="json")] = ""
    csv: str = ""
    hdf5: str = ""
    unit: str = "1"
    better: Literal["lower", "higher", ""] = ""
    take: Literal["one", "first", "last", "min", "max", "sum", "mean", "median", "all"] = "one"

    @model_validator(mode="after")
    def _one_source(self) -> RunMetric:
        given = [name for name, text in self.sources.items() if text]
        if len(given) != 1:
            has = " and ".join(given) or "none"
            raise ValueError(f"needs one of regex, json, csv and hdf5: has {has}")
        if self.regex and re.compile(self.regex).groups != 1:
            raise ValueError(f"regex={self.regex!r}: should have one group in brackets, the number")
        if not self.regex and not all(self.place):
            raise ValueError(f"{given[0]}={self.sources[given[0]]!r}: should be FILE:PLACE")
        return self

    @property
    def sources(self) -> dict[str, str]:
        """The texts of the keys that say where the number is; one of them is not empty."""
        return {"regex": self.regex, "json": self.json_, "csv": self.csv, "hdf5": self.hdf5}

    @property
    def place(self) -> tuple[str, str]:
        """The file with the number, and the place in it."""
        file, _, place = (self.json_ or self.csv or self.hdf5).partition(":")
        return file, place


class ProgramCommand(Section):
    """[command]: the program of a study, and how it is started.

    argv: words of the program; {NAME} and {NAME:FORMAT} stand for factors, as Python formats them,
        also {ranks}, {nodes} and {ppn}; {study} for the folder of the study file, {build} for that
        of the build; {{ and }} for braces. A word with a factor that a case leaves out is left out.
        A word that is the path of a file beside the study file becomes the full path
    build: lines of bash, run once per folder and machine in the folder of the study file, before
        the first case; $CPDHPC_BUILD is the folder for their results
    launch: whether the site's launcher starts the program on the case's ranks; false: no launcher
    environment: variables of the environment of the program, with factors as in argv
    files: names of files in the working folder, and the templates (jinja2) beside the study file
        that they are made from; {{ NAME }} stands for a factor there
    templates: the same, with the text of each template instead of its path
    timeout_s: longest time of a run; a longer run has failed
    success: regular expression that must be found in the output; ^ and $ match at lines
    time: metric, in a unit of time, that is the time of a repeat; "": the wall time of the run
    work: factor that is the size of the problem
    keep: whether files and output of the last run of a finished case are kept in work/ID
    directory: of the study file, which is put here
    """

    argv: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    build: Annotated[tuple[str, ...], Field(strict=False)] = ()
    launch: bool = True
    environment: dict[str, Text] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    templates: dict[str, str] = Field(default_factory=dict)
    timeout_s: Above0 = 600.0
    success: Regex = ""
    time: str = ""
    work: str = ""
    keep: bool = True
    directory: str = ""

    @field_validator("environment")
    @classmethod
    def _names(cls, given: dict[str, Text]) -> dict[str, Text]:
        for name in given:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"{name!r}: should be the name of a variable: letters, digits, _")
        return given

    @field_validator("files", "templates")
    @classmethod
    def _inside(cls, given: dict[str, str]) -> dict[str, str]:
        for name in given:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
                raise ValueError(f"{name!r}: should be a path inside of the working folder")
        return given

    @property
    def texts(self) -> dict[str, str]:
        """The texts that factors are filled into, by key; templates are not among them."""
        words = {f"argv[{i}]": word for i, word in enumerate(self.argv)}
        return words | {f"environment.{k}": _plain(v) for k, v in self.environment.items()}


class CommandJob(Section):
    """The tables of a study of a program that are its job."""

    command: ProgramCommand
    metrics: dict[str, RunMetric] = Field(default_factory=dict)

    @field_validator("metrics")
    @classmethod
    def _names(cls, given: dict[str, RunMetric]) -> dict[str, RunMetric]:
        for name in given:
            if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or name == WALL:
                raise ValueError(f"{name!r}: should be letters, digits and _, and not {WALL}")
        return given

    @model_validator(mode="after")
    def _time_is_one(self) -> CommandJob:
        name = self.command.time
        if name and name not in self.metrics:
            raise ValueError(f"command.time={name!r}: {suggest(name, self.metrics)}")
        if name and (unit := self.metrics[name].unit) not in TIME_UNITS:
            raise ValueError(
                f"command.time={name!r}: metrics.{name}.unit={unit!r}: should be a time: "
                f"{', '.join(TIME_UNITS)}"
            )
        return self

    @property
    def deciding(self) -> list[str]:
        """The metrics whose intervals decide when a case ends."""
        return [name for name, metric in self.metrics.items() if metric.better]


def job_of(job: Raw) -> CommandJob:
    """Return the job of a study of a program, which was checked when the study was read."""
    return validate(CommandJob, job, "job")


def ready(tables: Raw, path: Path) -> Raw:
    """Return [command] and [metrics] checked, with the texts of templates. See Kind.ready."""
    job = validate(CommandJob, tables, str(path))
    command = job.command
    home = command.directory or str(path.parent.resolve())
    texts = dict(command.templates)
    for name, file in command.files.items():
        try:
            texts[name] = ordinary.text(Path(home) / file)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{path}: command.files.{name}: {file}: cannot be read: {why}"
            ) from None
    whole = command.model_copy(update={"files": {}, "templates": texts, "directory": home})
    for name, text in texts.items():
        _template(name, text)
    metrics = {name: each.model_dump(by_alias=True) for name, each in job.metrics.items()}
    return {"command": whole.model_dump(), **({"metrics": metrics} if metrics else {})}


def named(job: Raw) -> Iterator[tuple[str, str]]:
    """Yield the factors that argv and the like name, each with the key. See Kind.named."""
    command = job_of(job).command
    for key, text in command.texts.items():
        yield from (
            (f"command.{key}", name)
            for _, name, _ in _parts(text, key)
            if name not in ("", *FOLDERS)
        )
    yield from [("command.work", command.work)] if command.work else []


@lru_cache(1024)
def _parts(text: str, key: str) -> Sequence[tuple[str, str, str]]:
    """Return the pieces of a text: literal text, the factor after it or "", and its format.

    Raises ConfigError, which begins with the key.
    """
    try:
        found = list(Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"command.{key}={text!r}: {error}: a brace is {{{{ or }}}}") from None
    parts = []
    for literal, name, spec, conversion in found:
        if name is not None and (not NAME.fullmatch(name) or conversion):
            field = f"{{{name}{'!' + conversion if conversion else ''}}}"
            raise ConfigError(f"command.{key}={text!r}: {field}: should be {{NAME}} of a factor")
        parts.append((literal, name or "", spec or ""))
    return parts


def _plain(value: Text) -> str:
    """Return a value as programs read it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def filled(text: str, key: str, factors: Factors, folders: Mapping[str, str]) -> str | None:
    """Return a text with factors filled in, None if it names one that the case does not have.

    folders: values of {study} and {build}
    Raises ConfigError if a value has no such format.
    """
    whole = ""
    given = {**factors, **folders}
    for literal, name, spec in _parts(text, key):
        whole += literal
        if not name:
            continue
        if name not in given:
            return None
        value = given[name]
        try:
            whole += format(value, spec) if spec else _plain(value)
        except ValueError as error:
            raise ConfigError(f"command.{key}={text!r}: {name} is {value!r}: {error}") from None
    return whole


@cache
def _environment() -> Any:
    from jinja2 import Environment, StrictUndefined

    return Environment(undefined=StrictUndefined, keep_trailing_newline=True)


@lru_cache(64)
def _template(name: str, text: str) -> Template:
    """Return a template. Raises ConfigError for a wrong one."""
    from jinja2 import TemplateError

    try:
        found: Template = _environment().from_string(text)
    except TemplateError as error:
        raise ConfigError(f"command.templates.{name}: {error}") from None
    return found


def rendered(command: ProgramCommand, factors: Factors) -> dict[str, str]:
    """Return the texts of the files that are made from templates, by name. Raises ConfigError."""
    from jinja2 import TemplateError

    tables: Raw = {}
    for name, value in factors.items():  # "a.b" is b of a
        *above, last = name.split(".")
        here = tables
        for part in above:
            here = here.setdefault(part, {})
        here[last] = value
    found = {}
    for name, text in command.templates.items():
        try:
            found[name] = _template(name, text).render(tables)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"command.templates.{name}: {error}") from None
    return found


def words(command: ProgramCommand, factors: Factors, folders: Mapping[str, str]) -> list[str]:
    """Return argv of a case, with whole paths of files beside the study. Raises ConfigError."""
    return _checked(_words(command, factors, folders), "argv")


def constant_words(command: ProgramCommand, folders: Mapping[str, str]) -> list[str]:
    """Return the words of argv that name no factor, as words does."""
    return _words(command, {}, folders)


def _words(command: ProgramCommand, factors: Factors, folders: Mapping[str, str]) -> list[str]:
    home = Path(folders[STUDY])
    found = []
    for i, word in enumerate(command.argv):
        text = filled(word, f"argv[{i}]", factors, folders)
        if text is None:
            continue
        beside = home / text if text and text == word and "\0" not in text else None
        found.append(str(beside) if beside is not None and _is_there(beside) else text)
    return found


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a name
        return False


def variables(
    command: ProgramCommand, factors: Factors, folders: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the program that the case has. Raises ConfigError."""
    found = {
        name: filled(_plain(value), f"environment.{name}", factors, folders)
        for name, value in command.environment.items()
    }
    _checked([text for text in found.values() if text is not None], "environment")
    return {name: text for name, text in found.items() if text is not None}


def _checked(texts: list[str], key: str) -> list[str]:
    if any("\0" in text for text in texts):
        raise ConfigError(f"command.{key}: has a NUL, which no program can get")
    if key == "argv" and (not texts or not texts[0] or texts[0].startswith("-")):
        raise ConfigError(f"command.argv: begins with {texts[:1]}: should be a program")
    return texts

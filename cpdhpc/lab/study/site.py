"""A cluster: its site file, and the scripts of its jobs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from shlex import quote
from string import Formatter
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from ...config import Section, UserError, Whole, among, dump_toml, one_of, validate
from ...whole_files import check_sealed, read_file_of
from ..schedulers import DEFAULT, SCHEDULERS
from ..schedulers.base import Scheduler, script
from ..schedulers.launchers import FIELDS, OWN_GPU, Counts, Launcher
from .cases import Batch
from .spec import Study


def launch(
    way: Launcher,
    counts: Counts,
    cores: int = 1,
    flags: Iterable[str] = (),
    near_gpus: bool = False,
    has_gpus: bool = False,
    seats: tuple[str, str] = ("", ""),
    part: bool = False,
) -> str:
    """Return the words of the shell before the program; flags come after the other options.

    cores: of a rank
    near_gpus: whether each rank is to be near its GPU; has_gpus: whether it has one
    seats: how ranks are bound and distributed
    part: whether ranks may start on some of the job's nodes
    Raises UserError for a binding or distribution that the launcher has no option for.
    """
    bind, distribution = seats
    command = way.start(counts, cores, seats)
    command += way.part.format(nodes=counts.nodes) * part
    command += way.in_order * (near_gpus and bind in ("", "gpu") and not distribution)
    command += way.one_gpu.format(ppn=counts.ppn) if bind == "gpu" else way.gpus * has_gpus
    starter = OWN_GPU if bind == "gpu" and not way.one_gpu else ()
    return " ".join([command, *map(quote, flags), *map(quote, starter)])


def _line(text: str) -> str:
    if not text.strip() or not text.replace("\t", " ").isprintable():
        raise ValueError("should be one line that is not empty, of signs that can be printed")
    return text


def _word(text: str) -> str:
    if text.split() != [text]:
        raise ValueError("should be one word, without blanks around it")
    return _line(text)


def _option(text: str, info: ValidationInfo) -> str:
    _of(info).check_option(text)
    return _line(text)


def _launcher(name: str, info: ValidationInfo) -> str:
    """Check the name of a launcher, or a command with the fields of FIELDS."""
    if "{" not in name:
        return among(_of(info).LAUNCHERS)(name)
    try:
        found = {field for _, field, _, _ in Formatter().parse(name) if field is not None}
    except ValueError as error:
        raise ValueError(f"{error}: braces are for fields, and {{{{ is a brace") from None
    if not found <= set(FIELDS) or "ranks" not in found or name[0] == "{":
        raise ValueError(
            "a launcher of one's own begins with its program, and has the fields {ranks} and "
            f"perhaps {', '.join(f'{{{field}}}' for field in FIELDS[1:])}"
        )
    return _line(name)


def _first_launcher(given: dict[str, Any]) -> str:
    return next(iter(SCHEDULERS[given.get("scheduler", DEFAULT)].LAUNCHERS))


def _of(info: ValidationInfo) -> Scheduler:
    return SCHEDULERS[info.data.get("scheduler", DEFAULT)]  # a wrong name has its own error


def _list(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError("should be a list, as ['one', 'two']")
    return value


Word = Annotated[str, AfterValidator(_word)]
Line = Annotated[str, AfterValidator(_line)]
Grace = Annotated[int, Field(ge=60)]  # schedulers look at their clock about every 30 s
Option = Annotated[str, AfterValidator(_option)]
Lines = Annotated[tuple[Line, ...], BeforeValidator(_list), Field(strict=False)]
Options = Annotated[tuple[Option, ...], BeforeValidator(_list), Field(strict=False)]


class Site(Section):
    """A cluster, or a partition of one: a table of a TOML file.

    modules are loaded first, then the lines of setup run, in bash; an error there ends the job.
    scheduler: that runs its jobs
    directives: further options of the scheduler, as "--mail-type=END"
    python: words that start Python in a job; container: its image, started by runtime
    nodes, cores_per_node, max_time_min: the most that a job may request; None: not known
    gpus_per_node: a job whose ranks use GPUs requests one for each rank
    launcher: a name, or a command with {ranks} in it
    cpus_per_rank: cores
    grace_s: time before the limit at which a job is asked for its checkpoint
    max_array: one more than the largest index of an array
    max_requeues: the most often that a job may put itself into the queue again
    """

    name: Word = "local"
    scheduler: Annotated[str, one_of(SCHEDULERS)] = DEFAULT
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Line | None = None
    reservation: Word | None = None
    directives: Options = ()
    modules: Lines = ()
    setup: Lines = ()
    python: Line = "python"
    container: Line | None = None
    runtime: Line = "apptainer exec"
    launcher: Annotated[str, AfterValidator(_launcher)] = Field(default_factory=_first_launcher)
    mpi_flags: Lines = ()
    nodes: PositiveInt | None = None
    cores_per_node: PositiveInt | None = None
    gpus_per_node: Whole = 0
    cpus_per_rank: PositiveInt = 1
    max_time_min: PositiveInt | None = None
    grace_s: Grace = 120
    max_array: PositiveInt = 1001
    max_requeues: Whole = 20

    @model_validator(mode="after")
    def _time_before_the_signal(self) -> Site:
        if self.max_time_min is not None and 60 * self.max_time_min <= self.grace_s + 60:
            raise ValueError(
                f"max_time_min={self.max_time_min}: leaves no minute before the last "
                f"grace_s={self.grace_s} seconds"
            )
        return self

    @model_validator(mode="after")
    def _what_the_scheduler_knows(self) -> Site:
        keys = ("partition", "account", "qos", "constraint", "reservation")
        for key in keys:
            if getattr(self, key) is not None and key not in self.by.KEYS:
                raise ValueError(f"{key}: {self.by.TITLE} has none: directives has other options")
        return self

    @property
    def by(self) -> Scheduler:
        return SCHEDULERS[self.scheduler]

    @property
    def way(self) -> Launcher:
        return self.by.LAUNCHERS.get(self.launcher) or Launcher(self.launcher)

    @property
    def command(self) -> str:
        """The words of the shell that start Python, in the container if there is one."""
        inside = [] if self.container is None else [self.runtime, quote(self.container)]
        return " ".join([*inside, self.python])

    def toml(self) -> str:
        return dump_toml(self.model_dump())

    def refusal(self, nodes: int, ppn: int, has_gpus: bool = False) -> str | None:
        """Return why a job of this shape cannot run here, None if it can.

        ppn: ranks per node; has_gpus: whether each rank needs a GPU
        """
        if self.nodes is not None and nodes > self.nodes:
            return f"{nodes} nodes: site {self.name} gives a job {self.nodes} at most"
        cores = ppn * self.cpus_per_rank
        if self.cores_per_node is not None and cores > self.cores_per_node:
            each = f" with {self.cpus_per_rank} cores each" if self.cpus_per_rank > 1 else ""
            return (
                f"{ppn} ranks per node{each}: "
                f"a node of site {self.name} has {self.cores_per_node} cores"
            )
        if has_gpus and not self.gpus_per_node:
            return f"device gpu: site {self.name} has no GPUs (gpus_per_node = 0)"
        if has_gpus and ppn > self.gpus_per_node:
            return f"{ppn} ranks per node: a node of site {self.name} has {self.gpus_per_node} GPUs"
        return None


def load_site(path: Path | None) -> Site:
    """Return the profile of a file, by default of its name; for None the default profile.

    Raises ConfigError for a file that cannot be used; StoreError for a copy by submit that is
    damaged, or was changed.
    """
    if path is None:
        return Site()
    check_sealed(path)
    return validate(Site, {"name": path.stem} | read_file_of(path, "launcher"), str(path))


MORE_TO_DO = 85  # exit status of ranks that USR1 stopped and that wrote a checkpoint
SPARE = 1.5  # a job's time limit over the time that a study allows its batch
START_S = 60.0  # for the start of the job and its ranks
COLLECT_MIN = 15


@dataclass(frozen=True)
class BatchArray:
    """Batches of one shape, which run as one array.

    has_gpus: whether the ranks use GPUs; seats: how they are bound and distributed
    start: number of the batch whose element has the index first
    """

    nodes: int
    ppn: int
    has_gpus: bool
    seats: tuple[str, str]
    start: int
    batches: tuple[Batch, ...]
    first: int = 0

    @property
    def name(self) -> str:
        first = f"-from{self.start}" if self.start else ""
        seats = "".join(f"-{each}" for each in self.seats if each)
        return f"{self.nodes}x{self.ppn}{'-gpu' * self.has_gpus}{seats}{first}"

    @property
    def shape(self) -> str:
        """The request of each of its jobs, as text."""
        gpus = f", {self.ppn} GPU{'s' * (self.ppn > 1)} a node" if self.has_gpus else ""
        return f"{self.nodes} x {self.ppn} ranks{gpus}"

    @property
    def indices(self) -> str:
        """The indices of the elements, as text."""
        return ranges(map(self.index, self.batches))

    def index(self, batch: Batch) -> int:
        return batch.number - self.start + self.first


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, neighbours as ranges: 0-3,7."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [(found[0][1], found[-1][1]) for found in (list(run) for _, run in runs)]
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ends)


def arrays(batches: Iterable[Batch], site: Site) -> list[BatchArray]:
    """Return the arrays of batches: one per shape, more if an array cannot be that long."""
    longest = 1 if site.by.ARRAYS == "one" else site.max_array - site.by.FIRST

    def key(batch: Batch) -> tuple[int, int, bool, tuple[str, str], int]:
        start = batch.number // longest * longest
        return batch.nodes, batch.ppn, batch.has_gpus, batch.seats, start

    found = []
    for shape, group in groupby(sorted(batches, key=lambda each: (*key(each), each.number)), key):
        members = tuple(group)
        for run in runs(members) if site.by.ARRAYS == "run" else [members]:
            start = shape[4] if site.by.ARRAYS == "any" else run[0].number
            found.append(BatchArray(*shape[:4], start, run, site.by.FIRST))
    return found


def runs(batches: Iterable[Batch]) -> list[tuple[Batch, ...]]:
    """Return batches in runs of neighbouring numbers, from batches in order."""
    found = groupby(enumerate(batches), key=lambda pair: pair[1].number - pair[0])
    return [tuple(batch for _, batch in run) for _, run in found]


def array_script(array: BatchArray, site: Site, study: Study, folder: Path) -> str:
    """Return the script of an array of batches of a study.

    folder: of the study, as the job sees it
    """
    longest_s = max(batch.limit_s for batch in array.batches)
    programs = study.of_kind.starts_ranks
    if programs and site.container is not None:
        raise UserError(
            f"site {site.name}: container={site.container!r}: a study of programs starts their "
            "ranks by the launcher, which is outside: name the container in [command] argv"
        )
    whole = Counts(str(array.nodes * array.ppn), str(array.ppn), str(array.nodes))
    counts = Counts('"$ranks"', '"$ppn"', '"$nodes"') if programs else whole
    return script(
        site.by,
        "programs" if programs else "batch",
        **_of_job(site, array.nodes, array.ppn, array.has_gpus),
        **_of_ranks(site, counts, array.has_gpus, array.seats, programs),
        name=f"{study.name}-{array.name}",
        time_min=minutes(longest_s, site),
        study=study.name,
        folder=folder,
        logs=f"{folder / 'logs'}/",
        offset=array.start - array.first,
        array=array.indices,
        throttle=study.run.throttle,
        retries=study.run.retries,
        jobs=len(array.batches),
        cases=sum(len(batch.cases) for batch in array.batches),
    )


def collect_script(site: Site, study: str, folder: Path) -> str:
    """Return the script that collects; the jobs that it waits for are options of its submission."""
    return script(
        site.by,
        "collect",
        **(_of_job(site, 1, 1) | {"cpus": 1}),
        parallel=False,
        name=f"{study}-collect",
        array="",
        logs=f"{folder / 'logs'}/",
        time_min=COLLECT_MIN,
        study=study,
        folder=folder,
    )


def minutes(time_s: float, site: Site) -> int:
    """Return the time limit of a job, in minutes, for a batch that may take so many seconds."""
    wanted = math.ceil((SPARE * time_s + START_S + site.grace_s) / 60)
    return wanted if site.max_time_min is None else min(wanted, site.max_time_min)


def _of_job(site: Site, nodes: int, ppn: int, has_gpus: bool = False) -> dict[str, Any]:
    """Return what a job requests, for templates; has_gpus: a GPU for each rank."""
    gpus = ppn * has_gpus
    return {"site": site, "nodes": nodes, "ppn": ppn, "cpus": site.cpus_per_rank, "gpus": gpus}


def _of_ranks(
    site: Site,
    counts: Counts,
    has_gpus: bool = False,
    seats: tuple[str, str] = ("", ""),
    programs: bool = False,
) -> dict[str, Any]:
    """Return the words that start ranks and forward signals to them, for templates.

    programs: whether Python is one process, which starts ranks itself
    """
    way, flags, near_gpus = site.way, site.mpi_flags, site.gpus_per_node > 0
    signals = Launcher(way.command) if programs else way  # one process of the batch shell
    cores = site.cpus_per_rank
    return {
        "parallel": True,
        "launch": launch(way, counts, cores, flags, near_gpus, has_gpus, seats, part=programs),
        "program": way.program,
        "signal": signals.signal,
        "forward": signals.forward,
        "more_to_do": MORE_TO_DO,
    }


@dataclass(frozen=True)
class ScriptShape:
    """A script's request. shape: nodes and ranks per node, unless it is submitted with others."""

    shape: tuple[int, int]
    time_min: int


PROGRAMS = {  # name of the template and of the script: what it runs
    "train": ScriptShape((1, 2), 60),
    "allreduce_scaling": ScriptShape((2, 2), 60),
    "verify": ScriptShape((1, 2), 30),
}


def scripts(site: Site) -> dict[str, str]:
    """Return the texts of a site's scripts by file name; slurm/ has those of the default site."""
    title = "Open MPI, CPUs" if site == Site() else f"site {site.name}"
    counts = Counts('"$((nodes * ppn))"', '"$ppn"', '"$nodes"')
    ranks, none = _of_ranks(site, counts), {"array": "", "logs": "", "retries": 0}
    found = {}
    for name, program in PROGRAMS.items():
        file = f"{name}{site.by.SUFFIX}"
        texts = {"file": file, "title": title, "name": name, "time_min": program.time_min}
        job = _of_job(site, *program.shape)
        found[file] = script(site.by, name, **job, **ranks, **texts, **none)
    return found

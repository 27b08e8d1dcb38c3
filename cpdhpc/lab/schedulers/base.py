"""What the package asks of a cluster's scheduler, and how one answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...config import UserError

if TYPE_CHECKING:
    from jinja2 import Environment


class SchedulerError(UserError):
    """A scheduler is not there, does not answer, or refuses."""


class Refusal(SchedulerError):
    """A scheduler will never take a script as it is."""


class QueueFull(SchedulerError):
    """A scheduler takes no more jobs at present: of this user, or of all."""


class NoAnswer(SchedulerError):
    """A scheduler has not answered, and may have done what it was asked for."""


@dataclass(frozen=True)
class JobState:
    """What a scheduler says of a job or of an element of an array.

    name: of the job, by which it is known that a number is still that job's
    state: in the scheduler's words, but "PENDING" and "CANCELLED" mean the same for all
    exit_code: of the script; None where it has not ended or was killed
    reason: why it waits or what it ended of; "" for nothing
    live: whether it waits or runs
    """

    name: str
    state: str
    exit_code: int | None
    reason: str
    live: bool


States = dict[tuple[int, int | None], JobState]  # (job, index in its array) -> state


@dataclass(frozen=True)
class Taken:
    """A job of this user's that waits or runs. indices: of the elements that do, of an array."""

    number: int
    name: str
    indices: tuple[int, ...]


FIELDS = ("ranks", "ppn", "nodes", "cores")  # ppn: ranks of a node; cores: of a rank


@dataclass(frozen=True)
class Counts:
    """How many ranks start: in all, on a node, on how many nodes; words of the shell."""

    ranks: str
    ppn: str
    nodes: str


@dataclass(frozen=True)
class Launcher:
    """A way to start ranks.

    command: of the shell, with the fields of FIELDS; Slurm's own take the cores of a rank from the
        job, which may be submitted with others than its script has
    in_order: what places the ranks of a node on cores in their order, so that each is near its GPU
        where GPUs are numbered along the sockets
    signal: how the script asks Slurm for a signal before its time is over; "": for the script
    gpus: what gives each rank a GPU, where the launcher is to be told
    forward: how the script forwards the signal "$1" to the ranks
    part: what starts ranks on some of the job's nodes; "": nothing is needed
    bind, distribution: by names of lab.binding, the options that ask for it, and of "" what is
        there unless they ask; those of distribution are the field deal of a command that has it
    several: what stands for the bind of "" if a rank has more than one core
    """

    command: str
    in_order: str = ""
    signal: str = ""
    gpus: str = ""
    forward: str = 'kill -"$1" "$launched"'
    part: str = ""
    bind: Mapping[str, str] = field(default_factory=dict)
    distribution: Mapping[str, str] = field(default_factory=dict)
    several: str = ""

    def start(self, counts: Counts, cores: int, seats: tuple[str, str] = ("", "")) -> str:
        """Return the words that start ranks, and place them.

        cores: of a rank; seats: how ranks are bound and distributed; "": as it does by itself
        Raises UserError for what it has no option for.
        """
        bind, distribution = seats
        for name, given, known in (
            ("bind", bind, self.bind),
            ("distribution", distribution, self.distribution),
        ):
            if given and given not in known:
                raise UserError(f"{name} = {given!r}: {self.program} has no option known for it")
        numbers = vars(counts) | {"cores": cores}
        deal = self.distribution.get(distribution, "")
        placed = self.bind.get(bind, "")
        if cores > 1 and not bind:
            placed = self.several or placed
        form = self.command + ("" if "{deal}" in self.command else deal) + placed
        return form.format(**numbers, deal=deal.format(**numbers))

    @property
    def program(self) -> str:
        """What must be on PATH."""
        return self.command.split()[0]


Arrays = Literal["any", "run", "one"]


class Scheduler(Protocol):
    """What a module of this room has: a row of SCHEDULERS, in whose terms the rest is written.

    TITLE: its name in messages; SUFFIX: of the names of scripts; the template of that name has the
        words in which its scripts differ from others'
    LAUNCHERS: the ways to start ranks in its jobs; profiles have the first unless they name another
    ARRAYS: which indices the elements of an array may have: any; a run of neighbours, two at
        least; "one": there are no arrays
    FIRST: the smallest index; also that of the one element, if it has no array for that
    KEYS: of profiles, those that it has a word for, among partition, account, qos, constraint and
        reservation
    FACTS: variables of a job that are the same for jobs of one kind; records have them
    An element of an array writes its log to logs/NAME-JOB_INDEX.log in the study's folder.
    """

    TITLE: str
    SUFFIX: str
    LAUNCHERS: dict[str, Launcher]
    ARRAYS: Arrays
    FIRST: int
    KEYS: Collection[str]
    FACTS: Collection[str]

    def own_job(self) -> str:
        """Return the id of the job that this process is in, "" if it is in none."""

    def restarts(self) -> int:
        """Return how often that job was put into the queue again."""

    def shape(self, nodes: int, ppn: int) -> str:
        """Return in its words what a job is asked for by, to have so many ranks on each node."""

    def check_option(self, text: str) -> None:
        """Raise ValueError for what is no option of it, or one that scripts and submit see to."""

    def check_path(self, path: str) -> str:
        """Return why it would take a path for another one, "" if it does not."""

    def after(self, jobs: Iterable[int]) -> list[str]:
        """Return the options by which a job waits until others have ended, if any."""

    def test_only(self, script: Path) -> str:
        """Return what it says of a script: when and where it could start, or why not.

        What it refuses now it may take all the same. Raises NoAnswer, SchedulerError.
        """

    def submit(self, script: Path, options: Iterable[str] = ()) -> int:
        """Submit a script and return the number of its job.

        Raises QueueFull; NoAnswer, and taken tells then; Refusal.
        """

    def taken(self, scripts: Collection[Path]) -> list[Taken]:
        """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

        scripts: as they were handed to submit, absolute
        """

    def cancel(self, jobs: Iterable[int]) -> None:
        """Cancel jobs, arrays whole. Raises SchedulerError if it is not done."""

    def states(
        self, jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()
    ) -> States:
        """Return the states of jobs and of all elements of arrays, of those that are remembered.

        elements: those that are looked for
        Raises SchedulerError if it does not answer.
        """

    def mean_power_w(self, jobs: Collection[str]) -> dict[str, float]:
        """Return the mean power of ended jobs, of those whose energy it knows.

        jobs: ids, as own_job has them in the job
        """


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cpdhpc.lab.schedulers", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda text: quote(str(text))
    return environment


def script(scheduler: Scheduler, template: str, **values: Any) -> str:
    """Return the text of a scheduler's script; values: what the template needs."""
    by = _templates().get_template(f"{scheduler.SUFFIX[1:]}.j2").make_module(values)
    return _templates().get_template(f"{template}.j2").render(values, by=by)

"""The interface of schedulers: errors, states of jobs, scripts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...config import UserError
from .launchers import Launcher

if TYPE_CHECKING:
    from jinja2 import Environment


class SchedulerError(UserError):
    """A scheduler is missing, does not answer, or refuses a request."""


class Refusal(SchedulerError):
    """A scheduler will never take this script."""


class QueueFull(SchedulerError):
    """A scheduler takes no more jobs now, of this user or of any."""


class NoAnswer(SchedulerError):
    """A scheduler has not answered, and may have fulfilled the request."""


@dataclass(frozen=True)
class JobState:
    """The state of a job, or of an element of an array.

    name: of the job; if it differs, the number belongs to another job by now
    state: in the scheduler's words, except that all have "PENDING" and "CANCELLED"
    exit_code: of the script; None if it has not ended or was killed
    reason: why the job waits or ended, "" if that is unknown
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
    """A job of this user that waits or runs. indices: of the elements of an array that do."""

    number: int
    name: str
    indices: tuple[int, ...]


Arrays = Literal["any", "run", "one"]


class Scheduler(Protocol):
    """The names that each module of SCHEDULERS defines.

    TITLE: its name in messages; SUFFIX: of the names of scripts; the template of that name has
        the parts in which its scripts differ from others
    LAUNCHERS: the ways to start ranks in its jobs; the first is the default of site files
    ARRAYS: the indices that elements of an array may have: "any"; "run", neighbours, at least two;
        "one": there are no arrays
    FIRST: the smallest index, also of a job that is no array
    KEYS: those that it has an option for, among the keys partition, account, qos, constraint and
        reservation of site files
    FACTS: variables of a job's environment that records have
    CLUSTER: the one of them that names the cluster, "" if there is none
    An element of an array writes its log to logs/NAME-JOB_INDEX.log in the study's folder.
    """

    TITLE: str
    SUFFIX: str
    LAUNCHERS: dict[str, Launcher]
    ARRAYS: Arrays
    FIRST: int
    KEYS: Collection[str]
    FACTS: Collection[str]
    CLUSTER: str

    def own_job(self) -> str:
        """Return the id of the job that this process is in, "" if it is in none."""

    def restarts(self) -> int:
        """Return how often that job was put into the queue again."""

    def shape(self, nodes: int, ppn: int) -> str:
        """Return the options that request ppn ranks on each of some nodes."""

    def check_option(self, text: str) -> None:
        """Raise ValueError unless it is an option, and none that scripts or submit set."""

    def check_path(self, path: str) -> str:
        """Return why it would read a path as another one, "" if it does not."""

    def after(self, jobs: Iterable[int]) -> list[str]:
        """Return the options by which a job waits until others have ended, if any."""

    def test_only(self, script: Path) -> str:
        """Return its opinion of a script: when and where it could start, or why not.

        It may take the script in spite of a refusal here. Raises NoAnswer, SchedulerError.
        """

    def submit(self, script: Path, options: Iterable[str] = ()) -> int:
        """Submit a script and return the number of its job.

        Raises QueueFull, Refusal; NoAnswer, after which taken finds a job that was submitted.
        """

    def taken(self, scripts: Collection[Path]) -> list[Taken]:
        """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

        scripts: absolute paths, those of the calls of submit
        """

    def cancel(self, jobs: Iterable[int]) -> None:
        """Cancel jobs, with all elements of arrays. Raises SchedulerError if it fails."""

    def states(
        self, jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()
    ) -> States:
        """Return the states of jobs and of all elements of arrays that it remembers.

        elements: those that the caller needs
        Raises SchedulerError if it does not answer.
        """

    def mean_power_w(self, jobs: Collection[str]) -> dict[str, float]:
        """Return the mean power in W of those ended jobs whose energy it knows.

        jobs: ids, as own_job returns them in the job
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
    """Return the text of a scheduler's script; values: for the template."""
    by = _templates().get_template(f"{scheduler.SUFFIX[1:]}.j2").make_module(values)
    return _templates().get_template(f"{template}.j2").render(values, by=by)

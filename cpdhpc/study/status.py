"""Show how far a study is: every case is finished, running, pending, failed or missing."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from . import slurm
from .actions import folder_of
from .batch import batches
from .case import Case
from .folder import Folder
from .jobs import recorded
from .mark import JobAlive, Mark, read_mark, unknown
from .plan import console_of_width
from .queued import endings, with_slurm
from .spec import Study
from .sweep import expand

SUMMARY = "show which cases are finished, running, pending, failed or missing, and why"
STATES = ("finished", "running", "pending", "failed", "missing")


@dataclass(frozen=True)
class State:
    """Where a case stands: one of STATES, with a word on why."""

    case: Case
    batch: int
    state: str
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of status: none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the states of all cases."""
    study, folder = folder_of(arguments)
    jobs = recorded(folder)
    found = states(study, folder)
    if jobs:
        said = slurm.states(job.number for job in jobs)
        found = with_slurm(found, folder, jobs, said)
    console = console_of_width()
    console.print(table(found))
    counts = Counter(each.state for each in found)
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    for line in endings(found, folder, jobs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{study.name}: {len(found)} cases: {told}", markup=False, highlight=False)
    return 0


def states(study: Study, folder: Folder, job_alive: JobAlive = unknown) -> list[State]:
    """Return where every case stands, by its file and the mark of its batch.

    job_alive: whether a job of Slurm waits or runs
    """
    found = []
    for job in batches(study, expand(study).cases):
        mark = read_mark(folder.mark_file(job.number))
        alive = False if mark is None else mark.alive(job_alive)
        found += [State(case, job.number, *_state(folder, case, mark, alive)) for case in job.cases]
    return found


def _state(folder: Folder, case: Case, mark: Mark | None, alive: bool | None) -> tuple[str, str]:
    if folder.finished(case):
        return "finished", ""
    failure = folder.failure(case)
    if failure:
        return "failed", failure
    if mark is not None and alive is not False:
        doubt = "" if alive else ", or dead: not known here"
        return "running", f"since {mark.started} on {mark.host}{doubt}"
    if folder.case_file(case).exists():
        return "missing", f"{folder.case_file(case).name} is damaged or another case's"
    if mark is not None and mark.state == "running":
        return "failed", f"its batch, started {mark.started} on {mark.host}, died"
    return "missing", "" if mark is None else f"its batch {mark.state}"


def table(found: list[State]) -> Table:
    """Return the states as a table for the terminal."""
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("batch", justify="right")
    for heading in ("case", "state", "why"):
        result.add_column(heading, no_wrap=heading != "why")
    for each in found:
        result.add_row(str(each.batch), each.case.id, each.state, each.detail)
    return result

"""python -m cpdhpc study plan, render, freeze, status, resume."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..config import UserError, suggest
from .cases import Batch, Case, batches, case_time_s, expand, shown
from .factors import SHAPE
from .folder import (
    Folder,
    Job,
    JobAlive,
    Mark,
    add_common,
    folder_of,
    read_mark,
    recorded,
    study_of,
    unknown,
)
from .run_here import measure
from .slurm import queue
from .slurm.site import Site, add_site, load_site
from .slurm.submit import SITE, fitting, scripts, submit
from .spec import Study

TAIL = 12  # lines of a log
TAIL_BYTES = 4096


def newest(jobs: Iterable[Job]) -> dict[int, Job]:
    """Return the last job of each batch."""
    return {batch: job for job in jobs for batch in job.batches}


def with_slurm(
    found: list[State], folder: Folder, jobs: list[Job], states: queue.States
) -> list[State]:
    """Return where every case stands, for those that are not finished as their jobs stand."""
    last = newest(jobs)
    return [
        _refined(each, folder.failure(each.case), last[each.batch], states)
        if each.state != "finished" and each.batch in last
        else each
        for each in found
    ]


def _refined(each: State, failure: str, job: Job, states: queue.States) -> State:
    known = f"job {job.shown(each.batch)}"
    said = states.get((job.number, job.batches[each.batch]))
    if said is None or said.name != job.name:
        told = f": {each.detail}" if each.detail else ""
        return replace(each, state="failed", detail=f"{known}: Slurm has forgotten it{told}")
    reason = f" ({said.reason})" if said.reason else ""
    if said.state == "PENDING":
        return replace(each, state="pending", detail=known + reason)
    told = f": {failure}" if failure else ""
    if said.live:  # a batch begins without failures: one that is there is of this run
        state = "failed" if failure else "running"
        return replace(each, state=state, detail=f"{known} {said.state}{told}")
    code = "" if said.exit_code is None else f", exit code {said.exit_code}"
    return replace(each, state="failed", detail=f"{known} {said.state}{code}{reason}{told}")


def endings(found: list[State], folder: Folder, jobs: list[Job]) -> list[str]:
    """Return the last lines of the logs of jobs with failed cases."""
    last = newest(jobs)
    failed = dict.fromkeys(each.batch for each in found if each.state == "failed")
    lines = []
    for batch in failed:
        if batch in last:
            log = last[batch].log(folder, batch)
            lines += [f"{log}:", *(f"    | {line}" for line in tail(log))]
    return lines


def tail(path: Path) -> list[str]:
    """Return the last lines of a log that are not empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    return [line.rstrip() for line in text.splitlines() if line.strip()][-TAIL:]


WIDTH = 140  # columns of a table that goes to no terminal


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of plan."""
    add_common(parser)
    add_site(parser)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    study, folder = study_of(arguments)
    expansion = expand(study)
    site = load_site(arguments.site)
    every = [(job, site.refusal(job.nodes, job.ppn)) for job in batches(study, expansion.cases)]
    jobs = [job for job, why in every if why is None]  # numbered as they are on any site
    refused = [(case, why) for job, why in every if why is not None for case in job.cases]
    console = console_of_width()
    if jobs:
        console.print(plan_table(study, jobs))
    lines = [
        *totals(study, jobs),
        *refusals([*expansion.impossible, *refused]),
        f"folder: {folder.path}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def console_of_width() -> Console:
    """Return the console of stdout, of a fixed width where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(force_terminal=False, width=WIDTH)


def plan_table(study: Study, jobs: Sequence[Batch]) -> Table:
    """Return the cases, batch by batch, with the factors that vary."""
    cases = [case for job in jobs for case in job.cases]
    names = varying(cases)
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("batch", justify="right")
    result.add_column("case", no_wrap=True)
    for name in names:
        result.add_column(name, justify="right")
    result.add_column("at most\ns", justify="right")
    for job in jobs:
        for case in job.cases:
            cells = [shown_factor(study, case, name) for name in names]
            result.add_row(str(job.number), case.id, *cells, f"{case_time_s(study, case):.3g}")
    return result


def varying(cases: Sequence[Case]) -> list[str]:
    """Return the shape, and the factors that are not the same in all cases."""
    names = dict.fromkeys(name for case in cases for name in case.factors)
    several = [name for name in names if len({case.factors.get(name) for case in cases}) > 1]
    return ["nodes", "ppn", "ranks", *several]


def shown_factor(study: Study, case: Case, name: str) -> str:
    """Return a factor as it is shown, "" where the case has none."""
    value = case.all_factors.get(name)
    known = SHAPE | dict(study.of_kind.factors)
    return "" if value is None else shown(value, known[name].units)


def totals(study: Study, jobs: Sequence[Batch]) -> list[str]:
    """Return what the study takes in all."""
    cases = [case for job in jobs for case in job.cases]
    hours = sum(job.core_hours for job in jobs)
    longest_s = max((job.time_s for job in jobs), default=0.0)
    ranks = {case.ranks for case in cases}
    lines = [
        f"{study.name}: {study.scaling} scaling of {study.kind}: {len(cases)} cases in {len(jobs)} "
        f"batch(es), at most {hours:.3g} core hours (ranks x time), {longest_s:.0f} s a batch"
    ]
    if study.scaling != "throughput" and len(ranks) == 1:
        lines.append(f"{study.scaling} scaling, but all cases have {ranks.pop()} rank(s)")
    if cases and not any(study.of_kind.time_s(case.factors, case.ranks, 1) for case in cases):
        assumed = "run.case_time_s" if study.run.case_time_s else "a guess: set run.case_time_s"
        lines.append(f"time of a case: {assumed}")
    return lines


def refusals(impossible: Sequence[tuple[Case, str]]) -> list[str]:
    """Return how many cases are impossible, by reason."""
    reasons = Counter(reason for _, reason in impossible)
    return [f"impossible, {count} case(s): {reason}" for reason, count in reasons.items()]


STATES = ("finished", "running", "pending", "failed", "missing")


@dataclass(frozen=True)
class State:
    """Where a case stands: one of STATES, with a word on why."""

    case: Case
    batch: int
    state: str
    detail: str


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of status: none."""
    add_common(parser)


def run_status(arguments: argparse.Namespace) -> int:
    """Print the states of all cases."""
    study, folder = folder_of(arguments)
    jobs = recorded(folder)
    found = states(study, folder)
    if jobs:
        said = queue.states(job.number for job in jobs)
        found = with_slurm(found, folder, jobs, said)
    console = console_of_width()
    console.print(status_table(found))
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


def status_table(found: list[State]) -> Table:
    """Return the states as a table for the terminal."""
    result = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("batch", justify="right")
    for heading in ("case", "state", "why"):
        result.add_column(heading, no_wrap=heading != "why")
    for each in found:
        result.add_row(str(each.batch), each.case.id, each.state, each.detail)
    return result


def add_render(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of render."""
    add_common(parser)
    add_site(parser)
    parser.add_argument(
        "--script", metavar="NAME", help="print this one alone, as sbatch takes it: 2x4 or collect"
    )


def run_render(arguments: argparse.Namespace) -> int:
    """Print the scripts, each under its name, or the one that is asked for."""
    study, folder = study_of(arguments)
    print(render(study, folder, load_site(arguments.site), arguments.script), end="")
    return 0


def render(study: Study, folder: Folder, site: Site, only: str | None = None) -> str:
    """Return the scripts of a study as text; only: the name of one.

    Raises UserError where there is no such script, or the site has room for none.
    """
    todo, refused = fitting(batches(study, expand(study).cases), site)
    if not todo:
        raise UserError(f"render: nothing can be submitted: {refused[0][1]}")
    texts = {path.stem: text for path, text in scripts(study, folder, site, todo).items()}
    if only is None:
        return "\n".join(f"==> {name} <==\n{text}" for name, text in texts.items())
    if only not in texts:
        raise UserError(f"--script {only}: {suggest(only, texts)}")
    return texts[only]


def add_freeze(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of freeze: none."""
    add_common(parser)


def run_freeze(arguments: argparse.Namespace) -> int:
    """Make the folder, or check that it is this study's, and print its path."""
    study, folder = study_of(arguments)
    folder.freeze(study)
    print(folder.path)
    return 0


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of resume."""
    add_common(parser)
    add_site(parser)


def run_resume(arguments: argparse.Namespace) -> int:
    """Go on with a study; return 0 where all is finished or submitted, else 1, or 130.

    --site, or jobs of Slurm in the folder: submit, with the site of the last time by default
    """
    study, folder = folder_of(arguments)
    if arguments.site is None and not recorded(folder):
        return measure(study, folder)
    submit(study, folder, load_site(arguments.site or folder.path / SITE))
    return 0

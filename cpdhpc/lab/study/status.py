"""The states of a study's cases, by their files, the claims of batches, and jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ...ordinary import open_ordinary
from ..claim import Claim, JobAlive, read_claim, unknown
from ..schedulers.base import SchedulerError, States
from ..study_data import Case
from .cases import batches, expand
from .folder import EMPTY_LOG, Folder, SubmittedJob, recorded
from .site import Site
from .spec import Study
from .submit import SITE, fitting, kept_site

TAIL = 12  # lines of a log
TAIL_BYTES = 4096
NO_LOG = "is not there: it never started, or its node could not write here: other disk, no room"
STATES = ("finished", "running", "pending", "unsubmitted", "failed", "damaged", "missing")
LIVE = ("running", "pending")


@dataclass(frozen=True)
class CaseState:
    """The state of a case, one of STATES, and the reason."""

    case: Case
    batch: int
    state: str
    detail: str


@dataclass(frozen=True)
class Standing:
    """The state of a study.

    site: to which jobs were, or would be, submitted
    queue: "answers", "nothing submitted", or why the scheduler did not answer
    endings: the last lines of the logs of jobs with failed cases
    """

    cases: list[CaseState]
    site: Site
    queue: str = "nothing submitted"
    endings: list[str] = field(default_factory=list)

    @property
    def silent(self) -> bool:
        """Whether the scheduler has jobs of the study, and did not answer."""
        return self.queue not in ("answers", "nothing submitted")

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of cases by state."""
        return Counter(each.state for each in self.cases)

    @property
    def by_shape(self) -> dict[str, Counter[str]]:
        """Number of cases by state, by nodes x ppn."""
        found: dict[str, Counter[str]] = {}
        for each in self.cases:
            shape = f"{each.case.nodes} x {each.case.ppn}"
            found.setdefault(shape, Counter())[each.state] += 1
        return found

    @property
    def live(self) -> bool:
        """Whether a case waits or runs."""
        return any(self.counts[state] for state in LIVE)


def look(study: Study, folder: Folder) -> Standing:
    """Return the state of a study, by its files, and by the scheduler if that answers."""
    jobs, site = recorded(folder), kept_site(folder)
    found = states(study, folder)
    if jobs or (folder.path / SITE).exists():  # written before the first job is submitted
        found = with_submission(found, study, site, jobs)
    else:
        found = list(map(_of_this_machine, found))
    if not jobs:
        return Standing(found, site)
    queue, last = "answers", newest(jobs)
    open_ones = {each.batch for each in found if each.state != "finished"} & last.keys()
    places = [(last[batch].number, last[batch].batches[batch]) for batch in open_ones]
    try:
        known = site.by.states((job.number for job in jobs), places)
        found = with_jobs(found, folder, jobs, known, site.by.TITLE)
    except SchedulerError as error:
        queue = str(error)
    return Standing(found, site, queue, endings(found, folder, jobs))


def states(study: Study, folder: Folder, job_alive: JobAlive = unknown) -> list[CaseState]:
    """Return the state of every case, by its file and the claim of its batch.

    job_alive: whether a job waits or runs
    """
    found = []
    for job in batches(study, expand(study).cases):
        claim = read_claim(folder.claim_file(job.number))
        alive = False if claim is None else claim.alive(job_alive)
        found += [
            CaseState(case, job.number, *_state(folder, case, claim, alive)) for case in job.cases
        ]
    return found


def _state(folder: Folder, case: Case, claim: Claim | None, alive: bool | None) -> tuple[str, str]:
    if folder.finished(case):
        return "finished", ""
    failure = folder.failure(case)
    if failure:
        return "failed", failure
    if claim is not None and alive is not False:
        doubt = "" if alive else ", or dead: not known here"
        return "running", f"since {claim.started} on {claim.host}{doubt}"
    if folder.case_file(case).exists():
        name = folder.case_file(case).name
        return "damaged", f"{name} is damaged or another case's: {folder.remedy(case)}"
    if claim is not None and claim.state == "running":
        return "failed", f"its batch, started {claim.started} on {claim.host}, died"
    if claim is None:
        return "missing", ""
    # A batch that ended has finished or failed all of its cases: the file of this one was removed,
    # or it was not among them.
    no_file = "there is no file of it, though its batch has ended"
    return "missing", "its batch was stopped" if claim.state == "stopped" else no_file


def _of_this_machine(each: CaseState) -> CaseState:
    """Return the state of a case of no submission, with the reason if study run leaves it out."""
    if each.state != "missing" or each.detail or each.case.nodes == 1:
        return each
    why = f"needs {each.case.nodes} nodes, and study run has one: ppn is {each.case.ppn}"
    return replace(each, detail=f"{why}; study submit is for several")


def newest(jobs: Iterable[SubmittedJob]) -> dict[int, SubmittedJob]:
    return {batch: job for job in jobs for batch in job.batches}


def with_submission(
    found: list[CaseState], study: Study, site: Site, jobs: list[SubmittedJob]
) -> list[CaseState]:
    """Return states in which cases of no job are as the last submission left them."""
    every, last = batches(study, expand(study).cases), newest(jobs)
    refused = {batch.number: why for batch, why in fitting(every, site)[1]}
    shown = []
    for each in found:
        if each.state == "missing" and not each.detail and each.batch not in last:
            if why := refused.get(each.batch):
                each = replace(each, detail=f"left out: {why}")
            else:
                each = replace(each, state="unsubmitted", detail="study resume submits it")
        shown.append(each)
    return shown


def with_jobs(
    found: list[CaseState], folder: Folder, jobs: list[SubmittedJob], states: States, title: str
) -> list[CaseState]:
    """Return states in which unfinished cases have the state of their job."""
    last = newest(jobs)
    return [
        _refined(each, folder.failure(each.case), last[each.batch], states, title)
        if each.state != "finished" and each.batch in last
        else each
        for each in found
    ]


def _refined(
    each: CaseState, failure: str, job: SubmittedJob, states: States, title: str
) -> CaseState:
    known = f"job {job.shown(each.batch)}"
    job_state = states.get((job.number, job.batches[each.batch]))
    if job_state is None or job_state.name != job.name:
        if each.state == "damaged":
            return each
        why = f": {each.detail}" if each.detail else ""
        return replace(each, state="failed", detail=f"{known}: {title} has forgotten it{why}")
    reason = f" ({job_state.reason})" if job_state.reason else ""
    if job_state.state == "PENDING":
        return replace(each, state="pending", detail=known + reason)
    why = f": {failure}" if failure else ""
    if job_state.live:  # a batch begins without failures: one that is there is of this run
        state = "failed" if failure else "running"
        return replace(each, state=state, detail=f"{known} {job_state.state}{why}")
    if each.state == "damaged" and job_state.exit_code == 0:
        return each
    if each.state == "damaged" and not failure:
        why = f": {each.detail}"
    code = "" if job_state.exit_code is None else f", exit code {job_state.exit_code}"
    detail = f"{known} {job_state.state}{code}{reason}{why}"
    if job_state.state == "CANCELLED" and not failure:  # by study cancel, or scancel
        state = "damaged" if each.state == "damaged" else "missing"
        return replace(each, state=state, detail=f"{detail}: study resume submits it again")
    if job_state.exit_code == 0 and not failure:  # its file was removed
        return replace(each, state="missing", detail=f"{detail}, and there is no file")
    return replace(each, state="failed", detail=detail)


def endings(found: list[CaseState], folder: Folder, jobs: list[SubmittedJob]) -> list[str]:
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
        with open(path, "rb", opener=open_ordinary) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return [NO_LOG]
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    return [line.rstrip() for line in text.splitlines() if line.strip()][-TAIL:] or [EMPTY_LOG]

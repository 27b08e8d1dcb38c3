"""Jobs of a study under Slurm: submission, cancellation, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ... import store
from ...claim import Claim, JobAlive, alone, read_claim, unknown
from ...config import UserError
from ...study_data.factors import Case
from ...whole_files import sealed
from ..cases import Batch, batches, expand
from ..folder import LOCK, Folder, Job, record, recorded
from ..spec import Study
from . import queue
from .site import Array, Site, array_script, arrays, collect_script

SITE = "site.toml"  # in the folder: the profile of the last submit
Say = Callable[[str], None]


Refused = list[tuple[Batch, str]]


def fitting(every: Iterable[Batch], site: Site) -> tuple[list[Array], Refused]:
    """Return batches as arrays, and those too large for the site, each with the reason."""
    reasons = [(batch, site.refusal(batch.nodes, batch.ppn, batch.has_gpus)) for batch in every]
    fit = arrays((batch for batch, why in reasons if why is None), site)
    return fit, [(batch, why) for batch, why in reasons if why is not None]


def unfinished(study: Study, folder: Folder) -> list[Batch]:
    """Return the batches with cases that have no finished file."""
    # All batches are made, whatever the site has: a job finds its own by the number.
    return [
        batch
        for batch in batches(study, expand(study).cases)
        if not all(folder.finished(case) for case in batch.cases)
    ]


def queued(jobs: list[Job], states: queue.States) -> dict[int, int]:
    """Return the batches that wait or run, each with the number of its job."""
    return {
        batch: job.number
        for job in jobs
        for batch, index in job.batches.items()
        if (state := states.get((job.number, index))) and state.live and state.name == job.name
    }


def scripts(study: Study, folder: Folder, site: Site, todo: list[Array]) -> dict[Path, str]:
    """Return the scripts of arrays and then the collecting one, by the paths that they get."""
    found = {
        folder.scripts / f"{array.name}.sbatch": array_script(array, site, study, folder.path)
        for array in todo
    }
    return found | {
        folder.scripts / "collect.sbatch": collect_script(site, study.name, folder.path)
    }


def submit(study: Study, folder: Folder, site: Site, say: Say = print) -> list[Job]:
    """Submit all that is neither finished nor queued and return the new jobs.

    Slurm is asked first, for every shape, whether it would take the job.
    Raises UserError where it would not, or does not answer, or where another process submits the
    same study at this moment: then nothing is submitted.
    """
    folder.prepare(study)
    with alone(folder.path / LOCK, "study submit", say):
        return _submit_all(study, folder, site, say)


def _submit_all(study: Study, folder: Folder, site: Site, say: Say) -> list[Job]:
    jobs = recorded(folder)
    busy = queued(jobs, queue.states(job.number for job in jobs))
    lacking = unfinished(study, folder)
    todo, refused = fitting((each for each in lacking if each.number not in busy), site)
    _announce(lacking, busy, refused, say)
    if not todo:
        return []
    texts = scripts(study, folder, site, todo)
    _write(texts | {folder.path / SITE: sealed(site.toml())})
    for path in texts:
        say(f"{path}: {queue.test_only(path)}")
    *of_arrays, collecting = texts
    new: list[Job] = []
    for path, array in zip(of_arrays, todo, strict=True):
        before = {*busy.values()} if not new else {new[-1].number}
        new.append(_submit(folder, path, array, study, before))
        say(f"job {new[-1].number}: {array.shape}, elements {array.indices}")
    after = sorted({*busy.values(), *(job.number for job in new)})
    last = Job(queue.submit(collecting, after_any(after)), f"{study.name}-collect", {})
    record(folder, last)
    say(f"job {last.number}: collects when they have ended, however they end")
    return [*new, last]


def after_any(jobs: Iterable[int]) -> list[str]:
    """Return the options by which sbatch lets a job wait until others have ended, if any."""
    numbers = ":".join(map(str, sorted(jobs)))
    return [f"--dependency=afterany:{numbers}"] if numbers else []


def _submit(folder: Folder, script: Path, array: Array, study: Study, before: set[int]) -> Job:
    """Submit an array; with a throttle it waits for the one before, so that they do not add up."""
    number = queue.submit(script, after_any(before) if study.run.throttle else [])
    batches = {batch.number: batch.number - array.offset for batch in array.batches}
    job = Job(number, f"{study.name}-{array.name}", batches)
    record(folder, job)  # at once: were we killed now, this job would still be known
    return job


def _announce(lacking: list[Batch], busy: Collection[int], refused: Refused, say: Say) -> None:
    for batch, why in refused:
        say(f"left out: batch {batch.number}, {len(batch.cases)} case(s): {why}")
    if not lacking:
        say("all cases are finished: study collect gathers them")
    elif len(refused) == len(lacking):
        raise UserError(f"submit: nothing can be submitted: {refused[0][1]}")
    waiting = sum(batch.number in busy for batch in lacking)
    if waiting:
        say(f"in the queue already: {waiting} batch(es)")


def _write(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        store.put(path, text)


def cancel(folder: Folder, say: Say = print) -> None:
    """Cancel the jobs of a study that wait or run, the collecting one too, and no other's.

    Raises SlurmError where Slurm does not answer.
    """
    with alone(folder.path / LOCK, "study submit or cancel", say):
        jobs = recorded(folder)
        known = queue.states(job.number for job in jobs)
        names = {job.number: job.name for job in jobs}
        live = {
            number
            for (number, _), state in known.items()
            if state.live and state.name == names[number]
        }
        if not live:
            say(f"{folder.path}: no job of it waits or runs")
            return
        queue.cancel(sorted(live))
    for number in sorted(live):
        say(f"job {number}, {names[number]}: cancelled")


TAIL = 12  # lines of a log
TAIL_BYTES = 4096
STATES = ("finished", "running", "pending", "failed", "damaged", "missing")
LIVE = ("running", "pending")


@dataclass(frozen=True)
class State:
    """Where a case stands: one of STATES, with a word on why."""

    case: Case
    batch: int
    state: str
    detail: str


@dataclass(frozen=True)
class Standing:
    """Where a study stands.

    slurm: "answers", "nothing submitted", or why it has not said where jobs stand
    endings: the last lines of the logs of jobs with failed cases
    """

    cases: list[State]
    slurm: str = "nothing submitted"
    endings: list[str] = field(default_factory=list)

    @property
    def silent(self) -> bool:
        """Whether Slurm has jobs of the study, and has not said where they stand."""
        return self.slurm not in ("answers", "nothing submitted")

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
        """Whether something waits or runs."""
        return any(self.counts[state] for state in LIVE)


def look(study: Study, folder: Folder) -> Standing:
    """Return where a study stands, by its files and by Slurm as far as that answers."""
    jobs = recorded(folder)
    found = states(study, folder)
    if not jobs:
        return Standing(found)
    slurm = "answers"
    try:
        found = with_slurm(found, folder, jobs, queue.states(job.number for job in jobs))
    except queue.SlurmError as error:
        slurm = str(error)
    return Standing(found, slurm, endings(found, folder, jobs))


def states(study: Study, folder: Folder, job_alive: JobAlive = unknown) -> list[State]:
    """Return where every case stands, by its file and the claim of its batch.

    job_alive: whether a job of Slurm waits or runs
    """
    found = []
    for job in batches(study, expand(study).cases):
        claim = read_claim(folder.claim_file(job.number))
        alive = False if claim is None else claim.alive(job_alive)
        found += [
            State(case, job.number, *_state(folder, case, claim, alive)) for case in job.cases
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
        return "damaged", f"{name} is damaged or another case's: resume measures it again"
    if claim is not None and claim.state == "running":
        return "failed", f"its batch, started {claim.started} on {claim.host}, died"
    if claim is None:
        return "missing", ""
    # One that ended has finished or failed all of its cases: this one's file was removed, or it
    # was none of them.
    no_file = "there is no file of it, though its batch has ended"
    return "missing", "its batch was stopped" if claim.state == "stopped" else no_file


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
        if each.state == "damaged":
            return each
        told = f": {each.detail}" if each.detail else ""
        return replace(each, state="failed", detail=f"{known}: Slurm has forgotten it{told}")
    reason = f" ({said.reason})" if said.reason else ""
    if said.state == "PENDING":
        return replace(each, state="pending", detail=known + reason)
    told = f": {failure}" if failure else ""
    if said.live:  # a batch begins without failures: one that is there is of this run
        state = "failed" if failure else "running"
        return replace(each, state=state, detail=f"{known} {said.state}{told}")
    if each.state == "damaged" and said.exit_code == 0:
        return each
    if each.state == "damaged" and not failure:
        told = f": {each.detail}"
    code = "" if said.exit_code is None else f", exit code {said.exit_code}"
    detail = f"{known} {said.state}{code}{reason}{told}"
    if said.state == "CANCELLED" and not failure:  # by study cancel, or scancel
        state = "damaged" if each.state == "damaged" else "missing"
        return replace(each, state=state, detail=f"{detail}: study resume submits it again")
    if said.exit_code == 0 and not failure:  # its file was there, and is not any more
        return replace(each, state="missing", detail=f"{detail}, and there is no file")
    return replace(each, state="failed", detail=detail)


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

"""Jobs of a study: submission until the queue is full, cancellation, and more cases."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ... import store
from ...config import UserError
from ...whole_files import sealed
from ..claim import alone, read_claim
from ..schedulers.base import NoAnswer, QueueFull, Refusal, Scheduler, States
from .cases import Batch, batches, expand
from .folder import LOCK, Folder, FolderError, SubmittedJob, forget_jobs, record, recorded
from .site import BatchArray, Site, array_script, arrays, collect_script, load_site
from .spec import Study

COLLECT = "collect"  # name of a script
PAUSES_S = (2.0, 10.0, 30.0)  # before a submission without an answer is tried again
SITE = "site.toml"  # in the folder: the profile of the last submission
Say = Callable[[str], None]


def kept_site(folder: Folder) -> Site:
    """Return the profile of the last submission, or the default one if that is lost."""
    try:
        return load_site(folder.path / SITE)
    except UserError:
        return Site()


RefusedBatches = list[tuple[Batch, str]]


def fitting(every: Iterable[Batch], site: Site) -> tuple[list[BatchArray], RefusedBatches]:
    """Return batches as arrays, and those too large for the site, each with the reason."""
    reasons = [(batch, site.refusal(batch.nodes, batch.ppn, batch.has_gpus)) for batch in every]
    fit = arrays((batch for batch, why in reasons if why is None), site)
    return fit, [(batch, why) for batch, why in reasons if why is not None]


def unfinished(study: Study, folder: Folder) -> list[Batch]:
    """Return the batches with cases that have no finished file."""
    # All batches are made, for any site: a job finds its batch by the number.
    return [
        batch
        for batch in batches(study, expand(study).cases)
        if not all(folder.finished(case) for case in batch.cases)
    ]


def queued(jobs: list[SubmittedJob], states: States) -> dict[int, int]:
    """Return the batches that wait or run, each with the number of its job."""
    return {
        batch: job.number
        for job in jobs
        for batch, index in job.batches.items()
        if (state := states.get((job.number, index))) and state.live and state.name == job.name
    }


def alive(jobs: list[SubmittedJob], states: States) -> list[SubmittedJob]:
    """Return the jobs that wait or run, or of which an element does."""
    found = {(number, each.name) for (number, _), each in states.items() if each.live}
    return [job for job in jobs if (job.number, job.name) in found]


def script_file(folder: Folder, site: Site, name: str) -> Path:
    """Return the path of a script: name is that of an array, or COLLECT."""
    return folder.scripts / f"{name}{site.by.SUFFIX}"


def scripts(study: Study, folder: Folder, site: Site, todo: list[BatchArray]) -> dict[Path, str]:
    """Return the texts of the scripts of arrays, and of the collecting one, by their paths."""
    found = {
        script_file(folder, site, array.name): array_script(array, site, study, folder.path)
        for array in todo
    }
    last = script_file(folder, site, COLLECT)
    return found | {last: collect_script(site, study.name, folder.path)}


@dataclass(frozen=True)
class Submitted:
    """The result of a submission.

    jobs: the new ones; left: batches that can be submitted once there is room
    """

    jobs: list[SubmittedJob]
    left: list[Batch]


def submit(study: Study, folder: Folder, site: Site, say: Say = print) -> Submitted:
    """Submit all batches that are neither finished nor queued, until the queue is full.

    Scripts that the scheduler refuses are left out, and the others are submitted.
    Raises UserError if a script was refused, after all others are submitted; if the scheduler does
    not answer; if another process submits the same study now.
    """
    folder.prepare(study)
    with alone(folder.path / LOCK, "study submit", say):
        return _submit_all(study, folder, site, say)


def _submit_all(study: Study, folder: Folder, site: Site, say: Say) -> Submitted:
    jobs = recorded(folder)
    known = site.by.states(job.number for job in jobs)
    busy = queued(jobs, known)
    live = {job.number for job in alive(jobs, known)}
    for job in _adopt(folder, site.by, busy, say):
        jobs.append(job)
        live.add(job.number)
        busy |= dict.fromkeys(job.batches, job.number)
    lacking = unfinished(study, folder)
    todo, refused = fitting((each for each in lacking if each.number not in busy), site)
    _announce(lacking, busy, refused, say)
    collected = any(not job.batches and job.number in live for job in jobs)
    if not todo and (not busy or collected):
        return Submitted([], [])
    store.put(folder.path / SITE, sealed(site.toml()))
    submission = _Submission(study, folder, site, say)
    submission.arrays(todo, {*busy.values()})
    submission.collecting({*busy.values(), *(job.number for job in submission.new)})
    submission.conclude()
    return Submitted(submission.new, submission.left)


def _adopt(folder: Folder, by: Scheduler, busy: Mapping[int, int], say: Say) -> list[SubmittedJob]:
    """Record and return live jobs whose submitter died first, or got no answer.

    busy: batches that wait or run. A job of such batches alone was submitted twice: it is
    cancelled.
    """
    scripts = [path.resolve() for path in folder.scripts.glob(f"*{by.SUFFIX}")]
    if not scripts:  # nothing was ever submitted
        return []
    known, found = {job.number for job in recorded(folder)}, []
    for each in by.taken(scripts):
        if each.number in known:
            continue
        first = re.search(r"-from(\d+)$", each.name)
        offset = (int(first[1]) if first else 0) - by.FIRST
        job = SubmittedJob(
            each.number, each.name, {offset + index: index for index in each.indices}
        )
        if job.batches and job.batches.keys() <= busy.keys():
            by.cancel([job.number])
            say(f"job {job.number}, {job.name}: has gone in twice: cancelled")
            continue
        record(folder, job)
        say(f"job {job.number}, {job.name}: has gone in unrecorded: counts as submitted")
        found.append(job)
    return found


class _Submission:
    """A submission.

    new: submitted jobs; full: the scheduler's message, once there is no room; left: batches that
    then wait for room; refusals: its messages about scripts that it will never take
    """

    def __init__(self, study: Study, folder: Folder, site: Site, say: Say) -> None:
        self.study, self.folder, self.site, self.say = study, folder, site, say
        self.by = site.by
        self.new: list[SubmittedJob] = []
        self.left: list[Batch] = []
        self.refusals: list[str] = []
        self.full = ""

    def arrays(self, todo: list[BatchArray], queued: set[int]) -> None:
        """Submit arrays, until there is no room.

        queued: jobs of the study. With a throttle each array waits for those before it, because
        the scheduler's throttle holds within an array only.
        """
        throttle = self.study.run.throttle
        apart = max(throttle, 1) if self.by.ARRAYS == "one" else 1  # jobs of one element at a time
        for array in todo:
            before = {self.new[-apart].number} if len(self.new) >= apart else queued
            options = self.by.after(before) if throttle else []
            try:
                count = 0 if self.full else self._part(array, options)
            except Refusal as error:
                self.say(f"left out: {len(array.batches)} batch(es) of {array.shape}: {error}")
                self.refusals.append(str(error))
                continue
            self.left += array.batches[count:]

    def _part(self, array: BatchArray, options: list[str]) -> int:
        """Submit an array, or half of it, or a quarter, ...; return how many batches it has."""
        path = script_file(self.folder, self.site, array.name)
        count = len(array.batches)
        self._write(path, array_script(array, self.site, self.study, self.folder.path))
        while count:
            part = replace(array, batches=array.batches[:count])
            if self.full:
                store.put(path, array_script(part, self.site, self.study, self.folder.path))
            try:
                number = self._once(path, options)
            except QueueFull as error:
                self.full, count = str(error), count // 2
                continue
            batches = {batch.number: array.index(batch) for batch in part.batches}
            self._went_in(SubmittedJob(number, f"{self.study.name}-{array.name}", batches))
            self.say(f"job {number}: {array.shape}, elements {part.indices}")
            break
        return count

    def collecting(self, after: set[int]) -> None:
        """Submit the job that collects when others have ended, if there is room."""
        if not after:
            return
        path = script_file(self.folder, self.site, COLLECT)
        self._write(path, collect_script(self.site, self.study.name, self.folder.path))
        try:
            number = self._once(path, self.by.after(after))
        except QueueFull as error:
            self.say(f"nothing collects when they have ended: {error}: study collect does, later")
            return
        self._went_in(SubmittedJob(number, f"{self.study.name}-collect", {}))
        self.say(f"job {number}: collects when they have ended, however they end")

    def conclude(self) -> None:
        """Print which batches wait for room. Raises UserError if a script was refused."""
        if self.left:
            cases = sum(len(batch.cases) for batch in self.left)
            self.say(
                f"not submitted: {len(self.left)} batch(es), {cases} case(s): {self.full}\n"
                f"study resume {self.folder.path} submits them, as far as {self.by.TITLE} takes "
                "them then"
            )
        if self.refusals:
            raise UserError(
                f"submit: {self.refusals[0]}: {len(self.refusals)} script(s) are refused, and "
                f"{sum(bool(job.batches) for job in self.new)} submitted"
            )

    def _write(self, path: Path, text: str) -> None:
        """Write a script, and print the scheduler's opinion of it."""
        store.put(path, text)
        try:
            self.say(f"{path}: {self.by.test_only(path.resolve())}")
        except NoAnswer as error:
            self.say(f"{path}: {error}")

    def _went_in(self, job: SubmittedJob) -> None:
        record(self.folder, job)  # at once: if this process is killed now, the job is still known
        self.new.append(job)

    def _once(self, script: Path, options: list[str]) -> int:
        """Submit a script once, however slow the answer, and return the number of its job.

        Without an answer the queue is searched for the job; if it is not there, the script is
        submitted again. Raises as submit of the scheduler.
        """
        script, silent = script.resolve(), ""
        for pause_s in (*PAUSES_S, None):
            try:
                if silent and (number := self._taken(script)) is not None:
                    return number
                if pause_s is not None:
                    return self.by.submit(script, options)
            except NoAnswer as error:
                silent = str(error)
                if pause_s is not None:
                    self.say(f"{silent}: looks whether it went in, in {pause_s:g} s")
                    time.sleep(pause_s)
            except QueueFull:  # perhaps printed by a command that submitted the job after that
                if (number := self._taken(script)) is None:
                    raise
                return number
        raise NoAnswer(
            f"{silent}: study resume {self.folder.path} looks whether it went in, and submits what "
            "did not"
        )

    def _taken(self, script: Path) -> int | None:
        """Return the number of a live, unrecorded job of a script, None if there is none."""
        known = {job.number for job in recorded(self.folder)}
        new = (each.number for each in self.by.taken([script]) if each.number not in known)
        return next(new, None)


def _announce(
    lacking: list[Batch], busy: Collection[int], refused: RefusedBatches, say: Say
) -> None:
    for batch, why in refused:
        say(f"left out: batch {batch.number}, {len(batch.cases)} case(s): {why}")
    if not lacking:
        say("all cases are finished: study collect gathers them")
    elif len(refused) == len(lacking):
        raise UserError(f"submit: nothing can be submitted: {refused[0][1]}")
    waiting = sum(batch.number in busy for batch in lacking)
    if waiting:
        say(f"in the queue already: {waiting} batch(es)")


def cancel(folder: Folder, say: Say = print) -> None:
    """Cancel the jobs of a study that wait or run, the collecting one included.

    Raises SchedulerError if the scheduler does not answer.
    """
    by = kept_site(folder).by
    with alone(folder.path / LOCK, "study submit or cancel", say):
        _adopt(folder, by, {}, say)
        jobs = recorded(folder)
        names = {job.number: job.name for job in alive(jobs, by.states(job.number for job in jobs))}
        if not names:
            say(f"{folder.path}: no job of it waits or runs")
            return
        by.cancel(sorted(names))
    for number in sorted(names):
        say(f"job {number}, {names[number]}: cancelled")


def extend(study: Study, folder: Folder, say: Say = print) -> None:
    """Replace the study of a folder by one that has all of its cases, and more.

    Batches get new numbers, so no batch may wait or run, and the claims and the record of jobs are
    removed. Files of cases and of failures stay: an id means the same case.
    Raises FolderError if a case of the folder is not in the study, or a batch waits or runs.
    """
    folder.check_there()
    with alone(folder.path / LOCK, "study submit or extend", say):
        old = folder.study()
        before = expand(old).cases
        known = {case.id for case in before}
        after = expand(study).cases
        lost = known - {case.id for case in after}
        if lost:
            raise FolderError(
                f"{folder.path}: extend: {len(lost)} of its {len(known)} cases are not in the "
                f"study, as {min(lost)}: levels can be added, [measure] and [job] must stay"
            )
        _check_idle(folder, old)
        forget_jobs(folder)
        folder.freeze(study)
    new = len(after) - len(known)
    finished = sum(map(folder.finished, before))
    say(f"{folder.path}: {len(after)} cases, {new} of them new, {finished} finished: study resume")


def _check_idle(folder: Folder, study: Study) -> None:
    """Raise FolderError if a batch is measured, or a job waits or runs."""
    jobs = recorded(folder)
    for job in alive(jobs, kept_site(folder).by.states(job.number for job in jobs)):
        raise FolderError(
            f"{folder.path}: extend: job {job.number} waits or runs: wait, or study cancel"
        )
    for batch in batches(study, expand(study).cases):
        claim = read_claim(folder.claim_file(batch.number))
        if claim is not None and not jobs and claim.alive() is not False:
            raise FolderError(
                f"{folder.path}: extend: batch {batch.number} is being measured on {claim.host}"
            )

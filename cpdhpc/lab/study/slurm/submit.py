"""Jobs of a study under Slurm: submission, as far as the queue takes them, and cancellation."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .... import store
from ....config import UserError
from ....whole_files import sealed
from ...claim import alone
from ..cases import Batch, batches, expand
from ..folder import LOCK, Folder, Job, record, recorded
from ..spec import Study
from . import queue
from .site import Array, Site, array_script, arrays, collect_script

COLLECT = "collect.sbatch"
PAUSES_S = (2.0, 10.0, 30.0)  # before what Slurm has not answered is tried again
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


def script_file(folder: Folder, array: Array) -> Path:
    """Return where the script of an array goes."""
    return folder.scripts / f"{array.name}.sbatch"


def scripts(study: Study, folder: Folder, site: Site, todo: list[Array]) -> dict[Path, str]:
    """Return the scripts of arrays and then the collecting one, by the paths that they get."""
    found = {
        script_file(folder, array): array_script(array, site, study, folder.path) for array in todo
    }
    return found | {folder.scripts / COLLECT: collect_script(site, study.name, folder.path)}


@dataclass(frozen=True)
class Submitted:
    """What a submission came to.

    jobs: the new ones; left: batches that can be submitted once Slurm takes more jobs
    """

    jobs: list[Job]
    left: list[Batch]


def submit(study: Study, folder: Folder, site: Site, say: Say = print) -> Submitted:
    """Submit all that is neither finished nor queued, or as much of it as Slurm takes now.

    What Slurm refuses for good is left out, and the rest goes in.
    Raises UserError where something was refused, after all else is submitted; where Slurm does not
    answer; where another process submits the same study at this moment.
    """
    folder.prepare(study)
    with alone(folder.path / LOCK, "study submit", say):
        return _submit_all(study, folder, site, say)


def _submit_all(study: Study, folder: Folder, site: Site, say: Say) -> Submitted:
    jobs = recorded(folder)
    known = queue.states(job.number for job in jobs)
    busy = queued(jobs, known)
    live = {number for (number, _), state in known.items() if state.live}
    for job in _adopt(folder, busy, say):
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
    under_way = _Submission(study, folder, site, say)
    under_way.arrays(todo, {*busy.values()})
    under_way.collecting({*busy.values(), *(job.number for job in under_way.new)})
    under_way.tell()
    return Submitted(under_way.new, under_way.left)


def _adopt(folder: Folder, busy: Mapping[int, int], say: Say) -> list[Job]:
    """Record and return live jobs that nobody lived to record, or whose sbatch got no answer.

    busy: batches that wait or run. A job of these alone went in twice: it is cancelled.
    """
    scripts = [path.resolve() for path in folder.scripts.glob("*.sbatch")]
    if not scripts:  # nothing was ever submitted
        return []
    known, found = {job.number for job in recorded(folder)}, []
    for each in queue.taken(scripts):
        if each.number in known:
            continue
        first = re.search(r"-from(\d+)$", each.name)
        offset = int(first[1]) if first else 0
        job = Job(each.number, each.name, {offset + index: index for index in each.indices})
        if job.batches and job.batches.keys() <= busy.keys():
            queue.cancel([job.number])
            say(f"job {job.number}, {job.name}: has gone in twice: cancelled")
            continue
        record(folder, job)
        say(f"job {job.number}, {job.name}: has gone in unrecorded: counts as submitted")
        found.append(job)
    return found


def after_any(jobs: Iterable[int]) -> list[str]:
    """Return the options by which sbatch lets a job wait until others have ended, if any."""
    numbers = ":".join(map(str, sorted(jobs)))
    return [f"--dependency=afterany:{numbers}"] if numbers else []


class _Submission:
    """A submission under way.

    new: jobs that have gone in; full: what Slurm says once it takes no more, and left: what then
    waits for room; refusals: of scripts that it will never take
    """

    def __init__(self, study: Study, folder: Folder, site: Site, say: Say) -> None:
        self.study, self.folder, self.site, self.say = study, folder, site, say
        self.new: list[Job] = []
        self.left: list[Batch] = []
        self.refusals: list[str] = []
        self.full = ""

    def arrays(self, todo: list[Array], queued: set[int]) -> None:
        """Submit arrays, until Slurm takes no more.

        queued: jobs of the study. With a throttle each array waits for those before, as the
        throttle holds within one alone.
        """
        for array in todo:
            before = {self.new[-1].number} if self.new else queued
            options = after_any(before) if self.study.run.throttle else []
            try:
                count = 0 if self.full else self._part(array, options)
            except queue.Refusal as error:
                self.say(f"left out: {len(array.batches)} batch(es) of {array.shape}: {error}")
                self.refusals.append(str(error))
                continue
            self.left += array.batches[count:]

    def _part(self, array: Array, options: list[str]) -> int:
        """Submit an array, or half of it, or a quarter, ...; return how many batches went in."""
        path, count = script_file(self.folder, array), len(array.batches)
        self._write(path, array_script(array, self.site, self.study, self.folder.path))
        while count:
            part = replace(array, batches=array.batches[:count])
            if self.full:
                store.put(path, array_script(part, self.site, self.study, self.folder.path))
            try:
                number = self._sbatch(path, options)
            except queue.QueueFull as error:
                self.full, count = str(error), count // 2
                continue
            batches = {batch.number: batch.number - array.offset for batch in part.batches}
            self._went_in(Job(number, f"{self.study.name}-{array.name}", batches))
            self.say(f"job {number}: {array.shape}, elements {part.indices}")
            break
        return count

    def collecting(self, after: set[int]) -> None:
        """Submit the job that collects after others, if there are any and Slurm takes it."""
        if not after:
            return
        path = self.folder.scripts / COLLECT
        self._write(path, collect_script(self.site, self.study.name, self.folder.path))
        try:
            number = self._sbatch(path, after_any(after))
        except queue.QueueFull as error:
            self.say(f"nothing collects when they have ended: {error}: study collect does, later")
            return
        self._went_in(Job(number, f"{self.study.name}-collect", {}))
        self.say(f"job {number}: collects when they have ended, however they end")

    def tell(self) -> None:
        """Say what waits for room. Raises UserError where something will never go in."""
        if self.left:
            cases = sum(len(batch.cases) for batch in self.left)
            self.say(
                f"not submitted: {len(self.left)} batch(es), {cases} case(s): {self.full}\n"
                f"study resume {self.folder.path} submits them, as far as Slurm takes them then"
            )
        if self.refusals:
            raise UserError(
                f"submit: {self.refusals[0]}: {len(self.refusals)} script(s) are refused, and "
                f"{sum(bool(job.batches) for job in self.new)} submitted"
            )

    def _write(self, path: Path, text: str) -> None:
        """Write a script, and say what Slurm thinks of it."""
        store.put(path, text)
        try:
            self.say(f"{path}: {queue.test_only(path.resolve())}")
        except queue.NoAnswer as error:
            self.say(f"{path}: {error}")

    def _went_in(self, job: Job) -> None:
        record(self.folder, job)  # at once: were we killed now, this job would still be known
        self.new.append(job)

    def _sbatch(self, script: Path, options: list[str]) -> int:
        """Submit a script and return the number of its job, once, however slow Slurm answers.

        Where there is no answer squeue tells whether the job went in; else it is tried again.
        Raises as queue.submit.
        """
        script, silent = script.resolve(), ""
        for pause_s in (*PAUSES_S, None):
            try:
                if silent and (number := self._taken(script)) is not None:
                    return number
                if pause_s is not None:
                    return queue.submit(script, options)
            except queue.NoAnswer as error:
                silent = str(error)
                if pause_s is not None:
                    self.say(f"{silent}: looks whether it went in, in {pause_s:g} s")
                    time.sleep(pause_s)
            except queue.QueueFull:  # said halfway perhaps, by one that went in after that
                if (number := self._taken(script)) is None:
                    raise
                return number
        raise queue.NoAnswer(
            f"{silent}: study resume {self.folder.path} looks whether it went in, and submits what "
            "did not"
        )

    def _taken(self, script: Path) -> int | None:
        """Return the number of a live job of a script that is not recorded; None: there is none."""
        known = {job.number for job in recorded(self.folder)}
        new = (each.number for each in queue.taken([script]) if each.number not in known)
        return next(new, None)


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


def cancel(folder: Folder, say: Say = print) -> None:
    """Cancel the jobs of a study that wait or run, the collecting one too, and no other's.

    Raises SlurmError where Slurm does not answer.
    """
    with alone(folder.path / LOCK, "study submit or cancel", say):
        _adopt(folder, {}, say)
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

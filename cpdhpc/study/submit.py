"""Submit what a study lacks: one array per shape, then a job that collects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import store
from ..config import UserError
from . import slurm
from .batch import Batch, batches
from .folder import Folder, FolderError
from .jobs import Job, record, recorded
from .script import Array, array_script, arrays, collect_script
from .site import Site
from .spec import Study
from .sweep import expand

Say = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What is to be submitted, and what is not.

    arrays: of batches with cases that have no finished file and no job
    queued: numbers of batches that wait or run
    refused: batches too large for the site, each with the reason
    """

    arrays: list[Array]
    queued: frozenset[int]
    refused: list[tuple[Batch, str]]


def work(study: Study, folder: Folder, site: Site, queued: frozenset[int]) -> Work:
    """Return what there is to do for a study whose batches of these numbers are in the queue."""
    # All batches are made, whatever the site has: a job finds its own by the number.
    lacking = [
        batch
        for batch in batches(study, expand(study).cases)
        if not all(folder.finished(case) for case in batch.cases)
    ]
    refused = [(b, why) for b in lacking if (why := site.refusal(b.nodes, b.ppn)) is not None]
    without = queued | {batch.number for batch, _ in refused}
    todo = [batch for batch in lacking if batch.number not in without]
    return Work(arrays(todo, site), queued, refused)


def queued(jobs: list[Job], states: slurm.States) -> dict[int, int]:
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
    Raises UserError where it would not, or does not answer: then nothing is submitted.
    """
    jobs = recorded(folder)
    busy = queued(jobs, slurm.states(job.number for job in jobs))
    todo = work(study, folder, site, frozenset(busy))
    _announce(todo, say)
    if not todo.arrays:
        return []
    folder.freeze(study)
    texts = scripts(study, folder, site, todo.arrays)
    _write(texts)
    for path in texts:
        say(f"{path}: {slurm.test_only(path)}")
    *of_arrays, collecting = texts
    new = [
        _submit(folder, path, array, study.name)
        for path, array in zip(of_arrays, todo.arrays, strict=True)
    ]
    for job, array in zip(new, todo.arrays, strict=True):
        say(f"job {job.number}: {array.nodes} x {array.ppn} ranks, {len(array.batches)} elements")
    after = sorted({*busy.values(), *(job.number for job in new)})
    options = [f"--dependency=afterany:{':'.join(map(str, after))}"]
    last = Job(slurm.submit(collecting, options), f"{study.name}-collect", {})
    record(folder, last)
    say(f"job {last.number}: collects when they have ended, however they end")
    return [*new, last]


def _submit(folder: Folder, script: Path, array: Array, study: str) -> Job:
    number = slurm.submit(script)
    batches = {batch.number: batch.number - array.offset for batch in array.batches}
    job = Job(number, f"{study}-{array.name}", batches)
    record(folder, job)  # at once: were we killed now, this job would still be known
    return job


def _announce(todo: Work, say: Say) -> None:
    for batch, why in todo.refused:
        say(f"left out: batch {batch.number}, {len(batch.cases)} cases: {why}")
    if todo.queued:
        say(f"in the queue already: {len(todo.queued)} batches")
    if todo.arrays:
        return
    if todo.refused and not todo.queued:
        raise UserError("nothing can be submitted: " + todo.refused[0][1])
    if not todo.queued:
        say("all cases are finished: study collect gathers them")


def _write(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        try:
            with store.replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            raise FolderError(f"{path}: cannot be written: {error.strerror}") from None

"""Submit to Slurm what a study lacks: one array per shape, then a job that collects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ... import store
from ...claim import alone
from ...config import UserError
from ..cases import Batch, batches, expand
from ..folder import (
    LOCK,
    Folder,
    Job,
    record,
    recorded,
)
from ..spec import Study
from . import queue
from .site import Array, Site, array_script, arrays, collect_script

SITE = "site.toml"  # in the folder: the profile of the last submit
Say = Callable[[str], None]


Refused = list[tuple[Batch, str]]


def fitting(every: Iterable[Batch], site: Site) -> tuple[list[Array], Refused]:
    """Return batches as arrays, and those too large for the site, each with the reason."""
    reasons = [(batch, site.refusal(batch.nodes, batch.ppn)) for batch in every]
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
    _write(texts | {folder.path / SITE: site.toml()})
    for path in texts:
        say(f"{path}: {queue.test_only(path)}")
    *of_arrays, collecting = texts
    new: list[Job] = []
    for path, array in zip(of_arrays, todo, strict=True):
        before = {*busy.values()} if not new else {new[-1].number}
        new.append(_submit(folder, path, array, study, before))
        shape = f"{array.nodes} x {array.ppn} ranks"
        say(f"job {new[-1].number}: {shape}, elements {array.indices}")
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

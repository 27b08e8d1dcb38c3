"""More levels for a study that has a folder: what is finished stays and counts."""

from __future__ import annotations

from collections.abc import Callable

from .. import store
from ..claim import alone, read_claim
from .cases import batches, expand
from .folder import LOCK, Folder, FolderError, forget_jobs, recorded
from .slurm import queue
from .spec import Study


def extend(study: Study, folder: Folder, say: Callable[[str], None] = print) -> None:
    """Give a folder a study that has all of its cases, and more.

    Batches are numbered anew, so nothing may wait or run: the claims and the record of jobs are of
    the old numbers and go. Files of cases and of failures stay: an id means the same case.
    Raises FolderError where a case of the folder is not in the study, or something is under way.
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
        store.put(folder.study_toml, study.toml())
    new = len(after) - len(known)
    finished = sum(map(folder.finished, before))
    say(f"{folder.path}: {len(after)} cases, {new} of them new, {finished} finished: study resume")


def _check_idle(folder: Folder, study: Study) -> None:
    """Raise FolderError where a batch is measured, or a job waits or runs."""
    jobs = recorded(folder)
    known = queue.states(job.number for job in jobs)
    for job in jobs:
        own = (at for (number, _), at in known.items() if number == job.number)
        if any(at.live and at.name == job.name for at in own):
            raise FolderError(
                f"{folder.path}: extend: job {job.number} waits or runs: wait, or study cancel"
            )
    for batch in batches(study, expand(study).cases):
        claim = read_claim(folder.claim_file(batch.number))
        if claim is not None and not jobs and claim.alive() is not False:
            raise FolderError(
                f"{folder.path}: extend: batch {batch.number} is being measured on {claim.host}"
            )

"""What Slurm says of the jobs of a study, laid over what its files say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import slurm
from .folder import Folder
from .jobs import Job

if TYPE_CHECKING:
    from .status import State

TAIL = 12  # lines of a log
TAIL_BYTES = 4096


def newest(jobs: Iterable[Job]) -> dict[int, Job]:
    """Return the last job of each batch."""
    return {batch: job for job in jobs for batch in job.batches}


def with_slurm(
    found: list[State], folder: Folder, jobs: list[Job], states: slurm.States
) -> list[State]:
    """Return where every case stands, for those that are not finished as their jobs stand."""
    last = newest(jobs)
    return [
        _refined(each, folder.failure(each.case), last[each.batch], states)
        if each.state != "finished" and each.batch in last
        else each
        for each in found
    ]


def _refined(each: State, failure: str, job: Job, states: slurm.States) -> State:
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

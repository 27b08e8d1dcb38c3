"""How far a study is: what its files say, and for the rest what Slurm says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import slurm
from .batch import Batch, batches
from .case import Case
from .folder import Folder
from .jobs import Job, recorded
from .spec import Study
from .sweep import expand

STATES = ("finished", "running", "pending", "failed", "missing")  # in the order of the list
TAIL = 5  # lines of a log
TAIL_BYTES = 4096


@dataclass(frozen=True)
class Progress:
    """A case and how far it is. state: of STATES; detail: of its job; log: where it printed to."""

    case: Case
    state: str
    detail: str = ""
    log: Path | None = None


def progress(
    folder: Folder, all_batches: Iterable[Batch], jobs: list[Job], states: slurm.States
) -> list[Progress]:
    """Return how far each case is, in the order of the batches."""
    newest = {batch: job for job in jobs for batch in job.batches}
    return [
        _progress(folder, case, batch.number, newest.get(batch.number), states)
        for batch in all_batches
        for case in batch.cases
    ]


def _progress(
    folder: Folder, case: Case, batch: int, job: Job | None, states: slurm.States
) -> Progress:
    if folder.finished(case):
        return Progress(case, "finished")
    if job is None:
        return Progress(case, "missing")
    said = states.get((job.number, job.batches[batch]))
    known = f"job {job.shown(batch)}"
    log = job.log(folder, batch)
    if said is None or said.name != job.name:
        return Progress(case, "failed", f"{known}: Slurm has forgotten it", log)
    reason = f" ({said.reason})" if said.reason else ""
    if said.state == "PENDING":
        return Progress(case, "pending", known + reason)
    if said.live:
        return Progress(case, "running", f"{known} {said.state}", log)
    code = "" if said.exit_code is None else f", exit code {said.exit_code}"
    return Progress(case, "failed", f"{known} {said.state}{code}{reason}", log)


def status(study: Study, folder: Folder) -> list[Progress]:
    """Return how far a study is; Slurm is asked where jobs were submitted.

    Raises UserError where a file cannot be read, or Slurm does not answer.
    """
    jobs = recorded(folder)
    states = slurm.states(job.number for job in jobs) if jobs else {}
    return progress(folder, batches(study, expand(study).cases), jobs, states)


def lines(study: str, found: list[Progress]) -> list[str]:
    """Return a status as text: counts, what is not finished, the ends of failures' logs."""
    counts = Counter(each.state for each in found)
    told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    shown = [f"study {study}: {len(found)} cases: {told}"]
    for state in STATES[1:]:
        for each in found:
            if each.state == state:
                shown.append(f"{state:8} {each.case.id} {each.detail}".rstrip())
                shown += _ending(each) if state == "failed" else []
    return shown


def _ending(failed: Progress) -> list[str]:
    if failed.log is None:
        return []
    return [f"    {failed.log}:", *(f"    | {line}" for line in tail(failed.log))]


def tail(path: Path) -> list[str]:
    """Return the last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    return [line.rstrip() for line in text.splitlines() if line.strip()][-TAIL:]

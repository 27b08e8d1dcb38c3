"""Slurm's commands: the only place that calls them, each with a time-out."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config import UserError

TIMEOUT_S = 60.0
LIVE = frozenset(  # states after which a job goes on
    "PENDING CONFIGURING RUNNING COMPLETING SUSPENDED STOPPED REQUEUED REQUEUE_HOLD REQUEUE_FED "
    "RESIZING SIGNALING STAGE_OUT SPECIAL_EXIT RESV_DEL_HOLD".split()
)
FIELDS = {"ArrayJobID": 20, "ArrayTaskID": 20, "State": 20, "exit_code": 12, "Reason": 80}


class SlurmError(UserError):
    """Slurm is not there, does not answer, or refuses."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job or of an element of an array.

    exit_code: of the script; None where it has not ended or was killed
    reason: why it waits or what it ended of; "" for nothing
    """

    state: str
    exit_code: int | None
    reason: str

    @property
    def live(self) -> bool:
        """Whether it waits or runs."""
        return self.state in LIVE


States = dict[tuple[int, int | None], JobState]  # (job, index in its array) -> state


def test_only(script: Path) -> str:
    """Return what sbatch --test-only says of a script: when and where it could start.

    Raises SlurmError where Slurm refuses it.
    """
    done = _call(["sbatch", "--test-only", str(script)])
    said = _said(done)
    if done.returncode:
        raise SlurmError(f"{script}: sbatch --test-only refuses it: {said}")
    return said


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job. Raises SlurmError."""
    done = _call(["sbatch", "--parsable", *options, str(script)])
    found = re.match(r"(\d+)", done.stdout)  # "12" or "12;cluster"
    if done.returncode or found is None:
        raise SlurmError(f"{script}: sbatch refuses it: {_said(done)}")
    return int(found[1])


def states(jobs: Iterable[int]) -> States:
    """Return the states of jobs and of all elements of arrays, of those that Slurm remembers.

    squeue first, which needs no accounting; sacct for what squeue has forgotten, if it answers.
    Raises SlurmError where squeue does not answer.
    """
    wanted = set(jobs)
    found: States = {}
    for job in sorted(wanted):  # one by one: one that is forgotten is an error of all
        found |= _queued(job)
    forgotten = wanted - {job for job, _ in found}
    return found | (_accounted(forgotten) if forgotten else {})


def _queued(job: int) -> States:
    form = ",".join(f"{name}:{width}" for name, width in FIELDS.items())
    options = ["--array", "--states=all", "--noheader", f"--jobs={job}", f"--Format={form}"]
    done = _call(["squeue", *options])
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return {}
        raise SlurmError(f"squeue does not answer: {_said(done)}")
    return dict(_row(line) for line in done.stdout.splitlines() if line.strip())


def _row(line: str) -> tuple[tuple[int, int | None], JobState]:
    cells, start = [], 0
    for width in FIELDS.values():
        cells.append(line[start : start + width].strip())
        start += width
    job, index, state, status, reason = cells
    waited = int(status)  # as waitpid has it
    ended = state not in LIVE and not waited & 0x7F
    return (int(job), int(index) if index.isdigit() else None), JobState(
        state, waited >> 8 if ended else None, "" if reason == "None" else reason
    )


def _accounted(jobs: set[int]) -> States:
    numbers = ",".join(map(str, sorted(jobs)))
    form = "--format=JobID%40,State%40,ExitCode"
    try:
        done = _call(["sacct", "--allocations", "--noheader", "--array", f"--jobs={numbers}", form])
    except SlurmError:
        return {}  # it is one of two sources
    if done.returncode:  # 1 where accounting is switched off
        return {}
    found: States = {}
    for line in done.stdout.splitlines():
        cells = re.match(r"\s*(\d+)(?:_(\d+))?\s+(\w+).*?(\d+):(\d+)\s*$", line)
        if cells is None:
            continue
        index = None if cells[2] is None else int(cells[2])
        exit_code = int(cells[4]) if cells[3] not in LIVE and cells[5] == "0" else None
        found[int(cells[1]), index] = JobState(cells[3], exit_code, "")
    return found


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    plain = os.environ | {"LC_ALL": "C"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=plain
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on PATH: is this a login node of a cluster with Slurm? "
            "study run needs none"
        ) from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} has not answered in {TIMEOUT_S:g} s") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return "; ".join(lines) or f"it ends with status {done.returncode} and says nothing"

"""Slurm's commands: the only place that calls them, each with a time-out."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...config import UserError

TIMEOUT_S = 60.0
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
FIELDS = {  # of squeue, with the width of each column
    "ArrayJobID": 20,
    "ArrayTaskID": 20,
    "Name": 200,
    "State": 20,
    "exit_code": 12,
    "Reason": 80,
}


class SlurmError(UserError):
    """Slurm is not there, does not answer, or refuses."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job or of an element of an array.

    name: of the job, by which it is known that a number is still that job's
    exit_code: of the script; None where it has not ended or was killed
    reason: why it waits or what it ended of; "" for nothing
    """

    name: str
    state: str
    exit_code: int | None
    reason: str

    @property
    def live(self) -> bool:
        """Whether it waits or runs."""
        return self.state not in ENDED


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


def cancel(jobs: Iterable[int]) -> None:
    """Cancel jobs, arrays whole. Raises SlurmError where scancel does not do it."""
    done = _call(["scancel", *map(str, jobs)])
    if done.returncode:
        raise SlurmError(f"scancel refuses it: {_said(done)}")


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
    job, index, name, state, status, reason = cells
    waited = int(status)  # as waitpid has it
    ended = state in ENDED and not waited & 0x7F
    exit_code = waited >> 8 if ended else None
    reason = "" if reason == "None" else reason
    place = int(job), int(index) if index.isdigit() else None
    return place, JobState(name, state, exit_code, reason)


def _accounted(jobs: set[int]) -> States:
    options = [
        f"--jobs={','.join(map(str, sorted(jobs)))}",
        "--format=JobID,JobName,State,ExitCode",
    ]
    flags = ["--allocations", "--noheader", "--array", "--parsable2"]
    try:
        done = _call(["sacct", *flags, *options])
    except SlurmError:
        return {}  # squeue has answered; this is a second source
    if done.returncode:  # 1 where accounting is switched off
        return {}
    return dict(filter(None, map(_accounted_row, done.stdout.splitlines())))


def _accounted_row(line: str) -> tuple[tuple[int, int | None], JobState] | None:
    job, name, said, status = line.split("|")
    place = re.fullmatch(r"(\d+)(?:_(\d+))?", job)
    if place is None:  # elements that wait, as one line; squeue has them
        return None
    state = said.split()[0]  # "CANCELLED by 1000"
    code, _, number = status.partition(":")
    exit_code = int(code) if state in ENDED and number == "0" else None
    index = None if place[2] is None else int(place[2])
    return (int(place[1]), index), JobState(name, state, exit_code, "")


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

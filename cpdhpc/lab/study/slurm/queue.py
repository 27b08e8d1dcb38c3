"""Slurm's commands: the only place that calls them, each with a time-out."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ....config import UserError

TIMEOUT_S = 60.0
LOOK_S = 0.2  # between looks at what a command that runs has said
# sbatch itself asks a full queue 15 times in 2 min, and says so once it has been refused.
RETRIES = re.compile("sleeping and retrying|disabled, retrying")
RETRIES_S = 5.0
FULL = re.compile(
    f"{RETRIES.pattern}|SubmitJob|Resource temporarily unavailable|temporarily unable to accept"
)
# Older versions of Slurm do not name the limit: it may be of jobs, or of the size of one.
POLICY, OTHER_LIMIT = "accounting/QOS policy", re.compile(r"error: (Assoc|QOS)\w+")
UNSURE = re.compile(  # the request may have been read all the same
    "Socket timed out|Unable to contact|Zero Bytes were|standby mode|connection failure|"
    "Connection (reset|refused|timed out)",
    re.IGNORECASE,
)
LONGEST_ARRAY = "Invalid job array specification"
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


class Refusal(SlurmError):
    """Slurm will never take a script as it is."""


class QueueFull(SlurmError):
    """Slurm takes no more jobs at present: of this user, or of all."""


class NoAnswer(SlurmError):
    """Slurm has not answered, and may have done what it was asked for."""


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
    """Return what sbatch --test-only says of a script: when and where it could start, or why not.

    What it refuses sbatch may take all the same: a job whose nodes are drained waits for them.
    Raises NoAnswer, SlurmError where there is no sbatch.
    """
    done = _call(["sbatch", "--test-only", str(script)])
    said = _said(done)
    if done.returncode and UNSURE.search(said):
        raise NoAnswer(f"sbatch --test-only has no answer: {said}")
    return f"warning: --test-only refuses it as things are: {said}" if done.returncode else said


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job.

    Raises QueueFull; NoAnswer, and taken tells then; Refusal.
    """
    done = _call(["sbatch", "--parsable", *options, str(script)], until=RETRIES)
    found = re.match(r"(\d+)", done.stdout)  # "12" or "12;cluster"
    if not done.returncode and found is not None:
        return int(found[1])
    said = _said(done)
    if UNSURE.search(said):
        raise NoAnswer(f"{script}: sbatch has no answer: {said}")
    if FULL.search(said) or (POLICY in said and not OTHER_LIMIT.search(said)):
        raise QueueFull(f"{script}: sbatch takes no more: {said}")
    if LONGEST_ARRAY in said:
        said += ": max_array of the site profile should be Slurm's MaxArraySize (docs/sites.md)"
    raise Refusal(f"{script}: sbatch refuses it: {said}")


@dataclass(frozen=True)
class Taken:
    """A job of this user's that waits or runs. indices: of the elements that do, of an array."""

    number: int
    name: str
    indices: tuple[int, ...]


def taken(scripts: Collection[Path]) -> list[Taken]:
    """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

    scripts: as they were handed to sbatch, absolute
    """
    form = "--format=%F %K %j %o"  # the last is the script's path
    done = _call(["squeue", f"--user={os.getuid()}", "--array", "--noheader", form])
    if done.returncode:
        raise _no_answer(done)
    found: dict[tuple[int, str], list[int]] = {}
    for line in done.stdout.splitlines():
        job = re.fullmatch(r"(\d+) (\S+) (\S+) (.*)", line)
        if job is not None and Path(job[4]) in scripts:
            own = found.setdefault((int(job[1]), job[3]), [])
            own += [int(job[2])] if job[2].isdigit() else []
    return [Taken(number, name, tuple(own)) for (number, name), own in found.items()]


def cancel(jobs: Iterable[int]) -> None:
    """Cancel jobs, arrays whole. Raises SlurmError where scancel does not do it."""
    done = _call(["scancel", *map(str, jobs)])
    if done.returncode:
        raise SlurmError(f"scancel refuses it: {_said(done)}")


def states(jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()) -> States:
    """Return the states of jobs and of all elements of arrays, of those that Slurm remembers.

    squeue first, which needs no accounting; sacct for what squeue has forgotten, if it answers.
    elements: those that are looked for; squeue may have forgotten some of an array alone
    Raises SlurmError where squeue does not answer.
    """
    wanted = set(jobs)
    found: States = {}
    for job in sorted(wanted):  # one by one: one that is forgotten is an error of all
        found |= _queued(job)
    forgotten = wanted - {job for job, _ in found}
    forgotten |= {each[0] for each in elements if each not in found}
    return (_accounted(forgotten) if forgotten else {}) | found


def _queued(job: int) -> States:
    form = ",".join(f"{name}:{width}" for name, width in FIELDS.items())
    options = ["--array", "--states=all", "--noheader", f"--jobs={job}", f"--Format={form}"]
    done = _call(["squeue", *options])
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return {}
        raise _no_answer(done)
    return dict(_row(line) for line in done.stdout.splitlines() if line.strip())


def _no_answer(done: subprocess.CompletedProcess[str]) -> SlurmError:
    said = _said(done)
    return (NoAnswer if UNSURE.search(said) else SlurmError)(f"squeue does not answer: {said}")


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
    flags = ["--allocations", "--noheader", "--parsable2"]  # --array is new in Slurm 23
    try:
        done = _call(["sacct", *flags, *options])
    except SlurmError:
        return {}  # squeue has answered; this is a second source
    if done.returncode:  # 1 where accounting is switched off
        return {}
    return {k: v for line in done.stdout.splitlines() for k, v in _accounted_rows(line).items()}


def _accounted_rows(line: str) -> States:
    """Return the states that a line is of: "12", "12_3", or what never started, "12_[0-3,7%2]"."""
    job, name, said, status = line.split("|")
    number, _, indices = job.partition("_")
    state = said.split()[0]  # "CANCELLED by 1000"
    code, _, signal = status.partition(":")
    exit_code = int(code) if state in ENDED and signal == "0" else None
    found = JobState(name, state, exit_code, "")
    if not indices:
        return {(int(number), None): found}
    # A long list is cut off: "12_[1,3,5,...]"
    ranges = re.findall(r"(\d+)(?:-(\d+))?", indices.partition("%")[0])
    every = (i for first, last in ranges for i in range(int(first), int(last or first) + 1))
    return {(int(number), index): found for index in every}


def _call(
    command: list[str], until: re.Pattern[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or for RETRIES_S where it says what until matches.

    Raises NoAnswer after TIMEOUT_S, SlurmError where it cannot be run.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on PATH: is this a login node of a cluster with Slurm? "
            "study run needs none"
        ) from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be run: {error.strerror}") from None
    with process:
        try:
            return _ended(process, command, until)
        finally:
            process.kill()


def _ended(
    process: subprocess.Popen[bytes], command: list[str], until: re.Pattern[str] | None
) -> subprocess.CompletedProcess[str]:
    began_s = time.monotonic()
    while True:
        try:
            out, err = process.communicate(timeout=LOOK_S)
        except subprocess.TimeoutExpired as late:
            waited_s = time.monotonic() - began_s
            said = (late.stderr or b"").decode(errors="replace")
            if waited_s > RETRIES_S and until is not None and until.search(said):
                return subprocess.CompletedProcess(command, 1, "", said)
            if waited_s > TIMEOUT_S:
                raise NoAnswer(f"{command[0]} has not answered in {TIMEOUT_S:g} s") from None
            continue
        texts = (text.decode(errors="replace") for text in (out, err))
        return subprocess.CompletedProcess(command, process.returncode, *texts)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return "; ".join(lines) or f"it ends with status {done.returncode} and says nothing"

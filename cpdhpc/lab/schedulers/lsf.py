"""IBM Spectrum LSF: launchers, options and variables, and its commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

from .base import (
    Arrays,
    JobState,
    Launcher,
    NoAnswer,
    QueueFull,
    Refusal,
    SchedulerError,
    States,
    Taken,
)
from .calls import answer, call
from .launchers import hydra, open_mpi

TITLE, SUFFIX = "LSF", ".lsf"
ARRAYS: Arrays = "any"
FIRST = 1  # index 0 is that of a job that is no array
KEYS: Collection[str] = ("partition", "account", "qos", "constraint", "reservation")
LAUNCHERS = {
    "mpirun": open_mpi(' --hostfile "$LSB_DJOB_HOSTFILE"'),  # with or without LSF in it
    "mpiexec": hydra(' -f "$LSB_DJOB_HOSTFILE"'),
    "jsrun": Launcher(
        "jsrun -n {ranks} -r {ppn} -a 1 -c {cores}",
        gpus=" -g 1",
        bind={"none": " -b none", "core": " -b packed:{cores}"},
        distribution={"block": " -d packed"},
    ),
}
OWN = ("-J", "-n", "-W", "-o", "-oo", "-Q", "-w", "-I", "-K")  # what scripts and submit see to
FACTS: Collection[str] = ("LSB_QUEUE", "LSB_DJOB_NUMPROC", "LSF_VERSION")
FIELDS = "jobid jobindex job_name stat exit_code pend_reason exit_reason command"
UNSURE = re.compile("not responding|Cannot connect|timed out|is down|try later", re.IGNORECASE)
FULL = re.compile("limit .*(reached|exceeded)|[Tt]oo many|Pending job threshold", re.IGNORECASE)
LIVE = {"RUN", "USUSP", "SSUSP", "UNKWN", "WAIT", "PROV"}
WAITING = {"PEND", "PSUSP"}
BY_OWNER = re.compile("TERM_OWNER|TERM_ADMIN|TERM_FORCE_OWNER")


def own_job() -> str:
    """Return the id of the job that this process is in, "" if it is in none."""
    return os.environ.get("LSB_JOBID", "")


def restarts() -> int:
    """Return how often that job was put into the queue again: LSF says whether it was."""
    return int(os.environ.get("LSB_RESTART", "") == "Y")


def shape(nodes: int, ppn: int) -> str:
    """Return what a job is asked for by, to have so many ranks on each node."""
    return f'-n {nodes * ppn} -R "span[ptile={ppn}]"'


def check_option(text: str) -> None:
    """Raise ValueError for what is no option of bsub, or one of OWN."""
    if not text.startswith("-"):
        raise ValueError("should be an option of bsub, as '-N'")
    if text.split()[0] in OWN:
        raise ValueError(f"{text.split()[0]} is not for directives: the scripts see to it")


def check_path(path: str) -> str:
    """Return why it would take a path for another one: it has its own words in that of a log."""
    return f'has % or ", which {TITLE} takes otherwise' if set(path) & set('%"') else ""


def after(jobs: Iterable[int]) -> list[str]:
    """Return the options by which a job waits until others have ended, if any."""
    terms = " && ".join(f"ended({job})" for job in sorted(jobs))
    return ["-w", terms] if terms else []


def test_only(script: Path) -> str:
    """Return that nothing is known: bsub judges a script if it takes it."""
    return f"{TITLE} says what it thinks of it when it is submitted"


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job.

    bsub reads options from the script only if that is its input.
    Raises QueueFull; NoAnswer, and taken tells then; Refusal.
    """
    # The command of a job that is read from input is its text: the description has the path.
    described = ["-Jd", str(script)]
    done = call(TITLE, ["bsub", *described, *options], reads=script)
    found = re.search(r"Job <(\d+)> is submitted", done.stdout)
    if not done.returncode and found is not None:
        return int(found[1])
    said = answer(done)
    if UNSURE.search(said):
        raise NoAnswer(f"{script}: bsub has no answer: {said}")
    if FULL.search(said):
        raise QueueFull(f"{script}: bsub takes no more: {said}")
    raise Refusal(f"{script}: bsub refuses it: {said}")


def taken(scripts: Collection[Path]) -> list[Taken]:
    """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

    scripts: as they were handed to bsub, absolute
    """
    found: dict[tuple[int, str], list[int]] = {}
    paths = set(map(str, scripts))
    for row in _rows([], f"{FIELDS} job_description"):
        number, index = _place(row)
        state = _state(row)
        if state.live and row.get("JOB_DESCRIPTION") in paths:
            found.setdefault((number, state.name), []).extend([index] if index else [])
    return [Taken(number, name, tuple(own)) for (number, name), own in found.items()]


def cancel(jobs: Iterable[int]) -> None:
    """Cancel jobs, arrays whole. Raises SchedulerError where bkill does not do it."""
    done = call(TITLE, ["bkill", *map(str, jobs)])
    if done.returncode:
        raise SchedulerError(f"bkill refuses it: {answer(done)}")


def states(jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()) -> States:
    """Return the states of jobs and of all elements of arrays, of those that LSF remembers.

    That is for an hour or so after their end (CLEAN_PERIOD).
    """
    numbers = [str(job) for job in sorted(set(jobs))]
    rows = _rows(["-a", *numbers], FIELDS) if numbers else []
    return {
        (number, index or FIRST): _state(row) for row in rows for number, index in [_place(row)]
    }


def mean_power_w(jobs: Collection[str]) -> dict[str, float]:
    """Return the mean power of jobs: LSF knows of none."""
    return {}


def _rows(options: list[str], fields: str) -> list[dict[str, str]]:
    """Return what bjobs says, a table from the names of fields for each job."""
    done = call(TITLE, ["bjobs", "-json", "-o", fields, *options])
    if not done.stdout.strip():
        if done.returncode and "No " not in done.stderr and "not found" not in done.stderr:
            raise _no_answer(done)
        return []
    try:
        records = json.loads(done.stdout, strict=False)["RECORDS"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise _no_answer(done) from None
    return [row for row in records if "ERROR" not in row]  # "Job <12> is not found"


def _place(row: dict[str, str]) -> tuple[int, int]:
    """Return the number of a job and its index, 0 for none."""
    found = re.match(r"(\d+)(?:\[(\d+)\])?", row["JOBID"])
    if found is None:
        raise SchedulerError(f"bjobs: {row['JOBID']!r} is no id of a job")
    return int(found[1]), int(found[2] or row.get("JOBINDEX") or 0)


def _state(row: dict[str, str]) -> JobState:
    name = row["JOB_NAME"].partition("[")[0]
    said, code = row["STAT"], row.get("EXIT_CODE", "")
    live = said in LIVE or said in WAITING
    why = row.get("EXIT_REASON", "")
    exit_code = int(code) if code and int(code) < 128 else 0 if said == "DONE" else None
    state = "PENDING" if said in WAITING else said
    if said == "EXIT" and BY_OWNER.search(why):
        state, exit_code = "CANCELLED", None
    reason = row.get("PEND_REASON", "") if live else why
    return JobState(name, state, exit_code, reason.strip(), live)


def _no_answer(done: subprocess.CompletedProcess[str]) -> SchedulerError:
    said = answer(done)
    return (NoAnswer if UNSURE.search(said) else SchedulerError)(f"bjobs does not answer: {said}")

"""IBM Spectrum LSF: launchers, options and variables, and its commands."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from .base import Arrays, JobState, SchedulerError, States, Taken
from .calls import answer, call, no_answer, not_submitted
from .launchers import Launcher, hydra, open_mpi

TITLE, SUFFIX = "LSF", ".lsf"
ARRAYS: Arrays = "any"
FIRST = 1  # a job that is no array has index 0
KEYS: Collection[str] = ("partition", "account", "qos", "constraint", "reservation")
LAUNCHERS = {
    "mpirun": open_mpi(' --hostfile "$LSB_DJOB_HOSTFILE"'),  # with or without LSF in it
    "mpiexec": hydra(' -f "$LSB_DJOB_HOSTFILE"'),
    "jsrun": Launcher(
        "jsrun -n {ranks} -r {ppn} -a 1 -c {cores}",
        gpus=" -g 1",
        one_gpu=" -g 1",
        bind={"none": " -b none", "core": " -b packed:{cores}"},
        distribution={"block": " -d packed"},
    ),
}
OWN = ("-J", "-n", "-W", "-o", "-oo", "-Q", "-w", "-I", "-K")  # set by scripts and submit
CLUSTER = ""
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
    """Return 1 if that job was put into the queue again, else 0: LSF does not say how often."""
    return int(os.environ.get("LSB_RESTART", "") == "Y")


def shape(nodes: int, ppn: int) -> str:
    """Return the options that request ppn ranks on each of some nodes."""
    return f'-n {nodes * ppn} -R "span[ptile={ppn}]"'


def check_option(text: str) -> None:
    """Raise ValueError unless it is an option of bsub, and none that scripts or submit set."""
    if not text.startswith("-"):
        raise ValueError("should be an option of bsub, as '-N'")
    if text.split()[0] in OWN:
        raise ValueError(f"{text.split()[0]} is not for directives: the scripts see to it")


def check_path(path: str) -> str:
    """Return why LSF would read a path as another one: it replaces some signs in that of a log."""
    return f'has % or ", which {TITLE} takes otherwise' if set(path) & set('%"') else ""


def after(jobs: Iterable[int]) -> list[str]:
    """Return the options by which a job waits until others have ended, if any."""
    terms = " && ".join(f"ended({job})" for job in sorted(jobs))
    return ["-w", terms] if terms else []


def test_only(script: Path) -> str:
    """Return that LSF has no test: bsub checks a script when it is submitted."""
    return f"{TITLE} says what it thinks of it when it is submitted"


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job.

    bsub reads options from the script only if that is its input.
    Raises QueueFull, Refusal; NoAnswer, after which taken finds a job that was submitted.
    """
    # The job has no path of a script that comes from standard input: its description has it.
    described = ["-Jd", str(script)]
    done = call(TITLE, ["bsub", *described, *options], reads=script)
    found = re.search(r"Job <(\d+)> is submitted", done.stdout)
    if not done.returncode and found is not None:
        return int(found[1])
    raise not_submitted(script, "bsub", done, UNSURE, FULL)


def taken(scripts: Collection[Path]) -> list[Taken]:
    """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

    scripts: absolute paths, those of the calls of submit
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
    """Cancel jobs, with all elements of arrays. Raises SchedulerError if bkill fails."""
    done = call(TITLE, ["bkill", *map(str, jobs)])
    if done.returncode:
        raise SchedulerError(f"bkill refuses it: {answer(done)}")


def states(jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()) -> States:
    """Return the states of jobs and of all elements of arrays that LSF remembers.

    It remembers ended jobs for about an hour (CLEAN_PERIOD).
    """
    numbers = [str(job) for job in sorted(set(jobs))]
    rows = _rows(["-a", *numbers], FIELDS) if numbers else []
    return {
        (number, index or FIRST): _state(row) for row in rows for number, index in [_place(row)]
    }


def mean_power_w(jobs: Collection[str]) -> dict[str, float]:
    """Return {}: LSF does not know the energy of jobs."""
    return {}


def _rows(options: list[str], fields: str) -> list[dict[str, str]]:
    """Return the tables of bjobs, one for each job, by names of fields."""
    done = call(TITLE, ["bjobs", "-json", "-o", fields, *options])
    if not done.stdout.strip():
        if done.returncode and "No " not in done.stderr and "not found" not in done.stderr:
            raise no_answer("bjobs", done, UNSURE)
        return []
    try:
        records = json.loads(done.stdout, strict=False)["RECORDS"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise no_answer("bjobs", done, UNSURE) from None
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

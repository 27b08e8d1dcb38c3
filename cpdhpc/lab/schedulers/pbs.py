"""PBS Professional and OpenPBS: launchers, options and variables, and its commands."""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .base import Arrays, JobState, SchedulerError, States, Taken
from .calls import answer, call, no_answer, not_submitted
from .launchers import Launcher, hydra, open_mpi

TITLE, SUFFIX = "PBS", ".pbs"
ARRAYS: Arrays = "run"
FIRST = 0  # qsub -J takes a range of two elements at least
KEYS: Collection[str] = ("partition", "account", "constraint")  # a reservation is a queue
LAUNCHERS = {
    "mpirun": open_mpi(' --hostfile "$PBS_NODEFILE"'),  # with or without PBS in it
    "mpiexec": hydra(' -f "$PBS_NODEFILE"'),
    "pals": Launcher(  # Cray
        "mpiexec -n {ranks} --ppn {ppn} --depth {cores}",
        bind=dict.fromkeys(("", "core"), " --cpu-bind depth")
        | {each: f" --cpu-bind {each}" for each in ("none", "socket", "numa")},
    ),
}
OWN = ("-J", "-N", "-S", "-j", "-o", "-e", "-I", "-C", "-z")  # set by scripts and submit
CLUSTER = "PBS_SERVER"
FACTS: Collection[str] = ("PBS_QUEUE", "PBS_SERVER", "NCPUS")
UNKNOWN = re.compile(r"Unknown Job Id", re.IGNORECASE)
UNSURE = re.compile("cannot connect|Connection refused|timed out|Communication failure", re.I)
FULL = re.compile("would exceed|exceeds? .*limit on number of jobs|limit .*jobs", re.IGNORECASE)
STATES = {  # letter of a state: whether such a job waits or runs, and the name of the state
    "B": (True, "BEGUN"),
    "E": (True, "EXITING"),
    "F": (False, "FINISHED"),
    "H": (True, "PENDING"),
    "M": (False, "MOVED"),
    "Q": (True, "PENDING"),
    "R": (True, "RUNNING"),
    "S": (True, "SUSPENDED"),
    "T": (True, "PENDING"),
    "U": (True, "SUSPENDED"),
    "W": (True, "PENDING"),
    "X": (False, "FINISHED"),
}
TERMINATED = 91  # substate of a finished job that qdel ended


def own_job() -> str:
    """Return the id of the job that this process is in, "" if it is in none."""
    return os.environ.get("PBS_JOBID", "")


def restarts() -> int:
    """Return 0: PBS does not say how often that job was put into the queue again."""
    return 0


def shape(nodes: int, ppn: int) -> str:
    """Return the options that request ppn ranks on each of some nodes."""
    return f"-l select={nodes}:mpiprocs={ppn} -l place=scatter"


def check_option(text: str) -> None:
    """Raise ValueError unless it is an option of qsub, and none that scripts or submit set."""
    if not text.startswith("-"):
        raise ValueError("should be an option of qsub, as '-m e'")
    if text[:2] in OWN or re.match("-l *(select|place|walltime)", text):
        raise ValueError(f"{text.split()[0]} is not for directives: the scripts see to it")


def check_path(path: str) -> str:
    """Return "": PBS gets no path, so it reads none as another one."""
    return ""


def after(jobs: Iterable[int]) -> list[str]:
    """Return the options by which a job waits for those of other jobs that have not ended."""
    ids = sorted({_number(each)[1] for each in _asked(jobs, finished=False)})
    return ["-W", f"depend=afterany:{':'.join(ids)}"] if ids else []


def test_only(script: Path) -> str:
    """Return that PBS has no test: qsub checks a script when it is submitted."""
    return f"{TITLE} says what it thinks of it when it is submitted"


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job.

    Raises QueueFull, Refusal; NoAnswer, after which taken finds a job that was submitted.
    """
    done = call(TITLE, ["qsub", *options, str(script)])
    found = re.match(r"(\d+)", done.stdout)  # "12.server" or "12[].server"
    if not done.returncode and found is not None:
        return int(found[1])
    raise not_submitted(script, "qsub", done, UNSURE, FULL)


def taken(scripts: Collection[Path]) -> list[Taken]:
    """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

    scripts: absolute paths, those of the calls of submit
    """
    done = call(TITLE, ["qselect", "-u", getpass.getuser()])
    if done.returncode:
        raise no_answer("qselect", done, UNSURE)
    every = _jobs(done.stdout.split(), finished=False)
    found: dict[tuple[int, str], list[int]] = {}
    for at, job in every.items():
        given = str(job.get("Submit_arguments", "")).strip()
        own = any(given == str(path) or given.endswith(f" {path}") for path in scripts)
        number, whole, index = _number(at)
        if own and STATES[job["job_state"]][0]:
            indices = found.setdefault((number, job["Job_Name"]), [])
            indices += [] if whole.endswith("[]") and index is None else [index or FIRST]
    return [Taken(number, name, tuple(own)) for (number, name), own in found.items()]


def cancel(jobs: Iterable[int]) -> None:
    """Cancel jobs, with all elements of arrays. Raises SchedulerError if qdel fails."""
    ids = sorted({_number(each)[1] for each in _asked(jobs, finished=False)})
    if not ids:
        return
    done = call(TITLE, ["qdel", *ids])
    if done.returncode:
        raise SchedulerError(f"qdel refuses it: {answer(done)}")


def states(jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()) -> States:
    """Return the states of jobs and of all elements of arrays that PBS remembers.

    It remembers finished jobs if the server keeps a history (job_history_enable).
    """
    return {
        (number, FIRST if index is None else index): _state(job)
        for at, job in _asked(jobs, finished=True).items()
        for number, whole, index in [_number(at)]
        if index is not None or not whole.endswith("[]")
    }


def mean_power_w(jobs: Collection[str]) -> dict[str, float]:
    """Return {}: PBS does not know the energy of jobs."""
    return {}


def _state(job: dict[str, Any]) -> JobState:
    live, name = STATES[job["job_state"]]
    status = job.get("Exit_status")
    exit_code = None if live or status is None or not 0 <= int(status) < 128 else int(status)
    killed = int(job.get("substate", 0)) == TERMINATED and exit_code is None
    state = "CANCELLED" if killed else name
    return JobState(job["Job_Name"], state, exit_code, str(job.get("comment", "")), live)


def _number(at: str) -> tuple[int, str, int | None]:
    """Return the number, the id of the whole job, and the index in an id as "12[3].server"."""
    found = re.match(r"(\d+)(\[(\d*)\])?", at)
    if found is None:
        raise SchedulerError(f"qstat: {at!r} is no id of a job")
    return int(found[1]), found[1] + "[]" * bool(found[2]), int(found[3]) if found[3] else None


def _asked(jobs: Iterable[int], finished: bool) -> dict[str, dict[str, Any]]:
    """Return the tables of qstat for jobs, by their ids; each may be an array or not."""
    ids = [f"{job}{sign}" for job in sorted(set(jobs)) for sign in ("", "[]")]
    return _jobs(ids, finished)


def _jobs(ids: list[str], finished: bool) -> dict[str, dict[str, Any]]:
    if not ids:
        return {}
    done = call(TITLE, ["qstat", *["-x"] * finished, "-t", "-f", "-F", "json", *ids])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode and not (lines and all(map(_forgotten, lines))):
        raise no_answer("qstat", done, UNSURE)
    try:
        return dict(json.loads(done.stdout or "{}", strict=False).get("Jobs", {}))
    except json.JSONDecodeError as error:
        raise SchedulerError(f"qstat -F json: what it says is no JSON: {error}") from None


def _forgotten(line: str) -> bool:
    return bool(UNKNOWN.search(line)) or "has finished" in line

"""Flux: its launchers, options and variables, and its commands."""

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

TITLE, SUFFIX = "Flux", ".flux"
ARRAYS: Arrays = "one"
FIRST = 0
KEYS: Collection[str] = ("partition", "account", "constraint")
FACTS: Collection[str] = ()
LAUNCHERS = {
    # Flux runs them in the job's own instance, and forwards no signal of flux run but SIGTERM.
    "flux-run": Launcher(
        "flux run --ntasks={ranks} --nodes={nodes} --cores-per-task={cores}",
        gpus=" --gpus-per-task=1",
        forward='flux job killall --force --signal="$1"',
        bind={"none": " -o cpu-affinity=off", "core": " -o cpu-affinity=per-task"},
        distribution={"block": " --taskmap=block"},
    ),
    "mpirun": open_mpi(  # over ssh if there are several nodes
        ' --host "$(flux hostlist --expand --delimiter=:{ppn}, local)":{ppn}'
    ),
    "mpiexec": hydra(' -hosts "$(flux hostlist --expand --delimiter=, local)"'),
}
OWN = ("--job-name", "--nodes", "-N", "--nslots", "-n", "--output", "--error", "--time-limit", "-t")
SCRIPT = "cpdhpc_script"  # an attribute of each job that submit has handed over: its script's path
FORM = "{id.dec}\t{name}\t{state}\t{status}\t{returncode}\t{exception.type}\t{exception.note}"
WAITING = {"DEPEND", "PRIORITY", "SCHED"}
UNSURE = re.compile(
    "Connection (reset|refused|timed out)|broker.*(down|unavailable)", re.IGNORECASE
)
FULL = re.compile("max.*(jobs|active|running).*limit|limit.*(jobs|active)", re.IGNORECASE)
UNKNOWN = re.compile(r"(?i)unknown|not found|No such")


def own_job() -> str:
    """Return the id of the job that this process is in, "" if it is in none."""
    return os.environ.get("FLUX_ENCLOSING_ID", "") or os.environ.get("FLUX_JOB_ID", "")


def restarts() -> int:
    """Return how often that job was put into the queue again: it never is."""
    return 0


def shape(nodes: int, ppn: int) -> str:
    """Return what a job is asked for by, to have so many ranks on each node."""
    return f"--nodes={nodes} --nslots={nodes * ppn}"


def check_option(text: str) -> None:
    """Raise ValueError for what is no option of flux batch, or one of OWN."""
    if not text.startswith("-"):
        raise ValueError("should be an option of flux batch, as '--exclusive'")
    if re.split("[ =]", text)[0] in OWN:
        raise ValueError(f"{text.split()[0]} is not for directives: the scripts see to it")


def check_path(path: str) -> str:
    """Return why it would take a path for another one: it has tags in that of a log."""
    return f"has {{{{, which {TITLE} takes otherwise" if "{{" in path else ""


def after(jobs: Iterable[int]) -> list[str]:
    """Return the options by which a job waits until others have ended, if any."""
    return [f"--dependency=afterany:{job}" for job in sorted(jobs)]


def test_only(script: Path) -> str:
    """Return what flux batch --dry-run says: whether it understands the script's options."""
    done = call(TITLE, ["flux", "batch", "--dry-run", str(script)])
    if done.returncode:
        return f"warning: --dry-run refuses it as things are: {answer(done)}"
    return "flux batch --dry-run takes it"


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job.

    Raises QueueFull; NoAnswer, and taken tells then; Refusal.
    """
    known = f"--setattr=user.{SCRIPT}={json.dumps(str(script))}"
    done = call(TITLE, ["flux", "batch", known, *options, str(script)])
    name = done.stdout.strip()
    if not done.returncode and name:
        number = call(TITLE, ["flux", "job", "id", "--to=dec", name])
        if not number.returncode:
            return int(number.stdout)
        raise NoAnswer(f"{script}: flux job id {name}: {answer(number)}")
    said = answer(done)
    if UNSURE.search(said):
        raise NoAnswer(f"{script}: flux batch has no answer: {said}")
    if FULL.search(said):
        raise QueueFull(f"{script}: flux batch takes no more: {said}")
    raise Refusal(f"{script}: flux batch refuses it: {said}")


def taken(scripts: Collection[Path]) -> list[Taken]:
    """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

    scripts: as they were handed to flux batch, absolute
    """
    paths = set(map(str, scripts))
    live = (number for (number, _), state in _listed([]).items() if state.live)
    known = {number: _spec(number) for number in live}
    return [
        Taken(number, str(system.get("job", {}).get("name", "")), (FIRST,))
        for number, (system, user) in known.items()
        if user.get(SCRIPT) in paths
    ]


def cancel(jobs: Iterable[int]) -> None:
    """Cancel jobs. Raises SchedulerError where flux cancel does not do it."""
    done = call(TITLE, ["flux", "cancel", *map(str, jobs)])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode and not (lines and all("is inactive" in line for line in lines)):
        raise SchedulerError(f"flux cancel refuses it: {answer(done)}")


def states(jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()) -> States:
    """Return the states of jobs, each the one element of itself, of those that Flux remembers."""
    numbers = [str(job) for job in sorted(set(jobs))]
    return _listed(numbers) if numbers else {}


def mean_power_w(jobs: Collection[str]) -> dict[str, float]:
    """Return the mean power of jobs: Flux knows of none."""
    return {}


def _listed(numbers: list[str]) -> States:
    done = call(TITLE, ["flux", "jobs", "--no-header", f"--format={FORM}", *numbers])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode and not (lines and all(map(UNKNOWN.search, lines))):
        raise _no_answer(done)
    return dict(_row(line) for line in done.stdout.splitlines() if line.strip())


def _row(line: str) -> tuple[tuple[int, int | None], JobState]:
    number, name, state, status, code, kind, note = line.split("\t")
    live = state != "INACTIVE"
    shown = "PENDING" if state in WAITING else state
    if not live:
        shown = "CANCELLED" if status in ("CANCELED", "CANCELLED") else status
    ended = code.lstrip("-").isdigit() and int(code) >= 0 and shown != "CANCELLED"
    exit_code = int(code) if not live and ended else None
    reason = " ".join(word for word in (kind, note) if word.strip() and word != "-")
    return (int(number), FIRST), JobState(name, shown, exit_code, reason, live)


def _spec(number: int) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return the attributes of a job: those of the system, and the user's."""
    done = call(TITLE, ["flux", "job", "info", str(number), "jobspec"])
    if done.returncode:
        return {}, {}  # it has ended since
    found = json.loads(done.stdout)["attributes"]
    return found.get("system", {}), found.get("user", {})


def _no_answer(done: subprocess.CompletedProcess[str]) -> SchedulerError:
    said = answer(done)
    kind = NoAnswer if UNSURE.search(said) else SchedulerError
    return kind(f"flux jobs does not answer: {said}")

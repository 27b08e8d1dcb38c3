"""Flux: its launchers, options and variables, and its commands."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from .base import Arrays, JobState, NoAnswer, SchedulerError, States, Taken
from .calls import answer, call, no_answer, not_submitted
from .launchers import Launcher, hydra, open_mpi

TITLE, SUFFIX = "Flux", ".flux"
ARRAYS: Arrays = "one"
FIRST = 0
KEYS: Collection[str] = ("partition", "account", "constraint")
CLUSTER = ""
FACTS: Collection[str] = ()
LAUNCHERS = {
    # Flux runs them in the job's own instance, and flux run forwards SIGTERM only.
    "flux-run": Launcher(
        "flux run --ntasks={ranks} --nodes={nodes} --cores-per-task={cores}",
        gpus=" --gpus-per-task=1",
        one_gpu=" --gpus-per-task=1 -o gpu-affinity=per-task",
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
SCRIPT = "cpdhpc_script"  # an attribute of each submitted job: the path of its script
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
    """Return 0: Flux puts no job into the queue again."""
    return 0


def shape(nodes: int, ppn: int) -> str:
    """Return the options that request ppn ranks on each of some nodes."""
    return f"--nodes={nodes} --nslots={nodes * ppn}"


def check_option(text: str) -> None:
    """Raise ValueError unless it is an option of flux batch that neither scripts nor submit set."""
    if not text.startswith("-"):
        raise ValueError("should be an option of flux batch, as '--exclusive'")
    if re.split("[ =]", text)[0] in OWN:
        raise ValueError(f"{text.split()[0]} is not for directives: the scripts see to it")


def check_path(path: str) -> str:
    """Return why Flux would read a path as another one: it replaces tags in that of a log."""
    return f"has {{{{, which {TITLE} takes otherwise" if "{{" in path else ""


def after(jobs: Iterable[int]) -> list[str]:
    """Return the options by which a job waits until others have ended, if any."""
    return [f"--dependency=afterany:{job}" for job in sorted(jobs)]


def test_only(script: Path) -> str:
    """Return the result of flux batch --dry-run: whether it understands the script's options."""
    done = call(TITLE, ["flux", "batch", "--dry-run", str(script)])
    if done.returncode:
        return f"warning: --dry-run refuses it as things are: {answer(done)}"
    return "flux batch --dry-run takes it"


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job.

    Raises QueueFull, Refusal; NoAnswer, after which taken finds a job that was submitted.
    """
    known = f"--setattr=user.{SCRIPT}={json.dumps(str(script))}"
    done = call(TITLE, ["flux", "batch", known, *options, str(script)])
    name = done.stdout.strip()
    if not done.returncode and name:
        number = call(TITLE, ["flux", "job", "id", "--to=dec", name])
        if not number.returncode:
            return int(number.stdout)
        raise NoAnswer(f"{script}: flux job id {name}: {answer(number)}")
    raise not_submitted(script, "flux batch", done, UNSURE, FULL)


def taken(scripts: Collection[Path]) -> list[Taken]:
    """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

    scripts: absolute paths, those of the calls of submit
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
    """Cancel jobs. Raises SchedulerError if flux cancel fails."""
    done = call(TITLE, ["flux", "cancel", *map(str, jobs)])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode and not (lines and all("is inactive" in line for line in lines)):
        raise SchedulerError(f"flux cancel refuses it: {answer(done)}")


def states(jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()) -> States:
    """Return the states of jobs that Flux remembers, each as the element FIRST of itself."""
    numbers = [str(job) for job in sorted(set(jobs))]
    return _listed(numbers) if numbers else {}


def mean_power_w(jobs: Collection[str]) -> dict[str, float]:
    """Return {}: Flux does not know the energy of jobs."""
    return {}


def _listed(numbers: list[str]) -> States:
    done = call(TITLE, ["flux", "jobs", "--no-header", f"--format={FORM}", *numbers])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode and not (lines and all(map(UNKNOWN.search, lines))):
        raise no_answer("flux jobs", done, UNSURE)
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

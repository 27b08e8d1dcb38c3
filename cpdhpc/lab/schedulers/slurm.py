"""Slurm: its launchers, options and variables, and its commands, each with a time-out."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from ..binding import BINDINGS
from .base import (
    JobState,
    Launcher,
    NoAnswer,
    QueueFull,
    Refusal,
    SchedulerError,
    States,
    Taken,
)

TITLE, SUFFIX = "Slurm", ".sbatch"
# srun does not take over sbatch's cpus-per-task. A rank that dies alone ends the others after
# --wait seconds. Not at once, by --kill-on-bad-exit: when all ranks end with status 85, those that
# are a little later would be killed, and theirs would be srun's status.
SRUN = (
    "srun --mpi={} --ntasks={{ranks}} --ntasks-per-node={{ppn}} "
    '--cpus-per-task="${{{{SLURM_CPUS_PER_TASK:-1}}}}" '
    "--kill-on-bad-exit=0 --wait=60"
)
IN_ORDER = " --distribution=block:block --cpu-bind=cores"  # by itself it deals ranks to sockets
PART = " --nodes={nodes}"
BIND = {
    "none": "--cpu-bind=none",
    "core": "--cpu-bind=cores",
    "socket": "--cpu-bind=sockets",
    "numa": "--cpu-bind=ldoms",
}
DISTRIBUTION = {"block": "--distribution=block:block", "cyclic": "--distribution=block:cyclic"}
# A launcher that runs in the batch shell gets the signal from that shell (B:): sent to all steps it
# would hit Open MPI's daemons, and mpirun would end with status 0. Of srun the ranks are the step.
LAUNCHERS = {
    "mpirun": Launcher(  # Open MPI
        "mpirun -n {ranks} --map-by {deal}"  # along packages up to the slots of a node
        '"${{SLURM_CPUS_PER_TASK:+:PE=$SLURM_CPUS_PER_TASK}}"',
        "",
        "B:USR1",
        bind={each: f"--bind-to {each}" for each in BINDINGS},
        distribution=dict.fromkeys(("", "block"), "ppr:{ppn}:node") | {"cyclic": "package"},
    ),
    "mpiexec": Launcher(  # MPICH's hydra and what descends from it
        "mpiexec -n {ranks} -ppn {ppn} "
        "${{SLURM_CPUS_PER_TASK:+-bind-to core:$SLURM_CPUS_PER_TASK}}",  # two words
        "",
        "B:USR1",
        bind={each: f"-bind-to {each}" for each in BINDINGS},
        distribution={"block": "-map-by core", "cyclic": "-map-by socket"},
    ),
    "srun-pmix": Launcher(SRUN.format("pmix"), IN_ORDER, "USR1", PART, BIND, DISTRIBUTION),
    "srun-pmi2": Launcher(SRUN.format("pmi2"), IN_ORDER, "USR1", PART, BIND, DISTRIBUTION),
    "srun-cray": Launcher(SRUN.format("cray_shasta"), IN_ORDER, "USR1", PART, BIND, DISTRIBUTION),
}
OWN = {  # what scripts and submit see to: options of sbatch with their short forms
    "--array": "-a",
    "--chdir": "-D",
    "--dependency": "-d",
    "--job-name": "-J",
    "--nodes": "-N",
    "--ntasks-per-node": "",
    "--output": "-o",
    "--signal": "",
    "--wait": "-W",
    "--wrap": "",
}
FACTS = (
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_QOS",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
)


def own_job() -> str:
    """Return the id of the job that this process is in, "" if it is in none."""
    return os.environ.get("SLURM_JOB_ID", "")


def restarts() -> int:
    """Return how often that job was put into the queue again."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def facts() -> dict[str, str]:
    """Return what is the same for jobs of one kind."""
    return {name: os.environ[name] for name in FACTS if name in os.environ}


def shape(nodes: int, ppn: int) -> str:
    """Return what a job is asked for by, to have so many ranks on each node."""
    return f"--nodes={nodes} --ntasks-per-node={ppn}, not for --ntasks alone"


def check_option(text: str) -> None:
    """Raise ValueError for what is no option of sbatch, or one of OWN."""
    if not text.startswith("-"):
        raise ValueError("should be an option of sbatch, as '--mail-type=END'")
    word = text.split()[0].partition("=")[0]
    for long, short in OWN.items():  # sbatch takes the beginning of a long one, too
        if long.startswith(word) if text.startswith("--") else text[:2] == short:
            raise ValueError(f"{long} is not for directives: the scripts see to it")


def check_path(path: str) -> str:
    """Return why it would take a path for another one: % in that of a log, or of a directory."""
    return f"has % or \\, which {TITLE} takes otherwise" if set(path) & set("%\\") else ""


def after(jobs: Iterable[int]) -> list[str]:
    """Return the options by which sbatch lets a job wait until others have ended, if any."""
    numbers = ":".join(map(str, sorted(jobs)))
    return [f"--dependency=afterany:{numbers}"] if numbers else []


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


def test_only(script: Path) -> str:
    """Return what sbatch --test-only says of a script: when and where it could start, or why not.

    What it refuses sbatch may take all the same: a job whose nodes are drained waits for them.
    Raises NoAnswer, SchedulerError where there is no sbatch.
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
    """Cancel jobs, arrays whole. Raises SchedulerError where scancel does not do it."""
    done = _call(["scancel", *map(str, jobs)])
    if done.returncode:
        raise SchedulerError(f"scancel refuses it: {_said(done)}")


def states(jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()) -> States:
    """Return the states of jobs and of all elements of arrays, of those that Slurm remembers.

    squeue first, which needs no accounting; sacct for what squeue has forgotten, if it answers.
    elements: those that are looked for; squeue may have forgotten some of an array alone
    Raises SchedulerError where squeue does not answer.
    """
    wanted = set(jobs)
    found: States = {}
    for job in sorted(wanted):  # one by one: one that is forgotten is an error of all
        found |= _queued(job)
    forgotten = wanted - {job for job, _ in found}
    forgotten |= {each[0] for each in elements if each not in found}
    return (_accounted(forgotten) if forgotten else {}) | found


def ask(command: list[str]) -> str:
    """Return what a command of Slurm prints. Raises SchedulerError where it fails."""
    done = _call(command)
    if done.returncode:
        raise SchedulerError(f"{command[0]} does not answer: {_said(done)}")
    return done.stdout + (done.stderr if "--mpi=list" in command else "")


def live(state: str) -> bool:
    """Return whether a job of that state waits or runs."""
    return state not in ENDED


def _queued(job: int) -> States:
    form = ",".join(f"{name}:{width}" for name, width in FIELDS.items())
    options = ["--array", "--states=all", "--noheader", f"--jobs={job}", f"--Format={form}"]
    done = _call(["squeue", *options])
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return {}
        raise _no_answer(done)
    return dict(_row(line) for line in done.stdout.splitlines() if line.strip())


def _no_answer(done: subprocess.CompletedProcess[str]) -> SchedulerError:
    said = _said(done)
    return (NoAnswer if UNSURE.search(said) else SchedulerError)(f"squeue does not answer: {said}")


def _row(line: str) -> tuple[tuple[int, int | None], JobState]:
    cells, start = [], 0
    for width in FIELDS.values():
        cells.append(line[start : start + width].strip())
        start += width
    job, index, name, state, status, reason = cells
    waited = int(status)  # as waitpid has it
    exit_code = None if live(state) or waited & 0x7F else waited >> 8
    reason = "" if reason == "None" else reason
    place = int(job), int(index) if index.isdigit() else None
    return place, JobState(name, state, exit_code, reason, live(state))


def _accounted(jobs: set[int]) -> States:
    options = [
        f"--jobs={','.join(map(str, sorted(jobs)))}",
        "--format=JobID,JobName,State,ExitCode",
    ]
    flags = ["--allocations", "--noheader", "--parsable2"]  # --array is new in Slurm 23
    try:
        done = _call(["sacct", *flags, *options])
    except SchedulerError:
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
    exit_code = None if live(state) or signal != "0" else int(code)
    found = JobState(name, state, exit_code, "", live(state))
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

    Raises NoAnswer after TIMEOUT_S, SchedulerError where it cannot be run.
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
        raise SchedulerError(
            f"{command[0]} is not on PATH: is this a login node of a cluster with Slurm? "
            "study run needs none"
        ) from None
    except OSError as error:
        raise SchedulerError(f"{command[0]} cannot be run: {error.strerror}") from None
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

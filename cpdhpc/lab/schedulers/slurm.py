"""Slurm: its launchers, options and variables, and its commands, each with a time-out."""

from __future__ import annotations

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

TITLE, SUFFIX = "Slurm", ".sbatch"
ARRAYS: Arrays = "any"
FIRST = 0
KEYS: Collection[str] = ("partition", "account", "qos", "constraint", "reservation")
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
    "none": " --cpu-bind=none",
    "core": " --cpu-bind=cores",
    "socket": " --cpu-bind=sockets",
    "numa": " --cpu-bind=ldoms",
}
DISTRIBUTION = {"block": " --distribution=block:block", "cyclic": " --distribution=block:cyclic"}
# A launcher that runs in the batch shell gets the signal from that shell (B:): sent to all steps it
# would hit Open MPI's daemons, and mpirun would end with status 0. Of srun the ranks are the step.
LAUNCHERS = {
    "mpirun": open_mpi(given='"${{SLURM_CPUS_PER_TASK:+:PE=$SLURM_CPUS_PER_TASK}}"'),
    "mpiexec": hydra(
        cores='"${{SLURM_CPUS_PER_TASK:+:$SLURM_CPUS_PER_TASK}}"',
        given=" ${{SLURM_CPUS_PER_TASK:+-bind-to core:$SLURM_CPUS_PER_TASK}}",  # two words
    ),
    **{
        f"srun-{name}": Launcher(
            SRUN.format(plugin), IN_ORDER, "USR1", part=PART, bind=BIND, distribution=DISTRIBUTION
        )
        for name, plugin in (("pmix", "pmix"), ("pmi2", "pmi2"), ("cray", "cray_shasta"))
    },
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
FACTS: Collection[str] = (
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


# sbatch itself asks a full queue 15 times in 2 min, and says so once it has been refused.
RETRIES = re.compile("sleeping and retrying|disabled, retrying")
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
    done = call(TITLE, ["sbatch", "--test-only", str(script)])
    said = answer(done)
    if done.returncode and UNSURE.search(said):
        raise NoAnswer(f"sbatch --test-only has no answer: {said}")
    return f"warning: --test-only refuses it as things are: {said}" if done.returncode else said


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job.

    Raises QueueFull; NoAnswer, and taken tells then; Refusal.
    """
    done = call(TITLE, ["sbatch", "--parsable", *options, str(script)], until=RETRIES)
    found = re.match(r"(\d+)", done.stdout)  # "12" or "12;cluster"
    if not done.returncode and found is not None:
        return int(found[1])
    said = answer(done)
    if UNSURE.search(said):
        raise NoAnswer(f"{script}: sbatch has no answer: {said}")
    if FULL.search(said) or (POLICY in said and not OTHER_LIMIT.search(said)):
        raise QueueFull(f"{script}: sbatch takes no more: {said}")
    if LONGEST_ARRAY in said:
        said += ": max_array of the site profile should be Slurm's MaxArraySize"
        said += " (docs/reference/sites.md)"
    raise Refusal(f"{script}: sbatch refuses it: {said}")


def taken(scripts: Collection[Path]) -> list[Taken]:
    """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

    scripts: as they were handed to sbatch, absolute
    """
    form = "--format=%F %K %j %o"  # the last is the script's path
    done = call(TITLE, ["squeue", f"--user={os.getuid()}", "--array", "--noheader", form])
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
    done = call(TITLE, ["scancel", *map(str, jobs)])
    if done.returncode:
        raise SchedulerError(f"scancel refuses it: {answer(done)}")


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


def mean_power_w(jobs: Collection[str]) -> dict[str, float]:
    """Return the mean power of ended jobs, of those whose energy Slurm has counted.

    That is ConsumedEnergy over the elapsed time, of whole nodes, if the site has a plugin for it
    (AcctGatherEnergyType). Source: sacct(1), ConsumedEnergyRaw, in joules.
    jobs: ids, as own_job has them in the job
    """
    if not jobs:
        return {}
    form = "--format=JobIDRaw,ConsumedEnergyRaw,ElapsedRaw,State"
    listed = ",".join(sorted(jobs))
    try:
        done = call(TITLE, ["sacct", "--noheader", "--parsable2", form, f"--jobs={listed}"])
    except SchedulerError:
        return {}
    found: dict[str, float] = {}
    for line in done.stdout.splitlines() if not done.returncode else ():
        job, energy_j, elapsed_s, state = line.split("|")
        ended = state and not live(state.split()[0])  # a step, as 12.batch, is in its job's line
        if job in jobs and ended and energy_j.isdigit() and elapsed_s.isdigit():
            power_w = float(energy_j) / max(int(elapsed_s), 1)
            found |= {job: power_w} if power_w > 0 else {}
    return found


def ask(command: list[str]) -> str:
    """Return what a command of Slurm prints. Raises SchedulerError if it fails."""
    done = call(TITLE, command)
    if done.returncode:
        raise SchedulerError(f"{command[0]} does not answer: {answer(done)}")
    return done.stdout + (done.stderr if "--mpi=list" in command else "")


def live(state: str) -> bool:
    """Return whether a job of that state waits or runs."""
    return state not in ENDED


def _queued(job: int) -> States:
    form = ",".join(f"{name}:{width}" for name, width in FIELDS.items())
    options = ["--array", "--states=all", "--noheader", f"--jobs={job}", f"--Format={form}"]
    done = call(TITLE, ["squeue", *options])
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return {}
        raise _no_answer(done)
    return dict(_row(line) for line in done.stdout.splitlines() if line.strip())


def _no_answer(done: subprocess.CompletedProcess[str]) -> SchedulerError:
    said = answer(done)
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
        done = call(TITLE, ["sacct", *flags, *options])
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

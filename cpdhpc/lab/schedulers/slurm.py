"""Slurm: its launchers, options and variables, and its commands."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from .base import Arrays, JobState, NoAnswer, Refusal, SchedulerError, States, Taken
from .calls import answer, call, no_answer, not_submitted
from .launchers import Launcher, hydra, open_mpi

TITLE, SUFFIX = "Slurm", ".sbatch"
ARRAYS: Arrays = "any"
FIRST = 0
KEYS: Collection[str] = ("partition", "account", "qos", "constraint", "reservation")
# srun does not inherit cpus-per-task from sbatch. After a rank has died the others end --wait
# seconds later. They do not end at once, by --kill-on-bad-exit: if all ranks end with status 85,
# those that are a little later would be killed, and srun would have their status.
SRUN = (
    "srun --mpi={} --ntasks={{ranks}} --ntasks-per-node={{ppn}} "
    '--cpus-per-task="${{{{SLURM_CPUS_PER_TASK:-1}}}}" '
    "--kill-on-bad-exit=0 --wait=60"
)
IN_ORDER = " --distribution=block:block --cpu-bind=cores"  # by default ranks go to sockets in turn
PART = " --nodes={nodes}"
ONE_GPU = " --gpus-per-node={ppn} --gpu-bind=per_task:1"  # a lone rank is not bound, but has one
BIND = {
    "none": " --cpu-bind=none",
    "core": " --cpu-bind=cores",
    "socket": " --cpu-bind=sockets",
    "numa": " --cpu-bind=ldoms",
}
DISTRIBUTION = {"block": " --distribution=block:block", "cyclic": " --distribution=block:cyclic"}
# A launcher that runs in the batch shell gets the signal from that shell (B:). Sent to all steps,
# it would end Open MPI's daemons, and mpirun with status 0. The step of srun is the ranks.
LAUNCHERS = {
    "mpirun": open_mpi(given='"${{SLURM_CPUS_PER_TASK:+:PE=$SLURM_CPUS_PER_TASK}}"'),
    "mpiexec": hydra(
        cores='"${{SLURM_CPUS_PER_TASK:+:$SLURM_CPUS_PER_TASK}}"',
        given=" ${{SLURM_CPUS_PER_TASK:+-bind-to core:$SLURM_CPUS_PER_TASK}}",  # two words
    ),
    **{
        f"srun-{name}": Launcher(
            SRUN.format(plugin),
            IN_ORDER,
            "USR1",
            one_gpu=ONE_GPU,
            part=PART,
            bind=BIND,
            distribution=DISTRIBUTION,
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
CLUSTER = "SLURM_CLUSTER_NAME"
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
    """Return the options that request ppn ranks on each of some nodes."""
    return f"--nodes={nodes} --ntasks-per-node={ppn}, not for --ntasks alone"


def check_option(text: str) -> None:
    """Raise ValueError unless it is an option of sbatch, and none that scripts or submit set."""
    if not text.startswith("-"):
        raise ValueError("should be an option of sbatch, as '--mail-type=END'")
    word = text.split()[0].partition("=")[0]
    for long, short in OWN.items():  # sbatch takes the beginning of a long one, too
        if long.startswith(word) if text.startswith("--") else text[:2] == short:
            raise ValueError(f"{long} is not for directives: the scripts see to it")


def check_path(path: str) -> str:
    """Return why Slurm would read a path as another one: % or a backslash in that of a log."""
    return f"has % or \\, which {TITLE} takes otherwise" if set(path) & set("%\\") else ""


def after(jobs: Iterable[int]) -> list[str]:
    """Return the options by which a job waits until others have ended, if any."""
    numbers = ":".join(map(str, sorted(jobs)))
    return [f"--dependency=afterany:{numbers}"] if numbers else []


# sbatch itself tries a full queue 15 times in 2 min, and prints that after the first refusal.
RETRIES = re.compile("sleeping and retrying|disabled, retrying")
FULL = re.compile(
    f"{RETRIES.pattern}|SubmitJob|Resource temporarily unavailable|temporarily unable to accept"
)
# Older versions of Slurm do not name the limit: it may be of jobs, or of the size of a job.
POLICY, OTHER_LIMIT = re.compile("accounting/QOS policy"), re.compile(r"error: (Assoc|QOS)\w+")
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
    """Return the output of sbatch --test-only: when and where a script could start, or why not.

    sbatch may take the script in spite of that: a job whose nodes are drained waits for them.
    Raises NoAnswer; SchedulerError if there is no sbatch.
    """
    done = call(TITLE, ["sbatch", "--test-only", str(script)])
    text = answer(done)
    if done.returncode and UNSURE.search(text):
        raise NoAnswer(f"sbatch --test-only has no answer: {text}")
    return f"warning: --test-only refuses it as things are: {text}" if done.returncode else text


def submit(script: Path, options: Iterable[str] = ()) -> int:
    """Submit a script and return the number of its job.

    Raises QueueFull, Refusal; NoAnswer, after which taken finds a job that was submitted.
    """
    done = call(TITLE, ["sbatch", "--parsable", *options, str(script)], until=RETRIES)
    found = re.match(r"(\d+)", done.stdout)  # "12" or "12;cluster"
    if not done.returncode and found is not None:
        return int(found[1])
    text = answer(done)
    full = POLICY if POLICY.search(text) and not OTHER_LIMIT.search(text) else FULL
    error = not_submitted(script, "sbatch", done, UNSURE, full)
    if isinstance(error, Refusal) and LONGEST_ARRAY in text:
        advice = "max_array of the site profile should be Slurm's MaxArraySize"
        raise Refusal(f"{error}: {advice} (docs/reference/sites.md)")
    raise error


def taken(scripts: Collection[Path]) -> list[Taken]:
    """Return the jobs of some scripts that wait or run, recorded or not. Raises as states.

    scripts: absolute paths, those of the calls of submit
    """
    form = "--format=%F %K %j %o"  # the last is the path of the script
    done = call(TITLE, ["squeue", f"--user={os.getuid()}", "--array", "--noheader", form])
    if done.returncode:
        raise no_answer("squeue", done, UNSURE)
    found: dict[tuple[int, str], list[int]] = {}
    for line in done.stdout.splitlines():
        job = re.fullmatch(r"(\d+) (\S+) (\S+) (.*)", line)
        if job is not None and Path(job[4]) in scripts:
            own = found.setdefault((int(job[1]), job[3]), [])
            own += [int(job[2])] if job[2].isdigit() else []
    return [Taken(number, name, tuple(own)) for (number, name), own in found.items()]


def cancel(jobs: Iterable[int]) -> None:
    """Cancel jobs, with all elements of arrays. Raises SchedulerError if scancel fails."""
    done = call(TITLE, ["scancel", *map(str, jobs)])
    if done.returncode:
        raise SchedulerError(f"scancel refuses it: {answer(done)}")


def states(jobs: Iterable[int], elements: Iterable[tuple[int, int | None]] = ()) -> States:
    """Return the states of jobs and of all elements of arrays that Slurm remembers.

    They are squeue's, which needs no accounting, and sacct's for jobs that squeue has forgotten.
    elements: those that the caller needs; squeue may have forgotten some of an array alone
    Raises SchedulerError if squeue does not answer.
    """
    wanted = set(jobs)
    found: States = {}
    for job in sorted(wanted):  # one by one: squeue fails if it has forgotten one of several
        found |= _queued(job)
    forgotten = wanted - {job for job, _ in found}
    forgotten |= {each[0] for each in elements if each not in found}
    return (_accounted(forgotten) if forgotten else {}) | found


def mean_power_w(jobs: Collection[str]) -> dict[str, float]:
    """Return the mean power in W of those ended jobs whose energy Slurm has counted.

    It is ConsumedEnergy over the elapsed time, of whole nodes, if the site has a plugin for it
    (AcctGatherEnergyType). Source: sacct(1), ConsumedEnergyRaw, in joules.
    jobs: ids, as own_job returns them in the job
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
        ended = state and not live(state.split()[0])  # the line of a job includes its steps
        if job in jobs and ended and energy_j.isdigit() and elapsed_s.isdigit():
            power_w = float(energy_j) / max(int(elapsed_s), 1)
            found |= {job: power_w} if power_w > 0 else {}
    return found


def ask(command: list[str]) -> str:
    """Return the output of a command of Slurm. Raises SchedulerError if it fails."""
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
        raise no_answer("squeue", done, UNSURE)
    return dict(_row(line) for line in done.stdout.splitlines() if line.strip())


def _row(line: str) -> tuple[tuple[int, int | None], JobState]:
    cells, start = [], 0
    for width in FIELDS.values():
        cells.append(line[start : start + width].strip())
        start += width
    job, index, name, state, status, reason = cells
    waited = int(status)  # as waitpid has it
    exit_code = None if live(state) or waited & 0x7F else waited >> 8
    reason = "" if reason == "None" else reason
    element = int(job), int(index) if index.isdigit() else None
    return element, JobState(name, state, exit_code, reason, live(state))


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
    if done.returncode:  # 1 if accounting is switched off
        return {}
    return {k: v for line in done.stdout.splitlines() for k, v in _accounted_rows(line).items()}


def _accounted_rows(line: str) -> States:
    """Return the states in a line: of "12", "12_3", or "12_[0-3,7%2]", which never started."""
    job, name, words, status = line.split("|")
    number, _, indices = job.partition("_")
    state = words.split()[0]  # "CANCELLED by 1000"
    code, _, signal = status.partition(":")
    exit_code = None if live(state) or signal != "0" else int(code)
    found = JobState(name, state, exit_code, "", live(state))
    if not indices:
        return {(int(number), None): found}
    # A long list is cut off: "12_[1,3,5,...]"
    ranges = re.findall(r"(\d+)(?:-(\d+))?", indices.partition("%")[0])
    every = (i for first, last in ranges for i in range(int(first), int(last or first) + 1))
    return {(int(number), index): found for index in every}

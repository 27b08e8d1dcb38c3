"""What the Slurm tests do with the cluster: submit studies, wait, read what came out."""

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from training import ROOT, ran

from cpdhpc.config import dump_toml
from cpdhpc.lab.schedulers import slurm as queue
from cpdhpc.lab.study.folder import Folder, SubmittedJob, recorded

LOOK_S = 0.3
# Root may run MPI here, and ranks share cores that Slurm thinks are theirs.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Mpi:
    """An MPI library: the Python that uses it, and the directory of its launcher."""

    name: str
    python: str
    programs: Path


class Lab:
    """The cluster. apart: nodes have hostnames of their own."""

    def __init__(self, directory: Path, apart: bool) -> None:
        self.directory, self.apart = directory, apart

    def site(self, mpi: Mpi, launcher: str, gpus: int = 0, setup: Sequence[str] = ()) -> Path:
        """Write and return a profile for one way to start an MPI's ranks.

        gpus: of a node; setup: further lines of the shell
        """
        path = self.directory / f"{launcher}-{mpi.name}{'-gpu' * (gpus > 0)}.toml"
        flags = ["--bind-to", "none"] if launcher == "mpirun" else []
        profile = {
            "setup": [f"export PATH={mpi.programs}:$PATH", *setup],
            "python": mpi.python,
            "launcher": launcher,
            "mpi_flags": flags,
            "gpus_per_node": gpus,
        }
        path.write_text(dump_toml(profile))
        return path

    def file(self, name: str, text: str) -> Path:
        """Write and return a file."""
        path = self.directory / name
        path.write_text(text)
        return path

    def call(self, *command: str, status: int = 0) -> str:
        """Run a command in the lab's directory and return what it printed."""
        here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | MPI_ENVIRONMENT | {"PYTHONPATH": str(ROOT), "PATH": here}
        done = ran(command, env=environment, cwd=self.directory)
        assert done.returncode == status, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def study(self, action: str, *arguments: str) -> str:
        """Run python -m cpdhpc study ACTION and return what it printed."""
        return self.call(sys.executable, "-m", "cpdhpc", "study", action, *arguments)

    def submit(self, study: Path, site: Path, name: str) -> Folder:
        """Submit a study under a name and return its folder."""
        self.study("submit", str(study), "--site", str(site), "--set", f"name={name}")
        return Folder(self.directory / "results" / name)

    def wait(self, jobs: Iterable[int], limit_s: float = 1800.0) -> queue.States:
        """Wait until jobs have ended, and return their states."""
        jobs, end_s = list(jobs), time.monotonic() + limit_s
        while True:
            states = queue.states(jobs)
            if states and not any(state.live for state in states.values()):
                return states
            assert time.monotonic() < end_s, states
            time.sleep(LOOK_S)

    def until_running(self, job: int, limit_s: float = 1800.0) -> None:
        """Wait until Slurm has started a job."""
        end_s = time.monotonic() + limit_s
        while "JobState=RUNNING" not in self.call(
            "scontrol", "--oneliner", "show", "job", str(job)
        ):
            assert time.monotonic() < end_s, job
            time.sleep(LOOK_S)

    def finish(self, folder: Folder) -> list[SubmittedJob]:
        """Wait for all jobs of a study, and return them."""
        jobs = recorded(folder)
        self.wait(job.number for job in jobs)
        return jobs

    def until(self, path: Path, text: str, limit_s: float = 1800.0) -> None:
        """Wait for a text in a log."""
        end_s = time.monotonic() + limit_s
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < end_s, path.read_text() if path.exists() else path
            time.sleep(LOOK_S)

    def interrupt(self, log: Path, *target: str) -> None:
        """Send USR1 until a job has stopped: a step that just begins may not get the first."""
        for _ in range(120):
            self.call("scancel", "--signal=USR1", *target)
            try:
                return self.until(log, "interrupted after iteration", limit_s=5)
            except AssertionError:
                continue
        self.until(log, "interrupted after iteration", limit_s=0)


def logs(folder: Folder) -> str:
    """Return all that a study's jobs printed."""
    return "".join(path.read_text() for path in sorted(folder.logs.glob("*.log")))

"""The folder of a study: its frozen text, finished cases, logs, locks, claims of batches, jobs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from .. import store
from ..config import UserError, difference
from .cases import Case, load_study
from .spec import Study

JobAlive = Callable[[str], bool | None]  # id of a job -> whether it waits or runs; None: unknown


def unknown(job_id: str) -> None:
    """Nothing is known of any job."""


@dataclass(frozen=True)
class Claim:
    """What process 0 of a batch writes when it starts and when it ends.

    job_id: of Slurm, "" without; state: "running", "stopped" (by a signal) or "ended"
    """

    host: str
    pid: int
    job_id: str
    started: str
    restarts: int
    state: str

    @classmethod
    def begin(cls, path: Path) -> Claim:
        """Write and return the claim of this process."""
        before = read_claim(path)
        claim = cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            job_id=os.environ.get("SLURM_JOB_ID", ""),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            restarts=0 if before is None else before.restarts + 1,
            state="running",
        )
        claim._write(path)
        return claim

    def end(self, path: Path, state: str) -> None:
        """Write how the batch ended: "stopped" or "ended"."""
        replace(self, state=state)._write(path)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        store.put(path, json.dumps(asdict(self)) + "\n")

    def alive(self, job_alive: JobAlive = unknown) -> bool | None:
        """Return whether the batch is being measured; None where that cannot be seen from here."""
        if self.state != "running":
            return False
        if self.host == socket.gethostname():
            return self.pid != os.getpid() and _is_cpdhpc(self.pid)
        return job_alive(self.job_id) if self.job_id else None


def read_claim(path: Path) -> Claim | None:
    """Return a batch's claim, None where it was never started or the claim cannot be read."""
    try:
        return Claim(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _is_cpdhpc(pid: int) -> bool:
    """Return whether a process of this package has that number now."""
    try:
        return b"cpdhpc" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


MAY_CHANGE = ("run.throttle", "run.retries", "run.case_time_s")  # neither cases nor numbers


class FolderError(UserError):
    """A folder that cannot be used for a study."""


@dataclass(frozen=True)
class Folder:
    """A directory and what lies where in it."""

    path: Path

    @property
    def study_toml(self) -> Path:
        """The study with every default filled in."""
        return self.path / "study.toml"

    @property
    def study_file(self) -> Path:
        """What collect writes."""
        return self.path / "study.h5"

    @property
    def cases(self) -> Path:
        """Directory of the files of cases."""
        return self.path / "cases"

    @property
    def logs(self) -> Path:
        """Directory of what jobs print, and of the claims of batches."""
        return self.path / "logs"

    @property
    def scripts(self) -> Path:
        """Directory of job scripts."""
        return self.path / "scripts"

    def case_file(self, case: Case) -> Path:
        """Return where the file of a case is, or will be."""
        return self.cases / f"{case.id}.h5"

    def failure_file(self, case: Case) -> Path:
        """Return where it is told why a case failed."""
        return self.cases / f"{case.id}.failed.txt"

    def failure(self, case: Case) -> str:
        """Return why a case failed; "" where nothing is told."""
        try:
            return self.failure_file(case).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def work(self, case: Case) -> Path:
        """Return the directory for what a case leaves on its way, as checkpoints."""
        return self.path / "work" / case.id

    def clear_work(self, case: Case) -> None:
        """Remove what a case left on its way, once it is finished."""
        shutil.rmtree(self.work(case), ignore_errors=True)

    def claim_file(self, number: int) -> Path:
        """Return where it is told who runs a batch."""
        return self.logs / f"batch-{number}.json"

    def log_file(self, number: int) -> Path:
        """Return where a batch that runs on this machine prints to."""
        return self.logs / f"batch-{number}.log"

    def check_there(self) -> None:
        """Raise FolderError unless this is the folder of some study."""
        if not self.study_toml.exists():
            raise FolderError(f"{self.path}: is no folder of a study: nothing was run there yet")

    def check(self, study: Study) -> None:
        """Raise FolderError unless this is the folder of the study."""
        self.check_there()
        self._check_same(study)

    def prepare(self, study: Study) -> None:
        """Make the directories and write the study, unless it is there already.

        Raises FolderError where the folder holds another study, or cannot be written.
        """
        try:
            if self.study_toml.exists():
                self._check_same(study)
            for directory in (self.path, self.cases, self.logs, self.scripts):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(f"{self.path}: cannot be written: {error.strerror}") from None
        store.put(self.study_toml, study.toml())

    def _check_same(self, study: Study) -> None:
        there = self.study_toml.read_text(encoding="utf-8")
        key = difference(there, study.toml(), MAY_CHANGE)
        if key is not None:
            raise FolderError(
                f"{self.path}: holds another study: {key} differs from {self.study_toml}: "
                "study extend adds levels, --out DIR takes another folder"
            )

    def study(self) -> Study:
        """Return the frozen study. Raises ConfigError where there is none."""
        return load_study(self.study_toml)

    def finished(self, case: Case) -> bool:
        """Return whether the case's file is whole and its own; nothing else is trusted."""
        path = self.case_file(case)
        if not path.exists():
            return False
        try:
            attributes = store.read_attributes(path)
        except store.StoreError:
            return False
        return attributes.get("status") == "complete" and attributes.get("case_id") == case.id


NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # Lustre mounted without flock, as one


@contextmanager
def alone(path: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a file's lock for a while; the file stays.

    what: the command that takes it. Where the file system has no locks this is said.
    Raises FolderError where another process holds it, or the file cannot be written.
    """
    try:
        file = path.open("a")
    except OSError as error:
        raise FolderError(f"{path}: cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(
                f"{path}: another {what} is at work here: try again when it has ended"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise FolderError(f"{path}: cannot be locked: {error.strerror}") from None
            say(f"{path}: this file system has no locks: do not start {what} twice at a time")
        yield


RECORD = "jobs.json"
LOCK = "submit.lock"  # held while a process submits, cancels or extends


@dataclass(frozen=True)
class Job:
    """A job that was submitted.

    number: Slurm's
    name: as Slurm shows it, and in names of logs
    batches: number of the batch -> index in the array; empty for the job that collects
    """

    number: int
    name: str
    batches: dict[int, int]

    def log(self, folder: Folder, batch: int) -> Path:
        """Return where the job of a batch prints to."""
        return folder.logs / f"{self.name}-{self.number}_{self.batches[batch]}.log"

    def shown(self, batch: int) -> str:
        """Return the number of a batch's job as Slurm shows it."""
        return f"{self.number}_{self.batches[batch]}"


def recorded(folder: Folder) -> list[Job]:
    """Return the jobs of a study, the oldest first.

    Raises FolderError where the record cannot be read.
    """
    path = folder.path / RECORD
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["jobs"]
        return [
            Job(row["number"], row["name"], {int(k): v for k, v in row["batches"].items()})
            for row in rows
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FolderError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FolderError(
            f"{path}: is no record of jobs: move it away, and scancel what still runs"
        ) from None


def record(folder: Folder, job: Job) -> None:
    """Add a job to the record. Raises FolderError where it cannot be written."""
    path = folder.path / RECORD
    rows = [asdict(each) for each in [*recorded(folder), job]]
    try:
        store.put(path, json.dumps({"schema": 1, "jobs": rows}, indent=1) + "\n")
    except store.StoreError as error:
        raise FolderError(f"{error}; job {job.number} is submitted") from None


def forget_jobs(folder: Folder) -> None:
    """Remove the record of jobs and the claims of batches, as their numbers change."""
    try:
        for path in (folder.path / RECORD, *folder.logs.glob("batch-*.json")):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FolderError(f"{folder.path}: cannot be written: {error.strerror}") from None

"""Who is at work on files: claims that tell it, and locks that end with their process.

The package filelock takes the same lock, but it accepts a lock file that has a second name, keeps
no claim in it, treats ENOSYS alone as a file system without locks, and leaves the file at the end.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from .. import ordinary
from ..config import UserError
from ..whole_files import NO_LOCKS, open_own, put, sealed_json, unsealed_json
from .schedulers import current

JobAlive = Callable[[str], bool | None]  # id of a job -> whether it waits or runs; None: unknown


def unknown(job_id: str) -> None:
    """Nothing is known of any job."""


@dataclass(frozen=True)
class Claim:
    """What process 0 of a batch writes when it starts and when it ends, or who holds a lock.

    job_id: of its scheduler, "" without; state: "running", "stopped" (by a signal) or "ended"
    """

    host: str
    pid: int
    job_id: str
    started: str
    restarts: int
    state: str

    @classmethod
    def here(cls, restarts: int = 0) -> Claim:
        """Return a claim of this process."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            job_id=current().own_job(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            restarts=restarts,
            state="running",
        )

    @classmethod
    def begin(cls, path: Path) -> Claim:
        """Write and return the claim of this process."""
        before = read_claim(path)
        claim = cls.here(0 if before is None else before.restarts + 1)
        claim._write(path)
        return claim

    def __str__(self) -> str:
        job = f", {current().TITLE} job {self.job_id}" if self.job_id else ""
        return f"process {self.pid} on {self.host}{job}, since {self.started}"

    def of_job(self, other: Claim) -> bool:
        """Return whether the other one is of the same job, requeued or not."""
        return bool(self.job_id) and other.job_id == self.job_id

    def end(self, path: Path, state: str) -> None:
        """Write how the batch ended: "stopped" or "ended"."""
        replace(self, state=state)._write(path)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, sealed_json(asdict(self)))

    def alive(self, job_alive: JobAlive = unknown) -> bool | None:
        """Return whether that process is at work; None where that cannot be seen from here."""
        if self.state != "running":
            return False
        if self.host == socket.gethostname():
            return self.pid != os.getpid() and _is_cpdhpc(self.pid)
        return job_alive(self.job_id) if self.job_id else None


def read_claim(path: Path) -> Claim | None:
    """Return a claim, None where there is none or it cannot be read."""
    try:
        return Claim(**unsealed_json(ordinary.text(path)))
    except (OSError, ValueError, TypeError):
        return None


def _is_cpdhpc(pid: int) -> bool:
    """Return whether a process of this package has that number now."""
    try:
        return b"cpdhpc" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class ClaimError(UserError):
    """Files on which another process is at work, or that cannot be written."""


@contextmanager
def alone(
    path: Path, what: str, say: Callable[[str], None], *, doubted: bool = True
) -> Iterator[None]:
    """Hold a file's lock for a while; the file tells who has it, and goes at the end.

    The lock ends with its process, on all nodes, however that dies. Where the file system has
    none this is said, and the file alone decides: a dead process's is passed over where it was
    of this node or of this job.
    what: the command that takes it
    doubted: without locks, whether the file of a process that may be dead counts
    Raises ClaimError where another process holds it, or no file can be written there.
    """
    try:
        file = _take(path, what, say, doubted)
    except OSError as error:
        raise ClaimError(f"{path}: cannot be written: {error.strerror}") from None
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _take(path: Path, what: str, say: Callable[[str], None], doubted: bool) -> TextIO:
    """Return the locked file, with the claim of this process in it."""
    claim = Claim.here()
    file = os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")
    try:
        try:
            _lock(file, path, claim, what, say)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            say(f"{path}: this file system has no locks: do not start {what} twice at a time")
            before = read_claim(path)
            alive = False if before is None or claim.of_job(before) else before.alive()
            if alive or (alive is None and doubted):
                raise ClaimError(f"{_busy(path, what)}, or remove the file if it died") from None
        if not os.fstat(file.fileno()).st_nlink:  # its holder has just removed it
            file.close()
            return _take(path, what, say, doubted)
        file.truncate(0)
        try:
            file.write(sealed_json(asdict(claim)))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return file
    except BaseException:
        with suppress(OSError):
            file.close()
        raise


LOOK_S = 0.5  # between two looks whether a lock is free
REQUEUED_S = 90.0  # for the ranks of a job's former life, which has 30 s to end


def _lock(file: TextIO, path: Path, claim: Claim, what: str, say: Callable[[str], None]) -> None:
    """Lock a file. Raises ClaimError where another process has it, OSError where none can.

    If the holder is this job before it was requeued, it is waited for.
    """
    end_s, told = time.monotonic() + REQUEUED_S, False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            before, is_again = read_claim(path), current().restarts() > 0
            waits = is_again and before is not None and claim.of_job(before)
            if not waits or time.monotonic() > end_s:
                raise ClaimError(_busy(path, what)) from None
        if not told:
            say(f"{path}: waits for {before}, of this job before it was requeued, to end")
            told = True
        time.sleep(LOOK_S)


def _busy(path: Path, what: str) -> str:
    return f"{path}: another {what} is at work: {read_claim(path)}: try again when it has ended"

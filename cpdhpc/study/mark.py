"""The mark of a batch: who measures it, since when, and how often it was started before."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from .. import store

JobAlive = Callable[[str], bool | None]  # id of a job -> whether it waits or runs; None: unknown


def unknown(job_id: str) -> None:
    """Nothing is known of any job."""


@dataclass(frozen=True)
class Mark:
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
    def begin(cls, path: Path) -> Mark:
        """Write and return the mark of this process."""
        before = read_mark(path)
        mark = cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            job_id=os.environ.get("SLURM_JOB_ID", ""),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            restarts=0 if before is None else before.restarts + 1,
            state="running",
        )
        mark._write(path)
        return mark

    def end(self, path: Path, state: str) -> None:
        """Write how the batch ended: "stopped" or "ended"."""
        replace(self, state=state)._write(path)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def alive(self, job_alive: JobAlive = unknown) -> bool | None:
        """Return whether the batch is being measured; None where that cannot be seen from here."""
        if self.state != "running":
            return False
        if self.host == socket.gethostname():
            return self.pid != os.getpid() and _is_cpdhpc(self.pid)
        return job_alive(self.job_id) if self.job_id else None


def read_mark(path: Path) -> Mark | None:
    """Return a batch's mark, None where it was never started or the mark cannot be read."""
    try:
        return Mark(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _is_cpdhpc(pid: int) -> bool:
    """Return whether a process of this package has that number now."""
    try:
        return b"cpdhpc" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

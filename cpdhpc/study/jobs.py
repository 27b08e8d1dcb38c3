"""The record of a study's Slurm jobs: jobs.json in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import store
from .folder import Folder, FolderError

RECORD = "jobs.json"


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
        with store.replacing(path) as temporary:
            temporary.write_text(json.dumps({"schema": 1, "jobs": rows}, indent=1) + "\n")
    except OSError as error:
        raise FolderError(
            f"{path}: cannot be written, job {job.number} is submitted: {error.strerror}"
        ) from None

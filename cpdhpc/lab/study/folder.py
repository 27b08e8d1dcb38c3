"""The folder of a study: its frozen text, finished cases, logs and jobs."""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ... import config, ordinary, store
from ...whole_files import sealed_json, unsealed_json
from ..kinds import kind_of
from ..schedulers import SCHEDULERS
from ..study_data import Case
from ..study_data.study_file import read_result
from .cases import load_study
from .spec import Study

MAY_CHANGE = (  # keys that change neither cases nor their numbers
    "run.throttle",
    "run.retries",
    "run.case_time_s",
    "train.target_loss",
    "train.target_accuracy",
    "train.tolerance",
)
MOST_NAME = 255  # bytes, the limit of most file systems
MOST_PATH = 3500  # bytes: Linux allows 4,095, and files in the folder have long names
FROZEN = "# Frozen: study extend adds levels. SHA-256 of what follows: "


class FolderError(config.UserError):
    """A folder cannot be used for a study."""


def _may_change(kind: str) -> tuple[str, ...]:
    """Return the keys of a study that may change in a folder. Raises ConfigError: unknown kind."""
    return MAY_CHANGE + tuple(f"job.{key}" for key in kind_of(kind).may_change)


def _digest(tables: config.Raw) -> str:
    """Return the SHA-256, in hexadecimal, of a study's tables without the keys that may change."""
    free = _may_change(str(tables.get("kind")))
    rows = {key: value for key, value in config.flatten(tables).items() if key not in free}
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


class Folder:
    """A directory, and the paths in it.

    study_toml: the study, with all defaults filled in; study_file: that collect writes
    cases: directory of the files of cases; scripts: of job scripts
    logs: directory of the output of jobs, and of the claims of batches
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study_toml, self.study_file = path / "study.toml", path / "study.h5"
        self.cases, self.logs, self.scripts = path / "cases", path / "logs", path / "scripts"

    def case_file(self, case: Case) -> Path:
        """Return the path of the file of a case."""
        return self.cases / f"{case.id}.h5"

    def remedy(self, case: Case) -> str:
        """Return what to do if the file of a case is not its result."""
        if self.case_file(case).is_dir():
            return "remove this directory, then study resume"
        return "study resume measures it again"

    def failure_file(self, case: Case) -> Path:
        """Return the path of the file that says why a case failed."""
        return self.cases / f"{case.id}.failed.txt"

    def failure(self, case: Case) -> str:
        """Return why a case failed, "" if there is no record of that."""
        try:
            return ordinary.text(self.failure_file(case), "replace").strip()
        except OSError:
            return ""

    def work(self, case: Case) -> Path:
        """Return the directory of the intermediate files of a case, as checkpoints."""
        return self.path / "work" / case.id

    def clear_work(self, case: Case) -> None:
        """Remove the intermediate files of a case, once it is finished."""
        shutil.rmtree(self.work(case), ignore_errors=True)

    def claim_file(self, number: int) -> Path:
        """Return the path of the claim of the process that runs a batch."""
        return self.logs / f"batch-{number}.json"

    def lock_file(self, number: int) -> Path:
        """Return the path of the lock of a batch: one process at a time measures it."""
        return self.logs / f"batch-{number}.lock"

    def log_file(self, number: int) -> Path:
        """Return the path of the output of a batch that runs on this machine."""
        return self.logs / f"batch-{number}.log"

    def check_path(self) -> None:
        """Raise FolderError if a scheduler or a shell would read the path as another one."""
        whole = str(self.path.absolute())
        wrong = next(filter(None, (each.check_path(whole) for each in SCHEDULERS.values())), "")
        if not whole.isprintable():
            wrong = wrong or "has a sign that cannot be printed"
        elif str(self.path).startswith("-"):
            wrong = "begins with -, as options do"
        elif len(whole.encode()) > MOST_PATH:
            wrong = f"has more than {MOST_PATH} bytes"
        elif any(len(part.encode()) > MOST_NAME for part in self.path.parts):
            wrong = f"has a name of more than {MOST_NAME} bytes"
        if wrong:
            raise FolderError(f"folder {whole[:MOST_NAME]!r}: {wrong}: another --out, or directory")

    def check_there(self) -> None:
        """Raise FolderError unless this is the folder of a study."""
        if not self.study_toml.exists():
            raise FolderError(f"{self.path}: is no folder of a study: nothing was run there yet")

    def check(self, study: Study) -> None:
        """Raise FolderError unless this is the folder of the study."""
        self.check_there()
        self._check_frozen()
        self._check_same(study)

    def freeze(self, study: Study) -> None:
        """Write the study, with a digest by which a change by hand is found."""
        text = study.toml()
        store.put(self.study_toml, f"{FROZEN}{_digest(tomllib.loads(text))}\n{text}")

    def _check_frozen(self) -> None:
        """Raise FolderError if the frozen study was changed by hand."""
        if self._digest_before():
            raise FolderError(
                f"{self.study_toml}: was changed by hand, and cases measured before would count no "
                "more: undo that, or give study run the file that it was made of; study extend "
                "adds levels to a study, --out DIR takes another folder"
            )

    def _digest_before(self) -> str:
        """Return the digest of the frozen study before it was changed by hand, "" if it was not.

        Folders of older versions have no digest, and their study counts as unchanged.
        Raises FolderError if the file is not TOML and has no digest: the study is then unknown.
        """
        try:
            head = ordinary.text(self.study_toml, "replace").partition("\n")[0]
        except OSError as error:
            raise FolderError(f"{self.study_toml}: cannot be read: {error.strerror}") from None
        known = head.removeprefix(FROZEN).strip() if head.startswith(FROZEN) else ""
        try:
            return "" if known == _digest(config.read_toml(self.study_toml)) else known
        except config.ConfigError as error:
            if known:
                return known
            raise FolderError(
                f"{error}: remove it, and give study run the file that it was made of"
            ) from None

    def prepare(self, study: Study) -> None:
        """Make the directories and write the study, unless it is there already.

        A frozen copy that was changed by hand is restored from the study that it was made of.
        Raises FolderError if the folder holds another study, or cannot be written.
        """
        self.check_path()
        try:
            own = _digest(tomllib.loads(study.toml()))
            if self.study_toml.exists() and self._digest_before() != own:
                self._check_frozen()
                self._check_same(study)
            for directory in (self.path, self.cases, self.logs, self.scripts):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(
                f"{error.filename or self.path}: cannot be written: {error.strerror}"
            ) from None
        self.freeze(study)

    def _check_same(self, study: Study) -> None:
        there = ordinary.text(self.study_toml)
        kind = config.value_of(there, "kind")
        if kind != study.kind:
            raise FolderError(
                f"{self.path}: holds another study: of kind {kind}, and this one is of kind "
                f"{study.kind}: --out DIR takes another folder"
            )
        key = config.difference(there, study.toml(), _may_change(study.kind))
        if key is not None:
            raise FolderError(
                f"{self.path}: holds another study: {key} differs from {self.study_toml}: "
                "study extend adds levels, --out DIR takes another folder"
            )

    def study(self) -> Study:
        """Return the frozen study.

        Raises ConfigError if there is none, FolderError if it was changed by hand.
        """
        study = load_study(self.study_toml)
        self._check_frozen()
        return study

    def finished(self, case: Case) -> bool:
        """Return whether the case has a file that collect accepts; no other record counts."""
        path = self.case_file(case)
        if not path.exists():
            return False
        try:
            read_result(path, case)
        except store.StoreError:
            return False
        return True


RECORD = "jobs.json"
LOCK = "submit.lock"  # held while a process submits, cancels or extends
EMPTY_LOG = "is empty: its disk is full, or nothing was printed"


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was submitted.

    number: that the scheduler gave it; name: in the scheduler's lists, and in names of logs
    batches: number of the batch -> index in the array; empty for the job that collects
    """

    number: int
    name: str
    batches: dict[int, int]

    def log(self, folder: Folder, batch: int) -> Path:
        """Return the path of the output of the job of a batch."""
        return folder.logs / f"{self.name}-{self.number}_{self.batches[batch]}.log"

    def shown(self, batch: int) -> str:
        """Return the number of a batch's job as messages have it."""
        return f"{self.number}_{self.batches[batch]}"


@dataclass(frozen=True)
class _Record:
    """The record of jobs; schema 1 had no digest."""

    schema: Literal[1, 2]
    jobs: list[SubmittedJob]


def recorded(folder: Folder) -> list[SubmittedJob]:
    """Return the jobs of a study, the oldest first.

    Raises FolderError if the record cannot be read.
    """
    path = folder.path / RECORD
    try:
        return config.validate(_Record, unsealed_json(ordinary.text(path)), str(path)).jobs
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FolderError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:  # a UserError, too
        raise FolderError(
            f"{path}: is no record of jobs, or damaged: move it away, and cancel what still runs"
        ) from None


def record(folder: Folder, job: SubmittedJob) -> None:
    """Add a job to the record. Raises FolderError if it cannot be written."""
    path = folder.path / RECORD
    jobs = _Record(2, [*recorded(folder), job])
    try:
        store.put(path, sealed_json(asdict(jobs)))
    except store.StoreError as error:
        raise FolderError(f"{error}; job {job.number} is submitted") from None


def forget_jobs(folder: Folder) -> None:
    """Remove the record of jobs and the claims of batches, because batches get new numbers."""
    try:
        for path in (folder.path / RECORD, *folder.logs.glob("batch-*.json")):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FolderError(f"{folder.path}: cannot be written: {error.strerror}") from None

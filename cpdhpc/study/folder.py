"""The folder of a study: its frozen text, a file per finished case, logs, job scripts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import store
from ..config import UserError, difference
from .case import Case
from .spec import Study, load_study

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
        """Directory of what jobs print, and of the marks of batches."""
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

    def mark_file(self, number: int) -> Path:
        """Return where it is told who runs a batch."""
        return self.logs / f"batch-{number}.json"

    def log_file(self, number: int) -> Path:
        """Return where a batch that runs on this machine prints to."""
        return self.logs / f"batch-{number}.log"

    def check(self, study: Study) -> None:
        """Raise FolderError unless this is the folder of the study."""
        if not self.study_toml.exists():
            raise FolderError(f"{self.path}: is no folder of a study: nothing was run there yet")
        self._check_same(study)

    def freeze(self, study: Study) -> None:
        """Make the directories and write the study, unless it is there already.

        Raises FolderError where the folder holds another study, or cannot be written.
        """
        try:
            if self.study_toml.exists():
                self._check_same(study)
            for directory in (self.path, self.cases, self.logs, self.scripts):
                directory.mkdir(parents=True, exist_ok=True)
            with store.replacing(self.study_toml) as temporary:
                temporary.write_text(study.toml(), encoding="utf-8")
        except OSError as error:
            raise FolderError(f"{self.path}: cannot be written: {error.strerror}") from None

    def _check_same(self, study: Study) -> None:
        there = self.study_toml.read_text(encoding="utf-8")
        key = difference(there, study.toml(), MAY_CHANGE)
        if key is not None:
            raise FolderError(
                f"{self.path}: holds another study: {key} differs from {self.study_toml}: "
                "--out DIR takes another folder"
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

"""Files given to a report: studies and records of training runs, or directories of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ... import store
from .runs import Run, load_run
from .study_file import ReportError, StudyFile, load_study_file

STUDY = "study.h5"  # in the folder of a study


def load(paths: Iterable[Path]) -> tuple[list[StudyFile], list[Run]]:
    """Return the studies in the order given, and the runs, oldest first.

    A directory stands for the study file in it, else for all records in it. Raises ReportError
    where a file is neither or a directory has none; StoreError for what cannot be read.
    """
    studies, runs = [], []
    for path in paths:
        for file in _files(path) if path.is_dir() else [path]:
            if "study" in store.read_attributes(file):
                studies.append(load_study_file(file))
            else:
                runs.append(load_run(file))
    return studies, sorted(runs, key=lambda run: str(run.attributes["date"]))


def _files(directory: Path) -> list[Path]:
    if (directory / STUDY).exists():
        return [directory / STUDY]
    files = [file for file in sorted(directory.glob("*.h5")) if not file.name.startswith(".")]
    runs = [file for file in files if store.read_attributes(file).get("kind") == "run"]
    if not runs:
        raise ReportError(f"{directory}: there is no file of a study or of a run in this directory")
    return runs

"""Put the finished cases of a study into one file, with medians, intervals and speed-ups."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from ..store import StoreError
from .actions import folder_of
from .case import Case
from .folder import Folder, FolderError
from .result import Result, read_result
from .spec import Study
from .studyfile import write_study
from .sweep import expand

SUMMARY = "write study.h5 from the finished cases; status complete or partial"


@dataclass(frozen=True)
class Found:
    """What lies in a folder. unfit: files that are left out, each with the reason."""

    results: list[tuple[Case, Result]]
    missing: list[Case]
    unfit: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of collect: none."""


def run(arguments: argparse.Namespace) -> int:
    """Write the study file; return 0. Raises FolderError where no case is finished."""
    study, folder = folder_of(arguments)
    collect(study, folder)
    return 0


def collect(study: Study, folder: Folder) -> Found:
    """Write the study file of a folder, and print what is in it and what is left out.

    Nothing is deleted or changed but the study file. Raises FolderError where no case is finished,
    or the file cannot be written.
    """
    found = find(folder, expand(study).cases)
    for name, reason in found.unfit.items():
        print(f"left out: {name}: {reason}")
    if not found.results:
        raise FolderError(f"{folder.cases}: no case of study {study.name} is finished")
    try:
        write_study(folder.study_file, study, found.results, len(found.missing))
    except OSError as error:
        raise FolderError(f"{folder.study_file}: cannot be written: {error}") from None
    total = len(found.results) + len(found.missing)
    print(f"{folder.study_file}: {len(found.results)} of {total} cases")
    return found


def find(folder: Folder, cases: list[Case]) -> Found:
    """Return the results of cases, which of them have none, and files that are none of theirs."""
    results, missing, unfit = [], [], dict[str, str]()
    files = {path.name for path in folder.cases.glob("*.h5") if not path.name.startswith(".")}
    for case in cases:
        path = folder.case_file(case)
        if path.name not in files:
            missing.append(case)
            continue
        files.discard(path.name)
        try:
            results.append((case, read_result(path, case)))
        except StoreError as error:
            unfit[path.name] = f"{error}; without this file it is measured again"
            missing.append(case)
    foreign = dict.fromkeys(sorted(files), "is of no case of this study")
    return Found(results, missing, unfit | foreign)

"""python -m cpdhpc study: the actions, and what their command lines have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from .folder import Folder
from .spec import Study, load_study

ACTIONS = {  # each module has SUMMARY, add_arguments and run(arguments) -> exit status
    "plan": "cpdhpc.study.plan",
    "render": "cpdhpc.study.render",
    "submit": "cpdhpc.study.submit",
    "run": "cpdhpc.study.run",
    "status": "cpdhpc.study.status",
    "resume": "cpdhpc.study.resume",
    "collect": "cpdhpc.study.collect",
    "freeze": "cpdhpc.study.freeze",
}
RESULTS = Path("results")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all actions have."""
    parser.add_argument(
        "study", type=Path, metavar="STUDY.toml", help="the study, or the folder of one"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="lay a value over the file's, as sweep.ranks=[1,2]; may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the study (default: results/ + NAME)"
    )


def study_of(arguments: argparse.Namespace) -> tuple[Study, Folder]:
    """Return the study that the arguments name, and its folder, which need not be there yet.

    Raises ConfigError for what is wrong in the file.
    """
    if arguments.study.is_dir():
        folder = Folder(arguments.study)
        return load_study(folder.study_toml, arguments.set), folder
    study = load_study(arguments.study, arguments.set)
    return study, Folder(arguments.out or RESULTS / study.name)


def folder_of(arguments: argparse.Namespace) -> tuple[Study, Folder]:
    """Return the study and its folder, which must be this study's.

    Raises FolderError where it is not there, or is another study's.
    """
    study, folder = study_of(arguments)
    folder.check(study)
    return study, folder

"""python -m cpdhpc examples: copies the job files, job scripts and pages of the package."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from ...errors import UserError
from ...shipped import folder
from ...whole_files import StoreError, replacing

EXAMPLES = ("inputs", "slurm", "docs")  # folders that the command writes
BUILT = ("_build", "api")  # folders in docs of a clone that `make docs` writes


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of examples."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder that gets them")


def run_examples(arguments: argparse.Namespace) -> None:
    """Copy job files, job scripts and pages, and print the folders.

    Raises UserError if one exists or cannot be written.
    """
    targets = {name: arguments.directory / name for name in EXAMPLES}
    for target in targets.values():
        if target.exists():
            raise UserError(f"examples: {target} exists: name another folder")
    for name, target in targets.items():
        try:
            ignored = shutil.ignore_patterns("__pycache__", *BUILT)
            shutil.copytree(folder(name), target, ignore=ignored, copy_function=_copy)
        except (OSError, shutil.Error, StoreError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"examples: {target}: cannot be written: {reason}") from None
        print(target)


def _copy(source: str, target: str) -> None:
    with replacing(target) as file:
        file.write(Path(source).read_bytes())
        os.fchmod(file.fileno(), Path(source).stat().st_mode & 0o777)

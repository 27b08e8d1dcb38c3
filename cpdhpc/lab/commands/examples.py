"""Write job files, job scripts and pages that come with the package."""

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
    parser.add_argument("directory", type=Path, metavar="DIR", help="where they go")


def run_examples(arguments: argparse.Namespace) -> None:
    """Write job files, job scripts and pages, and print the folders.

    Raises UserError where one is there already, or cannot be written.
    """
    targets = {name: arguments.directory / name for name in EXAMPLES}
    for target in targets.values():
        if target.exists():
            raise UserError(f"examples: {target} is there already: name another folder")
    for name, target in targets.items():
        try:
            ignored = shutil.ignore_patterns("__pycache__", *BUILT)
            shutil.copytree(folder(name), target, ignore=ignored, copy_function=_copy)
        except (OSError, shutil.Error, StoreError) as error:
            said = getattr(error, "strerror", None) or error
            raise UserError(f"examples: {target}: cannot be written: {said}") from None
        print(target)


def _copy(source: str, target: str) -> None:
    with replacing(target) as file:
        file.write(Path(source).read_bytes())
        os.fchmod(file.fileno(), Path(source).stat().st_mode & 0o777)

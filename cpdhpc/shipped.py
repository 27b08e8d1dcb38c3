"""Files that come with the code: sources of kernels, job files, job scripts, pages."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from .config import UserError

EXAMPLES = ("inputs", "slurm", "docs")  # folders that the command writes


def folder(name: str) -> Path:
    """Return a folder of the project: within the package in a wheel, beside it in a clone."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


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
            shutil.copytree(folder(name), target, ignore=shutil.ignore_patterns("__pycache__"))
        except (OSError, shutil.Error) as error:
            raise UserError(f"examples: {target}: cannot be written: {error}") from None
        print(target)

"""Make the folder of a study and print its path: for job scripts of your own."""

from __future__ import annotations

import argparse

from .actions import study_of

SUMMARY = "make the folder of a study and print its path, for job scripts of your own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of freeze: none."""


def run(arguments: argparse.Namespace) -> int:
    """Make the folder, or check that it is this study's, and print its path."""
    study, folder = study_of(arguments)
    folder.freeze(study)
    print(folder.path)
    return 0

"""Measure on this machine what is not finished yet; finished cases are left as they are."""

from __future__ import annotations

import argparse

from .actions import folder_of
from .run import measure

SUMMARY = "measure what is not finished, on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of resume: none."""


def run(arguments: argparse.Namespace) -> int:
    """Go on with a study; return 0 where all cases are finished, else 1, or 130."""
    study, folder = folder_of(arguments)
    return measure(study, folder)

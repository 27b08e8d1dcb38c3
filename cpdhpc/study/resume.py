"""Go on with a study as it was begun, here or by Slurm; finished cases are left as they are."""

from __future__ import annotations

import argparse

from .actions import folder_of
from .jobs import recorded
from .run import measure
from .site import add_site, load_site
from .submit import SITE, submit

SUMMARY = "measure what is not finished: on this machine, or by Slurm where it was submitted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of resume."""
    add_site(parser)


def run(arguments: argparse.Namespace) -> int:
    """Go on with a study; return 0 where all is finished or submitted, else 1, or 130.

    --site, or jobs of Slurm in the folder: submit, with the site of the last time by default
    """
    study, folder = folder_of(arguments)
    if arguments.site is None and not recorded(folder):
        return measure(study, folder)
    submit(study, folder, load_site(arguments.site or folder.path / SITE))
    return 0

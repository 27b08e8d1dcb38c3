"""Print the Slurm scripts of a study: what submit would hand to sbatch, nothing being finished."""

from __future__ import annotations

import argparse

from ..config import UserError, suggest
from .actions import study_of
from .batch import batches
from .folder import Folder
from .site import Site, add_site, load_site
from .spec import Study
from .submit import fitting, scripts
from .sweep import expand

SUMMARY = "print the Slurm scripts of all cases, and of the job that collects"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of render."""
    add_site(parser)
    parser.add_argument(
        "--script", metavar="NAME", help="print this one alone, as sbatch takes it: 2x4 or collect"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the scripts, each under its name, or the one that is asked for."""
    study, folder = study_of(arguments)
    print(render(study, folder, load_site(arguments.site), arguments.script), end="")
    return 0


def render(study: Study, folder: Folder, site: Site, only: str | None = None) -> str:
    """Return the scripts of a study as text; only: the name of one.

    Raises UserError where there is no such script, or the site has room for none.
    """
    todo, refused = fitting(batches(study, expand(study).cases), site)
    if not todo:
        raise UserError(f"render: nothing can be submitted: {refused[0][1]}")
    texts = {path.stem: text for path, text in scripts(study, folder, site, todo).items()}
    if only is None:
        return "\n".join(f"==> {name} <==\n{text}" for name, text in texts.items())
    if only not in texts:
        raise UserError(f"--script {only}: {suggest(only, texts)}")
    return texts[only]

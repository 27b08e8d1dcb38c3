"""python -m cpdhpc train and autoencoder: their arguments, and what they print."""

from __future__ import annotations

import argparse
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from ..settings import add_settings, options, settings_of

if TYPE_CHECKING:
    from ...world.mpi import World


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of train, and the names that a job file may use."""
    from ..train.job import choices

    lines = [f"{key}: {', '.join(names)}" for key, names in choices().items()]
    shown = "\n".join(fill(line, 80, initial_indent=" " * 4, subsequent_indent=" " * 8)
                      for line in lines)  # fmt: skip
    parser.description = f"{parser.description}\n\nNames that a job file may use:\n\n{shown}"
    _add_job(parser, "train.epochs=3 or data.dir=DIR")


def _add_job(parser: argparse.ArgumentParser, example: str) -> None:
    add = options(parser)
    add("file FILE.toml", "the job", Path)
    add_settings(parser, f"replace a value of the file, for example {example}; may be repeated")
    add("--out DIR", "folder of the results (default: results/ + FILE's name)", Path)
    add("--resume", "continue from the checkpoints in DIR, and skip runs that are complete")


def run_train(arguments: argparse.Namespace, world: World) -> int:
    """Run a job file and print the table of its runs. Collective.

    Raises UserError if runs diverged, after the table of the others.
    """
    from ...config import UserError
    from ..train.command import train

    directory = _directory(arguments)
    settings = settings_of(arguments)
    files, diverged = train(world, arguments.file, settings, directory, arguments.resume)
    if world.process == 0 and len(diverged) < len(files):
        from ..train.progress import on_terminal
        from .report import Outputs, report

        report(files, Outputs(terminal=on_terminal()))
        print(f"records: {directory}/*.h5")
    if diverged:
        raise UserError(f"{len(diverged)} of {len(files)} runs: {'; '.join(diverged)}")
    return 0


def add_autoencoder(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of autoencoder: those of train, and a picture."""
    _add_job(parser, "train.iterations=3 or data.path=FILE")
    options(parser)("--png FILE.png", "draw the filters of the first layer", Path)


def run_autoencoder(arguments: argparse.Namespace, world: World) -> int:
    """Train the layers of an autoencoder. Collective."""
    from ..autoencoder.command import train

    settings, directory = settings_of(arguments), _directory(arguments)
    record = train(world, arguments.file, settings, directory, arguments.resume, arguments.png)
    if world.process == 0:
        print(f"record: {record}")
    return 0


def _directory(arguments: argparse.Namespace) -> Path:
    return arguments.out or Path("results") / arguments.file.stem

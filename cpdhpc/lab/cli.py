"""The command line: python -m cpdhpc COMMAND ..., under mpirun or without it."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..lazy import Late, to_install
from .commands import Command
from .commands.parsing import USER_ERROR, parser, refuse, started_by_mpirun
from .signals import (
    INTERRUPTED,
    Interrupted,
    let_interrupt_end,
    outlive_readers,
    raising_interrupt,
)

if TYPE_CHECKING:
    from ..world import ending, mpi, timeline
    from ..world.mpi import World
    from . import settings
else:
    ending, mpi, timeline = (Late(f"cpdhpc.world.{name}") for name in ("ending", "mpi", "timeline"))
    settings = Late("cpdhpc.lab.settings")

TIMEOUT_S = 600.0  # of every wait for other processes


READ = "file", "machine", "labels"  # arguments that name a file that is read
WITHOUT_WORD = "file", "folder", "number"  # arguments with no --word before them


def _shown(name: str, value: object) -> str:
    """Return a value as it is compared: of files that are read the name, as each node may have one.

    Commands compare their contents.
    """
    if not isinstance(value, Path):
        return repr(value)
    return value.name if name in READ else str(value)


def _check_same_options(arguments: argparse.Namespace, world: World) -> None:
    """Raise UserError on all processes if their arguments differ. Collective."""
    every = vars(arguments).items()
    given = {name: _shown(name, value) for name, value in every if not isinstance(value, Command)}
    everyone = world.gather(given, "arguments")
    for process, other in enumerate(everyone):
        for name in sorted(everyone[0].keys() | other.keys()):
            first, own = everyone[0].get(name), other.get(name)
            if own != first:
                words = name.upper() if name in WITHOUT_WORD else f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{words}: {first} on process 0, {own} on process "
                    f"{process}: must be the same on all"
                )


def _traced(command: Command, arguments: argparse.Namespace, world: World) -> int:
    """Run a command, and write a timeline of it if that is asked for. Collective."""
    path: Path | None = arguments.trace
    if path is not None:
        world.on_first(partial(settings.check_file, path, "--trace"))
    with timeline.traced(world, path):
        status = command.run(arguments, world)
    if path is not None and world.process == 0:
        print(f"trace: {path}")
    return status


@dataclass
class _Ranks:
    """The processes of this command; world: None before it is made, or if there are no others."""

    world: World | None = None

    @property
    def alone(self) -> bool:
        return self.world is None or self.world.processes == 1

    @property
    def name(self) -> str:
        """The prefix of an error of this process."""
        return "" if self.world is None else f"rank {self.world.hosted.start} | "


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status.

    An error that the user can correct is one line from process 0, and status 2 on all processes:
    commands raise it on all of them. Any other error of one process ends the job. A run that a
    signal has stopped, after it wrote its checkpoint, has its own status.
    """
    try:
        from .. import config  # noqa: F401 - all commands need what it does
    except ModuleNotFoundError as error:
        return refuse(to_install(error, "lab") or str(error))
    ranks = _Ranks()
    if argv is None:
        _begin_program()
    try:
        return _run(ranks, sys.argv[1:] if argv is None else argv, is_program=argv is None)
    except Interrupted as stop:
        return stop.status
    except UserError as error:
        return refuse(str(error), shown=ranks.world is None or ranks.world.process == 0)
    except BrokenPipeError:  # the reader of the output, for example head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if not ranks.alone:  # the others wait for this process
            ending.abort_job(f"{ranks.name}interrupted", INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        return _end(error, ranks)


def _begin_program() -> None:
    """Set up signals, output and warnings of a program, as opposed to a call of main."""
    let_interrupt_end()
    if isinstance(sys.stdout, io.TextIOWrapper):  # tables have ± and lines
        sys.stdout.reconfigure(errors="replace")
    # A warning is one line, without its place in the source.
    warnings.formatwarning = lambda message, *_: f"cpdhpc: warning: {message}\n"


def _run(ranks: _Ranks, argv: list[str], is_program: bool) -> int:
    """Run a command; under mpirun a wrong command line is an error of all processes."""
    wrong, timeout_s = None, TIMEOUT_S
    try:
        arguments = parser(argv).parse_args(argv)
        command: Command = arguments.run
        # --watch ends if nobody reads its output any more.
        if is_program and getattr(arguments, "watch", None) is None:
            outlive_readers()
    except UserError as error:  # under mpirun maybe on some processes only
        if started_by_mpirun() == 1:
            raise
        wrong = error
    if wrong is None:
        if command.starts_mpi and (copies := started_by_mpirun()) > 1:
            raise UserError(
                f"{' '.join(argv[:2])}: calls mpirun itself: start one copy of it, not {copies}"
            )
        if not command.on_ranks:
            with raising_interrupt():
                return command.run(arguments)
        timeout_s = arguments.timeout or TIMEOUT_S
    ranks.world = world = mpi.World(timeout_s=timeout_s)
    world.agree(wrong, of_call=True)
    _check_same_options(arguments, world)
    return _traced(command, arguments, world)


def _end(error: Exception, ranks: _Ranks) -> int:
    """Return the status for an error that the user can correct; for others end the job."""
    cause = to_install(error, "lab") if isinstance(error, ImportError) else None
    if isinstance(error, MemoryError):
        cause = f"not enough memory: {error}"
    if cause is not None and ranks.alone:
        return refuse(cause)
    if cause is not None:
        ending.abort_job(f"cpdhpc: error: {cause}", USER_ERROR)
    ending.abort_job(ranks.name + traceback.format_exc())

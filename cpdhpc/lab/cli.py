"""The command line: python -m cpdhpc COMMAND ..., under mpirun or without it."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..lazy import to_install
from .commands import Command
from .commands.parsing import USER_ERROR, parser, refuse, started_by_mpirun

if TYPE_CHECKING:
    from ..world.mpi import World

TIMEOUT_S = 600.0  # of every wait for other processes


def _check_same_options(arguments: argparse.Namespace, world: World) -> None:
    """Raise UserError on all processes if their options differ. Collective.

    Paths may differ: commands compare the contents of their files.
    """
    from ..config import UserError

    given = {k: repr(v) for k, v in vars(arguments).items() if not isinstance(v, Path | Command)}
    everyone = world.gather(given, "arguments")
    for process, other in enumerate(everyone):
        for name in sorted(everyone[0].keys() | other.keys()):
            first, own = everyone[0].get(name), other.get(name)
            if own != first:
                raise UserError(
                    f"--{name.replace('_', '-')}: {first} on process 0, {own} on process "
                    f"{process}: must be the same on all"
                )


def _traced(command: Command, arguments: argparse.Namespace, world: World) -> int:
    """Run a command, and write a timeline of it if that is asked for. Collective."""
    from ..world.timeline import traced
    from .settings import check_file

    path: Path | None = arguments.trace
    if path is not None:
        world.on_first(partial(check_file, path, "--trace"))
    with traced(world, path):
        status = command.run(arguments, world)
    if path is not None and world.process == 0:
        print(f"trace: {path}")
    return status


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status.

    An error that the user can correct is one line from process 0, and status 2 on all processes:
    commands raise it on all of them. Any other error of one process ends the job. A run that a
    signal has stopped, after it wrote its checkpoint, has its own status.
    """
    try:
        from ..config import UserError
        from .signals import (
            INTERRUPTED,
            Interrupted,
            let_interrupt_end,
            outlive_readers,
            raising_interrupt,
        )
    except ModuleNotFoundError as error:
        return refuse(to_install(error, "lab") or str(error))

    is_program = argv is None
    if is_program:
        let_interrupt_end()
        if isinstance(sys.stdout, io.TextIOWrapper):  # tables have ± and lines
            sys.stdout.reconfigure(errors="replace")
        # A warning is one line, without its place in the source.
        warnings.formatwarning = lambda message, *_: f"cpdhpc: warning: {message}\n"
    argv = sys.argv[1:] if argv is None else argv
    world, wrong, timeout_s = None, None, TIMEOUT_S
    try:
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
        if wrong is None and command.starts_mpi and (copies := started_by_mpirun()) > 1:
            raise UserError(
                f"{' '.join(argv[:2])}: calls mpirun itself: start one copy of it, not {copies}"
            )
        if wrong is None and not command.on_ranks:
            with raising_interrupt():
                return command.run(arguments)
        from ..world.mpi import World

        if wrong is None:
            timeout_s = arguments.timeout or TIMEOUT_S
        world = World(timeout_s=timeout_s)
        world.agree(wrong, of_call=True)
        _check_same_options(arguments, world)
        return _traced(command, arguments, world)
    except Interrupted as stop:
        return stop.status
    except UserError as error:
        return refuse(str(error), shown=world is None or world.process == 0)
    except BrokenPipeError:  # the reader of the output, for example head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if world is not None and world.processes > 1:  # the others wait for this process
            from ..world.ending import abort_job

            abort_job(f"rank {world.hosted.start} | interrupted", INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        cause = to_install(error, "lab") if isinstance(error, ImportError) else None
        if isinstance(error, MemoryError):
            cause = f"not enough memory: {error}"
        if cause is not None and (world is None or world.processes == 1):
            return refuse(cause)
        from ..world.ending import abort_job

        if cause is not None:
            abort_job(f"cpdhpc: error: {cause}", USER_ERROR)
        rank = "" if world is None else f"rank {world.hosted.start} | "
        abort_job(rank + traceback.format_exc())

"""The command line: python -m cpdhpc COMMAND ..., under mpirun or without it."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import (
    SLOWER,
    add_autoencoder,
    add_batch,
    add_info,
    add_report,
    add_timeout,
    add_train,
)

if TYPE_CHECKING:
    from .comm import World

TIMEOUT_S = 600.0  # of every wait for other processes
USER_ERROR = 2  # exit status, as argparse has it


def train(arguments: argparse.Namespace, world: World) -> int:
    """Run a job file and print the table of its runs. Collective."""
    from .signals import Interrupted
    from .train.command import train as run

    directory = arguments.out or Path("results") / arguments.file.stem
    try:
        files = run(world, arguments.file, _settings(arguments), directory, arguments.resume)
    except Interrupted as stop:
        return stop.status
    if world.rank == 0:
        from .study.report.command import report
        from .train.progress import on_terminal

        report(files, terminal=on_terminal())
        print(f"records: {directory}/*.h5")
    return 0


def autoencoder(arguments: argparse.Namespace, world: World) -> int:
    """Train the layers of an autoencoder. Collective."""
    from .signals import Interrupted
    from .train.autoencoder.command import Options
    from .train.autoencoder.command import train as run

    directory = arguments.out or Path("results") / arguments.file.stem
    options = Options(
        arguments.file, _settings(arguments), directory, arguments.resume, arguments.png
    )
    try:
        record = run(world, options)
    except Interrupted as stop:
        return stop.status
    if world.rank == 0:
        print(f"record: {record}")
    return 0


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Return what --set gives, and --timeout."""
    if arguments.timeout is None:
        return list(arguments.set)
    return [*arguments.set, f"train.timeout_s={arguments.timeout!r}"]


def report(arguments: argparse.Namespace) -> int:
    """Show studies and training runs that are files already, or what changed between two."""
    from .config import UserError
    from .study.report import command

    if arguments.fail_on_slower and not arguments.compare:
        raise UserError("--fail-on-slower: goes with --compare")
    if arguments.png and arguments.compare:
        raise UserError(f"--png {arguments.png}: goes not with --compare; --figures DIR does")
    if arguments.compare:
        options = arguments.html, arguments.figures, arguments.quiet
        slower = command.compare_files(arguments.files, *options)
        return SLOWER if slower and arguments.fail_on_slower else 0
    command.report(
        arguments.files,
        png=arguments.png,
        html=arguments.html,
        figures=arguments.figures,
        quiet=arguments.quiet,
    )
    return 0


def batch(arguments: argparse.Namespace, world: World) -> int:
    """Measure the unfinished cases of a study's batch. Collective."""
    from .point.batch import run_batch

    shape = arguments.nodes, arguments.ppn
    return run_batch(world, arguments.folder, arguments.number, *shape)


def study(arguments: argparse.Namespace) -> int:
    """Do one of the actions of a study."""
    from importlib import import_module

    from .study.actions import ACTIONS

    return int(import_module(ACTIONS[arguments.action]).run(arguments))


def darray(arguments: argparse.Namespace) -> int:
    """Show a plan of windows."""
    from importlib import import_module

    import_module(DARRAY[arguments.action]).run(arguments)
    return 0


def scripts(arguments: argparse.Namespace) -> int:
    """Write job scripts for a site."""
    from .study.standalone import run

    return run(arguments)


def info(arguments: argparse.Namespace, world: World) -> int:
    """Print what this machine has. Collective."""
    from .info import print_info

    print_info(world)
    return 0


def bench_alone(arguments: argparse.Namespace) -> int:
    """Run a benchmark of this process."""
    from importlib import import_module

    from .bench import ALONE

    import_module(ALONE[arguments.bench]).run(arguments)
    return 0


def bench(arguments: argparse.Namespace, world: World) -> int:
    """Run a benchmark of all processes. Collective."""
    from importlib import import_module

    from .bench import TOGETHER

    import_module(TOGETHER[arguments.bench]).run(arguments, world)
    return 0


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks, each with its own arguments."""
    from importlib import import_module

    from .bench import ALONE, TOGETHER

    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    for name, path in (ALONE | TOGETHER).items():
        module = import_module(path)
        added = benches.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        module.add_arguments(added)
        if name in ALONE:
            added.set_defaults(alone=bench_alone)
        else:
            add_timeout(added)


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the actions of study, each with its own arguments."""
    from importlib import import_module

    from .study.actions import ACTIONS, add_common

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, path in ACTIONS.items():
        module = import_module(path)
        added = actions.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        add_common(added)
        module.add_arguments(added)


DARRAY = {"show": "cpdhpc.darray.show"}  # action -> module with SUMMARY, add_arguments and run


def add_darray(parser: argparse.ArgumentParser) -> None:
    """Add the actions of darray, each with its own arguments."""
    from importlib import import_module

    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, path in DARRAY.items():
        module = import_module(path)
        module.add_arguments(
            actions.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        )


def add_scripts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of scripts."""
    from .study.standalone import add_arguments

    add_arguments(parser)


Add = Callable[[argparse.ArgumentParser], None]
ALONE: dict[str, tuple[Callable[[argparse.Namespace], int], Add, str]] = {
    "study": (study, add_study, "plan and run a sweep here or by Slurm, collect it; needs no MPI"),
    "scripts": (scripts, add_scripts, "write sbatch scripts for a site; needs no MPI"),
    "darray": (darray, add_darray, "show plans of distributed arrays; needs no MPI"),
    "report": (report, add_report, "show studies and runs: tables, figures, a page; needs no MPI"),
}
TOGETHER: dict[str, tuple[Callable[[argparse.Namespace, World], int], Add, str]] = {
    "train": (train, add_train, "train a job file's rows with all seeds, on all MPI ranks"),
    "autoencoder": (autoencoder, add_autoencoder, "train filters whose cells are split over ranks"),
    "bench": (bench, add_bench, "measure this machine, predict others; codec needs no MPI"),
    "batch": (batch, add_batch, "measure cases of a study: what its jobs run, on all MPI ranks"),
    "info": (info, add_info, "show versions, the MPI library, hosts, kernels, the GPU"),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="cpdhpc", description="Distributed deep learning over MPI with gradients of few bits."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, add, text) in (TOGETHER | ALONE).items():
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in ALONE:
            added.set_defaults(alone=ALONE[name][0])
        add(added)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status.

    What the user can mend is one line from process 0 and status 2 everywhere; commands see to it
    that all processes raise it alike. Any other error of one process ends the job.
    """
    from .comm.mpi_library import abort_job
    from .config import UserError

    arguments = parser().parse_args(argv)
    world = None
    try:
        if "alone" in arguments:
            return int(arguments.alone(arguments))
        from .comm import World

        world = World(timeout_s=getattr(arguments, "timeout", None) or TIMEOUT_S)
        return TOGETHER[arguments.command][0](arguments, world)
    except UserError as error:
        if world is None or world.rank == 0:
            print(f"cpdhpc: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return USER_ERROR
    except BrokenPipeError:  # the reader, as head, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt):
        who = "" if world is None else f"rank {world.hosted.start} | "
        abort_job(who + traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())

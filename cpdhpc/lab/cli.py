"""The command line: python -m cpdhpc COMMAND ..., under mpirun or without it."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__
from ..lazy import to_install
from ..methods import nearest, suggest

if TYPE_CHECKING:
    from ..world.mpi import World


class Help(argparse.HelpFormatter):
    """Help that says the default of each option which has one, where its text does not."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if action.nargs == 0 or default in (None, argparse.SUPPRESS, "", []) or "default" in text:
            return text
        return f"{text} (default {str(default).replace('%', '%%')})"


def seconds(text: str) -> float:
    """Return a time, above zero; ArgumentTypeError, which argparse shows, for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds above 0")
    return value


def number(kind: Callable[[str], Any], what: str, text: str) -> Any:
    """Return what text is as kind; ArgumentTypeError for anything else."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be {what}") from None


def path_of(text: str) -> Path:
    """Return a path; ArgumentTypeError for none, which pathlib takes for this directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: a variable of the shell without a value?")
    return Path(text)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Add the time after which a wait for other processes ends the job, and the file of a trace."""
    from .settings import options

    options(parser)(
        "--timeout SECONDS",
        "end the job, and say who waits for whom, where a wait takes longer (default 600)",
        seconds,
    )
    options(parser)(
        "--trace FILE",
        "write what each rank did when, for Perfetto; FILE.gz: compressed "
        "(docs/measurements/performance.md)",
        path_of,
    )


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of train, and the names that a job file may give."""
    from .train.job import choices

    parser.epilog = "Known: " + "; ".join(f"{k} {', '.join(v)}" for k, v in choices().items())
    _add_job(parser, "train.epochs=3 or data.dir=DIR")


def _add_job(parser: argparse.ArgumentParser, example: str) -> None:
    from .settings import add_settings, options

    add = options(parser)
    add("file FILE.toml", "the job", Path)
    add_settings(parser, f"lay a value over the file's, as {example}; may be repeated")
    add("--out DIR", "where files go (default: results/ + FILE's name)", Path)
    add("--resume", "go on from the checkpoints in DIR and skip the runs that are complete")


def add_autoencoder(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of autoencoder: those of train, and a picture."""
    from .settings import options

    _add_job(parser, "train.iterations=3 or data.path=FILE")
    options(parser)("--png FILE.png", "draw the first layer's filters into an image", Path)


TIMEOUT_S = 600.0  # of every wait for other processes
USER_ERROR = 2  # exit status, as argparse has it


def run_train(arguments: argparse.Namespace, world: World) -> int:
    """Run a job file and print the table of its runs. Collective.

    Raises UserError where runs diverged, behind the table of the others.
    """
    from ..config import UserError
    from .settings import settings_of
    from .train.command import train

    directory = arguments.out or Path("results") / arguments.file.stem
    given = arguments.file, settings_of(arguments), directory, arguments.resume
    files, diverged = train(world, *given)
    if world.process == 0 and len(diverged) < len(files):
        from .commands.report import Outputs, report
        from .train.progress import on_terminal

        report(files, Outputs(terminal=on_terminal()))
        print(f"records: {directory}/*.h5")
    if diverged:
        raise UserError(f"{len(diverged)} of {len(files)} runs: {'; '.join(diverged)}")
    return 0


def run_autoencoder(arguments: argparse.Namespace, world: World) -> int:
    """Train the layers of an autoencoder. Collective."""
    from .autoencoder.command import train
    from .settings import settings_of

    directory = arguments.out or Path("results") / arguments.file.stem
    given = arguments.file, settings_of(arguments), directory, arguments.resume
    record = train(world, *given, arguments.png)
    if world.process == 0:
        print(f"record: {record}")
    return 0


@dataclass(frozen=True)
class Command:
    """A command, or an action of one; its module is imported when it is the one asked for.

    The module has add_NAME(parser) and run_NAME(arguments) -> exit status, None for 0, or points
    for --out; without a name add_arguments and run, and its docstring is the long help.
    on_ranks: all processes of mpirun run it, as run(arguments, world); it has --timeout
    starts_mpi: it calls mpirun itself, and is refused where mpirun has started several of it
    """

    summary: str
    module: str
    name: str = ""
    on_ranks: bool = False
    starts_mpi: bool = False

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to its parser."""
        module = import_module(f"cpdhpc.lab.{self.module}")
        getattr(module, f"add_{self.name}" if self.name else "add_arguments")(parser)
        if not self.name:
            parser.description = module.__doc__
        if self.on_ranks:
            add_timeout(parser)
        parser.set_defaults(run=self)

    def run(self, *given: Any) -> int:
        """Run it, collectively where it is on_ranks, and return the exit status."""
        if getattr(given[0], "png", None) is not None:
            from .settings import check_picture

            look = partial(check_picture, given[0].png, "--png")
            given[1].on_first(look) if self.on_ranks else look()
        module = import_module(f"cpdhpc.lab.{self.module}")
        found = getattr(module, f"run_{self.name}" if self.name else "run")(*given)
        if found is None or isinstance(found, int):
            return found or 0
        import_module("cpdhpc.lab.study.batch").write_benchmark(found, *given)
        return 0


@dataclass(frozen=True)
class Group:
    """A command with actions of its own; default: what it does without one, if anything."""

    summary: str
    actions: dict[str, Command]
    default: Command | None = None


def actions(
    module: str,
    summaries: Mapping[str, str],
    on_ranks: Collection[str] = (),
    starts_mpi: Collection[str] = (),
) -> dict[str, Command]:
    """Return the actions of one module by name."""
    return {
        name: Command(text, module, name, name in on_ranks, name in starts_mpi)
        for name, text in summaries.items()
    }


COMMANDS: dict[str, Command | Group] = {
    "train": Command(
        "train a job file's rows with all seeds, on all MPI ranks", "cli", "train", True
    ),
    "export": Command(
        "write a trained quantised network as integers; needs no MPI", "train.export"
    ),
    "autoencoder": Group(
        "train filters whose cells are split over ranks; probe shows what they have learned",
        {
            "probe": Command(
                "what neurons of a trained stack answer to: accuracy, optimal stimuli, features",
                "commands.trained",
                "probe",
                on_ranks=True,
            )
        },
        Command("train filters whose cells are split over ranks", "cli", "autoencoder", True),
    ),
    "influence": Command("find which samples made a loss", "commands.trained", "influence", True),
    "bench": Group(
        "measure this machine, predict others; which of it goes under mpirun is said",
        {
            "accuracy": Command(
                "error of the simulated sum by algorithm, accumulation and scaling",
                "bench.accuracy",
            ),
            "batchnorm": Command(
                "batch norms as integers: shifts, differences", "bench.accuracy", "batchnorm"
            ),
            "codec": Command(
                "codec rates on one core or more, in GB/s of float32, beside memcpy",
                "bench.codec",
            ),
            "rounding": Command(
                "error of rounding once by format and by how many values share an exponent",
                "bench.accuracy",
                "rounding",
            ),
            "layer": Command(
                "what a layer of the autoencoder costs each of many ranks, counted; needs no MPI",
                "bench.layer",
            ),
            "optimizer": Command(
                "steps of optimizers beside torch's fused Adam, SGD and AdamW; needs no MPI",
                "bench.optimizers",
            ),
            "predict": Command(
                "predicted times on any number of ranks, from a file of bench fit; needs no MPI",
                "bench.machine",
                "predict",
            ),
            "throughput": Command(
                "samples/s of many workers, by compressor and link; needs no MPI",
                "bench.throughput",
            ),
            "allreduce": Command(
                "all-reduces by size, beside MPI_Allreduce, gloo, memcpy and a bound; under mpirun",
                "bench.allreduce",
                on_ranks=True,
            ),
            "compress": Command(
                "compressors on recorded gradients: bytes, errors, time; under mpirun or not",
                "bench.compress",
                on_ranks=True,
            ),
            "latency": Command(
                "latency of all-reduces, tree beside MPI_Allreduce and memcpy; under mpirun",
                "bench.allreduce",
                "latency",
                on_ranks=True,
            ),
            "fit": Command(
                "measure links, additions and the codec, and fit the model of predictions; "
                "under mpirun",
                "bench.machine",
                "fit",
                on_ranks=True,
            ),
            "overlap": Command(
                "training steps with overlap of reduction and backward and without; under mpirun",
                "bench.overlap",
                on_ranks=True,
            ),
            "step": Command(
                "a training step of your model beside DistributedDataParallel; under mpirun",
                "bench.step",
                on_ranks=True,
            ),
            "fsdp": Command(
                "loss after training by FSDP2 over gloo and over MPI in few bits; under mpirun",
                "bench.fsdp",
                on_ranks=True,
            ),
            "torch": Command(
                "collectives of torch.distributed over MPI, beside gloo; under mpirun",
                "bench.torch_calls",
                on_ranks=True,
            ),
            "halo": Command(
                "halo exchanges beside MPI's datatypes and neighbour collectives; under mpirun",
                "bench.halo",
                on_ranks=True,
            ),
            "split": Command(
                "networks on split images beside plain torch on a rank's part; under mpirun",
                "bench.split",
                on_ranks=True,
            ),
        },
    ),
    "batch": Command(
        "measure cases of a study: what its jobs run, on all MPI ranks",
        "commands.study",
        "batch",
        True,
    ),
    "programs": Command(
        "measure cases of a study of programs, whose ranks it starts itself: what its jobs run",
        "commands.study",
        "programs",
        starts_mpi=True,
    ),
    "info": Command(
        "show versions, the MPI library, hosts, kernels, the GPU", "provenance", "info", True
    ),
    "verify": Command(
        "prove on this machine that kernels, collectives and trainings are right, and how fast; "
        "under mpirun",
        "commands.verify",
        on_ranks=True,
    ),
    "study": Group(
        "plan and run a sweep here or as jobs, collect it; needs no MPI",
        actions(
            "commands.study",
            {
                "plan": "show cases, ids, shapes, rank hours, and what is impossible and why",
                "render": "print the job scripts of all cases, and of the one that collects",
                "submit": "submit as jobs what is neither finished nor queued, and a job that "
                "collects",
                "run": "measure all cases on this machine with mpirun, then collect",
                "status": "show which cases are finished, running, pending, failed or missing, and "
                "why",
                "resume": "measure what is not finished: on this machine, or as jobs where it was "
                "submitted",
                "cancel": "take the study's jobs out of the queue",
                "extend": "add levels to the study of a folder; what is finished stays and counts",
                "collect": "write study.h5 of what is finished",
                "freeze": "make the folder of a study and print its path, for job scripts of your "
                "own",
            },
            starts_mpi=("run", "resume"),
        )
        | {
            "site": Command(
                "write the profile of this cluster or machine, as far as it can be found out",
                "commands.study",
                "site_action",
            )
        },
    ),
    "scripts": Command(
        "write the job scripts of this package's examples; needs no MPI",
        "commands.study",
        "scripts",
    ),
    "darray": Group(
        "show plans of distributed arrays; needs no MPI",
        {
            "show": Command(
                "a plan's ranks, windows and messages, as a table and a picture; needs no MPI",
                "darray_show",
            )
        },
    ),
    "examples": Command(
        "write this package's job files, job scripts and pages to a folder; needs no MPI",
        "commands.examples",
        "examples",
    ),
    "precision": Group(
        "arithmetic in small formats",
        actions(
            "commands.precision",
            {
                "presets": "list the presets of [precision], or print one as TOML; needs no MPI",
                "show": "what [precision] of a job file says of each layer; needs no MPI",
                "record": "train and record gradients, activations, errors and weights of layers",
                "replay": "what formats, sums and products do to recorded tensors; needs no MPI",
                "search": "the fewest bits of each layer within a budget of accuracy; under mpirun "
                "or not",
            },
            on_ranks=("record", "search"),
        ),
    ),
    "report": Command(
        "show studies and runs: tables, figures, a page; needs no MPI", "commands.report"
    ),
}


def started_by_mpirun() -> int:
    """Return how many processes of this command Open MPI's or MPICH's mpirun has started."""
    return max(int(os.environ.get(name, 1)) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong; with the command's usage if something is missing.

    Under mpirun that is a line, which main shows once.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.register("type", Path, path_of)
        self.register("type", int, partial(number, int, "an integer"))
        self.register("type", float, partial(number, float, "a number"))

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^:]+):", r"\1", message)
        if message.endswith("expected one argument"):
            message += ": one that begins with - goes after =, as --option=-1"
        said = f"{self.prog.removeprefix('cpdhpc').strip()}: {message}".removeprefix(": ")
        if started_by_mpirun() > 1:
            from ..config import UserError

            raise UserError(said)
        if "are required" in message:
            self.print_usage(sys.stderr)
        self.exit(_refuse(said))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            raise argparse.ArgumentError(action, f"{value}: {suggest(value, known)}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        for each in unknown:
            name = each.partition("=")[0]
            if not name.startswith("-"):
                self.error(f"{each}: is one argument more than there are: -h shows all")
            known = {each.lstrip("-"): each for each in self._option_string_actions}
            meant = " or ".join(known[each] for each in nearest(name.lstrip("-"), known))
            said = f"did you mean {meant}?" if meant else "-h shows all"
            self.error(f"unknown option {name}: {said}")
        return found, []


def parser(argv: list[str]) -> Parser:
    """Return the parser of a command line: all commands, the arguments of the one that it names."""
    top = Parser(
        prog="cpdhpc", description="Distributed deep learning over MPI with gradients of few bits."
    )
    top.add_argument("--version", action="version", version=f"cpdhpc {__version__}")
    _add_commands(top, COMMANDS, argv, "COMMAND")
    return top


def _add_commands(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, Command | Group],
    argv: list[str],
    metavar: str,
) -> None:
    """Add commands as sub-parsers; only the one that argv begins with loads its module."""
    parsers = parser.add_subparsers(dest=metavar.lower(), required=True, metavar=metavar)
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        parser.error(f"{metavar} {argv[0]}: {suggest(argv[0], commands)}")
    for name, row in commands.items():
        text = row.summary
        description = text[0].upper() + text[1:] + "."
        added = parsers.add_parser(name, help=text, description=description, formatter_class=Help)
        if argv[:1] != [name]:
            continue
        if isinstance(row, Group) and row.default and argv[1:2] not in [[a] for a in row.actions]:
            row.default.add(added)
        elif isinstance(row, Group):
            _add_commands(added, row.actions, argv[1:], "ACTION")
        else:
            row.add(added)


def _check_alike(arguments: argparse.Namespace, world: World) -> None:
    """Raise UserError on all processes where they were given other options. Collective.

    Files may have other paths: what is in them is compared by who reads them.
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


def _refuse(said: str, shown: bool = True) -> int:
    """Say in one line what the user can mend; return the exit status."""
    if shown:
        print(f"cpdhpc: error: {' '.join(said.split())}", file=sys.stderr, flush=True)
    return USER_ERROR


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit status.

    What the user can mend is one line from process 0 and status 2 everywhere; commands see to it
    that all processes raise it alike. Any other error of one process ends the job. A run that a
    signal has stopped, with its checkpoint written, has a status of its own.
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
        return _refuse(to_install(error, "lab") or str(error))

    if argv is None:
        let_interrupt_end()
    is_program = argv is None
    if is_program:  # what a command is warned of is one line, not a place in the source
        warnings.formatwarning = lambda message, *_: f"cpdhpc: warning: {message}\n"
    argv = sys.argv[1:] if argv is None else argv
    world, wrong, timeout_s = None, None, TIMEOUT_S
    try:
        try:
            arguments = parser(argv).parse_args(argv)
            command: Command = arguments.run
            if is_program and getattr(arguments, "watch", None) is None:  # which ends with it
                outlive_readers()
        except UserError as error:  # of Parser.error, under mpirun: maybe not on all processes
            wrong = error
        if wrong is None and command.starts_mpi and (copies := started_by_mpirun()) > 1:
            raise UserError(f"{' '.join(argv[:2])}: starts mpirun itself: not {copies} times by it")
        if wrong is None and not command.on_ranks:
            with raising_interrupt():
                return command.run(arguments)
        from ..world.mpi import World

        if wrong is None:
            timeout_s = arguments.timeout or TIMEOUT_S
        world = World(timeout_s=timeout_s)
        world.agree(wrong, of_call=True)
        _check_alike(arguments, world)
        return _traced(command, arguments, world)
    except Interrupted as stop:
        return stop.status
    except UserError as error:
        return _refuse(str(error), shown=world is None or world.process == 0)
    except BrokenPipeError:  # the reader, as head, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if world is not None and world.processes > 1:  # whose others wait for this one
            from ..world.ending import abort_job

            abort_job(f"rank {world.hosted.start} | interrupted", INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        lacking = to_install(error, "lab") if isinstance(error, ImportError) else None
        if isinstance(error, MemoryError):
            lacking = f"not enough memory: {error}"
        if lacking is not None and (world is None or world.processes == 1):
            return _refuse(lacking)
        from ..world.ending import abort_job

        if lacking is not None:
            abort_job(f"cpdhpc: error: {lacking}", USER_ERROR)
        who = "" if world is None else f"rank {world.hosted.start} | "
        abort_job(who + traceback.format_exc())

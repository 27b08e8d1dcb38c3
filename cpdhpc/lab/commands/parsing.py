"""The parser of the command line: commands by section, errors of one line, help with examples."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ... import __version__
from ...methods import nearest, suggest
from . import SECTIONS, Command, Group, epilog

USER_ERROR = 2  # exit status, the same as argparse's
START = (
    "cpdhpc train inputs/train_digits.toml",
    "mpirun -n 2 cpdhpc bench allreduce --sizes 64MiB",
)


class Help(argparse.HelpFormatter):
    """Help with the default of each option; indented paragraphs keep their lines."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if action.nargs == 0 or default in (None, argparse.SUPPRESS, "", []) or "default" in text:
            return text
        return f"{text} (default {str(default).replace('%', '%%')})"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if p.startswith("  ") else fill(p, width, indent) for p in parts)


def path_of(text: str) -> Path:
    """Return a path; raise ArgumentTypeError for "", which pathlib takes for this directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: a variable of the shell without a value?")
    return Path(text)


def number(kind: Callable[[str], Any], name: str, text: str) -> Any:
    """Return a number of a kind; raise ArgumentTypeError for any other text."""
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be {name}") from None


def refuse(message: str, shown: bool = True) -> int:
    """Print an error that the user can correct, in one line; return the exit status."""
    if shown:
        print(f"cpdhpc: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return USER_ERROR


def started_by_mpirun() -> int:
    """Return how many processes of this command Open MPI's or MPICH's mpirun has started."""
    return max(int(os.environ.get(name, 1)) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, after the command's usage if an argument is missing.

    Under mpirun it raises UserError instead, which main prints once.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.register("type", Path, path_of)
        self.register("type", int, partial(number, int, "an integer"))
        self.register("type", float, partial(number, float, "a number"))

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^:]+):", r"\1", message)
        if message.endswith("expected one argument"):
            message += ": write one that begins with - after =, for example --option=-1"
        line = f"{self.prog.removeprefix('cpdhpc').strip()}: {message}".removeprefix(": ")
        if started_by_mpirun() > 1:
            from ...config import UserError

            raise UserError(line)
        if "are required" in message:
            self.print_usage(sys.stderr)
        self.exit(refuse(line))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return a value; a UserError of the option's own type is raised, with the option."""
        from ...errors import UserError

        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, UserError):
                name = "/".join(action.option_strings) or action.metavar
                raise UserError(f"{name} {error.__context__}") from None
            raise

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            raise argparse.ArgumentError(action, f"{value}: {suggest(value, known)}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        for each in unknown:
            name = each.partition("=")[0]
            if not name.startswith("-"):
                self.error(f"{each}: is one argument too many: -h shows all")
            known = {each.lstrip("-"): each for each in self._option_string_actions}
            meant = " or ".join(known[each] for each in nearest(name.lstrip("-"), known))
            hint = f"did you mean {meant}?" if meant else "-h shows all"
            self.error(f"unknown option {name}: {hint}")
        return found, []


def parser(argv: list[str] | None) -> Parser:
    """Return the parser of a command line: all commands, the arguments of the one that it names.

    None: the arguments of all commands, as completion needs them
    """
    top = Parser(
        prog="cpdhpc",
        description="Distributed deep learning over MPI with gradients of few bits.",
        epilog=epilog(START) + "\n\ncpdhpc COMMAND --help shows the options of a command.",
        formatter_class=Help,
    )
    top.add_argument("--version", action="version", version=f"cpdhpc {__version__}")
    _add_commands(top, SECTIONS, argv, "COMMAND")
    return top


def _add_commands(
    parser: argparse.ArgumentParser,
    sections: Mapping[str, Mapping[str, Command | Group]],
    argv: list[str] | None,
    metavar: str,
) -> None:
    """Add commands as sub-parsers, which help lists by section; argv: as in parser."""
    commands = {name: row for rows in sections.values() for name, row in rows.items()}
    parsers = parser.add_subparsers(dest=metavar.lower(), required=True, metavar=metavar)
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        parser.error(f"{metavar} {argv[0]}: {suggest(argv[0], commands)}")
    for name, row in commands.items():
        added = parsers.add_parser(
            name,
            help=row.help,
            description=f"{row.help[0].upper()}{row.help[1:]}.",
            formatter_class=Help,
        )
        if argv is None or argv[:1] == [name]:
            _add_arguments(added, row, None if argv is None else argv[1:])
    parser._action_groups.remove(parser._positionals)  # argparse's list, without sections
    lines = {each.dest: each for each in parsers._choices_actions}
    for title, rows in sections.items():
        parser.add_argument_group(title)._group_actions.extend(lines[name] for name in rows)


def _add_arguments(
    parser: argparse.ArgumentParser, row: Command | Group, argv: list[str] | None
) -> None:
    """Add the arguments of a command, which loads its module; argv: what follows its name."""
    if isinstance(row, Group):
        if not row.default or argv is None or (argv and argv[0] in row.actions):
            parser.epilog = row.epilog(parser.prog)
            _add_commands(parser, {"actions": row.actions}, argv, "ACTION")
        if not row.default or (argv and argv[0] in row.actions):
            return
        row = row.default
    try:
        row.add(parser)
    except ModuleNotFoundError:
        if argv is not None:
            raise
        # Without torch, for example on login nodes, completion has the names of such commands only.

"""python -m cpdhpc completion: the script by which a shell completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..settings import options

SHELLS = ("bash", "zsh", "fish")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the argument of completion."""
    options(parser)("shell SHELL", "the shell that will read the script", choices=SHELLS)


def run_completion(arguments: argparse.Namespace) -> None:
    """Print the script. It starts no Python, so that a key press takes no time."""
    import shtab

    from .parsing import parser as parser_of

    parser = parser_of(None)
    for action in _actions(parser):
        if action.type is Path:
            kind = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
            action.complete = kind  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of all its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)

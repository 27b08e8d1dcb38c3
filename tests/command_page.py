"""Makes docs/reference/commands.md from the command line: `python tests/command_page.py`."""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill

from cpdhpc.lab.commands import COMMANDS, SECTIONS, Command, Group
from cpdhpc.lab.commands.parsing import parser

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "commands.md"
HEAD = """# Commands and their options

`python tests/command_page.py` makes this page from the command line's parsers, and a test compares
the two. `python -m cpdhpc COMMAND --help` shows the same. Every command has `--help`;
`python -m cpdhpc --version` shows the version. `cpdhpc` is `python -m cpdhpc`.

`docs/howto/install.md` shows how to complete them with Tab in your shell.
"""


def commands(of: Mapping[str, Command | Group] = COMMANDS) -> Iterator[list[str]]:
    """Every command, and every action of one."""
    for name, row in of.items():
        if isinstance(row, Command) or row.default:
            yield [name]
        if isinstance(row, Group):
            yield from ([name, action] for action in row.actions)


def parser_of(command: list[str]) -> argparse.ArgumentParser:
    """The parser of a command's arguments."""
    here: argparse.ArgumentParser = parser(command)
    for name in command:
        (actions,) = [a for a in here._actions if isinstance(a, argparse._SubParsersAction)]
        here = actions.choices[name]
    return here


def shown(action: argparse.Action) -> str:
    """An argument as it is given."""
    value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
    if not action.option_strings:
        return str(value)
    several = " ..." if action.nargs in ("+", "*") else ""
    given = value if action.nargs != "?" else f"[{value}]"
    return (
        f"{action.option_strings[-1]} {given}{several}"
        if action.nargs != 0
        else (action.option_strings[-1])
    )


def rows(of: argparse.ArgumentParser) -> Iterator[str]:
    """The table of a command's arguments."""
    yield from ("| argument | what it is |", "|---|---|")
    for action in of._actions:
        if not isinstance(action, argparse._HelpAction):
            text = of._get_formatter()._expand_help(action).replace("|", r"\|")
            needed = " (needed)" if action.required and action.option_strings else ""
            yield f"| `{shown(action)}` | {' '.join(text.split())}{needed} |"


def example_lines(of: argparse.ArgumentParser) -> list[str]:
    """The examples of a command's help, as one types them."""
    return re.findall(r"^    (.*)$", of.epilog or "", re.MULTILINE)


def words_of(example: str) -> list[str]:
    """The words of an example after mpirun and cpdhpc, without a redirection."""
    words = shlex.split(re.sub(r"^mpirun -n 2 ", "", example).partition(" > ")[0])
    assert words[0] == "cpdhpc", example
    return words[1:]


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a description, wrapped; indented ones keep their lines."""
    for part in text.strip().split("\n\n"):
        yield part if part.startswith("    ") else fill(part, 100, break_on_hyphens=False)


def page() -> str:
    """The page, whole."""
    lines = [HEAD]
    for title, rows_of in SECTIONS.items():
        lines += [f"## {title.capitalize()}", ""]
        for command in commands(rows_of):
            of = parser_of(command)
            lines += [f"### {' '.join(command)}", "", "\n\n".join(paragraphs(of.description or ""))]
            lines += ["", of.epilog or "", ""]
            if len(of._actions) > 1:
                lines += [*rows(of), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())

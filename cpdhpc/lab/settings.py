"""Options of commands, one line each; --set KEY=VALUE; checks of files to be written."""

from __future__ import annotations

import os
import re
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ..config import ConfigError, Raw, UserError, merge

T = TypeVar("T")


def override(
    raw: Raw, settings: Iterable[str], lay: Callable[[Raw, Raw], Raw] | None = None
) -> Raw:
    """Return raw with "a.b=value" settings applied; values are TOML, or .5, or else strings.

    lay: function that applies all of them to raw; None: merge
    Raises ConfigError for a setting of another form, or if a key before the last is no table.
    """
    changes: Raw = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(f"--set {setting}: the form is key=value or table.key=value")
        change: Any = _value(text.strip(), setting)
        for part in reversed(parts):
            change = {part: change}
        _check_path(merge(raw, changes), parts, setting)
        changes = merge(changes, change)
    return (lay or merge)(raw, changes)


def options(parser: ArgumentParser | _ArgumentGroup) -> Callable[..., None]:
    """Return a function that adds an argument to a parser: add("--every N", help, default or type).

    An option without a word for its value is a flag. Further arguments are those of add_argument.
    """

    def add(form: str, text: str, given: Any = None, **further: Any) -> None:
        name, _, value = form.partition(" ")
        if value:
            further["metavar"] = value
        if callable(given):
            further["type"] = given
        elif given is not None:
            further["default"] = given
            if type(given) in (int, float):
                further.setdefault("type", type(given))
        elif not value:
            further["action"] = "store_true"
        parser.add_argument(name, help=text, **further)

    return add


def seconds(text: str) -> float:
    """Return a time above zero; raise ArgumentTypeError for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"{text}: must be a number of seconds above 0")
    return value


def add_timeout(parser: ArgumentParser) -> None:
    """Add the time after which a wait for other processes ends the job, and the file of a trace."""
    add = options(parser)
    add(
        "--timeout SECONDS",
        "end the job if a rank waits longer for another; print which rank waits for which "
        "(default 600)",
        seconds,
    )
    add(
        "--trace FILE",
        "write a timeline of each rank for Perfetto; FILE.gz is compressed "
        "(docs/reference/timelines.md)",
        Path,
    )


def add_settings(parser: ArgumentParser, text: str, key: str = "KEY") -> None:
    """Add the option --set to a command line; text: its help."""
    parser.add_argument("--set", action="append", default=[], metavar=f"{key}=VALUE", help=text)


def settings_of(arguments: Namespace) -> list[str]:
    """Return the settings of a command line: those of --set, and --timeout."""
    timeout_s = arguments.timeout
    return [*arguments.set, *([] if timeout_s is None else [f"train.timeout_s={timeout_s!r}"])]


def blaming(load: Callable[[list[str]], T], settings: Iterable[str], path: Path) -> T:
    """Return load(settings). Raises ConfigError that names the setting without which load works."""
    given = list(settings)
    try:
        return load(given)
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path}: ")
        if reason.startswith("--set"):
            raise
        for i, setting in enumerate(given):
            try:
                load(given[:i] + given[i + 1 :])
            except ConfigError:
                continue
            raise ConfigError(f"--set {setting}: {reason}") from None
        raise


def _value(text: str, setting: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            reason = str(error).partition(" (at ")[0]
            raise ConfigError(f"--set {setting}: is not a TOML value: {reason}") from None
        # TOML has only 0.1 and 1.0; people also type .1 and 1.
        short = re.fullmatch(r"[+-]?(\.\d+|\d+\.)(e[+-]?\d+)?", text, re.IGNORECASE)
        return float(text) if short else text


def _check_path(raw: Raw, parts: list[str], setting: str) -> None:
    here: Any = raw
    for depth, part in enumerate(parts[:-1], 1):
        here = here.get(part, {})
        if not isinstance(here, dict):
            table = ".".join(parts[:depth])
            more = f", but several: change the file, or set all of them: {table}=[{{...}}]"
            several = more if isinstance(here, list) else ""
            raise ConfigError(f"--set {setting}: {table} is not a table{several}")


def check_file(path: Path, option: str) -> None:
    """Raise UserError if no file can be written at a path; option: for example --out."""
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{option} {path}: {path.parent} is no directory that can be written to")
    if path.is_dir():
        raise UserError(f"{option} {path}: is a directory: must be a file in one")


def check_picture(path: Path) -> None:
    """Raise UserError if no picture of --png can be written, or if its ending is of none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_file(path, "--png")
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise UserError(f"--png {path}: must end in one of .{', .'.join(known)}")

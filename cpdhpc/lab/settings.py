"""Options of commands, a line each; --set KEY=VALUE, laid over a file's; files to be written."""

from __future__ import annotations

import os
import re
import tomllib
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ..config import ConfigError, Raw, UserError, merge

T = TypeVar("T")


def override(
    raw: Raw, settings: Iterable[str], lay: Callable[[Raw, Raw], Raw] | None = None
) -> Raw:
    """Return raw with "a.b=value" settings applied; values are TOML, or .5, or else strings.

    lay: how all of them together are laid over raw; None: by merge
    Raises ConfigError for a setting of another form, or one that goes through a plain value.
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
    """Return what adds an argument to a parser: add("--every N", help, default or type).

    Without a word for its value an option is a flag; further: as of add_argument
    """

    def add(form: str, said: str, given: Any = None, **further: Any) -> None:
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
        parser.add_argument(name, help=said, **further)

    return add


def add_settings(parser: ArgumentParser, said: str, key: str = "KEY") -> None:
    """Add the option --set to a command line; said: its help."""
    parser.add_argument("--set", action="append", default=[], metavar=f"{key}=VALUE", help=said)


def settings_of(arguments: Namespace) -> list[str]:
    """Return the settings of a command line: what --set gives, and --timeout."""
    timeout_s = arguments.timeout
    return [*arguments.set, *([] if timeout_s is None else [f"train.timeout_s={timeout_s!r}"])]


def blaming(load: Callable[[list[str]], T], settings: Iterable[str], path: Path) -> T:
    """Return what a file is with settings; the setting without which it can be used is blamed.

    Raises ConfigError.
    """
    given = list(settings)
    try:
        return load(given)
    except ConfigError as error:
        said = str(error).removeprefix(f"{path}: ")
        if said.startswith("--set"):
            raise
        for i, setting in enumerate(given):
            try:
                load(given[:i] + given[i + 1 :])
            except ConfigError:
                continue
            raise ConfigError(f"--set {setting}: {said}") from None
        raise


def _value(text: str, setting: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            said = str(error).partition(" (at ")[0]
            raise ConfigError(f"--set {setting}: is not a TOML value: {said}") from None
        # TOML has 0.1 and 1.0 only, people type .1 and 1. too
        short = re.fullmatch(r"[+-]?(\.\d+|\d+\.)(e[+-]?\d+)?", text, re.IGNORECASE)
        return float(text) if short else text


def _check_path(raw: Raw, parts: list[str], setting: str) -> None:
    here: Any = raw
    for depth, part in enumerate(parts[:-1], 1):
        here = here.get(part, {})
        if not isinstance(here, dict):
            table = ".".join(parts[:depth])
            more = f"but several: change the file, or give all, as {table}=[{{...}}]"
            said = f"is not a table{f', {more}' if isinstance(here, list) else ''}"
            raise ConfigError(f"--set {setting}: {table} {said}")


def check_file(path: Path, option: str) -> None:
    """Raise UserError where no file can be written at a path; option: as --out, for the message."""
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"{option} {path}: {path.parent} is no directory that can be written to")
    if path.is_dir():
        raise UserError(f"{option} {path}: is a directory: must be a file in one")


def check_picture(path: Path, option: str) -> None:
    """Raise UserError where no picture can be written at a path: as check_file, and its ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_file(path, option)
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise UserError(f"{option} {path}: must end in one of .{', .'.join(known)}")

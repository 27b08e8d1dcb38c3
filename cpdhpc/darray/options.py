"""Options of the command line that describe a plan, and what they say."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ..config import ConfigError

OPTIONS = {  # option -> (its form, what it is, whether it holds integers)
    "shape": ("12,16", "cells of the domain along each axis", True),
    "procs": ("2,3", "ranks along each axis", True),
    "halo": ("1 or 1,0:2", "cells around each rank's box; below:above where they differ", True),
    "boundary": ("MODE,...", "for all axes, or for each: none (windows end with the domain), zero, "
                 "constant:VALUE, wrap, reflect, symmetric, edge", False),
    "trail": ("3,96", "further axes of the arrays, which are not split", True),
}  # fmt: skip
FILTER = {  # the same, of windows that filters need
    "size": ("3", "of a filter whose outputs are split over the ranks, instead of a halo", True),
    "step": ("1", "of the filter", True),
    "dilation": ("1", "of the filter", True),
    "pad": ("0", "of the filter", True),
}
PLAIN = {"dtype": "of NumPy", "wire": "raw, or a format in which float32 cells travel"}


def add_options(parser: argparse.ArgumentParser, *, filters: bool) -> None:
    """Add the options. filters: those of filters, too."""
    for name, (form, text, _) in (OPTIONS | FILTER if filters else OPTIONS).items():
        parser.add_argument(f"--{name}", metavar=form, help=text)
    for name, text in PLAIN.items():
        parser.add_argument(f"--{name}", help=text)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the options say, as a file would. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, (_, _, integers) in (OPTIONS | FILTER).items():
        text = getattr(arguments, name, None)
        if text is not None:
            found[name] = _integers(f"--{name}", text) if integers else _one_or_more(text)
    for name in PLAIN:
        if getattr(arguments, name) is not None:
            found[name] = getattr(arguments, name)
    for name in ("shape", "procs", "trail"):
        if isinstance(found.get(name), int):
            found[name] = [found[name]]
    return found


def _one_or_more(text: str) -> Any:
    words = text.split(",")
    return words[0] if len(words) == 1 else words


def _integers(option: str, text: str) -> Any:
    """Return 1, [1, 2], [[1, 2], 3] of "1", "1,2", "1:2,3"."""
    if not text:
        return []
    found: list[Any] = []
    for word in text.split(","):
        if not re.fullmatch(r"-?\d+(:-?\d+)?", word.strip()):
            raise ConfigError(f"{option} {text}: must be integers, as 2,3")
        numbers = [int(number) for number in word.split(":")]
        found.append(numbers[0] if len(numbers) == 1 else numbers)
    return found[0] if len(found) == 1 and isinstance(found[0], int) else found


def ranges(option: str, text: str) -> list[list[int]]:
    """Return [start, stop] of a box written as "-1:7,0:9". Raises ConfigError."""
    pairs = [re.fullmatch(r"(-?\d+):(-?\d+)", word.strip()) for word in text.split(",")]
    found = [(int(pair[1]), int(pair[2])) for pair in pairs if pair is not None]
    if len(found) != len(pairs):
        raise ConfigError(f"{option} {text}: must be start:stop of each axis, as -1:7,0:9")
    return [[start for start, _ in found], [stop for _, stop in found]]

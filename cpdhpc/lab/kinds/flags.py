"""Options that benchmarks share. Types of options raise UserError, which begins with the text."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from ...config import UserError, parse_bytes, validate
from ...methods import reason, suggest
from ...world.gpu_messages import gpu_aware, use_gpu
from ...world.ranks import Ranks
from ..settings import check_file, options, override

Row = TypeVar("Row")


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an integer that must not be smaller."""

    def integer(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            raise UserError(f"{text}: must be an integer") from None
        if found < least:
            raise UserError(f"{text}: must be {least} or more")
        return found

    return integer


def above_0(most: float = math.inf, said: str = ", and finite") -> Callable[[str], float]:
    """Return the type of a number above 0, below inf and at most most; said: how errors say it."""

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            raise UserError(f"{text}: must be a number") from None
        if not (0 < found <= most and found < math.inf):
            raise UserError(f"{text}: must be above 0{said}")
        return found

    return number


def shape(text: str) -> list[int]:
    """Return the numbers in a comma-separated list, each 1 or more."""
    found = [count.strip() for count in text.split(",")]
    if not all(count.isdecimal() and int(count) for count in found):
        raise UserError(f"{text}: must be numbers, 1 or more")
    return [*map(int, found)]


def counts(text: str) -> list[int]:
    """Return the numbers of a list as shape does, none twice."""
    return list(dict.fromkeys(shape(text)))


def _size(text: str) -> int:
    """Return the bytes of "8", "16KiB", "1MiB": a positive multiple of 4, as float32 is."""
    size_bytes = parse_bytes(text)
    if size_bytes < 4 or size_bytes % 4:
        raise UserError(f"{text}: must be a positive multiple of 4 bytes, one float32")
    return size_bytes


def sizes(text: str) -> list[int]:
    """Return the bytes of sizes and ranges, as "1MiB,16MiB" or "8:64MiB:x4"."""
    found = []
    for item in text.split(","):
        first, *rest = item.split(":")
        found.append(_size(first))
        if not rest:
            continue
        if len(rest) != 2 or not re.fullmatch(r"x\d+", rest[1]) or int(rest[1][1:]) < 2:
            raise UserError(f"{item}: a range is first:last:xFACTOR, FACTOR 2 or more")
        last, factor = _size(rest[0]), int(rest[1][1:])
        if last < found[-1]:
            raise UserError(f"{item}: the last size of a range is below the first")
        while found[-1] * factor <= last:
            found.append(found[-1] * factor)
    return found


def names(check: Callable[[str], object], apart: str = ",") -> Callable[[str], list[str]]:
    """Return the type of a list of names that check accepts, none twice; apart: between them."""

    def listed(text: str) -> list[str]:
        found = dict.fromkeys(name.strip() for name in text.split(apart) if name.strip())
        return [*map(named(check), found)]

    return listed


def named(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return the type of a name that check accepts."""

    def name(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise UserError(f"{text}: {reason(error, text)}") from None
        return text

    return name


def methods(texts: Iterable[str]) -> list[str]:
    """Return methods, NAME or NAME:OPTION=VALUE,..., from texts that are separated by commas."""
    found: list[str] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        if found and ":" in found[-1] and "=" in part.partition(":")[0]:
            found[-1] += f",{part}"  # another option
        elif part:
            found.append(part)
    return found


def row_of(option: str, text: str, table: Mapping[str, type[Row]]) -> Row:
    """Return a row of a table, configured by NAME or NAME:OPTION=VALUE,.... Raises UserError."""
    name, _, given = text.partition(":")
    if name not in table:
        raise UserError(f"{option} {text}: {suggest(name, table)}")
    settings = given.split(",") if given else []
    if any("=" not in each for each in settings):
        raise UserError(f"{option} {text}: the form is NAME:OPTION=VALUE,OPTION=VALUE")
    return validate(table[name], override({}, settings), f"{option} {text}")


def add_repeats(
    parser: argparse.ArgumentParser,
    repeats: int,
    warmup: int = 0,
    calls: str = "calls",
    out: bool = False,
) -> None:
    """Add the numbers of calls; repeats, warmup: their defaults; out: also the file of samples."""
    add = options(parser)
    add("--repeats N", f"timed {calls}", repeats, type=at_least(1))
    if warmup:
        add("--warmup N", f"{calls} before the timed ones", warmup, type=at_least(0))
    if out:
        add("--out FILE.h5", "write every sample to a file for report", Path)


def check_out(path: Path | None, world: Ranks | None = None) -> None:
    """Raise UserError if a file cannot be written there, before anything is measured.

    world: for the file of a study, whose nodes have equally many ranks
    """
    if path is not None and world is not None and len({*Counter(world.nodes).values()}) > 1:
        raise UserError(f"--out {path}: the nodes have not equally many ranks: must be equal")
    if path is not None:
        check_file(path, "--out")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the options of the device."""
    add = options(parser)
    add("--device", "device of the arrays", "cpu", choices=["cpu", "gpu"])
    add("--oversubscribe-gpus", "let processes of a node share GPUs")


def take_device(arguments: argparse.Namespace, world: Ranks) -> str:
    """Let each process take a GPU if --device is gpu; return a text about them. Collective.

    Raises UserError on all processes if one finds no GPU, or shares it.
    """
    if arguments.device == "cpu":
        return ""
    use_gpu(world, oversubscribe=arguments.oversubscribe_gpus)
    from ...ops import gpu_runtime

    found = sorted(set(world.gather(gpu_runtime.device_name(), "GPU")))
    direct = gpu_aware(world) if world.has_mpi else "no MPI"
    return f"arrays on a GPU of each process, {', '.join(found)}; MPI takes its memory: {direct}"

"""What the benchmarks' command lines have in common: sizes, lists, files, the machine line."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..comm import Ranks
from ..comm.mpi_library import library_version
from ..config import ConfigError, UserError, parse_bytes
from ..provenance import cpu_clone, hosts, processor

Value = TypeVar("Value")


def parse_size(text: str) -> int:
    """Return the bytes of "8", "16KiB", "1MiB": a positive multiple of 4, as float32 is.

    Raises UserError.
    """
    try:
        size_bytes = parse_bytes(text)
    except ConfigError as error:
        raise UserError(f"--sizes {error}") from None
    if size_bytes < 4 or size_bytes % 4:
        raise UserError(f"--sizes {text}: must be a positive multiple of 4 bytes, one float32")
    return size_bytes


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of sizes and ranges, as "1MiB,16MiB" or "8:64MiB:x4". Raises UserError."""
    sizes = []
    for item in text.split(","):
        first, *rest = item.split(":")
        sizes.append(parse_size(first))
        if not rest:
            continue
        if len(rest) != 2 or not re.fullmatch(r"x\d+", rest[1]) or int(rest[1][1:]) < 2:
            raise UserError(f"--sizes {item}: a range is first:last:xFACTOR, FACTOR 2 or more")
        last, factor = parse_size(rest[0]), int(rest[1][1:])
        while sizes[-1] * factor <= last:
            sizes.append(sizes[-1] * factor)
    return sizes


def parse_names(option: str, text: str, check: Callable[[str], object]) -> list[str]:
    """Return the names in a comma-separated list, each accepted by check. Raises UserError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        try:
            check(name)
        except (ValueError, KeyError) as error:
            raise UserError(f"{option} {name}: {error}") from None
    return names


def parse_counts(option: str, text: str) -> list[int]:
    """Return the numbers in a comma-separated list, each 1 or more. Raises UserError."""
    counts = [count.strip() for count in text.split(",")]
    if not all(count.isdecimal() and int(count) for count in counts):
        raise UserError(f"{option} {text}: must be numbers, 1 or more")
    return list(dict.fromkeys(map(int, counts)))


def check_positive(arguments: argparse.Namespace, *options: str) -> None:
    """Raise UserError unless these options are 1 or more."""
    for option in options:
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option} {getattr(arguments, option)}: must be 1 or more")


def check_whole(arguments: argparse.Namespace, *options: str) -> None:
    """Raise UserError unless these options are 0 or more."""
    for option in options:
        if getattr(arguments, option) < 0:
            raise UserError(f"--{option} {getattr(arguments, option)}: must be 0 or more")


def check_out(path: Path | None) -> None:
    """Raise UserError where a file cannot be written there, before anything is measured."""
    if path is not None and not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--out {path}: {path.parent} is no directory that can be written to")


def together(world: Ranks, make: Callable[[], Value]) -> Value:
    """Return what make returns on this process; raise its UserError on all. Collective."""
    error: UserError | None = None
    try:
        value = make()
    except UserError as found:
        error = found
    world.agree(error)
    return value  # bound: agree has raised otherwise


def machine_line(world: Ranks) -> str:
    """Return processor, cores, ranks, MPI library, kernels in a line. Collective."""
    names = hosts(world)
    library = library_version() if world.has_mpi else "no MPI"
    ranks = f"{world.ranks} rank{'s' * (world.ranks > 1)} on {len(set(names))} host(s)"
    return f"{processor()}, {os.cpu_count()} cores, {ranks}, {library}, kernels {cpu_clone()}"

"""What benchmarks share: command lines, interleaved timing, files of every sample."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import store
from ..config import ConfigError, UserError, parse_bytes
from ..methods import suggest
from ..provenance import attributes, cpu_clone, hosts, processor
from ..store import Variable
from ..world.mpi import library_version
from ..world.ranks import Ranks

Name = TypeVar("Name")
Times = NDArray[np.float64]
Before = Callable[[Name], object]


def interleave(
    cases: Mapping[Name, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    before: Before[Name] = lambda name: None,
) -> dict[Name, Times]:
    """Return the seconds of each call, float64[warmup + repeats] per case, the cases taking turns.

    before: called before each call, with the case's name, and not timed
    Taking turns spreads a drift of the machine's speed over all cases alike.
    """
    samples = {name: np.empty(warmup + repeats) for name in cases}
    for repeat in range(warmup + repeats):
        for name, run in cases.items():
            before(name)
            start = time.perf_counter()
            run()
            samples[name][repeat] = time.perf_counter() - start
    return samples


def interleave_ranks(
    world: Ranks,
    cases: Mapping[Name, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    prepare: Before[Name] = lambda name: None,
) -> dict[Name, Times]:
    """Return the seconds of each call on each process, float64[warmup + repeats, processes].

    Collective. All processes meet at a barrier before each call, after prepare.
    """

    def before(name: Name) -> None:
        prepare(name)
        world.barrier("bench")

    own = interleave(cases, repeats, warmup, before)
    everyone = world.gather(list(own.values()), "bench")
    return {name: np.stack([each[i] for each in everyone], axis=1) for i, name in enumerate(own)}


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
        if last < sizes[-1]:
            raise UserError(f"--sizes {item}: the last size of a range is below the first")
        while sizes[-1] * factor <= last:
            sizes.append(sizes[-1] * factor)
    return sizes


def parse_names(option: str, text: str, check: Callable[[str], object]) -> list[str]:
    """Return the names in a comma-separated list, each accepted by check. Raises UserError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        try:
            check(name)
        except ValueError as error:
            raise UserError(f"{option} {name}: {error}") from None
    return names


def known(names: Iterable[str]) -> Callable[[str], object]:
    """Return a check for parse_names: of names that are these."""
    allowed = tuple(names)

    def check(name: str) -> None:
        if name not in allowed:
            raise ValueError(suggest(name, allowed))

    return check


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
            name = option.replace("_", "-")
            raise UserError(f"--{name} {getattr(arguments, option)}: must be 1 or more")


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


SCHEMA = 1
FACTORS = {  # name of a column -> (long name, unit)
    "algorithm": ("algorithm of the all-reduce", "1"),
    "chosen": ("algorithm that ran", "1"),
    "wire": ("what travels: float32 as it is, or a format", "1"),
    "scaling": ("scaling of values before they are encoded", "1"),
    "accumulate": ("how partial sums are kept", "1"),
    "operation": ("operation of the codec", "1"),
    "format": ("format of the codec", "1"),
    "threads": ("threads that share an operation; memcpy takes one", "1"),
    "size_bytes": ("float32 data of a rank", "byte"),
    "wire_bytes": ("left the rank that sent most in a call; nan: unknown to us", "byte"),
    "error": ("relative error of the sum in the Euclidean norm", "1"),
    "setting": ("name of a plan", "1"),
    "shape": ("cells of the domain along each axis", "1"),
    "procs": ("ranks along each axis", "1"),
    "halo": ("cells around the box of a rank, below:above where they differ", "1"),
    "boundary": ("what lies beyond the domain", "1"),
    "dtype": ("dtype of the cells", "1"),
    "trail": ("further axes, not split", "1"),
    "transfer": ("exchange, or accumulation of halos", "1"),
    "way": ("by which code cells travel", "1"),
    "sent_bytes": ("cells that leave the rank that sends most in a call", "byte"),
    "calls": ("calls of a sample, whose mean is its time", "1"),
    "predicted_s": ("predicted time of a call; nan: none", "s"),
}
Column = Sequence[str] | Sequence[int] | Sequence[float]


def write_samples(
    path: Path | None,
    world: Ranks,
    name: str,
    columns: Mapping[str, Column],
    times: Sequence[Times],
    warmup: int,
) -> None:
    """Write the samples of a benchmark from process 0, if there is a path. Collective.

    columns: the factors of every point; times: of each point, float64[repeats, processes]
    xarray.open_dataset(path, group="samples", engine="h5netcdf") reads them.
    Raises UserError on all processes where the file cannot be written.
    """
    if path is None:
        return
    notes = {"schema": SCHEMA, "benchmark": name, **attributes(world)}

    def write() -> None:
        if world.process == 0:
            store.write(path, {"samples": _group(columns, times, warmup)}, notes)

    together(world, write)


def _group(
    columns: Mapping[str, Column], times: Sequence[Times], warmup: int
) -> dict[str, Variable]:
    by_rank = np.stack(times)
    points, repeats, processes = by_rank.shape
    flags = (np.arange(repeats) < warmup).astype(np.uint8)
    return {
        "point": Variable(("point",), np.arange(points), "a case at a size"),
        "repeat": Variable(("repeat",), np.arange(repeats), "repeat, warm-ups first"),
        "process": Variable(("process",), np.arange(processes), "MPI process"),
        "is_warmup": Variable(("repeat",), flags, "1: a warm-up, in no figure that is shown"),
        "time_s": Variable(
            ("point", "repeat"), by_rank.max(axis=2), "time of the slowest process", "s"
        ),
        "process_time_s": Variable(
            ("point", "repeat", "process"), by_rank, "time of each process from the barrier", "s"
        ),
        **{
            column: Variable(("point",), np.array(values), *FACTORS[column])
            for column, values in columns.items()
        },
    }

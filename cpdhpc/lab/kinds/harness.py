"""Common parts of benchmarks: command lines, interleaved timing, points for study files."""

from __future__ import annotations

import argparse
import os
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...collectives.engine import carrier_of
from ...config import ConfigError, UserError, parse_bytes, validate
from ...methods import reason, suggest
from ...ops import on_gpu
from ...world.gpu_messages import gpu_aware, use_gpu
from ...world.mpi import library_version
from ...world.ranks import Ranks, Wait
from ..provenance import cpu_clone, hosts, processor
from ..settings import check_file, options, override
from ..study_data import Factors

Name = TypeVar("Name")
Row = TypeVar("Row")
Floats = NDArray[np.float64]
Times = Floats
Before = Callable[[Name], object]


def interleave(
    cases: Mapping[Name, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    before: Before[Name] = lambda name: None,
) -> dict[Name, Times]:
    """Return the seconds of each call, float64[warmup + repeats] per case, the cases taking turns.

    before: called before each call, with the case's name, and not timed
    The cases take turns so that a drift of the machine's speed affects all of them.
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


def parse_names(
    option: str, text: str, check: Callable[[str], object], apart: str = ","
) -> list[str]:
    """Return the names in a list that the text apart separates, each accepted by check.

    Raises UserError.
    """
    names = [name.strip() for name in text.split(apart) if name.strip()]
    for name in names:
        try:
            check(name)
        except ValueError as error:
            raise UserError(f"{option} {name}: {reason(error, name)}") from None
    return names


def parse_methods(texts: Iterable[str]) -> list[str]:
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


def parse_counts(option: str, text: str) -> list[int]:
    """Return the numbers in a comma-separated list, each 1 or more. Raises UserError."""
    counts = [count.strip() for count in text.split(",")]
    if not all(count.isdecimal() and int(count) for count in counts):
        raise UserError(f"{option} {text}: must be numbers, 1 or more")
    return list(dict.fromkeys(map(int, counts)))


def check_options(arguments: argparse.Namespace, least: int, *options: str) -> None:
    """Raise UserError if one of these options is below least."""
    for option in options:
        if (given := getattr(arguments, option)) < least:
            raise UserError(f"--{option.replace('_', '-')} {given}: must be {least} or more")


def check_out(path: Path | None, world: Ranks | None = None) -> None:
    """Raise UserError if a file cannot be written there, before anything is measured.

    world: for the file of a study, whose nodes have equally many ranks
    """
    if path is not None and world is not None and len({*Counter(world.nodes).values()}) > 1:
        raise UserError(f"--out {path}: the nodes have not equally many ranks: must be equal")
    if path is not None:
        check_file(path, "--out")


def add_repeats(
    parser: argparse.ArgumentParser, repeats: int, warmup: int, calls: str = "calls"
) -> None:
    """Add the numbers of calls; repeats, warmup: their defaults."""
    add = options(parser)
    add("--repeats N", f"timed {calls}", repeats)
    if warmup:
        add("--warmup N", f"{calls} before the timed ones", warmup)


def add_samples(
    parser: argparse.ArgumentParser, repeats: int, warmup: int = 0, calls: str = "calls"
) -> None:
    """Add the options of add_repeats, and --out for the file of all samples."""
    add_repeats(parser, repeats, warmup, calls)
    options(parser)("--out FILE.h5", "write every sample to a file for report", Path)


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

    names = sorted(set(world.gather(gpu_runtime.device_name(), "GPU")))
    direct = gpu_aware(world) if world.has_mpi else "no MPI"
    return f"arrays on a GPU of each process, {', '.join(names)}; MPI takes its memory: {direct}"


def on_device(x: NDArray[Any], device: str) -> Any:
    """Return x, or its copy on CuPy's current GPU."""
    if device == "cpu":
        return x
    from ...ops import gpu_runtime

    return gpu_runtime.to_device(x)


def whole(run: Callable[[], object], like: Any) -> Callable[[], Any]:
    """Return a call as it is timed: with GPU arrays it ends when the GPU is done."""
    if not on_gpu(like):
        return run
    from ...ops import gpu_runtime

    return gpu_runtime.finished(run)


def comments(lines: Iterable[str]) -> list[str]:
    """Return texts as comments above a table, in lines of at most 98 characters."""
    return [
        f"# {'  ' * (number > 0)}{part}"
        for text in lines
        for number, part in enumerate(textwrap.wrap(text, 94, break_on_hyphens=False) or [""])
    ]


def table(forms: Mapping[str, str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table: its headings as a comment, then the rows.

    forms: heading -> format of the numbers below, as "9.3g"; those with "<" are to the left
    """
    sides = {name: form.partition(".")[0] for name, form in forms.items()}
    sides = {name: side if side[0] == "<" else f">{side}" for name, side in sides.items()}

    def line(begin: str, cells: Iterable[object], by: Iterable[str]) -> str:
        return " ".join([begin, *(f"{c:{form}}" for c, form in zip(cells, by, strict=True))])

    def below(row: Sequence[object]) -> list[str]:
        some = zip(row, forms, strict=True)
        return [sides[name] if isinstance(cell, str) else forms[name] for cell, name in some]

    lines = [line("#", forms, sides.values()), *(line(" ", row, below(row)) for row in rows)]
    return [each.rstrip() for each in lines]


def machine_line(world: Ranks) -> str:
    """Return processor, cores, ranks, MPI library, kernels in a line. Collective."""
    names = hosts(world)
    library = library_version() if world.has_mpi else "no MPI"
    ranks = f"{world.ranks} rank{'s' * (world.ranks > 1)} on {len(set(names))} host(s)"
    return f"{processor()}, {os.cpu_count()} cores, {ranks}, {library}, kernels {cpu_clone()}"


@dataclass(frozen=True)
class Point:
    """A case of a benchmark. factors, outcomes: as in studies of the benchmark's kind.

    times_s: float64[warmup + repeats, processes]
    """

    factors: Factors
    outcomes: Mapping[str, float | int | str]
    times_s: Times

    def slowest_s(self, warmup: int) -> Times:
        """Return the times of the slowest rank after so many warm-up calls."""
        times: Times = self.times_s[warmup:].max(axis=1)
        return times

    def median_s(self, warmup: int) -> float:
        """Return the median of the slowest rank's times."""
        return float(np.median(self.slowest_s(warmup)))


@dataclass(frozen=True)
class Measured:
    """The result of a benchmark: points of a study of a kind; study.batch writes its file.

    cores: text of own_cores
    """

    benchmark: str
    kind: str
    points: Sequence[Point]
    warmup: int
    cores: str = ""


PING_BYTES = [1 << i for i in range(3, 22, 3)]  # 8 B to 2 MiB


def ping_pong(
    world: Ranks, sizes: Sequence[int] = PING_BYTES, repeats: int = 10, warmup: int = 2
) -> tuple[float, float]:
    """Return seconds per message and per byte between the first and the last process. Collective.

    sizes: of the messages, in bytes
    """
    return line(sizes, message_times(world, (0, world.processes - 1), sizes, repeats, warmup))


def message_times(
    world: Ranks,
    ends: tuple[int, int],
    sizes: Sequence[int] = PING_BYTES,
    repeats: int = 10,
    warmup: int = 2,
    device: str = "cpu",
) -> list[float]:
    """Return seconds of a message of each size between two processes, medians. Collective.

    It is half the time of a message there and back, polled as in the all-reduce.
    sizes: in bytes; device: of the memory of the messages
    """
    first, last = ends
    other = {first: last, last: first}.get(world.process)

    def bounce(size: int) -> Callable[[], None]:
        ball, caught = (on_device(np.zeros(size, np.uint8), device) for _ in range(2))
        carrier = carrier_of(world, ball)

        def send() -> None:
            requests = carrier.isend(world.process, other or 0, ball)
            world.wait_any([Wait(requests, world.process, "ping-pong: waited {:.1f} s to send")])

        def receive() -> None:
            requests = carrier.irecv(other or 0, world.process, caught)
            world.wait_any([Wait(requests, world.process, "ping-pong: waited {:.1f} s")])

        calls = (send, receive) if world.process == first else (receive, send)

        def both() -> None:
            for call in calls if other is not None else ():
                call()

        return both

    times = interleave_ranks(world, {size: bounce(size) for size in sizes}, repeats, warmup)
    return [float(np.median(times[size][warmup:, first])) / 2 for size in sizes]


def nonnegative(a: Floats, b: Floats) -> Floats:
    """Return the x >= 0 with which a @ x is nearest to b; columns of a may have any units."""
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(a).max(axis=0), np.finfo(float).tiny)
    return nnls(a / scale, b)[0] / scale


def line(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """Return (a, b), not negative, of times_s = a + b * sizes, the least squares of the ratios."""
    weight = 1 / np.array(times_s)
    a = np.stack([weight, weight * np.array(sizes, np.float64)], axis=1)
    first, second = nonnegative(a, np.ones(len(weight))).tolist()
    return first, second


FURTHER = {  # factors of benchmarks that studies do not have: long name
    "chosen": "algorithm that auto has chosen",
    "setting": "name of a plan",
    "shape": "cells of the domain along each axis",
    "procs": "ranks along each axis",
    "widths": "cells around the box of a rank, below:above where they differ",
    "trail": "further axes, not split",
}

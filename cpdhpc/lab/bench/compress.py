"""Compressors side by side on recorded gradients, averaged again without training.

Bytes are counted in the messages, everything included; what ranks agree on by MPI's own collectives
is counted apart, by process. Times are those of one process, with a barrier before each collective;
it plays several ranks unless mpirun has started as many: then their selecting and encoding come one
after another, and what travels stays in memory. Phases are shares of a profile of processor time,
by the names of functions: travel has the engine and the waits, decode the additions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from ... import store
from ...collectives.checks import NonFiniteGradient
from ...compress import COMPRESSORS
from ...compress.base import Aggregator
from ...compress.momentum import SettingsOf, recommended
from ...config import ConfigError, UserError, validate
from ...methods import suggest
from ...store import Variable
from ...world.mpi import World
from ...world.ranks import Ranks
from ..provenance import attributes
from ..report.figures import Axis, Chart, Panel, Series, image, spread, styles
from ..settings import override
from ..train.gradients import Gradients, load_all
from . import crossover
from .harness import add_device, machine_line, parse_counts, parse_methods, take_device
from .replay import PHASES, Replayed, of_digits, replay

MOST_RANKS = 64
SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument(
        "--gradients",
        type=Path,
        nargs="+",
        metavar="FILE.h5",
        help="of precision record or train.record_gradients, of one run (default: digits, now)",
    )
    parser.add_argument(
        "--values",
        type=int,
        metavar="N",
        help="normal numbers instead of gradients, N a rank: what methods cost large models",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(COMPRESSORS),
        metavar="NAME[:OPTION=VALUE,...]",
        help="compressors, apart by spaces or commas, as lowbit:wire=e3m0 (default: all)",
    )
    parser.add_argument(
        "--settings",
        choices=get_args(SettingsOf),
        default="given",
        help="recommended: methods as a job's train.settings has them (default: given)",
    )
    add_device(parser)
    parser.add_argument(
        "--ranks", metavar="N,...", help="numbers of ranks (default: 2,4,... up to those recorded)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write compress.h5 and compress.png there"
    )


@dataclass(frozen=True)
class Point:
    """A method on so many ranks."""

    method: str
    ranks: int
    done: Replayed


def run(arguments: argparse.Namespace, world: World) -> None:
    """Average the gradients by each method on each number of ranks; print, write, draw."""
    where = take_device(arguments, world)
    names = parse_methods(arguments.methods)
    methods = world.agreed(lambda: {text: method_of(text, arguments.settings) for text in names})
    recorded, ranks = world.agreed(lambda: _inputs(arguments, world.processes))
    world.agreed(lambda: _check_out(arguments.out))
    worlds = [
        World(virtual_ranks=count // world.processes, timeout_s=arguments.timeout or 600.0)
        for count in ranks
    ]
    points, left_out = _measured(methods, recorded, worlds, arguments.device)
    lines = machine_line(world)
    if world.process == 0:
        size = sum(values[0].size for values in recorded[0].layers.values())
        print("\n".join(f"# {text}" for text in (lines, where) if text))
        print(
            f"# gradients: {recorded[0].source}, {size:,} values in {len(recorded[0].layers)} "
            f"layers, {len(recorded)} iterations from {recorded[0].iteration}"
        )
        print("\n".join([*table(points, size, world.processes), *growth(points), *left_out]))
        costs = costs_of(points, world.processes)
        if costs:
            print("\n".join(crossover.table(costs, size, crossover.copy_s(size))))
        if arguments.settings == "recommended":
            for text, method in methods.items():
                if method.holds_back:
                    print(
                        f"# {text}: holds values back: train with momentum up to "
                        f"{method.most_momentum:g}, see docs/compression.md"
                    )
    if arguments.out is not None:
        notes = {"device": arguments.device, "settings": arguments.settings, **attributes(world)}
        world.on_first(lambda: _write(arguments.out, points, recorded, notes))
    for each in worlds:
        each.free()


def method_of(text: str, settings: SettingsOf = "given") -> Aggregator:
    """Return the method of "NAME" or "NAME:OPTION=VALUE,...". Raises UserError.

    settings: see compress.momentum.recommended
    """
    name, _, given = text.partition(":")
    if name not in COMPRESSORS:
        raise UserError(f"--methods {text}: {suggest(name, COMPRESSORS)}")
    options = given.split(",") if given else []
    if any("=" not in each for each in options):
        raise UserError(f"--methods {text}: the form is NAME:OPTION=VALUE,OPTION=VALUE")
    table = override({}, options)
    method = validate(COMPRESSORS[name], table, f"--methods {text}")
    return recommended(method) if settings == "recommended" else method


def _inputs(arguments: argparse.Namespace, processes: int) -> tuple[list[Gradients], list[int]]:
    """Return the gradients, of the most ranks that are wanted, and the numbers of ranks."""
    ranks = [] if arguments.ranks is None else parse_counts("--ranks", arguments.ranks)
    for count in ranks:
        if count % processes:
            raise UserError(f"--ranks {count}: must be a multiple of the {processes} processes")
    if arguments.values is not None:
        if arguments.gradients is not None or arguments.values < 1:
            raise UserError(f"--values {arguments.values}: must be 1 or more, without --gradients")
        most = max(ranks, default=processes)
        recorded = list(crossover.normal(arguments.values, most))
    elif arguments.gradients is None:
        most = max(ranks, default=max(MOST_RANKS // processes, 1) * processes)
        recorded = of_digits(most)
    else:
        found = [(path, each) for path in arguments.gradients for each in load_all(path)]
        recorded = [each for _, each in found]
        most = recorded[0].ranks
        for path, each in found:
            if _form(each) != _form(recorded[0]):
                raise UserError(
                    f"--gradients {path}: is of other layers, ranks or loss scale than the first"
                )
        recorded.sort(key=lambda each: each.iteration)
    if max(ranks, default=0) > most:
        raise UserError(f"--ranks {max(ranks)}: the gradients are those of {most} ranks")
    several = [processes << i for i in range(most.bit_length()) if 1 < processes << i <= most]
    return recorded, ranks or several or [most]


def _form(each: Gradients) -> tuple[float, list[tuple[str, tuple[int, ...]]]]:
    return each.loss_scale, [(name, values.shape) for name, values in each.layers.items()]


def _check_out(directory: Path | None) -> None:
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {directory}: cannot be made: {error.strerror}") from None


def _measured(
    methods: dict[str, Aggregator],
    recorded: Sequence[Gradients],
    worlds: Sequence[Ranks],
    device: str,
) -> tuple[list[Point], list[str]]:
    """Return all points, and why some are not among them. Collective."""
    points, left_out = [], []
    for text, method in methods.items():
        for world in worlds:
            try:
                points.append(Point(text, world.ranks, replay(world, method, recorded, device)))
            except (ValueError, NonFiniteGradient) as error:  # on all processes alike
                left_out.append(
                    f"# {text} on {world.ranks} rank{'s' * (world.ranks > 1)}: left out: {error}"
                )
    if not points:
        raise ConfigError(f"bench compress: no method could be run: {left_out[0]}")
    return points, left_out


def costs_of(points: Sequence[Point], processes: int) -> dict[str, crossover.Cost]:
    """Return what an exchange costs a rank, by method: of points with one rank a process."""
    return {
        p.method: crossover.Cost(p.done.local_s, float(p.done.sent_bytes.max()))
        for p in points
        if p.ranks == processes
    }


COLUMNS = {  # heading -> width and digits
    "bytes/rank": "11.0f",
    "of float32": "10.2%",
    "to MPI": "8.0f",
    "error": "9.3g",
    "cosine": "7.4f",
    "sum error": "9.3g",
    "sent": "8.2%",
    "non-zero": "8.2%",
    "ms": "8.3g",
    "ns/value": "8.3g",
    "travel ms": "9.3g",
    "local ms": "8.3g",
} | {f"{phase} %": "8.0f" for phase in PHASES}
SHOWN_RANKS = 8


def table(points: Sequence[Point], values: int, processes: int) -> list[str]:
    """Return the table of methods on 8 ranks, or the next smaller number.

    values: of a gradient, whose float32 bytes the column "of float32" relates to
    """
    some = [p.ranks for p in points if p.ranks <= SHOWN_RANKS]
    ranks = max(some) if some else min(p.ranks for p in points)
    shown = [p for p in points if p.ranks == ranks]
    width = max(len(p.method) for p in points)
    heads = " ".join(f"{name:>{form.partition('.')[0]}}" for name, form in COLUMNS.items())
    lines = [
        f"# {ranks} ranks, {ranks // processes} a process; bytes sent by the rank that sends most "
        "in an iteration, and relative to one float32 gradient; what a process hands to MPI's "
        "collectives",
        "# error of the mean, cosine to the exact one, error of the sum of all iterations; sent: "
        "share of its values that a rank sends; non-zero: share of the mean; ns a value and rank",
        "# ms: an iteration, after two that are not timed, with a barrier before each collective; "
        "of it travel: in collectives, each from its barrier on; local: processor time of all else",
        f"# {'method':<{width}} {heads}",
    ]
    for point in shown:
        done = point.done
        most = float(done.sent_bytes.max())
        cells = [
            most,
            most / (4 * values),
            done.collective_bytes,
            done.error,
            done.cosine,
            done.sum_error,
        ]
        value_s = done.time_s / (values * ranks / processes)
        cells += [done.sent_share, done.nonzero_share, 1e3 * done.time_s, 1e9 * value_s]
        cells += [1e3 * done.travel_s, 1e3 * done.local_s]
        cells += [100 * done.shares[phase] for phase in PHASES]
        text = " ".join(f"{c:{form}}" for c, form in zip(cells, COLUMNS.values(), strict=True))
        lines.append(f"  {point.method:<{width}} {text.replace('nan%', '   -')}")
    return lines


def growth(points: Sequence[Point]) -> list[str]:
    """Return the bytes that a rank sends, and the share of the mean, by the number of ranks."""
    ranks = sorted({p.ranks for p in points})
    methods = list(dict.fromkeys(p.method for p in points))
    width = max(map(len, methods))
    found = {(p.method, p.ranks): p.done for p in points}
    lines = ["# bytes sent by the rank that sends most, and share of the mean that is not zero"]
    lines.append(f"# {'method':<{width}} " + " ".join(f"{f'{r} ranks':>17}" for r in ranks))
    for method in methods:
        cells = [found.get((method, each)) for each in ranks]
        text = [
            f"{'-':>17}" if c is None else f"{c.sent_bytes.max():>9.0f} {c.nonzero_share:>7.1%}"
            for c in cells
        ]
        lines.append(f"  {method:<{width}} " + " ".join(text))
    return lines


def _write(
    directory: Path,
    points: Sequence[Point],
    recorded: Sequence[Gradients],
    notes: store.Attributes,
) -> None:
    """Write the file and the picture."""
    of_file = {
        "schema": SCHEMA,
        "benchmark": "compress",
        "gradients": recorded[0].source,
        "iterations": len(recorded),
        **notes,
    }
    store.write(directory / "compress.h5", {"points": variables(points)}, of_file)
    store.put(directory / "compress.png", image(chart(points), "png"))
    written = ["compress.h5", "compress.png"]
    costs = costs_of(points, int(notes["processes"]))
    if costs:
        links = image(crossover.chart(costs, int(notes["processes"])), "png")
        store.put(directory / "links.png", links)
        written.append("links.png")
    print("wrote " + ", ".join(str(directory / name) for name in written))


OF_POINT = {  # array of a point: long name, units
    "collective_bytes": ("what a process hands to MPI's own collectives in an iteration", "byte"),
    "time_s": (
        "time of an iteration, with a barrier before each collective, slowest process",
        "s",
    ),
    "travel_s": (
        "part of time_s in collectives, each from its barrier on, slowest process",
        "s",
    ),
    "local_s": (
        "processor time in time_s outside of collectives, slowest process",
        "s",
    ),
    "error": ("relative error of the mean", "1"),
    "cosine": ("cosine between the mean and the exact one", "1"),
    "sum_error": ("relative error of the sum of the means of all iterations", "1"),
    "nonzero_share": ("share of the mean's values that are not zero", "1"),
    "sent_share": ("share of its values that a rank sends; NaN: the method tells none", "1"),
}


def variables(points: Sequence[Point]) -> dict[str, Variable]:
    """Return the points as labelled arrays; bytes of ranks that a point has not are NaN."""
    done, by = [p.done for p in points], ("point",)
    sent = np.full((len(points), max(p.ranks for p in points)), np.nan)
    for row, each in zip(sent, done, strict=True):
        row[: each.sent_bytes.size] = each.sent_bytes
    shares = np.array([[d.shares[phase] for phase in PHASES] for d in done])
    return {
        "point": Variable(by, np.arange(len(points)), "a method on a number of ranks"),
        "rank": Variable(("rank",), np.arange(sent.shape[1]), "rank"),
        "phase": Variable(("phase",), np.array(PHASES), "phase of an iteration"),
        "method": Variable(by, np.array([p.method for p in points]), "compressor and options"),
        "ranks": Variable(by, np.array([p.ranks for p in points]), "number of ranks"),
        "sent_bytes": Variable(
            (*by, "rank"), sent, "messages that a rank sends in an iteration", "byte"
        ),
        "phase_share": Variable(
            (*by, "phase"), shares, "share of the processor time, by a profile"
        ),
    } | {
        name: Variable(by, np.array([getattr(d, name) for d in done]), *text)
        for name, text in OF_POINT.items()
    }


def chart(points: Sequence[Point]) -> Chart:
    """Return cosines against bytes on the most ranks; bytes, and shares of the mean, by ranks."""
    looks, ranks = styles(p.method for p in points), sorted({p.ranks for p in points})
    last = [p for p in points if p.ranks == ranks[-1]]
    most = {p.method: float(p.done.sent_bytes.max()) for p in last}
    panels = [
        Panel(
            f"cosine, {ranks[-1]} ranks",
            spread("bytes that a rank sends", most.values()),
            Axis("cosine to the exact mean", limits=(None, 1.03)),
            [
                Series(p.method, looks[p.method], [most[p.method]], [p.done.cosine], join="none")
                for p in last
            ],
        )
    ]
    figures: dict[str, tuple[str, Callable[[Replayed], float]]] = {
        "bytes by ranks": ("bytes that a rank sends", lambda done: float(done.sent_bytes.max())),
        "non-zero values by ranks": (
            "share of the mean that is not zero",
            lambda done: done.nonzero_share,
        ),
    }
    x = Axis("ranks", "log2", ticks=ranks)
    for title, (said, value) in figures.items() if len(ranks) > 1 else ():
        series = []
        for method, look in looks.items():
            mine = [p for p in points if p.method == method]
            y = [value(p.done) for p in mine]
            series.append(Series(method, look, [p.ranks for p in mine], y))
        panels.append(Panel(title, x, spread(said, [v for s in series for v in s.y]), series))
    note = "Bytes: of the rank that sends most."
    title = "Compressors on recorded gradients"
    return Chart("compress", title, [note], "", panels, shared=False)

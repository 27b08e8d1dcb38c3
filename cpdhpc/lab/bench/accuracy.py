"""Error of sums: algorithms, accumulations and scalings over ranks, simulated on one process.

The ranks contribute one of DATA. The error is ||result - sum|| / ||sum||, the norms and the sum
in float64; the bytes are those of all ranks over the least of one rounding format: 2 (p - 1) / p of
the data from each rank.
"""

from __future__ import annotations

import argparse
import csv
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from inspect import getdoc
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import store
from ...collectives.allreduce import Allreduce
from ...collectives.schedules import SCHEDULES
from ...compress.base import Array
from ...config import UserError, among
from ...formats import SHARED, SHIFT_BIAS, Cast, Format, parse_format
from ...methods import ACCUMULATES, EXACT, USUAL
from ...ops import cpu
from ...torch.quantized import fold, integer_norm
from ...torch.quantized.integers import MOST_BITS, steps
from ...world.ranks import Loopback
from ..kinds import flags, printing
from ..precision import measures
from ..report.figures import Axis, Chart, Panel, Series, image, styles
from ..settings import check_file, options

SCALINGS = {  # label: (scaling, headroom)
    "none": ("none", "n"),
    "aps": ("aps", "n"),
    "aps, no headroom": ("aps", "none"),
    "tile": ("tile", "n"),
    "block32": ("block32", "n"),
    "block16": ("block16", "n"),
}
WAYS = "usual,direct,torus,biring,ring,ring:requantise"

Draw = Callable[[np.random.Generator, int, int], Iterator[npt.NDArray[np.float64]]]


def _agreeing(rng: np.random.Generator, ranks: int, n: int) -> Iterator[npt.NDArray[np.float64]]:
    shared = rng.standard_normal(n)
    return (shared + 3 * rng.standard_normal(n) for _ in range(ranks))


def _noise(rng: np.random.Generator, ranks: int, n: int) -> Iterator[npt.NDArray[np.float64]]:
    return (rng.standard_normal(n) for _ in range(ranks))


def _spread(rng: np.random.Generator, ranks: int, n: int) -> Iterator[npt.NDArray[np.float64]]:
    scale = 1e-3 * rng.lognormal(sigma=1.5, size=n)
    shared = rng.normal(0, 0.3, n)
    return (scale * (shared + rng.normal(size=n)) for _ in range(ranks))


DATA: dict[str, Draw] = {
    "agreeing": _agreeing,  # a common direction plus three times as much noise
    "noise": _noise,  # nothing in common
    "spread": _spread,  # as agreeing, magnitudes log-normal with sigma 1.5
}


class AccuracyCase(NamedTuple):
    """A way to form a sum, its relative error (median over seeds) and bytes over the least.

    algorithm, accumulate: with "usual" and defaults resolved; way: as in --ways
    """

    data: str
    ranks: int
    wire: str
    way: str
    algorithm: str
    accumulate: str
    scaling: str
    error: float
    bytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    few = "e4m3,e3m2fn,e2m1fn,e1m1fn"
    add, names = options(parser), flags.names
    add("--ranks N,...", "numbers of ranks", "2,8,32,128,512,1024", type=flags.counts)
    add("--formats NAME,...", "formats", few, type=names(parse_format))
    add(
        "--ways NAME,...",
        f"algorithms, with a way to accumulate as ring:requantise, or all: {USUAL},"
        f"{','.join(SCHEDULES)}, with {','.join(ACCUMULATES)},{EXACT}",
        WAYS,
        type=lambda text: EVERY_WAY if text == "all" else names(parse_way)(text),
    )
    labels = {label.replace(", ", " "): label for label in SCALINGS}
    scalings = names(among(labels))
    add(
        "--scalings NAME,...",
        f"scalings, or all: {','.join(labels)}",
        "tile",
        type=lambda text: [labels[n] for n in (labels if text == "all" else scalings(text))],
    )
    drawn = f"data: {','.join(DATA)}"
    add("--data NAME,...", drawn, "agreeing,noise", type=names(among(DATA)))
    add("--values N", "values of each rank", 2048, type=flags.at_least(1))
    seeds = "number of seeds; errors are medians over them"
    add("--seeds N", seeds, 1, type=flags.at_least(1))
    add("--csv FILE.csv", "write all errors and bytes", Path)
    add("--png FILE.png", "draw the errors", Path)


def contributions(data: str, ranks: int, n: int, seed: int) -> list[npt.NDArray[np.float32]]:
    """Return the contribution of each rank, float32[n]."""
    rng = np.random.default_rng(seed)
    return [x.astype(np.float32) for x in DATA[data](rng, ranks, n)]


def parse_way(name: str) -> tuple[str, str | None]:
    """Return the algorithm and the way to accumulate, None for its own. Raises UserError."""
    algorithm, colon, accumulate = name.partition(":")
    try:
        Allreduce("e4m3", algorithm, "none" if accumulate == EXACT else None, accumulate or None)
    except ValueError as error:
        raise UserError(str(error).removeprefix("allreduce: ")) from None
    return algorithm, accumulate if colon else None


EVERY_WAY = [f"{name}:{way}" for name, row in SCHEDULES.items() for way in row.accumulates]
EVERY_WAY.append(f"ring:{EXACT}")  # the same for all algorithms


def cases(
    data: str,
    ranks: int,
    wire: str,
    ways: Sequence[str],
    scalings: Sequence[str],
    n: int,
    seeds: int,
) -> Iterator[AccuracyCase]:
    """Yield the ways that fit the format, each with its error."""
    inputs = [contributions(data, ranks, n, seed) for seed in range(seeds)]
    exact = [np.asarray(np.sum(xs, axis=0, dtype=np.float64)) for xs in inputs]
    for name, label in product(ways, scalings):
        (algorithm, accumulate), (scaling, headroom) = parse_way(name), SCALINGS[label]
        # so that sums without headroom have an error too
        how: dict[str, Any] = {"headroom": headroom, "overflow": "saturate"}
        try:
            method = Allreduce(wire, algorithm, scaling, accumulate, **how)
            world = Loopback(ranks)
            done = [method.run(world, xs) for xs in inputs]
        except ValueError:  # exact sums: not with tile scaling or too wide a range
            continue
        taken = Allreduce(wire, done[0].algorithm, scaling, accumulate, **how)
        errors = [
            measures.error(each.arrays[0], of).relative
            for each, of in zip(done, exact, strict=True)
        ]
        least = (
            2 * (ranks - 1) * seeds * Allreduce(wire, "rhd", scaling, **how).payloads.size_bytes(n)
        )
        sent = float(world.bytes_sent.sum()) / least if least and not taken.exact else np.nan
        how_summed = taken.algorithm, taken.accumulating
        yield AccuracyCase(
            data, ranks, wire, name, *how_summed, label, float(np.median(errors)), sent
        )


def table(found: Sequence[AccuracyCase], data: str, scaling: str) -> str:
    """Return a Markdown table of one kind of data: ways of each format by ranks."""
    of_table = [case for case in found if (case.data, case.scaling) == (data, scaling)]
    shown = {
        (case.wire, case.way, case.ranks): f"{case.error:.2g}"
        + (f", {case.bytes:.2f}" if case.bytes >= 1.005 else "")
        for case in of_table
    }
    ranks = sorted({case.ranks for case in of_table})
    ways = dict.fromkeys((case.wire, case.way) for case in of_table)
    rows = [[" ".join(way), *(shown.get((*way, count), "") for count in ranks)] for way in ways]
    return printing.markdown([f"{data}, {scaling}", *map(str, ranks)], rows)


def written(found: Sequence[AccuracyCase]) -> str:
    """Return all cases as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([AccuracyCase._fields, *found])
    return out.getvalue()


def chart(found: Sequence[AccuracyCase], scaling: str) -> Chart:
    """Return the error against ranks, a panel for each kind of data and each format."""
    wires = list(dict.fromkeys(case.wire for case in found))
    looks = styles(case.way for case in found)
    x = Axis("ranks", "log2", ticks=sorted({case.ranks for case in found}))
    panels = []
    for data, wire in product(dict.fromkeys(case.data for case in found), wires):
        of_panel = [c for c in found if (c.data, c.scaling, c.wire) == (data, scaling, wire)]
        series = []
        for way in dict.fromkeys(case.way for case in of_panel):
            points = {case.ranks: case.error for case in of_panel if case.way == way}
            series.append(Series(way, looks[way], [*points], [*points.values()]))
        y = Axis("relative error of the sum", "log")
        panels.append(Panel(f"{wire}, {data}", x, y, series))
    title, note = "Error of sums over ranks", f"By algorithm, scaling {scaling}."
    return Chart("accuracy", title, [note], "", panels, len(wires), most=len(panels))


def run(args: argparse.Namespace) -> None:
    """Simulate all cases, print a table for each kind of data and scaling, and draw the errors."""
    if args.csv is not None:
        check_file(args.csv, "--csv")
    found: list[AccuracyCase] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "allreduce: ")  # of errors, which are measured here
        for one, wire, count in product(args.data, args.formats, args.ranks):
            found += cases(one, count, wire, args.ways, args.scalings, args.values, args.seeds)
    for one, scaling in product(args.data, args.scalings):
        print(table(found, one, scaling), end="\n\n", flush=True)
    if args.csv is not None:
        store.put(args.csv, written(found).encode())
        print(f"wrote {args.csv}")
    if args.png is not None:
        store.put(args.png, image(chart(found, args.scalings[0]), args.png.suffix[1:] or "png"))
        print(f"wrote {args.png}")


Values = npt.NDArray[np.float32]

LAYER = "layer"
BITS = {LAYER: 0.0, **{name: 8 / shared for name, shared in SHARED.items()}}  # of shifts, a value
DEFAULT_FORMATS = "e2m1fn,e3m0,e2m3fn,e4m3fn"
DRAWN: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "Student's t, 3": lambda rng, n: rng.standard_t(3, n),
}


def add_rounding(parser: argparse.ArgumentParser) -> None:
    """Add the options of bench rounding."""
    parser.description = run_rounding.__doc__
    add = options(parser)
    add("--formats NAME,...", "formats", DEFAULT_FORMATS, type=flags.names(parse_format))
    add("--values N", "number of values to draw", 1 << 20, type=flags.at_least(1))
    add(
        "--gradients FILE.h5",
        "also round recorded gradients (train.record_gradients)",
        [],
        nargs="*",
        type=Path,
    )


def rounded(x: Values, fmt: Format, scaling: str) -> Values:
    """Return x rounded to a format, with one shift (LAYER) or a scaling of SHARED."""
    largest = cpu.amax_tiles(x).max(keepdims=True, initial=0)
    one = int(cpu.fitting_shift(largest, fmt)[0]) - SHIFT_BIAS
    return measures.rounded(x, Cast(fmt), one if scaling == LAYER else scaling).values


def error(arrays: Sequence[Values], fmt: Format, scaling: str) -> float:
    """Return the relative error of all arrays together; NaN if all values are zero."""
    wrong = whole = 0.0
    for x in arrays:
        exact = x.astype(np.float64)
        wrong += float(np.sum((rounded(x, fmt, scaling) - exact) ** 2))
        whole += float(np.sum(exact**2))
    return float(np.sqrt(wrong / whole)) if whole else float("nan")


def recorded(path: Path) -> list[Values]:
    """Return an array for each layer and rank of recorded gradients. Raises UserError."""
    from ..train.gradients import load_all

    layers = [layer for each in load_all(path) for layer in each.layers.values()]
    arrays = [rank.reshape(-1) for layer in layers for rank in layer]
    if not all(np.isfinite(x).all() for x in arrays):
        raise UserError(f"bench rounding: {path}: holds NaN or infinity")
    return arrays


def rounding_table(name: str, arrays: Sequence[Values], formats: Sequence[str]) -> str:
    """Return a Markdown table of the errors of one kind of data: formats by scaling."""
    heads = [f"{scaling} (+{more:.2g})" if more else scaling for scaling, more in BITS.items()]
    rows = [
        [fmt.name, fmt.bits, *(f"{error(arrays, fmt, scaling):.3g}" for scaling in BITS)]
        for fmt in map(parse_format, formats)
    ]
    return printing.markdown([name, "bits", *heads], rows)


def run_rounding(args: argparse.Namespace) -> None:
    """Print the error of rounding once, by format and by how many values share an exponent.

    ||rounded - x|| / ||x||, the norms in float64 over all arrays, for normal values, for Student's
    t with 3 degrees of freedom, whose tails are heavy, and for the gradients of files that
    train.record_gradients wrote. To nearest; each array, of a layer and a rank, is scaled by
    itself.
    """
    data = [
        (name, [drawn(np.random.default_rng(0), args.values).astype(np.float32)])
        for name, drawn in DRAWN.items()
    ]
    data += [(path.stem, recorded(path)) for path in args.gradients]
    print("\n\n".join(rounding_table(name, arrays, args.formats) for name, arrays in data))


MOST_RANGE = 2**24  # so that trying all of it takes seconds


def add_batchnorm(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.description = getdoc(run_batchnorm)
    add = options(parser)
    add(
        "--settings RANGE:BITS,...",
        "ranges of sums, and bits of codes",
        "36720:4,16384:4,16384:8,4096:2",
        type=lambda text: [_setting(each) for each in text.split(",")],
    )
    add("--channels N", "channels of each setting", 200, type=flags.at_least(1))
    add("--seed N", "seed of the draw", 0)


def drawn(rng: np.random.Generator, channels: int, most: int, bits: int) -> tuple[Array, Array]:
    """Return a and b of norms for sums with deviations of 1/50 to 1/3 of the range.

    Scales have both signs.
    """
    deviation = most * rng.uniform(0.02, 0.33, channels)
    mean = rng.normal(0, 0.5, channels) * deviation
    gamma, beta = rng.normal(0.5, 0.5, channels), rng.normal(0, 0.5, channels)
    return fold(gamma, beta, mean, deviation**2, 1e-5, bits)


def independent(a: float, b: float, most: int, bits: int) -> int:
    """Return the smallest n for which a and b + 1/2, each rounded alone, are exact."""
    facts = steps(a, b, -most, most, 2**bits - 1)
    slope, start = Fraction(abs(a)), Fraction(b) + Fraction(1, 2)
    reached = list(zip(facts.at_least.tolist(), facts.reached.tolist(), strict=True))
    missed = list(zip(facts.at_most.tolist(), facts.missed.tolist(), strict=True))
    n = 0
    while True:  # ends: a and b are multiples of a power of two
        one = 1 << n
        p, q = round(slope * one), round(start * one)
        if all(p * x + q >= i * one for x, i in reached) and all(
            p * x + q < j * one for x, j in missed
        ):
            return n
        n += 1


def differing(norm: Any, a: Array, b: Array, most: int) -> int:
    """Return how many results on -most..most differ from those of a and b, over all channels."""
    x, wrong = np.arange(-most, most + 1), 0
    for part in np.array_split(x, -(-x.size // 2**14)):
        column = np.broadcast_to(part[:, None], (part.size, a.size))
        wanted = np.clip(np.floor(column * a + b + 0.5), 0, 2**norm.bits - 1)  # exact, see fold
        wrong += int((norm(column) != wanted).sum())
    return wrong


def run_batchnorm(arguments: argparse.Namespace) -> None:
    """Random batch norms as integers: results that differ over the whole range, and shifts.

    x is -RANGE..RANGE, codes have BITS. "independent": the smallest shift n for which a and b +
    1/2, each rounded to a multiple of 2^-n alone, give the same results on the whole range.
    Channels that are constant there need no shift and are left out.
    """
    rows = []
    for most, bits in arguments.settings:
        rng = np.random.default_rng(arguments.seed)
        a, b = drawn(rng, arguments.channels, most, bits)
        norm = integer_norm(a, b, -most, most, bits)
        wrong = differing(norm, a, b, most)
        alone = np.array([independent(*one, most, bits) for one in zip(a, b, strict=True)])
        some = norm.multiplier != 0
        shift, alone = norm.shift[some], alone[some]
        widths = [int(each[some].max(initial=0)) for each in norm.widths().values()]
        gains = map(_some, (shift, alone, alone - shift))
        rows.append((most, bits, shift.size, wrong, *gains, *widths))
    print("\n".join(printing.table(INTEGERS, rows)))
    print("shift, independent, gain: mean, largest; A, B, A x + B: bits, sign included")


INTEGERS = {
    **{"range": "8", "bits": "4", "channels": "8", "differing": "9", "shift": "11"},
    **{"independent": "12", "gain": "11", "A": "3", "B": "3", "A x + B": "8"},
}


def _some(values: Array) -> str:
    return f"{values.mean():.1f}, {values.max()}" if values.size else "-"


def _setting(text: str) -> tuple[int, int]:
    most, _, bits = text.partition(":")
    if not (most.isdecimal() and bits.isdecimal()) or not (
        1 <= int(most) <= MOST_RANGE and 1 <= int(bits) <= MOST_BITS
    ):
        raise UserError(f"{text}: must be RANGE:BITS, 1..{MOST_RANGE} and 1..{MOST_BITS}")
    return int(most), int(bits)

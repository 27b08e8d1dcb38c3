"""Error of sums: every algorithm, accumulation and scaling, simulated on one process.

Contributions are g_i = s (m + n_i) with m ~ N(0, 0.3) shared, n_i ~ N(0, 1) and s log-normal
(sigma 1.5) times 1e-3, so that magnitudes spread over many binades as gradients' do. The error
is ||result - sum|| / ||sum||, the norms and the sum in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import store
from ...config import UserError
from ...formats import SHARED, SHIFT_BIAS, Cast, Format, parse_format
from ...ops import cpu
from ..precision import measures
from ..report.figures import Axis, Chart, Panel, Series, image, styles
from .harness import check_options, parse_counts, parse_names

SCALINGS = {  # label: (scaling, headroom)
    "none": ("none", "n"),
    "aps": ("aps", "n"),
    "aps, no headroom": ("aps", "none"),
    "tile": ("tile", "n"),
    "block32": ("block32", "n"),
    "block16": ("block16", "n"),
}


class AccuracyCase(NamedTuple):
    """How a sum was formed, and its relative error, the median over seeds."""

    ranks: int
    wire: str
    algorithm: str
    accumulate: str
    scaling: str
    error: float

    @property
    def method(self) -> str:
        """Algorithm and accumulation."""
        return f"{self.algorithm}, {self.accumulate}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("--ranks", default="8,32,256", metavar="N,...", help="numbers of ranks")
    parser.add_argument("--formats", default="e5m2,e4m3,e2m1fn", metavar="NAME,...", help="formats")
    parser.add_argument("--values", type=int, default=8192, metavar="N", help="of each rank")
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="errors are medians over so many"
    )
    parser.add_argument("--png", type=Path, metavar="FILE.png", help="draw the errors")


def contributions(ranks: int, n: int, seed: int) -> list[npt.NDArray[np.float32]]:
    """Return what each rank adds, float32[n]."""
    rng = np.random.default_rng(seed)
    scale = 1e-3 * rng.lognormal(sigma=1.5, size=n)
    shared = rng.normal(0, 0.3, n)
    return [(scale * (shared + rng.normal(size=n))).astype(np.float32) for _ in range(ranks)]


def cases(ranks: int, wire: str, n: int, seeds: int) -> Iterator[AccuracyCase]:
    """Yield every way of summing that fits the format, with its error."""
    inputs = [contributions(ranks, n, seed) for seed in range(seeds)]
    for way in measures.WAYS:
        for label, (scaling, headroom) in SCALINGS.items():
            # so that sums without headroom have an error too
            how: dict[str, Any] = {"headroom": headroom, "overflow": "saturate"}
            try:
                found = [measures.sum_error(xs, wire, way, scaling, **how) for xs in inputs]
            except ValueError:  # exact sums: not with tile scaling, nor of too wide a range
                continue
            middle = float(np.median([each.relative for each in found]))
            yield AccuracyCase(ranks, wire, *way, label, middle)


def table(found: list[AccuracyCase]) -> str:
    """Return a Markdown table for one number of ranks and one format: methods by scaling."""
    errors = {(case.method, case.scaling): case.error for case in found}
    lines = [
        f"| {found[0].wire}, {found[0].ranks} ranks | " + " | ".join(SCALINGS) + " |",
        "|---" * (1 + len(SCALINGS)) + "|",
    ]
    for method in dict.fromkeys(case.method for case in found):
        cells = [errors.get((method, label)) for label in SCALINGS]
        shown = ["" if cell is None else f"{cell:.2g}" for cell in cells]
        lines.append(f"| {method} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def chart(found: list[AccuracyCase]) -> Chart:
    """Return the error against ranks, a panel for each format and each of two scalings."""
    wires = list(dict.fromkeys(case.wire for case in found))
    looks = styles(case.method for case in found)
    x = Axis("ranks", "log2", ticks=sorted({case.ranks for case in found}))
    panels = []
    for scaling, wire in product(("aps", "tile"), wires):
        of_panel = [case for case in found if (case.wire, case.scaling) == (wire, scaling)]
        series = []
        for method in dict.fromkeys(case.method for case in of_panel):
            points = {case.ranks: case.error for case in of_panel if case.method == method}
            series.append(Series(method, looks[method], [*points], [*points.values()]))
        y = Axis("relative error of the sum", "log")
        panels.append(Panel(f"{wire}, scaling {scaling}", x, y, series))
    title, note = "Error of sums over ranks", "Algorithm, and how partial sums are kept."
    return Chart("accuracy", title, [note], "", panels, len(wires), most=len(panels))


def run(args: argparse.Namespace) -> None:
    """Simulate all cases, print a table for each number of ranks and format, and draw them."""
    check_options(args, 1, "values", "seeds")
    ranks = parse_counts("--ranks", args.ranks)
    wires = parse_names("--formats", args.formats, parse_format)
    found: list[AccuracyCase] = []
    for wire in wires:
        for count in ranks:
            one = list(cases(count, wire, args.values, args.seeds))
            print(table(one), flush=True)
            print()
            found += one
    if args.png is not None:
        store.put(args.png, image(chart(found), args.png.suffix[1:] or "png"))
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
    parser.add_argument("--formats", default=DEFAULT_FORMATS, metavar="NAME,...", help="formats")
    parser.add_argument("--values", type=int, default=1 << 20, metavar="N", help="that are drawn")
    parser.add_argument(
        "--gradients",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE.h5",
        help="recorded gradients (train.record_gradients), rounded as well",
    )


def rounded(x: Values, fmt: Format, scaling: str) -> Values:
    """Return x rounded to a format, with one shift for all of it (LAYER), or as in SHARED."""
    largest = cpu.amax_tiles(x).max(keepdims=True, initial=0)
    one = int(cpu.fitting_shift(largest, fmt)[0]) - SHIFT_BIAS
    return measures.rounded(x, Cast(fmt), one if scaling == LAYER else scaling).values


def error(arrays: Sequence[Values], fmt: Format, scaling: str) -> float:
    """Return the relative error of all arrays together; NaN where all values are zero."""
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
    lines = [f"| {name} | bits | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for fmt in map(parse_format, formats):
        errors = [f"{error(arrays, fmt, scaling):.3g}" for scaling in BITS]
        lines.append(f"| {fmt.name} | {fmt.bits} | " + " | ".join(errors) + " |")
    return "\n".join(lines)


def run_rounding(args: argparse.Namespace) -> None:
    """Print the error of rounding once, by format and by how many values share an exponent.

    ||rounded - x|| / ||x||, the norms in float64 over all arrays, for normal values, for Student's
    t with 3 degrees of freedom, whose tails are heavy, and for the gradients of files that
    train.record_gradients wrote. To nearest; each array, of a layer and a rank, is scaled by
    itself.
    """
    check_options(args, 1, "values")
    formats = parse_names("--formats", args.formats, parse_format)
    data = [
        (name, [drawn(np.random.default_rng(0), args.values).astype(np.float32)])
        for name, drawn in DRAWN.items()
    ]
    data += [(path.stem, recorded(path)) for path in args.gradients]
    print("\n\n".join(rounding_table(name, arrays, formats) for name, arrays in data))

"""Error of the sum: every algorithm, accumulation and scaling, simulated on one process.

Contributions are g_i = s (m + n_i) with m ~ N(0, 0.3) shared, n_i ~ N(0, 1) and s log-normal
(sigma 1.5) times 1e-3, so that magnitudes spread over many binades as gradients' do. The error
is ||result - sum|| / ||sum||, the norms and the sum in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .. import store
from ..config import ConfigError
from ..formats import parse_format
from ..precision.measures import WAYS, sum_error
from ..report.figures import Axis, Chart, Panel, Series, image, styles
from .harness import check_positive, parse_counts

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
    parser.add_argument("--ranks", default="8,32,256", help="comma-separated numbers of ranks")
    parser.add_argument("--formats", default="e5m2,e4m3,e2m1fn", help="comma-separated names")
    parser.add_argument("--values", type=int, default=8192, help="of each rank (default 8192)")
    parser.add_argument("--seeds", type=int, default=3, help="errors are medians over so many")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the errors")


def contributions(ranks: int, n: int, seed: int) -> list[npt.NDArray[np.float32]]:
    """Return what each rank adds, float32[n]."""
    rng = np.random.default_rng(seed)
    scale = 1e-3 * rng.lognormal(sigma=1.5, size=n)
    shared = rng.normal(0, 0.3, n)
    return [(scale * (shared + rng.normal(size=n))).astype(np.float32) for _ in range(ranks)]


def cases(ranks: int, wire: str, n: int, seeds: int) -> Iterator[AccuracyCase]:
    """Yield every way of summing that fits the format, with its error."""
    inputs = [contributions(ranks, n, seed) for seed in range(seeds)]
    for way in WAYS:
        for label, (scaling, headroom) in SCALINGS.items():
            try:
                found = [sum_error(xs, wire, way, scaling, headroom=headroom) for xs in inputs]
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
    check_positive(args, "values", "seeds")
    ranks = parse_counts("--ranks", args.ranks)
    try:
        wires = [parse_format(name).name and name for name in args.formats.split(",")]
    except ValueError as problem:
        raise ConfigError(f"bench accuracy: {problem}") from None
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

"""Error of rounding once, by format and by how many values share an exponent.

||rounded - x|| / ||x||, the norms in float64 over all arrays, for normal values, for Student's t
with 3 degrees of freedom, whose tails are heavy, and for the gradients of files that
train.record_gradients wrote. To nearest; each array, of a layer and a rank, is scaled by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..config import UserError
from ..formats import SHARED, SHIFT_BIAS, Cast, Format, parse_format
from ..ops import cpu
from ..precision import measures
from .harness import check_positive, parse_names

Values = npt.NDArray[np.float32]

LAYER = "layer"
BITS = {LAYER: 0.0, **{name: 8 / shared for name, shared in SHARED.items()}}  # of shifts, a value
DEFAULT_FORMATS = "e2m1fn,e3m0,e2m3fn,e4m3fn"
DRAWN: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "Student's t, 3": lambda rng, n: rng.standard_t(3, n),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to its command-line parser."""
    parser.add_argument("--formats", default=DEFAULT_FORMATS, help="comma-separated names")
    parser.add_argument("--values", type=int, default=1 << 20, help="that are drawn (2**20)")
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


def table(name: str, arrays: Sequence[Values], formats: Sequence[str]) -> str:
    """Return a Markdown table of the errors of one kind of data: formats by scaling."""
    heads = [f"{scaling} (+{more:.2g})" if more else scaling for scaling, more in BITS.items()]
    lines = [f"| {name} | bits | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for fmt in map(parse_format, formats):
        errors = [f"{error(arrays, fmt, scaling):.3g}" for scaling in BITS]
        lines.append(f"| {fmt.name} | {fmt.bits} | " + " | ".join(errors) + " |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Round all data in all ways, and print a table for each kind."""
    check_positive(args, "values")
    formats = parse_names("--formats", args.formats, parse_format)
    data = [
        (name, [drawn(np.random.default_rng(0), args.values).astype(np.float32)])
        for name, drawn in DRAWN.items()
    ]
    data += [(path.stem, recorded(path)) for path in args.gradients]
    print("\n\n".join(table(name, arrays, formats) for name, arrays in data))

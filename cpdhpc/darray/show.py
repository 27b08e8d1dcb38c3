"""What a plan looks like and costs, for any number of ranks: nothing is sent, no MPI is needed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..config import ConfigError, UserError
from .describe import Description, describe
from .options import add_options, given, ranges
from .spec import Spec, read_spec, spec_of
from .windows import Windows

SUMMARY = "a plan's ranks, windows and messages, as a table and a picture; needs no MPI"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE.toml",
        help="the plan: keys as the options, also owners and windows, [start, stop] of each rank",
    )  # fmt: skip
    add_options(parser, filters=True)
    parser.add_argument(
        "--window", metavar="-1:7,-1:9", help="of --rank alone, instead of a halo: any box"
    )
    parser.add_argument(
        "--rank", type=int, help="whose window is drawn (default: with the most neighbours)"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw a plan of two axes into an image"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the table of a plan, and draw it. Raises UserError."""
    spec = spec_from(arguments)
    windows = spec.geometry()
    described = describe(windows, spec.dtype, spec.trail, spec.packed, "shown")
    rank = rank_of(arguments.rank, described)
    if arguments.png is not None:
        _check_png(arguments.png, windows)
    print(described)
    print(f"rank {rank}: owns {windows.layout.owner(rank)}, window {windows.boxes[rank]}")
    if arguments.png is not None:
        from .picture import draw

        draw(arguments.png, windows, rank)
        print(f"picture: {arguments.png}")


def spec_from(arguments: argparse.Namespace) -> Spec:
    """Return the plan of the file, or of the options, or of options laid over the file's."""
    laid_over: dict[str, Any] = given(arguments)
    if arguments.file is None and "shape" not in laid_over:
        raise ConfigError("darray show: needs FILE.toml or --shape")
    raw = {} if arguments.file is None else read_spec(arguments.file).model_dump(exclude_unset=True)
    source = "darray show" if arguments.file is None else str(arguments.file)
    spec = spec_of(raw | laid_over, source)
    if arguments.window is None:
        return spec
    owners = spec.geometry().layout.owners
    if arguments.rank is None or not 0 <= arguments.rank < len(owners):
        raise ConfigError(f"--window {arguments.window}: needs --rank, of 0..{len(owners) - 1}")
    boxes = [[list(side) for side in box] for box in owners]
    boxes[arguments.rank] = ranges("--window", arguments.window)
    return spec_of(raw | laid_over | {"windows": boxes}, source)


def rank_of(wanted: int | None, described: Description) -> int:
    """Return the rank to show: the one that is wanted, or with the most neighbours."""
    ranks = len(described.ranks)
    if wanted is None:
        return max(range(ranks), key=lambda rank: len(described.ranks[rank].recvs_from))
    if not 0 <= wanted < ranks:
        raise UserError(f"--rank {wanted}: must be 0..{ranks - 1}")
    return wanted


def _check_png(path: Path, windows: Windows) -> None:
    ndim = len(windows.layout.shape)
    if ndim != 2:
        raise UserError(f"--png {path}: draws plans of 2 axes, this one has {ndim}")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--png {path}: {path.parent} is no directory that can be written to")

"""Arguments of the commands that have no module of their own to name them."""

from __future__ import annotations

import argparse
from pathlib import Path

SLOWER = 1  # exit status of report --compare --fail-on-slower


def seconds(text: str) -> float:
    """Return a time, above zero; ValueError, which argparse shows, for anything else."""
    value = float(text)
    if not value > 0:
        raise ValueError(text)
    return value


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Add the time after which a wait for other processes ends the job."""
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="end the job, and say who waits for whom, where a wait takes longer (default 600)",
    )


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of train."""
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="the job")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="lay a value over the file's, as train.epochs=3 or data.dir=DIR; may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where files go (default: results/ + FILE's name)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoints in DIR and skip the runs that are complete",
    )
    add_timeout(parser)


def add_autoencoder(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of autoencoder: those of train, and a picture."""
    add_train(parser)
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the first layer's filters into an image"
    )


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of report."""
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE.h5",
        help="studies and records of training runs, or directories of them",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write every figure: PNG, SVG")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw training runs into an image")
    parser.add_argument("--quiet", action="store_true", help="print no table")
    parser.add_argument(
        "--compare", action="store_true", help="of two studies A B: which points changed"
    )
    parser.add_argument(
        "--fail-on-slower",
        action="store_true",
        help=f"with --compare: exit status {SLOWER} where a point of B is slower",
    )


def add_batch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of batch."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the study")
    parser.add_argument("number", type=int, metavar="NUMBER", help="of the batch, from 0")
    parser.add_argument("--nodes", type=int, help="nodes of the job (default: the batch's)")
    parser.add_argument("--ppn", type=int, help="ranks per node (default: the batch's)")


def add_info(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of info: none."""

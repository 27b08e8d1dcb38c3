"""python -m cpdhpc report: a table, and on demand a figure and a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from .. import store
from .figure import image
from .page import page
from .runs import ReportError, group, load
from .table import table

WIDTH = 110  # columns of a table that goes to no terminal


def report(
    paths: Iterable[Path],
    png: Path | None = None,
    html: Path | None = None,
    terminal: bool | None = None,
    quiet: bool = False,
) -> None:
    """Print the table of runs, unless quiet; write the figure and the page to paths given.

    terminal: whether stdout is one, None to find out
    Raises UserError where no run is complete, or a file cannot be read or written.
    """
    runs = load(paths)
    groups = group(runs)
    if not groups:
        raise ReportError(f"none of {len(runs)} runs is complete")
    console = Console(force_terminal=terminal)
    console = console if console.is_terminal else Console(force_terminal=False, width=WIDTH)
    if not quiet:
        console.print(table(groups))
    for run in runs:
        if not run.complete:
            status = run.attributes["status"]
            console.print(f"left out: {run.path.name}: {status}", markup=False, soft_wrap=True)
    if png is not None:
        _write(png, image(groups, "png"))
    if html is not None:
        _write(html, page(runs, groups).encode())


def _write(path: Path, content: bytes) -> None:
    try:
        with store.replacing(path) as temporary:
            temporary.write_bytes(content)
        print(f"wrote {path}")
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}") from None

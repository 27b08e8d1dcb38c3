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


def report(paths: Iterable[Path], png: Path | None, html: Path | None) -> None:
    """Print the table of runs; write the figure and the page where paths are given.

    Raises UserError where no run is complete, or a file cannot be read or written.
    """
    runs = load(paths)
    groups = group(runs)
    if not groups:
        raise ReportError(f"none of {len(runs)} runs is complete")
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table(groups))
    for run in runs:
        if not run.complete:
            status = run.attributes["status"]
            console.print(f"left out: {run.path.name}: {status}", markup=False, soft_wrap=True)
    outputs = {png: lambda: image(groups, "png"), html: lambda: page(runs, groups).encode()}
    for path, content in outputs.items():
        if path is not None:
            _write(path, content())


def _write(path: Path, content: bytes) -> None:
    try:
        with store.replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}") from None

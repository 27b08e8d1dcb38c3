"""python -m cpdhpc report: tables, and on demand figures and a page that needs no other file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from .. import store
from ..study.study_file import ReportError, StudyFile, load_study_file
from .compare import compare, compare_report
from .figures import Chart, image
from .study import study_report
from .tables import Listed, Report
from .trainings import Run, load_run, overview, run_groups, runs_report

STUDY = "study.h5"  # in the folder of a study


def load(paths: Iterable[Path]) -> tuple[list[StudyFile], list[Run]]:
    """Return the studies in the order given, and the runs, oldest first.

    A directory stands for the study file in it, else for all records in it. Raises ReportError
    where a file is neither or a directory has none; StoreError for what cannot be read.
    """
    studies, runs = [], []
    for path in paths:
        for file in _files(path) if path.is_dir() else [path]:
            if "study" in store.read_attributes(file):
                studies.append(load_study_file(file))
            else:
                runs.append(load_run(file))
    return studies, sorted(runs, key=lambda run: str(run.attributes["date"]))


def _files(directory: Path) -> list[Path]:
    if (directory / STUDY).exists():
        return [directory / STUDY]
    files = [file for file in sorted(directory.glob("*.h5")) if not file.name.startswith(".")]
    runs = [file for file in files if store.read_attributes(file).get("kind") == "run"]
    if not runs:
        raise ReportError(f"{directory}: there is no file of a study or of a run in this directory")
    return runs


def page(reports: Sequence[Report]) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cpdhpc.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = ", ".join(report.title for report in reports)
    return environment.get_template("page.html").render(
        title=title, reports=reports, svg=svg, unique=unique
    )


def svg(chart: Chart) -> str:
    """Return a figure as the address of an image."""
    return f"data:image/svg+xml;base64,{b64encode(image(chart, 'svg')).decode()}"


def unique(number: int, title: str) -> str:
    """Return a name that links of the page can go to."""
    return f"r{number}-" + "".join(c if c.isalnum() else "-" for c in title.lower())


WIDTH = 140  # columns of a table that goes to no terminal
LINES = 5  # of what is listed below the tables


def report(
    paths: Iterable[Path],
    png: Path | None = None,
    html: Path | None = None,
    figures: Path | None = None,
    terminal: bool | None = None,
    quiet: bool = False,
) -> None:
    """Print the tables of studies and runs, unless quiet; write figures and the page.

    png: of runs, one figure; figures: directory for PNG and SVG of every figure
    terminal: whether stdout is one, None to find out
    Raises UserError where a file cannot be read or written, or no run is complete.
    """
    check_places(html, png)
    studies, runs = load(paths)
    reports = [study_report(file) for file in studies]
    of_runs = runs_report(runs, run_groups(runs)) if runs else None
    reports += [of_runs] if of_runs else []
    if png is not None and of_runs is None:
        raise ReportError(
            f"--png {png}: is of training runs; --figures DIR writes those of studies"
        )
    show(reports, terminal, quiet)
    if png is not None and of_runs is not None:
        _write(png, image(overview(of_runs.charts), "png"))
    write(reports, html, figures)


def compare_files(
    paths: Sequence[Path],
    html: Path | None = None,
    figures: Path | None = None,
    quiet: bool = False,
) -> int:
    """Print what changed between two studies; return how many points are slower.

    Raises UserError for anything but two studies of one kind.
    """
    check_places(html)
    studies, runs = load(paths)
    if len(studies) != 2 or runs:
        came = f"{len(studies)} and {len(runs)} records of training"
        raise ReportError(f"--compare: needs two study files; came {came}")
    comparison = compare(*studies)
    reports = [compare_report(comparison)]
    show(reports, None, quiet)
    write(reports, html, figures)
    return len(comparison.having("slower"))


def check_places(*paths: Path | None) -> None:
    """Raise ReportError for a file whose directory is not there, before anything is drawn."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ReportError(f"{path}: cannot be written: there is no such directory")


def show(reports: Sequence[Report], terminal: bool | None, quiet: bool) -> None:
    """Print reports."""
    console = Console(force_terminal=terminal)
    console = console if console.is_terminal else Console(force_terminal=False, width=WIDTH)
    for each in reports:
        if not quiet:
            _print(console, each)
        for listed in each.listed:
            _print_listed(console, listed)


def _print_listed(console: Console, listed: Listed) -> None:
    """Print what is not as it was asked for, only the first of many."""
    more = len(listed.items) - LINES
    lines = [*listed.items[:LINES], *([f"and {more} more: --html lists all"] if more > 0 else [])]
    for line in (f"{listed.what}:" if lines else listed.what, *(f"  {line}" for line in lines)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, of: Report) -> None:
    console.print(of.title, style="bold", markup=False)
    for name, fact in of.facts:
        console.print(f"{name}: {fact}", markup=False, highlight=False)
    for section in of.sections:
        for table in section.tables:
            if not table.page_only:
                console.print(table.rich())
        for note in section.notes:
            console.print(note, markup=False, highlight=False)


def write(reports: Sequence[Report], html: Path | None, figures: Path | None) -> None:
    """Write the page and the figures to the paths given. Raises UserError."""
    if html is not None:
        _write(html, page(reports).encode())
    if figures is None:
        return
    try:
        figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"{figures}: cannot be made: {error.strerror}") from None
    for number, each in enumerate(reports, 1):
        several = f"{number}-" if len(reports) > 1 else ""
        for chart in each.charts:
            for kind in ("png", "svg"):
                _write(figures / f"{several}{chart.name}.{kind}", image(chart, kind))


def _write(path: Path, content: bytes) -> None:
    store.put(path, content)
    print(f"wrote {path}")

"""Show studies and training runs as tables, and on demand as figures and as one page."""

from __future__ import annotations

import argparse
import json
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from gzip import compress
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from ... import store
from ...config import UserError
from ..report import interactive, other_files, trainings, units
from ..report.compare import compare, compare_report, load_reference, verdict
from ..report.figures import Chart, image
from ..report.history import history_report, latest, load_history, place
from ..report.other_files import KIND as REPLAY
from ..report.other_files import autoencoder_report, probe_report, replay_report
from ..report.scaling import ALL, Choice
from ..report.tables import Listed, Report, Section, counted, slug
from ..settings import options
from ..study.folder import Folder
from ..study.report import BENCHMARK, compress_report, study_report
from ..study_data.study_file import ReportError, StudyFile, load_study_file


def _search_report(path: Path) -> Report:
    from ..precision.evidence import search_report

    return search_report(path)


def _influence_report(path: Path) -> Report:
    from ..influence import tables

    return Report(f"Influence: {path.name}", [], [Section("Influence", tables(path, TOP))])


def _verify_report(path: Path) -> Report:
    from ..verify.pages import report_of

    return report_of(path)


VERIFY = "verify"  # kind of the files that verify writes
TOP = 5  # samples that raised or lowered a loss most, the default of influence
OF_KIND = {  # by the attribute "kind" of a file
    REPLAY: replay_report,
    "precision search": _search_report,
    VERIFY: _verify_report,
    "influence": _influence_report,
    "autoencoder": autoencoder_report,
    "autoencoder probe": probe_report,
}


@dataclass(frozen=True)
class Loaded:
    """The studies in the order given, the runs, oldest first, and the errors of other files.

    others: reports of files of bench compress, and of the kinds of OF_KIND
    """

    studies: list[StudyFile]
    runs: list[trainings.TrainingRun]
    unreadable: list[str]
    others: Sequence[Report] = ()


def load(paths: Sequence[Path]) -> Loaded:
    """Return the contents of files; an unreadable one is named, and the others are read.

    A directory stands for the study file and all records in it. Raises UserError if nothing can
    be read.
    """
    studies, runs, errors = list[StudyFile](), list[trainings.TrainingRun](), list[UserError]()
    others: list[Report] = []
    for path in paths:
        try:
            files = _files(path) if path.is_dir() else [path]
        except UserError as error:
            errors.append(error)
            continue
        before = len(studies) + len(runs) + len(others) + len(errors)
        for file in files:
            try:
                if file.is_file() and file.suffix != ".h5" and not other_files.is_hdf5(file):
                    raise ReportError(f"{file}: {other_files.of_file(file)}")
                attributes = store.read_attributes(file)
                if "study" in attributes:
                    studies.append(load_study_file(file))
                elif attributes.get("benchmark") == BENCHMARK:
                    others.append(compress_report(file))
                elif of_kind := OF_KIND.get(str(attributes.get("kind"))):
                    others.append(of_kind(file))
                elif attributes.get("kind") == "run":
                    runs.append(trainings.load_run(file))
                elif not path.is_dir():
                    raise ReportError(f"{file}: {other_files.of_file(file)}")
            except UserError as error:
                errors.append(error)
        if len(studies) + len(runs) + len(others) + len(errors) == before:
            held = other_files.of_folder(path)
            errors.append(ReportError(f"{path}: nothing that report shows: {held}"))
    if not studies and not runs and not others:
        raise errors[0]
    by_age = sorted(trainings.without_copies(runs), key=lambda run: str(run.attributes["date"]))
    return Loaded(studies, by_age, list(map(str, errors)), others)


def _files(directory: Path) -> list[Path]:
    """Return the study file and the records of a directory. Raises ReportError."""
    folder = Folder(directory)
    files = [file for file in sorted(directory.glob("*.h5")) if not file.name.startswith(".")]
    if folder.study_toml.exists() and not folder.study_file.exists():
        count = sum(not file.name.startswith(".") for file in folder.cases.glob("*.h5"))
        collect = (
            f", but {units.count(count, 'file')} of cases: `study collect {directory}` makes one"
            if count
            else ": no case has ended"
        )
        raise ReportError(
            f"{directory}: the study has no {folder.study_file.name} yet{collect}, "
            f"`study resume {directory}` goes on"
        )
    return files


def page(reports: Sequence[Report]) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cpdhpc.lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = ", ".join(report.title for report in reports)
    return environment.get_template("page.html").render(
        title=title,
        reports=reports,
        address=address,
        slug=slug,
        packed=lambda table: packed(_json(table.rows[ROWS:])),
        first=ROWS,
        interactive=lambda chart: packed(_json(interactive.item(chart))),
        library=lambda: packed(interactive.library()),
    )


MOST_POINTS = 30  # of a picture as SVG, which then has some 60 KB
ROWS = 50  # of a table that are HTML in the page; its script unpacks the others


def packed(text: str) -> str:
    """Return text for the page's script: gzip in base64."""
    return b64encode(compress(text.encode(), mtime=0)).decode()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def address(chart: Chart) -> str:
    """Return a figure as the address of an image: of pixels if it has many points."""
    kind, media = ("webp", "webp") if chart.points > MOST_POINTS else ("svg", "svg+xml")
    return f"data:image/{media};base64,{b64encode(image(chart, kind)).decode()}"


WIDTH = 140  # columns of a table if the output is no terminal
MOST = 10_000  # columns that a table may need
LINES = 5  # of each list below the tables
INCOMPLETE = 1  # exit status if a file could not be read


@dataclass(frozen=True)
class Outputs:
    """Outputs of reports besides the terminal: a page, and directories of files."""

    html: Path | None = None
    figures: Path | None = None
    csv: Path | None = None
    latex: Path | None = None
    quiet: bool = False
    terminal: bool | None = None

    def check(self) -> None:
        """Raise ReportError before anything is drawn if the directory of the page is missing."""
        check_place(self.html)

    def give(
        self,
        reports: Sequence[Report],
        unreadable: Sequence[str] = (),
        last: str = "",
        png: Path | None = None,
    ) -> int:
        """Write and print reports; return the exit status. Raises ReportError.

        Files come first, as the reader of the output may end early, for example head.
        last: a line below the tables; png: a figure that was written
        """
        if unreadable:
            first, left = reports[0], counted([("not read", unreadable)], "file")
            first = replace(first, listed=[*left, *first.listed])
            reports = [first, *reports[1:]]
        written = [*([] if png is None else [png]), *self.write(reports)]
        if unreadable:
            files = units.count(len(unreadable), "file")
            print(f"cpdhpc: {files} not read: {'; '.join(unreadable)}", file=sys.stderr)
        show(reports, self.terminal, self.quiet)
        for line in [*([last] if last else []), *(f"wrote {path}" for path in written)]:
            print(line)
        if self.figures and not any(each.charts for each in reports):
            print(f"--figures {self.figures}: nothing written: these reports have no figure")
        return INCOMPLETE if unreadable else 0

    def write(self, reports: Sequence[Report]) -> list[Path]:
        """Write the files of all outputs and return their paths. Raises ReportError."""
        written = list[Path]()
        if self.html is not None:
            store.put(self.html, page(reports).encode())
            written.append(self.html)
        for number, each in enumerate(reports, 1):
            several = f"{number}-" if len(reports) > 1 else ""
            for chart in each.charts if self.figures else ():
                for kind in ("png", "svg"):
                    name = f"{several}{chart.name}.{kind}"
                    written += _put(self.figures, name, image(chart, kind))
            for table in each.tables:
                written += _put(self.csv, f"{several}{table.file}.csv", table.csv().encode())
                written += _put(self.latex, f"{several}{table.file}.tex", table.latex().encode())
        return written


PLAIN = Outputs()


def report(
    paths: Sequence[Path], outputs: Outputs = PLAIN, png: Path | None = None, choice: Choice = ALL
) -> int:
    """Print the tables of studies and runs, write the outputs; return the exit status.

    png: one figure of the runs; choice: of the points and figures of studies
    Raises UserError if nothing can be read, an output cannot be written, or no run is complete.
    """
    outputs.check()
    check_place(png)
    loaded = load(paths)
    if choice != ALL and not loaded.studies:
        raise ReportError("--where, --x, --y, --by, --panel: need a study; there is none")
    reports = [study_report(file, choice) for file in loaded.studies]
    if choice.draws and not (outputs.html or outputs.figures):
        raise ReportError("--x, --y, --by, --panel: choose figures: add --html or --figures")
    of_runs = (
        trainings.runs_report(loaded.runs, trainings.run_groups(loaded.runs))
        if loaded.runs
        else None
    )
    if png is not None:
        if of_runs is None:
            raise ReportError(f"--png {png}: draws training runs; --figures DIR draws studies")
        _draw(trainings.overview(of_runs.charts), png)
    shown = [*reports, *([of_runs] if of_runs else []), *loaded.others]
    return outputs.give(shown, loaded.unreadable, png=png)


def _draw(chart: Chart, path: Path) -> None:
    """Write a figure in the format that the name says: PNG, PDF, SVG."""
    store.put(path, image(chart, path.suffix[1:].lower() or "png"))


def report_tasks(paths: Sequence[Path], outputs: Outputs = PLAIN, png: Path | None = None) -> int:
    """Print how far methods are from float32 in several tasks, a folder of runs each, and draw it.

    Returns the exit status. Raises the errors of report, and UserError if a task has no float32.
    """
    outputs.check()
    check_place(png)
    found = [(path, load([path])) for path in paths]
    tasks = [trainings.Task(path.name, trainings.run_groups(loaded.runs)) for path, loaded in found]
    shown = trainings.tasks_report(tasks)
    if png is not None:
        _draw(shown.charts[0], png)
    unreadable = [error for _, loaded in found for error in loaded.unreadable]
    return outputs.give([shown], unreadable, png=png)


def compare_files(
    after: Path,
    before: Path,
    outputs: Outputs = PLAIN,
    tolerance: float | None = None,
    fails: bool = False,
) -> int:
    """Print what changed from a reference to a study; return how many points are slower.

    Two files of verify are printed side by side, and 0 is returned.
    before: a study, or a TOML file that names one with tolerances (compare.Reference), or a
        library that keep has made, of which the last study before this one is taken
    fails: raise UserError after the tables if no point can be judged
    Raises UserError for anything but two studies of one kind, or two files of verify.
    """
    outputs.check()
    of_verify = after.is_file() and other_files.is_hdf5(after)
    if of_verify and store.read_attributes(after).get("kind") == VERIFY:
        if fails or tolerance is not None:
            raise ReportError("--tolerance, --fail-on-slower: need studies")
        from ..verify.pages import side_by_side

        outputs.give([side_by_side(after, before)])
        return 0
    study = _study(after)
    if before.is_dir() and not (Folder(before).study_file.exists() or [*before.glob("*.h5")]):
        before = latest(before, study)
    reference = load_reference(before, tolerance)
    comparison = compare(_study(Path(reference.study)), study, reference)
    outputs.give([compare_report(comparison)], last=verdict(comparison))
    if fails and len(comparison.having("unknown")) == len(comparison.changes):
        raise ReportError("--fail-on-slower: no point has an interval: nothing can be judged")
    return len(comparison.having("slower"))


def history(
    paths: Sequence[Path], metric: str, outputs: Outputs = PLAIN, png: Path | None = None
) -> int:
    """Print one metric of a study over days and commits, and draw it; return 0. Raises UserError.

    paths: files of studies, and folders of them, for example of --keep
    """
    outputs.check()
    check_place(png)
    shown = history_report(load_history([_of_folder(path) for path in paths]), metric)
    if png is not None:
        _draw(shown.charts[0], png)
    return outputs.give([shown], png=png)


def keep(paths: Sequence[Path], library: Path) -> None:
    """Copy studies into a library, as LIBRARY/STUDY/SYSTEM/DATE-COMMIT.h5. Raises UserError."""
    for path in paths:
        file = _study(path)
        target = place(library, file)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            content = file.path.read_bytes()
        except OSError as error:
            raise ReportError(f"--keep {library}: {error.strerror}: {error.filename}") from None
        store.put(target, content)
        print(f"kept {target}")


def _study(path: Path) -> StudyFile:
    loaded = load([_of_folder(path)])
    if len(loaded.studies) != 1 or loaded.runs or loaded.others:
        raise ReportError(f"--compare: {path}: must be a study")
    return loaded.studies[0]


def _of_folder(path: Path) -> Path:
    """Return the study file in the folder of a study, any other path unchanged."""
    file = Folder(path).study_file
    return file if file.exists() else path


def check_place(path: Path | None) -> None:
    """Raise ReportError if the directory of a file is missing, or if the file holds data."""
    if path is not None and not path.parent.is_dir():
        raise ReportError(f"{path}: cannot be written: there is no such directory")
    if path is not None and path.is_file() and other_files.is_hdf5(path):
        raise ReportError(f"{path}: is an HDF5 file: not replaced")


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
    """Print a list, if it is long only its first items."""
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
                _print_table(console, table.rich())
                if table.left:
                    console.print(table.left, markup=False, highlight=False)
        for note in section.notes:
            console.print(note, markup=False, highlight=False)


def _print_table(console: Console, table: RichTable) -> None:
    """Print a table, wider than the console if words would not fit, which rich would drop."""
    unbounded = console.options.update(width=MOST)
    room, least = console.width, console.measure(table, options=unbounded).minimum
    console.width = max(room, least)
    console.print(table)
    console.width = room


def _put(directory: Path | None, name: str, content: bytes) -> list[Path]:
    """Write a file to a directory, which is created if it is missing; without one do nothing."""
    if directory is None:
        return []
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"{directory}: cannot be created: {error.strerror}") from None
    store.put(directory / name, content)
    return [directory / name]


SLOWER = 1  # exit status of --compare --fail-on-slower


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of report."""
    add = options(parser)
    add(
        "files FILE.h5",
        "studies, records of training runs, or directories of them; files of verify and others",
        Path,
        nargs="+",
    )
    add("--html FILE.html", "write one self-contained page", Path)
    add("--figures DIR", "write every figure as PNG and SVG", Path)
    add("--csv DIR", "write every table with all digits", Path)
    add("--latex DIR", "write every table for LaTeX with booktabs", Path)
    add("--png FILE.png", "draw training runs", Path)
    add("--tasks", "compare methods with float32; each path has the runs of one task")
    add("--quiet", "print no table")
    add("--keep DIR", "copy studies into a library: DIR/STUDY/SYSTEM/DATE-COMMIT.h5", Path)
    add(
        "--history NAME",
        "show time, an outcome, or a metric of a program over days and commits, from files or "
        "folders of a library",
    )
    _add_choice(parser)
    _add_compare(parser)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    for_figures = parser.add_argument_group("points and figures of studies, by factors")
    for_figures.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="show only these points; also != < <= > >=; may be repeated",
    )
    add = options(for_figures)
    add("--x NAME", "factor along the x axis", "")
    add(
        "--y NAME",
        "time (default), speedup, efficiency, throughput of throughput studies, or an outcome",
        "",
    )
    for name, text in (("by", "one series"), ("panel", "one panel")):
        add(
            f"--{name} NAME,...",
            f"{text} for each value of these factors",
            [],
            type=lambda given: given.split(","),
        )


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = options(parser)
    add(
        "--compare FILE",
        "show what changed since another study: its file, a TOML file that names it with "
        "tolerances, or a library of --keep, whose last study of this name and system is taken; "
        "or show two files of verify side by side",
        Path,
    )
    add(
        "--tolerance SHARE",
        "with --compare: share by which a point may be slower, for example 0.05",
        float,
    )
    add("--fail-on-slower", f"with --compare: return exit status {SLOWER} if a point is slower")


def run(arguments: argparse.Namespace) -> int:
    """Show studies and training runs, or what changed between two."""
    of = arguments
    outputs = Outputs(of.html, of.figures, of.csv, of.latex, of.quiet)
    choice = Choice(of.x, of.y, tuple(of.by), tuple(of.panel), tuple(of.where))
    if of.tasks or of.history is not None:
        if of.compare or choice != ALL:
            option = "--tasks" if of.tasks else "--history"
            raise UserError(f"{option}: excludes --compare, --where, --x, --y, --by, --panel")
        if of.tasks:
            return report_tasks(of.files, outputs, of.png)
        return history(of.files, of.history, outputs, of.png)
    status = _run_studies(of, outputs, choice)
    if of.keep is not None:  # after the comparison with the library
        keep(of.files, of.keep)
    return status


def _run_studies(of: argparse.Namespace, outputs: Outputs, choice: Choice) -> int:
    """Show studies and runs, or what changed between two; return the exit status."""
    if of.compare is None:
        for name in ("fail_on_slower", "tolerance"):
            if getattr(of, name):
                raise UserError(f"--{name.replace('_', '-')}: needs --compare")
        return report(of.files, outputs, of.png, choice)
    if of.png or choice != ALL:
        raise UserError("--compare: excludes --png, --where, --x, --y, --by, --panel")
    if len(of.files) != 1:
        raise UserError(f"--compare: takes one study besides the reference, not {len(of.files)}")
    slower = compare_files(of.files[0], of.compare, outputs, of.tolerance, of.fail_on_slower)
    return SLOWER if slower and of.fail_on_slower else 0

"""Pages, figures and the command line of reports on studies, and files that are refused."""

import csv
import json
import re
from base64 import b64decode
from dataclasses import replace
from gzip import decompress
from html.parser import HTMLParser
from pathlib import Path
from time import process_time
from typing import Any
from xml.etree import ElementTree

import h5py
import pytest
from every import every
from studies import no_numbers
from synthetic_study import many, write_study
from training import ROWS, run_job, small_job

from cpdhpc.config import UserError
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands.report import ROWS as FIRST
from cpdhpc.lab.commands.report import Outputs, page, report, show
from cpdhpc.lab.report.figures import draw
from cpdhpc.lab.report.points import SeedGroup, seed_groups
from cpdhpc.lab.report.scaling import Choice, chosen
from cpdhpc.lab.report.tables import Column, Report, Section, tabulate
from cpdhpc.lab.study.report import study_report
from cpdhpc.lab.study_data.study_file import ReportError, StudyFile, load_study_file
from cpdhpc.world.ranks import Loopback

SMALL: dict[str, Any] = {"ranks": (2,), "sizes": (2**12, 2**20), "algorithms": ()}


@pytest.fixture(scope="module")
def allreduce(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("allreduce") / "small.h5", **SMALL)


class Page(HTMLParser):
    """Tags that are opened and closed, and addresses."""

    VOID = ("meta", "img", "br", "hr", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.open += [] if tag in self.VOID else [tag]
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        self.ids += [v or "" for k, v in attrs if k == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_needs_nothing_else(allreduce: Path, tmp_path: Path) -> None:
    toml = 'name = "s"\n# <b>&amp; "quoted"</b>\n'
    few: dict[str, Any] = {"ranks": (2,), "sizes": (2**12,), "algorithms": ()}
    other = write_study(tmp_path / "t.h5", toml=toml, **few)
    run_job(small_job(name="aps", gradient=ROWS["aps"]), Loopback(2), tmp_path)
    html = tmp_path / "page.html"
    report([allreduce, other, tmp_path / "aps-s0.h5"], Outputs(html, quiet=True))
    text = html.read_text()
    page = Page(text)
    assert page.open == []
    assert not {"link", "iframe"} & set(page.seen) and "@import" not in text
    assert not re.findall(r"url\((?!data:)", text)
    inside = [address[1:] for address in page.addresses if address.startswith("#")]
    images = [address for address in page.addresses if address.startswith("data:image/")]
    assert len(inside) + len(images) == len(page.addresses)
    assert set(inside) <= set(page.ids) and len(page.ids) == len(set(page.ids))
    reports = [study_report(load_study_file(path)) for path in (allreduce, other)]
    assert len(images) > sum(len(each.charts) for each in reports)
    for image in images:
        kind, _, content = image.partition(";base64,")
        if kind == "data:image/webp":
            assert b64decode(content)[8:12] == b"WEBP"
            continue
        root = ElementTree.fromstring(b64decode(content))
        links = [v for e in root.iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert all(link.startswith(("#", "data:")) for link in links)
    assert "&lt;b&gt;&amp;amp;" in text, "the study's text is shown as it is"
    for said in ("Open MPI v5.0.11", "SLURM_JOB_ID 1234", "Training runs", "slowest rank"):
        assert said in text
    for chart in reports[0].charts:
        assert chart.title in text


def test_a_page_replaces_no_data(allreduce: Path, tmp_path: Path) -> None:
    copy = tmp_path / "study.h5"
    copy.write_bytes(allreduce.read_bytes())
    with pytest.raises(ReportError, match=r"study.h5: is an HDF5 file: not replaced"):
        report([copy], Outputs(copy, quiet=True))
    assert copy.read_bytes() == allreduce.read_bytes()


@pytest.mark.usefixtures("without_figures")
def test_figures_of_each_chart(allreduce: Path, tmp_path: Path) -> None:
    report([allreduce], Outputs(figures=tmp_path / "new" / "figures", quiet=True))
    names = {path.name for path in (tmp_path / "new" / "figures").iterdir()}
    charts = ("time_by_size_1x2", "bandwidth_by_size_1x2")
    assert names == {f"{chart}.{kind}" for chart in charts for kind in ("png", "svg")}


def change(path: Path, copy: Path, act: Any) -> Path:
    copy.write_bytes(path.read_bytes())
    with h5py.File(copy, "r+") as file:
        act(file)
    return copy


def drop_summary(file: Any) -> None:
    del file["summary"]


BAD = {
    "has no /summary/n": drop_summary,
    "has schema 99; this version reads 1": lambda file: file.attrs.modify("cpdhpc_schema", 99),
    "kind='fft': known are allreduce, autoencoder, codec, command, halo, train": lambda f: (
        f.attrs.modify("kind", "fft")
    ),
    "has no attribute work": lambda file: file.attrs.__delitem__("work"),
    "has no attribute kind": lambda file: [*map(file.attrs.__delitem__, ("work", "kind"))],
    "the attribute study is not TOML": lambda file: file.attrs.modify("study", "= ["),
}


@every("says", BAD)
def test_damaged_studies_are_refused(allreduce: Path, tmp_path: Path, says: str) -> None:
    path = change(allreduce, tmp_path / "bad.h5", BAD[says])
    with pytest.raises(UserError, match=re.escape(says)):
        report([path], Outputs(terminal=False))


def test_studies_that_state_no_rules_have_those_of_old_ones(
    allreduce: Path, tmp_path: Path
) -> None:
    def drop(file: Any) -> None:
        for rule in ("ci_level", "base"):
            del file["summary"].attrs[rule]

    old = load_study_file(change(allreduce, tmp_path / "old.h5", drop))
    assert (old.percent, old.rules["base"]) == ("95 %", "not stated")


@every("share", [0.0, 0.01, 0.5, 0.999])
def test_files_that_are_cut_off_are_refused(allreduce: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.h5"
    content = allreduce.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=r"cut\.h5: is not an HDF5 file"):
        report([path], Outputs(terminal=False))


def test_a_page_of_many_rows_packs_them(tmp_path: Path) -> None:
    """Its script unpacks gzip of JSON; sections but the first are closed."""
    path = write_study(tmp_path / "s.h5", ranks=(2, 4, 8), sizes=(2**12, 2**18, 2**24))
    found = study_report(load_study_file(path))
    bare = replace(found, sections=[replace(each, charts=()) for each in found.sections])
    text = page([bare])
    rows = [
        json.loads(decompress(b64decode(each))) for each in re.findall('data-rows="(.*?)"', text)
    ]
    assert [table.rows[FIRST:] for table in found.tables if len(table.rows) > FIRST] == rows
    assert len(rows) == 3 and {len(each) for each in rows} == {90 - FIRST}
    assert text.count("<details class") == 5 and text.count(" open>") == 1
    assert Page(text).open == []


@pytest.mark.slow
def test_5000_cases_take_little_more_than_a_small_study_and_2_mb(
    allreduce: Path, tmp_path: Path
) -> None:
    """In processor time, beside that of 24 cases: 30 s and 3 s; it was 365 s and not through."""
    path, html = many(tmp_path / "many.h5"), tmp_path / "many.html"
    times_s = []
    for each in (allreduce, path):
        before_s = process_time()
        report([each], Outputs(html, quiet=True))
        times_s.append(process_time() - before_s)
    assert times_s[1] < 30 * times_s[0]
    assert html.stat().st_size < 2e6


def tables_of(directory: Path) -> dict[str, list[dict[str, str]]]:
    return {
        path.stem: list(csv.DictReader(path.read_text().splitlines()))
        for path in directory.glob("*.csv")
    }


@pytest.fixture(scope="module")
def two_shapes(tmp_path_factory: pytest.TempPathFactory) -> StudyFile:
    path = tmp_path_factory.mktemp("two") / "two.h5"
    return load_study_file(
        write_study(path, ranks=(2, 4), sizes=(2**12, 2**20), algorithms=("ring",))
    )


def test_tables_as_csv_have_all_digits(two_shapes: StudyFile, tmp_path: Path) -> None:
    report([two_shapes.path], Outputs(csv=tmp_path, latex=tmp_path, quiet=True))
    found = tables_of(tmp_path)
    with h5py.File(two_shapes.path) as file:
        summary = {name: data[:] for name, data in file["summary"].items()}
        sizes, bounds = file["samples/size_bytes"][:], file["samples/bound_s"][:]
    rows = found["all_reduce"]
    assert sorted(float(row["median / s"]) for row in rows) == sorted(summary["median_s"])
    assert sorted(float(row["95 % CI low / s"]) for row in rows) == sorted(summary["ci_low_s"])
    assert sorted(float(row["bound / s"]) for row in rows) == sorted(bounds)
    assert sorted(int(row["size / bytes"]) for row in rows) == sorted(sizes)
    assert {row["times as fast as mpi"] for row in rows if row["algorithm"] == "mpi"} == {""}
    latex = (tmp_path / "all_reduce.tex").read_text()
    assert latex.count(r" \\") == 1 + len(rows) and r"95 \% CI" in latex
    assert latex.count(" & ") == latex.count(r" \\") * 12
    assert set(found) == {"all_reduce", "scaling", "spread_of_times", "fastest_methods"}


@every("kind", ["allreduce", "train"])
def test_columns_of_numbers_are_numbers_in_csv(kind: str, tmp_path: Path) -> None:
    """Without separators of thousands, and without units."""
    small = {"ranks": (1, 2, 4)} if kind == "train" else {}
    found = study_report(load_study_file(write_study(tmp_path / "s.h5", kind, **small)))
    assert found.tables and not no_numbers(found.tables)


CHOICES: dict[str, tuple[Choice, list[str], set[str]]] = {  # choice: panels, series
    "formats in one panel": (
        Choice(x="size_bytes", by=("wire",), where=("algorithm=ring", "ranks=4")),
        [""],
        {"raw", "e4m3", "e3m0"},
    ),
    "a word along x": (
        Choice(x="wire", panel=("ranks",)),
        ["2 ranks", "4 ranks"],
        {f"{size}, {of}" for size in ("4 KiB", "1 MiB") for of in ("ring", "mpi")},
    ),
    "a word along x and for panels, more series of libraries than they have styles": (
        Choice(x="wire", panel=("wire",)),
        [""],
        set(),
    ),
    "an outcome": (
        Choice(y="error", by=("algorithm", "wire"), where=("algorithm!=mpi", "size_bytes<1MiB")),
        [""],
        {"ring raw", "ring e4m3", "ring e3m0"},
    ),
    "time against sizes": (
        Choice(x="size_bytes", by=("algorithm", "wire")),
        ["2 ranks", "4 ranks"],
        {"mpi raw", "ring raw", "ring e4m3", "ring e3m0"},
    ),
}


@every("name", CHOICES)
def test_axes_series_and_panels_can_be_chosen(two_shapes: StudyFile, name: str) -> None:
    choice, panels, series = CHOICES[name]
    found = study_report(two_shapes, choice)
    (chart,) = found.charts
    assert [panel.title for panel in chart.panels] == panels
    shown = {each.label for panel in chart.panels for each in panel.series}
    assert shown == series or not series
    groups = choice.select(seed_groups(two_shapes))
    x = choice.x or "ranks"
    points = sum(len(each.x) for panel in chart.panels for each in panel.series)
    assert points == len([group for group in groups if x in group.factors])
    for panel in chart.panels:  # no series has two points at a place
        assert all(len(set(each.x)) == len(each.x) for each in panel.series)
    if name == "a word along x":
        draw(chart).draw_without_rendering()


def test_a_figure_says_what_else_differs_between_series(two_shapes: StudyFile) -> None:
    """Values of 8 and 4 bits go by the ring, raw ones by MPI."""
    of = {"raw": "mpi", "e4m3": "ring", "e3m0": "ring"}
    every = seed_groups(two_shapes)
    groups = [g for g in every if g.factors["algorithm"] == of[str(g.factors["wire"])]]

    def notes(some: list[SeedGroup], *by: str) -> list[str]:
        (chart,) = chosen(two_shapes, some, Choice("ranks", by=by, panel=("size_bytes",))).charts
        return [each for each in chart.notes if each.startswith("Algorithm")]

    assert notes(groups, "wire") == ["Algorithm: mpi for raw; ring for e4m3, e3m0."]
    assert notes(groups, "wire", "algorithm") == notes(every, "wire") == []


def test_a_choice_of_figures_that_nothing_shows_is_refused(allreduce: Path) -> None:
    with pytest.raises(UserError, match="choose figures: add --html or --figures"):
        report([allreduce], choice=Choice(x="ranks"))


REFUSED = {
    "--x rank": ["did you mean ranks"],
    "--by wires": ["did you mean wire"],
    "--panel nothing": ["known are accumulate, algorithm, nodes, ppn"],
    "--y times": ["did you mean time"],
    "--where ranks": ["should be NAME=VALUE"],
    "--where ranks=3": ["ranks is 2, 4"],
    "--where ranks<2": ["no point is left"],
    "--where size_bytes=many": ["many is no number, as size_bytes is"],
}


@every("words", REFUSED)
def test_a_choice_that_cannot_be_is_one_line(
    two_shapes: StudyFile, words: str, capsys: Any
) -> None:
    assert main(["report", str(two_shapes.path), "--quiet", *words.split()]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and words.split()[0] in shown
    assert all(each in shown for each in REFUSED[words])


def test_command_line(allreduce: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(allreduce), "--quiet"]) == 0
    assert main(["report", str(allreduce), "--png", str(tmp_path / "a.png")]) == 2
    assert "--figures DIR draws studies" in capsys.readouterr().err
    for words in (["--fail-on-slower"], ["--png", "a.png", "--compare", str(allreduce)]):
        assert main(["report", str(allreduce), *words]) == 2
        assert words[0] in capsys.readouterr().err
    nowhere = str(tmp_path / "no" / "a.html")
    assert main(["report", str(allreduce), "--quiet", "--html", nowhere]) == 2
    assert "a.html: cannot be written: there is no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_without_room_keeps_the_names_of_its_rows(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    numbers = [Column(f"quantity {i}", lambda _: "123.45") for i in range(15)]
    method = Column[str]("method", lambda name: f"e4m3 {name}", numbers=False)
    table = tabulate("", [*numbers, method], ["sqrt", "legw"])
    show(
        [Report("title", [], sections=[Section("section", tables=[table])])], terminal, quiet=False
    )
    told = capsys.readouterr().out
    assert "sqrt" in told and "legw" in told and told.count("123.45") == 30

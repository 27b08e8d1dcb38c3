"""Pages, figures and the command line of reports on studies, and files that are refused."""

from __future__ import annotations

import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import pytest
from synthetic_study import write_study
from training import ROWS, run_job, small_job

from cpdhpc.cli import main
from cpdhpc.config import UserError
from cpdhpc.report.command import report
from cpdhpc.report.study import study_report
from cpdhpc.study.study_file import load_study_file
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
    other = write_study(tmp_path / "t.h5", "train", ranks=(2,), seeds=(0,), toml=toml)
    run_job(small_job(name="aps", gradient=ROWS["aps"]), Loopback(2), tmp_path)
    html = tmp_path / "page.html"
    report([allreduce, other, tmp_path / "aps-s0.h5"], html=html, quiet=True)
    text = html.read_text()
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "iframe"} & set(page.seen) and "@import" not in text
    assert not re.findall(r"url\((?!data:)", text)
    inside = [address[1:] for address in page.addresses if address.startswith("#")]
    images = [
        address for address in page.addresses if address.startswith("data:image/svg+xml;base64,")
    ]
    assert len(inside) + len(images) == len(page.addresses)
    assert set(inside) <= set(page.ids) and len(page.ids) == len(set(page.ids))
    reports = [study_report(load_study_file(path)) for path in (allreduce, other)]
    assert len(images) > sum(len(each.charts) for each in reports)
    for image in images:
        root = ElementTree.fromstring(b64decode(image.partition(",")[2]))
        links = [v for e in root.iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert all(link.startswith(("#", "data:")) for link in links)
    assert "&lt;b&gt;&amp;amp;" in text, "the study's text is shown as it is"
    for said in ("Open MPI v5.0.11", "SLURM_JOB_ID 1234", "Training runs", "slowest rank"):
        assert said in text
    for chart in reports[0].charts:
        assert chart.title in text


def test_figures_of_each_chart(allreduce: Path, tmp_path: Path) -> None:
    report([allreduce], figures=tmp_path / "new" / "figures", quiet=True)
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
    "kind='fft': known are allreduce, autoencoder, codec, halo, train": lambda f: f.attrs.modify(
        "kind", "fft"
    ),
    "has no attribute work": lambda file: file.attrs.__delitem__("work"),
    "the attribute study is not TOML": lambda file: file.attrs.modify("study", "= ["),
}


@pytest.mark.parametrize("says", BAD)
def test_damaged_studies_are_refused(allreduce: Path, tmp_path: Path, says: str) -> None:
    path = change(allreduce, tmp_path / "bad.h5", BAD[says])
    with pytest.raises(UserError, match=re.escape(says)):
        report([path], terminal=False)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_files_that_are_cut_off_are_refused(allreduce: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.h5"
    content = allreduce.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=r"cut\.h5: is not an HDF5 file"):
        report([path], terminal=False)


def test_command_line(allreduce: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(allreduce), "--quiet"]) == 0
    assert main(["report", str(allreduce), "--png", str(tmp_path / "a.png")]) == 2
    assert "--figures DIR writes those of studies" in capsys.readouterr().err
    for words in (["--fail-on-slower"], ["--compare", "--png", "a.png"]):
        assert main(["report", str(allreduce), *words]) == 2
        assert words[0] in capsys.readouterr().err
    nowhere = str(tmp_path / "no" / "a.html")
    assert main(["report", str(allreduce), "--quiet", "--html", nowhere]) == 2
    assert "a.html: cannot be written: there is no such directory" in capsys.readouterr().err

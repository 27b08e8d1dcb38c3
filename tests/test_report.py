"""Reports on training runs: what the table says, the figures, one page by itself."""

import re
from dataclasses import replace
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from rich.console import Console
from synthetic_study import write_study
from training import ROWS, run_job, small_job

from cpdhpc import store
from cpdhpc.config import UserError
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands.report import Outputs, _print_table, load, report, report_tasks
from cpdhpc.lab.report.figures import BOUND, draw
from cpdhpc.lab.report.fits import Score, Trained, pareto, score_charts
from cpdhpc.lab.report.tables import Column, Table, numbers
from cpdhpc.lab.report.trainings import (
    RunGroup,
    Task,
    baseline,
    overview,
    run_groups,
    runs_report,
    table,
    tasks_report,
)
from cpdhpc.lab.train.checkpoint import Files
from cpdhpc.world.ranks import Loopback

WIDE = Outputs(terminal=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows with two seeds each, and a run that was interrupted."""
    path = tmp_path_factory.mktemp("runs")
    for row in ("float32", "tile", "aps"):
        for seed in (0, 1):
            job = small_job(name=row, gradient=ROWS[row], train={"seeds": [seed]})
            run_job(job, Loopback(2), path)
    job = small_job(name="tile", gradient=ROWS["tile"], train={"seeds": [2]})
    training = run_job(job, Loopback(2), path)
    training.save_record("interrupted")
    return path


def groups_in(path: Path) -> list[RunGroup]:
    loaded = load([path])
    assert not loaded.studies and not loaded.unreadable
    return run_groups(loaded.runs)


def test_groups_over_seeds(directory: Path) -> None:
    groups = groups_in(directory)
    assert [(each.name, len(each.runs), each.found) for each in groups] == [
        ("float32", 2, 2),
        ("tile", 2, 3),
        ("aps", 2, 2),
    ]
    base = baseline(groups)
    assert base is groups[0]
    accuracies = [
        store.read(directory / f"float32-s{seed}.h5")[0]["epochs"]["test_accuracy"][-1]
        for seed in (0, 1)
    ]
    assert base.score == pytest.approx(100 * np.mean(accuracies), rel=1e-12)
    deviation = 100 * abs(np.diff(accuracies)[0]) / 2**0.5
    assert table(groups).rows[0][2] == f"{base.score:.2f} ± {deviation:.2f}"


@pytest.mark.parametrize(
    "changes",
    [
        {"update": {"name": "dmsgd", "wire": "e4m3"}, "optimizer": {"momentum": 0.0}},
        {"precision": {"rule": [{"layers": "*", "wire": "e4m3"}]}},
    ],
    ids=["gossip", "policy"],
)
def test_only_a_float32_all_reduce_is_a_baseline(tmp_path: Path, changes: dict[str, Any]) -> None:
    run_job(small_job(name="other", train={"seeds": [0]}, **changes), Loopback(2), tmp_path)
    (group,) = groups_in(tmp_path)
    assert baseline([group]) is None
    alone = table([group])
    assert not any("float32" in str(each) for each in alone.columns)
    assert "No float32 all-reduce among the runs" in alone.caption
    run_job(small_job(name="wide", train={"seeds": [0]}), Loopback(2), tmp_path)
    both = groups_in(tmp_path)
    base = baseline(both)
    assert base is not None and base.name == "wide"
    assert any("float32" in str(each) for each in table(both).columns)


def test_the_table_counts_bytes_beside_float32(directory: Path) -> None:
    """Two ranks send each half of the buffer twice: n values of 4 bytes; whole tiles of e4m3."""
    cells = {row[0]: row for row in table(groups_in(directory)).rows}
    values = 64 * 8 + 8 + 8 * 8 + 8
    assert cells["float32"][4] == f"{4 * values:,}"
    assert cells["tile"][4] == f"{4 * (1024 + 1):,}"  # 4 tensors, each a tile and its shift
    assert cells["tile"][5] == f"{4 * 1025 / (4 * values):.3f}"
    caption = table(groups_in(directory)).caption
    assert "in tiles of 1,024 values" in caption
    assert "Critical batch" not in caption  # which this table has not
    assert cells["tile"][1] == "2 of 3"
    assert cells["float32"][3] == cells["float32"][8] == "-"
    assert re.fullmatch(r"[+-]\d+\.\d\d", cells["aps"][3])
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", cells["aps"][2])


def test_the_figure_shows_accuracy_and_loss(directory: Path) -> None:
    runs = load([directory]).runs
    chart = overview(runs_report(runs, run_groups(runs)).charts)
    figure = draw(chart)
    first, last = figure.axes[0], figure.axes[-1]
    assert first.get_xlabel() == "sent per step and rank / kB"
    assert first.get_ylabel() == "test accuracy / %"
    assert (last.get_xlabel(), last.get_ylabel()) == ("epoch", "test loss / nat")
    (legend,) = figure.legends
    named = {text.get_text() for text in legend.get_texts()}
    assert named == {"float32", "tile", "aps", "Pareto front"}
    titles = [panel.title for panel in chart.panels]
    assert titles[0].startswith("accuracy against bits sent") and titles[-1] == "loss over epochs"


def test_a_single_point_has_no_pareto_front(directory: Path) -> None:
    runs = load([directory / "aps-s0.h5"]).runs
    for chart in runs_report(runs, run_groups(runs)).charts:
        assert all(each.label != "Pareto front" for p in chart.panels for each in p.series)
        assert "Pareto" not in " ".join(chart.notes)


def test_the_pareto_figure_draws_points_where_they_are(directory: Path) -> None:
    runs = load([directory]).runs
    groups = run_groups(runs)
    charts = {chart.name: chart for chart in runs_report(runs, groups).charts}
    (panel, *_) = charts["accuracy_by_bits"].panels
    drawn = {each.label: (list(each.x), list(each.y)) for each in panel.series}
    for group in groups:
        sent_kb = np.mean([run.steps["wire_bytes"].mean() for run in group.runs]) / 1e3
        assert drawn[group.name] == ([sent_kb], [group.scores.mean()])


def test_a_note_tells_what_is_at_one_place() -> None:
    none = np.empty(0)
    sent = {"a": 8.2e4, "b": 8.21e4, "c": 4e4, "d": 8.2e4}
    trained = [
        Trained("", name, BOUND, np.array([90.02 if name != "d" else 91.0]), sent[name],
                nan, np.array([nan]), none, none, none)
        for name in sent
    ]  # fmt: skip
    (chart,) = score_charts("", trained, Score("accuracy", "%", lower=False, loss_unit="nat"))
    assert chart.notes[1:] == ["Overlapping markers: a, b."]


@pytest.mark.parametrize(("second", "panels"), [(90.5, 2), (80.0, 1)])
def test_a_closer_look_is_at_two_or_more(second: float, panels: int) -> None:
    """Of three the best two are near each other, or the best is alone: then there is no such."""
    none = np.empty(0)
    scores = {"a": 91.0, "b": second, "c": 40.0}
    trained = [
        Trained("", name, BOUND, np.array([score]), 1e4 * i, nan, np.array([nan]), none, none, none)
        for i, (name, score) in enumerate(scores.items(), 1)
    ]
    (chart,) = score_charts("", trained, Score("accuracy", "%", lower=False, loss_unit="nat"))
    assert len(chart.panels) == panels


def test_pareto_front() -> None:
    assert pareto([3.0, 1.0, 2.0, 2.0, 4.0], [5.0, 1.0, 3.0, 2.0, 5.0]) == [1, 2, 0]
    assert pareto([1.0, 1.0], [2.0, 3.0]) == [1]


def test_a_narrow_terminal_cuts_no_word() -> None:
    headings = [Column("algorithm", str, False), Column("speed-up"), Column("base", str, False)]
    rows = [("ring", f"{n}.00", f"{n} ranks, 17.9 µs") for n in (1, 2)]
    for width in (10, 27, 40, 80):
        console = Console(width=width, file=StringIO())
        _print_table(console, Table("Scaling", headings, rows).rich())
        shown = console.file.getvalue()
        assert all(word in shown for word in ("algorithm", "speed-up", "ranks,", "17.9")), shown


def test_png_and_page(directory: Path, tmp_path: Path, capsys: Any) -> None:
    png, html = tmp_path / "a.png", tmp_path / "a.html"
    report([directory], Outputs(html, terminal=False), png)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = html.read_text()
    assert "data:image/svg+xml;base64," in text
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text), "needs no other file"
    shown = capsys.readouterr().out
    for name in ("float32", "tile", "aps", "left out:", "tile-s2.h5: interrupted"):
        assert name in shown
    assert "2 of 3" in text


def test_tasks_show_methods_beside_their_own_float32(
    directory: Path, tmp_path: Path, capsys: Any
) -> None:
    """A task's points are to its own float32, bytes the share of that; a method may be in one."""
    other = tmp_path / "narrow"
    other.mkdir()
    for row in ("float32", "tile"):
        job = small_job(name=row, gradient=ROWS[row], model={"hidden": [4]}, train={"seeds": [0]})
        run_job(job, Loopback(2), other)
    groups = {path: {g.name: g for g in groups_in(path)} for path in (directory, other)}
    shown = tasks_report([Task(path.name, list(groups[path].values())) for path in groups])
    rows = {row[0]: row[1:] for row in shown.sections[0].tables[0].rows}
    assert rows["aps"][2:] == ["-", "-"] and rows["float32"][1] == rows["float32"][3] == "1.0000"
    for at, (path, named) in enumerate(groups.items()):
        base, tile = named["float32"], named["tile"]
        points, share = numbers(rows["tile"][2 * at]), numbers(rows["tile"][2 * at + 1])
        assert points["value"] == pytest.approx(tile.score - base.score, abs=1e-9)
        assert share["value"] == tile.mean("wire_bytes") / base.mean("wire_bytes")
        panel = shown.charts[0].panels[at]
        assert panel.title.startswith(f"{path.name}: float32 ")  # type: ignore[union-attr]
        drawn = {each.label: (list(each.x), list(each.y)) for each in panel.series}
        assert drawn["tile"] == ([share["value"]], [tile.score - base.score])
        assert drawn["float32"] == ([1.0], [0.0])
    png = tmp_path / "tasks.png"
    assert main(["report", str(directory), str(other), "--tasks", "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and "tasks: " in capsys.readouterr().out


def test_tasks_without_float32_are_refused(directory: Path, tmp_path: Path, capsys: Any) -> None:
    run_job(
        small_job(name="tile", gradient=ROWS["tile"], train={"seeds": [0]}), Loopback(2), tmp_path
    )
    with pytest.raises(UserError, match="no float32 all-reduce of several ranks among the runs"):
        report_tasks([directory, tmp_path], WIDE)
    assert main(["report", str(directory), "--tasks", "--x", "ranks"]) == 2
    assert "--tasks: excludes --compare" in capsys.readouterr().err


def test_a_picture_is_what_its_name_says(directory: Path, tmp_path: Path) -> None:
    for ending, begin in (("pdf", b"%PDF"), ("SVG", b"<?xml"), ("jpg", b"\xff\xd8")):
        report([directory], WIDE, tmp_path / f"a.{ending}")
        assert (tmp_path / f"a.{ending}").read_bytes().startswith(begin)


def test_seeds_that_record_and_others_are_one_row(tmp_path: Path, capsys: Any) -> None:
    """As those of precision search."""
    for seed, record in ((0, {"tensors": ["weights"], "every": 1, "count": 1}), (1, {})):
        train = {"seeds": [seed], "record_gradients": [0] * (seed == 0)}
        job = small_job(name="kept", train=train, record=record)
        run_job(job, Loopback(2), tmp_path)
    assert report([tmp_path / "kept-s0.h5", tmp_path / "kept-s1.h5"], WIDE) == 0
    assert re.search(r"kept +2 ", capsys.readouterr().out)


def test_one_file_one_seed(directory: Path, capsys: Any) -> None:
    report([directory / "aps-s1.h5"], WIDE)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" aps ")]
    assert "±" not in row


def test_a_run_that_is_named_twice_counts_once(directory: Path, tmp_path: Path) -> None:
    """By its folder and its file, as a link, as a copy."""
    copy, link, first = tmp_path / "copy.h5", tmp_path / "link.h5", directory / "aps-s0.h5"
    copy.write_bytes(first.read_bytes())
    link.symlink_to(first)
    loaded = load([directory, directory, first, copy, link])
    assert len(loaded.runs) == 7
    assert [len(each.runs) for each in run_groups(loaded.runs)] == [2, 2, 2]


def test_two_runs_of_one_name_and_seed_are_refused(directory: Path, tmp_path: Path) -> None:
    """As they would count as two seeds; and two numbers of processes send different bytes."""
    job = small_job(name="aps", gradient=ROWS["aps"], train={"seeds": [0]})
    run_job(job, Loopback(2), tmp_path)  # on another date
    both = f"{tmp_path}/aps-s0.h5 and {directory}/aps-s0.h5 are both aps of seed 0, but differ"
    with pytest.raises(UserError, match=re.escape(both)):
        report([directory, tmp_path], WIDE)
    first, other = load([directory / "aps-s0.h5", directory / "aps-s1.h5"]).runs
    with pytest.raises(UserError, match="are both aps, but differ in processes"):
        run_groups([first, replace(other, attributes={**other.attributes, "processes": 2})])


def test_a_folder_without_anything_is_named(directory: Path, tmp_path: Path, capsys: Any) -> None:
    assert report([directory, tmp_path], WIDE) == 1
    says = f"{tmp_path}: nothing that report shows: it is empty"
    shown = capsys.readouterr()
    assert says in shown.out and says in shown.err


def test_a_study_and_trainings_of_one_folder_are_both_shown(
    directory: Path, tmp_path: Path, capsys: Any
) -> None:
    for path in directory.glob("*-s0.h5"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_study(tmp_path / "study.h5", ranks=(2, 4), sizes=(64,))
    loaded = load([tmp_path])
    assert len(loaded.studies) == 1 and len(loaded.runs) == 3
    (tmp_path / "study.h5").rename(tmp_path / "study.toml")
    with pytest.raises(UserError, match=r"the study has no study\.h5 yet"):
        load([tmp_path])


def test_a_method_without_a_complete_run_is_a_row_and_a_note(
    directory: Path, tmp_path: Path, capsys: Any
) -> None:
    runs = load([directory]).runs
    lost = [replace(run, attributes={**run.attributes, "status": "diverged"})
            if run.name == "aps" else run for run in runs]  # fmt: skip
    found = runs_report(lost, run_groups(lost))
    (table,) = found.sections[0].tables
    assert [f"{row[0]} {row[1]}" for row in table.rows] == [
        "float32 2",
        "tile 2 of 3",
        "aps 0 of 2",
    ]
    assert "aps & 0 of 2 & -" in table.latex() and re.search("^aps,0,", table.csv(), re.MULTILINE)
    note = "Not drawn: aps: no run is complete."
    assert note in overview(found.charts).notes and all(note in c.notes for c in found.charts)
    assert not any(
        "Not drawn" in " ".join(c.notes) for c in runs_report(runs, run_groups(runs)).charts
    )


def refused(path: Path, says: str) -> None:
    with pytest.raises(UserError, match=says):
        report([path], WIDE)


def test_what_is_no_run_is_refused(directory: Path, tmp_path: Path) -> None:
    refused(tmp_path, "nothing that report shows: it is empty")
    refused(tmp_path / "x.h5", "there is no such file")
    refused(directory / "aps-s0.checkpoint.h5", "the checkpoint of a training run: `train --res")
    refused(directory / "tile-s2.h5", "none of 1 runs is complete")


@pytest.mark.usefixtures("without_figures")
def test_a_file_that_cannot_be_read_keeps_no_other_back(
    directory: Path, tmp_path: Path, capsys: Any
) -> None:
    """A record and a checkpoint cut off, and a record without its epochs: all named, twice."""
    for path in directory.glob("*.h5"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in ("aps-s0.h5", "tile-s0.checkpoint.h5"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with h5py.File(tmp_path / "float32-s1.h5", "r+") as file:
        del file["epochs"]
    bad = ("aps-s0.h5", "tile-s0.checkpoint.h5", "float32-s1.h5")
    html = tmp_path / "a.html"
    assert report([tmp_path, tmp_path / "none.h5"], Outputs(html, terminal=False)) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("cpdhpc: 4 files not read: ") and shown.err.count("\n") == 1
    for name in (*bad, "none.h5"):
        assert name in shown.out and name in shown.err and name in html.read_text()
    rows = {line.split()[0] for line in shown.out.splitlines() if "±" in line or " 1 " in line}
    assert {"float32", "tile", "aps"} <= rows


def test_other_jobs_of_the_same_name_are_refused(directory: Path, tmp_path: Path) -> None:
    job = small_job(name="aps", gradient=ROWS["aps"], train={"batch": 25})
    run_job(job, Loopback(2), tmp_path)
    with pytest.raises(UserError, match=r"are both aps, but differ in train\.batch"):
        report([directory, Files.of(tmp_path, job).record], WIDE)

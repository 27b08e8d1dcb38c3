"""A study over days and commits: where a library has it, what changed, the last one to compare."""

import json
from pathlib import Path
from typing import Any

import h5py
import pytest
from every import every
from synthetic_study import ENVIRONMENT, write_study

from cpdhpc.lab.cli import main
from cpdhpc.lab.report.history import history_report, latest, load_history, place, system
from cpdhpc.lab.study_data.study_file import ReportError, load_study_file

OPTIONS: dict[str, Any] = {"ranks": (2, 4), "sizes": (2**12, 2**18)}
ONE = {3: 1.5}


def made(
    folder: Path, day: int, factor: dict[int, float] | None = None, **environment: str
) -> Path:
    """A study of some day of November, whose commit has the day's number."""
    where = ENVIRONMENT | {"git_commit": f"{day:02}" * 20} | environment
    path = folder / f"day-{day}.h5"
    write_study(path, seed=day, factor=factor or {}, environment=where, **OPTIONS)
    with h5py.File(path, "a") as file:
        file.attrs["date"] = f"2026-11-{day:02}T10:00:00+00:00"
        file.attrs["name"] = "demo"
    return path


def test_a_change_is_seen_where_it_came(tmp_path: Path) -> None:
    """The point is slower from the third day on: that day is marked, no other is."""
    paths = [made(tmp_path, day, ONE if day > 2 else None) for day in (1, 2, 3, 4)]
    report = history_report(load_history(paths[::-1]))
    (table,) = report.tables
    assert [column.heading.split("\n")[0] for column in table.columns[1:]] == [
        f"2026-11-0{day}" for day in (1, 2, 3, 4)
    ]
    assert len(table.rows) == 40
    marks = [[cell.endswith("(+)") for cell in row[1:]] for row in table.rows]
    assert marks[3] == [False, False, True, False] and sum(map(sum, marks)) == 1
    assert "0 of 40 points slower" in dict(report.facts)["found"]
    (chart,) = report.charts
    (panel,) = chart.panels
    ends = {each.label: each.y[-1] for each in panel.series}
    assert len(ends) == 11 and max(ends.values()) == pytest.approx(1.5, rel=0.1)
    assert chart.notes[-1].startswith("The 11 points that changed most; 29 more")


def test_points_are_named_by_factors_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Not in that of a set, which differs from run to run."""
    paths = [made(tmp_path, day) for day in (1, 2)]
    for path in paths:
        with h5py.File(path, "a") as file:
            count = len(file["samples/case_id"])
            for name in "abcdef":
                values = [f"{name}{i % 2}" for i in range(count)]
                file["samples"].create_dataset(
                    f"word_{name}", data=values, dtype=h5py.string_dtype()
                )
    (table,) = history_report(load_history(paths)).tables
    assert [row[0][-17:] for row in table.rows[:2]] == ["a0 b0 c0 d0 e0 f0", "a1 b1 c1 d1 e1 f1"]


def test_an_outcome_over_days(tmp_path: Path) -> None:
    paths = [made(tmp_path, day) for day in (1, 2)]
    report = history_report(load_history(paths), "wire_bytes")
    assert not any("(+)" in cell for row in report.tables[0].rows for cell in row)


def test_a_point_that_came_later_has_no_value_before(tmp_path: Path) -> None:
    first = made(tmp_path, 1)
    later = tmp_path / "later.h5"
    write_study(later, seed=2, environment=ENVIRONMENT, **OPTIONS | {"ranks": (2, 4, 8)})
    with h5py.File(later, "a") as file:
        file.attrs["date"], file.attrs["name"] = "2026-11-02T10:00:00+00:00", "demo"
    rows = history_report(load_history([first, later])).tables[0].rows
    assert len(rows) == 60 and sum(row[1] == "-" or not row[1].strip() for row in rows) == 20, rows
    (chart,) = history_report(load_history([first, later])).charts
    (panel,) = chart.panels
    assert len(panel.series) == 11 and all(list(each.x) == [0.0, 1.0] for each in panel.series)
    assert chart.notes[0] == "Time of each point over that of the first file that has the point."


@every(
    ("change", "words"),
    [
        ({}, "needs two files"),
        ({"processor": "Another"}, "several systems: amd_epyc_9654, another"),
        (
            {"slurm": json.dumps({"SLURM_CLUSTER_NAME": "Big"})},
            "several systems: amd_epyc_9654, big",
        ),
    ],
)
def test_what_is_no_history(tmp_path_factory: Any, change: dict[str, str], words: str) -> None:
    folder = tmp_path_factory.mktemp("h")
    paths = [made(folder, 1), *([made(folder, 2, **change)] if change else [])]
    with pytest.raises(ReportError, match=words):
        history_report(load_history(paths))


def test_an_unknown_metric_is_an_error(tmp_path: Path) -> None:
    paths = [made(tmp_path, day) for day in (1, 2)]
    with pytest.raises(ReportError, match="--history speed: no file has it; known are "):
        history_report(load_history(paths), "speed")


def test_a_library_keeps_by_system_and_date(tmp_path: Path, capsys: Any) -> None:
    """The last study before one is its reference, and a slower one fails."""
    library = tmp_path / "library"
    first, second, third = (made(tmp_path, day, ONE if day > 2 else None) for day in (1, 2, 3))
    for path in (first, second):
        assert main(["report", str(path), "--keep", str(library), "--quiet"]) == 0
    target = library / "demo" / "amd_epyc_9654" / "2026-11-01T100000Z-010101010.h5"
    assert target.read_bytes() == first.read_bytes()
    file = load_study_file(third)
    assert place(library, load_study_file(first)) == target and system(file) == "amd_epyc_9654"
    assert latest(library, file).name == "2026-11-02T100000Z-020202020.h5"
    capsys.readouterr()
    asked = ["report", str(third), "--compare", str(library), "--fail-on-slower"]
    assert main([*asked, "--keep", str(library)]) == 1, "and it is kept all the same"
    assert "1 of 40 points slower" in capsys.readouterr().out
    assert len([*target.parent.iterdir()]) == 3
    with pytest.raises(ReportError, match="has no demo of amd_epyc_9654 before 2026-11-01"):
        latest(library, load_study_file(first))


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    for day in (1, 2):
        made(tmp_path, day)
    for path in [*tmp_path.glob("*.h5")]:  # folders of studies
        folder = path.with_suffix("")
        (folder / "cases").mkdir(parents=True)
        path.rename(folder / "study.h5")
        (folder / "cases" / "a.h5").write_bytes(b"no study")
    assert main(["report", *map(str, tmp_path.glob("day-*")), "--history", "time"]) == 0
    capsys.readouterr()
    for path in tmp_path.glob("*/study.h5"):
        path.rename(path.parent.with_suffix(".h5"))
        (path.parent / "cases" / "a.h5").unlink()
    page, picture = tmp_path / "h.html", tmp_path / "h.png"
    given = ["report", str(tmp_path), "--history", "time", "--html", str(page)]
    assert main([*given, "--png", str(picture)]) == 0
    assert "found: demo, 2026-11-02 020202020: " in capsys.readouterr().out
    assert "Over days and commits" in page.read_text() and picture.stat().st_size > 10_000
    assert main([*given, "--where", "ranks=2"]) == 2

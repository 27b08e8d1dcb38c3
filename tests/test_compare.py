"""Comparisons of studies: changes are found, noise is not, and what else differs is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_study import ENVIRONMENT, write_study

from cpdhpc.cli import main
from cpdhpc.config import UserError
from cpdhpc.report.command import compare_files
from cpdhpc.report.compare import Comparison, compare, compare_report
from cpdhpc.study.study_file import load_study_file

OPTIONS: dict[str, Any] = {"ranks": (2, 4), "sizes": (2**12, 2**18, 2**24)}
SLOWER, FASTER = {3: 1.2, 17: 1.2, 41: 1.2}, {20: 0.8}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("a") / "a.h5", seed=1, **OPTIONS)


def compared(before: Path, after: Path) -> Comparison:
    return compare(load_study_file(before), load_study_file(after))


def changed(comparison: Comparison, verdict: Any) -> set[int]:
    return {change.before.index for change in comparison.having(verdict)}


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_fifth_is_found_and_noise_is_not(before: Path, tmp_path: Path, seed: int) -> None:
    """Noise of 3 % in 16 repeats: the intervals of the medians are within some 3 %."""
    after = write_study(tmp_path / "b.h5", seed=seed, factor=SLOWER | FASTER, **OPTIONS)
    found = compared(before, after)
    assert len(found.changes) == 60
    assert changed(found, "slower") == set(SLOWER)
    assert changed(found, "faster") == set(FASTER)
    for change in found.having("slower"):
        assert change.times.low < 1.2 < change.times.high
    again = write_study(tmp_path / "c.h5", seed=seed, **OPTIONS)
    assert not changed(compared(before, again), "slower") | changed(
        compared(before, again), "faster"
    )


def test_what_else_differs_is_told(before: Path, tmp_path: Path) -> None:
    versions = json.dumps({"cpdhpc": "0.2", "numpy": "2.1.0"})
    environment = ENVIRONMENT | {"versions": versions, "hosts": "node[07-08]"}
    wider = OPTIONS | {"sizes": (2**12, 2**18, 2**20)}
    after = write_study(tmp_path / "b.h5", environment=environment, drop=1, **wider)
    report = compare_report(compared(before, after))
    listed = {each.what: list(each.items) for each in report.listed}
    assert len(listed["only in A, 20 points"]) == 20 and len(listed["only in B, 19 points"]) == 19
    assert listed["the studies differ in"] == ["sweep.size_bytes"]
    (table,) = report.sections[1].tables
    assert table.rows == [
        ("hosts", "node[01-02]", "node[07-08]"),
        ("versions: cpdhpc", "0.1", "0.2"),
    ]


def test_too_few_repeats_are_no_verdict(before: Path, tmp_path: Path) -> None:
    after = write_study(tmp_path / "b.h5", repeats=6, factor=SLOWER, **OPTIONS)
    assert len(compared(before, after).having("unknown")) == 60


def test_outcomes_that_are_no_samples(tmp_path: Path) -> None:
    a, b = (
        write_study(tmp_path / f"{seeds}.h5", "train", ranks=(2,), seeds=seeds)
        for seeds in ((0,), (0, 1))
    )
    report = compare_report(compared(a, b))
    listed = {each.what: list(each.items) for each in report.listed}
    assert len(listed["accuracy differs (A, B), 8 points"]) == 8
    assert "wire_bytes differs" not in " ".join(listed)


def test_exit_status_and_files(before: Path, tmp_path: Path, capsys: Any) -> None:
    after = write_study(tmp_path / "b.h5", seed=2, factor=SLOWER, **OPTIONS)
    words = ["report", "--compare", str(before), str(after), "--quiet", "--fail-on-slower"]
    assert main(words) == 1
    assert main([*words[:2], str(after), str(before), "--quiet", "--fail-on-slower"]) == 0
    assert main(words[:-1]) == 0
    html, figures = tmp_path / "c.html", tmp_path / "figures"
    assert compare_files([before, after], html, figures) == 3
    assert {path.name for path in figures.iterdir()} == {"changes.png", "changes.svg"}
    assert "would be called changed by chance" in html.read_text()
    shown = capsys.readouterr().out
    assert shown.count(" slower ") == 3 and "slower: 3" in shown


def test_what_cannot_be_compared(before: Path, tmp_path: Path) -> None:
    training = write_study(tmp_path / "t.h5", "train", ranks=(1,), seeds=(0,))
    with pytest.raises(UserError, match="kind is allreduce and train"):
        compare_files([before, training])
    with pytest.raises(UserError, match="needs two study files; came 1 and 0 records"):
        compare_files([before])
    other = write_study(tmp_path / "o.h5", ranks=(8,), sizes=(64,))
    with pytest.raises(UserError, match="no point is in both"):
        compare_files([before, other])

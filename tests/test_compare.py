"""Comparisons of studies: changes are found, noise is not, and what else differs is told."""

import json
import re
from pathlib import Path
from typing import Any

import h5py
import pytest
from synthetic_study import ENVIRONMENT, write_study

from cpdhpc.config import ConfigError, UserError
from cpdhpc.lab.cli import main
from cpdhpc.lab.commands.report import Outputs, compare_files
from cpdhpc.lab.report.compare import Comparison, compare, compare_report, load_reference, verdict
from cpdhpc.lab.study_data.study_file import load_study_file

OPTIONS: dict[str, Any] = {"ranks": (2, 4), "sizes": (2**12, 2**18, 2**24)}
SLOWER, FASTER = {3: 1.2, 17: 1.2, 41: 1.2}, {20: 0.8}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("a") / "a.h5", seed=1, **OPTIONS)


def compared(before: Path, after: Path) -> Comparison:
    return compare(load_study_file(before), load_study_file(after))


def changed(comparison: Comparison, verdict: Any) -> set[int]:
    return {change.before.index for change in comparison.having(verdict)}


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4))]
)
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


TOLERANCES = """
study = "a.h5"
tolerance = 0.02
[[case]]
where = ["ranks=4", "size_bytes>=256KiB"]
tolerance = 0.5
"""


def test_a_reference_has_tolerances_by_case(before: Path, tmp_path: Path, capsys: Any) -> None:
    """Three points are a fifth slower; one of them is among those that may be so by a half."""
    after = write_study(tmp_path / "b.h5", seed=2, factor=SLOWER, **OPTIONS)
    file = before.with_name("reference.toml")
    file.write_text(TOLERANCES)
    points = load_study_file(before).points
    spared = [i for i in SLOWER if points[i].ranks == 4 and points[i].factors["size_bytes"] > 4096]
    assert len(spared) == 1
    options = ["--compare", str(file), "--fail-on-slower", "--quiet"]
    assert main(["report", str(after), *options]) == 1
    assert "2 of 60 points slower: " in capsys.readouterr().out
    assert main(["report", str(after), *options, "--tolerance", "0.5"]) == 0
    table = compare_report(compare(*map(load_study_file, (before, after)), load_reference(file)))
    (held,) = [
        row
        for row in table.sections[0].tables[0].rows
        if row[-2] == "50.0" and not row[-3].startswith("-")
    ]
    assert held[-1] == "no change beyond interval and tolerance"
    assert {row[-2] for row in table.sections[0].tables[0].rows} == {"2.00", "50.0"}
    for text, says in {
        "tolerance = -1": "tolerance=-1",
        'study = "none.h5"': "none.h5: there is no such file",
        '[[case]]\nwhere = ["rank=4"]\ntolerance = 1': "did you mean ranks",
    }.items():
        file.write_text(text if "study" in text else f'study = "a.h5"\n{text}')
        assert main(["report", str(after), *options]) == 2
        assert says in capsys.readouterr().err


def test_what_differs_has_digits_enough(before: Path, tmp_path: Path) -> None:
    """Errors that differ in the eighth digit, and a time in the sixth: no two cells are equal."""
    after = tmp_path / "b.h5"
    after.write_bytes(before.read_bytes())
    with h5py.File(after, "r+") as file:
        file["samples/error"][:] *= 1 + 1e-7
        file["samples/time_s"][:] *= 1 + 1e-5
        file["summary/median_s"][:] *= 1 + 1e-5
    report = compare_report(compared(before, after))
    (said,) = [each.items for each in report.listed if each.what.startswith("error differs")]
    assert len(said) == 60
    for line in said:
        one, other = line.partition(": ")[2].split(", ")
        assert one != other
    assert all(row[1] != row[2] for row in report.sections[0].tables[0].rows)


def test_too_few_repeats_are_no_verdict(before: Path, tmp_path: Path) -> None:
    after = write_study(tmp_path / "b.h5", repeats=6, factor=SLOWER, drop=2, **OPTIONS)
    found = compared(before, after)
    assert len(found.having("unknown")) == 58
    said = "0 of 58 points slower (58 without an interval, 2 of the reference missing)"
    assert verdict(found) == said


def test_outcomes_that_are_no_samples(tmp_path: Path) -> None:
    a, b = (
        write_study(tmp_path / f"{seeds}.h5", "train", ranks=(2,), seeds=seeds)
        for seeds in ((0,), (0, 1))
    )
    report = compare_report(compared(a, b))
    listed = {each.what: list(each.items) for each in report.listed}
    assert len(listed["accuracy differs (A, B), 8 points"]) == 8
    assert "wire_bytes differs" not in " ".join(listed)


def test_nothing_is_said_to_be_no_slower_where_nothing_can_be_judged(
    tmp_path: Path, capsys: Any
) -> None:
    """Five repeats have no interval at 95 %: exit status 0 would say that no point is slower."""
    paths = [write_study(tmp_path / f"{n}.h5", repeats=6, seed=n, **OPTIONS) for n in (1, 2)]
    words = ["report", str(paths[0]), "--compare", str(paths[1]), "--quiet"]
    assert main(words) == 0 and "60 without an interval" in capsys.readouterr().out
    assert main([*words, "--fail-on-slower"]) == 2
    shown = capsys.readouterr()
    assert "0 of 60 points slower" in shown.out and "nothing can be judged" in shown.err


@pytest.mark.usefixtures("without_figures")
def test_exit_status_and_files(before: Path, tmp_path: Path, capsys: Any) -> None:
    after = write_study(tmp_path / "b.h5", seed=2, factor=SLOWER, **OPTIONS)
    words = ["report", str(after), "--compare", str(before), "--quiet", "--fail-on-slower"]
    assert main(words) == 1
    assert main(["report", str(before), "--compare", str(after), *words[-2:]]) == 0
    assert main(words[:-1]) == 0
    html, figures = tmp_path / "c.html", tmp_path / "figures"
    assert compare_files(after, before, Outputs(html, figures)) == 3
    assert {path.name for path in figures.iterdir()} == {"changes.png", "changes.svg"}
    assert "would be called changed by chance" in html.read_text()
    shown = capsys.readouterr().out
    assert shown.count(" slower ") == 3 and "slower: 3" in shown
    assert re.search(r"^3 of 60 points slower: .* by 2\d\.\d \(.* %; .* by ", shown, re.MULTILINE)


def test_folders_of_studies_are_compared(before: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "study.h5").write_bytes(before.read_bytes())
    assert main(["report", str(folder), "--compare", str(before)]) == 0


def test_what_cannot_be_compared(before: Path, tmp_path: Path) -> None:
    training = write_study(tmp_path / "t.h5", "train", ranks=(1,), seeds=(0,))
    with pytest.raises(UserError, match="kind is allreduce and train"):
        compare_files(training, before)
    other = write_study(tmp_path / "o.h5", ranks=(8,), sizes=(64,))
    with pytest.raises(UserError, match="no point is in both"):
        compare_files(other, before)


def test_a_misspelt_tolerance_is_named(tmp_path: Path) -> None:
    """And not what is missing because of it; a key that is missing is."""
    file = tmp_path / "r.toml"
    file.write_text("study = 's.h5'\n[[case]]\nwhere = ['ranks=2']\ntolerence = 0.3\n")
    with pytest.raises(ConfigError, match=r"key case\.0\.tolerence: did you mean tolerance\?"):
        load_reference(file)
    file.write_text("study = 's.h5'\n[[case]]\nwhere = ['ranks=2']\n")
    with pytest.raises(ConfigError, match=r"case\.0\.tolerance: is missing"):
        load_reference(file)

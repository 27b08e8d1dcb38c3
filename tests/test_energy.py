"""Energy by the counters of a node, of directories that look like Linux's, and its column."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest
from studies import fill, small_study, some_result

from cpdhpc import store
from cpdhpc.lab.kinds import place
from cpdhpc.lab.study.collect import collect
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study_data import Result
from cpdhpc.lab.study_data.study_file import write_result

WRAPS_UJ = 1000 * 10**6


def zone(powercap: Path, number: str, name: str, microjoules: str) -> Path:
    path = powercap / f"intel-rapl:{number}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "name").write_text(name + "\n")
    (path / "energy_uj").write_text(microjoules + "\n")
    (path / "max_energy_range_uj").write_text(f"{WRAPS_UJ}\n")
    return path / "energy_uj"


def test_packages_and_memory_count_once_and_wrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "_gpus", list)
    nothing = place.Meter(tmp_path)
    assert isnan(nothing.joules()) and nothing.sources == ""
    package = zone(tmp_path, "0", "package-0", str(WRAPS_UJ - 3 * 10**6))
    memory = zone(tmp_path, "0:1", "dram", "0")
    zone(tmp_path, "0:0", "core", "5")  # a part of the package
    zone(tmp_path, "1", "psys", "5")  # holds the package
    zone(tmp_path, "2", "package-1", "not for you")
    meter = place.Meter(tmp_path)
    assert meter.sources == "2 RAPL zones"
    assert meter.joules() == 0
    package.write_text(str(4 * 10**6))  # 3 J to its end, where it begins anew, and 4 J
    memory.write_text("500000")
    assert meter.joules() == 7.5
    package.write_text(str(6 * 10**6))
    assert meter.joules() == 9.5


@pytest.mark.parametrize("known", [False, True])
def test_a_column_only_where_a_node_counts(tmp_path: Path, known: bool) -> None:
    study, folder = small_study(tmp_path), Folder(tmp_path / "small")
    cases = fill(folder, study)
    if known:
        plain = some_result()
        result = Result(plain.times_s, plain.is_warmup, {"energy_j": 2.5}, plain.environment)
        write_result(folder.case_file(cases[1]), cases[1], result)
    collect(study, folder)
    groups, _ = store.read(folder.study_file)
    assert ("energy_j" in groups["samples"]) == known
    if known:
        first, second, *_ = groups["samples"]["energy_j"].tolist()
        assert isnan(first) and second == 2.5

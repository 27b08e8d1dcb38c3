"""Energy by the counters of a node, of directories that look like Linux's, and its column."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from stand_ins import Slurm
from studies import fill, small_study, some_result

from cpdhpc import store
from cpdhpc.lab.kinds import place
from cpdhpc.lab.schedulers import slurm
from cpdhpc.lab.study.collect import collect, with_energy
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study_data import Result
from cpdhpc.lab.study_data.study_file import METRIC, WALL, write_result

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


def test_slurm_knows_the_energy_of_jobs(
    fake_slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mean power by the time of a repeat, where no counter was read."""
    study, folder = small_study(tmp_path), Folder(tmp_path / "small")
    cases = fill(folder, study)
    plain = some_result()
    for case, job, further in zip(
        cases, ("12", "13", "14", "15"), ({}, {"energy_j": 2.5}, {}, {}), strict=False
    ):
        outcomes = {"job_id": job, **further}
        result = Result(plain.times_s, plain.is_warmup, outcomes, plain.environment)
        write_result(folder.case_file(case), case, result)
    Path("accounts").write_text(
        "12|3000|60|COMPLETED\n12.batch|100|60|COMPLETED\n13|3000|60|COMPLETED\n"
        "14|0|60|COMPLETED\n15|900|30|RUNNING\n"
    )
    assert slurm.mean_power_w(["12", "13", "14", "15"]) == {"12": 50.0, "13": 50.0}
    collect(study, folder)
    groups, _ = store.read(folder.study_file)
    first, second, *rest = groups["samples"]["energy_j"].tolist()
    assert first == pytest.approx(50 * plain.times_s[:, 0].mean()) and second == 2.5
    assert all(map(isnan, rest))
    assert "ConsumedEnergy of the job, by time" in groups["environment"]["energy"].tolist()
    wall = {"value": np.full(4, 2.0)}  # of a program, whose times are those of a metric
    of_program = replace(plain, outcomes={"job_id": "12"}, series={METRIC + WALL: wall})
    ((_, found),) = with_energy([(cases[0], of_program)], slurm)
    assert found.outcomes["energy_j"] == 100.0
    Path("accounts").unlink()  # accounting is switched off
    assert slurm.mean_power_w(["12"]) == {}

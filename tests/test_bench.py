"""Benchmarks: checks of results, a small run of each, and what their files hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray
from training import mpirun

from cpdhpc.bench.allreduce import Data, TimedCase, cases_of_size, integer_data, normal_data
from cpdhpc.bench.harness import interleave, interleave_ranks
from cpdhpc.cli import main
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.method import read_machine
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.study.study_file import load_study_file
from cpdhpc.world.cores import own_cores
from cpdhpc.world.ranks import Loopback

DRIVER = """
import json, sys
from cpdhpc.cli import main

for case in json.loads(sys.argv[1]):
    status = main(["bench", *case])
    print(f"status {status}", flush=True)
"""


ONE = Loopback(1)


def test_cases_take_turns_and_warm_ups_are_kept() -> None:
    order: list[str] = []
    cases: dict[str, Callable[[], object]] = {
        name: (lambda name=name: order.append(name))  # type: ignore[misc]
        for name in "ab"
    }
    times = interleave(cases, repeats=2, warmup=1, before=lambda name: order.append("before"))
    assert order == ["before", "a", "before", "b"] * 3
    assert all(each.shape == (3,) and (each > 0).all() for each in times.values())
    by_rank = interleave_ranks(ONE, {"a": lambda: None}, 4, 2)
    assert by_rank["a"].shape == (6, 1)


def test_data_of_the_ranks_has_the_sum_that_is_promised() -> None:
    for make in (integer_data, normal_data):
        data = [make(2000, _Rank(rank, 5)) for rank in range(5)]
        total = np.sum([each.x.astype(np.float64) for each in data], axis=0)
        for each in data:
            np.testing.assert_allclose(each.total, total, rtol=0, atol=2**-45)  # 5 terms below 8
        assert len({each.x.tobytes() for each in data}) == 5
        if make is integer_data:
            assert all(np.array_equal(each.total, total) for each in data)


class _Rank(Loopback):
    """Says that it is a rank of many."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(1)
        self.ranks, self.hosted = ranks, range(rank, rank + 1)


def wrong(by: float, exact: bool) -> TimedCase:
    data, out = Data(np.ones(8, np.float32), np.ones(8)), np.empty(8, np.float32)

    def run() -> None:
        out[:] = data.x
        out[3] += by

    return TimedCase("ring", "raw", "-", "float32", data, out, run, exact=exact)


def test_a_wrong_sum_is_noticed_and_an_error_measured() -> None:
    wrong(0, True).check(ONE)
    with pytest.raises(ArithmeticError, match=r"ring raw - float32: the sum of integers is not"):
        wrong(0.5, True).check(ONE)
    case = wrong(0.5, False)
    case.check(ONE)
    assert case.error == pytest.approx(0.5 / np.sqrt(8))


def test_a_result_that_differs_between_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Loopback(1)
    other = (True, "another digest", 0)
    monkeypatch.setattr(world, "gather", lambda value, what="": [value, other])
    with pytest.raises(ArithmeticError, match="the ranks' results differ"):
        wrong(0, False).check(world)


def test_the_rows_of_a_size_know_what_was_sent() -> None:
    methods = [Allreduce("raw", "ring"), Allreduce("e4m3", "auto")]
    mpi, ring, auto = cases_of_size(ONE, 4096, methods, ["mpi"])
    assert np.isnan(mpi.wire_bytes) and ring.wire_bytes == 0 and ring.error == 0
    assert 0 < auto.error < 2**-4  # half of a unit in the last of four significant bits
    assert auto.name == f"auto({auto.chosen})" and mpi.name == "mpi"


def test_cores_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    with own_cores(ONE) as said:
        assert "cores of its own" in said and os.sched_getaffinity(0) == before
    crowd = Loopback(1)
    crowd.gather = lambda value, what="": [value] * (len(before) + 1)  # type: ignore[method-assign]
    with own_cores(crowd) as said:
        assert "share" in said
    if len(before) > 1:
        crowd.gather = lambda value, what="": [value] * 2  # type: ignore[method-assign]
        with own_cores(crowd) as said:
            assert len(os.sched_getaffinity(0)) == -(-len(before) // 2)
    assert os.sched_getaffinity(0) == before


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All that needs MPI, in one launch of two processes: where its files are, what it printed."""
    where = tmp_path_factory.mktemp("bench")
    few = ["--repeats", "3", "--warmup", "1"]
    machine = str(where / "machine.toml")
    cases = [
        ["fit", "--quick", "--out", machine, *few],
        [
            *(
                "allreduce",
                "--sizes",
                "8,16KiB",
                "--wires",
                "raw,e4m3",
                "--algorithms",
                "ring,auto",
            ),
            *("--scalings", "tile,aps", "--accumulate", "default,kahan", "--predict", machine),
            *("--out", str(where / "allreduce.h5"), *few),
        ],
        ["latency", "--sizes", "8:32:x2", "--out", str(where / "latency.h5"), *few],
    ]
    done = mpirun(2, "-c", DRIVER, json.dumps(cases))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("status 0") == 2 * len(cases)
    return where, done.stdout


def rows_of(shown: str, *words: str) -> list[list[str]]:
    return [
        line.split()
        for line in shown.splitlines()
        if not line.startswith("#") and all(word in line.split() for word in words)
    ]


def test_the_table_of_allreduces(runs: tuple[Path, str]) -> None:
    _, shown = runs
    (mpi,) = rows_of(shown, "16384", "mpi", "-")
    assert mpi[:6] == ["16384", "4096", "mpi", "raw", "-", "float32"] and mpi[13] == "1.00"
    assert len(rows_of(shown, "8", "2", "ring")) == 3  # raw, tile, aps
    assert "left out: accumulate='kahan': known are exact, requantise" in shown
    (ring,) = rows_of(shown, "16384", "ring", "e4m3", "tile", "requantise")
    assert 0 < float(ring[12]) < 2**-3 and float(ring[14]) > 0
    assert "(us)" in shown and "busbw" in shown and "kernels" in shown


def test_every_sample_is_in_the_file_of_a_study(
    runs: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs[0] / "allreduce.h5"
    with xarray.open_dataset(
        path, group="samples", engine="h5netcdf", decode_timedelta=False
    ) as samples:
        assert set(samples.sizes) == {"point", "repeat"} and samples.sizes["repeat"] == 4
        assert samples["is_warmup"].values.tolist() == [[1, 0, 0, 0]] * samples.sizes["point"]
        assert (samples["min_rank_time_s"] > 0).all()
        assert (samples["mean_rank_time_s"] <= samples["time_s"]).all()
        for name in samples.variables:
            assert samples[name].attrs["units"] and samples[name].attrs["long_name"]
        ours = samples.where(samples["predicted_s"].notnull(), drop=True)
        raw = (ours["wire"] == "raw") & (ours["algorithm"] == "ring") & (ours["size_bytes"] > 8)
        assert ours["wire_bytes"].values[raw.values].tolist() == [16384]  # 2 (p - 1) / p of them
        assert set(samples["algorithm"].values) >= {"mpi", "ring", "auto"}
        auto = samples["algorithm"] == "auto"
        assert set(samples["chosen"].values[auto]) <= {*SCHEDULES}
        assert set(samples["chosen"].values[~auto]) == {""}
        medians = samples["time_s"].values[:, 1:]
    file = load_study_file(path)
    assert file.benchmark and file.points[0].ranks == 2
    assert [point.times_s.tolist() for point in file.points] == medians.tolist()
    assert file.environments[0]["processor"] and file.environments[0]["placement"]
    assert main(["report", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "what: benchmark of allreduce" in shown and "predicted" in shown
    assert "missing" not in shown and "speed-up" not in shown
    (printed,) = rows_of(runs[1], "16384", "ring", "e4m3", "tile", "requantise")
    (ring,) = (
        point
        for point in file.points
        if [point.factors[name] for name in ("algorithm", "size_bytes")] == ["ring", 16384]
        and point.factors.get("value_scaling") == "tile"
    )
    assert 1e6 * ring.summary["median_s"] == pytest.approx(float(printed[6]), abs=0.06)


def test_latency_has_the_columns_of_osu(runs: tuple[Path, str]) -> None:
    where, shown = runs
    table = shown[shown.rindex("# Size(B)") :]
    assert table.splitlines()[0].count("Latency(us)") == 9
    assert [row[0] for row in rows_of(table)[:3]] == ["8", "16", "32"]
    for row in rows_of(table)[:3]:
        for average, least, most in (row[1:4], row[4:7], row[7:10]):
            assert float(least) <= float(average) <= float(most)
    prepared = [p for p in load_study_file(where / "latency.h5").points][2::3]
    assert [p.factors["algorithm"] for p in prepared] == ["tree prepared"] * 3
    assert [len(p.times_s) for p in prepared] == [3] * 3


def test_the_fit_is_used_for_predictions(
    runs: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs[0] / "machine.toml"
    file = read_machine(path)
    assert file.machine.encode_s > 0 and file.machine.alpha_s + file.machine.call_s > 0
    assert file.fit["ranks"] == 2 and file.fit["processor"] and file.units
    options = ["--sizes", "8,1MiB", "--algorithms", "ring,tree,hier", "--ranks-per-node", "8"]
    assert main(["bench", "predict", str(path), "--ranks", "64", *options]) == 0
    shown = capsys.readouterr().out
    assert "predicted for 64 ranks, not measured; times fitted on 2 ranks of" in shown
    assert "no contention" in shown and "one that stands for all" in shown
    assert len(rows_of(shown)) == 2 * 3 * 2 and len(rows_of(shown, "*")) == 2
    assert main(["bench", "predict", str(path), "--ranks", "0"]) == 2
    assert main(["bench", "predict", str(path), "--ranks", "2", "--algorithms", "auto"]) == 2


def test_codec_writes_its_samples_without_mpi(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "codec.h5"
    options = ["--mib", "0.1", "--formats", "e4m3,e3m0", "--repeats", "2", "--out", str(path)]
    assert main(["bench", "codec", "--threads", "1,2", *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 + 2 * 2
    points = load_study_file(path).points
    memcpy, *others = points
    assert memcpy.factors["operation"] == "memcpy" and "format" not in memcpy.factors
    assert len(others) == 2 * 2 * 7 and {p.factors["format"] for p in others} == {"e4m3", "e3m0"}
    assert sum(p.factors["threads"] == 2 for p in others) == 14
    assert all(len(p.times_s) == 2 for p in points)
    assert main(["report", str(path)]) == 0 and "decode_add" in capsys.readouterr().out
    assert main(["bench", "codec", "--formats", "e9"]) == 2


def test_errors_of_the_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "2,3", "--formats", "e4m3,e5m2", "--values", "1024", "--seeds", "1"]
    assert main(["bench", "accuracy", *arguments, "--png", str(tmp_path / "a.png")]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 10000
    errors: dict[str, float] = {}
    for line in shown.split("| e5m2")[0].splitlines():  # the last column but one of e4m3's rows
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if "," in cells[0] and "ranks" not in cells[0]:
            errors[cells[0]] = float(cells[3])
    # One rounding a contribution in both; float32 adds its own, which are much smaller.
    assert errors["any, exact"] == pytest.approx(errors["gather, float32"], rel=0.05)
    assert errors["any, exact"] < errors["ring, requantise"]
    assert "any, exact" not in shown.split("| e5m2")[1]  # 33 bits for the sum of one rank already


@pytest.mark.parametrize("wrong", [["--ranks", "x"], ["--formats", "e9m9"], ["--seeds", "0"]])
def test_accuracy_refuses(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accuracy", *wrong]) == 2
    assert "cpdhpc: error: " in capsys.readouterr().err

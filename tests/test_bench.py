"""Benchmarks: checks of results, a small run of each, and what their files hold."""

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every import every

from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.config import UserError
from cpdhpc.lab.cli import main
from cpdhpc.lab.kinds.allreduce import ALLREDUCE
from cpdhpc.lab.kinds.allreduce_cases import (
    BASELINES,
    CaseArrays,
    Contribution,
    TimedCase,
    bound_s,
    data_of,
    wire_bytes,
)
from cpdhpc.lab.kinds.codec import CODEC
from cpdhpc.lab.kinds.place import JobRanks
from cpdhpc.lab.kinds.printing import comments, table
from cpdhpc.lab.kinds.timing import interleave_ranks, measure, opened, slowest
from cpdhpc.lab.study_data.study_file import load_study_file
from cpdhpc.methods import MEMCPY
from cpdhpc.ops import cpu, kernel_threads
from cpdhpc.world.cores import own_cores
from cpdhpc.world.ranks import Loopback

ONE = Loopback(1)


def test_cases_take_turns_and_warm_ups_are_kept() -> None:
    order: list[str] = []
    cases: dict[str, Callable[[], object]] = {
        name: (lambda name=name: order.append(name))  # type: ignore[misc]
        for name in "ab"
    }
    times = interleave_ranks(ONE, cases, 2, 1, lambda name: order.append("before"))
    assert order == ["before", "a", "before", "b"] * 3
    assert all(each.shape == (3, 1) and (each > 0).all() for each in times.values())
    assert slowest(ONE, {"a": lambda: None}, 4, 2)["a"].shape == (4,)


def test_tables_have_columns_as_wide_as_their_headings() -> None:
    forms = {"name": "<3", "time\n(us)": "7.1f", "share": "3.0%"}
    lines = table(forms, [["a", 12.34, 0.5], ["longer", "-", float("nan")]])
    assert lines == [
        "#         time",
        "# name    (us) share",
        "  a       12.3   50%",
        "  longer       -     -",
    ]
    assert comments(["one", "", "x " * 60]) == [
        "# one",
        f"# {'x ' * 47}".strip(),
        f"#   {'x ' * 13}".strip(),
    ]


def test_data_of_the_ranks_has_the_sum_that_is_promised() -> None:
    for exact in (True, False):
        data = [data_of(2000, _Rank(rank, 5), exact) for rank in range(5)]
        total = np.sum([each.x.astype(np.float64) for each in data], axis=0)
        for each in data:
            np.testing.assert_allclose(each.total, total, rtol=0, atol=2**-45)  # 5 terms below 8
        assert len({each.x.tobytes() for each in data}) == 5
        if exact:
            assert all(np.array_equal(each.total, total) for each in data)


class _Rank(Loopback):
    """Says that it is a rank of many."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(1)
        self.ranks, self.hosted = ranks, range(rank, rank + 1)


def wrong(by: float, exact: bool) -> TimedCase:
    data, out = Contribution(np.ones(8, np.float32), np.ones(8)), np.empty(8, np.float32)

    def run() -> None:
        out[:] = data.x
        out[3] += by

    return TimedCase("ring", data, out, run, exact=exact)


def test_a_wrong_sum_is_noticed_and_an_error_measured() -> None:
    wrong(0, True).check(ONE)
    with pytest.raises(ArithmeticError, match="ring: a result is not exact"):
        wrong(0.5, True).check(ONE)
    case = wrong(0.5, False)
    case.check(ONE)
    assert case.error == pytest.approx(0.5 / np.sqrt(8))


def test_a_result_that_differs_between_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Loopback(1)
    other = (True, "another digest", 0, 0.0, 0.0)
    monkeypatch.setattr(world, "gather", lambda value, what="": [value, other])
    with pytest.raises(ArithmeticError, match="the ranks' results differ"):
        wrong(0, False).check(world)


def test_the_points_of_a_size_know_what_was_sent() -> None:
    named = [{"algorithm": "mpi", "wire": "raw"}, {"algorithm": "ring", "wire": "raw"}]
    cases = [
        {"size_bytes": 4096, **each} for each in (*named, {"algorithm": "auto", "wire": "e4m3"})
    ]
    place: Any = JobRanks(ONE)  # type: ignore[arg-type]
    points = measure(ALLREDUCE, place, cases, repeats=3, warmup=1)
    mpi, ring, auto = (point.outcomes for point in points)
    assert np.isnan(mpi["wire_bytes"]) and ring["wire_bytes"] == 0 and ring["error"] == 0
    assert 0 < auto["error"] < 2**-4  # half of a unit in the last of four significant bits
    assert points[2].factors["chosen"] in SCHEDULES and points[1].factors == cases[1]
    assert all(point.times_s.shape == (4, 1) for point in points)


def test_a_copy_sums_nothing() -> None:
    """Its results differ between ranks, which is no error."""
    world = _Rank(1, 3)
    copy = BASELINES[MEMCPY](world, CaseArrays(world, 16, "cpu"))
    copy.check(world)
    assert np.array_equal(copy.out, copy.data.x) and not np.array_equal(copy.out, copy.data.total)


def test_memory_that_is_not_shared_is_an_error() -> None:
    with pytest.raises(UserError, match="call shared: the processes of a node share no memory"):
        _ = CaseArrays(ONE, 16, "cpu").shared


@every(
    ("nodes", "wire", "seconds"),
    [
        ((0, 0, 0, 0), "raw", 1e-6),  # memory alone, which is slow here
        ((0, 0, 1, 1), "raw", 8192e-6),  # half of the data, there and back, at 1 us a byte
        ((0, 1, 2, 3), "raw", 12288e-6),
        ((0, 1, 2, 3), "e4m3", 3075e-6),  # a byte a value, and one of each tile's shift
        ((0, 1), "bf16", 4098e-6),
    ],
)
def test_the_bound_is_what_memory_and_the_links_of_nodes_take(
    nodes: tuple[int, ...], wire: str, seconds: float
) -> None:
    world = Loopback(len(nodes), nodes=nodes)
    sent = wire_bytes({"size_bytes": 8192, "algorithm": "ring", "wire": wire})
    assert bound_s(world, sent, 1e-6, link_s=1e-6) == pytest.approx(seconds, rel=1e-12)
    assert bound_s(world, sent, 1.0, link_s=1e-6) == 1.0


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


def test_codec_writes_its_samples_without_mpi(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "codec.h5"
    options = ["--mib", "0.1", "--formats", "e4m3,e3m0", "--repeats", "2", "--out", str(path)]
    assert main(["bench", "codec", "--threads", "1,2", *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 + 2 * 2 + 3 + 10
    memcpy, *others = load_study_file(path).points
    assert memcpy.factors["operation"] == "memcpy" and "format" not in memcpy.factors
    coded = [point.factors["format"] for point in others if "format" in point.factors]
    assert sorted(coded) == ["e3m0"] * 14 + ["e4m3"] * 14 and len(others) - len(coded) == 18
    assert sum(point.factors["threads"] == 2 for point in others) == 14 + 9
    assert all(len(point.times_s) == 2 for point in others)
    assert main(["report", str(path)]) == 0 and "scatter_add" in capsys.readouterr().out


def test_threads_and_clones_of_a_case_are_its_own() -> None:
    place: Any = JobRanks(ONE)  # type: ignore[arg-type]
    case = {"size_bytes": 1 << 16, "operation": "gather", "density": 0.1, "threads": 2}
    before, other = (cpu.clone(), kernel_threads()), cpu.clones()[0]
    with opened(CODEC, place, [{**case, "clone": other}]) as (call,):
        call.prepare()
        assert (cpu.clone(), kernel_threads()) == (other, 2)
        assert call.outcomes == {"payload_bytes": 1 << 16}
        call.run()
    assert (cpu.clone(), kernel_threads()) == before
    with pytest.raises(UserError, match="clone x86: this processor has portable"):
        opened(CODEC, place, [{**case, "clone": "x86"}]).__enter__()


def test_codec_of_each_clone_and_of_microscaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, path, before = cpu.clones(), tmp_path / "codec.h5", cpu.clone()
    options = ["--mib", "0.1", "--formats", "mxfp8", "--repeats", "1", "--out", str(path)]
    options += ["--clones", ",".join(names), "--operations"]
    assert main(["bench", "codec", *options, "encode block32,hop block32"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[2] for row in rows if row[0] == "mxfp8"] == names and cpu.clone() == before
    points = load_study_file(path).points
    coded = [point.factors["clone"] for point in points if "format" in point.factors]
    assert sorted(coded) == sorted(names * 2)
    assert main(["bench", "codec", *options, "encode"]) == 2
    assert "--operations encode: mxfp8 has those of block32" in capsys.readouterr().err


@pytest.mark.usefixtures("without_figures")
def test_errors_of_the_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "1,3", "--formats", "e4m3,e5m2", "--values", "1024"]
    written = tmp_path / "a.png", tmp_path / "a.csv"
    arguments += ["--png", str(written[0]), "--csv", str(written[1])]
    arguments += ["--ways", "all", "--scalings", "all", "--data", "spread"]
    assert main(["bench", "accuracy", *arguments]) == 0
    shown = capsys.readouterr().out
    assert written[0].read_text().startswith("png: <Figure size")
    rows = list(csv.DictReader(written[1].read_text().splitlines()))
    errors = {
        (row["algorithm"], row["accumulate"]): float(row["error"])
        for row in rows
        if (row["wire"], row["scaling"], row["ranks"]) == ("e4m3", "aps, no headroom", "3")
    }
    # One rounding a contribution in both; float32 adds its own, which are much smaller.
    exact = errors["ring", "exact"]
    assert exact == pytest.approx(errors["gather", "float32"], rel=0.05)
    assert exact < errors["ring", "requantise"]
    assert not any(row["wire"] == "e5m2" and row["way"] == "ring:exact" for row in rows)  # 33 bits
    one = next(row for row in rows if row["way"] == "ring:grow" and row["ranks"] == "3")
    assert f"| {one['wire']} ring:grow | " in shown and f" {float(one['error']):.2g} |" in shown
    assert float(one["bytes"]) == 1
    gather = next(row for row in rows if row["way"] == "gather:kahan" and row["ranks"] == "3")
    assert float(gather["bytes"]) == 1.5

"""Reports on studies: tables that agree with other arithmetic, and what is missing."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from studies import fill, no_numbers, small_study, some_result
from synthetic_study import GRADIENTS, write_study
from test_losses import Missed
from training import run_job

from cpdhpc.config import dump_toml
from cpdhpc.lab.commands.report import Outputs, page, report
from cpdhpc.lab.kinds.train import TRAIN
from cpdhpc.lab.report.compare import compare
from cpdhpc.lab.report.figures import draw
from cpdhpc.lab.report.scaling import Choice
from cpdhpc.lab.report.tables import Report, Table
from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.study.collect import collect
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study.report import study_report
from cpdhpc.lab.study_data.study_file import (
    OUTCOMES,
    ReportError,
    load_study_file,
    read_result,
    write_result,
)
from cpdhpc.lab.train.losses import METRICS
from cpdhpc.world.ranks import Loopback

SMALL: dict[str, Any] = {"ranks": (2, 4), "sizes": (2**12, 2**20), "algorithms": ("ring",)}


@pytest.fixture(scope="module")
def allreduce(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("allreduce") / "small.h5", **SMALL)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("train") / "digits.h5", "train", ranks=(1, 2))


def of(path: Path) -> Report:
    return study_report(load_study_file(path))


def table(path: Path, title: str) -> Table:
    (found,) = [t for s in of(path).sections for t in s.tables if t.title == title]
    return found


def cells(path: Path, title: str) -> list[dict[str, str]]:
    """Rows of a table by heading, those of several lines joined."""
    found = table(path, title)
    names = [column.heading.replace("-\n", "").replace("\n", " ") for column in found.columns]
    for i in range(len(names)):  # the second CI is the speed-up's
        names[i] += "'" if names[i] in names[:i] else ""
    return [dict(zip(names, row, strict=True)) for row in found.rows]


def seconds(text: str) -> float:
    number, unit = text.split()
    scale = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    return float(number.replace(",", "")) * scale


def raw(path: Path, name: str) -> Any:
    with h5py.File(path) as file:
        dataset = file[name]
        return dataset.asstr()[:] if dataset.dtype == object else dataset[:]


def one(path: Path, **factors: object) -> int:
    """The index of the one point with these factors."""
    hits = [raw(path, f"samples/{name}") == value for name, value in factors.items()]
    (index,) = np.flatnonzero(np.logical_and.reduce(hits))
    return int(index)


DIGITS = {"rel": 0.006}  # three digits are shown


def test_scaling_table_agrees_with_the_summary(allreduce: Path) -> None:
    rows = cells(allreduce, "Scaling")
    assert len(rows) == len(raw(allreduce, "samples/ranks")) == 16
    row = next(
        r for r in rows if r["size"] == "1 MiB" and r["wire"] == "e4m3" and r["ranks"] == "4"
    )
    index = one(allreduce, size_bytes=2**20, wire="e4m3", ranks=4)
    base = one(allreduce, size_bytes=2**20, wire="e4m3", ranks=2)
    stored = {k: raw(allreduce, f"summary/{k}") for k in ("median_s", "ci_low_s", "ci_high_s")}
    assert seconds(row["median"]) == pytest.approx(stored["median_s"][index], **DIGITS)
    low, high = (float(end) for end in row["95 % CI"].split(" \N{EN DASH} "))
    unit = row["median"].split()[1]
    assert seconds(f"{low} {unit}") == pytest.approx(stored["ci_low_s"][index], **DIGITS)
    assert seconds(f"{high} {unit}") == pytest.approx(stored["ci_high_s"][index], **DIGITS)
    speedup = stored["median_s"][base] / stored["median_s"][index]
    assert float(row["speed-up"]) == pytest.approx(speedup, **DIGITS)
    assert float(row["efficiency %"]) == pytest.approx(100 * speedup / 2, **DIGITS)
    ranks, time = row["baseline"].split(", ")
    assert ranks == "2 ranks" and seconds(time) == pytest.approx(stored["median_s"][base], **DIGITS)


def test_allreduce_table_counts_bandwidth_and_ratios(allreduce: Path) -> None:
    rows = cells(allreduce, "All-reduce")
    row = next(
        r for r in rows if r["size"] == "1 MiB" and r["wire"] == "e3m0" and r["ranks"] == "4"
    )
    index = one(allreduce, size_bytes=2**20, wire="e3m0", ranks=4)
    mpi = one(allreduce, size_bytes=2**20, algorithm="mpi", ranks=4)
    median = raw(allreduce, "summary/median_s")
    assert float(row["busbw GB/s"]) == pytest.approx(1.5 * 2**20 / median[index] / 1e9, **DIGITS)
    times = row["times as fast as mpi"].split()[0]
    assert float(times) == pytest.approx(median[mpi] / median[index], **DIGITS)
    bound = raw(allreduce, "samples/bound_s")[index]
    assert seconds(row["bound"]) == pytest.approx(bound, **DIGITS)
    assert float(row["time by bound"]) == pytest.approx(median[index] / bound, **DIGITS)
    assert float(row["relative error"]) == raw(allreduce, "samples/error")[index]
    assert {r["times as fast as mpi"] for r in rows if r["algorithm"] == "mpi"} == {"-"}


def test_training_table_takes_seeds_together(train: Path) -> None:
    rows = cells(train, "Training")
    assert len(rows) == 2 * len(GRADIENTS)
    row = next(r for r in rows if r["gradients"] == "e4m3 none" and r["ranks"] == "2")
    factors = {"ranks": 2, "gradient.wire": "e4m3", "gradient.scaling": "none"}
    members = [one(train, seed=seed, **factors) for seed in range(3)]
    base = [one(train, seed=s, ranks=2, **{"gradient.aggregator": "none"}) for s in range(3)]
    accuracy = raw(train, "samples/accuracy")
    mean, deviation = accuracy[members].mean(), accuracy[members].std(ddof=1)
    assert row["accuracy %"] == f"{mean:.2f} ± {deviation:.2f}" and row["seeds"] == "3"
    assert float(row["to float32 points"]) == pytest.approx(mean - accuracy[base].mean(), abs=0.01)
    times = raw(train, "samples/time_s")[members]
    counts = raw(train, "samples/is_warmup")[members] == 0
    median = np.nanmedian(times[counts])
    assert seconds(row["step"]) == pytest.approx(median, **DIGITS)
    total = raw(train, "training/epoch_time_s")[members].sum(axis=1).mean()
    assert float(row["training s"]) == pytest.approx(total, **DIGITS)
    assert row["sent per step, rank"] == "75,000 B" and float(row["bits per value"]) == 8
    underflow = raw(train, "telemetry/underflow")[members].mean()
    assert float(row["underflow %"]) == pytest.approx(underflow, abs=0.006)


def test_weak_scaling_counts_work(tmp_path: Path) -> None:
    path = write_study(tmp_path / "w.h5", "train", "weak", ranks=(1, 2), seeds=(0,))
    row = next(r for r in cells(path, "Scaling") if r["ranks"] == "2")
    assert row["batch"] == "64" and 1.5 < float(row["speed-up"]) < 2
    assert float(row["efficiency %"]) == pytest.approx(50 * float(row["speed-up"]), **DIGITS)
    assert "Per rank: batch 32." in table(path, "Scaling").caption
    assert [chart.name for chart in of(path).charts][:3] == ["speedup", "efficiency", "time"]


def test_what_collect_writes_is_read(tmp_path: Path) -> None:
    """The writer of studies, not this test's: a case is missing, another cannot be."""
    sweep = {"ranks": [1, 2], "algorithm": ["ring", "mpi"], "wire": ["raw", "e4m3"]}
    study = small_study(tmp_path, sweep=sweep)
    folder = Folder(tmp_path / "results")
    lost = fill(folder, study)[-1]
    folder.case_file(lost).unlink()
    folder.failure_file(lost).write_text("Traceback\nRankFailure: rank 1 died\n")
    collect(study, folder)
    found = of(folder.path / "study.h5")
    listed = {each.what: list(each.items) for each in found.listed}
    assert listed["missing, 1 case"] == [f"{lost.id}: RankFailure: rank 1 died"]
    folder.case_file(lost).write_bytes(b"damaged")
    (said,) = [each.items for each in of(folder.path / "study.h5").listed if "missing" in each.what]
    assert f"{lost.id}: {folder.case_file(lost)}: is not an HDF5 file" in said[0]
    (impossible,) = [what for what in listed if what.startswith("impossible, 2 cases: ")]
    assert "mpi has no wire e4m3" in impossible
    assert "measured after a restart of the batch, 5 points" in listed
    assert dict(found.facts)["points"] == "5, 1 missing"
    assert len(cells(folder.path / "study.h5", "Scaling")) == 5


TRAININGS = """
kind = "train"
job.metric.name = "missed"
job.metrics = [{ name = "perplexity" }]
job.train = { epochs = 1, batch = 25, threads = 1 }
[sweep]
ranks = [1]
seed = [0, 1]
"""


def test_further_metrics_of_trainings_are_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the metric of the job, in percent where its row says so."""
    monkeypatch.setitem(METRICS, "missed", Missed)
    (tmp_path / "s.toml").write_text(TRAININGS)
    study, folder = load_study(tmp_path / "s.toml"), Folder(tmp_path / "results")
    folder.prepare(study)
    found, missed, place = [], [], SimpleNamespace(environment=dict)
    for case in expand(study).cases:
        each = TRAIN.measure(study, case, tmp_path)  # type: ignore[call-arg, arg-type]
        each.training = run_job(each.job, Loopback(1), tmp_path)
        each.starts = [0]
        write_result(folder.case_file(case), case, each.result(place))
        epochs = each.training.record.arrays()["epochs"]
        found.append(epochs["test_perplexity"][-1])
        missed.append(100 * epochs["test_missed"][-1])
    collect(study, folder)
    (row,) = cells(folder.path / "study.h5", "Training")
    assert row["perplexity"] == f"{np.mean(found):.4g} ± {np.std(found, ddof=1):.2g}"
    assert row["missed %"] == f"{np.mean(missed):.2f} ± {np.std(missed, ddof=1):.2f}"
    assert row["seeds"] == "2"  # a score is no factor
    assert "trainings" in row  # no key of [gradient] was swept
    caption = table(folder.path / "study.h5", "Training").caption
    assert "in tiles of 1,024 values, and every layer fills up its last one" in caption


CODEC = """
kind = "codec"
scaling = "throughput"
[sweep]
ranks = [1, 2]
ppn = 2
size_bytes = ["64KiB", "1MiB"]
operation = ["memcpy", "encode tile", "decode"]
format = ["e4m3", "e3m0"]
"""


def test_codec(tmp_path: Path) -> None:
    (tmp_path / "codec.toml").write_text(CODEC)
    study, folder = load_study(tmp_path / "codec.toml"), Folder(tmp_path / "results")
    fill(folder, study)
    collect(study, folder)
    path = folder.study_file
    rows = cells(path, "Codec")
    assert len(rows) == 2 * 2 * (1 + 2 * 2)
    assert not no_numbers(of(path).tables)
    scaling = cells(path, "Throughput")
    for row in scaling:
        time_s, size = seconds(row["median"]), {"64 KiB": 2**16, "1 MiB": 2**20}[row["size"]]
        assert float(row["throughput GB/s"]) == pytest.approx(size / time_s / 1e9, rel=1e-2)
    told = " ".join((*(t.caption for t in of(path).tables), *scaling[0], page([of(path)])))
    assert "fficiency" not in told and "peed-up" not in told
    chosen = study_report(load_study_file(path), Choice(y="throughput", where=["ranks=1"]))
    assert "throughput_by_size_bytes" in {chart.name for chart in chosen.charts}
    with pytest.raises(ReportError, match="--y speedup: is not measured in this study"):
        study_report(load_study_file(path), Choice(y="speedup"))
    names = ("ranks", "size", "operation", "format")
    assert len({tuple(row.get(name) for name in names) for row in scaling}) == len(scaling)
    assert {row["size"] for row in scaling} == {row["size"] for row in rows}
    row = next(r for r in rows if r["ranks"] == "2" and r["size"] == "1 MiB" and r["format"] != "-")
    found = {"ranks": 2, "size_bytes": 2**20}
    index = one(path, operation=row["operation"], format=row["format"], **found)
    base = one(path, operation="memcpy", **found)
    median = raw(path, "summary/median_s")
    assert float(row["rate GB/s"]) == pytest.approx(2**20 / median[index] / 1e9, **DIGITS)
    assert float(row["of memcpy's"].split()[0]) == pytest.approx(
        median[base] / median[index], **DIGITS
    )
    charts = {chart.name: chart for chart in of(path).charts}
    assert set(charts) == {"throughput", "rate_by_format"}
    titles = {panel.title for panel in charts["throughput"].panels}
    assert {"1 rank, decode", "2 ranks, memcpy"} <= titles and len(titles) == 6, titles
    assert {s.join for panel in charts["throughput"].panels for s in panel.series} == {"line"}
    assert [list(panel.y.names) for panel in charts["rate_by_format"].panels] == [
        ["e4m3", "e3m0"]
    ] * 4


OTHERS = {  # sweeps of small studies
    "allreduce": 'size_bytes = [4096, 8192]\nalgorithm = ["ring", "mpi"]',
    "codec": 'size_bytes = [4096]\noperation = ["memcpy", "decode"]\nformat = ["e4m3"]',
    "halo": 'rows = [64]\nway = ["cpdhpc", "subarray"]',
    "autoencoder": "maps = [1, 2]",
}


@pytest.mark.parametrize("kind", [*OTHERS, "train"])
def test_what_is_over_nothing_is_unknown(tmp_path: Path, kind: str) -> None:
    """A ping-pong's slope of 0 gives a bound of 0; a coarse clock gives times of 0."""
    if kind == "train":
        path = write_study(tmp_path / "t.h5", "train", ranks=(1, 2), seeds=(0,))
    else:
        text = f'kind = "{kind}"\n[sweep]\nranks = [1, 2]\nppn = 2\n{OTHERS[kind]}\n'
        (tmp_path / "s.toml").write_text(text)
        study, folder = load_study(tmp_path / "s.toml"), Folder(tmp_path / "results")
        fill(folder, study)
        collect(study, folder)
        path = folder.study_file
    assert not no_numbers(of(path).tables)
    with h5py.File(tmp_path / "zeros.h5", "w") as file, h5py.File(path) as whole:
        for name in whole:  # a copy, which has no checksum
            whole.copy(name, file)
        file.attrs.update(whole.attrs)
        outcomes = [*OUTCOMES, "time_s", "speedup", *(f"epoch_{n}" for n in ("time_s", "loss"))]
        for group in file.values():
            for name, data in group.items():
                if data.dtype.kind == "f" and (name in outcomes or name.endswith("_s")):
                    data[...] = 0
    path = tmp_path / "zeros.h5"
    found = of(path)
    shown = [cell for s in found.sections for t in s.tables for row in t.rows for cell in row]
    assert not [cell for cell in shown if "inf" in cell or "nan" in cell]
    for chart in found.charts[:1]:
        draw(chart).draw_without_rendering()
    again = compare(load_study_file(path), load_study_file(path))
    assert len(again.having("unknown")) == len(again.changes)


def test_notes_and_tables_say_what_is_there(tmp_path: Path) -> None:
    """Intervals only where bars are drawn, medians only of times; no column of dashes."""
    (tmp_path / "s.toml").write_text(
        'kind = "autoencoder"\n[sweep]\nranks = [1, 2, 4]\nppn = 4\nmaps = 2\n'
    )
    study, folder = load_study(tmp_path / "s.toml"), Folder(tmp_path / "results")
    for case in fill(folder, study):
        result = some_result()
        result.outcomes.update(energy_j=2.0, exchange_s=1e-4)
        write_result(folder.case_file(case), case, result)
    collect(study, folder)
    found = of(folder.study_file)
    notes = {chart.name: chart.notes[0] for chart in found.charts}
    assert {"rate", "exchanges", "speedup", "energy"} <= notes.keys()
    for chart in found.charts:
        ends = [end for p in chart.panels for s in p.series if s.low is not None for end in s.low]
        assert ("bars: 95 % CI" in notes[chart.name]) == bool(np.isfinite(ends).any()), chart.name
    assert notes["exchanges"].startswith("Median over iterations of the time of the rank with most")
    assert notes["energy"] == "Of all nodes: means over repeats."
    assert found.tables and not any("method" in each.headings for each in found.tables)
    file = load_study_file(folder.study_file)
    chosen = {y: study_report(file, Choice(y=y)).charts[0] for y in ("time", "error")}
    assert chosen["time"].notes == ["Medians of the slowest rank's times; bars: 95 % CI."]
    assert chosen["error"].notes == []
    assert chosen["error"].panels[0].y.label == "relative error"


def test_speedups_over_another_algorithm(tmp_path: Path) -> None:
    base = {"algorithm": "mpi", "wire": "raw", "ranks": "same"}
    sweep = {"ranks": [1, 2], "algorithm": ["ring", "mpi"], "wire": ["raw"]}
    study, folder = small_study(tmp_path, base=base, sweep=sweep), Folder(tmp_path / "results")
    fill(folder, study)
    collect(study, folder)
    rows = cells(folder.study_file, "Scaling")
    assert [row["baseline"].split(",")[0] for row in rows] == ["1 rank", "2 ranks"] * 2
    assert {row["speed-up"] for row in rows if row["algorithm"] == "mpi"} == {"1.00"}
    (chart,) = of(folder.study_file).charts
    (panel,) = chart.panels
    (reference,) = [series for series in panel.series if series.label == "baseline"]
    assert list(reference.y) == [1, 1] and "algorithm = mpi" in chart.notes[0]


def test_cases_of_a_place_have_one_bound(tmp_path: Path) -> None:
    """Each has timed copies of its own; only between nodes the wire decides."""
    sweep = {"nodes": [1, 2], "ppn": 2, "algorithm": ["ring", "mpi"], "wire": ["raw", "e4m3"]}
    (tmp_path / "p.toml").write_text(
        dump_toml({"kind": "allreduce", "sweep": sweep | {"size_bytes": [4096, 8192]}})
    )
    study, folder = load_study(tmp_path / "p.toml"), Folder(tmp_path / "results")
    cases, bounds_s = fill(folder, study), dict[str, float]()
    for at, case in enumerate(cases):
        bounds_s[case.id] = 1e-6 * (1 + at)
        result = read_result(folder.case_file(case), case)
        result = replace(result, outcomes={**result.outcomes, "bound_s": bounds_s[case.id]})
        write_result(folder.case_file(case), case, result)
    collect(study, folder)
    rows = cells(folder.study_file, "All-reduce")
    assert len(rows) == len(cases) == 12
    for row in rows:
        alike_s = [
            bounds_s[case.id]
            for case in cases
            if str(case.ranks) == row["ranks"]
            and case.factors["size_bytes"] == int(row["size"].split()[0]) * 1024
            and (row["ranks"] == "2" or case.factors["wire"] == row["wire"])
        ]
        assert len(alike_s) in (1, 2, 3)
        expected_s = float(np.median(alike_s))
        assert seconds(row["bound"]) == pytest.approx(expected_s, **DIGITS)
        time_s = seconds(row["median"])
        assert float(row["time by bound"].replace(",", "")) == pytest.approx(
            time_s / expected_s, rel=0.012
        )  # two numbers of three digits


def test_where_leaves_out_of_all_but_the_base(tmp_path: Path) -> None:
    """Points, hosts, reserves and missing cases are those of the choice; mpi is still the base."""
    sweep = {"ranks": [1, 2, 4], "ppn": 4, "algorithm": ["ring", "mpi"]}
    study, folder = small_study(tmp_path, sweep=sweep), Folder(tmp_path / "results")
    cases = fill(folder, study)
    for case in cases:
        result = read_result(folder.case_file(case), case)
        environment = {**result.environment, "hosts": f"{case.factors['algorithm']}{case.ranks}"}
        wide = replace(result, environment=environment, times_s=result.times_s[:4] * 1.0)
        write_result(folder.case_file(case), case, replace(wide, is_warmup=result.is_warmup[:4]))
    lost = next(c for c in cases if c.ranks == 1 and c.factors["algorithm"] == "mpi")
    folder.case_file(lost).unlink()
    collect(study, folder)
    file = load_study_file(folder.study_file)
    whole = study_report(file)
    facts = dict(whole.facts)
    assert facts["points"] == "5, 1 missing" and facts["hosts"].count(";") == 4
    assert {lost.id} < {item for each in whole.listed for item in each.items}
    found = study_report(file, Choice(where=("algorithm=ring", "ranks>=2"), by=("ranks",)))
    facts = dict(found.facts)
    assert facts["points"] == "2 of 5" and facts["hosts"] == "ring2; ring4"
    items = [item.partition(" ")[0] for each in found.listed for item in each.items]
    chosen = {c.id for c in cases if c.factors["algorithm"] == "ring" and c.ranks > 1}
    assert set(items) == chosen, "a few repeats have no interval"
    (shown,) = [t for s in found.sections for t in s.tables if t.title == "All-reduce"]
    (before,) = [t for s in whole.sections for t in s.tables if t.title == "All-reduce"]
    at = [column.heading for column in shown.columns].index("times as\nfast as mpi")
    was = [column.heading for column in before.columns].index("times as\nfast as mpi")
    known = [row[was] for row in before.rows if row[0] in "24" and row[was] != "-"]
    assert [row[at] for row in shown.rows] == known and len(known) == 2


def test_places_of_equal_ranks_are_told_apart(tmp_path: Path) -> None:
    text = 'kind = "allreduce"\n[sweep]\nnodes = [1, 2]\nppn = [1, 2]\nsize_bytes = [4096]\n'
    (tmp_path / "places.toml").write_text(text)
    study, folder = load_study(tmp_path / "places.toml"), Folder(tmp_path / "results")
    fill(folder, study)
    collect(study, folder)
    rows = cells(folder.study_file, "Scaling")
    assert [row["ppn"] + row["ranks"] for row in rows] == ["11", "12", "22", "24"]
    panels = {panel.title for panel in of(folder.study_file).charts[0].panels}
    assert panels == {"ppn 1", "ppn 2"}


def test_partial_study_lists_what_is_missing(tmp_path: Path, capsys: Any) -> None:
    report([write_study(tmp_path / "p.h5", drop=7, **SMALL)], Outputs(terminal=False))
    shown = capsys.readouterr().out
    assert "points: 9, 7 missing" in shown
    assert "missing, 7 cases:" in shown and "and 2 more: --html lists all" in shown
    assert "impossible" not in shown


def test_single_point(tmp_path: Path) -> None:
    path = write_study(tmp_path / "1.h5", ranks=(2,), sizes=(4096,), algorithms=(), repeats=5)
    html = tmp_path / "1.html"
    report([path], Outputs(html, quiet=True))
    assert not of(path).charts, "nothing to draw over"
    assert [len(t.rows) for t in (table(path, "All-reduce"), table(path, "Spread of times"))] == [
        1,
        1,
    ]
    assert "no interval, too few repeats, 1 point" in {each.what for each in of(path).listed}
    assert cells(path, "All-reduce")[0]["95 % CI"] == "-"


def test_the_first_sentence_says_what_was_found(allreduce: Path, train: Path) -> None:
    """By the numbers of the file's own summary: the best at most ranks, and the fastest method."""
    file = load_study_file(allreduce)
    found = dict(study_report(file).facts)["found"]
    most = max(point.ranks for point in file.points)
    far = [p for p in file.points if p.ranks == most and p.base >= 0 and p.base != p.index]
    best = max(far, key=lambda point: point.summary["efficiency"])
    assert found.startswith(f"On {most} ranks the best speed-up is ")
    share, *_ = re.findall(r", (\S+) % of the ideal", found)
    assert float(share) == pytest.approx(100 * best.summary["efficiency"], rel=5e-3)
    assert re.search(r" is the fastest at \d+ of \d+ places[,;] ", found), found
    assert dict(study_report(load_study_file(train)).facts)["found"]

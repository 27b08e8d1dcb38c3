"""Benchmarks and "auto" on real ranks: baselines, tables, files, errors that all ranks raise."""

import contextlib
import io
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray

from cpdhpc.collectives.allreduce import Allreduce, allreduce
from cpdhpc.collectives.method import DEFAULT, read_machine
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.compress import COMPRESSORS, NoCompression
from cpdhpc.config import UserError
from cpdhpc.lab.bench import step
from cpdhpc.lab.bench.compress import replay
from cpdhpc.lab.cli import main
from cpdhpc.lab.kinds.allreduce import ALLREDUCE
from cpdhpc.lab.kinds.allreduce_cases import sum_float32, sum_half, torch_group
from cpdhpc.lab.kinds.flags import check_out
from cpdhpc.lab.kinds.place import JobRanks
from cpdhpc.lab.kinds.timing import BenchmarkResult, BenchPoint, opened
from cpdhpc.lab.study.batch import write_benchmark
from cpdhpc.lab.study_data.study_file import load_study_file
from cpdhpc.lab.train.gradients import Gradients
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world.mpi import World
from cpdhpc.world.ranks import Loopback

pytestmark = pytest.mark.two_ranks


def test_mpi_sums_a_source_and_leaves_it_alone(world):
    x, out = np.full(7, world.process + 1, np.float32), np.empty(7, np.float32)
    expected = np.full(7, world.processes * (world.processes + 1) / 2, np.float32)
    world.sum_by_mpi(out, x)
    np.testing.assert_array_equal(out, expected)
    assert (x == world.process + 1).all()
    world.sum_by_mpi(x)
    np.testing.assert_array_equal(x, expected)
    world.sum_by_mpi(np.empty(0, np.float32))


def test_gloo_sums(world):
    with torch_group(world, "gloo"):
        x, out = np.full(9, world.process + 1, np.float32), np.empty(9, np.float32)
        sum_half(x, out, "bfloat16")
        expected = np.full(9, world.processes * (world.processes + 1) / 2, np.float32)
        np.testing.assert_array_equal(out, expected)  # small integers are bfloat16
        sum_float32(x)
        np.testing.assert_array_equal(x, expected)
    named = ("mpi", "raw"), ("gloo", "raw"), ("gloo", "bf16"), ("direct", "e4m3")
    cases = [{"size_bytes": 4096, "algorithm": name, "wire": wire} for name, wire in named]
    with opened(ALLREDUCE, JobRanks(world), cases) as calls:
        errors = [call.outcomes["error"] for call in calls]
        assert errors[:2] == [0, 0] and 0 < errors[2] < errors[3] < 2**-3
        assert calls[-1].outcomes["wire_bytes"] > 0


@pytest.mark.parametrize("name", ["all_to_all", "reduce_scatter", "broadcast"])
def test_other_collectives_have_their_table(world, name, capsys):
    given = ["bench", "allreduce", "--collective", name, "--sizes", "64,64KiB", "--repeats", "2"]
    status = main([*given, "--algorithms", "direct", "--all"])
    out = world.gather(capsys.readouterr().out)[0]
    rows = [line.split() for line in out.splitlines() if line[:1] == " "]
    assert world.gather(status) == [0] * world.processes
    ours = [("direct", call, wire) for call in ("plain", "prepared") for wire in ("raw", "e4m3")]
    cells = {*ours, ("mpi", "-", "raw"), ("memcpy", "-", "raw")}
    assert {tuple(row[2:5]) for row in rows} == cells and len(rows) == 2 * len(cells), out
    for option in (["--baselines", "gloo"], ["--calls", "shared"]):
        assert world.gather(main([*given, *option])) == [2] * world.processes
        assert option[0] in world.gather(capsys.readouterr().err)[0]


def step_job(world, tmp_path):
    """Return the file of a small job, which all processes see."""
    path = Path(world.gather(str(tmp_path))[0]) / "job.toml"
    if world.process == 0:
        path.write_text(
            '[model]\nname = "mlp"\nhidden = [16]\n[data]\nname = "digits"\n[train]\nbatch = 20\n'
        )
    world.barrier()
    return path


def test_steps_end_with_the_mean_of_ddp(world, tmp_path, capsys):
    """float32's mean is that of DDP but for the order of its sums; e4m3's is near it."""
    job = step_job(world, tmp_path)
    given = ["bench", "step", str(job), "--repeats", "2", "--warmup", "0"]
    methods = ["none", "none:algorithm=rhd", "lowbit:wire=e4m3"]
    status = main([*given, "--methods", *methods])
    out = world.gather(capsys.readouterr().out)[0]
    rows = [line.rsplit(maxsplit=8) for line in out.splitlines() if line[:1] == " "]
    errors = {row[0].strip(): float(row[-1]) for row in rows if row[0].strip() != "alone"}
    # a sum of p values is off by (p - 1) 2**-24 of the sum of magnitudes in any order, which is
    # not far above the length of the mean, as the ranks' gradients are of one network
    near = {name: error < 2**-18 for name, error in errors.items() if "e4m3" not in name}
    small = [2**-9 < error < 2**-3 for name, error in errors.items() if "e4m3" in name]
    assert world.gather(status) == [0] * world.processes
    assert len(near) == 7 and all(near.values()) and len(small) == 3 and all(small), errors


def test_gradients_that_differ_are_an_error(world, tmp_path, monkeypatch):
    """A reducer that leaves one rank's gradients as they were is noticed."""
    job = step_job(world, tmp_path)
    reduce = GradientReducer.reduce

    def forgets(self):
        before = [p.grad.clone() for p in self.parameters]
        reduce(self)
        if self.world.process == self.world.processes - 1:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

    monkeypatch.setattr(GradientReducer, "reduce", forgets)
    arguments = Namespace(
        what=str(job),
        set=[],
        timeout=None,
        methods=["none"],
        backends=[],
        repeats=1,
        warmup=0,
        batch=1,
        tokens=0,
    )
    with pytest.raises(ArithmeticError, match="none: gradients differ over ranks"):
        step.run(arguments, world)


def test_auto_is_one_algorithm_on_all_ranks(world):
    x = np.full(5000, world.process + 1, np.float32)
    reduced = Allreduce("raw", "auto").run(world, [x])
    assert len(set(world.gather(reduced.algorithm))) == 1
    assert (reduced.arrays[0] == world.processes * (world.processes + 1) / 2).all()


def test_machines_that_differ_are_an_error_on_all_ranks(world):
    own = replace(DEFAULT, alpha_s=1e-6 * (1 + (world.process == world.processes - 1)))
    with pytest.raises(
        ValueError, match=r"differ: machine.alpha_s=1e-06 on rank 0, machine.alpha_s=.* on rank \d"
    ):
        allreduce(world, np.ones(9, np.float32), algorithm="auto", machine=own)
    path = "none.toml" if world.process == 0 else None
    with pytest.raises(ValueError, match=r"none\.toml: cannot be read"):
        allreduce(world, np.ones(9, np.float32), algorithm="auto", machine=path)


def test_what_one_process_finds_wrong_is_raised_by_all(world):
    path = Path("nowhere/x.h5") if world.process == world.processes - 1 else None
    with pytest.raises(UserError, match="nowhere is no directory"):
        world.agreed(lambda: check_out(path))
    with pytest.raises(UserError, match=r"nowhere/x\.h5: cannot be written"):
        point = BenchPoint({"size_bytes": 4}, {}, np.zeros((3, world.processes)))
        asked = Namespace(out=Path("nowhere/x.h5"))
        write_benchmark(BenchmarkResult("x", "allreduce", [point], 1), asked, world)
    assert world.agreed(lambda: world.process) == world.process


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory) -> tuple[Path, str]:
    """Benchmarks on all ranks: where their files are, and what they printed."""
    where = Path(world.gather(str(tmp_path_factory.mktemp("bench")))[0])
    few = ["--repeats", "3", "--warmup", "1"]
    machine = str(where / "machine.toml")
    cases = [
        f"fit --quick --out {machine}",
        f"fit --quick --out {where}/again.toml --beside {machine}",
        "allreduce --sizes 8,16KiB --wires raw,e4m3 --algorithms ring,auto --scalings tile,aps "
        f"--accumulate default,kahan --predict {machine} --out {where}/allreduce.h5 --all",
        f"latency --sizes 8:32:x2 --out {where}/latency.h5 --all",
    ]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = [main(["bench", *case.split(), *few]) for case in cases]
    told = world.gather((status, out.getvalue()))
    assert [status for status, _ in told] == [[0] * len(cases)] * world.processes
    return where, told[0][1]


def rows_of(shown: str, *words: str) -> list[list[str]]:
    return [
        line.split()
        for line in shown.splitlines()
        if not line.startswith("#") and all(word in line.split() for word in words)
    ]


def test_the_table_of_allreduces(runs: tuple[Path, str]) -> None:
    _, shown = runs
    (mpi,) = rows_of(shown, "16384", "mpi", "-")
    assert mpi[:7] == ["16384", "4096", "mpi", "-", "raw", "-", "float32"] and mpi[14] == "1.00"
    (copy,) = rows_of(shown, "16384", "memcpy")
    assert copy[13] == "-" and copy[15:] == ["1.00", "1.00", "-", "-"]  # one node: it is the bound
    for call in ("plain", "prepared", "shared"):
        assert len(rows_of(shown, "8", "2", "ring", call)) == 3  # raw, tile, aps
    assert "left out: accumulate='kahan': known are exact, grow, requantise" in shown
    (ring,) = rows_of(shown, "16384", "ring", "plain", "e4m3", "tile", "grow")
    assert 0 < float(ring[13]) < 2**-3 and float(ring[15]) > 0
    times = float(ring[7]), float(copy[7])
    ratio, rounded = times[0] / times[1], sum(0.05 / each for each in times)  # to one decimal
    assert float(ring[16]) == pytest.approx(ratio, rel=0.01 + rounded, abs=0.006)
    assert "(us)" in shown and "busbw" in shown and "kernels" in shown


def test_the_tables_are_short_and_narrow(world: World, tmp_path: Path) -> None:
    """One size: a row for each method, with the fastest of its calls; --all has every call."""
    options = ["--sizes", "16KiB", "--repeats", "2", "--warmup", "1", "--baselines", "mpi,memcpy"]
    shown = {}
    for words in (["allreduce"], ["latency"], ["allreduce", "--all"]):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            given = options[: 6 if "latency" in words else None]
            status = main(["bench", *words, *given])
        shown[tuple(words)] = status, out.getvalue()
    told = world.gather(shown)[0]
    widest = {words: max(map(len, text.splitlines())) for words, (_, text) in told.items()}
    short, every = (rows_of(told[words][1], "ring") for words in [*told][::2])
    least = {
        wire: min(float(row[7]) for row in every if row[4] == wire) for wire in ("raw", "e4m3")
    }
    verdict = (
        {status for status, _ in told.values()} == {0}
        and widest["allreduce",] <= 100
        and widest["latency",] <= 100
        and len(short) == 2
        and {len(row) for row in short} == {11}
        and len(every) == 2 * len({row[3] for row in every}) >= 4
        and min(least.values()) > 0
    )
    assert world.gather(verdict) == [True] * world.processes


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
        assert set(ours["call"].values) == {"plain"}
        assert set(samples["call"].values) == {"", "plain", "prepared", "shared"}
        copies = samples["algorithm"] == "memcpy"
        bounds = samples["bound_s"].groupby(samples["size_bytes"])
        assert all(len(set(each.values)) == 1 for _, each in bounds)  # of memory, on one node
        assert (samples["bound_s"].values[copies.values] > 0).all()
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
    assert "memcpy" in shown.split("Fastest methods")[1].split("All-reduce")[1]
    (printed,) = rows_of(runs[1], "16384", "ring", "plain", "e4m3", "tile", "grow")
    (ring,) = (
        point
        for point in file.points
        if [point.factors[name] for name in ("algorithm", "size_bytes")] == ["ring", 16384]
        and (point.factors["call"], point.factors.get("value_scaling")) == ("plain", "tile")
    )
    assert 1e6 * ring.summary["median_s"] == pytest.approx(float(printed[7]), abs=0.06)


def test_latency_has_the_columns_of_osu(runs: tuple[Path, str]) -> None:
    where, shown = runs
    table = shown[shown.rindex("# Size(B)") :]
    assert table.splitlines()[0].count("Latency(us)") == 15
    assert [row[0] for row in rows_of(table)[:3]] == ["8", "16", "32"]
    for row in rows_of(table)[:3]:
        for start in range(1, 16, 3):
            average, least, most = row[start : start + 3]
            assert float(least) <= float(average) <= float(most)
        assert row[16] == row[17]  # on one node memory is the bound
    prepared = load_study_file(where / "latency.h5").points[3::5]
    assert [p.factors["call"] for p in prepared] == ["prepared"] * 3
    assert [len(p.times_s) for p in prepared] == [3] * 3


def test_a_fit_is_shown_beside_an_earlier_one(runs: tuple[Path, str]) -> None:
    where, shown = runs
    first, again = (read_machine(where / name).fit for name in ("machine.toml", "again.toml"))
    assert first["apart_ns"] == again["apart_ns"] >= 0
    assert f"machine.toml, cores {first['apart_ns']} ns apart" in shown
    assert shown.count("of 20 predictions within 20 %") == 3


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
    assert "no contention" in shown and "one stands for all" in shown
    assert len(rows_of(shown)) == 2 * 3 * 2 and len(rows_of(shown, "*")) == 2
    assert main(["bench", "predict", str(path), "--ranks", "0"]) == 2
    assert main(["bench", "predict", str(path), "--ranks", "2", "--algorithms", "auto"]) == 0


@pytest.mark.parametrize("name", ["none", "topk", "terngrad"])
def test_replayed_gradients_have_the_figures_of_the_simulation(world, name):
    """To the bit and the byte; real ranks agree on arguments by MPI's own collectives besides."""
    values = np.random.default_rng(0).standard_normal((world.ranks, 40, 50)).astype(np.float32)
    recorded = [Gradients(t, world.ranks, {"w": values * (1 + t)}, "made") for t in range(2)]
    found, expected = (
        replay(each, COMPRESSORS[name](), recorded) for each in (world, Loopback(world.ranks))
    )
    figures = ("error", "cosine", "sum_error", "nonzero_share", "sent_share")
    alike = [repr(getattr(found, f)) == repr(getattr(expected, f)) for f in figures]
    verdicts = [*alike, found.sent_bytes.tolist() == expected.sent_bytes.tolist()]
    # Calls that come again agree in the memory of a node, or by a few numbers each.
    verdicts.append(expected.collective_bytes == 0 and found.collective_bytes < 1000)
    assert world.gather(all(verdicts)) == [True] * world.processes, verdicts


def test_bytes_to_mpi_do_not_depend_on_what_was_measured_before(world):
    """Each method on a new world, as bench compress has one for all: what is set up is not in."""
    values = np.random.default_rng(0).standard_normal((world.ranks, 40, 50)).astype(np.float32)
    recorded = [Gradients(t, world.ranks, {"w": values}, "made") for t in range(2)]
    other = World()
    first, again = (replay(other, COMPRESSORS["none"](), recorded) for _ in range(2))
    by_mpi = replay(other, NoCompression(algorithm="mpi"), recorded).collective_bytes
    other.free()
    least = values[0].nbytes if world.processes > 1 else 0
    verdict = first.collective_bytes == again.collective_bytes <= by_mpi - least < 1000
    assert world.gather(verdict) == [True] * world.processes, (first, again, by_mpi)


@pytest.mark.two_ranks
def test_split_images_beside_the_bound_of_their_links(world: World) -> None:
    """Each of four convolutions sends a row of the image, and a row of its slope back."""
    size, width, images, link_gbps = 64, 8, 3, 0.25
    options = {"sizes": size, "width": width, "images": images, "link": link_gbps, "repeats": 1}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["bench", "split", "--networks", "conv,1x1", *given])
    told = world.gather((status, out.getvalue()))
    rows = [line.split() for line in told[0][1].splitlines() if f" {size} x {size} " in line]
    sent_bytes = 4 * 2 * size * width * images * 4
    link_ms = sent_bytes * 8 / (link_gbps * 1e6)
    verdict = [status for status, _ in told] == [0] * world.processes and all(
        float(row[10]) == round(sent / 2**20, 2)
        and float(row[11]) == round(ms, 2)
        and float(row[12]) == max(float(row[7]), float(row[11]))
        and row[13].endswith("%")
        for row, sent, ms in zip(rows, (sent_bytes, 0), (link_ms, 0.0), strict=True)
    )
    assert world.gather(verdict) == [True] * world.processes, told

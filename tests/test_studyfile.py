"""The study file: its schema, three readers, the worked analysis of the page, its speed."""

import re
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import xarray
from studies import SMALL, fill, small_study, some_result
from training import ROOT

from cpdhpc import store
from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.study.collect import SUMMARY, Base, collect, find, write_study
from cpdhpc.lab.study.folder import Folder
from cpdhpc.lab.study.report import study_report
from cpdhpc.lab.study.spec import Study
from cpdhpc.lab.study_data import Result
from cpdhpc.lab.study_data.study_file import (
    OPTIONAL,
    OUTCOMES,
    load_study_file,
    read_result,
    write_result,
)

PAGE = (ROOT / "docs" / "reference" / "hdf5.md").read_text()
READERS = ("h5netcdf", "netcdf4")


def of_training(epochs: int, layers: tuple[str, ...]) -> Result:
    """A result with the series of a training."""
    plain, samples = some_result(repeats=4 * epochs), 2 * epochs
    series = {
        "training": {
            "epoch": np.arange(1, epochs + 1),
            **{
                name: np.full(epochs, 0.5)
                for name in ("test_accuracy", "test_loss", "train_loss", "epoch_time_s")
            },
        },
        "telemetry": {
            "iteration": np.arange(samples),
            "layer": np.array(layers, dtype=object),
            "underflow": np.arange(samples * len(layers)).reshape(samples, -1) / 8,
            "saturated": np.zeros((samples, len(layers))),
        },
    }
    return Result(plain.times_s, plain.is_warmup, {"accuracy": 97.5}, plain.environment, series)


def train_study(directory: Path) -> Study:
    path = directory / "trained.toml"
    path.write_text(
        "kind = 'train'\n[job.train]\nbatch = 8\n[sweep]\nseed = [0, 1]\n'train.overlap' = [true]\n"
        "[[zip]]\n'gradient.aggregator' = ['none', 'lowbit']\n'gradient.wire' = ['', 'e4m3']\n"
    )
    return load_study(path)


def trained(directory: Path) -> Path:
    """A study file of trainings with other epochs and layers."""
    study = train_study(directory)
    folder = Folder(directory / "trained")
    folder.prepare(study)
    for index, case in enumerate(expand(study).cases):
        layers = ("1.weight", "1.bias") if index < 2 else ("1.weight", "3.weight")
        result = of_training(2 + index % 2, layers)
        write_result(folder.case_file(case), case, result)
        assert (
            read_result(folder.case_file(case), case).times_s.tobytes() == result.times_s.tobytes()
        )
    collect(study, folder)
    return folder.study_file


def collected(directory: Path, **changes: Any) -> Path:
    study, folder = small_study(directory, **changes), Folder(directory / "small")
    fill(folder, study)
    collect(study, folder)
    return folder.study_file


@pytest.mark.parametrize("engine", READERS)
def test_labelled_arrays_without_glue(tmp_path: Path, engine: Any) -> None:
    path = collected(tmp_path)
    with xarray.open_dataset(path, group="samples", engine=engine) as samples:
        assert dict(samples.sizes) == {"point": 4, "repeat": 50}
        assert set(samples.coords) == {"point", "repeat"}
        assert samples["algorithm"].values.tolist() == ["ring", "mpi", "ring", "mpi"]
        assert samples["size_bytes"].attrs["units"] == "byte"
        assert samples["time_s"].attrs["units"] == "s"
        assert samples["is_warmup"].values[:, :3].tolist() == [[1, 1, 0]] * 4
        assert samples["is_warmup"].attrs["flag_meanings"] == "counts warm_up"
        assert samples["environment"].values.tolist() == [0] * 4
        assert set(OUTCOMES) - set(OPTIONAL) <= set(samples.variables)
        times = samples["time_s"].values[:, 2:]
    with xarray.open_dataset(path, group="summary", engine=engine) as summary:
        np.testing.assert_array_equal(summary["median_s"], np.median(times, axis=1))
        assert summary["n"].values.tolist() == [48] * 4
        assert summary["base_point"].values.tolist() == [0, 1, 0, 1]
        assert summary["speedup"].values[:2].tolist() == [1, 1]
        assert float(summary["speedup"][2]) == summary["median_s"][0] / summary["median_s"][2]
        assert (summary["speedup_low"] <= summary["speedup"]).all()
        assert summary.attrs["ci_level"] == 0.95
    with xarray.open_dataset(path, group="environment", engine=engine) as places:
        assert places["hosts"].values.tolist() == ["n1 n2"]
    with xarray.open_datatree(path, engine=engine) as tree:
        assert set(tree.children) == {"samples", "summary", "environment"}
        assert tree.attrs["status"] == "complete" and tree.attrs["Conventions"] == "CF-1.11"
        assert load_study(_written(tmp_path, tree.attrs["study"])).hash == tree.attrs["study_hash"]


def _written(directory: Path, text: str) -> Path:
    path = directory / "again.toml"
    path.write_text(text)
    return path


def test_every_variable_has_a_name_and_units_that_readers_know(tmp_path: Path) -> None:
    for path in (collected(tmp_path), trained(tmp_path)):
        with netCDF4.Dataset(path) as file:
            assert file.groups
            for group in file.groups.values():
                for name, variable in group.variables.items():
                    assert variable.long_name and variable.units, name
                    assert set(variable.dimensions) <= set(group.dimensions)
                    kind = variable.dtype if variable.dtype is str else variable.dtype.str[1:]
                    assert kind in (str, "f8", "i8", "u1", "i1"), name
                    _ = variable[:]


def test_trainings_have_series(tmp_path: Path) -> None:
    path = trained(tmp_path)
    with xarray.open_dataset(path, group="samples", engine="h5netcdf") as samples:
        assert samples["gradient.wire"].values.tolist() == ["", "e4m3", "", "e4m3"]
        assert samples["train.overlap"].values.tolist() == [1] * 4
        assert samples["accuracy"].values.tolist() == [97.5] * 4
        assert np.isnan(samples["time_s"].values).sum(axis=1).tolist() == [4, 0, 4, 0]
        assert np.isnan(samples["bound_s"]).all()
    with xarray.open_dataset(path, group="training", engine="h5netcdf") as training:
        assert dict(training.sizes) == {"point": 4, "epoch": 3}
        assert np.isnan(training["test_loss"].values[:, 2]).tolist() == [True, False] * 2
    with xarray.open_dataset(path, group="telemetry", engine="h5netcdf") as telemetry:
        assert telemetry["layer"].values.tolist() == ["1.weight", "1.bias", "3.weight"]
        assert telemetry["iteration"].values[0].tolist() == [0, 1, 2, 3, -1, -1]
        seen = telemetry["underflow"].sel(point=2, sample=1).values
        assert seen[[0, 2]].tolist() == [2 / 8, 3 / 8] and np.isnan(seen[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["allreduce", "train"])
def test_the_page_analyses_a_file_of_any_kind_in_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = {"allreduce": collected, "train": trained}[kind](tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    monkeypatch.chdir(path.parent)
    found: dict[str, Any] = {}
    exec(code, found)
    assert f"{kind}\ncomplete\n" in capsys.readouterr().out
    fastest, points = found["fastest"], found["points"]
    assert len(fastest) == len(points.groupby(found["same"])) >= 1
    assert fastest.median_s.min() == points.median_s.min()


def test_the_page_names_every_variable(tmp_path: Path) -> None:
    named = set(re.findall(r"`([\w.]+)`", PAGE))
    for path in (collected(tmp_path), trained(tmp_path)):
        with xarray.open_datatree(path, engine="h5netcdf") as tree:
            assert set(tree.attrs) <= named
            found = {str(name) for node in tree.children.values() for name in node.variables}
        keys = {name for name in found if "." in name}  # of a job: too many to list
        assert found - keys <= named


def points_of(study: Study) -> list[tuple[Any, ...]]:
    """Base points as (ranks, algorithm, size) of each case and of its base."""
    cases = expand(study).cases
    bases = Base.of(study).points(cases)
    told = [(c.ranks, c.factors["algorithm"], c.factors["size_bytes"]) for c in cases]
    return [(told[i], told[base] if base >= 0 else None) for i, base in enumerate(bases)]


def test_strong_bases_have_the_fewest_ranks_of_the_same_factors(tmp_path: Path) -> None:
    found = points_of(small_study(tmp_path))
    assert found == [((r, a, 4096), (1, a, 4096)) for r in (1, 2) for a in ("ring", "mpi")]


def test_a_base_that_is_named(tmp_path: Path) -> None:
    sweep = {"size_bytes": [4096, 8192]}
    named = small_study(tmp_path, base={"algorithm": "mpi", "wire": "raw", "ranks": 2}, sweep=sweep)
    assert all(base == (2, "mpi", own[2]) for own, base in points_of(named))
    same = small_study(
        tmp_path, base={"algorithm": "mpi", "wire": "raw", "ranks": "same"}, sweep=sweep
    )
    assert all(base == (own[0], "mpi", own[2]) for own, base in points_of(same))
    rule = "algorithm = mpi and wire = raw, otherwise the same settings"
    assert str(Base.of(same)) == rule
    assert str(Base.of(small_study(tmp_path, sweep=sweep))) == "same settings, fewest ranks"
    packed = small_study(
        tmp_path,
        base={"algorithm": "mpi", "wire": "raw"},
        zip=[{"wire": ["raw", "e4m3"]}],
        constraints=["not (algorithm == 'mpi' and wire != 'raw')"],
    )
    assert all(base == (1, "mpi", 4096) for _, base in points_of(packed))
    none = small_study(tmp_path, base={"algorithm": "gloo"})
    assert all(base is None for _, base in points_of(none))


def test_weak_and_throughput_compare_work_per_time(tmp_path: Path) -> None:
    own = {name: value for name, value in SMALL["sweep"].items() if name != "size_bytes"}  # type: ignore[attr-defined]
    path = tmp_path / "weak.toml"
    from cpdhpc.config import dump_toml

    path.write_text(
        dump_toml(SMALL | {"scaling": "weak", "weak": {"size_bytes": 4096}, "sweep": own})
    )
    weak = load_study(path)
    assert points_of(weak)[2:] == [((2, a, 8192), (1, a, 4096)) for a in ("ring", "mpi")]
    same = some_result()
    out = tmp_path / "weak.h5"
    write_study(out, weak, [(case, same) for case in expand(weak).cases])
    summary = store.read(out)[0]["summary"]
    assert summary["speedup"].tolist() == [1, 1, 2, 2]
    assert summary["efficiency"].tolist() == [1, 1, 1, 1]
    sizes = {"sweep": {"size_bytes": [8192, 4096]}, "scaling": "throughput"}
    through = small_study(tmp_path, **sizes)
    assert points_of(through)[:2] == [
        ((1, "ring", 8192), (1, "ring", 4096)),
        ((1, "mpi", 8192), (1, "mpi", 4096)),
    ]
    write_study(out, through, [(case, same) for case in expand(through).cases])
    summary = store.read(out)[0]["summary"]
    assert summary["speedup"].tolist() == summary["efficiency"].tolist() == [2, 2, 1, 1] * 2


def test_a_partial_study_says_so(tmp_path: Path) -> None:
    study, folder = small_study(tmp_path), Folder(tmp_path / "small")
    cases = expand(study).cases
    fill(folder, study, cases[2:])
    collect(study, folder)
    groups, attributes = store.read(folder.study_file)
    assert attributes["status"] == "partial" and attributes["missing"] == 2
    assert groups["summary"]["base_point"].tolist() == [0, 1]
    assert set(SUMMARY) <= set(groups["summary"])


def test_thousands_of_points_are_collected(tmp_path: Path) -> None:
    """2,000 points of 50 repeats, from a few files; docs/reference/hdf5.md has the times."""
    sizes = [1024 * k for k in range(1, 501)]
    study = small_study(tmp_path, sweep={"size_bytes": sizes})
    folder, cases = Folder(tmp_path / "small"), expand(study).cases
    fill(folder, study, cases[:20])
    found = find(folder, cases[:20])
    assert len(found.results) == 20 and not found.missing
    result = found.results[0][1]
    write_study(folder.study_file, study, [(case, result) for case in cases])
    with xarray.open_dataset(folder.study_file, group="samples", engine="h5netcdf") as samples:
        assert dict(samples.sizes) == {"point": 2000, "repeat": 50}


def test_two_libraries_are_a_factor_and_never_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, folder = small_study(tmp_path), Folder(tmp_path / "small")
    cases = fill(folder, study)  # on 1 rank ring and mpi, then on 2
    for index, case in enumerate(cases):
        plain = some_result(index)
        where = {"mpi_library": "one" if index < 3 else "other"}
        result = Result(plain.times_s, plain.is_warmup, plain.outcomes, where)
        write_result(folder.case_file(case), case, result)
    collect(study, folder)
    assert "mpi_library is a factor, as the cases differ in it: " in capsys.readouterr().out
    groups, _ = store.read(folder.study_file)
    assert groups["samples"]["mpi_library"].tolist() == ["one", "one", "one", "other"]
    assert groups["summary"]["base_point"].tolist() == [0, 1, 0, 3], "3 has no base but itself"
    file = load_study_file(folder.study_file)
    assert not [each for each in study_report(file).listed if "missing" in each.what]

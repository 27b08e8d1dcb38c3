"""Files appear whole or not at all, and xarray reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray
from training import ROWS, run_job, small_job

from cpdhpc import store
from cpdhpc.store import StoreError, Variable
from cpdhpc.world.ranks import Loopback


def groups() -> dict[str, dict[str, Variable]]:
    return {
        "table": {
            "value": Variable(("row", "kind"), np.arange(6.0).reshape(3, 2), "a value", "s"),
            "row": Variable(("row",), np.array([3, 5, 7]), "a row"),
            "kind": Variable(("kind",), np.array(["left", "right"]), "a kind"),
        }
    }


def test_xarray_sees_labels_units_and_names(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    store.write(path, groups(), {"status": "complete"})
    with xarray.open_dataset(path, group="table", engine="h5netcdf", decode_timedelta=False) as x:
        assert x["value"].dims == ("row", "kind")
        assert float(x["value"].sel(row=5, kind="right")) == 3.0
        assert x["value"].attrs == {"units": "s", "long_name": "a value"}
    read, attributes = store.read(path)
    assert read["table"]["kind"].tolist() == ["left", "right"]
    assert attributes == store.read_attributes(path) == {"status": "complete"}


@pytest.mark.parametrize("row", ["float32", "aps"])
def test_a_run_opens_with_xarray_group_by_group(tmp_path: Path, row: str) -> None:
    training = run_job(small_job(gradient=ROWS[row]), Loopback(virtual_ranks=3), tmp_path)
    path = training.files.record
    for group, dims in {
        "steps": {"iteration": 10, "phase": 4, "rank": 3},
        "epochs": {"epoch": 2},
        "layers": {"iteration": 5, "layer": 4},
    }.items():
        with xarray.open_dataset(path, group=group, engine="h5netcdf") as dataset:
            assert dict(dataset.sizes) == dims
            assert set(dims) == set(dataset.coords)
            for name in dataset.variables:
                assert dataset[name].attrs["long_name"], name
                assert dataset[name].dtype not in (np.float16, np.bool_)
    with xarray.open_dataset(path, group="steps", engine="h5netcdf") as steps:
        assert (steps["wire_bytes"].sum("rank") > 0).all()
        assert steps["loss"].attrs["units"] == "nat"
    attributes = store.read_attributes(path)
    assert attributes["status"] == "complete"
    assert attributes["toml"] == training.job.toml()
    assert {"schema", "date", "hosts", "ranks", "versions", "cpu_clone"} <= attributes.keys()


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    store.write(path, groups(), {"status": "old"})
    with pytest.raises(TypeError):
        store.write(path, groups(), {"status": object()})
    assert store.read_attributes(path) == {"status": "old"}
    assert [file.name for file in tmp_path.iterdir()] == ["x.h5"]


@pytest.mark.parametrize("dtype", [np.float16, np.bool_])
def test_types_that_netcdf_lacks_are_refused(dtype: type) -> None:
    with pytest.raises(ValueError, match="netCDF4 has none"):
        Variable(("x",), np.zeros(3, dtype), "a value")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with pytest.raises(StoreError, match=r"x\.h5: there is no such file"):
        store.read(path)
    path.write_bytes(b"no HDF5")
    for read in (store.read, store.read_attributes):
        with pytest.raises(StoreError, match=r"x\.h5: is not an HDF5 file"):
            read(path)

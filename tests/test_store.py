"""Files appear whole or not at all, and xarray reads them."""

import errno
import hashlib
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray
from every import every
from training import ROWS, run_job, small_job

from cpdhpc import store
from cpdhpc.config import UserError, dump_toml, read_toml
from cpdhpc.darray import DistArray, Layout
from cpdhpc.lab.report.trainings import load_run
from cpdhpc.lab.train import gradients
from cpdhpc.lab.train import job as jobs
from cpdhpc.store import StoreError, Variable
from cpdhpc.torch import GradientReducer
from cpdhpc.torch.precision import Recorder, recording
from cpdhpc.torch.quantized import load
from cpdhpc.torch.quantized.integers import Flatten, Input, IntegerNetwork
from cpdhpc.world import files
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


def test_content_is_on_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    rename = Path.replace

    def sync(descriptor: int) -> None:
        done.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))

    def replace(path: Path, target: Path) -> Path:
        done.append(("replace", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    for write in (lambda path: store.write(path, groups(), {}), lambda path: store.put(path, "x")):
        done.clear()
        write(tmp_path / "x.h5")
        content, *others = done
        assert content[0] == "sync" and re.fullmatch(r"\.x\.h5\..*\.tmp", content[1])
        assert others == [("replace", "x.h5"), ("sync", tmp_path.name)]


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


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Writing beyond that is an error of the system, as where a disk is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


ARRAY = np.arange(30_000.0)
ROOMS = {"a": store.Room(ARRAY.shape, ARRAY.dtype)}


def save_together(path: Path, chunks: tuple[int, ...] | None = None) -> None:
    """As files are written that all processes write."""

    def fill(temporary: Path, offsets: files.Offsets) -> None:
        if offsets["a"] is None:
            store.write_box(temporary, "a", (slice(None),), ARRAY)
        else:
            world.write_box(temporary, offsets["a"], ARRAY.shape, (0,), ARRAY)

    world = Loopback()
    files.save(world, path, ROOMS, {"kind": "state"}, fill, chunks)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "whole": lambda path: store.write(path, {"g": {"a": ARRAY}}, {}),
    "together": save_together,
    "in chunks": lambda path: save_together(path, (100,)),
    "text": lambda path: store.put(path, "x" * 300_000),
}


@every("limit", [100, 700, 3000, 9000, 100_000])
@every("writer", WRITERS)
def test_a_full_disk_is_one_line_and_the_old_file_stays(
    tmp_path: Path, writer: str, limit: int
) -> None:
    """From the first byte to the last: HDF5 crashes where it is told of it at its close."""
    path = tmp_path / "x.h5"
    path.write_bytes(b"old")
    with files_of_at_most(limit), pytest.raises(UserError) as raised:
        WRITERS[writer](path)
    assert str(raised.value) == f"{path}: cannot be written: {os.strerror(errno.EFBIG)}"
    assert [each.name for each in tmp_path.iterdir()] == ["x.h5"]
    assert path.read_bytes() == b"old"


def read_together(path: Path) -> None:
    with files.opened(Loopback(), path) as (file, _):
        store.read_box(file, "a", (slice(None),))


READERS = {
    "whole": (store.read, store.read_attributes),
    "together": (read_together, store.read_attributes),
    "in chunks": (read_together,),
}


@every("writer", READERS)
def test_every_bit_of_a_file_is_covered(tmp_path: Path, writer: str) -> None:
    """Flipped in the header, in HDF5's own blocks, in the values; and files cut or lengthened."""
    path = tmp_path / "x.h5"
    WRITERS[writer](path)
    whole = path.read_bytes()
    bits = np.random.default_rng(1).integers(0, 8 * len(whole), 20).tolist()
    damaged = [whole[:-1], whole + b"\0", whole[:512], b""]
    for bit in (0, 8 * 7, 8 * 100, 8 * 511, 8 * 512, 8 * 600, *bits):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        for read in READERS[writer]:
            with pytest.raises(StoreError, match=r"x\.h5: is (damaged|not an HDF5 file)"):
                read(path)
    path.write_bytes(whole)
    for read in READERS[writer]:
        read(path)


def test_a_checksum_is_that_of_its_blocks_whoever_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small blocks, by one process and by parts; h5py reads the file as any other."""
    monkeypatch.setattr(store, "BLOCK", 1000)
    path = tmp_path / "x.h5"
    for writer in READERS:
        WRITERS[writer](path)
        content = path.read_bytes()
        blocks = [content[start : start + 1000] for start in range(512, len(content), 1000)]
        digests = b"".join(hashlib.sha256(block).digest() for block in blocks)
        assert content[:512].rstrip(b"\0\n").endswith(hashlib.sha256(digests).hexdigest().encode())
        with path.open("rb") as file:
            for parts in (1, 2, 7, 1000):
                found = [d for part in range(parts) for d in store.block_digests(file, part, parts)]
                assert b"".join(found) == digests
        with h5py.File(path) as file:
            name = "g/a" if writer == "whole" else "a"
            assert np.array_equal(file[name][...], ARRAY)


def test_what_is_read_is_what_was_checked_though_another_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.h5"
    check = store.check

    def replaced_then(*arguments: Any) -> str:
        found = check(*arguments)
        store.write(path, {"g": {"a": ARRAY[:9]}}, {"is": "new"})
        return found

    for read in (
        lambda: store.read(path)[0]["g"]["a"],
        lambda: DistArray.load(Loopback(), path, Layout.grid(ARRAY.shape, (1,)), "g/a").local,
    ):
        store.write(path, {"g": {"a": ARRAY}}, {"is": "old"})
        with monkeypatch.context() as patch:
            patch.setattr(store, "check", replaced_then)
            assert np.array_equal(read(), ARRAY)
        assert store.read_attributes(path) == {"is": "new"}


def test_files_of_other_programs_are_read_without_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["g/a"] = ARRAY
    assert np.array_equal(store.read(path)[0]["g"]["a"], ARRAY)
    with files.opened(Loopback(), path) as (_, checksum):
        assert checksum == ""


def test_only_files_of_the_same_kind_are_replaced(tmp_path: Path) -> None:
    record, data, text = tmp_path / "run.h5", tmp_path / "data.h5", tmp_path / "notes.txt"
    store.write(record, {"x": {"y": np.zeros(3)}}, {"kind": "run"})
    with h5py.File(data, "w") as file:
        file["x"] = np.zeros(3)
    text.write_text("mine")
    store.check_target(record, "run")
    store.check_target(tmp_path / "new.h5", "run")
    for path in (record, data, text):
        with pytest.raises(store.StoreError, match=f"{path.name}: exists, and is not a file"):
            store.check_target(path, "influence")
    with pytest.raises(store.StoreError, match="directory is missing or read-only"):
        store.check_target(tmp_path / "nowhere" / "x.h5", "run")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_may_be_text(tmp_path: Path, kind: type[str] | type[Path]) -> None:
    def at(name: str) -> Any:
        return kind(tmp_path / name)

    store.write(at("x.h5"), groups(), {"status": "complete"})
    assert store.read(at("x.h5"))[1] == store.read_attributes(at("x.h5"))
    network = IntegerNetwork([Input(2), Flatten()])
    network.save(at("net.h5"), {})
    assert load(at("net.h5")).layers == network.layers
    layout = Layout.grid((4,), (1,))
    DistArray(Loopback(), layout, np.arange(4.0)).save(at("a.h5"))
    assert DistArray.load(Loopback(), at("a.h5"), layout).local.tolist() == [0, 1, 2, 3]
    model = torch.nn.Linear(2, 2)
    reducer = GradientReducer(model, Loopback())
    with Recorder(model, at("r.h5"), reducer, every=1, tensors=["gradients"]) as recorder:
        model(torch.ones(1, 2)).sum().backward()
        mean = reducer.reduce()
        recorder.step(mean)
    gradients.save(reducer, at("g.h5"), 0)
    for name in ("r.h5", "g.h5"):
        assert recording.load(at(name)).iterations == [0]
        assert gradients.load_all(at(name))[0].iteration == 0
    assert gradients.load(at("g.h5")).iteration == 0
    done = run_job(small_job(), Loopback(), tmp_path).files.record
    assert load_run(kind(done)).path == done
    job = tmp_path / "job.toml"
    job.write_text(dump_toml(small_job().model_dump(exclude_defaults=True)))
    assert read_toml(at("job.toml")) and jobs.load(at("job.toml"))[0].name == "small"

"""Distributed arrays in files: one ordinary dataset, whoever writes and reads it."""

import resource
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import torch
import xarray
from darray_cases import any_bits, draw_layout
from verdicts import together

from cpdhpc import store
from cpdhpc.config import UserError
from cpdhpc.darray.array import DistArray
from cpdhpc.darray.layout import Box, Layout
from cpdhpc.world.mpi import World

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", ">f4"]


def whole(path: Path, name: str = "data") -> np.ndarray:
    """The dataset, by h5py alone."""
    with h5py.File(path) as file:
        return file[name][...]


def drawn(world: World, number: int) -> tuple[Layout, Layout, np.ndarray]:
    """Two layouts of a domain and an array, alike on all ranks."""
    rng = np.random.default_rng((number, world.size))
    shape = tuple(rng.integers(1, 7, rng.integers(1, 4)).tolist())
    one, other = draw_layout(rng, shape, world.size), draw_layout(rng, shape, world.size)
    trail = tuple(rng.integers(1, 4, rng.integers(0, 3)).tolist())
    return one, other, any_bits(rng, shape + trail, DTYPES[number % len(DTYPES)])


def test_a_saved_array_is_the_whole_one_in_any_layout(world: World, folder: Path) -> None:
    for number in range(2 * len(DTYPES)):
        one, other, data = drawn(world, number)
        path = folder / f"{number}.h5"
        DistArray.from_global(world, one, data).save(path)
        again = DistArray.load(world, path, other)
        want = DistArray.from_global(world, other, data).local
        found = whole(path)
        together(
            world,
            found.dtype == data.dtype and found.shape == data.shape,
            found.tobytes() == data.tobytes(),
            again.local.dtype == data.dtype and again.local.tobytes() == want.tobytes(),
            [p.name for p in folder.glob(".*")] == [],
        )


def test_written_by_some_ranks_and_read_by_others(world: World, folder: Path) -> None:
    """By 1, 2, ... ranks, each time read by all; and the other way round."""
    for writers in range(1, world.size + 1):
        part = world.part(range(writers))
        data = np.random.default_rng(writers).standard_normal((7, 5, 2)).astype(np.float32)
        if part is not None:
            layout = Layout.grid((7, 5), (1, writers))
            DistArray.from_global(part, layout, data).save(folder / "one.h5", "field")
        world.barrier()
        rows = Layout.grid((7, 5), (world.size, 1))
        all_of_it = DistArray.load(world, folder / "one.h5", rows, "field")
        all_of_it.save(folder / "two.h5", "field")
        good = True
        if part is not None:
            layout = Layout.grid((7,), (writers,))  # axes behind are whole
            local = DistArray.load(part, folder / "two.h5", layout, "field")
            good = local.gather().tobytes() == data.tobytes()
            part.free()
        together(world, good, whole(folder / "two.h5", "field").tobytes() == data.tobytes())


@pytest.mark.parametrize("how", [{"chunks": (2, 3)}, {"compression": "gzip"},
                                 {"chunks": (3, 1), "compression": "lzf"}], ids=str)  # fmt: skip
def test_chunks_and_compression_are_written_in_turns(
    world: World, folder: Path, how: dict[str, Any]
) -> None:
    rng = np.random.default_rng(3)
    data, layout = rng.standard_normal((6, 5)), draw_layout(rng, (6, 5), world.size)
    DistArray.from_global(world, layout, data).save(folder / "c.h5", **how)
    with h5py.File(folder / "c.h5") as file:
        dataset = file["data"]
        good = dataset.chunks is not None and dataset.compression == how.get("compression")
        same = dataset[...].tobytes() == data.tobytes()
    loaded = DistArray.load(world, folder / "c.h5", Layout.grid((6, 5), (1, world.size)))
    together(world, good, same, loaded.gather().tobytes() == data.tobytes())


def test_xarray_opens_it_and_an_old_file_is_replaced(world: World, folder: Path) -> None:
    layout, path = Layout.grid((4, 6), (1, world.size)), folder / "x.h5"
    for value in (1.0, 2.0):
        DistArray.from_global(world, layout, np.full((4, 6), value)).save(path)
    with xarray.open_dataset(path, engine="h5netcdf", phony_dims="sort") as dataset:
        together(world, (dataset["data"].values == 2).all(), dataset["data"].shape == (4, 6))


def test_a_layout_of_many_ranks_has_no_room_in_attributes(tmp_path: Path) -> None:
    from cpdhpc.darray import array
    from cpdhpc.world.ranks import Loopback

    class Many(Loopback):
        """The first of 1,500 ranks, all others of which own nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.size = 1500

    layout = Layout.at((2, 2, 2), 0, 1500)
    array.save_all(Many(), tmp_path / "many.h5", {"data": (layout, np.ones((2, 2, 2)))}, {})
    assert (whole(tmp_path / "many.h5") == 1).all()


def wrong(world: World, folder: Path) -> dict[str, Any]:
    """What cannot be saved or loaded: what is said -> a call."""
    layout = Layout.grid((4,), (world.size,))
    last = world.rank == world.size - 1
    array = DistArray.from_global(world, layout, np.arange(4.0))
    typed = DistArray(world, layout, array.local.astype(np.float32 if last else np.float64))
    wider = DistArray(world, layout, np.zeros((*array.local.shape, 2 if last else 3)))
    other = Layout.boxes((4,), [*(Box((0,), (0,)),) * (world.size - 1), Box((0,), (4,))])
    (folder / "text.h5").write_text("this is not HDF5")
    return {
        "No such file": lambda: array.save(folder / "missing" / "x.h5"),
        "Not a directory": lambda: array.save(folder / "text.h5" / "x.h5"),
        "float32": lambda: typed.save(folder / "x.h5"),
        r"\(2,\)": lambda: wider.save(folder / "x.h5"),
        "chunks": lambda: array.save(folder / "x.h5", chunks=(1 + last,)),
        "name": lambda: array.save(folder / "x.h5", "b" if last else "a"),
        "same rank as dataset": lambda: array.save(folder / "x.h5", chunks=(2, 2)),
        "nope": lambda: array.save(folder / "x.h5", compression="nope"),
        "no native HDF5": lambda: DistArray(
            world, layout, np.zeros(array.local.shape, object)
        ).save(folder / "x.h5"),
        "save: local: dtype=bfloat16: must be one of NumPy's own": lambda: DistArray(
            world, layout, torch.zeros(array.local.shape, dtype=torch.bfloat16)
        ).save(folder / "x.h5"),
        "save: local: dtype=float8_e4m3fn: must be one of NumPy's own": lambda: DistArray(
            world, layout, np.zeros(array.local.shape, ml_dtypes.float8_e4m3fn)
        ).save(folder / "x.h5"),
        "no such file": lambda: DistArray.load(world, folder / "none.h5", layout),
        "not an HDF5 file": lambda: DistArray.load(world, folder / "text.h5", layout),
        f"{folder}: cannot be read": lambda: DistArray.load(
            world, folder if last else folder / "good.h5", layout
        ),
        "no dataset 'other', only data": lambda: DistArray.load(
            world, folder / "good.h5", layout, "other"
        ),
        r"shape \(4,\): the layout has \(5,\)": lambda: DistArray.load(
            world, folder / "good.h5", Layout.grid((5,), (world.size,))
        ),
        "another layout": lambda: DistArray(
            world, other if last else layout, np.zeros(4) if last else array.local
        ).save(folder / "x.h5"),
    }


def test_errors_are_alike_on_all_ranks_and_leave_nothing(world: World, folder: Path) -> None:
    layout = Layout.grid((4,), (world.size,))
    DistArray.from_global(world, layout, np.arange(4.0)).save(folder / "good.h5")
    cases = wrong(world, folder)
    world.barrier()
    for text, call in cases.items():
        with pytest.raises((UserError, TypeError, ValueError), match=text) as raised:
            call()
        everyone = world.gather((type(raised.value), str(raised.value)))
        together(world, all(each == everyone[0] for each in everyone))
    together(world, {p.name for p in folder.iterdir()} == {"good.h5", "text.h5"})


@pytest.mark.parametrize("how", [{}, {"chunks": (16, 16)}], ids=["at once", "in turns"])
def test_a_rank_that_cannot_write_is_every_ranks_error(
    world: World, folder: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the size of files, once there is one, takes the place of a full disk.

    On two ranks: of more, Open MPI lets one write for all, and if that fails the others stay in
    MPI's collective write until the time-out ends the job.
    """
    part = world.part(range(min(2, world.size)), timeout_s=600)
    if part is not None:
        check_that_nothing_is_lost(part, folder, how, monkeypatch)
        part.free()
    world.barrier()


def check_that_nothing_is_lost(
    world: World, folder: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, path = Layout.grid((64, 64), (world.size, 1)), folder / "full.h5"
    array = DistArray.from_global(world, layout, np.ones((64, 64)))
    array.save(path)
    before = path.read_bytes()
    world.barrier()
    limits, create = resource.getrlimit(resource.RLIMIT_FSIZE), store.create

    def full(*arguments: Any) -> Any:
        place = create(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        return place

    monkeypatch.setattr(store, "create", full)  # rank 0 calls it
    if world.rank != 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match=r"full\.h5: cannot be written: "):
            DistArray(world, layout, 2 * array.local).save(path, **how)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    together(world, path.read_bytes() == before, [p.name for p in folder.iterdir()] == ["full.h5"])

"""Distributed arrays in files: several in one, any ranks, any layout, whole or not at all."""

import h5py
import numpy as np
import pytest
from verdicts import together

from cpdhpc import store
from cpdhpc.config import UserError
from cpdhpc.darray.array import DistArray, save_all
from cpdhpc.darray.layout import Box, Layout
from cpdhpc.world.ranks import Loopback


def arrays(world):
    """Wholes and parts: uneven, all at the last rank, and of two dtypes; one without any byte."""
    rows, last = (Layout.grid((7, 3), (world.size, 1)), Layout.at((5,), world.size - 1, world.size))
    wholes = {
        "a/weight": np.arange(42, dtype=np.float32).reshape(7, 3, 2),
        "a/momentum": -np.arange(21.0).reshape(7, 3),
        "b": np.arange(5, dtype=np.int16),
        "none": np.empty((7, 3, 0)),
    }
    layouts = {"a/weight": rows, "a/momentum": rows, "b": last, "none": rows}
    parts = {
        name: (layout, DistArray.from_global(world, layout, wholes[name]).local)
        for name, layout in layouts.items()
    }
    return wholes, parts


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_several_arrays_are_one_ordinary_file(world, folder, compression):
    path, (wholes, parts) = folder / "x.h5", arrays(world)
    if compression is not None:
        del parts["none"]  # HDF5 has no chunks of nothing
    save_all(world, path, parts, {"step": 7}, compression=compression)
    with h5py.File(path) as file:
        plain = [np.array_equal(file[name], wholes[name]) for name in parts]
        plain += [file[name].dtype == wholes[name].dtype for name in parts]
        together(world, *plain, file.attrs["step"] == 7, len(file) == len(parts) - 1)
    other = Layout.grid((7, 3), (1, world.size))
    mine = DistArray.load(world, path, other, "a/weight").local
    alone = DistArray.load(Loopback(), path, Layout.grid((7, 3), (1, 1)), "a/momentum").local
    place = other.owner(world.rank).slices((0, 0))
    together(
        world,
        np.array_equal(mine, wholes["a/weight"][place]),
        np.array_equal(alone, wholes["a/momentum"]),
    )
    world.barrier()


def test_arrays_that_differ_between_ranks_are_refused(world, folder):
    path, (_, parts) = folder / "x.h5", arrays(world)
    if world.rank == world.size - 1:
        parts["c"] = parts.pop("b")
    if world.size > 1:
        with pytest.raises(ValueError, match=rf"ranks 0 and {world.size - 1} have arrays"):
            save_all(world, path, parts, {})
    parts = {"b": (Layout.grid((world.size,), (world.size,)), np.zeros(2))}
    with pytest.raises(ValueError, match="b: the array of rank 0 does not have the shape of its"):
        save_all(world, path, parts, {})
    together(world, not path.exists())
    world.barrier()


def test_what_cannot_be_written_leaves_what_was_there(world, folder):
    path, (_, parts) = folder / "x.h5", arrays(world)
    save_all(world, path, parts, {"step": 1})
    before = path.read_bytes()
    world.barrier()
    bad = {"b": parts["b"], "b/c": parts["b"]}  # a dataset is no group
    with pytest.raises(UserError, match=r"/x\.h5"):
        save_all(world, path, bad, {"step": 2})
    together(world, path.read_bytes() == before, list(path.parent.iterdir()) == [path])
    world.barrier()


def test_boxes_of_very_many_ranks_are_written_beside_the_data(tmp_path):
    """128 KiB of attributes: more than the 64 KiB that old HDF5 files have room for."""
    boxes = np.array([Box((i, 0), (i + 1, 8)) for i in range(4096)], np.int64)
    room = store.Room((4096, 8), np.float32, {"layout": boxes})
    with store.replacing(tmp_path / "x.h5") as written:
        offsets = store.create(written, {"data": room}, {})
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["data"].id.get_offset() == offsets["data"]
        np.testing.assert_array_equal(file["data"].attrs["layout"], boxes)

"""HDF5 files that appear whole or not at all; the only importer of h5py."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .config import UserError

Array = npt.NDArray[Any]
Attributes = Mapping[str, Any]


class StoreError(UserError):
    """A file that is missing or not what it should be."""


@dataclass(frozen=True)
class Variable:
    """An array with named dimensions, as netCDF and xarray see it.

    A variable whose only dimension has its own name labels that dimension.
    notes: further attributes of it, as CF's flag_values
    Raises ValueError for float16 and bool, which netCDF4 readers cannot take.
    """

    dims: tuple[str, ...]
    data: Array
    long_name: str
    units: str = "1"
    notes: Attributes = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.data.dtype in (np.float16, np.bool_):
            raise ValueError(
                f"Variable: {self.long_name}: dtype={self.data.dtype}: netCDF4 has none"
            )
        if self.data.ndim != len(self.dims):
            raise ValueError(
                f"Variable: {self.long_name}: {self.data.ndim} dimensions, names {self.dims}"
            )


Group = Mapping[str, Variable | Array]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file takes path's place at the end, unless an error comes.

    At any moment, be it of a kill or a crash, path holds the old content or the new one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(
    path: Path,
    groups: Mapping[str, Group],
    attributes: Attributes,
    of_groups: Mapping[str, Attributes] | None = None,
) -> None:
    """Write arrays, group by group, to a new file that takes path's place when complete.

    groups: of labelled Variables, or of plain arrays, which get no dimensions
    attributes: of the file; of_groups: of some groups
    xarray.open_dataset(path, group=name, engine="h5netcdf") reads labelled groups back.
    """
    import h5py

    with replacing(path) as temporary, h5py.File(temporary, "w") as file:
        file.attrs.update(attributes)
        for name, group in groups.items():
            _write_group(file.create_group(name), group)
        for name, notes in (of_groups or {}).items():
            file[name].attrs.update(notes)


def _write_group(target: Any, group: Group) -> None:
    labelled = {name: item for name, item in group.items() if isinstance(item, Variable)}
    labels = {name for name, variable in labelled.items() if variable.dims == (name,)}
    for name in group.keys() - labelled.keys():
        target.create_dataset(name, data=group[name])
    for name in sorted(labelled, key=lambda name: name not in labels):  # labels first
        variable = labelled[name]
        dataset = target.create_dataset(name, data=_storable(variable.data))
        dataset.attrs["long_name"], dataset.attrs["units"] = variable.long_name, variable.units
        dataset.attrs.update(variable.notes)
        if name in labels:
            dataset.make_scale(name)
            continue
        for axis, dim in enumerate(variable.dims):
            dataset.dims[axis].attach_scale(target[dim])


def _storable(data: Array) -> Any:
    return data.astype(object) if data.dtype.kind == "U" else data


def read(
    path: Path, only: Collection[str] | None = None
) -> tuple[dict[str, dict[str, Array]], dict[str, Any]]:
    """Return the arrays of each group, and the attributes, of a file that write made.

    only: the names of the arrays that are wanted, None for all
    Raises StoreError where the file is missing or is not HDF5.
    """
    import h5py

    try:
        with h5py.File(path, "r") as file:
            groups = {
                name: {key: _readable(group[key]) for key in group if only is None or key in only}
                for name, group in file.items()
            }
            return groups, {key: _plain(value) for key, value in file.attrs.items()}
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file") from None
    except (OSError, AttributeError, KeyError, RuntimeError) as error:  # the latter: damaged
        raise StoreError(f"{path}: is not an HDF5 file of cpdhpc: {error}") from None


def read_attributes(path: Path, group: str = "/") -> dict[str, Any]:
    """Return only the attributes of a file, or of a group in it. Raises StoreError as read does."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            return {key: _plain(value) for key, value in file[group].attrs.items()}
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file") from None
    except OSError as error:
        raise StoreError(f"{path}: is not an HDF5 file: {error}") from None


def _readable(dataset: Any) -> Array:
    import h5py

    if h5py.check_string_dtype(dataset.dtype) is not None:
        return np.asarray(dataset.asstr()[...], dtype=str)
    return np.asarray(dataset[...])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


@contextmanager
def _closing(path: Path) -> Iterator[None]:
    """Turn what h5py raises where a file cannot be closed, as on a full disk, into StoreError."""
    try:
        yield
    except RuntimeError as error:
        raise StoreError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Room:
    """A dataset that is to be made: its shape and dtype, and what is written beside it."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    attributes: Attributes = field(default_factory=dict)


def create(
    path: Path,
    rooms: Mapping[str, Room],
    attributes: Attributes,
    chunks: tuple[int, ...] | None = None,
    compression: str | None = None,
) -> dict[str, int | None]:
    """Make a file with datasets without data; return the offset of each one's first byte in it.

    With chunks or compression data has no fixed place: None. A dataset without any byte: None.
    Source of the layout: HDF5 File Format Specification, data layout message, contiguous storage.
    Raises StoreError where HDF5 has no such type, chunks or compression.
    """
    import h5py

    offsets = {}
    # Attributes above 64 KiB, as the boxes of many ranks, came with the format of HDF5 1.8.
    with _closing(path), h5py.File(path, "w", libver=("v108", "v108")) as file:
        file.attrs.update(attributes)
        for name, room in rooms.items():
            try:
                dataset = _make(file, name, room, chunks, compression)
            except (TypeError, ValueError) as error:
                raise StoreError(f"{path}: dataset {name!r} of {room.dtype}: {error}") from None
            dataset.attrs.update(room.attributes)
            offsets[name] = dataset.id.get_offset()
    return offsets


def _make(file: Any, name: str, room: Room, chunks: Any, compression: str | None) -> Any:
    import h5py

    if chunks is not None or compression is not None:
        options = {"chunks": True if chunks is None else chunks, "compression": compression}
        return file.create_dataset(name, room.shape, room.dtype, **options)
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_layout(h5py.h5d.CONTIGUOUS)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return file.create_dataset(name, room.shape, room.dtype, dcpl=early)


def write_box(path: Path, name: str, box: tuple[slice, ...], data: Array) -> None:
    """Write a box of a dataset that is there. Raises OSError or StoreError where it cannot."""
    import h5py

    # Without a cache of chunks a full disk is an error of the assignment: where it is one of close,
    # HDF5 crashes.
    with _closing(path), h5py.File(path, "r+", rdcc_nbytes=0) as file:
        file[name][box] = data


def dataset_shape(path: Path, name: str) -> tuple[int, ...]:
    """Return the shape of a dataset. Raises StoreError where file or dataset is missing."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            if not isinstance(file.get(name), h5py.Dataset):
                known = _dataset_names(file)
                raise StoreError(
                    f"{path}: has no dataset {name!r}, only {', '.join(known) or 'none at all'}"
                )
            return tuple(file[name].shape)
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file") from None
    except OSError as error:
        raise StoreError(f"{path}: is not an HDF5 file: {error}") from None


def _dataset_names(file: Any) -> list[str]:
    """Return the names of all datasets of a file, with their groups."""
    import h5py

    names = list[str]()
    file.visititems(
        lambda name, each: names.append(name) if isinstance(each, h5py.Dataset) else None
    )
    return names


def datasets(path: Path) -> dict[str, dict[str, Any]]:
    """Return the datasets of a file, in all groups, with their attributes.

    Raises StoreError where the file is missing or is not HDF5.
    """
    import h5py

    found: dict[str, dict[str, Any]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = {key: _plain(value) for key, value in item.attrs.items()}

    try:
        with h5py.File(path, "r") as file:
            file.visititems(visit)
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file") from None
    except (OSError, KeyError, RuntimeError) as error:  # the latter: damaged
        raise StoreError(f"{path}: is not an HDF5 file of cpdhpc: {error}") from None
    return found


def read_box(path: Path, name: str, box: tuple[slice, ...]) -> Array:
    """Return a box of a dataset that is there."""
    import h5py

    with h5py.File(path, "r") as file:
        return np.asarray(file[name][box])

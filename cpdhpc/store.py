"""HDF5 files that appear complete or not at all, each with a checksum; only this file uses h5py."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfileobj
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .ordinary import open_ordinary
from .partition import split
from .whole_files import StoreError as StoreError
from .whole_files import open_own
from .whole_files import put as put
from .whole_files import put_figure as put_figure
from .whole_files import replacing as replacing

Array = npt.NDArray[Any]
Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Variable:
    """An array with named dimensions, as in netCDF and xarray.

    A variable whose only dimension has its own name labels that dimension.
    data: an array, or values of which one is made
    notes: its further attributes, for example CF's flag_values
    Raises ValueError for float16 and bool, which netCDF4 readers cannot read.
    """

    dims: tuple[str, ...]
    data: Any
    long_name: str
    units: str = "1"
    notes: Attributes = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", np.asarray(self.data))
        if self.data.dtype in (np.float16, np.bool_):
            raise ValueError(
                f"Variable: {self.long_name}: dtype={self.data.dtype}: netCDF4 has none"
            )
        if self.data.ndim != len(self.dims):
            raise ValueError(
                f"Variable: {self.long_name}: {self.data.ndim} dimensions, names {self.dims}"
            )


Group = Mapping[str, Variable | Array]


# A user block of HDF5, which its readers skip, holds a digest of all later bytes. It is the digest
# of the digests of blocks, so that many processes can compute it together.
USER_BLOCK = 512
BLOCK = 4 * 2**20
MAGIC = b"cpdhpc file 1: "
SIGNATURE = b"\x89HDF\r\n\x1a\n"  # of HDF5; at byte 0 in other programs' and cpdhpc 0.1.0's files
UNREADABLE = (OSError, AttributeError, KeyError, RuntimeError, TypeError, MemoryError)  # of h5py


def _header(digests: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256(b"".join(digests)).hexdigest()
    text = f"SHA-256 of the SHA-256 of each 4 MiB behind byte {USER_BLOCK}: {digest}\n"
    return (MAGIC + text.encode()).ljust(USER_BLOCK, b"\0")


def block_digests(file: io.BufferedReader, part: int = 0, parts: int = 1) -> list[bytes]:
    """Return the SHA-256 of each block of one of parts of equal size of a file."""
    size = max(0, os.fstat(file.fileno()).st_size - USER_BLOCK)
    start, stop = split(-(-size // BLOCK), parts, part)
    file.seek(USER_BLOCK + start * BLOCK)
    block = memoryview(bytearray(min(size, BLOCK)))  # reused: fresh memory takes longer
    return [hashlib.sha256(block[: file.readinto(block)]).digest() for _ in range(start, stop)]


def seal(path: Path, digests: Iterable[bytes]) -> str:
    """Write the checksum, from all its block_digests, into a file with room for it; return it."""
    header = _header(digests)
    with open(path, "r+b", opener=open_own) as file:
        file.write(header)
    return _checksum(header)


def has_checksum(path: Path | str, file: io.BufferedReader) -> bool:
    """Return whether a file has a checksum, as all of cpdhpc's do; False for other HDF5.

    Raises StoreError if it is neither.
    """
    file.seek(0)
    begin = file.read(len(MAGIC))
    if begin != MAGIC and not begin.startswith(SIGNATURE):
        raise StoreError(f"{path}: is not an HDF5 file of cpdhpc, or its first bytes are damaged")
    return begin == MAGIC


def check(path: Path | str, file: io.BufferedReader, digests: Iterable[bytes]) -> str:
    """Return the checksum of a file that has one; raise StoreError if it does not match.

    digests: all its block_digests
    """
    file.seek(0)
    found, header = file.read(USER_BLOCK), _header(digests)
    if found != header:
        raise StoreError(
            f"{path}: is damaged, or was changed by another program: its content does not match "
            "its checksum: use a copy of it, or remove it and make it again"
        )
    return _checksum(header)


def _checksum(header: bytes) -> str:
    return header.rstrip(b"\0\n").rpartition(b" ")[2].decode()


Source = Path | str | io.BufferedReader  # a file by its name, or one that is open


def _reader(source: Source) -> AbstractContextManager[io.BufferedReader]:
    if isinstance(source, io.BufferedReader):
        return nullcontext(source)
    return open(source, "rb", opener=open_ordinary)


@contextmanager
def _opened(source: Source, checked: bool = False) -> Iterator[Any]:
    """Open a file with h5py after verifying its checksum, if it has one.

    checked: it was verified before. HDF5 reads from the same open file that was verified, even if
    another file takes its name meanwhile. Raises StoreError for all errors of HDF5.
    """
    import h5py

    path = source.name if isinstance(source, io.BufferedReader) else source
    try:
        with _reader(source) as file:
            if not checked and has_checksum(path, file):
                check(path, file, block_digests(file))
            with h5py.File(file, "r") as opened:
                yield opened
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file") from None
    except UNREADABLE as error:
        raise StoreError(f"{path}: is not an HDF5 file of cpdhpc: {error}") from None


class _Patient(io.FileIO):
    """A file that keeps a write error until HDF5 has closed it.

    HDF5 crashes if it cannot write the rest at the end, for example on a full disk.
    """

    problem: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of data, if possible."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self.problem = self.problem or error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size, if possible."""
        try:
            return super().truncate(size)
        except OSError as error:
            self.problem = self.problem or error
            return size or 0


@contextmanager
def _changed(file: io.BufferedRandom, mode: Literal["w", "r+"], **options: Any) -> Iterator[Any]:
    """Let h5py write to a file. Raises OSError if that fails at any time."""
    import h5py

    file.flush()
    with _Patient(file.fileno(), "r+", closefd=False) as patient:
        try:
            with h5py.File(patient, mode, **options) as opened:
                yield opened
        finally:
            if patient.problem is not None:
                raise patient.problem


def write(
    path: Path | str,
    groups: Mapping[str, Group],
    attributes: Attributes,
    of_groups: Mapping[str, Attributes] | None = None,
) -> None:
    """Write arrays, group by group, to a new file that replaces path when complete.

    groups: of labelled Variables, or of plain arrays, which get no dimensions
    attributes: of the file; of_groups: of some groups
    xarray.open_dataset(path, group=name, engine="h5netcdf") reads labelled groups back.
    Raises StoreError if it cannot be written.
    """
    import h5py

    image = io.BytesIO()  # not the file: then a full disk is an ordinary error
    with h5py.File(image, "w", userblock_size=USER_BLOCK) as file:
        file.attrs.update(attributes)
        for name, group in groups.items():
            _write_group(file.create_group(name), group)
        for name, notes in (of_groups or {}).items():
            file[name].attrs.update(notes)
    content = image.getbuffer()
    starts = range(USER_BLOCK, len(content), BLOCK)
    digests = (hashlib.sha256(content[start : start + BLOCK]).digest() for start in starts)
    content[:USER_BLOCK] = _header(digests)
    put(path, content)


def _write_group(target: Any, group: Group) -> None:
    labelled = {name: item for name, item in group.items() if isinstance(item, Variable)}
    labels = {name for name, variable in labelled.items() if variable.dims == (name,)}
    plain = group.keys() - labelled.keys()
    datasets = {name: target.create_dataset(name, data=group[name]) for name in plain}
    for name in sorted(labelled, key=lambda name: name not in labels):  # labels first
        variable, data = labelled[name], labelled[name].data
        data = data.astype(object) if data.dtype.kind == "U" else data
        dataset = datasets[name] = target.create_dataset(name, data=data)
        dataset.attrs["long_name"], dataset.attrs["units"] = variable.long_name, variable.units
        dataset.attrs.update(variable.notes)
        _label(datasets, name, variable.dims)


def _label(datasets: Mapping[str, Any], name: str, dims: tuple[str, ...]) -> None:
    """Make a dataset label its own axis, or attach its group's labels to its axes."""
    from h5py import h5ds  # its Dataset.dims opens each of them anew

    if dims == (name,):
        h5ds.set_scale(datasets[name].id, name.encode())
    for axis, dim in enumerate(dims if dims != (name,) else ()):
        h5ds.attach_scale(datasets[name].id, datasets[dim].id, axis)


def read(
    path: Path | str, only: Collection[str] | None = None
) -> tuple[dict[str, dict[str, Array]], dict[str, Any]]:
    """Return the arrays of each group, and the attributes, of a file made by write.

    only: the names of the wanted arrays, None for all
    Raises StoreError if the file is missing, damaged or not HDF5.
    """
    with _opened(path) as file:
        return {
            name: {key: _readable(group[key]) for key in group if only is None or key in only}
            for name, group in file.items()
        }, _plain(file.attrs)


def read_attributes(path: Path | str, group: str = "/") -> dict[str, Any]:
    """Return only the attributes of a file, or of a group in it. Raises StoreError as read does."""
    with _opened(path) as file:
        return _plain(file[group].attrs)


def check_target(path: Path, kind: str) -> None:
    """Raise StoreError if a file cannot be written, or would replace one of another kind.

    kind: the attribute "kind" of files that may be replaced: records, checkpoints and data are kept
    """
    if not os.access(path.absolute().parent, os.W_OK):
        raise StoreError(f"{path}: cannot be written: its directory is missing or read-only")
    if not path.exists():
        return
    found = ""
    with suppress(StoreError):
        found = read_attributes(path).get("kind", "")
    if found != kind:
        raise StoreError(f"{path}: exists, and is not a file of kind {kind!r}: not replaced")


def _readable(dataset: Any) -> Array:
    import h5py

    if h5py.check_string_dtype(dataset.dtype) is not None:
        return np.asarray(dataset.asstr()[...], dtype=str)
    return np.asarray(dataset[...])


def _plain(attributes: Attributes) -> dict[str, Any]:
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in attributes.items()}


@dataclass(frozen=True)
class Room:
    """A dataset whose values are written or read in parts: its shape, dtype and attributes.

    dims: the datasets that label its axes, as those of Variable; none: no labels
    """

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    attributes: Attributes = field(default_factory=dict)
    dims: tuple[str, ...] = ()


def create(
    file: io.BufferedRandom,
    rooms: Mapping[str, Room],
    attributes: Attributes,
    chunks: tuple[int, ...] | None = None,
    compression: str | None = None,
) -> dict[str, int | None]:
    """Fill an empty file with datasets without data; return the offset of each one's first byte.

    The offset is None with chunks or compression, as data has no fixed place, and for an empty
    dataset. Write the file's checksum by seal after all values.
    Source of the layout: HDF5 File Format Specification, data layout message, contiguous storage.
    Raises StoreError, without the path, if HDF5 has no such type, chunks or compression;
    OSError if the disk has no room for the values.
    """
    offsets = {}
    # Attributes above 64 KiB, such as the boxes of many ranks, need the format of HDF5 1.8.
    format_1_8 = {"libver": ("v108", "v108"), "userblock_size": USER_BLOCK}
    with _changed(file, "w", **format_1_8) as target:
        target.attrs.update(attributes)
        for name, room in rooms.items():
            try:
                dataset = _make(target, name, room, chunks, compression)
            except (TypeError, ValueError) as error:
                raise StoreError(f"dataset {name!r} of {room.dtype}: {error}") from None
            dataset.attrs.update(room.attributes)
            offsets[name] = dataset.id.get_offset()
        for name in sorted(rooms, key=lambda name: rooms[name].dims != (name,)):  # labels first
            _label(target, name, rooms[name].dims)
    _reserve(file)
    return offsets


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _reserve(file: io.BufferedRandom) -> None:
    """Reserve disk space for a file's full size. Raises OSError if there is too little.

    Skipped on file systems that cannot do it: posix_fallocate would write to each block there.
    """
    library = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_int64(os.fstat(file.fileno()).st_size)
    if library.fallocate(file.fileno(), 0, ctypes.c_int64(0), size):
        code = ctypes.get_errno()
        if code in NO_ROOM:
            raise OSError(code, os.strerror(code), file.name)


def append(
    path: Path | str, arrays: Mapping[str, tuple[Array, Attributes]], without: Collection[str]
) -> None:
    """Add compressed datasets to a copy of a file, which replaces it when complete.

    arrays: by names with groups; without: groups to be dropped. Raises StoreError as replacing.
    """
    with replacing(path) as file:
        with open(path, "rb", opener=open_ordinary) as before:
            copyfileobj(before, file, BLOCK)
        with _changed(file, "r+") as target:
            for group in without:
                del target[group]
            for name, (data, attributes) in arrays.items():
                options = {"compression": 1, "shuffle": True} if data.size else {}
                target.create_dataset(name, data=data, **options).attrs.update(attributes)
        with open(file.fileno(), "rb", closefd=False) as whole:
            seal(Path(file.name), block_digests(whole))


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
    """Write a box of a dataset made by create. Raises OSError if that fails."""
    with open(path, "r+b", opener=open_own) as file:
        with _changed(file, "r+") as target:
            target[name][box] = data
        os.fsync(file.fileno())  # process 0 only syncs the data of its own node


def contents(source: Source) -> tuple[dict[str, Any], dict[str, Room]]:
    """Return the attributes of a file, and its datasets in all groups.

    For a file that was verified, as it and read_box check no checksum. Raises StoreError if the
    file is missing or is not HDF5.
    """
    names = list[str]()
    with _opened(source, checked=True) as file:
        file.visit(names.append)
        items = ((name, file[name]) for name in names if hasattr(file[name], "shape"))
        return _plain(file.attrs), {n: Room(x.shape, x.dtype, _plain(x.attrs)) for n, x in items}


def read_box(source: Source, name: str, box: tuple[slice, ...]) -> Array:
    """Return a box of an existing dataset. Raises StoreError if it cannot be read."""
    with _opened(source, checked=True) as file:
        return np.asarray(file[name][box])


class Tables:
    """Datasets of any HDF5 file, read by rows; each process opens it when it reads.

    names: of the datasets; rooms: their shapes and dtypes
    Raises StoreError if the file is missing, not HDF5 or lacks one of them.
    """

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self.path, self.names = path, names
        self._forget()
        with self._told(""):
            self.rooms = [Room(tuple(s.shape), s.dtype) for s in map(self._dataset, names)]

    def _forget(self) -> None:
        self._file: Any = None
        self._process, self._lock = 0, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("path", "names", "rooms")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _dataset(self, name: str) -> Any:
        import h5py

        with self._lock:
            if self._file is None or self._process != os.getpid():  # a fork must not share a file
                if not self.path.is_file():
                    raise StoreError(f"{self.path}: there is no such file")
                self._file = h5py.File(self.path, "r", locking="best-effort")
                self._process = os.getpid()
            dataset = self._file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            raise StoreError(f"{self.path}: has no dataset {name!r}")
        return dataset

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise StoreError(f"{self.path}{what}: cannot be read: {error}") from None

    def read(self, name: str, rows: slice) -> Array:
        """Return rows of a dataset. Raises StoreError if they cannot be read."""
        with self._told(f": {name}"):
            return np.asarray(self._dataset(name)[rows])

    def take(self, name: str, index: Array) -> Array:
        """Return the rows int64[b] of a dataset, one by one. Raises StoreError, naming the row."""
        room = self.rooms[self.names.index(name)]
        rows = np.empty((len(index), *room.shape[1:]), room.dtype)
        for at, row in enumerate(index.tolist()):
            with self._told(f": {name}: item {row}"):
                rows[at] = self._dataset(name)[row]
        return rows

"""Files that all processes write and read together, complete or not at all, with one checksum."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import store
from ..errors import UserError
from ..methods import check_whole
from ..ordinary import open_ordinary
from ..whole_files import open_own
from .ranks import Array, Ranks

Offsets = Mapping[str, int | None]


def save(
    world: Ranks,
    path: Path,
    rooms: Mapping[str, store.Room],
    attributes: store.Attributes,
    fill: Callable[[Path, Offsets], None],
    chunks: tuple[int, ...] | None = None,
    compression: str | None = None,
) -> str:
    """Write a file of datasets that replaces path; return its checksum. Collective.

    rooms, attributes, chunks, compression: see store.create; process 0's are used
    fill: writes the values at these offsets into a file that has room for them; collective; its
        errors must be raised on all processes
    Raises UserError on all processes if the file cannot be written.
    """

    def make() -> tuple[str, Offsets]:
        file = stack.enter_context(store.replacing(path))
        try:
            return file.name, store.create(file, rooms, attributes, chunks, compression)
        except store.StoreError as wrong:
            raise store.StoreError(f"{path}: {wrong}") from None

    error: Exception | None = None
    checksum = ""
    try:
        with ExitStack() as stack:
            name, offsets = world.on_first(make, "save")
            temporary = Path(name)
            fill(temporary, offsets)
            begin = partial(_begin, temporary, stack, open_own)
            digests = _digests(world, world.agreed(begin, "save", OSError)[0], "save")
            checksum = world.on_first(lambda: store.seal(temporary, digests), "save")
    except OSError as wrong:
        error = UserError(f"{path}: cannot be written: {wrong.strerror or wrong}")
    except UserError as wrong:
        error = wrong
    world.agree(error, "save")
    return checksum


TRIES = 20  # to open the same file on all processes while other programs replace it


@contextmanager
def opened(world: Ranks, path: Path) -> Iterator[tuple[io.BufferedReader, str]]:
    """Yield a file, open on all processes, and its checksum ("" if it has none). Collective.

    Each process reads a part of it for the check. Continue to read from the open file: another
    file may replace path meanwhile. Raises StoreError on all processes if it is missing or damaged.
    """
    with ExitStack() as stack:
        yield _checked(world, path, stack)


def _checked(world: Ranks, path: Path, stack: ExitStack) -> tuple[io.BufferedReader, str]:
    try:
        for _ in range(TRIES):
            file, begin = world.agreed(
                partial(_begin, path, stack, open_ordinary), "check", OSError
            )
            if len(set(world.gather(begin, "check"))) == 1:  # it has the checksum of all the rest
                break
        else:
            raise store.StoreError(f"{path}: processes see different files")
        if not store.has_checksum(path, file):
            return file, ""
        return file, store.check(path, file, _digests(world, file, "check"))
    except FileNotFoundError as error:
        raise store.StoreError(f"{error.filename or path}: there is no such file") from None
    except OSError as error:
        reason = error.strerror or error
        raise store.StoreError(f"{error.filename or path}: cannot be read: {reason}") from None


def _begin(
    path: Path, stack: ExitStack, opener: Callable[[str, int], int]
) -> tuple[io.BufferedReader, bytes]:
    """Return an open file, which stack will close, and its first bytes."""
    file = stack.enter_context(open(path, "rb", opener=opener))  # noqa: SIM115 - stack closes it
    return file, file.read(store.USER_BLOCK)


def _digests(world: Ranks, file: io.BufferedReader, what: str) -> list[bytes]:
    """Return the digests of all blocks; each process computes a part. Collective."""
    of_process = partial(store.block_digests, file, world.process, world.processes)
    mine = world.agreed(of_process, what, OSError)
    return [digest for part in world.gather(mine, what) for digest in part]


def check_box(
    path: object, offset: object, shape: Sequence[int], start: Sequence[int], box: object
) -> None:
    """Raise TypeError or ValueError unless these are valid arguments of Ranks.write_box."""
    if not isinstance(path, str | Path):
        raise TypeError(f"write_box: path={path!r}: must be a Path")
    check_whole("write_box", "offset", offset, 0)
    if not isinstance(box, np.ndarray) or not box.flags.c_contiguous:
        raise TypeError(f"write_box: box is {type(box).__name__}: must be a C-contiguous array")
    for first, size, whole in zip(start, box.shape, shape, strict=True):
        if not 0 <= first <= first + size <= whole:
            raise ValueError(
                f"write_box: start={list(start)}, box.shape={box.shape}: must be in {tuple(shape)}"
            )


def _own_file(path: Path) -> int:
    """Return the inode of the file that open_own opens, 0 if there is none."""
    try:
        with open(path, "rb", opener=open_own) as file:
            return os.fstat(file.fileno()).st_ino
    except OSError:
        return 0


def write_box(
    mpi: Any,
    comm: Any,
    path: Path,
    offset: int,
    shape: Sequence[int],
    start: Sequence[int],
    box: Array,
) -> OSError | None:
    """Write a process's box of an array whose first byte is at an offset. Collective.

    mpi: the module mpi4py.MPI; the others as Ranks.write_box
    Returns this process's error, or None.
    """
    before = _own_file(path)
    try:
        file = mpi.File.Open(comm, str(path), mpi.MODE_WRONLY)
        # MPI follows links: this is the right file if the name has not changed its file meanwhile.
        differs = comm.allreduce(not before or _own_file(path) != before, mpi.LOR)
    except mpi.Exception as error:  # on all processes
        return _problem(path, box.nbytes, error)
    if differs:
        file.Close()
        return OSError(errno.ESTALE, "another program has changed it")
    element = mpi.BYTE.Create_contiguous(box.dtype.itemsize).Commit()
    types = [element]
    if box.size:  # MPI has no empty subarrays
        types.append(element.Create_subarray(list(shape), list(box.shape), list(start)).Commit())
    problems = []
    for call, *arguments in (  # all are collective: after an error, continue with the others
        (file.Set_view, offset, element, types[-1]),
        (file.Write_all, [box, box.size, element]),
        (file.Sync,),
        (file.Close,),
    ):
        try:
            call(*arguments)
        except mpi.Exception as error:
            problems.append(_problem(path, box.nbytes, error))
    for each in types:
        each.Free()
    return problems[0] if problems else None


def _problem(path: Path, size_bytes: int, error: Exception) -> OSError:
    """Return an error of MPI-IO with its cause: for a full disk MPI says only MPI_ERR_OTHER."""
    disk = os.statvfs(path.parent)
    if disk.f_bavail * disk.f_frsize < size_bytes:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError(str(error))

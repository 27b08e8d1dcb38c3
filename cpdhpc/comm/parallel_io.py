"""One file that all processes write at once, by MPI-IO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .ranks import Array


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
    Returns what went wrong on this process, None where nothing did.
    """
    try:
        file = mpi.File.Open(comm, str(path), mpi.MODE_WRONLY)
    except mpi.Exception as error:  # on all processes
        return OSError(f"{path}: {error}")
    element = mpi.BYTE.Create_contiguous(box.dtype.itemsize).Commit()
    types = [element]
    if box.size:  # MPI has no subarrays of nothing
        types.append(element.Create_subarray(list(shape), list(box.shape), list(start)).Commit())
    problems = []
    for call, *arguments in (  # all are collective: who has a problem goes on with the others
        (file.Set_view, offset, element, types[-1]),
        (file.Write_all, [box, box.size, element]),
        (file.Sync,),
        (file.Close,),
    ):
        try:
            call(*arguments)
        except mpi.Exception as error:
            problems.append(OSError(f"{path}: {error}"))
    for each in types:
        each.Free()
    return problems[0] if problems else None

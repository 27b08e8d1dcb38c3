"""Programs of moves: copies and sums of strided boxes, and words shared by two processes.

A program is a table of rows, made once for arrays of one shape and run in one call without the
interpreter. Source and target of a row are X, OUT or memory of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._cpu import load_acquire, make_moves, read_loan, run_moves, store_release

__all__ = [
    "ADDED",
    "MEMORY",
    "NOWHERE",
    "OUT",
    "Side",
    "X",
    "load_acquire",
    "make_moves",
    "read_loan",
    "rows",
    "run_moves",
    "store_release",
]

X, OUT, MEMORY = 0, 1, 2  # bases: the two arrays of a run, and the first of the program's memory
COPY, ADD, FILL, POST, AWAIT, LEND, TAKE, SETTLE, RECALL = range(9)  # as moves.h numbers them
NOWHERE = -(1 << 62)  # as the distance of x from the start of out: they must not overlap
LOOPS = 4  # of a row, around its runs
ADDED = {  # dtype -> kind of addition
    **{
        f"{sign}int{8 * size}": kind for kind, size in enumerate((1, 2, 4, 8)) for sign in ("", "u")
    },
    **{"float32": 4, "float64": 5, "complex64": 4, "complex128": 5},
}


class Move(NamedTuple):
    """One move: run bytes or elements from source to target, within up to LOOPS loops.

    op: COPY to RECALL; kind, value: its parameters, see the functions below
    source, target: bases, as X; their offsets are in bytes
    counts, source_strides, target_strides: of the loops, the outermost first; strides in bytes
    """

    op: int
    kind: int
    source: int
    target: int
    source_offset: int
    target_offset: int
    run: int
    value: int
    counts: tuple[int, ...] = (1,) * LOOPS
    source_strides: tuple[int, ...] = (0,) * LOOPS
    target_strides: tuple[int, ...] = (0,) * LOOPS


ROW = np.dtype(
    [(name, "i8", LOOPS) if name in Move._field_defaults else (name, "i8") for name in Move._fields]
)


class Side(NamedTuple):
    """The place of a box: its base, the offset of its first cell and the strides, in bytes."""

    base: int
    offset: int
    strides: Sequence[int]


def rows(listed: Sequence[Move]) -> npt.NDArray[Any]:
    """Return the table of rows for make_moves."""
    return np.array(listed, ROW)


def copy(shape: Sequence[int], itemsize: int, source: Side, target: Side) -> list[Move]:
    """Return the rows that copy a box of elements."""
    return _box(COPY, 0, 0, shape, itemsize, source, target)


def add(shape: Sequence[int], itemsize: int, source: Side, target: Side, dtype: str) -> list[Move]:
    """Return the rows that add a box of elements to the target, in the order of the cells.

    dtype: one of ADDED. Cells that share a target (stride 0) are added one after another.
    """
    return _box(ADD, ADDED[dtype], 0, shape, itemsize, source, target)


def fill(shape: Sequence[int], itemsize: int, source: Side, target: Side) -> list[Move]:
    """Return the rows that write one element, at the source, into all cells of the target."""
    return _box(FILL, 0, itemsize, shape, itemsize, Side(*source[:2], target.strides), target)


def post(base: int, offset: int, value: int = 0) -> Move:
    """Return the row that writes the number of the run, then its serial + value, as two words."""
    return Move(POST, 0, base, base, offset, offset, 1, value)


def await_(base: int, offset: int, value: int, is_message: bool) -> Move:
    """Return the row that waits until a word is serial + value or more.

    is_message: whether the word after it must be the number of the run
    """
    return Move(AWAIT, int(is_message), base, base, offset, offset, 1, value)


def is_run(packed: Sequence[Move]) -> bool:
    """Whether rows that copy are a single row of one run."""
    return len(packed) == 1 and packed[0].counts == (1,) * LOOPS


def lend(base: int, offset: int, run: Move) -> Move:
    """Return the row that posts a message in place, at the source of run; see loans.h."""
    return Move(LEND, 0, run.source, base, run.source_offset, offset, run.run, 0)


def take(process: int, base: int, offset: int, to: Move, skipped: int) -> Move:
    """Return the row that reads a message, if it was not copied, to the target of a row.

    skipped: number of following rows that are then skipped
    """
    return to._replace(op=TAKE, kind=process, source=base, source_offset=offset, value=skipped)


def settle(base: int, offset: int, read: int, skipped: int) -> Move:
    """Return the row that waits a while until a message is read in place, and then skips rows.

    offset: of the message; read: of the word with the serial of the last message that was read
    """
    return Move(SETTLE, 0, base, base, read, offset, 1, skipped)


def recall(base: int, offset: int) -> Move:
    """Return the row that replaces a message in place by its copy, and then skips the next row."""
    return Move(RECALL, 0, base, base, offset, offset, 1, 1)


def _box(
    op: int, kind: int, value: int, shape: Sequence[int], itemsize: int, source: Side, target: Side
) -> list[Move]:
    """Return rows of at most LOOPS loops; further axes are unrolled."""
    if 0 in shape:
        return []
    run, loops = _collapse(shape, itemsize, source.strides, target.strides)
    outer, inner = loops[: -LOOPS or None], loops[-LOOPS:]
    if len(loops) <= LOOPS:
        outer, inner = [], loops
    inner = [(1, 0, 0)] * (LOOPS - len(inner)) + inner
    columns = tuple(zip(*inner, strict=True))
    still = op == FILL  # its source is one element
    return [
        Move(op, kind, source.base, target.base, source.offset + (0 if still else ahead),
            target.offset + there, run, value, *columns)
        for ahead, there in _offsets(outer)
    ]  # fmt: skip


def _collapse(
    shape: Sequence[int], itemsize: int, source: Sequence[int], target: Sequence[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the bytes of a contiguous run and the loops around it: (count, stride, stride)."""
    run, loops = itemsize, list[tuple[int, int, int]]()
    for n, s, t in reversed(list(zip(shape, source, target, strict=True))):
        if n == 1:
            continue
        if not loops and s == t == run:
            run *= n
        elif loops and s == loops[0][0] * loops[0][1] and t == loops[0][0] * loops[0][2]:
            loops[0] = n * loops[0][0], *loops[0][1:]
        else:
            loops.insert(0, (n, s, t))
    return run, loops


def _offsets(loops: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the byte offsets in source and target of all steps of some loops."""
    if not loops:
        yield 0, 0
        return
    n, s, t = loops[0]
    for i in range(n):
        for ahead, there in _offsets(loops[1:]):
            yield i * s + ahead, i * t + there

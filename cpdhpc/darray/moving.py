"""Pieces of windows packed and unpacked by programs of moves: what slicing.py does, compiled.

Only for arrays in the memory of the CPU, and for sums of the dtypes in ops.moves.ADDED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops import moves
from ..ops.moves import OUT, Row, Side, X
from .box import Box
from .windows import Fill, Piece

Plain = npt.NDArray[np.generic]


class Frame(NamedTuple):
    """The arrays of a program: what their boxes and strides are.

    owned, window: the boxes of the plan; one: the bases of the arrays that lie on them
    strides: of these two arrays, in bytes; trail: further axes
    """

    owned: Box
    window: Box
    on_owned: int
    on_window: int
    owned_strides: Sequence[int]
    window_strides: Sequence[int]
    trail: tuple[int, ...]
    itemsize: int
    dtype: str

    @property
    def cell_bytes(self) -> int:
        """Bytes of a cell, with all its further axes."""
        return self.itemsize * prod(self.trail)

    def source(self, piece: Piece) -> Side:
        """Return where a piece lies in the array on the owned box; axes of step 0 do not move."""
        strides, ndim = list(self.owned_strides), self.owned.ndim
        ahead = _offset(strides, piece.source.start, self.owned.start)
        for axis in range(ndim):
            strides[axis] *= abs(piece.steps[axis])
        return Side(self.on_owned, ahead, strides)

    def target(self, piece: Piece) -> Side:
        """Return where a piece lies in the array on the window, in the order of its source."""
        strides, box = list(self.window_strides), piece.target
        ahead = _offset(strides, box.start, self.window.start)
        for axis, step in enumerate(piece.steps):
            if step < 0:
                ahead += (box.shape[axis] - 1) * strides[axis]
                strides[axis] *= -1
        return Side(self.on_window, ahead, strides)

    def message(self, base: int, offset: int, piece: Piece) -> Side:
        """Return where a piece lies in a message; axes of step 0 do not move."""
        strides, step = list[int](), self.itemsize
        for n in reversed(piece.source.shape + self.trail):
            strides.insert(0, step)
            step *= n
        for axis in range(self.owned.ndim):
            strides[axis] *= abs(piece.steps[axis])
        return Side(base, offset, strides)


def _offset(strides: Sequence[int], start: Sequence[int], origin: Sequence[int]) -> int:
    pairs = zip(strides, start, origin, strict=False)
    return sum(stride * (a - o) for stride, a, o in pairs)


Pack = Callable[[Frame, Piece, int, int], list[Row]]  # (frame, piece, base, offset of the message)


def in_message(
    frame: Frame, pieces: Sequence[Piece], rows: Pack, base: int, offset: int
) -> Iterator[Row]:
    """Yield the rows of all pieces of a message that begins at an offset."""
    for piece in pieces:
        yield from rows(frame, piece, base, offset)
        offset += piece.source.size * frame.cell_bytes


def pack_cells(frame: Frame, piece: Piece, base: int, offset: int) -> list[Row]:
    """Return the rows that copy owned cells into a message."""
    shape = piece.source.shape + frame.trail
    to = frame.message(base, offset, piece)
    return moves.copy(shape, frame.itemsize, frame.source(piece), to)


def unpack_cells(frame: Frame, piece: Piece, base: int, offset: int) -> list[Row]:
    """Return the rows that copy a message to where it shows in a window."""
    shape = piece.target.shape + frame.trail
    came = frame.message(base, offset, piece)
    return moves.copy(shape, frame.itemsize, came, frame.target(piece))


def pack_sums(frame: Frame, piece: Piece, base: int, offset: int) -> list[Row]:
    """Return the rows that copy cells of a window into a message, sums where one shows often."""
    shape, to = piece.source.shape + frame.trail, frame.message(base, offset, piece)
    side, rows = frame.target(piece), list[Row]()
    for place in piece.repeats():
        ahead = sum((s.start or 0) * d for s, d in zip(place, side.strides, strict=False))
        start = Side(side.base, side.offset + ahead, side.strides)
        if rows:
            rows += moves.add(shape, frame.itemsize, start, to, frame.dtype)
        else:
            rows += moves.copy(shape, frame.itemsize, start, to)
    return rows


def add_sums(frame: Frame, piece: Piece, base: int, offset: int) -> list[Row]:
    """Return the rows that add a message to owned cells."""
    shape = piece.source.shape + frame.trail
    came = frame.message(base, offset, piece)
    return moves.add(shape, frame.itemsize, came, frame.source(piece), frame.dtype)


def show_own(
    frame: Frame, local: Sequence[Piece], fills: Sequence[tuple[Fill, int]], base: int
) -> Iterator[Row]:
    """Yield the rows that fill, and that copy own cells to where they show in the window.

    fills: with the offset of the element in the memory of a base
    """
    for fill, offset in fills:
        side = frame.target(_whole(fill.target))
        shape = fill.target.shape + frame.trail
        yield from moves.fill(shape, frame.itemsize, Side(base, offset, ()), side)
    for piece in local:
        shape = piece.target.shape + frame.trail
        yield from moves.copy(shape, frame.itemsize, frame.source(piece), frame.target(piece))


def sum_own(
    frame: Frame, local: Sequence[Piece], uncovered: Sequence[Box], base: int
) -> Iterator[Row]:
    """Yield the rows that begin the sums with own cells. base: memory, an element of zeros first.

    Behind the element there is room for the largest piece.
    """
    for box in uncovered:
        side, shape = frame.source(_whole(box)), box.shape + frame.trail
        yield from moves.fill(shape, frame.itemsize, Side(base, 0, ()), side)
    for piece in local:
        shape = piece.source.shape + frame.trail
        if piece.is_itself:
            yield from moves.copy(shape, frame.itemsize, frame.target(piece), frame.source(piece))
    for piece in local:
        if not piece.is_itself:
            yield from pack_sums(frame, piece, base, frame.itemsize)
            yield from add_sums(frame, piece, base, frame.itemsize)


def _whole(box: Box) -> Piece:
    return Piece(box, box, (1,) * box.ndim)


def inside(frame: Frame) -> int:
    """Return how many bytes behind out x may lie, as the owned part of a window; or NOWHERE."""
    steps = zip(frame.owned.shape + frame.trail, frame.owned_strides, frame.window_strides,
                strict=True)  # fmt: skip
    if not frame.window.contains(frame.owned) or any(n > 1 and a != b for n, a, b in steps):
        return moves.NOWHERE
    ahead = _offset(frame.window_strides, frame.owned.start, frame.window.start)
    return ahead if frame.on_window == OUT else -ahead


def frame_of(owned: Box, window: Box, x: Plain, out: Plain, dtype: str, reverse: bool) -> Frame:
    """Return the frame of two arrays. reverse: x lies on the window, out on the owned box."""
    trail, itemsize = x.shape[owned.ndim :], x.itemsize
    if reverse:
        return Frame(owned, window, OUT, X, out.strides, x.strides, trail, itemsize, dtype)
    return Frame(owned, window, X, OUT, x.strides, out.strides, trail, itemsize, dtype)

"""Exchange and accumulate as tables for a GPU: one launch before the messages, one behind them.

A table is a list of boxes of cells. Each cell is written once, as the sum of its terms in their
order, so a launch has nothing to wait for in itself. kernels/cuda_moves.h reads the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..ops.moves import MEMORY, OUT, Side, X
from .by_slices import Addresses, Bytes
from .compiled import Frame, frame_of
from .layout import Box
from .windows import Message, Piece, RankPieces

TABLE = 3  # base of what stands in the table itself: values that fill; X, OUT and MEMORY are 0..2
BEGINS = 4  # is added to the base of a term that begins a partial sum; as in cuda_moves.h
AXES = 6  # of a box, with that of the units
WIDEST_BYTES = 16  # of a unit that is copied
COPIES = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}  # bytes of a unit -> kind of move_boxes
SUMS = {  # dtype -> kind of move_boxes, and bytes of a unit
    **{f"{sign}int{8 * n}": (5 + i, n) for i, n in enumerate((1, 2, 4, 8)) for sign in ("", "u")},
    **{"float32": (9, 4), "complex64": (9, 4), "float64": (10, 8), "complex128": (10, 8)},
    **{"float16": (11, 2), "bfloat16": (12, 2)},
}


class Moved(NamedTuple):
    """A box of cells, where it is written and what of: terms whose bases are, or hold, BEGINS."""

    shape: tuple[int, ...]
    target: Side
    terms: tuple[Side, ...]


class Table(NamedTuple):
    """What a launch reads, int64[n]: the kind of its units, and how many boxes and units."""

    kind: int
    numbers: npt.NDArray[np.int64]
    boxes: int
    units: int


class Place(NamedTuple):
    """A message in memory of the GPU: the offset of its first cell, in bytes."""

    message: Message
    offset: int

    def pieces(self, frame: Frame) -> Iterator[tuple[Piece, int]]:
        """Yield its pieces, and where each begins."""
        offset = self.offset
        for piece in self.message.pieces:
            yield piece, offset
            offset += piece.source.size * frame.cell_bytes


def pack_cells(frame: Frame, places: Sequence[Place]) -> Iterator[Moved]:
    """Yield the owned cells that other ranks show."""
    for piece, offset in (each for place in places for each in place.pieces(frame)):
        shape, to = piece.source.shape + frame.trail, frame.message(MEMORY, offset, piece)
        yield Moved(shape, to, (frame.source(piece),))


def unpack_cells(frame: Frame, places: Sequence[Place]) -> Iterator[Moved]:
    """Yield the cells of the window that others own."""
    for piece, offset in (each for place in places for each in place.pieces(frame)):
        shape, message = piece.target.shape + frame.trail, frame.message(MEMORY, offset, piece)
        yield Moved(shape, frame.target(piece), (message,))


def pack_sums(frame: Frame, places: Sequence[Place]) -> Iterator[Moved]:
    """Yield the sums of the cells of the window that show other ranks' cells."""
    for piece, offset in (each for place in places for each in place.pieces(frame)):
        shape, to = piece.source.shape + frame.trail, frame.message(MEMORY, offset, piece)
        yield Moved(shape, to, tuple(_shown(frame, piece)))


def add_sums(frame: Frame, places: Sequence[Place]) -> Iterator[Moved]:
    """Yield the owned cells that messages are added to, in the order of the ranks."""
    own = Piece(frame.owned, frame.owned, (1,) * frame.owned.ndim)
    regions: Regions = [(frame.owned, (frame.source(own),))]
    for piece, offset in (each for place in places for each in place.pieces(frame)):
        message = _begun(frame.message(MEMORY, offset, piece))
        regions = _laid_over(regions, piece.source, (message,))
    yield from (_of_region(frame.source, frame, *each) for each in regions if len(each[1]) > 1)


def show_own(frame: Frame, pieces: RankPieces) -> Iterator[Moved]:
    """Yield what fills, and the own cells where they show in the window."""
    filled: Regions = []
    for i, fill in enumerate(pieces.fills):
        filled = [
            (rest, terms) for box, terms in filled for rest in box.without(fill.target)
        ]  # later ones lie over earlier ones, and all are alike in strides: none
        filled.append((fill.target, (_value(i),)))
    yield from (_of_region(frame.target, frame, *each) for each in filled)
    for piece in pieces.local:
        shape = piece.target.shape + frame.trail
        yield Moved(shape, frame.target(piece), (frame.source(piece),))


def sum_own(frame: Frame, pieces: RankPieces) -> Iterator[Moved]:
    """Yield what begins the sums: the cell of the window itself where there is one, else zero."""
    itself = [piece for piece in pieces.local if piece.is_itself]
    regions: Regions = [(piece.source, (frame.target(piece),)) for piece in itself]
    regions += [(box, (_value(0),)) for box in pieces.uncovered]
    for piece in (piece for piece in pieces.local if not piece.is_itself):
        first, *others = _shown(frame, piece)
        regions = _laid_over(regions, piece.source, (_begun(first), *others))
    yield from (_of_region(frame.source, frame, *each) for each in regions)


def _shown(frame: Frame, piece: Piece) -> Iterator[Side]:
    """Yield where the cells of a piece's source show in the window, once or more often."""
    side = frame.target(piece)
    for place in piece.repeats():
        ahead = sum((s.start or 0) * d for s, d in zip(place, side.strides, strict=False))
        yield Side(side.base, side.offset + ahead, side.strides)


def _begun(side: Side) -> Side:
    return side._replace(base=side.base + BEGINS)


def _value(i: int) -> Side:
    """Return the i-th value that fills; it does not move, however wide units are."""
    return Side(TABLE, i * WIDEST_BYTES, ())


Regions = list[tuple[Box, tuple[Side, ...]]]  # boxes of cells that are alike, and their terms


def _laid_over(regions: Regions, box: Box, terms: tuple[Side, ...]) -> Regions:
    """Return the regions, those in the box with more terms."""
    found: Regions = []
    for region, before in regions:
        both = region.intersect(box)
        found += [(rest, _moved(before, region, rest)) for rest in region.without(both)]
        if not both.empty:
            found.append((both, _moved(before, region, both) + _moved(terms, box, both)))
    return found


def _moved(terms: Iterable[Side], box: Box, part: Box) -> tuple[Side, ...]:
    """Return terms of a box as those of a part of it."""
    ahead = [b - a for a, b in zip(box.start, part.start, strict=True)]
    return tuple(
        term._replace(
            offset=term.offset + sum(n * d for n, d in zip(ahead, term.strides, strict=False))
        )
        for term in terms
    )


def _of_region(
    side: Callable[[Piece], Side], frame: Frame, box: Box, terms: tuple[Side, ...]
) -> Moved:
    target = side(Piece(box, box, (1,) * box.ndim))
    return Moved(box.shape + frame.trail, target, terms)


class Tables(NamedTuple):
    """Both launches of an operation; None where there is nothing to do."""

    begin: Table | None
    finish: Table | None


def tables(
    pieces: RankPieces,
    sent: Sequence[Place],
    received: Sequence[Place],
    values: Sequence[Bytes],
    x: Addresses,
    out: Addresses,
    dtype: str,
    is_copy: bool,
) -> Tables:
    """Return the launches of an exchange, or where is_copy is false of an accumulation.

    values: the element that each fill writes
    """
    frame = frame_of(pieces, x, out, dtype, is_copy)
    ahead = x.ctypes.data - out.ctypes.data
    in_place = ahead if np.may_share_memory(x, out) else None
    if is_copy:
        begin = [*show_own(frame, pieces), *pack_cells(frame, sent)]
        finish = [*unpack_cells(frame, received)]
        unit_bytes = gcd(WIDEST_BYTES, x.ctypes.data, out.ctypes.data)
    else:
        begin = [*sum_own(frame, pieces), *pack_sums(frame, sent)]
        finish, unit_bytes = [*add_sums(frame, received)], SUMS[dtype][1]
    begin = [each for each in begin if not _is_there(each, in_place)]
    elements = values if is_copy else [np.zeros(frame.itemsize, np.uint8)]

    def made(moved: Sequence[Moved]) -> Table | None:
        return _table(moved, frame.itemsize, unit_bytes, elements, None if is_copy else dtype)

    return Tables(made(begin), made(finish))


def _is_there(moved: Moved, ahead: int | None) -> bool:
    """Whether a box is copied to where it is. ahead: bytes from out to x, None where apart."""
    shape, target, terms = moved
    if ahead is None or len(terms) > 1 or (terms[0].base, target.base) != (X, OUT):
        return False
    steps = zip(shape, terms[0].strides, target.strides, strict=True)
    alike = all(n == 1 or a == b for n, a, b in steps)
    return alike and terms[0].offset + ahead == target.offset


class _Loops(NamedTuple):
    """A box for the kernel: (count, stride of the target, of each term) of each axis, by bytes."""

    target: Side
    terms: tuple[Side, ...]
    axes: list[tuple[int, tuple[int, ...]]]


def _loops(moved: Moved, itemsize: int, still: bool) -> Iterator[_Loops]:
    """Yield boxes of at most AXES axes, the last one of bytes that lie together.

    still: whether units are whole elements, so that values that fill do not move within one
    """
    shape, target, terms = moved
    if 0 in shape:
        return
    sides = (target, *terms)
    axes = [(itemsize, tuple(int(not still or s.base % BEGINS != TABLE) for s in sides))]
    strides = [side.strides or (0,) * len(shape) for side in sides]
    along = sorted(zip(shape, *strides, strict=True), key=lambda axis: abs(axis[1]))
    for n, *steps in along:  # threads side by side write side by side
        inner, below = axes[0]
        if n > 1 and tuple(steps) == tuple(inner * step for step in below):
            axes[0] = n * inner, below
        elif n > 1:
            axes.insert(0, (n, tuple(steps)))
    yield from _unrolled(target, terms, axes)


def _unrolled(
    target: Side, terms: tuple[Side, ...], axes: list[tuple[int, tuple[int, ...]]]
) -> Iterator[_Loops]:
    if len(axes) <= AXES:
        yield _Loops(target, terms, axes)
        return
    n, steps = axes[0]
    for i in range(n):
        sides = [
            side._replace(offset=side.offset + i * step)
            for side, step in zip((target, *terms), steps, strict=True)
        ]
        yield from _unrolled(sides[0], tuple(sides[1:]), axes[1:])


def _table(
    moved: Sequence[Moved],
    itemsize: int,
    unit_bytes: int,
    values: Sequence[Bytes],
    added: str | None,
) -> Table | None:
    """Return the table of some boxes; added: the dtype of sums, None where cells are copied."""
    boxes = [loops for each in moved for loops in _loops(each, itemsize, still=True)]
    if not boxes:
        return None
    for box in boxes if added is None else ():
        sides = (side for side in (box.target, *box.terms) if side.base % BEGINS != TABLE)
        steps = (step for _, each in box.axes[:-1] for step in each)
        unit_bytes = gcd(unit_bytes, box.axes[-1][0], *steps, *(side.offset for side in sides))
    if unit_bytes < itemsize:
        boxes = [loops for each in moved for loops in _loops(each, itemsize, still=False)]
    heads, terms, units = list[list[int]](), list[list[int]](), 0
    for box in boxes:
        counts, strides = _by_units(box, unit_bytes)
        heads.append([units, len(terms), box.target.base, box.target.offset, *counts, *strides[0]])
        terms += [[t.base, t.offset, *s] for t, s in zip(box.terms, strides[1:], strict=True)]
        units += int(np.prod(counts))
    heads.append([units, len(terms), *[0] * (len(heads[0]) - 2)])
    behind = 8 * (sum(map(len, heads)) + sum(map(len, terms)))  # bytes, where the values are
    for term in terms:
        term[1] += behind if term[0] % BEGINS == TABLE else 0
    wide = [np.resize(value, WIDEST_BYTES) for value in values]
    numbers = np.array([n for row in (*heads, *terms) for n in row], np.int64)
    numbers = np.concatenate([numbers, *(value.view(np.int64) for value in wide)])
    kind = COPIES[unit_bytes] if added is None else SUMS[added][0]
    return Table(kind, numbers, len(boxes), units)


def _by_units(box: _Loops, unit_bytes: int) -> tuple[list[int], list[list[int]]]:
    """Return the counts of AXES axes, and the strides of the target and of each term."""
    (size_bytes, moves), outer = box.axes[-1], box.axes[:-1]
    axes = [*outer, (size_bytes // unit_bytes, tuple(unit_bytes * step for step in moves))]
    axes = [(1, (0,) * len(moves))] * (AXES - len(axes)) + axes
    return [n for n, _ in axes], [list(side) for side in zip(*(s for _, s in axes), strict=True)]

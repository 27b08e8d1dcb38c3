"""Boxes of grid cells: half-open ranges on every axis, anywhere on the grid of integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """The cells start <= i < stop on every axis; may lie outside a domain, may be empty."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells along each axis, 0 where stop is not above start."""
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of cells."""
        return prod(self.shape)

    @property
    def empty(self) -> bool:
        """Whether there are no cells."""
        return any(b <= a for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box:
        """Return the cells of both; axes without any become empty at the larger start."""
        start = tuple(map(max, self.start, other.start))
        return Box(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def contains(self, other: Box) -> bool:
        """Whether all cells of the other box are in this one; those of an empty box are."""
        return other.empty or self.intersect(other) == other

    def shift(self, offset: Sequence[int]) -> Box:
        """Return the box moved by so many cells along each axis."""
        moved = [tuple(a + d for a, d in zip(c, offset, strict=True)) for c in self]
        return Box(*moved)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return what selects the cells in an array whose first cell is origin."""
        ends = zip(self.start, self.stop, origin, strict=True)
        return tuple(slice(a - o, max(a, b) - o) for a, b, o in ends)

    def without(self, other: Box) -> Iterator[Box]:
        """Yield disjoint boxes of the cells that are not in the other box, axis by axis."""
        hole = self.intersect(other)
        if hole.empty:
            if not self.empty:
                yield self
            return
        start, stop = list(self.start), list(self.stop)
        for axis in range(self.ndim):
            for low, high in ((start[axis], hole.start[axis]), (hole.stop[axis], stop[axis])):
                if low < high:
                    first, last = start.copy(), stop.copy()
                    first[axis], last[axis] = low, high
                    yield Box(tuple(first), tuple(last))
            start[axis], stop[axis] = hole.start[axis], hole.stop[axis]

    def parts(self, cells: int) -> Iterator[Box]:
        """Yield boxes of at most so many cells, or of one, that together are this one, in order."""
        if self.size <= max(1, cells):
            if not self.empty:
                yield self
            return
        axis = next(i for i, n in enumerate(self.shape) if n > 1)
        n = self.shape[axis]
        thick = max(1, n * cells // self.size)  # as many layers as fit; one may be cut further
        for low in range(self.start[axis], self.stop[axis], thick):
            start, stop = list(self.start), list(self.stop)
            start[axis], stop[axis] = low, min(low + thick, self.stop[axis])
            yield from Box(tuple(start), tuple(stop)).parts(cells)

    def __str__(self) -> str:
        """Return the ranges as [0:4, -1:7]."""
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all cells of an array of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def as_box(what: str, value: object, ndim: int) -> Box:
    """Return a value as a Box of integers. Raises TypeError or ValueError, naming what."""
    if not isinstance(value, Box):
        raise TypeError(f"{what} is {type(value).__name__}: must be a Box")
    try:
        ends = [tuple(int(i.__index__()) for i in side) for side in value]
    except (AttributeError, TypeError):
        raise TypeError(f"{what}={value!r}: start and stop must hold integers") from None
    if any(len(side) != ndim for side in ends):
        raise ValueError(f"{what}={value!r}: must have {ndim} axes, as the domain")
    return Box(*ends)

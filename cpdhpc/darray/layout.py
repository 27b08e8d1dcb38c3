"""Boxes of grid cells, layouts (which rank owns which box), and the input of sliding filters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..partition import split


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
        """Cells along each axis, 0 if stop is not above start."""
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
        """Return the cells in both boxes; axes without any become empty at the larger start."""
        start = tuple(map(max, self.start, other.start))
        return Box(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def contains(self, other: Box) -> bool:
        """Whether all cells of the other box are in this one; True if it is empty."""
        return other.empty or self.intersect(other) == other

    def shift(self, offset: Sequence[int]) -> Box:
        """Return the box moved by so many cells along each axis."""
        moved = [tuple(a + d for a, d in zip(c, offset, strict=True)) for c in self]
        return Box(*moved)

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of the cells in an array whose first cell is origin."""
        ends = zip(self.start, self.stop, origin, strict=True)
        return tuple(slice(a - o, max(a, b) - o) for a, b, o in ends)

    def without(self, other: Box) -> Iterator[Box]:
        """Yield disjoint boxes that cover the cells outside the other box, axis by axis."""
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
        """Yield boxes that cover this one, in order, each of at most so many cells (1 or more)."""
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
        """Return the ranges, for example [0:4, -1:7]."""
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.start, self.stop, strict=True))}]"


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all cells of an array of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def as_box(function: str, argument: str, value: object, ndim: int) -> Box:
    """Return a value as a Box of integers. Raises TypeError or ValueError if it is not one."""
    if not isinstance(value, Box):
        raise ArgumentTypeError(function, argument, value, "must be a Box")
    try:
        ends = [tuple(int(i.__index__()) for i in side) for side in value]
    except (AttributeError, TypeError):
        allowed = "start and stop must hold integers"
        raise ArgumentTypeError(function, argument, value, allowed) from None
    if any(len(side) != ndim for side in ends):
        raise ArgumentError(function, argument, value, f"must have {ndim} axes, like the domain")
    return Box(*ends)


@dataclass(frozen=True)
class Layout:
    """The boxes that ranks own: disjoint, and together the whole domain; some may be empty.

    shape: cells of the domain along each axis, 1 or more; owners: the box of each rank; empty ones
        are moved into the domain, so that they slice its arrays as all others do
    Made by grid or boxes. Raises ValueError, naming the boxes, if they overlap, leave cells out or
    reach outside the domain; TypeError for values that are not boxes.
    """

    shape: tuple[int, ...]
    owners: tuple[Box, ...]

    def __post_init__(self) -> None:
        if not all(hasattr(n, "__index__") for n in self.shape):
            raise ArgumentTypeError("Layout", "shape", self.shape, "must hold integers")
        if not self.shape or min(self.shape) < 1:
            allowed = "needs axes, of 1 cell or more each"
            raise ArgumentError("Layout", "shape", self.shape, allowed)
        if prod(self.shape) >= 2**63:
            allowed = "must have fewer than 2**63 cells"
            raise ArgumentError("Layout", "shape", self.shape, allowed)
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        named = enumerate(self.owners)
        boxes = [as_box("Layout", f"box of rank {i}", box, len(self.shape)) for i, box in named]
        boxes = [_clipped(box, self.shape) if box.empty else box for box in boxes]
        object.__setattr__(self, "owners", tuple(boxes))
        _check_tiling(whole(self.shape), boxes)

    @classmethod
    def grid(cls, shape: Sequence[int], procs: Sequence[int]) -> Layout:
        """Return a Cartesian grid of procs[axis] parts along each axis, as even as possible.

        Ranks are numbered with the last axis fastest; some parts are empty if there are more
        parts than cells. Raises ValueError if procs does not fit shape or has a number below 1.
        """
        shape, procs = tuple(shape), tuple(procs)
        if len(shape) != len(procs) or min(procs, default=1) < 1:
            allowed = f"needs 1 or more for each axis of {shape}"
            raise ArgumentError("Layout", "procs", procs, allowed)
        cuts = [[split(n, p, i) for i in range(p)] for n, p in zip(shape, procs, strict=True)]
        return cls(shape, tuple(Box(*zip(*part, strict=True)) for part in product(*cuts)))

    @classmethod
    def boxes(cls, shape: Sequence[int], boxes: Sequence[Box]) -> Layout:
        """Return the layout of any disjoint boxes that cover the domain, one for each rank."""
        return cls(tuple(shape), tuple(boxes))

    @classmethod
    def at(cls, shape: Sequence[int], root: int, ranks: int) -> Layout:
        """Return the layout in which one rank owns everything."""
        nothing = Box((0,) * len(shape), (0,) * len(shape))
        boxes = [whole(shape) if rank == root else nothing for rank in range(ranks)]
        return cls(tuple(shape), tuple(boxes))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.owners)

    @property
    def domain(self) -> Box:
        """All cells."""
        return whole(self.shape)

    def owner(self, rank: int) -> Box:
        """Return the box that a rank owns."""
        return self.owners[rank]

    @property
    def digest(self) -> str:
        """A hash of shape and boxes, the same for equal layouts."""
        return sha256(repr((self.shape, self.owners)).encode()).hexdigest()


def check_layout(function: str, argument: str, layout: object, ranks: int | None = None) -> None:
    """Raise TypeError if layout is not a Layout, ValueError if its number of ranks differs."""
    if not isinstance(layout, Layout):
        raise ArgumentTypeError(function, argument, layout, "must be a Layout")
    if ranks is not None and layout.ranks != ranks:
        shown, allowed = f"one of {layout.ranks} boxes", f"must have {ranks}, one for each rank"
        raise ArgumentError(function, argument, layout, allowed, shown)


def _clipped(box: Box, shape: Sequence[int]) -> Box:
    """Return an empty box moved into the domain."""
    ends = box.start, map(max, box.start, box.stop)
    return Box(*(tuple(min(max(i, 0), n) for i, n in zip(e, shape, strict=True)) for e in ends))


def outside(box: Box, holes: Sequence[Box]) -> list[Box]:
    """Return disjoint boxes that cover the cells of a box outside all holes."""
    left = [box]
    for hole in holes:
        left = [rest for each in left for rest in each.without(hole)]
    return [each for each in left if not each.empty]


def _check_tiling(domain: Box, boxes: Sequence[Box]) -> None:
    """Raise ValueError unless the boxes are disjoint, inside the domain and cover all of it."""
    for rank, box in enumerate(boxes):
        if not domain.contains(box):
            raise ValueError(f"Layout: rank {rank} has {box}: reaches outside the domain {domain}")
    _check_disjoint(boxes)
    if sum(box.size for box in boxes) == domain.size:
        return
    left = outside(domain, boxes)
    cells = sum(each.size for each in left)
    raise ValueError(f"Layout: no rank owns {left[0]} of {domain}, {cells} cells in all")


def _check_disjoint(boxes: Sequence[Box]) -> None:
    """Raise ValueError, naming two ranks, if boxes overlap."""
    if not boxes:
        return
    starts = np.array([box.start for box in boxes])
    stops = np.array([box.stop for box in boxes])
    filled = np.asarray((stops > starts).all(axis=1))
    for rank in np.flatnonzero(filled).tolist():
        lows = np.maximum(starts[rank], starts[rank + 1 :])
        overlap = (lows < np.minimum(stops[rank], stops[rank + 1 :])).all(axis=1)
        overlap &= filled[rank + 1 :]
        if overlap.any():
            other = rank + 1 + int(np.flatnonzero(overlap)[0])
            raise ValueError(
                f"Layout: ranks {rank} and {other} both own "
                f"{boxes[rank].intersect(boxes[other])}: {boxes[rank]} and {boxes[other]} overlap"
            )


def balanced_grid(ranks: int, axes: int) -> list[int]:
    """Return factors of ranks, one per axis, as equal as possible, in rising order; for procs."""
    if axes == 1:
        return [ranks]
    root = int(ranks ** (1 / axes) + 1e-9)
    first = next(n for n in range(root, 0, -1) if ranks % n == 0)
    return [first, *balanced_grid(ranks // first, axes - 1)]


PerAxis = int | Sequence[int]


def receptive(
    box: Box, size: PerAxis, step: PerAxis = 1, pad: PerAxis = 0, dilation: PerAxis = 1
) -> Box:
    """Return the window that the outputs in box need: [lo step - pad, (hi - 1) step - pad + reach).

    reach = dilation (size - 1) + 1 cells; each argument is one number, or one for each axis
    Raises ValueError if size, step or dilation is below 1, or their number does not fit.
    """
    arguments = {"size": size, "step": step, "pad": pad, "dilation": dilation}
    numbers = {name: _each_axis(name, value, box.ndim) for name, value in arguments.items()}
    for name in ("size", "step", "dilation"):
        if min(numbers[name]) < 1:
            raise ArgumentError("receptive", name, arguments[name], "must be 1 or more")
    axes = list(zip(box.start, box.stop, *numbers.values(), strict=True))
    start = tuple(lo * t - p for lo, _, _, t, p, _ in axes)
    stop = tuple((hi - 1) * t - p + d * (s - 1) + 1 for _, hi, s, t, p, d in axes)
    return Box(start, start if box.empty else stop)


def _each_axis(name: str, value: PerAxis, ndim: int) -> tuple[int, ...]:
    numbers = [int(n) for n in np.ravel(value)] * (ndim if np.ndim(value) == 0 else 1)
    if len(numbers) != ndim or np.ndim(value) > 1:
        raise ArgumentError("receptive", name, value, f"needs one number, or {ndim}, one per axis")
    return tuple(numbers)

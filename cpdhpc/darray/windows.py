"""Which cells of whose box each rank's window shows: geometry, without arrays and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .boundary import Mode, Segment, check_fits, fill_value, segments
from .box import Box
from .layout import Layout


class Piece(NamedTuple):
    """A box of one rank's cells that shows as a box of a window.

    source: in coordinates of the domain; target: in those of the window, which may lie outside
    steps: along each axis 1, -1 (reversed) or 0 (one cell of the source shows in all of target)
    """

    source: Box
    target: Box
    steps: tuple[int, ...]

    @property
    def is_itself(self) -> bool:
        """Whether the cells show where they are."""
        return self.source == self.target and min(self.steps) == 1

    def repeats(self) -> Iterator[tuple[slice, ...]]:
        """Yield the parts of the target that each show all of the source, the last axis fastest."""
        axes = zip(self.target.shape, self.steps, strict=True)
        yield from product(
            *((slice(None),) if step else [slice(i, i + 1) for i in range(n)] for n, step in axes)
        )


class Fill(NamedTuple):
    """Cells of a window that no one owns, and their value."""

    target: Box
    value: complex


class Windows:
    """The input windows of all ranks over a layout.

    boxes: the window of each rank: any box, overlapping, beyond the domain, or empty
    modes: the boundary mode of each axis
    Raises ValueError where a mode does not fit a window.
    """

    def __init__(self, layout: Layout, boxes: Sequence[Box], modes: Sequence[Mode]) -> None:
        self.layout, self.boxes, self.modes = layout, tuple(boxes), tuple(modes)
        for rank, box in enumerate(self.boxes):
            self._check(f"WindowPlan: window {box} of rank {rank}", box)

    def _check(self, what: str, box: Box) -> None:
        if box.empty:
            return
        for axis, (mode, extent) in enumerate(zip(self.modes, self.layout.shape, strict=True)):
            check_fits(f"{what}, axis {axis}", box.start[axis], box.stop[axis], extent, mode)

    def owners(self, rank: int) -> list[int]:
        """Return the ranks whose cells the window of a rank shows, itself included, in order."""
        hull = self._hulls[rank]
        near = (self._bounds[:, 0] < hull[1]) & (self._bounds[:, 1] > hull[0])
        found = np.flatnonzero(near.all(axis=1) & self._filled)
        return [int(owner) for owner in found if any(self.pieces(int(owner), rank))]

    def readers(self, rank: int) -> list[int]:
        """Return the ranks whose windows show cells of a rank, itself included, in order."""
        box = self._bounds[rank]
        near = (self._hulls[:, 0] < box[1]) & (self._hulls[:, 1] > box[0])
        found = np.flatnonzero(near.all(axis=1) & self._filled[rank])
        return [int(reader) for reader in found if any(self.pieces(rank, int(reader)))]

    def pieces(self, owner: int, reader: int) -> Iterator[Piece]:
        """Yield the pieces of an owner's box in a reader's window, in one order everywhere."""
        window, box = self.boxes[reader], self.layout.owners[owner]
        if window.empty or box.empty:
            return
        axes = []
        for axis in range(box.ndim):
            found = self._segments(axis, window.start[axis], window.stop[axis])
            cut = (_cut(each, box.start[axis], box.stop[axis]) for each in found)
            axes.append([each for each in cut if each.length])
        for combined in product(*axes):
            yield _piece(combined)

    def fills(self, rank: int) -> list[Fill]:
        """Return the boxes of a window that are filled; later ones lie over earlier ones."""
        window, found = self.boxes[rank], []
        for axis, (mode, extent) in enumerate(zip(self.modes, self.layout.shape, strict=True)):
            value = fill_value(mode)
            if value is None or window.empty:
                continue
            inside = replaced(window, axis, 0, extent)
            found += [Fill(box, value) for box in window.without(inside.intersect(window))]
        return found

    def _segments(self, axis: int, start: int, stop: int) -> list[Segment]:
        return list(segments(start, stop, self.layout.shape[axis], self.modes[axis]))

    @cached_property
    def _bounds(self) -> npt.NDArray[np.int64]:
        """int64[ranks, 2, axes]: the boxes that ranks own."""
        return np.array(self.layout.owners, np.int64)

    @cached_property
    def _filled(self) -> npt.NDArray[np.bool_]:
        """bool[ranks]: who owns cells."""
        return np.asarray((self._bounds[:, 0] < self._bounds[:, 1]).all(axis=1))

    @cached_property
    def _hulls(self) -> npt.NDArray[np.int64]:
        """int64[ranks, 2, axes]: a box around the cells that each window shows; empty at -1."""
        hulls = np.full((len(self.boxes), 2, len(self.layout.shape)), -1, np.int64)
        known: dict[tuple[int, int, int], tuple[int, int]] = {}
        for rank, box in enumerate(self.boxes):
            for axis in () if box.empty else range(box.ndim):
                key = axis, box.start[axis], box.stop[axis]
                if key not in known:
                    known[key] = _hull(self._segments(*key))
                hulls[rank, :, axis] = known[key]
        return hulls


def _hull(found: Sequence[Segment]) -> tuple[int, int]:
    if not found:
        return -1, -1
    return min(s.source for s in found), max(s.source + s.sources for s in found)


def replaced(box: Box, axis: int, low: int, high: int) -> Box:
    """Return the box with another range on one axis."""
    start, stop = list(box.start), list(box.stop)
    start[axis], stop[axis] = low, high
    return Box(tuple(start), tuple(stop))


def _cut(segment: Segment, low: int, high: int) -> Segment:
    """Return the part of a segment whose sources are in low..high; of length 0 if there is none."""
    target, source, length, step = segment
    first, last = max(source, low), min(source + segment.sources, high)
    if first >= last:
        return Segment(target, source, 0, step)
    if step == 0:
        return segment
    ahead = first - source if step == 1 else source + length - last
    return Segment(target + ahead, first, last - first, step)


def _piece(axes: Sequence[Segment]) -> Piece:
    start, stop = tuple(s.source for s in axes), tuple(s.source + s.sources for s in axes)
    target = Box(tuple(s.target for s in axes), tuple(s.target + s.length for s in axes))
    return Piece(Box(start, stop), target, tuple(s.step for s in axes))

"""The geometry of windows: the owned cell that each window cell shows, and boundary modes.

Nothing here sends or holds arrays; plans, costs and pictures are derived from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError
from .layout import Box, Layout, outside

Integers = npt.NDArray[np.int64]

BLOCKS = {  # mode -> cells by which a block is shorter than the extent; whether blocks alternate
    "wrap": (0, False),
    "reflect": (1, True),
    "symmetric": (0, True),
}
MODES = ("zero", *BLOCKS, "edge")


@dataclass(frozen=True)
class Constant:
    """The mode that fills with a value, converted to the array's dtype as NumPy assigns it."""

    value: complex


Mode = str | Constant
Boundary = Mode | Sequence[Mode]


class Segment(NamedTuple):
    """length cells of a window, from target on, and the cells of the domain that they show.

    step 1: source, source + 1, ...; step -1: the same cells reversed, so that the last one shows
    source; step 0: all show source
    """

    target: int
    source: int
    length: int
    step: int

    @property
    def sources(self) -> int:
        """Number of cells of the domain that are shown."""
        return self.length if self.step else 1


def parse_boundary(boundary: Boundary, ndim: int) -> tuple[Mode, ...]:
    """Return the mode of each axis, from one mode for all or one for each.

    Raises ValueError for unknown modes or a wrong number of them; TypeError for anything else.
    """
    one = isinstance(boundary, str | Constant)
    modes = (boundary,) * ndim if one else boundary
    if not isinstance(modes, Sequence) or not all(isinstance(m, str | Constant) for m in modes):
        allowed = "must be a mode, or one for each axis"
        raise ArgumentTypeError("WindowPlan", "boundary", boundary, allowed)
    unknown = [mode for mode in modes if isinstance(mode, str) and mode not in MODES]
    if unknown:
        allowed = f"known are {', '.join(MODES)} and Constant(value)"
        raise ArgumentError("WindowPlan", "boundary", unknown[0], allowed)
    if len(modes) != ndim:
        raise ArgumentError("WindowPlan", "boundary", boundary, f"needs one mode, or {ndim}")
    return tuple(modes)  # type: ignore[arg-type]


def fill_value(mode: Mode) -> complex | None:
    """Return the fill value of a mode; None for modes that show cells of the domain."""
    if isinstance(mode, Constant):
        return mode.value
    return 0 if mode == "zero" else None


def segments(start: int, stop: int, extent: int, mode: Mode) -> Iterator[Segment]:
    """Yield the segments of a window's cells start..stop, without those that are filled.

    They are disjoint and ordered by target.
    """
    low, high = min(max(start, 0), extent), max(min(stop, extent), 0)
    if start < 0:
        yield from _beyond(start, min(stop, 0), extent, mode)
    if low < high:
        yield Segment(low, low, high - low, 1)
    if stop > extent:
        yield from _beyond(max(start, extent), stop, extent, mode)


def _beyond(start: int, stop: int, extent: int, mode: Mode) -> Iterator[Segment]:
    """Yield the segments of cells that are all on one side of the domain."""
    if start >= stop or fill_value(mode) is not None:
        return
    if mode == "edge" or extent == 1:  # one cell has no block to reflect: numpy.pad repeats it
        yield Segment(start, 0 if start < 0 else extent - 1, stop - start, 0)
        return
    less, reverses = BLOCKS[str(mode)]
    block = extent - less
    for k in range(start // block, (stop - 1) // block + 1):
        low, high = max(start, k * block), min(stop, (k + 1) * block)
        if reverses and k % 2:
            last = (k + 1) * block - 1 + less  # cell c shows last - c
            yield Segment(low, last - (high - 1), high - low, -1)
        else:
            yield Segment(low, low - k * block, high - low, 1)


def sources(start: int, stop: int, extent: int, mode: Mode) -> Integers:
    """Return the cell of the domain that each cell start..stop shows, -1 if it is filled.

    Computed cell by cell with remainders, as an independent check of segments.
    """
    cells = np.arange(start, stop)
    if fill_value(mode) is not None:
        return np.where((cells >= 0) & (cells < extent), cells, -1)
    if mode == "edge":
        return np.clip(cells, 0, extent - 1)
    if mode == "wrap":
        return cells % extent
    if mode == "symmetric":
        within = cells % (2 * extent)
        return np.minimum(within, 2 * extent - 1 - within)
    within = cells % max(1, 2 * (extent - 1))
    return np.minimum(within, 2 * (extent - 1) - within)


def flat_index(axes: Sequence[Integers], shape: Sequence[int]) -> Integers:
    """Return the flat index, in an array of this shape, of all combinations of the axes' indices.

    axes: int64[n] each; returns int64[n of each axis]; meaningless if an index is -1
    """
    index = np.zeros((), np.int64)
    for axis, extent in zip(axes, shape, strict=True):
        index = index[..., None] * extent + axis
    return index


class Piece(NamedTuple):
    """A box of one rank's cells that shows as a box of a window.

    source: in coordinates of the domain; target: in those of the window, which may lie outside
    steps: for each axis 1, -1 (reversed) or 0 (one cell of the source fills all of target)
    """

    source: Box
    target: Box
    steps: tuple[int, ...]

    @property
    def is_itself(self) -> bool:
        """Whether the cells show at their own coordinates."""
        return self.source == self.target and min(self.steps) == 1

    def repeats(self) -> Iterator[tuple[slice, ...]]:
        """Yield the parts of the target that each show the whole source, the last axis fastest."""
        axes = zip(self.target.shape, self.steps, strict=True)
        yield from product(
            *((slice(None),) if step else [slice(i, i + 1) for i in range(n)] for n, step in axes)
        )


class Fill(NamedTuple):
    """Cells of a window that no rank owns, and their value."""

    target: Box
    value: complex


class Message(NamedTuple):
    """The cells that travel between this rank and another in one exchange, in one message."""

    rank: int
    pieces: tuple[Piece, ...]

    @property
    def cells(self) -> int:
        """Number of cells."""
        return sum(piece.source.size for piece in self.pieces)


class Windows:
    """The input windows of all ranks over a layout.

    boxes: the window of each rank: any box, overlapping, beyond the domain, or empty
    modes: the boundary mode of each axis
    halo_only: whether only cells around the owned boxes are shown
    """

    def __init__(
        self, layout: Layout, boxes: Sequence[Box], modes: Sequence[Mode], halo_only: bool = False
    ) -> None:
        self.layout, self.boxes, self.modes = layout, tuple(boxes), tuple(modes)
        self.halo_only = halo_only

    def parts(self, rank: int) -> list[Box]:
        """Return the disjoint boxes of a window that are shown: all of it, or its halo's boxes."""
        window = self.boxes[rank]
        return [*window.without(self.layout.owners[rank])] if self.halo_only else [window]

    def owners(self, rank: int) -> list[int]:
        """Return the ranks whose cells a rank's window shows, itself included, in order."""
        hull = self._hulls[rank]
        near = (self._bounds[:, 0] < hull[1]) & (self._bounds[:, 1] > hull[0])
        near_ones = np.flatnonzero(near.all(axis=1) & self._filled)
        return [int(owner) for owner in near_ones if any(self.pieces(int(owner), rank))]

    def readers(self, rank: int) -> list[int]:
        """Return the ranks whose windows show a rank's cells, itself included, in order."""
        box = self._bounds[rank]
        near = (self._hulls[:, 0] < box[1]) & (self._hulls[:, 1] > box[0])
        found = np.flatnonzero(near.all(axis=1) & self._filled[rank])
        return [int(reader) for reader in found if any(self.pieces(rank, int(reader)))]

    def pieces(self, owner: int, reader: int) -> Iterator[Piece]:
        """Yield the pieces of an owner's box in a reader's window, in the same order everywhere."""
        for part in self.parts(reader):
            yield from self._shown(self.layout.owners[owner], part)

    def _shown(self, box: Box, window: Box) -> Iterator[Piece]:
        """Yield the pieces of a box in a part of a window."""
        if window.empty or box.empty:
            return
        axes = []
        for axis in range(box.ndim):
            segments = self._segments(axis, window.start[axis], window.stop[axis])
            cut = (_cut(each, box.start[axis], box.stop[axis]) for each in segments)
            axes.append([each for each in cut if each.length])
        for combined in product(*axes):
            yield _piece(combined)

    def fills(self, rank: int) -> list[Fill]:
        """Return the disjoint boxes of a window that are filled; the last axis has precedence."""
        return [fill for part in self.parts(rank) for fill in self._fills(part)]

    def _fills(self, window: Box) -> list[Fill]:
        fills = list[Fill]()
        for axis, (mode, extent) in enumerate(zip(self.modes, self.layout.shape, strict=True)):
            value = fill_value(mode)
            if value is None or window.empty:
                continue
            inside = replaced(window, axis, 0, extent)
            beyond = list(window.without(inside.intersect(window)))
            fills = [Fill(rest, each) for box, each in fills for rest in outside(box, beyond)]
            fills += [Fill(box, value) for box in beyond]
        return fills

    def shown(self, rank: int) -> list[Integers]:
        """Return, for each axis, the index of the cell that each cell of a window shows, or -1.

        Computed with sources, independently of pieces.
        """
        start, stop = self.boxes[rank]
        ends = zip(start, map(max, start, stop), self.layout.shape, self.modes, strict=True)
        return [sources(*axis) for axis in ends]

    def _segments(self, axis: int, start: int, stop: int) -> list[Segment]:
        return list(segments(start, stop, self.layout.shape[axis], self.modes[axis]))

    @cached_property
    def _bounds(self) -> Integers:
        """int64[ranks, 2, axes]: the boxes that ranks own."""
        return np.array(self.layout.owners, np.int64)

    @cached_property
    def _filled(self) -> npt.NDArray[np.bool_]:
        """bool[ranks]: whether each rank owns cells."""
        return np.asarray((self._bounds[:, 0] < self._bounds[:, 1]).all(axis=1))

    @cached_property
    def _hulls(self) -> Integers:
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


def _hull(segments: Sequence[Segment]) -> tuple[int, int]:
    if not segments:
        return -1, -1
    return min(s.source for s in segments), max(s.source + s.sources for s in segments)


def replaced(box: Box, axis: int, low: int, high: int) -> Box:
    """Return the box with another range on one axis."""
    start, stop = list(box.start), list(box.stop)
    start[axis], stop[axis] = low, high
    return Box(tuple(start), tuple(stop))


def _cut(segment: Segment, low: int, high: int) -> Segment:
    """Return the part of a segment whose sources are in low..high; its length may be 0."""
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


class RankPieces:
    """One rank's part of an exchange over windows.

    owned, window: its boxes; layout, windows: of all ranks
    sends, recvs: one Message for each rank that reads from or is read by this one, by rank
    local: pieces of this rank's own box; fills: cells that no rank owns
    uncovered: parts of the owned box that its own window does not show in place; their sums begin
        with zero
    halo_only, parts: of the windows; shape: of an array on the shown part of the window
    """

    def __init__(self, windows: Windows, rank: int) -> None:
        self.windows, self.layout, self.rank = windows, windows.layout, rank
        self.owned, self.window = windows.layout.owner(rank), windows.boxes[rank]
        self.sends: tuple[Message, ...] = tuple(
            Message(r, tuple(windows.pieces(rank, r))) for r in windows.readers(rank) if r != rank
        )
        self.recvs: tuple[Message, ...] = tuple(
            Message(r, tuple(windows.pieces(r, rank))) for r in windows.owners(rank) if r != rank
        )
        self.local = tuple(windows.pieces(rank, rank))
        self.fills = windows.fills(rank)
        self.halo_only, self.parts = windows.halo_only, windows.parts(rank)
        cells = sum(part.size for part in self.parts)
        self.shape = (cells,) if self.halo_only else self.window.shape
        own = [piece.source for piece in self.local if piece.is_itself]
        self.uncovered = [] if self.halo_only else outside(self.owned, own)

    def bare(self) -> RankPieces:
        """Return a copy without references to its users."""
        pieces = object.__new__(RankPieces)
        vars(pieces).update(vars(self))
        return pieces

    @cached_property
    def interior(self) -> Box:
        """The largest box, up to greedy cuts, that can be computed before any message arrives."""
        return interior_of(self.window, [p.target for m in self.recvs for p in m.pieces])

    @cached_property
    def boundary_parts(self) -> list[Box]:
        """The rest of the window, in disjoint boxes."""
        return list(self.window.without(self.interior))

    def inside(self, y: Any) -> Any:
        """Return the part of an array on the window that this rank owns, as a view.

        Raises ValueError if the window does not contain the owned box.
        """
        if not self.window.contains(self.owned):
            raise ValueError(f"inside: window {self.window} does not contain {self.owned}")
        if self.owned.empty:  # it may lie outside the window
            return y.reshape(-1)[:0].reshape(self.owned.shape + tuple(y.shape[self.owned.ndim :]))
        return y[self.owned.slices(self.window.start)]


def interior_of(window: Box, remote: Sequence[Box]) -> Box:
    """Return a box of the window without cells of remote boxes, which are disjoint.

    Each cut keeps the most cells that are in none of them, so the box is empty only if no such
    cell exists.
    """
    inner = window
    starts, stops = (np.array([getattr(b, at) for b in remote]) for at in ("start", "stop"))
    for box in remote:
        hole = inner.intersect(box)
        if hole.empty:
            continue
        cuts = []
        for axis in range(box.ndim):
            cuts.append(replaced(inner, axis, inner.start[axis], hole.start[axis]))
            cuts.append(replaced(inner, axis, hole.stop[axis], inner.stop[axis]))
        ends = np.minimum(stops, [[cut.stop] for cut in cuts])
        sides = (ends - np.maximum(starts, [[cut.start] for cut in cuts])).clip(0)
        gains = [cut.size for cut in cuts] - sides.prod(2).sum(1)
        inner = cuts[int(gains.argmax())]
    return inner

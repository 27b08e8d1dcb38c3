"""Pieces of windows packed and unpacked by slices: arrays of every kind and dtype.

This is what an exchange and its transpose mean; moving.py does the same in compiled loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .array_kinds import Array, Kind
from .layout import Box
from .windows import Piece

if TYPE_CHECKING:
    from .plan import WindowPlan


class Source(NamedTuple):
    """What pieces are cut from: the boxes of a rank's two arrays, and how to turn them."""

    owned: Box
    window: Box
    kind: Kind

    def shown(self, x: Array, piece: Piece) -> Array:
        """Return the cells of a piece in the array on the owned box."""
        return x[piece.source.slices(self.owned.start)]

    def target(self, piece: Piece) -> tuple[slice, ...]:
        """Return where a piece lies in the array on the window."""
        return piece.target.slices(self.window.start)

    def turned(self, values: Array, piece: Piece) -> Array:
        """Return values backwards along the axes that a piece shows so."""
        return self.kind.flip(values, [i for i, step in enumerate(piece.steps) if step < 0])

    def gathered(self, y: Array, piece: Piece) -> Array:
        """Return a piece of a window in the shape of its source.

        Where one cell shows many times these are added one after another, the last axis fastest.
        """
        values = self.turned(y[self.target(piece)], piece)
        places = list(piece.repeats())
        if len(places) == 1:
            return values
        total = values[places[0]]
        for place in places[1:]:
            total = self.kind.sum(total, values[place])
        return total


def flat_pieces(pieces: Sequence[Piece], values: Array, trail: tuple[int, ...]) -> Iterator[Array]:
    """Yield the part of a message that each piece takes, in the shape of its source."""
    size, start = 1, 0
    for n in trail:
        size *= n
    for piece in pieces:
        stop = start + piece.source.size * size
        yield values[start:stop].reshape(piece.source.shape + trail)
        start = stop


def pack_cells(cut: Source, pieces: Sequence[Piece], x: Array, values: Array) -> None:
    """Write the cells of an owned box that pieces show into a message."""
    trail = tuple(x.shape[cut.owned.ndim :])
    for piece, part in zip(pieces, flat_pieces(pieces, values, trail), strict=True):
        part[...] = cut.shown(x, piece)


def unpack_cells(cut: Source, pieces: Sequence[Piece], values: Array, out: Array) -> None:
    """Write a message where its pieces show in a window."""
    trail = tuple(out.shape[cut.owned.ndim :])
    for piece, part in zip(pieces, flat_pieces(pieces, values, trail), strict=True):
        out[cut.target(piece)] = cut.turned(part, piece)


def pack_sums(cut: Source, pieces: Sequence[Piece], y: Array, values: Array) -> None:
    """Write the cells of a window into a message, in the shapes of their sources."""
    trail = tuple(y.shape[cut.owned.ndim :])
    for piece, part in zip(pieces, flat_pieces(pieces, values, trail), strict=True):
        part[...] = cut.gathered(y, piece)


def add_sums(cut: Source, pieces: Sequence[Piece], values: Array, out: Array) -> None:
    """Add a message to the owned cells that its pieces show."""
    trail = tuple(out.shape[cut.owned.ndim :])
    for piece, part in zip(pieces, flat_pieces(pieces, values, trail), strict=True):
        _add(cut, piece, part, out)


def _add(cut: Source, piece: Piece, values: Array, out: Array) -> None:
    """Add values to the owned cells that a piece shows."""
    place = piece.source.slices(cut.owned.start)
    out[place] = cut.kind.sum(out[place], values)


def show_own(cut: Source, plan: WindowPlan, x: Array, out: Array) -> None:
    """Fill what no one owns in a window, and what shows this rank's own cells."""
    for fill in plan.fills:
        out[fill.target.slices(cut.window.start)] = fill.value
    for piece in plan.local:
        out[cut.target(piece)] = cut.turned(cut.shown(x, piece), piece)


def sum_own(cut: Source, plan: WindowPlan, y: Array, out: Array) -> None:
    """Begin the sums: the cell of the window itself where there is one, else zero; then mirrors."""
    for box in plan.uncovered:
        out[box.slices(cut.owned.start)] = 0
    for piece in plan.local:
        if piece.is_itself:
            out[piece.source.slices(cut.owned.start)] = y[cut.target(piece)]
    for piece in plan.local:
        if not piece.is_itself:
            _add(cut, piece, cut.gathered(y, piece), out)

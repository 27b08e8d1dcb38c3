"""The cost of an exchange over windows, before it is done, and its verification on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from ..formats import INTEGERS, Format
from ..ops import payloads
from ..world.ranks import Ranks
from .layout import Box
from .windows import Integers, RankPieces, Windows, fill_value, flat_index, interior_of


@dataclass(frozen=True)
class RankCost:
    """One rank's part of an exchange; an accumulation sends what an exchange receives.

    owned_cells, window_cells, interior_cells: of its boxes; interior: the largest box of the
        window, up to greedy cuts, that can be computed before any message arrives
    local_cells: cells of the window that show this rank's own cells
    sends_to: the ranks that it sends to; recvs_from: those that it receives from
    sent_bytes, received_bytes: of payloads
    """

    rank: int
    owned_cells: int
    window_cells: int
    interior_cells: int
    local_cells: int
    sends_to: tuple[int, ...]
    recvs_from: tuple[int, ...]
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Description:
    """The costs of an exchange for every rank; str() makes a table.

    cell: description of one cell; imbalance: maximum over mean of ranks, 1 at best
    """

    name: str
    cell: str
    ranks: tuple[RankCost, ...]

    @property
    def messages(self) -> int:
        """Messages of all ranks."""
        return sum(len(each.sends_to) for each in self.ranks)

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave all ranks."""
        return sum(each.sent_bytes for each in self.ranks)

    @property
    def most_bytes(self) -> int:
        """Bytes that leave or reach the busiest rank, whichever is more."""
        return max(max(each.sent_bytes, each.received_bytes) for each in self.ranks)

    @property
    def most_neighbours(self) -> int:
        """The largest number of ranks that one rank exchanges messages with."""
        return max(len({*each.sends_to, *each.recvs_from}) for each in self.ranks)

    @property
    def imbalance_owned(self) -> float:
        """Imbalance of the cells that ranks own."""
        return _imbalance([each.owned_cells for each in self.ranks])

    @property
    def imbalance_window(self) -> float:
        """Imbalance of the cells of the windows."""
        return _imbalance([each.window_cells for each in self.ranks])

    @property
    def imbalance_bytes(self) -> float:
        """Imbalance of the bytes that leave each rank."""
        return _imbalance([each.sent_bytes for each in self.ranks])

    @property
    def interior_share(self) -> float:
        """Share of all windows' cells in interiors: computation that can hide messages."""
        cells = sum(each.window_cells for each in self.ranks)
        return sum(each.interior_cells for each in self.ranks) / cells if cells else 1.0

    def __str__(self) -> str:
        """Return a line for each rank, then the totals."""
        head = ("rank", "owned", "window", "interior", "to", "from", "bytes out", "bytes in")
        rows: list[tuple[str, ...]] = [head]
        for each in self.ranks:
            numbers = (each.rank, each.owned_cells, each.window_cells, each.interior_cells,
                       len(each.sends_to), len(each.recvs_from), each.sent_bytes,
                       each.received_bytes)  # fmt: skip
            rows.append(tuple(map(str, numbers)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join(
            [
                f"plan {self.name!r}: {len(self.ranks)} ranks, a cell is {self.cell}",
                *lines,
                f"{self.messages} messages of {self.sent_bytes} bytes in all; at most "
                f"{self.most_neighbours} neighbours and {self.most_bytes} bytes per rank, "
                "one message each",
                f"imbalance (most / mean): owned {self.imbalance_owned:.3f}, "
                f"windows {self.imbalance_window:.3f}, bytes out {self.imbalance_bytes:.3f}; "
                f"interior share {100 * self.interior_share:.1f}%",
            ]
        )


def _imbalance(values: Sequence[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def packed_wire(wire: str | Format) -> payloads.Packed | None:
    """Return the encoder of cells that travel; None for "raw". Raises TypeError or ValueError."""
    if isinstance(wire, str) and wire in INTEGERS:
        allowed = "integers are for sums: use raw or a format"
        raise ArgumentError("WindowPlan", "wire", wire, allowed)
    return payloads.packed_wire(wire, "WindowPlan")


def describe(
    windows: Windows,
    dtype: str = "float32",
    trail: Sequence[int] = (),
    wire: payloads.Packed | None = None,
    name: str = "windows",
) -> Description:
    """Return the costs of an exchange over windows; needs no MPI, and no world of this size.

    dtype: a NumPy dtype's name; trail: the further axes; wire: None if cells travel unchanged
    """
    itemsize, n = np.dtype(dtype).itemsize, prod(trail)
    ranks = range(windows.layout.ranks)

    def size_bytes(cells: int) -> int:
        return cells * n * itemsize if wire is None else wire.size_bytes(cells * n)

    sent_bytes: list[dict[int, int]] = [{} for _ in ranks]  # to each other rank
    received_bytes: list[dict[int, int]] = [{} for _ in ranks]  # from each
    targets: list[list[Box]] = [[] for _ in ranks]  # boxes of each window that messages change
    for rank in ranks:
        for owner in windows.owners(rank):
            if owner != rank:
                pieces = list(windows.pieces(owner, rank))
                n_bytes = size_bytes(sum(piece.source.size for piece in pieces))
                received_bytes[rank][owner] = sent_bytes[owner][rank] = n_bytes
                targets[rank] += [piece.target for piece in pieces]
    costs = []
    for rank, box in enumerate(windows.boxes):
        local = sum(piece.target.size for piece in windows.pieces(rank, rank))
        interior = interior_of(box, targets[rank]).size
        sends, receives = sent_bytes[rank], received_bytes[rank]
        costs.append(
            RankCost(rank, windows.layout.owner(rank).size, box.size, interior, local,
                     tuple(sorted(sends)), tuple(receives), sum(sends.values()),
                     sum(receives.values()))
        )  # fmt: skip
    cell = f"{dtype} x {n}" + ("" if wire is None else f", on the wire {wire.cast.fmt.name}")
    return Description(name, cell, tuple(costs))


Array = npt.NDArray[Any]
Operation = Callable[[Array], Array]  # exchange or accumulate of a plan
LARGEST = 1000  # integer in the dot test: its sums stay below 2**63 for 2**43 cells


@dataclass(frozen=True)
class Verification:
    """The findings of verify, over all ranks.

    cells: of all windows; wrong_cells: those that differ from what their boundary mode requires
    dot: <E x, y>; dot_transposed: <x, E^T y>; must be equal
    owned_cells: of the domain; wrong_counts: those whose accumulated ones differ from the number
        of cells that show them
    calls: how often each operation ran: first by slices, then by programs, which are compared too
    """

    cells: int
    wrong_cells: int
    dot: int
    dot_transposed: int
    owned_cells: int
    wrong_counts: int
    calls: int

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.wrong_cells and self.dot == self.dot_transposed and not self.wrong_counts

    def __str__(self) -> str:
        """Return the figures in one line."""
        return (
            f"{self.wrong_cells} of {self.cells} cells of windows wrong, <Ex, y> - <x, E'y> = "
            f"{self.dot - self.dot_transposed}, {self.wrong_counts} of {self.owned_cells} counts "
            f"wrong, {self.calls} calls each"
        )


def verify(
    pieces: RankPieces, world: Ranks, exchange: Operation, accumulate: Operation, calls: int = 3
) -> Verification:
    """Return the findings of three checks of a plan's operations. Collective.

    Each window cell is compared with the owned cell computed directly from its coordinates; the
    dot test proves that accumulate is the transpose of exchange for these numbers; and
    accumulated ones must be the numbers of cells that show each owned cell.
    calls: how often each operation runs; the first call takes another path through the code
    """
    wrong = sum(_wrong_cells(pieces, exchange) for _ in range(calls))
    dots = [_dots(pieces, exchange, accumulate, call) for call in range(calls)]
    counts = sum(_wrong_counts(pieces, accumulate) for _ in range(calls))
    mine = (pieces.window.size, wrong, sum(d for d, _ in dots), sum(d for _, d in dots),
            pieces.owned.size, counts)  # fmt: skip
    everyone = world.gather(mine, "verify")
    cells, wrong, dot, transposed, owned, counts = (
        sum(each) for each in zip(*everyone, strict=True)
    )
    return Verification(cells, wrong, dot, transposed, owned, counts, calls)


def owned_index(pieces: RankPieces) -> Integers:
    """Return the flat index in the domain of each cell that the rank owns."""
    axes = [np.arange(a, max(a, b)) for a, b in zip(*pieces.owned, strict=True)]
    return flat_index(axes, pieces.layout.shape)


def expected_window(
    pieces: RankPieces, values_of: Callable[[Integers], Array], dtype: npt.DTypeLike
) -> Array:
    """Return the correct content of the rank's window, found cell by cell, without pieces.

    values_of: returns the values of cells, with any further axes, by their flat index
    """
    axes = pieces.windows.shown(pieces.rank)
    expected = values_of(flat_index(axes, pieces.layout.shape)).astype(dtype)
    for axis, mode in enumerate(pieces.windows.modes):  # the last axis has precedence
        value = fill_value(mode)
        if value is not None:
            expected[_filled(axes, axis)] = value
    return expected


def _filled(axes: Sequence[Integers], axis: int) -> tuple[Any, ...]:
    """Return the index of a window's cells that are filled because of an axis."""
    return (slice(None),) * axis + (axes[axis] < 0,)


def _dtype(pieces: RankPieces) -> type[np.generic]:
    """Return a dtype for integers that also holds the fill values of windows.

    Floating point is as exact as int64 here: sums stay below 2**53 for 2**33 cells.
    """
    values = [fill_value(mode) for mode in pieces.windows.modes]
    if any(isinstance(value, complex) for value in values):
        return np.complex128
    whole = all(
        value is None or (float(value.real).is_integer() and abs(value) < 2**53) for value in values
    )
    return np.int64 if whole else np.float64


def _wrong_cells(pieces: RankPieces, exchange: Operation) -> int:
    expected = expected_window(pieces, lambda index: 1 + index, _dtype(pieces))
    window = exchange((1 + owned_index(pieces)).astype(expected.dtype))
    both_nan = (window != window) & (expected != expected)  # the fill value may be NaN
    return int((~((window == expected) | both_nan)).sum())


def _dots(
    pieces: RankPieces, exchange: Operation, accumulate: Operation, call: int
) -> tuple[int, int]:
    """Return this rank's part of <E x, y> and <x, E^T y>; filled cells of E x count as zero."""
    rng, dtype = np.random.default_rng((pieces.rank, call)), _dtype(pieces)
    x = rng.integers(-LARGEST, LARGEST + 1, pieces.owned.shape).astype(dtype)
    y = rng.integers(-LARGEST, LARGEST + 1, pieces.window.shape).astype(dtype)
    window, axes = exchange(x), pieces.windows.shown(pieces.rank)
    for axis in range(len(axes)):
        window[_filled(axes, axis)] = 0
    dots = (window * y).sum(), (x * accumulate(y)).sum()
    return int(dots[0].real), int(dots[1].real)


def _wrong_counts(pieces: RankPieces, accumulate: Operation) -> int:
    """Compare accumulated ones with the numbers of readers, a product of counts along the axes."""
    expected = np.zeros(pieces.owned.shape, np.int64)
    for rank in () if pieces.owned.empty else range(pieces.layout.ranks):
        product = np.ones((), np.int64)
        for axis, shown in enumerate(pieces.windows.shown(rank)):
            counts = np.bincount(shown[shown >= 0], minlength=pieces.layout.shape[axis])
            own = slice(pieces.owned.start[axis], pieces.owned.stop[axis])
            product = product[..., None] * counts[own]
        expected += product
    sums = accumulate(np.ones(pieces.window.shape, np.int64))
    return int((sums != expected).sum())

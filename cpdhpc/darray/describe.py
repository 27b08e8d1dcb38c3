"""What an exchange over windows costs, before it is done: bytes, messages, balance, overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..comm.wire import Packed
from .box import Box
from .windows import Windows, replaced


@dataclass(frozen=True)
class RankCost:
    """One rank's part of an exchange; an accumulation sends what an exchange receives.

    owned_cells, window_cells, interior_cells: of its boxes; interior: what no message changes
    local_cells: of the window, that show cells of its own
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
    """The costs of an exchange for every rank; as text a table.

    cell: what a cell is, in words; imbalance: the most over the mean of ranks, 1 at best
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
        """Ranks that a rank exchanges messages with, at most."""
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
        """Imbalance of the bytes that leave."""
        return _imbalance([each.sent_bytes for each in self.ranks])

    @property
    def interior_share(self) -> float:
        """Share of all windows' cells that no message changes: work to overlap messages with."""
        cells = sum(each.window_cells for each in self.ranks)
        return sum(each.interior_cells for each in self.ranks) / cells if cells else 1.0

    def __str__(self) -> str:
        """Return a line for each rank, and what they have in common."""
        head = ("rank", "owned", "window", "interior", "to", "from", "bytes out", "bytes in")
        lines = [" ".join(f"{text:>10}" for text in head)]
        for each in self.ranks:
            numbers = (each.rank, each.owned_cells, each.window_cells, each.interior_cells,
                       len(each.sends_to), len(each.recvs_from), each.sent_bytes,
                       each.received_bytes)  # fmt: skip
            lines.append(" ".join(f"{number:>10}" for number in numbers))
        return "\n".join(
            [
                f"plan {self.name!r}: {len(self.ranks)} ranks, a cell is {self.cell}",
                *lines,
                f"{self.messages} messages of {self.sent_bytes} bytes in all; at most "
                f"{self.most_neighbours} neighbours and {self.most_bytes} bytes a rank, "
                "one message each",
                f"imbalance (most / mean): owned {self.imbalance_owned:.3f}, "
                f"windows {self.imbalance_window:.3f}, bytes out {self.imbalance_bytes:.3f}; "
                f"interior share {100 * self.interior_share:.1f}%",
            ]
        )


def _imbalance(values: Sequence[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def describe(
    windows: Windows,
    dtype: str = "float32",
    trail: Sequence[int] = (),
    wire: Packed | None = None,
    name: str = "windows",
) -> Description:
    """Return what an exchange over windows costs; needs no MPI, and no world of this size.

    dtype: a NumPy dtype's name; trail: the further axes; wire: None for the cells' own bytes
    """
    itemsize, n = np.dtype(dtype).itemsize, prod(trail)
    ranks = range(windows.layout.ranks)

    def size_bytes(cells: int) -> int:
        return cells * n * itemsize if wire is None else wire.size_bytes(cells * n)

    costs = []
    came: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
    gone: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
    targets: dict[int, list[Box]] = {rank: [] for rank in ranks}
    for rank in ranks:
        for owner in windows.owners(rank):
            pieces = list(windows.pieces(owner, rank))
            cells = sum(piece.source.size for piece in pieces)
            if owner != rank:
                came[rank][owner] = gone[owner][rank] = size_bytes(cells)
                targets[rank] += [piece.target for piece in pieces]
    for rank in ranks:
        box = windows.boxes[rank]
        local = sum(piece.target.size for piece in windows.pieces(rank, rank))
        interior = interior_of(box, targets[rank]).size
        costs.append(
            RankCost(rank, windows.layout.owner(rank).size, box.size, interior, local,
                     tuple(sorted(gone[rank])), tuple(came[rank]), sum(gone[rank].values()),
                     sum(came[rank].values()))
        )  # fmt: skip
    cell = f"{dtype} x {n}" + ("" if wire is None else f", on the wire {wire.cast.fmt.name}")
    return Description(name, cell, tuple(costs))


def interior_of(window: Box, remote: Sequence[Box]) -> Box:
    """Return a box of the window without cells of remote boxes: cut where least is lost."""
    inner = window
    for box in remote:
        hole = inner.intersect(box)
        if hole.empty:
            continue
        cuts = []
        for axis in range(box.ndim):
            cuts.append(replaced(inner, axis, inner.start[axis], hole.start[axis]))
            cuts.append(replaced(inner, axis, hole.stop[axis], inner.stop[axis]))
        inner = max(cuts, key=lambda cut: cut.size)
    return inner

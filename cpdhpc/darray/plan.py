"""Plans of windows: built once by all ranks together, then used for any number of exchanges."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..comm.ranks import Ranks
from ..comm.world import as_world
from .boundary import Boundary, parse_boundary
from .box import Box, as_box
from .exchange import Handle, accumulate, begin
from .layout import Layout
from .windows import Fill, Piece, Windows


class Message(NamedTuple):
    """What goes between this rank and another in one exchange, in one message."""

    rank: int
    pieces: tuple[Piece, ...]

    @property
    def cells(self) -> int:
        """Cells that travel."""
        return sum(piece.source.size for piece in self.pieces)


class WindowPlan:
    """How each rank's window, any box, is filled from the boxes that the ranks own. Collective.

    world: a World, or an mpi4py intra-communicator; without virtual ranks
    layout: who owns what, the same on all ranks, one box for each
    window: this rank's input window: any box, beyond neighbours and the domain, or empty
    boundary: what lies beyond the domain: a mode for all axes, or one for each: "zero",
        Constant(value), "wrap", "reflect", "symmetric", "edge", with the meaning of numpy.pad;
        where several axes are filled the last one counts
    name: of the plan in messages
    sends, recvs: one Message for each rank that reads from or is read by this one, by rank;
    local: pieces of this rank's own box; fills: what no one owns
    An exchange is the linear map E with E[cell of the window, cell that it shows] = 1, plus a
    constant; accumulate is its transpose. Arrays have the shape of the box and any further axes
    behind, which are never split. A rank without messages makes no MPI call.
    Raises TypeError or ValueError alike on all ranks.
    """

    def __init__(
        self,
        world: Any,
        layout: Layout,
        window: Box,
        boundary: Boundary = "zero",
        *,
        name: str = "windows",
    ) -> None:
        self.world, self.name = as_world(world), name
        if self.world.virtual_ranks != 1:
            raise ValueError("WindowPlan: world has virtual ranks: needs one rank a process")
        boxes, modes = _agree(self.world, layout, window, boundary, name)
        self.rank = self.world.rank
        self.layout, self.windows = layout, Windows(layout, boxes, modes)
        self.owned, self.window = layout.owner(self.rank), boxes[self.rank]
        others = (rank for rank in self.windows.readers(self.rank) if rank != self.rank)
        self.sends = tuple(self._message(self.rank, rank, rank) for rank in others)
        others = (rank for rank in self.windows.owners(self.rank) if rank != self.rank)
        self.recvs = tuple(self._message(rank, self.rank, rank) for rank in others)
        self.local = tuple(self.windows.pieces(self.rank, self.rank))
        self.fills: list[Fill] = self.windows.fills(self.rank)

    def _message(self, owner: int, reader: int, other: int) -> Message:
        return Message(other, tuple(self.windows.pieces(owner, reader)))

    def exchange(self, x: Any, out: Any = None) -> Any:
        """Return the array on the window, given the array on the owned box. Collective.

        x: owned.shape + any further axes, alike on all ranks; not changed; any dtype
        out: window.shape + the further axes, of x's dtype, overwritten; None for a new one
        Raises TypeError or ValueError where x or out does not fit.
        """
        return self.begin(x, out).finish()

    def accumulate(self, y: Any, out: Any = None) -> Any:
        """Return, for each owned cell, the sum of all cells of windows that show it. Collective.

        The transpose of exchange. Sums begin with zero and this rank's own cells; then come those
        of the other ranks in order, so the same call gives the same bits.
        y: window.shape + any further axes, not changed; out: owned.shape + these, overwritten
        Raises TypeError or ValueError where y or out does not fit.
        """
        return accumulate(self, y, out)

    def begin(self, x: Any, out: Any = None) -> Handle:
        """Start an exchange; its result is what finish of the handle returns. Collective."""
        return begin(self, x, out)


def _agree(
    world: Ranks, layout: Layout, window: Box, boundary: Boundary, name: str
) -> tuple[list[Box], tuple[Any, ...]]:
    """Return the windows of all ranks and the modes; raise any rank's error on all. Collective."""
    entry: Any
    try:
        if not isinstance(layout, Layout):
            raise TypeError(f"WindowPlan: layout is {type(layout).__name__}: must be a Layout")
        if layout.ranks != world.size:
            raise ValueError(f"WindowPlan: layout has {layout.ranks} boxes for {world.size} ranks")
        box = as_box("WindowPlan: window", window, len(layout.shape))
        modes = parse_boundary(boundary, len(layout.shape))
        entry = box, (layout.digest, layout.shape, modes, name)
    except (TypeError, ValueError) as error:
        entry = type(error)(f"rank {world.rank} | {error}")
    entries = world.gather(entry, "WindowPlan")
    for each in entries:
        if isinstance(each, Exception):
            raise each
    for rank, (_, arguments) in enumerate(entries):
        if arguments != entries[0][1]:
            raise ValueError(
                f"WindowPlan: arguments differ: rank 0 has {entries[0][1]}, "
                f"rank {rank} has {arguments} (layout, domain, boundary, name)"
            )
    return [box for box, _ in entries], modes

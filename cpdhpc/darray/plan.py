"""Plans of windows: built once by all ranks together, then used for any number of exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

from ..comm.ranks import Ranks
from ..comm.wire import Packed, parse_wire
from ..comm.world import as_world
from ..formats import INTEGERS, Cast, FloatFormat
from .boundary import Boundary, parse_boundary
from .box import Box, as_box
from .channel import Channel
from .describe import Description, describe, interior_of
from .exchange import Handle, Last, begin, run
from .kinds import Array
from .layout import Layout
from .operation import ACCUMULATE, EXCHANGE
from .verify import Verification, verify
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
    wire: "raw", or a format's name: float32 cells that travel are rounded to it, tile by tile
    name: of the plan in messages
    sends, recvs: one Message for each rank that reads from or is read by this one, by rank;
    local: pieces of this rank's own box; fills: what no one owns; uncovered: parts of the owned
    box that its own window does not show in their place
    An exchange is the linear map E with E[cell of the window, cell that it shows] = 1, plus a
    constant; accumulate is its transpose. Arrays have the shape of the box and any further axes
    behind, which are never split. A rank without messages makes no MPI call.
    All ranks begin the operations of a plan in the same order, with alike dtypes and further axes.
    A plan keeps requests and memory until it is freed, at the latest with its world.
    Raises TypeError or ValueError alike on all ranks.
    """

    def __init__(
        self,
        world: Any,
        layout: Layout,
        window: Box,
        boundary: Boundary = "zero",
        *,
        wire: str | FloatFormat = "raw",
        name: str = "windows",
    ) -> None:
        self.world, self.wire, self.name = as_world(world), wire, name
        boxes, modes, self.packed = _agree(self.world, layout, window, boundary, wire, name)
        self.rank = self.world.rank
        self.layout, self.windows = layout, Windows(layout, boxes, modes)
        self.owned, self.window = layout.owner(self.rank), boxes[self.rank]
        me, windows = self.rank, self.windows
        self.sends: tuple[Message, ...] = tuple(
            Message(r, tuple(windows.pieces(me, r))) for r in windows.readers(me) if r != me
        )
        self.recvs: tuple[Message, ...] = tuple(
            Message(r, tuple(windows.pieces(r, me))) for r in windows.owners(me) if r != me
        )
        self.local = tuple(self.windows.pieces(self.rank, self.rank))
        self.fills: list[Fill] = self.windows.fills(self.rank)
        self.uncovered = _without(self.owned, [p.source for p in self.local if p.is_itself])
        self.stream, self.freed, self.broken = self.world.open_stream(), False, False
        self.channels: dict[tuple[str, str, tuple[int, ...]], Channel] = {}
        self.last: dict[str, Last] = {}
        self.world.shared()  # collective when it is first asked for
        if self.sends or self.recvs:
            self.world.tapes.add(self)

    def exchange(self, x: Array, out: Array = None, *, number: int = 0) -> Array:
        """Return the array on the window, given the array on the owned box. Collective.

        x: owned.shape + any further axes, alike on all ranks; not changed; any dtype; an array of
            NumPy or CuPy, or a torch tensor
        out: window.shape + the further axes, of x's kind and dtype, overwritten; None for a new
            one. It may have x as the part that this rank owns (inside), else they must not overlap
        number: of this call, where calls could get out of order: if another rank sends what has
            another number, the job ends and names both. 0..2**32 - 1
        Raises TypeError or ValueError where x or out does not fit, on this rank alone.
        """
        return run(self, EXCHANGE, x, out, number)

    def accumulate(self, y: Array, out: Array = None, *, number: int = 0) -> Array:
        """Return, for each owned cell, the sum of all cells of windows that show it. Collective.

        The transpose of exchange. Sums begin with the cell in this rank's window, then come other
        cells of that which show it, then those of the other ranks in order; each is rounded to the
        dtype. So the same call gives the same bits.
        y: window.shape + any further axes, not changed; not bool
        out: owned.shape + the further axes, overwritten; may be the owned part of y (inside)
        The other arguments and errors are those of exchange.
        """
        return run(self, ACCUMULATE, y, out, number)

    def begin(self, x: Array, out: Array = None, *, number: int = 0) -> Handle:
        """Start an exchange; its result is what finish of the handle returns. Collective.

        At most two of one plan, dtype and further axes are under way at a time: RuntimeError.
        """
        return begin(self, EXCHANGE, x, out, number)

    def begin_accumulate(self, y: Array, out: Array = None, *, number: int = 0) -> Handle:
        """Start an accumulation, as begin."""
        return begin(self, ACCUMULATE, y, out, number)

    def inside(self, y: Array) -> Array:
        """Return the part of an array on the window that this rank owns, as a view.

        Raises ValueError where the window does not contain the owned box.
        """
        if not self.window.contains(self.owned):
            raise ValueError(f"inside: window {self.window} does not contain {self.owned}")
        if self.owned.empty:  # it may lie outside the window
            return y.reshape(-1)[:0].reshape(self.owned.shape + tuple(y.shape[self.owned.ndim :]))
        return y[self.owned.slices(self.window.start)]

    @cached_property
    def interior(self) -> Box:
        """A box of the window, as large as can be cut, that no message changes."""
        return interior_of(self.window, [p.target for m in self.recvs for p in m.pieces])

    @cached_property
    def boundary_parts(self) -> list[Box]:
        """The rest of the window, in disjoint boxes."""
        return list(self.window.without(self.interior))

    def describe(self, dtype: str = "float32", trail: Sequence[int] = ()) -> Description:
        """Return what an exchange of such cells costs every rank, as a table. Not collective.

        dtype: a NumPy dtype's name; trail: the further axes
        """
        return describe(self.windows, dtype, trail, self.packed, self.name)

    def verify(self) -> Verification:
        """Check exchange and accumulate in integers, exactly, on these ranks. Collective.

        Returns the figures; raises ArithmeticError alike on all ranks where one is wrong, and
        ValueError where the wire rounds.
        """
        return verify(self)

    def free(self) -> None:
        """Free requests and memory once the other ranks have read what was sent.

        Every rank that used the plan must call it, or go on using it.
        """
        self.freed = True
        self.world.tapes.discard(self)
        if not self.broken:
            for channel in self.channels.values():
                channel.free()
        self.channels.clear()
        self.last.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.free()


def _without(box: Box, holes: Sequence[Box]) -> list[Box]:
    """Return disjoint boxes of the cells of a box that are in no hole."""
    left = [box]
    for hole in holes:
        left = [rest for each in left for rest in each.without(hole)]
    return [each for each in left if not each.empty]


def _agree(
    world: Ranks,
    layout: Layout,
    window: Box,
    boundary: Boundary,
    wire: str | FloatFormat,
    name: str,
) -> tuple[list[Box], tuple[Any, ...], Packed | None]:
    """Return the windows of all ranks, modes and wire; raise a rank's error on all. Collective."""
    entry: Any
    try:
        box, modes, packed = _checked(world, layout, window, boundary, wire)
        entry = box, repr((layout.digest, layout.shape, modes, wire, name))  # NaN is not NaN
    except (TypeError, ValueError) as error:
        entry = type(error)(f"rank {world.rank} | {error}")
    entries = world.gather(entry, "WindowPlan")
    for each in entries:
        if isinstance(each, Exception):
            raise each
    for rank, (_, arguments) in enumerate(entries):
        if arguments != entries[0][1]:
            raise ValueError(
                f"WindowPlan: arguments differ: rank 0 has {entries[0][1]}, rank {rank} has "
                f"{arguments} (hash of the layout, domain, boundary, wire, name)"
            )
    return [box for box, _ in entries], modes, packed


def _checked(
    world: Ranks, layout: Layout, window: Box, boundary: Boundary, wire: str | FloatFormat
) -> tuple[Box, tuple[Any, ...], Packed | None]:
    """Return window, modes and wire of this rank, checked."""
    if world.virtual_ranks != 1:
        raise ValueError("WindowPlan: world has virtual ranks: needs one rank a process")
    if not isinstance(layout, Layout):
        raise TypeError(f"WindowPlan: layout is {type(layout).__name__}: must be a Layout")
    if layout.ranks != world.size:
        raise ValueError(f"WindowPlan: layout has {layout.ranks} boxes for {world.size} ranks")
    box = as_box("WindowPlan: window", window, len(layout.shape))
    modes = parse_boundary(boundary, len(layout.shape))
    try:
        fmt = parse_wire(wire)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("allreduce", "WindowPlan")) from None
    if isinstance(wire, str) and wire in INTEGERS:
        raise ValueError(f"WindowPlan: wire={wire!r}: integers are for sums: use raw or a format")
    return box, modes, None if fmt is None else Packed(Cast(fmt), fit=True)

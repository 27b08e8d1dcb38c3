"""Messages between the ranks of two processes: their tags, and pieces where they are long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .ranks import Array

MESSAGE_BYTES = 1 << 30  # longer ones go in pieces: Open MPI 5 counts with 31 bits
STREAMS = 64  # that have tags of their own; more than are under way at a time


def pieces(array: Array) -> list[Array]:
    """Return an array, [n], cut into pieces that one message can hold."""
    return [array[i : i + MESSAGE_BYTES] for i in range(0, array.size, MESSAGE_BYTES)]


class Messages:
    """The messages of a world.

    mpi: the module mpi4py.MPI; virtual_ranks: of each process
    alarm_tag: one that no message has
    Raises ValueError where MPI has too few tags.
    """

    def __init__(self, mpi: Any, virtual_ranks: int) -> None:
        self._byte, self._virtual_ranks = mpi.BYTE, virtual_ranks
        self.alarm_tag = STREAMS * virtual_ranks**2
        self._most_tag: int = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        if self.alarm_tag + virtual_ranks**2 >= self._most_tag:
            raise ValueError(f"World: virtual_ranks={virtual_ranks}: too many for MPI's tags")

    def of(
        self, start: Callable[..., Any], array: Array, rank: int, way: tuple[int, int, int]
    ) -> list[Any]:
        """Return the requests for an array of bytes to or from a rank of another process.

        start: a method of the communicator, as Isend; way: source, target, stream
        """
        process, tag = rank // self._virtual_ranks, self._tag(*way)
        return [start([piece, self._byte], process, tag) for piece in pieces(array)]

    def _tag(self, source: int, to: int, stream: int) -> int:
        """Tell the ranks of two processes apart, and streams; MPI keeps the order within a tag.

        The tags below the alarm's are those of pieces, by turns; above are those of open_stream.
        """
        pairs = self._virtual_ranks**2
        pair = source % self._virtual_ranks * self._virtual_ranks + to % self._virtual_ranks
        if stream >= 0:
            return stream % STREAMS * pairs + pair
        first = STREAMS * pairs + 1
        return first + (-1 - stream) % ((self._most_tag - first) // pairs) * pairs + pair

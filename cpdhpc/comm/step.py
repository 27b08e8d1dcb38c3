"""One round of a rank in an all-reduce, and what the rounds depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["reduce", "hold", "copy"]


class Layout(NamedTuple):
    """What the rounds of a rank depend on.

    nodes: the node of each rank, numbered in the order of first ranks
    piece: number of the piece of the data
    """

    nodes: tuple[int, ...]
    piece: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.nodes)


class Step(NamedTuple):
    """One round of one rank: a message out, a message in, or both at once.

    kind: what travels and what becomes of it.
        "reduce": the sender's partial sums of the chunks; the receiver adds them to its own;
        "hold": the sender's own contributions; the receiver keeps them, and sums what it has, its
            own among it, in the order of ranks, when it first needs the sum;
        "copy": the finished chunks, whose bytes are handed on unchanged.
    send_to, recv_from: rank, or None for no message that way
    send_chunks, recv_chunks: what is in the message, one after another
    send_terms, recv_terms: for each of these chunks, how many ranks' contributions are in it
    """

    kind: Kind
    send_to: int | None = None
    send_chunks: Sequence[int] = ()
    send_terms: Sequence[int] = ()
    recv_from: int | None = None
    recv_chunks: Sequence[int] = ()
    recv_terms: Sequence[int] = ()

"""All-reduce algorithms as data: who sends which chunk to whom in which round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["reduce", "hold", "copy"]


class Step(NamedTuple):
    """One round of one rank: a message out, a message in, or both at once.

    kind: what travels and what becomes of it.
        "reduce": the sender's partial sum of the chunk; the receiver adds it to its own;
        "hold": the sender's own contribution; the receiver keeps it, and sums all of them in
            the order of ranks once it has them;
        "copy": the finished chunk, whose bytes are handed on unchanged.
    send_to, recv_from: rank, or None for no message that way
    """

    kind: Kind
    send_to: int | None
    send_chunk: int
    recv_from: int | None
    recv_chunk: int


def ring(rank: int, ranks: int) -> Iterator[Step]:
    """Yield reduce-scatter, then all-gather, round a ring; rank i finishes chunk i.

    Source: Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of
    workstations, JPDC 69(2), 2009; 2 (p - 1) / p of the data leaves each rank.
    """
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    for i in range(ranks - 1):
        there, here = (rank - i - 1) % ranks, (rank - i - 2) % ranks
        yield Step("reduce", following, there, previous, here)
    for i in range(ranks - 1):
        yield Step("copy", following, (rank - i) % ranks, previous, (rank - i - 1) % ranks)


def tree(rank: int, ranks: int) -> Iterator[Step]:
    """Yield a binomial reduction of the one chunk to rank 0, then a binomial broadcast.

    Source: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in
    MPICH, IJHPCA 19(1), 2005.
    """
    distances = [1 << i for i in range((ranks - 1).bit_length())]
    for distance in distances:
        if rank & distance:
            yield Step("reduce", rank - distance, 0, None, 0)
            break
        if rank + distance < ranks:
            yield Step("reduce", None, 0, rank + distance, 0)
    for distance in reversed(distances):
        place = rank % (2 * distance)
        if place == distance:
            yield Step("copy", None, 0, rank - distance, 0)
        elif place == 0 and rank + distance < ranks:
            yield Step("copy", rank + distance, 0, None, 0)


def direct(rank: int, ranks: int) -> Iterator[Step]:
    """Yield chunk i of every rank to rank i, which sums them, then its result to every rank.

    Two roundings whatever the number of ranks, and the bytes of the ring.
    Source: "scatter-reduce-all-gather" of Markov et al.: CGX, Middleware 2022.
    """
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        yield Step("hold", to, to, source, rank)
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        yield Step("copy", to, rank, source, source)


def gather(rank: int, ranks: int) -> Iterator[Step]:
    """Yield the whole contribution of every rank to every other; each sums them itself.

    Source: CPD's sum_gradients (github.com/drcut/CPD), which gathers and sums in rank order.
    """
    for i in range(1, ranks):
        yield Step("hold", (rank + i) % ranks, 0, (rank - i) % ranks, 0)


def _one(ranks: int) -> int:
    return 1


def _one_each(ranks: int) -> int:
    return ranks


@dataclass(frozen=True)
class Schedule:
    """An algorithm: its rounds, its chunks, and how partial sums may be kept in it.

    steps: (rank, ranks) -> the rounds of that rank, in order
    chunks: ranks -> number of chunks that the data is cut into
    accumulates: the names from ACCUMULATES that make sense in it; default: one of them
    result_travels: whether the finished sum is sent, and so rounded to the wire
    """

    steps: Callable[[int, int], Iterator[Step]]
    chunks: Callable[[int], int]
    accumulates: tuple[str, ...]
    default: str
    result_travels: bool = True


_ANY = ("requantise", "float32", "kahan")

SCHEDULES: dict[str, Schedule] = {
    "ring": Schedule(ring, _one_each, ("requantise",), "requantise"),
    "tree": Schedule(tree, _one, ("requantise",), "requantise"),
    "direct": Schedule(direct, _one_each, _ANY, "float32"),
    "gather": Schedule(gather, _one, _ANY, "requantise", result_travels=False),
}

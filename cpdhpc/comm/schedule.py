"""All-reduce algorithms as data: who sends which chunks to whom in which round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from .hierarchy import hier, hier_chunks
from .step import Layout, Step
from .trees import dbtree, tree


def ring(rank: int, layout: Layout) -> Iterator[Step]:
    """Yield reduce-scatter, then all-gather, round a ring; rank i finishes chunk i.

    Source: Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of
    workstations, JPDC 69(2), 2009; 2 (p - 1) / p of the data leaves each rank.
    """
    ranks = layout.ranks
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    for i in range(ranks - 1):
        there, here = (rank - i - 1) % ranks, (rank - i - 2) % ranks
        yield Step("reduce", following, (there,), (i + 1,), previous, (here,), (i + 1,))
    for i in range(ranks - 1):
        there, here = (rank - i) % ranks, (rank - i - 1) % ranks
        yield Step("copy", following, (there,), (ranks,), previous, (here,), (ranks,))


def rhd(rank: int, layout: Layout) -> Iterator[Step]:
    """Yield recursive halving, then doubling, with circulant skips; rank i finishes chunk i.

    ceil(log2 p) rounds each way, in each of which the skip, at first p, is halved and rounded up;
    each rank sends p - 1 chunks each way.
    Source: Träff: Optimal, non-pipelined reduce-scatter and allreduce algorithms,
    arXiv 2410.14234.
    """
    ranks = layout.ranks
    skips = [ranks]
    while skips[-1] > 1:
        skips.append(-(-skips[-1] // 2))

    def chunks(first: int, count: int) -> tuple[int, ...]:
        return tuple((first + i) % ranks for i in range(count))

    terms = [1] * ranks  # in the partial sums of chunks rank, rank + 1, ...: alike on all ranks
    for before, skip in pairwise(skips):
        count = before - skip
        ahead, back, moved = (rank + skip) % ranks, (rank - skip) % ranks, tuple(terms[skip:before])
        yield Step("reduce", ahead, chunks(ahead, count), moved, back, chunks(rank, count), moved)
        terms[:count] = [a + b for a, b in zip(terms, moved, strict=False)]
    for skip, before in pairwise(reversed(skips)):
        count = before - skip
        ahead, back, moved = (rank + skip) % ranks, (rank - skip) % ranks, (ranks,) * count
        yield Step("copy", back, chunks(rank, count), moved, ahead, chunks(ahead, count), moved)


def direct(rank: int, layout: Layout) -> Iterator[Step]:
    """Yield chunk i of every rank to rank i, which sums them, then its result to every rank.

    Two roundings whatever the number of ranks, and the bytes of the ring.
    Source: "scatter-reduce-all-gather" of Markov et al.: CGX, Middleware 2022.
    """
    ranks = layout.ranks
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        yield Step("hold", to, (to,), (1,), source, (rank,), (1,))
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        yield Step("copy", to, (rank,), (ranks,), source, (source,), (ranks,))


def gather(rank: int, layout: Layout) -> Iterator[Step]:
    """Yield the whole contribution of every rank to every other; each sums them itself.

    Source: CPD's sum_gradients (github.com/drcut/CPD), which gathers and sums in rank order.
    """
    ranks = layout.ranks
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        yield Step("hold", to, (0,), (1,), source, (0,), (1,))


def _one(layout: Layout) -> int:
    return 1


def _one_each(layout: Layout) -> int:
    return layout.ranks


def _few(ranks: int) -> int:
    """While one piece travels the others are encoded and decoded."""
    return 3


def _up_and_down(ranks: int) -> int:
    """A piece on each level of a tree, on the way up and on the way down."""
    return max(3, 2 * (ranks - 1).bit_length())


@dataclass(frozen=True)
class Schedule:
    """An algorithm: its rounds, its chunks, and how partial sums may be kept in it.

    steps: (rank, layout) -> the rounds of that rank, in order
    chunks: layout -> number of chunks that a piece of the data is cut into
    accumulates: the names from ACCUMULATES that make sense in it; default: one of them
    result_travels: whether the finished sum is sent, and so rounded to the wire
    window: number of ranks -> pieces that are under way at a time
    """

    steps: Callable[[int, Layout], Iterator[Step]]
    chunks: Callable[[Layout], int]
    accumulates: tuple[str, ...]
    default: str
    result_travels: bool = True
    window: Callable[[int], int] = _few


_REQUANTISE = ("requantise",)
_ANY = ("requantise", "float32", "kahan")

SCHEDULES: dict[str, Schedule] = {
    "ring": Schedule(ring, _one_each, _REQUANTISE, "requantise"),
    "rhd": Schedule(rhd, _one_each, _REQUANTISE, "requantise"),
    "tree": Schedule(tree, _one, _REQUANTISE, "requantise", window=_up_and_down),
    "dbtree": Schedule(dbtree, _one, _REQUANTISE, "requantise", window=_up_and_down),
    "direct": Schedule(direct, _one_each, _ANY, "float32"),
    "hier": Schedule(hier, hier_chunks, _ANY, "float32"),
    "gather": Schedule(gather, _one, _ANY, "requantise", result_travels=False),
}

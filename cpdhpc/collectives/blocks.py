"""Collectives as data: which rounds of a schedule they use, and the places of their values.

A reduce-scatter is the first half of an all-reduce, an all-gather the second one. A collective's
data are blocks, each for one rank or from one rank; a schedule's chunks are parts of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from ..formats import TILE, tiles
from ..partition import chunk
from .schedules import Algorithm, NodeLayout, Step, ring


class ChunkPlace(NamedTuple):
    """The places of a chunk's values, for one rank.

    at: place in the whole data, which selects random numbers and the shifts of tiles
    n: number of values
    x, out: offsets in the rank's arrays, None if these do not contain the chunk
    """

    at: int
    n: int
    x: int | None
    out: int | None

    def part(self, parts: int, index: int) -> ChunkPlace:
        """Return the place of part index when cut on tiles into parts."""
        first, last = chunk(self.n, parts, index)
        x, out = (None if each is None else each + first for each in (self.x, self.out))
        return ChunkPlace(self.at + first, last - first, x, out)


class Share(NamedTuple):
    """Definition of a collective. steps: (schedule, rank, layout, root) -> the rounds of a rank.

    whole: whether the data are one block, which is cut into pieces first, and these into chunks
    sums: whether contributions are added; otherwise each value is encoded once
    rooted: whether it has a root; same: whether all ranks get the same result
    """

    steps: Callable[[Algorithm, int, NodeLayout, int], Iterator[Step]]
    whole: bool
    sums: bool
    rooted: bool
    same: bool


def _allreduce(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
    return schedule.steps(rank, layout)


def _reduce_scatter(
    schedule: Algorithm, rank: int, layout: NodeLayout, root: int
) -> Iterator[Step]:
    """Yield the rounds up to the sums."""
    return (step for step in schedule.steps(rank, layout) if step.kind != "copy")


def _all_gather(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
    """Yield the rounds after the sums, which add nothing."""
    for step in schedule.steps(rank, layout):
        if step.kind == "copy":
            sent, came = (1,) * len(step.send_chunks), (1,) * len(step.recv_chunks)
            yield step._replace(send_terms=sent, recv_terms=came)


def _from_root(
    steps: Callable[[Algorithm, int, NodeLayout, int], Iterator[Step]],
) -> Callable[[Algorithm, int, NodeLayout, int], Iterator[Step]]:
    """Return the rounds with ranks counted from the root on."""

    def turned(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
        def back(other: int | None) -> int | None:
            return None if other is None else (other + root) % layout.ranks

        for step in steps(schedule, (rank - root) % layout.ranks, layout, 0):
            yield step._replace(send_to=back(step.send_to), recv_from=back(step.recv_from))

    return turned


def _chain(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
    """Yield a chain: receive from the rank before, send to the next one."""
    if rank:
        yield Step("copy", recv_from=rank - 1, recv_chunks=(0,), recv_terms=(1,))
    if rank + 1 < layout.ranks:
        yield Step("copy", rank + 1, (0,), (1,))


_down_tree, _down_chain = _from_root(_all_gather), _from_root(_chain)


def _broadcast(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
    """Yield a broadcast: down a tree; for ring a chain; otherwise to owners, and from them to all.

    Source of the last: Barnett et al.: Interprocessor collective communication library (InterCom),
    SHPCC 1994, which makes a long broadcast of a scatter and an all-gather.
    """
    if schedule.owners is None or is_chain(schedule):
        way = _down_chain if is_chain(schedule) else _down_tree
        yield from way(schedule, rank, layout, root)
        return
    for other, own in _by_owner(schedule, layout, root):
        terms = (1,) * len(own)
        if rank == root:
            yield Step("copy", other, own, terms)
        elif rank == other:
            yield Step("copy", recv_from=root, recv_chunks=own, recv_terms=terms)
    for step in _all_gather(schedule, rank, layout, root):  # the root has all of it
        if rank == root:
            step = step._replace(recv_from=None, recv_chunks=(), recv_terms=())
        elif step.send_to == root:
            step = step._replace(send_to=None, send_chunks=(), send_terms=())
        if step.send_to is not None or step.recv_from is not None:
            yield step


def is_chain(schedule: Algorithm) -> bool:
    """Whether a broadcast by a schedule is a chain."""
    return schedule.steps is ring


def _by_owner(
    schedule: Algorithm, layout: NodeLayout, root: int
) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the ranks after the root, and the chunks that each owns."""
    assert schedule.owners is not None, "otherwise there is one chunk"
    own: list[list[int]] = [[] for _ in range(layout.ranks)]
    for index, owner in enumerate(schedule.owners(layout)):
        own[owner].append(index)
    for i in range(1, layout.ranks):
        yield (root + i) % layout.ranks, own[(root + i) % layout.ranks]


_up_tree = _from_root(_reduce_scatter)


def _reduce(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
    """Yield a reduction up a tree to the root; or to the owners of sums, and on to the root."""
    if schedule.owners is None:
        yield from _up_tree(schedule, rank, layout, root)
        return
    yield from _reduce_scatter(schedule, rank, layout, root)
    for other, own in _by_owner(schedule, layout, root):
        terms = (layout.ranks,) * len(own)
        if rank == root:
            yield Step("copy", recv_from=other, recv_chunks=own, recv_terms=terms)
        elif rank == other:
            yield Step("copy", root, own, terms)


def _gather(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
    """Yield a message from every other rank to the root."""
    if rank != root:
        yield Step("copy", root, (rank,), (1,))
        return
    for i in range(1, layout.ranks):
        other = (root + i) % layout.ranks
        yield Step("copy", recv_from=other, recv_chunks=(other,), recv_terms=(1,))


def _scatter(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
    """Yield a message from the root to every other rank."""
    if rank != root:
        yield Step("copy", recv_from=root, recv_chunks=(rank,), recv_terms=(1,))
        return
    for i in range(1, layout.ranks):
        other = (root + i) % layout.ranks
        yield Step("copy", other, (other,), (1,))


def _all_to_all(schedule: Algorithm, rank: int, layout: NodeLayout, root: int) -> Iterator[Step]:
    """Yield the pairwise exchange: in round i with the i-th ranks ahead and back."""
    ranks = layout.ranks
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        out, into = (rank * ranks + to,), (source * ranks + rank,)
        yield Step("copy", to, out, (1,), source, into, (1,))


ALLREDUCE = "allreduce"
SHARES: dict[str, Share] = {  # steps, whole, sums, rooted, same
    ALLREDUCE: Share(_allreduce, True, True, False, True),
    "reduce_scatter": Share(_reduce_scatter, False, True, False, False),
    "all_gather": Share(_all_gather, False, False, False, True),
    "all_to_all": Share(_all_to_all, False, False, False, False),
    "broadcast": Share(_broadcast, True, False, True, True),
    "reduce": Share(_reduce, True, True, True, False),
    "gather": Share(_gather, False, False, True, False),
    "scatter": Share(_scatter, False, False, True, False),
}


@dataclass(frozen=True)
class DataBlocks:
    """The data of a collective.

    name: of SHARES
    counts: values of each block: of the one block, if the data are one; otherwise of each rank's
        block; for all_to_all the block from rank i to rank j is at i * ranks + j
    keeps: for broadcast, whether the root already has the result, as nothing is rounded
    dtype: of values that travel unrounded
    """

    name: str
    counts: tuple[int, ...]
    root: int = 0
    keeps: bool = False
    dtype: str = "float32"

    @property
    def share(self) -> Share:
        """The definition of the collective."""
        return SHARES[self.name]

    def terms(self, ranks: int) -> int:
        """Return the number of contributions in a result."""
        return ranks if self.share.sums else 1

    @cached_property
    def _starts(self) -> list[int]:
        """The offsets of blocks, one after another."""
        return [0, *accumulate(self.counts)]

    @cached_property
    def _tile_starts(self) -> list[int]:
        """The offsets of blocks, each starting on a tile."""
        return [0, *accumulate(tiles(count) * TILE for count in self.counts)]

    @property
    def size(self) -> int:
        """Number of all values, as they are counted for shifts."""
        return self.counts[0] if self.share.whole else self._tile_starts[-1]

    def sizes(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return the numbers of values in a rank's x and out."""
        all_of_them, is_root = self._starts[-1], rank == self.root
        if self.name == "all_to_all":
            return sum(self.counts[rank * ranks :][:ranks]), sum(self.counts[rank::ranks])
        own = all_of_them if self.share.whole else self.counts[rank]
        return {
            ALLREDUCE: (all_of_them, all_of_them),
            "reduce_scatter": (all_of_them, own),
            "all_gather": (own, all_of_them),
            "broadcast": (own * is_root, own * (not (is_root and self.keeps))),
            "reduce": (own, own * is_root),
            "gather": (own, all_of_them * is_root),
            "scatter": (all_of_them * is_root, own),
        }[self.name]

    def chunks(self, schedule: Algorithm, layout: NodeLayout) -> int:
        """Return the number of chunks of a piece, if the data are one block."""
        is_one = self.name == "broadcast" and is_chain(schedule)
        return 1 if is_one else schedule.chunks(layout)

    def pieces(
        self, schedule: Algorithm, nodes: tuple[int, ...], least: int, most: int
    ) -> Sequence[Piece]:
        """Return the pieces that the data are cut into, the same on all ranks.

        PIECES of them, but so that a chunk in a piece has no fewer values than least and no more
        than most.
        """
        chunks = self.chunks(schedule, NodeLayout(nodes)) if self.share.whole else 1
        n = max(self.counts, default=0)
        count = max(1, min(-(-n // (chunks * least)), max(PIECES, -(-n // (chunks * most)))))
        return [Piece(i, count) for i in range(count)]

    def longest(self, schedule: Algorithm, nodes: tuple[int, ...], piece: Piece) -> int:
        """Return the size in values of a piece's largest chunk, the same on all ranks."""
        chunks = self.chunks(schedule, NodeLayout(nodes)) if self.share.whole else 1
        first, last = chunk(max(self.counts, default=0), piece.pieces, piece.number)
        return max(b - a for a, b in (chunk(last - first, chunks, i) for i in range(chunks)))

    def places(self, schedule: Algorithm, rank: int, piece: Piece, layout: NodeLayout) -> Places:
        """Return the place of each chunk of a piece that a rank handles."""
        if self.name == "all_to_all":
            places = self._of_pairs(rank, layout.ranks)
        elif self.share.whole:
            n = self.counts[0]
            has_x, has_out = (size > 0 for size in self.sizes(rank, layout.ranks))
            whole = ChunkPlace(0, n, 0 if has_x else None, 0 if has_out else None)
            part, chunks = whole.part(piece.pieces, piece.number), self.chunks(schedule, layout)
            places = {i: part.part(chunks, i) for i in range(chunks)}
        else:
            places = dict(enumerate(self._of_owners(schedule, rank, layout)))
        if not self.share.whole:
            places = {i: each.part(piece.pieces, piece.number) for i, each in places.items()}
        return {i: each.part(piece.parts, piece.part) for i, each in places.items()}

    def _of_owners(
        self, schedule: Algorithm, rank: int, layout: NodeLayout
    ) -> Iterator[ChunkPlace]:
        """Yield the places of chunks that are parts of their owners' blocks."""
        owners: Sequence[int] = range(layout.ranks)
        if self.name in ("reduce_scatter", "all_gather") and schedule.owners is not None:
            owners = schedule.owners(layout)
        parts, seen = Counter(owners), Counter[int]()
        for owner in owners:
            start, is_own, is_root = self._starts[owner], rank == owner, rank == self.root
            x, out = {
                "reduce_scatter": (start, 0 if is_own else None),
                "all_gather": (0 if is_own else None, start),
                "gather": (0 if is_own else None, start if is_root else None),
                "scatter": (start if is_root else None, 0 if is_own else None),
            }[self.name]
            block = ChunkPlace(self._tile_starts[owner], self.counts[owner], x, out)
            yield block.part(parts[owner], seen[owner])
            seen[owner] += 1

    def _of_pairs(self, rank: int, ranks: int) -> dict[int, ChunkPlace]:
        """Return the places of a rank's blocks to all ranks, itself included, and from all."""
        places, out = dict[int, ChunkPlace](), 0
        for other in range(ranks):
            there, here = rank * ranks + other, other * ranks + rank
            x = self._starts[there] - self._starts[rank * ranks]
            mine = ChunkPlace(self._tile_starts[there], self.counts[there], x, None)
            theirs = ChunkPlace(self._tile_starts[here], self.counts[here], None, out)
            places |= {there: mine, here: theirs}
            if other == rank:
                places[here] = mine._replace(out=out)
            out += self.counts[here]
        return places


Places = Mapping[int, ChunkPlace]


class Piece(NamedTuple):
    """A piece of the data, out of several that travel independently.

    part, parts: selects a part of each of its chunks, cut on tiles, which changes no bit
    """

    number: int
    pieces: int
    part: int = 0
    parts: int = 1


PIECES = 8


@lru_cache(maxsize=64)
def rounds(
    schedule: Algorithm, nodes: tuple[int, ...], blocks: DataBlocks, rank: int, piece: Piece
) -> tuple[Places, Sequence[tuple[int, Step]]]:
    """Return the places of a rank's chunks that are not empty, and its steps by number.

    Empty chunks are left out, and so are steps that have only such chunks.
    """
    layout = NodeLayout(nodes, piece.number)
    places = blocks.places(schedule, rank, piece, layout)
    steps = enumerate(blocks.share.steps(schedule, rank, layout, blocks.root))
    full = {i: each for i, each in places.items() if each.n}
    if len(full) == len(places):
        return full, list(steps)
    shorter = ((number, _only(step, full)) for number, step in steps)
    return full, [row for row in shorter if row[1].send_chunks or row[1].recv_chunks]


def _only(step: Step, full: Container[int]) -> Step:
    """Return a step with only these chunks."""
    out = [row for row in zip(step.send_chunks, step.send_terms, strict=True) if row[0] in full]
    into = [row for row in zip(step.recv_chunks, step.recv_terms, strict=True) if row[0] in full]
    return Step(
        step.kind,
        step.send_to if out else None, [i for i, _ in out], [terms for _, terms in out],
        step.recv_from if into else None, [i for i, _ in into], [terms for _, terms in into],
    )  # fmt: skip

"""All-reduce algorithms as data: for each round, the chunks that each rank sends and receives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product, zip_longest
from math import isqrt, prod
from typing import Literal, NamedTuple

from ..methods import ALGORITHMS, GROW, Accumulation
from ..ops.payloads import Growth
from ..partition import split

Kind = Literal["reduce", "hold", "copy"]


class NodeLayout(NamedTuple):
    """The data that the rounds of a rank depend on.

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

    kind: the content of messages and its use.
        "reduce": the sender's partial sums of the chunks; the receiver adds them to its own;
        "hold": the sender's own contributions; the receiver keeps them. When it first needs the
            sum, it adds all it has, including its own, in the order of ranks;
        "copy": the finished chunks, whose bytes are passed on unchanged.
    send_to, recv_from: rank, or None for no message in that direction
    send_chunks, recv_chunks: the chunks in the message, one after another
    send_terms, recv_terms: for each of these chunks, the number of ranks' contributions in it
    """

    kind: Kind
    send_to: int | None = None
    send_chunks: Sequence[int] = ()
    send_terms: Sequence[int] = ()
    recv_from: int | None = None
    recv_chunks: Sequence[int] = ()
    recv_terms: Sequence[int] = ()


ALL = (0,)  # the only chunk


def tree(rank: int, layout: NodeLayout) -> Iterator[Step]:
    """Yield a binomial reduction to rank 0, then a binomial broadcast.

    Source: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in
    MPICH, IJHPCA 19(1), 2005.
    """
    ranks = layout.ranks
    distances = [1 << i for i in range((ranks - 1).bit_length())]
    for distance in distances:
        if rank & distance:
            yield _up(rank - distance, min(distance, ranks - rank))
            break
        child = rank + distance
        if child < ranks:
            yield _from_child(child, min(distance, ranks - child))
    for distance in reversed(distances):
        place = rank % (2 * distance)
        if place == distance:
            yield Step("copy", recv_from=rank - distance, recv_chunks=ALL, recv_terms=(ranks,))
        elif place == 0 and rank + distance < ranks:
            yield Step("copy", rank + distance, ALL, (ranks,))


def _up(parent: int, terms: int) -> Step:
    return Step("reduce", parent, ALL, (terms,))


def _from_child(child: int, terms: int) -> Step:
    return Step("reduce", recv_from=child, recv_chunks=ALL, recv_terms=(terms,))


def dbtree(rank: int, layout: NodeLayout) -> Iterator[Step]:
    """Yield a reduction up one of two binary trees, and a broadcast down.

    Even pieces use one tree, odd pieces the other, and several pieces are in progress at a time.
    Both trees are numbered in order over positions 1..p; odd positions are leaves. The second tree
    is the first one mirrored, or shifted by one position if p is odd, so that the ranks at even
    positions in one are at odd positions in the other.
    Source: Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and
    scan, Parallel Computing 35(12), 2009.
    """
    ranks = layout.ranks
    places, at = _places(ranks, layout.piece % 2)
    place = places[rank]
    children, parent = tree_children(place, ranks), tree_parent(place, ranks)
    for child in children:
        yield _from_child(at[child], _size(child, ranks))
    if parent is not None:
        yield _up(at[parent], _size(place, ranks))
        yield Step("copy", recv_from=at[parent], recv_chunks=ALL, recv_terms=(ranks,))
    for child in children:
        yield Step("copy", at[child], ALL, (ranks,))


@lru_cache(maxsize=8)
def _places(ranks: int, number: int) -> tuple[Sequence[int], Mapping[int, int]]:
    """Return the position of each rank in a tree, and the rank at each position."""
    places: Sequence[int] = range(1, ranks + 1)
    if number == 1 and ranks % 2 == 0:
        places = range(ranks, 0, -1)
    elif number == 1:
        places = [(rank + 1) % ranks + 1 for rank in range(ranks)]
    return places, {place: rank for rank, place in enumerate(places)}


def tree_parent(place: int, ranks: int) -> int | None:
    """Return the parent of a position, None for the root.

    In the infinite tree the level of a position is its lowest set bit. At that distance there are
    two positions; the one that is a level higher is the parent. Ancestors beyond p are skipped.
    """
    if place == 1 << (ranks.bit_length() - 1):
        return None
    parent = ranks + 1
    while parent > ranks:
        bit = place & -place
        parent = place = place - bit if place & 2 * bit else place + bit
    return parent


def tree_children(place: int, ranks: int) -> list[int]:
    """Return the children of a position, in order: none, one or two."""
    half = (place & -place) // 2
    if half == 0:
        return []
    right = half
    while right and place + right > ranks:
        right //= 2
    return [place - half, place + right] if right else [place - half]


def _size(place: int, ranks: int) -> int:
    """Return the number of positions in the subtree of a position, itself included."""
    bit = place & -place
    return min(place + bit - 1, ranks) - (place - bit)


Strand = tuple[int, int]  # a lane and a column, which are summed along one path of the rings
MOST_IN_GROUP = 8  # nodes: limits the number of rounded sums before they are large


def group_size(nodes: int) -> int:
    """Return the number of nodes in each inner ring of torus: about the root of nodes.

    A divisor if one is at least half of that, so that all groups have the same size; 1 means a
    single ring of all nodes.
    """
    wanted = min(MOST_IN_GROUP, isqrt(nodes))
    divisors = [size for size in range(1, wanted + 1) if nodes % size == 0 and 2 * size >= wanted]
    return max(divisors, default=wanted)


class _Levels:
    """The ownership of chunks: ranks are in nodes, nodes in groups.

    There are as many lanes as ranks in the largest node; each node deals them to its ranks in
    turn. There are as many columns as nodes in the largest group; each group deals them to its
    nodes. So smaller nodes and groups own as much as larger ones. A lane and a column together, a
    strand, have a chunk for each group.
    """

    def __init__(self, nodes: tuple[int, ...]) -> None:
        self.members: list[list[int]] = [[] for _ in set(nodes)]
        for rank, node in enumerate(nodes):
            self.members[node].append(rank)
        self.lanes = max(map(len, self.members))
        count = len(self.members)
        number = -(-count // group_size(count))
        self.groups = [range(*split(count, number, i)) for i in range(number)]
        self.columns = max(map(len, self.groups))

    def lanes_of(self, node: int, place: int) -> range:
        """Return the lanes of the place-th rank of a node."""
        return range(place, self.lanes, len(self.members[node]))

    def columns_of(self, group: int, place: int) -> range:
        """Return the columns of the place-th node of a group."""
        return range(place, self.columns, len(self.groups[group]))

    def terms(self, nodes: Iterable[int]) -> int:
        """Return the number of ranks in some nodes."""
        return sum(len(self.members[node]) for node in nodes)

    def chunks(self, strands: Iterable[Strand], groups: Sequence[int]) -> tuple[int, ...]:
        """Return the chunks of strands for some of the groups."""
        count = len(self.groups)
        return tuple((a * self.columns + b) * count + i for a, b in strands for i in groups)

    def owners(self, node: int, strands: Sequence[Strand]) -> Iterator[Owner]:
        """Yield the ranks of a node, each with those of these strands whose lanes it owns."""
        members = self.members[node]
        for place, member in enumerate(members):
            own = [each for each in strands if each[0] % len(members) == place]
            if own:
                yield member, own

    def owners_in_group(self, group: int, strands: Sequence[Strand]) -> Iterator[Owner]:
        """Yield the ranks of a group, each with those of these strands that it owns."""
        nodes = self.groups[group]
        for place, node in enumerate(nodes):
            own = [each for each in strands if each[1] % len(nodes) == place]
            yield from self.owners(node, own)


Owner = tuple[int | None, Sequence[Strand]]  # a rank, and the strands that it shares with this one
_levels = lru_cache(maxsize=8)(_Levels)


def hier_chunks(layout: NodeLayout) -> int:
    """Return the number of chunks, lanes x columns x groups: one per rank if nodes are equal."""
    levels = _levels(layout.nodes)
    return levels.lanes * levels.columns * len(levels.groups)


def hier(rank: int, layout: NodeLayout) -> Iterator[Step]:
    """Yield reduce-scatter in the node, rings between nodes for owned chunks, all-gather.

    Inside nodes every rank sends to every other, as in direct; between nodes as torus does between
    ranks. With one node it is direct, with nodes of one rank it is torus. If a rank is alone on its
    node, its own contribution is not rounded before it is sent, as in ring.
    Source: the levels are those of Horovod's hierarchical all-reduce (Sergeev, Del Balso,
    arXiv 1802.05799, and its repository); the parts are those of direct and torus.
    """
    levels = _levels(layout.nodes)
    node = layout.nodes[rank]
    place = levels.members[node].index(rank)
    yield from _within_node(levels, node, place, "hold", 1)
    yield from _between_nodes(levels, node, levels.lanes_of(node, place))
    yield from _within_node(levels, node, place, "copy", layout.ranks)


def torus_chunks(layout: NodeLayout) -> int:
    """Return the number of chunks: one for each rank if all groups have the same size."""
    return hier_chunks(NodeLayout(tuple(range(layout.ranks))))


def torus(rank: int, layout: NodeLayout) -> Iterator[Step]:
    """Yield reduce-scatter round a ring of a few neighbours, then round a ring of such groups.

    Then all-gather in the reverse order. The bytes are those of ring, in fewer rounds, and each
    rank communicates with the next and the previous one in either ring. Nearly all bytes are sums
    of a few ranks.
    Source: the two levels are those of Mikami et al.: Massively distributed SGD: ImageNet/ResNet-50
    training in a flash, arXiv 1811.05233.
    """
    yield from hier(rank, NodeLayout(tuple(range(layout.ranks))))


def _within_node(levels: _Levels, node: int, place: int, kind: Kind, terms: int) -> Iterator[Step]:
    """Yield "hold": to each node member the chunks it owns; "copy": own chunks to each member."""
    members = levels.members[node]
    columns, groups = range(levels.columns), range(len(levels.groups))
    owned = [
        levels.chunks(product(levels.lanes_of(node, i), columns), groups)
        for i in range(len(members))
    ]
    for i in range(1, len(members)):
        to, source = (place + i) % len(members), (place - i) % len(members)
        out, into = (owned[to], owned[place]) if kind == "hold" else (owned[place], owned[source])
        yield Step(
            kind, members[to], out, (terms,) * len(out),
            members[source], into, (terms,) * len(into),
        )  # fmt: skip


def _between_nodes(levels: _Levels, node: int, lanes: Sequence[int]) -> Iterator[Step]:
    """Yield the rings between nodes: of the group's nodes, then of groups, and back."""
    group = next(i for i, each in enumerate(levels.groups) if node in each)
    place = levels.groups[group].index(node)
    strands = list(product(lanes, levels.columns_of(group, place)))
    yield from _ring_of_nodes(levels, group, place, lanes, "reduce")
    yield from _ring_of_groups(levels, group, strands, "reduce")
    yield from _ring_of_groups(levels, group, strands, "copy")
    yield from _ring_of_nodes(levels, group, place, lanes, "copy")


def _ring_of_nodes(
    levels: _Levels, group: int, place: int, lanes: Sequence[int], kind: Kind
) -> Iterator[Step]:
    """Yield the ring of a group's nodes; its place-th one finishes the columns that it owns."""
    ring = levels.groups[group]
    count, every_group = len(ring), range(len(levels.groups))
    following, previous = ring[(place + 1) % count], ring[(place - 1) % count]
    for turn in _rounds(levels, [(node,) for node in ring], place, kind):
        out = list(product(lanes, levels.columns_of(group, turn.sent)))
        into = list(product(lanes, levels.columns_of(group, turn.came)))
        yield from _hop(
            kind,
            [(to, levels.chunks(own, every_group)) for to, own in levels.owners(following, out)],
            [(who, levels.chunks(own, every_group)) for who, own in levels.owners(previous, into)],
            turn,
        )


def _ring_of_groups(
    levels: _Levels, group: int, strands: Sequence[Strand], kind: Kind
) -> Iterator[Step]:
    """Yield the ring of groups for the strands of a rank; group i finishes their chunk i."""
    count = len(levels.groups)
    following = list(levels.owners_in_group((group + 1) % count, strands))
    previous = list(levels.owners_in_group((group - 1) % count, strands))
    for turn in _rounds(levels, levels.groups, group, kind):
        yield from _hop(
            kind,
            [(to, levels.chunks(own, (turn.sent,))) for to, own in following],
            [(source, levels.chunks(own, (turn.came,))) for source, own in previous],
            turn,
        )


class _Turn(NamedTuple):
    """One round of a ring: the members whose parts are sent and received, and terms in these."""

    sent: int
    came: int
    sent_terms: int
    came_terms: int


def _rounds(
    levels: _Levels, ring: Sequence[Sequence[int]], place: int, kind: Kind
) -> Iterator[_Turn]:
    """Yield the rounds of the place-th ring member; ring: the nodes of each member."""
    count, ranks = len(ring), levels.terms(range(len(levels.members)))
    sent_terms = came_terms = 0
    for i in range(count - 1):
        there, here = (place - i - 1) % count, (place - i - 2) % count
        if kind == "copy":
            yield _Turn((there + 1) % count, there, ranks, ranks)
            continue
        sent_terms += levels.terms(ring[(place - i) % count])
        came_terms += levels.terms(ring[there])
        yield _Turn(there, here, sent_terms, came_terms)


Part = tuple[int | None, Sequence[int]]  # of a message: the other rank, and the chunks


def _hop(
    kind: Kind, following: Sequence[Part], previous: Sequence[Part], turn: _Turn
) -> Iterator[Step]:
    """Yield one hop: a message for each rank on either side, several if nodes differ in size."""
    for (to, out), (source, into) in zip_longest(following, previous, fillvalue=(None, ())):
        sent, came = (turn.sent_terms,) * len(out), (turn.came_terms,) * len(into)
        yield Step(kind, to, out, sent, source, into, came)


def ring(rank: int, layout: NodeLayout) -> Iterator[Step]:
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


def biring(rank: int, layout: NodeLayout) -> Iterator[Step]:
    """Yield reduce-scatter, then all-gather, round a ring both ways; rank i finishes chunk i.

    Each chunk is summed along two arcs that end at its owner, of p // 2 and (p - 1) // 2 ranks.
    So there are half the rounds of ring for the same bytes, and partial sums of half the ranks.
    """
    ranks = layout.ranks
    for kind in ("reduce", "copy"):
        for i in range(ranks // 2):
            if i < (ranks - 1) // 2:
                yield _one_way(kind, rank, -1, i, (ranks - 1) // 2, ranks)
            yield _one_way(kind, rank, 1, i, ranks // 2, ranks)


def _one_way(kind: Kind, rank: int, way: int, i: int, arc: int, ranks: int) -> Step:
    """Return round i of a ring in one direction (way 1 or -1), for arcs of so many ranks."""
    to, source = (rank + way) % ranks, (rank - way) % ranks
    # A sum has passed i ranks and has arc - i to go; a result is i ranks from its owner.
    ahead, terms = (arc - i, i + 1) if kind == "reduce" else (-i, ranks)
    there, here = (rank + way * ahead) % ranks, (source + way * ahead) % ranks
    return Step(kind, to, (there,), (terms,), source, (here,), (terms,))


def rhd(rank: int, layout: NodeLayout) -> Iterator[Step]:
    """Yield recursive halving, then doubling, with circulant skips; rank i finishes chunk i.

    There are ceil(log2 p) rounds in each direction. The skip starts at p and in each round is
    halved and rounded up; each rank sends p - 1 chunks in each direction.
    Source: Träff: Optimal, non-pipelined reduce-scatter and allreduce algorithms,
    arXiv 2410.14234.
    """
    ranks = layout.ranks
    skips = [ranks]
    while skips[-1] > 1:
        skips.append(-(-skips[-1] // 2))

    def chunks(first: int, count: int) -> tuple[int, ...]:
        return tuple((first + i) % ranks for i in range(count))

    terms = [1] * ranks  # in the partial sums of chunks rank, rank + 1, ...: the same on all ranks
    for before, skip in pairwise(skips):
        count = before - skip
        ahead, back, moved = (rank + skip) % ranks, (rank - skip) % ranks, tuple(terms[skip:before])
        yield Step("reduce", ahead, chunks(ahead, count), moved, back, chunks(rank, count), moved)
        terms[:count] = [a + b for a, b in zip(terms, moved, strict=False)]
    for skip, before in pairwise(reversed(skips)):
        count = before - skip
        ahead, back, moved = (rank + skip) % ranks, (rank - skip) % ranks, (ranks,) * count
        yield Step("copy", back, chunks(rank, count), moved, ahead, chunks(ahead, count), moved)


def direct(rank: int, layout: NodeLayout) -> Iterator[Step]:
    """Yield chunk i of every rank to rank i, which sums them, then its result to every rank.

    Two roundings for any number of ranks, and the bytes of the ring.
    Source: "scatter-reduce-all-gather" of Markov et al.: CGX, Middleware 2022.
    """
    ranks = layout.ranks
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        yield Step("hold", to, (to,), (1,), source, (rank,), (1,))
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        yield Step("copy", to, (rank,), (ranks,), source, (source,), (ranks,))


def gather(rank: int, layout: NodeLayout) -> Iterator[Step]:
    """Yield the whole contribution of every rank to every other; each sums them itself.

    Source: CPD's sum_gradients (github.com/drcut/CPD), which gathers and sums in rank order.
    """
    ranks = layout.ranks
    for i in range(1, ranks):
        to, source = (rank + i) % ranks, (rank - i) % ranks
        yield Step("hold", to, (0,), (1,), source, (0,), (1,))


def hier_owners(layout: NodeLayout) -> Sequence[int]:
    """Return the rank that finishes each chunk of hier."""
    levels, found = _levels(layout.nodes), []
    of_chunks = product(range(levels.lanes), range(levels.columns), levels.groups)
    for lane, column, group in of_chunks:
        members = levels.members[group[column % len(group)]]
        found.append(members[lane % len(members)])
    return found


def torus_owners(layout: NodeLayout) -> Sequence[int]:
    """Return the rank that finishes each chunk of torus."""
    return hier_owners(NodeLayout(tuple(range(layout.ranks))))


def _own(layout: NodeLayout) -> Sequence[int]:
    return range(layout.ranks)


def _one(layout: NodeLayout) -> int:
    return 1


def _one_each(layout: NodeLayout) -> int:
    return layout.ranks


def _of_rings(layout: NodeLayout) -> Growth:
    return Growth(layout.ranks, hops=layout.ranks)


def _of_few(layout: NodeLayout) -> Growth:
    """A sum of four contributions may be rounded like a contribution."""
    return Growth(layout.ranks, free=4)


def _of_nodes(layout: NodeLayout) -> Growth:
    """Like two nodes of the mean size: contributions were rounded inside, too."""
    return Growth(layout.ranks, free=max(4, 2 * layout.ranks // len({*layout.nodes})))


def _few(ranks: int) -> int:
    """While one piece travels the others are encoded and decoded."""
    return 4


def _up_and_down(ranks: int) -> int:
    """A piece on each level of a tree, on the way up and on the way down."""
    return max(3, 2 * (ranks - 1).bit_length())


class RoundedSums(NamedTuple):
    """How the contributions of all ranks are added, with a rounding before each addition.

    chains: the terms of sums that are rounded before each addition: of contributions, then of
        such sums, and so on
    held: contributions that are added without rounding first, each rounded once
    """

    chains: tuple[int, ...]
    held: int = 0

    @property
    def longest(self) -> int:
        """Terms of the longest sum."""
        return max(self.chains)

    def at_most(self, ranks: int) -> RoundedSums:
        """Return sums of at most so many contributions."""
        *first, last = self.chains
        below = max(1, self.held) * prod(first)
        return self._replace(chains=(*first, max(1, min(last, ranks // below))))


def _one_chain(layout: NodeLayout, way: str) -> RoundedSums | None:
    return RoundedSums((layout.ranks,)) if way in ("requantise", GROW) else None


def _two_arcs(layout: NodeLayout, way: str) -> RoundedSums | None:
    return RoundedSums((1 + layout.ranks // 2, 2))


def _torus_sums(layout: NodeLayout, way: str) -> RoundedSums | None:
    return RoundedSums(_ring_sizes(layout.ranks)) if way == "requantise" else None


def _hier_sums(layout: NodeLayout, way: str) -> RoundedSums | None:
    """For kahan, which compensates roundings in nodes, only sums between nodes."""
    if way == GROW:
        return None
    sizes = Counter(layout.nodes).values()
    most, between = max(sizes), _ring_sizes(len(sizes))
    if way == "requantise":
        return RoundedSums((most, *between))
    return RoundedSums(between, held=most)


def _ring_sizes(nodes: int) -> tuple[int, int]:
    return group_size(nodes), nodes // group_size(nodes)


def _bounded(layout: NodeLayout, way: str) -> None:
    """A tree of pairs: an error grows with the logarithm of ranks."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: its rounds, its chunks, and how partial sums may be accumulated.

    steps: (rank, layout) -> the rounds of that rank, in order
    chunks: layout -> number of chunks that a piece of the data is cut into
    accumulation: the names from ACCUMULATES that suit it, and the default ones
    rounded: (layout, one of these names) -> the sums that are rounded before each addition, None
        if their error is bounded; in rings they include sums that grow
    result_travels: whether the finished sum is sent, and so rounded to the wire
    window: number of ranks -> number of pieces in progress at a time
    growth: layout -> how partial sums grow with "grow"
    owners: layout -> the rank that finishes each chunk, None if there is one chunk for all
    """

    steps: Callable[[int, NodeLayout], Iterator[Step]]
    chunks: Callable[[NodeLayout], int]
    accumulation: Accumulation
    rounded: Callable[[NodeLayout, str], RoundedSums | None]
    result_travels: bool = True
    window: Callable[[int], int] = _few
    growth: Callable[[NodeLayout], Growth] = _of_few
    owners: Callable[[NodeLayout], Sequence[int]] | None = None

    @property
    def accumulates(self) -> tuple[str, ...]:
        """The ways to accumulate that it has."""
        return self.accumulation.ways


_WAYS = ALGORITHMS
SCHEDULES: dict[str, Algorithm] = {
    "ring": Algorithm(ring, _one_each, _WAYS["ring"], _one_chain, growth=_of_rings, owners=_own),
    "biring": Algorithm(
        biring, _one_each, _WAYS["biring"], _two_arcs, growth=_of_rings, owners=_own
    ),
    "torus": Algorithm(torus, torus_chunks, _WAYS["torus"], _torus_sums, owners=torus_owners),
    "rhd": Algorithm(rhd, _one_each, _WAYS["rhd"], _bounded, owners=_own),
    "tree": Algorithm(tree, _one, _WAYS["tree"], _bounded, window=_up_and_down),
    "dbtree": Algorithm(dbtree, _one, _WAYS["dbtree"], _bounded, window=_up_and_down),
    "direct": Algorithm(direct, _one_each, _WAYS["direct"], _one_chain, owners=_own),
    "hier": Algorithm(
        hier, hier_chunks, _WAYS["hier"], _hier_sums, growth=_of_nodes, owners=hier_owners
    ),
    "gather": Algorithm(gather, _one, _WAYS["gather"], _one_chain, result_travels=False),
}

_PACKED_SUMS = "rhd", "biring", "direct"
USUALS = {  # call -> the algorithms of "usual" in order of preference: on one node, on nodes of one
    # rank each, on nodes of several ranks. Direct: payloads on a node are read in place
    "raw sums": (("ring",), ("ring",), ("ring",)),
    "packed sums": (_PACKED_SUMS, _PACKED_SUMS, ("hier", *_PACKED_SUMS)),
    "values": (("direct",), ("rhd",), ("hier",)),
    "short broadcast": (("tree",), ("tree",), ("tree",)),
    "long broadcast": (("tree",), ("rhd",), ("hier",)),
}


@lru_cache(maxsize=64)
def usual_algorithms(call: str, nodes: tuple[int, ...]) -> tuple[str, ...]:
    """Return the algorithms of "usual" for a call of USUALS; nodes: the node of each rank."""
    count = len(set(nodes))
    one_node, single_ranks, several = USUALS[call]
    return one_node if count == 1 else several if count < len(nodes) else single_ranks

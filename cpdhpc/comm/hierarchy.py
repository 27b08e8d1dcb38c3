"""All-reduce in two levels: direct inside a node, a ring between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from .step import Kind, Layout, Step

Group = tuple[int | None, Sequence[int]]  # a rank, and the lanes that it shares with this one


class _Nodes:
    """Who owns what: the ring between nodes has lanes, and a lane a chunk for each node.

    There are as many lanes as ranks in the largest node; each node deals them to its ranks in
    turn. So each rank owns a lane at least, and smaller nodes own as much as larger ones.
    """

    def __init__(self, layout: Layout) -> None:
        self.members: list[list[int]] = [[] for _ in set(layout.nodes)]
        for rank, node in enumerate(layout.nodes):
            self.members[node].append(rank)
        self.lanes = max(map(len, self.members))

    def owned(self, node: int, place: int) -> range:
        """Return the lanes of the place-th rank of a node."""
        return range(place, self.lanes, len(self.members[node]))

    def chunks(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Return all chunks of lanes."""
        count = len(self.members)
        return tuple(lane * count + i for lane in lanes for i in range(count))

    def groups(self, node: int, lanes: Sequence[int]) -> list[Group]:
        """Return which ranks of a node own some of these lanes."""
        members = self.members[node]
        shared = [
            (member, [lane for lane in lanes if lane % len(members) == place])
            for place, member in enumerate(members)
        ]
        return [(member, group) for member, group in shared if group]


def hier_chunks(layout: Layout) -> int:
    """Return the number of chunks: the ranks of the largest node times the number of nodes."""
    nodes = _Nodes(layout)
    return nodes.lanes * len(nodes.members)


def hier(rank: int, layout: Layout) -> Iterator[Step]:
    """Yield reduce-scatter in the node, a ring between nodes for what is owned, all-gather.

    Inside nodes everyone sends to everyone, as in direct. With one node it is direct, with nodes
    of one rank it is ring. The own contribution of a rank that is alone on its node is not
    rounded before it is sent, as in ring.
    Source: the two levels are those of Horovod's hierarchical all-reduce (Sergeev, Del Balso,
    arXiv 1802.05799, and its repository); the parts are those of ring and direct.
    """
    nodes = _Nodes(layout)
    node = layout.nodes[rank]
    place = nodes.members[node].index(rank)
    yield from _inside(nodes, node, place, "hold", 1)
    yield from _between(nodes, node, nodes.owned(node, place), layout.ranks)
    yield from _inside(nodes, node, place, "copy", layout.ranks)


def _inside(nodes: _Nodes, node: int, place: int, kind: Kind, terms: int) -> Iterator[Step]:
    """Yield "hold": to each member of the node what it owns; "copy": to each what is owned."""
    members = nodes.members[node]
    owned = [nodes.chunks(nodes.owned(node, i)) for i in range(len(members))]
    for i in range(1, len(members)):
        to, source = (place + i) % len(members), (place - i) % len(members)
        out, into = (owned[to], owned[place]) if kind == "hold" else (owned[place], owned[source])
        yield Step(
            kind, members[to], out, (terms,) * len(out),
            members[source], into, (terms,) * len(into),
        )  # fmt: skip


def _between(nodes: _Nodes, node: int, lanes: Sequence[int], ranks: int) -> Iterator[Step]:
    """Yield reduce-scatter, then all-gather, round the ring of nodes; node i finishes chunk i."""
    sizes = [len(members) for members in nodes.members]
    count = len(sizes)
    if count == 1:
        return
    following = nodes.groups((node + 1) % count, lanes)
    previous = nodes.groups((node - 1) % count, lanes)
    sent_terms, came_terms = 0, 0
    for i in range(count - 1):
        there, here = (node - i - 1) % count, (node - i - 2) % count
        sent_terms += sizes[(node - i) % count]
        came_terms += sizes[there]
        yield from _hop("reduce", following, there, sent_terms, previous, here, came_terms, count)
    for i in range(count - 1):
        there, here = (node - i) % count, (node - i - 1) % count
        yield from _hop("copy", following, there, ranks, previous, here, ranks, count)


def _hop(
    kind: Kind,
    following: Sequence[Group],
    there: int,
    sent_terms: int,
    previous: Sequence[Group],
    here: int,
    came_terms: int,
    count: int,
) -> Iterator[Step]:
    """Yield one hop of all lanes: chunk `there` of each goes out, chunk `here` comes in.

    A message for each rank on either side: more than one where nodes differ in size.
    """
    for (to, out), (source, into) in zip_longest(following, previous, fillvalue=(None, ())):
        yield Step(
            kind,
            to, tuple(lane * count + there for lane in out), (sent_terms,) * len(out),
            source, tuple(lane * count + here for lane in into), (came_terms,) * len(into),
        )  # fmt: skip

"""All-reduce over trees: reduce the one chunk to the root, then broadcast it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .step import Layout, Step

ALL = (0,)  # the one chunk


def tree(rank: int, layout: Layout) -> Iterator[Step]:
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


def dbtree(rank: int, layout: Layout) -> Iterator[Step]:
    """Yield a reduction up, and a broadcast down, one of two binary trees.

    Even pieces take one tree, odd pieces the other, and several pieces are under way at a time.
    Both trees are numbered in order over places 1..p; odd places are leaves. The second tree is
    the first one mirrored, or shifted by one place where p is odd, so that the ranks at even
    places in one are at odd places in the other.
    Source: Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and
    scan, Parallel Computing 35(12), 2009.
    """
    ranks = layout.ranks
    places = _places(ranks, layout.piece % 2)
    at = {place: other for other, place in enumerate(places)}
    place = places[rank]
    children, parent = tree_children(place, ranks), tree_parent(place, ranks)
    for child in children:
        yield _from_child(at[child], _size(child, ranks))
    if parent is not None:
        yield _up(at[parent], _size(place, ranks))
        yield Step("copy", recv_from=at[parent], recv_chunks=ALL, recv_terms=(ranks,))
    for child in children:
        yield Step("copy", at[child], ALL, (ranks,))


def _places(ranks: int, number: int) -> Sequence[int]:
    """Return the place of each rank in a tree."""
    if number == 0:
        return range(1, ranks + 1)
    if ranks % 2 == 0:
        return range(ranks, 0, -1)
    return [(rank + 1) % ranks + 1 for rank in range(ranks)]


def tree_parent(place: int, ranks: int) -> int | None:
    """Return the parent of a place, None for the root.

    In the infinite tree the level of a place is its lowest set bit, and its parent the one of
    the two places at that distance which is a level higher. Ancestors beyond p are left out.
    """
    if place == 1 << (ranks.bit_length() - 1):
        return None
    parent = ranks + 1
    while parent > ranks:
        bit = place & -place
        parent = place = place - bit if place & 2 * bit else place + bit
    return parent


def tree_children(place: int, ranks: int) -> list[int]:
    """Return the children of a place in the order of places: none, one or two."""
    half = (place & -place) // 2
    if half == 0:
        return []
    right = half
    while right and place + right > ranks:
        right //= 2
    return [place - half, place + right] if right else [place - half]


def _size(place: int, ranks: int) -> int:
    """Return the number of places in the tree below a place, itself included."""
    bit = place & -place
    return min(place + bit - 1, ranks) - (place - bit)

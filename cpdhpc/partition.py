"""Integer arithmetic that splits work over parts."""

from __future__ import annotations

from .formats import TILE, tiles


def split(n: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of part index when n items are split as evenly as possible.

    The first n % parts parts have one item more.
    """
    base, extra = divmod(n, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def chunk(n: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of part index when n values are split in whole tiles.

    Only the last part that is not empty may end inside a tile; parts may be empty.
    """
    first, last = split(tiles(n), parts, index)
    return min(first * TILE, n), min(last * TILE, n)

"""Graphs of ranks: who hears whom in a step, and what weight it gives to what it hears.

The weights of a step are a doubly stochastic matrix: rows and columns add up to 1, with what a rank
gives to itself. So mixing leaves the mean over all ranks where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt


def ring(rank: int, ranks: int) -> set[int]:
    """Return the rank before and the rank behind."""
    return {(rank - 1) % ranks, (rank + 1) % ranks} - {rank}


def grid(rank: int, ranks: int) -> set[int]:
    """Return the ranks above, below, left and right in a grid as square as may be, with borders."""
    columns = ranks // _rows(ranks)
    row, column = divmod(rank, columns)
    near = {(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)}
    rows = range(ranks // columns)
    return {r * columns + c for r, c in near if r in rows and c in range(columns)}


def _rows(ranks: int) -> int:
    """Return the largest number of rows, not above the number of columns, that holds all ranks."""
    return max(rows for rows in range(1, isqrt(ranks) + 1) if ranks % rows == 0)


def exponential(rank: int, ranks: int) -> set[int]:
    """Return the ranks at distances 1, 2, 4, ... in both directions."""
    steps = [1 << k for k in range((ranks - 1).bit_length())]
    return {(rank + sign * step) % ranks for step in steps for sign in (1, -1)} - {rank}


STATIC: dict[str, Callable[[int, int], set[int]]] = {
    "ring": ring,
    "grid": grid,
    "exponential": exponential,
}
ONE_PEER = "one_peer"  # hears one rank a step, 1, 2, 4, ... further on, one distance after another
GRAPHS = (*STATIC, ONE_PEER)


@dataclass(frozen=True)
class Graph:
    """The neighbours of so many ranks; name: one of GRAPHS.

    Raises ValueError where there are too few ranks, or their number makes no grid.
    """

    name: str
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"graph={self.name!r} needs 2 ranks or more: there is {self.ranks}")
        if self.name == "grid" and _rows(self.ranks) < 2:
            raise ValueError(
                f"graph='grid' needs 4 ranks or more, in rows and columns: there are {self.ranks}"
            )

    @property
    def phases(self) -> int:
        """Steps after which the graph is the same again."""
        return (self.ranks - 1).bit_length() if self.name == ONE_PEER else 1

    def sources(self, rank: int, phase: int = 0) -> Mapping[int, float]:
        """Return who is heard in a phase, in ascending order, and their weights.

        Metropolis weights, 1 / (1 + the larger of both numbers of neighbours); one peer has 1/2.
        Source: Xiao, Boyd: Fast linear iterations for distributed averaging, Systems & Control
        Letters 53, 2004; one peer: Ying et al., arXiv 2110.13363.
        """
        if self.name == ONE_PEER:
            return {(rank + (1 << phase)) % self.ranks: 0.5}
        near = STATIC[self.name]
        heard, degree = sorted(near(rank, self.ranks)), len(near(rank, self.ranks))
        return {j: 1 / (1 + max(degree, len(near(j, self.ranks)))) for j in heard}

    def targets(self, rank: int, phase: int = 0) -> list[int]:
        """Return who hears a rank in a phase, in ascending order."""
        if self.name == ONE_PEER:
            return [(rank - (1 << phase)) % self.ranks]
        return sorted(STATIC[self.name](rank, self.ranks))

    @property
    def most_sources(self) -> int:
        """The largest number of ranks that any hears in a phase."""
        return max(len(self.sources(rank)) for rank in range(self.ranks))

"""The error to expect of a sum that is rounded to the wire again and again: one is formed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np

from ..formats import TILE
from ..ops.payloads import Array, Packed
from ..randomness import random_key

MOST_RANKS = 4096  # of the sum that is formed: of more ranks it is no better


class Sums(NamedTuple):
    """How the contributions of all ranks are added.

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

    def at_most(self, ranks: int) -> Sums:
        """Return sums of so many contributions at most."""
        *first, last = self.chains
        below = max(1, self.held) * int(np.prod(first, initial=1))
        return self._replace(chains=(*first, max(1, min(last, ranks // below))))


class Expected(NamedTuple):
    """Relative errors: of the whole sum, and of rounding once."""

    whole: float
    once: float


@lru_cache(maxsize=256)
def expected_error(wire: Packed, sums: Sums) -> Expected:
    """Return the error of a sum of 1,024 values by a wire, each tile with a shift of its own.

    A rank's contribution is a direction that all share plus three times as much noise, as in
    docs/accuracy.md. It takes some 20 us a rank, of MOST_RANKS at most.
    """
    sums = sums.at_most(MOST_RANKS)
    once = replace(wire, fit=True, growth=None)
    rng, numbers = np.random.default_rng(0), count()
    common, exact = rng.standard_normal(TILE), np.zeros(TILE)

    def rounded(x: Array) -> Array:
        payload, out = np.empty(once.size_bytes(TILE), np.uint8), np.empty(TILE, np.float32)
        once.encode(x, None, random_key(0, next(numbers)), 0, payload)
        once.decode(payload, None, out)
        return out

    def contributions() -> Iterator[Array]:
        while True:
            x = (common + 3 * rng.standard_normal(TILE)).astype(np.float32)
            exact[...] += x
            yield x

    given = contributions()

    def total(chains: Sequence[int]) -> Array:
        if not chains:
            if sums.held == 0:
                return next(given)
            return np.sum([rounded(next(given)) for _ in range(sums.held)], 0, np.float32)
        found = total(chains[:-1])
        for _ in range(chains[-1] - 1):
            found = rounded(found) + total(chains[:-1])
        return found

    with np.errstate(all="ignore"):
        found = rounded(total(sums.chains))
        single = exact.astype(np.float32)
        size = float(np.linalg.norm(exact))
        return Expected(
            float(np.linalg.norm(found - exact)) / size,
            float(np.linalg.norm(rounded(single) - exact)) / size,
        )

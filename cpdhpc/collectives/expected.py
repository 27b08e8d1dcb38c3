"""The error to expect of a sum that is rounded to the wire again and again: one is formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np

from ..formats import TILE
from ..ops.payloads import Array, Packed
from ..randomness import random_key

MOST_SUMMED = 4096  # of the sum that is formed: of more ranks it is no better


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
    """Relative errors: of the whole sum, and of rounding once.

    kind: of DATA, the contributions of which these are
    """

    whole: float
    once: float
    kind: str


DATA = {"of a common direction and noise": 1.0, "of noise alone": 0.0}  # how much is in common
NOISE = 3.0


@lru_cache(maxsize=256)
def expected_error(wire: Packed, sums: Sums) -> Expected:
    """Return the larger error of sums of 1,024 values by a wire, each tile with its own shift.

    A rank's contribution is a direction that all share plus three times as much noise, or noise
    alone, as in docs/accuracy.md. It takes some 40 us a rank, of MOST_SUMMED at most.
    """
    sums = sums.at_most(MOST_SUMMED)
    return max(_error(replace(wire, fit=True), sums, kind) for kind in DATA)


def _error(wire: Packed, sums: Sums, kind: str) -> Expected:
    rng, numbers = np.random.default_rng(0), count()
    common, exact = DATA[kind] * rng.standard_normal(TILE), np.zeros(TILE)

    def contribution() -> Array:
        x = (common + NOISE * rng.standard_normal(TILE)).astype(np.float32)
        exact[...] += x
        return x

    def rounded(x: Array, terms: int) -> Array:
        used, out = wire.of(terms), np.empty(TILE, np.float32)
        payload = np.empty(used.size_bytes(TILE), np.uint8)
        used.encode(x, None, random_key(0, next(numbers)), 0, payload)
        used.decode(payload, None, out)
        return out

    def total(chains: Sequence[int]) -> tuple[Array, int]:
        """Return a sum of sums, and how many contributions are in it."""
        if not chains:
            parts = [rounded(contribution(), 1) for _ in range(sums.held)] or [contribution()]
            return np.asarray(np.sum(parts, 0, np.float32)), len(parts)
        found, terms = total(chains[:-1])
        for _ in range(chains[-1] - 1):
            part, more = total(chains[:-1])
            found, terms = rounded(found, terms) + part, terms + more
        return found, terms

    with np.errstate(all="ignore"):
        found, _ = total(sums.chains)
        normal = np.random.default_rng(1).standard_normal(TILE)
        whole, once = (
            float(np.linalg.norm(rounded(x.astype(np.float32), 1) - x0) / np.linalg.norm(x0))
            for x, x0 in ((found, exact), (normal, normal))
        )
        return Expected(whole, once, kind)

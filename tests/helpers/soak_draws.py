"""What soak.py draws: all-reduces with everything that goes with them, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.method import Segment
from cpdhpc.collectives.schedules import SCHEDULES
from cpdhpc.formats import INTEGERS, MICROSCALING, TILE, tiles
from cpdhpc.methods import EXACT

Array = np.ndarray[Any, np.dtype[np.float32]]
MOST = 1 << 26  # values
EDGES = (0, 1, TILE - 1, TILE, TILE + 1)  # sizes drawn more often
FLOATS = ("e4m3", "e5m2", "e3m0", "e2m1fn", "e4m3fn", "e1m3", "e5m6", "fp16", "bf16")
WIRES = ("raw", "raw", *FLOATS, *INTEGERS, *MICROSCALING)
SCALINGS = (None, "none", "static:3", "aps", "tile", "block32", "block16")
ROUNDINGS = ("nearest", "zero", "stochastic")
OVERFLOWS = ("saturate", "saturate", "inf")


class Draw(NamedTuple):
    """An all-reduce, called a few times with other values of as many ranks."""

    ranks: int
    n: int
    method: Allreduce
    segments: tuple[Segment, ...]
    way: str
    threads: int
    calls: int
    poison: float  # put at a random place of a random rank; 0: nothing
    seed: int


def draw(rng: np.random.Generator, size: int, ways: Sequence[str]) -> Draw:
    """Return an all-reduce of up to so many ranks; sizes are evenly spread over the binades.

    ways: the names of how it may be called
    """
    n = int(2 ** rng.uniform(0, np.log2(MOST)))
    n = int(rng.choice(EDGES)) if rng.random() < 0.1 else n
    return Draw(
        ranks=int(rng.integers(1, size + 1)),
        n=n,
        method=draw_method(rng),
        segments=draw_segments(rng, n),
        way=str(rng.choice(list(ways))),
        threads=int(rng.integers(1, 4)),
        calls=int(rng.integers(1, 4)),
        poison=float(rng.choice([np.nan, np.inf])) if rng.random() < 0.05 else 0.0,
        seed=int(rng.integers(1 << 30)),
    )


def draw_method(rng: np.random.Generator) -> Allreduce:
    """Return choices that go together."""
    while True:
        algorithm = str(rng.choice(list(SCHEDULES)))
        accumulates = [None, EXACT, *SCHEDULES[algorithm].accumulates]
        chosen: dict[str, Any] = {
            name: values[int(rng.integers(len(values)))]
            for name, values in {
                "wire": WIRES,
                "scaling": SCALINGS,
                "accumulate": accumulates,
                "op": ("sum", "mean"),
                "rounding": ROUNDINGS,
                "overflow": OVERFLOWS,
                "headroom": ("n", "sqrt", "none"),
            }.items()
        }
        try:
            return Allreduce(algorithm=algorithm, seed=int(rng.integers(1 << 30)), **chosen)
        except ValueError:
            continue


def draw_segments(rng: np.random.Generator, n: int) -> tuple[Segment, ...]:
    """Return up to four parts of n values; some end within a tile that nobody owns the rest of."""
    count = tiles(n)
    borders = sorted({0, count, *rng.integers(0, count + 1, rng.integers(4)).tolist()})
    parts = []
    for i, (first, last) in enumerate(pairwise(borders)):
        stop = n if last == count else last * TILE - int(rng.integers(2)) * 7
        parts.append(Segment(f"part {i}", first * TILE, stop))
    return tuple(parts) or (Segment("nothing", 0, 0),)


def values(seed: Sequence[int], n: int) -> Array:
    """float32[n] over many binades, some zeros; long ones repeat a block that is no whole tiles."""
    rng = np.random.default_rng(seed)
    block = min(n, (1 << 20) - 317)
    x = rng.standard_normal(block, np.float32) * np.exp2(rng.integers(-30, 5, block))
    x[rng.random(block) < 0.05] = 0
    return np.resize(x.astype(np.float32), n)


def contribution(d: Draw, number: int, rank: int) -> Array:
    """Return the values of a rank in a call."""
    x = values((d.seed, number, rank), d.n)
    rng = np.random.default_rng((d.seed, number))
    where, place = int(rng.integers(d.ranks)), int(rng.integers(max(1, d.n)))
    if d.poison and d.n and where == rank:
        x[place] = d.poison
    return x

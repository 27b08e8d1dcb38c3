"""All-reduce written out straight, over whole arrays, from ops.reference: what tests compare to.

A chunk is whole tiles and a tile is quantised by itself, so quantising whole arrays is the same
as quantising chunks. Nothing here is shared with cpdhpc.comm.
"""

from fractions import Fraction
from itertools import count, pairwise

import numpy as np

from cpdhpc.formats import SHIFT_BIAS, SHIFT_NONFINITE, Cast, parse_format
from cpdhpc.ops import reference
from cpdhpc.partition import chunk
from cpdhpc.randomness import random_key


def shift_by_fractions(amax, fmt, ranks, headroom):
    """emax - e with the least e for which H * amax <= 2**e."""
    if amax == 0:
        return 0
    square = Fraction(float(amax)) ** 2 * {"n": ranks**2, "sqrt": ranks, "none": 1}[headroom]
    e = -160
    while square > Fraction(4) ** e:
        e += 1
    return min(max(fmt.emax - e, fmt.shift_min), fmt.shift_max)


class Oracle:
    """One all-reduce of xs; the arguments are those of allreduce."""

    def __init__(
        self,
        xs,
        wire,
        scaling,
        accumulate,
        headroom="n",
        segments=None,
        seed=0,
        iteration=0,
        **cast,
    ):
        self.xs, self.p, self.n = xs, len(xs), xs[0].size
        self.cast = None if wire == "raw" else Cast(parse_format(wire), **cast)
        self.stream = (seed, iteration)
        segments = segments or [("x", 0, self.n)]
        self.sent = self.shifts(scaling, "none" if accumulate == "float32" else headroom, segments)
        self.result = self.shifts(scaling, headroom, segments)

    def shifts(self, scaling, headroom, segments):
        """The k of each tile, or None where each tile chooses its own."""
        if self.cast is None or scaling == "tile":
            return None
        k = np.zeros(-(-self.n // 1024), int)
        if scaling.startswith("static:"):
            k[:] = int(scaling[7:])
        elif scaling == "aps":
            for _, start, stop in segments:
                amax = max((np.abs(x[start:stop]).max(initial=0) for x in self.xs), default=0)
                k[start // 1024 : -(-stop // 1024)] = shift_by_fractions(
                    amax, self.cast.fmt, self.p, headroom
                )
        return k

    def q(self, x, shifts, rank, phase):
        """Encode and decode, tile by tile."""
        if self.cast is None:
            return x
        fmt, out = self.cast.fmt, np.empty_like(x)
        key = random_key(*self.stream, rank, phase)
        for tile, start in enumerate(range(0, self.n, 1024)):
            part = x[start : start + 1024]
            if shifts is None:
                stored = reference.fitting_shift(reference.amax_tiles(part), fmt)[0]
                k = int(stored) - SHIFT_BIAS
            else:
                stored, k = 0, int(shifts[tile])
            if stored == SHIFT_NONFINITE:
                out[start : start + 1024] = np.nan
            else:
                codes = reference.encode(part, self.cast, k, key, start)
                out[start : start + 1024] = reference.decode(codes, fmt, k)
        return out

    def ring(self):
        out = np.empty_like(self.xs[0])
        for i in range(self.p):
            order = [(i + 1 + j) % self.p for j in range(self.p)]  # the owner, rank i, comes last
            total = self.xs[order[0]]
            for before, rank in pairwise(order):
                total = self.xs[rank] + self.q(total, self.sent, before, 0)
            start, stop = chunk(self.n, self.p, i)
            out[start:stop] = self.q(total, self.result, i, 1)[start:stop]
        return out

    def tree(self):
        return self.q(self.tree_sum(0, self.p), self.result, 0, 1)

    def tree_sum(self, rank, width):
        """The sum, not yet rounded, of ranks rank .. rank + width - 1."""
        total, distance, phase = self.xs[rank], 1, 2
        while distance < width and rank + distance < self.p:
            if distance > 1:
                total, phase = self.q(total, self.sent, rank, phase), phase + 1
            other = self.tree_sum(rank + distance, distance)
            total = total + self.q(other, self.sent, rank + distance, 0)
            distance *= 2
        return total

    def contributions(self):
        return [self.q(x, self.sent, rank, 0) for rank, x in enumerate(self.xs)]

    def held_sum(self, accumulate, owner):
        """CPD's loops, from zero; returns the sum before the last rounding."""
        contributions, phase = self.contributions(), count(2)

        def q(values):
            return self.q(values, self.result, owner, next(phase))

        total = contributions[0]
        if accumulate == "float32":
            for g in contributions[1:]:
                total = total + g
        elif accumulate == "requantise":
            for i, g in enumerate(contributions[1:]):
                total = (total if i == 0 else q(total)) + g
        else:
            s, c = total, np.zeros_like(total)
            for i, g in enumerate(contributions[1:]):
                if i > 0:
                    t = q(total)
                    rest = q(t - s)
                    s, c = t, q(rest - y)  # noqa: F821
                y = q(g - c)
                total = s + y
        return total

    def direct(self, accumulate):
        out = np.empty_like(self.xs[0])
        for i in range(self.p):
            start, stop = chunk(self.n, self.p, i)
            if start < stop:
                total = self.held_sum(accumulate, i)
                out[start:stop] = self.q(total, self.result, i, 1)[start:stop]
        return out

    def gather(self, accumulate):
        total = self.held_sum(accumulate, 0)
        return total if accumulate == "float32" else self.q(total, self.result, 0, 1)


def expected(xs, wire, algorithm, scaling, accumulate, **options):
    """The result of an all-reduce; accumulate is never None."""
    oracle = Oracle(xs, wire, scaling, accumulate, **options)
    with np.errstate(all="ignore"):
        if algorithm in ("ring", "tree"):
            return getattr(oracle, algorithm)()
        return getattr(oracle, algorithm)(accumulate)

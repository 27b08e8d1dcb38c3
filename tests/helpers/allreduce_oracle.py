"""All-reduce written out straight, over whole arrays: what tests compare to.

A chunk is whole tiles and a tile is quantised by itself, so quantising whole arrays is the same
as quantising chunks. Exact sums are of integers, in float64, which holds every number on the way:
24 bits of a value, at most 32 of a sum, times powers of two that stay far from the ends of its
range; sum_by_fractions needs no such argument. Nothing here is shared with cpdhpc.collectives,
and of the kernels only ops.reference, of which exact sums take only random bits.
"""

from dataclasses import replace
from fractions import Fraction
from itertools import count, groupby, pairwise

import numpy as np
import oracles

from cpdhpc.formats import INTEGERS, SHIFT_BIAS, SHIFT_NONFINITE, Cast, parse_format
from cpdhpc.ops import reference
from cpdhpc.partition import chunk
from cpdhpc.randomness import random_key

LEAST, MOST = 1 << 18, 1 << 20  # values of a chunk in a piece of the data


def shift_by_fractions(amax, fmt, ranks, headroom):
    """emax - e with the least e for which H * amax <= 2**e."""
    if amax == 0:
        return 0
    square = Fraction(float(amax)) ** 2 * {"n": ranks**2, "sqrt": ranks, "none": 1}[headroom]
    # 4**e >= square > 2**(bits - 1): no e below this one will do
    e = (square.numerator.bit_length() - square.denominator.bit_length() - 1) // 2
    while square > Fraction(4) ** e:
        e += 1
    return min(max(fmt.emax - e, fmt.shift_min), fmt.shift_max)


class Oracle:
    """One all-reduce of xs; the arguments are those of allreduce."""

    def __init__(
        self,
        xs,
        wire,
        algorithm,
        scaling,
        accumulate,
        headroom="n",
        segments=None,
        seed=0,
        iteration=0,
        nodes=None,
        **cast,
    ):
        self.xs, self.p, self.n = xs, len(xs), xs[0].size
        names = nodes or [0] * self.p
        self.nodes = [[r for r in range(self.p) if names[r] == v] for v in dict.fromkeys(names)]
        self.number, self.piece = 0, (0, self.n)
        self.needed = self.piece  # what is quantised: the rest of an array may hold anything
        self.accumulate = accumulate
        self.algorithm = algorithm
        if algorithm == "torus":
            self.nodes = [[r] for r in range(self.p)]
        self.cast = None if wire == "raw" else Cast(parse_format(wire), **cast)
        self.stream = (seed, iteration)
        segments = segments or [("x", 0, self.n)]
        held = accumulate == "float32" or (accumulate == "grow" and algorithm == "hier")
        self.sent = self.shifts(scaling, "none" if held else headroom, segments)
        self.result = self.shifts(scaling, headroom, segments)

    def shifts(self, scaling, headroom, segments):
        """The k of each tile, or how many values choose one together: 1024, or rows of a lane."""
        if self.cast is None or scaling == "tile":
            return 1024
        if scaling.startswith("block"):
            return int(scaling[5:])
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
        return self.q_by(self.cast, self.stream, x, shifts, rank, phase)

    def grown(self, x, shifts, rank, phase, terms):
        """The same of a partial sum of so many terms, whose mantissa may have more bits."""
        if self.accumulate != "grow" or self.cast is None:
            return self.q(x, shifts, rank, phase)
        if self.algorithm in ("ring", "biring"):
            whole, bits = Fraction(terms, self.p) ** 2 * self.p / 3, 0
        elif self.algorithm == "hier":
            whole, bits = Fraction(terms, max(4, 2 * self.p // len(self.nodes))), 0
        else:
            whole, bits = Fraction(terms, 4), 0
        while whole > 4**bits:
            bits += 1
        if not bits:
            return self.q(x, shifts, rank, phase)
        fmt, how = self.cast.fmt, self.cast.rounding
        fmt = replace(fmt, man=min(23, fmt.man + bits))
        near = how == "nearest"
        cast = replace(self.cast, fmt=fmt, rounding="stochastic" if near else how)
        stream = (self.stream[0], 0 if near else self.stream[1])
        return self.q_by(cast, stream, x, shifts, rank, phase)

    def q_by(self, cast, stream, x, shifts, rank, phase):
        if isinstance(shifts, int) and shifts < 1024 and cast is not None:
            return self.q_blocks(cast, x, shifts, random_key(*stream, rank, phase))
        if cast is None:
            return x
        fmt, out = cast.fmt, np.empty_like(x)
        key = random_key(*stream, rank, phase)
        if isinstance(shifts, int):
            for start in range(*self.needed, 1024):
                part = x[start : min(start + 1024, self.needed[1])]
                stored = int(reference.fitting_shift(reference.amax_tiles(part), fmt)[0])
                if stored == SHIFT_NONFINITE:
                    out[start : start + part.size] = np.nan
                else:
                    self.cast_part(cast, part, stored - SHIFT_BIAS, key, start, out)
            return out
        tiles = range(self.needed[0] // 1024, -(-self.needed[1] // 1024))
        for k, same in groupby(tiles, lambda tile: int(shifts[tile])):
            run = list(same)
            start, stop = 1024 * run[0], min(1024 * (run[-1] + 1), self.needed[1])
            self.cast_part(cast, x[start:stop], k, key, start, out)
        return out

    def cast_part(self, cast, part, k, key, start, out):
        """Encode and decode values from start on with one shift."""
        codes = reference.encode(part, cast, k, key, start)
        out[start : start + part.size] = reference.decode(codes, cast.fmt, k)

    def q_blocks(self, cast, x, rows, key):
        """Encode and decode, each block of so many rows of a lane with the shift that fits it."""
        fmt, out = cast.fmt, np.empty_like(x)
        for start in range(*self.needed, 1024):
            stop = min(start + 1024, self.needed[1])
            tile = np.zeros(1024, np.float32)
            tile[: stop - start] = x[start:stop]
            blocks = tile.reshape(32 // rows, rows, 32)
            amax = np.abs(blocks).max(1)  # NaN stays NaN
            stored = reference.fitting_shift(amax.view(np.uint32) & 0x7FFFFFFF, fmt)
            k = np.where(stored == SHIFT_NONFINITE, 0, stored.astype(int) - SHIFT_BIAS)
            each = np.broadcast_to(k[:, None], blocks.shape).reshape(-1)
            index = np.uint64(start) + np.arange(1024, dtype=np.uint64)
            codes = reference.encode_with_events(tile, cast, each, key, index)[0]
            decoded = reference.decode_shifted(codes, fmt, each).reshape(blocks.shape)
            marked = np.broadcast_to((stored == SHIFT_NONFINITE)[:, None], blocks.shape)
            out[start:stop] = np.where(marked, np.nan, decoded).reshape(-1)[: stop - start]
        return out

    def each_chunk(self, count, total):
        """The rounded totals, total(i), of all chunks of the piece."""
        out = np.empty_like(self.xs[0])
        for i in range(count):
            first, last = self.piece
            start, stop = self.needed = [first + end for end in chunk(last - first, count, i)]
            if start < stop:
                out[start:stop] = self.q(total(i), self.result, i, 1)[start:stop]
        return out

    def ring(self):
        def total(i):
            order = [(i + 1 + j) % self.p for j in range(self.p)]  # the owner, rank i, comes last
            total = self.xs[order[0]]
            for terms, (before, rank) in enumerate(pairwise(order), 1):
                total = self.xs[rank] + self.grown(total, self.result, before, 0, terms)
            return total

        return self.each_chunk(self.p, total)

    def biring(self):
        """Two rings that end at the owner, whose own values come first, then the shorter one."""

        def total(i):
            total = self.xs[i]
            for number, (way, size) in enumerate(((1, (self.p - 1) // 2), (-1, self.p // 2))):
                arc = [(i + way * away) % self.p for away in range(size, 0, -1)]
                part = None
                for terms, rank in enumerate(arc):
                    came = None if part is None else self.grown(part, self.result, before, 0, terms)  # noqa: F821
                    part, before = self.xs[rank] if came is None else self.xs[rank] + came, rank
                if part is None:
                    continue
                if number and self.accumulate != "grow" and self.p > 2:
                    total = self.q(total, self.sent, i, 2)
                total = total + self.grown(part, self.result, before, 0, size)
            return total

        return self.each_chunk(self.p, total)

    def rhd(self):
        """Of those less than `before` away from the owner the farther half sends to the nearer."""

        def total(i):
            sums = [self.xs[(i - away) % self.p] for away in range(self.p)]
            phases = [count(2) for _ in sums]
            terms, before = [1] * self.p, self.p
            while before > 1:
                skip = (before + 1) // 2
                for away in range(before - skip):
                    rank, other, far = (i - away) % self.p, (i - away - skip) % self.p, away + skip
                    if terms[away] > 1 and self.accumulate != "grow":
                        sums[away] = self.q(sums[away], self.sent, rank, next(phases[away]))
                    came = self.grown(sums[far], self.sent, other, 0, terms[far])
                    sums[away] = sums[away] + came
                    terms[away] += terms[far]
                before = skip
            return sums[0]

        return self.each_chunk(self.p, total)

    def dbtree(self):
        return self.each_chunk(1, lambda i: self.binary_sum(1, self.p)[1])

    def binary_sum(self, first, last):
        """The root's rank, and the sum, not yet rounded, of the in-order tree of some places."""
        place = first - 1 + 2 ** int(np.log2(last - first + 1))
        rank = place - 1
        if self.number % 2:
            rank = self.p - place if self.p % 2 == 0 else (place - 2) % self.p
        total, ranges = self.xs[rank], [(first, place - 1), (place + 1, last)]
        for i, (a, b) in enumerate(r for r in ranges if r[0] <= r[1]):
            child, other = self.binary_sum(a, b)
            own = self.q(total, self.sent, rank, 2) if i else total
            total = own + self.q(other, self.sent, child, 0)
        return rank, total

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

    def held_sum(self, owner, members, phase):
        """CPD's loops, from zero; returns the sum before the last rounding."""
        contributions = [self.q(self.xs[rank], self.sent, rank, 0) for rank in members]
        accumulate = self.accumulate

        def q(values):
            return self.q(values, self.result, owner, next(phase))

        total = contributions[0]
        if accumulate in ("float32", "grow"):
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

    def direct(self):
        return self.each_chunk(self.p, lambda i: self.held_sum(i, range(self.p), count(2)))

    def gather(self):
        total = self.held_sum(0, range(self.p), count(2))
        return total if self.accumulate == "float32" else self.q(total, self.result, 0, 1)

    def groups(self):
        """The nodes of each group: a divisor of their number near its root, or the root."""
        count = len(self.nodes)
        root = min(8, int(count**0.5))
        fits = [d for d in range((root + 1) // 2, root + 1) if count % d == 0]
        number = -(-count // (fits[-1] if fits else root))
        ends = [sum(i % number < g for i in range(count)) for g in range(number + 1)]
        return [list(range(a, b)) for a, b in pairwise(ends)]

    def torus(self):
        return self.hier()

    def hier(self):
        """Chunk i is summed over groups last + 1, last + 2, ..., last, by one rank of each.

        Within a group over nodes, the one that owns the column last. Within a node as float32.
        """
        groups = self.groups()

        def whole(ring, last, part, joined):
            """The sum round a ring that ends at `last`, its rank, that one's phases, and terms.

            joined: whether a part is a sum of several already: rounded before another is added
            """
            total, sender, phases, terms = part(ring[(last + 1) % len(ring)])
            for j in range(2, len(ring) + 1):
                own, rank, others, more = part(ring[(last + j) % len(ring)])
                came = self.grown(total, self.result, sender, next(phases[0]), terms)
                if joined(ring[(last + j) % len(ring)]) and self.accumulate != "grow":
                    own = self.q(own, self.result, rank, next(others[1]))
                total, sender, phases, terms = own + came, rank, others, terms + more
            return total, sender, phases, terms

        def total(i):
            strand, last = divmod(i, len(groups))
            lane, column = divmod(strand, max(map(len, groups)))

            def of_node(node):
                """A rank alone sends with phase 0; roundings in between begin at 2."""
                members = self.nodes[node]
                owner, phase = members[lane % len(members)], count(2)
                if len(members) == 1:
                    return self.xs[owner], owner, (count(0), phase), 1
                return self.held_sum(owner, members, phase), owner, (phase, phase), len(members)

            def of_group(nodes):
                return whole(nodes, column % len(nodes), of_node, lambda node: False)

            return whole(groups, last, of_group, lambda nodes: len(nodes) > 1)[0]

        return self.each_chunk(self.chunks(self.algorithm), total)

    def chunks(self, algorithm):
        if algorithm in ("hier", "torus"):
            groups = self.groups()
            return max(map(len, self.nodes)) * len(groups) * max(map(len, groups))
        return self.p if algorithm in ("ring", "biring", "rhd", "direct") else 1


def expected(xs, wire, algorithm, scaling, accumulate, piece=None, **options):
    """The result of an all-reduce; accumulate is never None; piece: values of a chunk in one."""
    least, most = (piece, piece) if piece else (LEAST, MOST)
    oracle = Oracle(xs, wire, algorithm, scaling, accumulate, **options)
    out = np.empty_like(xs[0])
    chunks = oracle.chunks(algorithm)
    eight = max(8, -(-out.size // (chunks * most)))
    pieces = max(1, min(-(-out.size // (chunks * least)), eight))
    with np.errstate(all="ignore"):
        for number in range(pieces):
            start, stop = chunk(out.size, pieces, number)
            oracle.number, oracle.piece, oracle.needed = number, (start, stop), (start, stop)
            out[start:stop] = getattr(oracle, algorithm)()[start:stop]
    return out


def format_of(wire):
    return INTEGERS[wire] if wire in INTEGERS else parse_format(wire)


def shared_shift(xs, wire):
    """k from the largest value: integers fill their range, floats are scaled as APS does."""
    amax = max((Fraction(float(np.abs(x).max(initial=0))) for x in xs), default=Fraction(0))
    fmt = format_of(wire)
    if amax == 0:
        return 0
    limit = Fraction(fmt.max) if wire in INTEGERS else Fraction(2) ** fmt.emax
    room = limit / amax  # 2**k <= room < 2**(k + 1), and room > 2**(bits - 1)
    k = room.numerator.bit_length() - room.denominator.bit_length() - 1
    while Fraction(2) ** (k + 1) <= room:
        k += 1
    return min(max(k, fmt.shift_min), fmt.shift_max)


def integers_of(x, wire, k, rounding="nearest", key=(0, 0), offset=0):
    """Each value of x on the grid, as a multiple of the format's smallest number. int64[n]"""
    fmt = format_of(wire)
    if wire in INTEGERS or rounding == "stochastic":
        index = np.arange(offset, offset + x.size, dtype=np.uint64)
        bits = reference.random31(key, index).astype(np.int64)
    if wire in INTEGERS:
        steps, unit = np.abs(np.ldexp(x.astype(np.float64), k)) / fmt.smallest, 2 ** (31 - fmt.man)
        whole = {
            "nearest": np.rint(steps),
            "zero": np.floor(steps),
            "stochastic": (np.floor(steps * unit) + (bits >> fmt.man)) // unit,
        }[rounding]
        whole = np.minimum(whole, fmt.max_integer)
    else:
        scaled = np.ldexp(x.astype(np.float64), k)
        if rounding == "stochastic":
            whole = np.abs(oracles.gfloat_round(scaled, fmt, rounding, "saturate", bits))
        else:
            grid = oracles.number_grid(fmt)
            codes = oracles.grid_code(scaled, fmt, grid, rounding)
            whole = grid[np.minimum(codes, len(grid) - 2)]
        whole = whole / fmt.smallest
    return np.where(x < 0, -whole, whole).astype(np.int64)


def float32_of(number):
    """The nearest float32, ties to even, by Python integers; infinity from 2**128 on."""
    exponent = -149
    while abs(number) / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    nearest = round(number / Fraction(2) ** exponent) * Fraction(2) ** exponent
    if abs(nearest) >= Fraction(2) ** 128:
        return np.inf if number > 0 else -np.inf
    return float(nearest)


def exact_sum(xs, wire, *, shift=None, segments=None, rounding="nearest", seed=0, iteration=0):
    """The exact sum of the rounded contributions, rounded once to float32.

    shift: of all values, or None for each segment's own
    """
    out = np.zeros_like(xs[0])
    for _, start, stop in segments or [("x", 0, xs[0].size)]:
        parts = [x[start:stop] for x in xs]
        k = shared_shift(parts, wire) if shift is None else shift
        keys = [random_key(seed, iteration, rank, 0) for rank in range(len(xs))]
        sums = sum(
            integers_of(part, wire, k, rounding, key, start)
            for part, key in zip(parts, keys, strict=True)
        )
        out[start:stop] = np.ldexp(sums.astype(np.float64) * format_of(wire).smallest, -k)
    return out


def sum_by_fractions(xs, wire):
    """exact_sum, rounding integers to nearest, value by value with fractions."""
    fmt, k = format_of(wire), shared_shift(xs, wire)
    step, out = Fraction(fmt.smallest) / Fraction(2) ** k, []
    for column in zip(*(x.tolist() for x in xs), strict=True):
        # round() of a fraction goes to the nearest integer, ties to even
        numbers = [
            min(max(round(Fraction(v) / step), -fmt.max_integer), fmt.max_integer) for v in column
        ]
        out.append(float32_of(sum(numbers) * step))
    return np.array(out, np.float32)

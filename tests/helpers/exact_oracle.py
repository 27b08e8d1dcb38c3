"""Exact sums by integers: what tests of accumulate="exact" compare to.

Nothing here is shared with cpdhpc.collectives, and of the kernels only random bits. float64 holds
every number on the way: 24 bits of a value, at most 32 of a sum, times powers of two that stay far
from the ends of its range. sum_by_fractions needs no such argument.
"""

from fractions import Fraction

import numpy as np
import oracles

from cpdhpc.formats import INTEGERS, parse_format
from cpdhpc.ops import reference
from cpdhpc.randomness import random_key


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

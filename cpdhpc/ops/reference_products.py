"""The specification of matrix products whose roundings are chosen; a part of ops.reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..formats import Cast
from .products import DRAWS, GAINED, PRODUCT, REST, SUM, TERM, Products

Array = np.ndarray[Any, np.dtype[Any]]
Round = Callable[[Array, Cast, int], Array]  # (exact values, how, number of the rounding)


def add_exactly(a: Array, b: Array) -> Array:
    """Return a + b rounded to odd: float64 that rounds to fewer than 52 bits as the sum would.

    Source: Boldo, Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
    rounding to odd", IEEE Trans. Computers 57 (2008) 462; what is left of the sum is Knuth's.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        part = total - a
        rest = (a - (total - part)) + (b - part)
        inexact = (rest > 0) | (rest < 0)  # not where it is NaN, beside infinity
    even = total.view(np.int64) & 1 == 0
    away = (rest > 0) == (total > 0)
    step = np.where(away, 1, -1)
    return np.where(inexact & even, (total.view(np.int64) + step).view(np.float64), total)


def matmul(a: Array, b: Array, how: Products, round_to: Round) -> Array:
    """Return the products of the rows of a and the columns of b, as ops.reference.matmul.

    round_to: gives the numbers that exact values round to
    """
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    products, accumulate, between = how.casts
    k = a.shape[2]
    zero = np.zeros((a.shape[0], a.shape[1], b.shape[2]))

    def term(i: int) -> Array:
        with np.errstate(invalid="ignore"):
            exact = wide_a[:, :, i, None] * wide_b[:, None, i, :]  # 48 bits at most
        return exact if products is None else round_to(exact, products, DRAWS * i + PRODUCT)

    def add(total: Array, rest: Array, value: Array, cast: Cast, step: int) -> tuple[Array, Array]:
        number = DRAWS * step
        if not how.kahan:
            return round_to(add_exactly(total, value), cast, number + SUM), rest
        own = round_to(add_exactly(value, -rest), cast, number + TERM)
        new = round_to(add_exactly(total, own), cast, number + SUM)
        gained = round_to(add_exactly(new, -total), cast, number + GAINED)
        return new, round_to(add_exactly(gained, -own), cast, number + REST)

    def ascending(first: int, stop: int) -> Array:
        total, rest = zero, zero
        for i in range(first, stop):
            total, rest = add(total, rest, term(i), accumulate, i)
        return total

    if how.order == "pairwise":
        return _pairwise(k, term, zero, lambda x, s: round_to(x, accumulate, DRAWS * s + SUM))
    if not how.chunk:
        return ascending(0, k)
    total, rest = zero, zero
    for number, first in enumerate(range(0, k, how.chunk)):
        chunk = ascending(first, min(first + how.chunk, k))
        total, rest = add(total, rest, chunk, between, k + number)
    return total


def _pairwise(
    k: int, term: Callable[[int], Array], zero: Array, rounded: Callable[[Array, int], Array]
) -> Array:
    """Return the sum of k terms by halves; step k + s is the s-th addition of a stack."""
    stack: list[Array] = []
    step = k
    for i in range(k):
        stack.append(rounded(add_exactly(zero, term(i)), i))
        pairs = ((i + 1) & -(i + 1)).bit_length() - 1  # as many as i has ones at its end
        for _ in range(pairs if i + 1 < k else len(stack) - 1):
            right = stack.pop()
            stack.append(rounded(add_exactly(stack.pop(), right), step))
            step += 1
    return stack[0] if stack else zero

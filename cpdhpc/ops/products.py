"""Rounding of sums of products: formats, order of additions, and the specification of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from ..errors import ArgumentError
from ..formats import Cast, FloatFormat, Format, TableFormat
from ..methods import check_integer, suggest

Array = np.ndarray[Any, np.dtype[Any]]
Order = Literal["ascending", "pairwise"]
# odd: float64, sums rounded to odd; odd32: the same in float32, twice as many in a CPU's registers
Arithmetic = Literal["float32", "float64", "odd", "odd32"]
Inputs = tuple[Format, Format]  # of a and of b
FLOAT32 = FloatFormat(8, 23)
# Roundings of a step; they number the random bits
SUM, TERM, GAINED, REST, PRODUCT = range(5)
DRAWS = 8


@dataclass(frozen=True)
class Products:
    """How the products of a row and a column are summed.

    products: rounding of each product; None: it is exact, and rounded once with the sum
    accumulate: rounding of each partial sum
    order: "ascending": one after the other; "pairwise": the sum of the first 2**j and the rest, for
        the largest power of two below their number, and recursively in each of the two
    chunk: so many terms are summed in ascending order, then the sums of chunks; 0: all in one
    between: rounding of the sums of chunks; None: as accumulate
    kahan: the rounding error of a sum is subtracted from the next term, in accumulate and between
    Raises TypeError if chunk or kahan is no integer; ValueError for another order, chunk < 0, and
    chunks or kahan with "pairwise".
    Source: of chunks Wang et al., NeurIPS 2018, arXiv 1812.08011, section 3.2.1; of kahan
    W. Kahan, CACM 8 (1965) 40.
    """

    accumulate: Cast
    products: Cast | None = None
    order: Order = "ascending"
    chunk: int = 0
    between: Cast | None = None
    kahan: bool = False

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ArgumentError(
                "Products", "order", self.order, suggest(self.order, get_args(Order))
            )
        check_integer("Products", "chunk", self.chunk)
        kahan: object = self.kahan
        if not isinstance(kahan, bool):
            check_integer("Products", "kahan", kahan)
        if self.chunk < 0:
            raise ArgumentError("Products", "chunk", self.chunk, "should be 0 or more")
        if self.order == "pairwise" and (self.chunk or self.kahan):
            allowed = "goes with chunk=0 and kahan=False"
            raise ArgumentError("Products", "order", self.order, allowed)

    @property
    def casts(self) -> tuple[Cast | None, Cast, Cast]:
        """products, accumulate and between."""
        return self.products, self.accumulate, self.between or self.accumulate

    def arithmetic(self, a: Format, b: Format) -> Arithmetic:
        """Return the fastest arithmetic with the bits of the specification, for two formats.

        An exact product of float32 is a float64. Rounding a sum twice gives the bits of rounding it
        once if the first rounding is exact, or is to the same format, or if terms and result have p
        bits and the first rounding keeps 2 p + 2 (Figueroa, "When is double rounding innocuous?",
        SIGNUM Newsletter 30 (1995) 21), or if the first rounding is to odd.
        """
        products, *sums = self.casts
        exact = _exact_product(_grid(a), _grid(b))
        if products is not None and _is_float32(products):
            single = True  # one operation of float32
        else:
            single = (products is None or _fits(products)) and _in_float32(exact)
        terms = exact if products is None else _grid(products.float_format)
        if single and all(_sum_in_float32(terms, each) for each in sums):
            return "float32"
        if self._by_odd32(exact, terms):
            return "odd32"
        return "float64" if all(_sum_fits(terms, each, 53) for each in sums) else "odd"

    def _by_odd32(self, exact: _Grid, terms: _Grid) -> bool:
        """Whether sums in float32 rounded to odd are enough, if not all roundings are to nearest.

        Rounding such a sum again gives the bits of rounding the exact sum if two bits or more are
        cut off (Boldo, Melquiond, as in add_exactly), and no more random bits are used than lie
        before the last of these.
        """
        products, accumulate, between = self.casts
        used = [each for each in (products, accumulate, between) if each is not None]
        if all(each.rounding == "nearest" for each in used) or not _in_float32(exact):
            return False
        if products is not None and not _rounds_in_float32(products, exact, exact):
            return False
        of_chunk = _grid(accumulate.float_format)
        sums = [(accumulate, terms), *([(between, of_chunk)] if self.chunk else [])]
        return all(
            term.high <= 100 and _rounds_in_float32(cast, term, _sum(cast, term))
            for cast, term in sums
        )


@dataclass(frozen=True)
class _Grid:
    """Numbers that are multiples of 2**low, below 2**high, with at most this number of bits."""

    low: int
    high: int
    bits: int


@lru_cache(maxsize=256)
def _grid(fmt: Format) -> _Grid:
    if isinstance(fmt, TableFormat):
        significand, exponent = np.frexp(fmt.numbers[fmt.numbers != 0])
        whole = np.abs(significand * 2.0**24).astype(np.int64)
        bits = 25 - np.frexp((whole & -whole).astype(np.float64))[1]  # without trailing zeros
        return _Grid(int((exponent - bits).min()), int(exponent.max()), int(bits.max()))
    return _Grid(fmt.emin - fmt.man, fmt.emax + 1, fmt.man + 1)


def _exact_product(a: _Grid, b: _Grid) -> _Grid:
    return _Grid(a.low + b.low, a.high + b.high, a.bits + b.bits)


def _sum(cast: Cast, term: _Grid) -> _Grid:
    """Return the grid of sums of a number of its format and a term."""
    own = _grid(cast.float_format)
    low, high = min(own.low, term.low), max(own.high, term.high) + 1
    return _Grid(low, high, high - low)


def _rounds_in_float32(cast: Cast, term: _Grid, rounded: _Grid) -> bool:
    """Whether the kernels can round float32 to it; rounded: their operands, exact or to odd."""
    fmt = cast.float_format
    if fmt.exp == 8 or fmt.man >= 22 or term.low < -149:
        return False
    if cast.rounding != "stochastic" or 0 < cast.random_bits <= 22 - fmt.man:
        return True
    return rounded.bits <= 24 and fmt.emin - rounded.low <= 23


def _is_float32(cast: Cast) -> bool:
    return cast.fmt == FLOAT32 and cast.rounding == "nearest" and cast.overflow == "inf"


def _fits(cast: Cast) -> bool:
    """Whether the kernels can round float32 to it.

    The power of two that they add must be finite, and the sum below the next one.
    """
    return cast.rounding == "nearest" and cast.float_format.exp < 8 and cast.float_format.man < 22


def _in_float32(term: _Grid) -> bool:
    return term.bits <= 24 and term.low >= -149 and term.high <= 100


def _sum_in_float32(term: _Grid, cast: Cast) -> bool:
    if _is_float32(cast):
        return term.low >= -149 and term.high <= 128 and term.bits <= 24
    return _fits(cast) and term.high <= 100 and _sum_fits(term, cast, 24)


def _sum_fits(term: _Grid, cast: Cast, bits: int) -> bool:
    """Whether sums need at most this number of bits to be rounded to it."""
    own = _grid(cast.float_format)
    if max(term.high, own.high) + 1 - min(term.low, own.low) <= bits:
        return True  # they are exact
    return cast.rounding == "nearest" and term.bits <= own.bits and 2 * own.bits + 2 <= bits


Round = Callable[[Array, Cast, int], Array]  # (exact values, how, number of the rounding)


def add_exactly(a: Array, b: Array) -> Array:
    """Return a + b rounded to odd: float64 that rounds to fewer than 52 bits as the sum does.

    Source: Boldo, Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
    rounding to odd", IEEE Trans. Computers 57 (2008) 462; the error of the sum is by Knuth.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        part = total - a
        rest = (a - (total - part)) + (b - part)
        inexact = (rest > 0) | (rest < 0)  # False for NaN, the rest of an infinite sum
    even = total.view(np.int64) & 1 == 0
    away = (rest > 0) == (total > 0)
    step = np.where(away, 1, -1)
    return np.where(inexact & even, (total.view(np.int64) + step).view(np.float64), total)


def add_for(cast: Cast, a: Array, b: Array) -> Array:
    """Return add_exactly of a and b, a zero with the sign that a rounding gives it.

    Rounded down, a sum that is exactly zero is -0 unless both terms are +0.
    Source: IEEE 754-2019, section 6.3.
    """
    total = add_exactly(a, b)
    minus = (total == 0) & (np.signbit(a) | np.signbit(b)) & (cast.rounding == "down")
    return np.where(minus, -0.0, total)


def matmul(a: Array, b: Array, how: Products, round_to: Round) -> Array:
    """Return the products of the rows of a and the columns of b, as ops.reference.matmul.

    round_to: returns exact values rounded
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
            return round_to(add_for(cast, total, value), cast, number + SUM), rest
        own = round_to(add_for(cast, value, -rest), cast, number + TERM)
        new = round_to(add_for(cast, total, own), cast, number + SUM)
        gained = round_to(add_for(cast, new, -total), cast, number + GAINED)
        return new, round_to(add_for(cast, gained, -own), cast, number + REST)

    def ascending(first: int, stop: int) -> Array:
        total, rest = zero, zero
        for i in range(first, stop):
            total, rest = add(total, rest, term(i), accumulate, i)
        return total

    if how.order == "pairwise":
        return _pairwise(
            k,
            term,
            zero,
            lambda a, b, s: round_to(add_for(accumulate, a, b), accumulate, DRAWS * s + SUM),
        )
    if not how.chunk:
        return ascending(0, k)
    total, rest = zero, zero
    for number, first in enumerate(range(0, k, how.chunk)):
        chunk = ascending(first, min(first + how.chunk, k))
        total, rest = add(total, rest, chunk, between, k + number)
    return total


def _pairwise(
    k: int, term: Callable[[int], Array], zero: Array, added: Callable[[Array, Array, int], Array]
) -> Array:
    """Return the sum of k terms by halves; step k + s is the s-th addition of a stack."""
    stack: list[Array] = []
    step = k
    for i in range(k):
        stack.append(added(zero, term(i), i))
        pairs = ((i + 1) & -(i + 1)).bit_length() - 1  # as many as i has ones at its end
        for _ in range(pairs if i + 1 < k else len(stack) - 1):
            right = stack.pop()
            stack.append(added(stack.pop(), right, step))
            step += 1
    return stack[0] if stack else zero

"""Matrix products whose roundings are chosen, compiled; a part of ops.cpu."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np

from .. import _cpu
from ..formats import Cast, FloatFormat
from ..randomness import Key
from .products import FLOAT32, Products
from .threads import kernel_threads

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDINGS = {"nearest": 0, "zero": 1, "stochastic": 2}  # as cast.h numbers them
_INF, _NAN = 0x7F800000, 0x7FC00000


@lru_cache(maxsize=256)
def rounding_numbers(cast: Cast, wide: bool) -> tuple[int, ...]:
    """Return the numbers of the kernels' struct Rounding; wide: float32 is rounded to as well."""
    fmt = cast.float_format
    by_code = {fmt.max_code: _bits(fmt.max), fmt.inf_code: _INF, fmt.nan_code: _NAN}
    if fmt.special == "none":  # NaN and infinity become the largest number
        by_code = dict.fromkeys(by_code, _bits(fmt.max))
    elif fmt.special == "nan":
        by_code[fmt.inf_code] = _NAN
    elif not fmt.man:
        by_code[fmt.nan_code] = _INF
    return (
        fmt.man,
        ROUNDINGS[cast.rounding],
        int(fmt == FLOAT32 and not wide),
        (fmt.emin + 127) << 23,
        _bits(fmt.max),
        by_code[cast.overflow_code],
        by_code[fmt.inf_code],
        by_code[fmt.nan_code],
    )


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


Numbers = tuple[int, ...]


def product_numbers(how: Products, wide: bool) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return the numbers of the kernels' struct Products, of each rounding and of the rest."""
    product, total, between = (rounding_numbers(cast or how.accumulate, wide) for cast in how.casts)
    rest = (how.products is None, how.order == "pairwise", how.kahan, how.chunk)
    return product, total, between, tuple(map(int, rest))


def matmul(
    a: Array, b: Array, how: Products, key: Key = (0, 0), inputs: FloatFormat = FLOAT32
) -> Array:
    """Return the products of the rows of a and the columns of b, rounded as how says.

    a: float32[batch, m, k]; b: float32[batch, k, n]; returns float32[batch, m, n]
    inputs: a format that holds all values of both: float32 arithmetic may then be enough
    """
    batch, m, k = a.shape
    wide = not how.single(inputs)
    out = np.empty((batch, m, b.shape[2]), np.float32)
    left, right = np.ascontiguousarray(a), np.ascontiguousarray(b)
    product, total, between, rest = product_numbers(how, wide)
    sizes = batch, m, k, b.shape[2]
    _cpu.matmul(
        kernel_threads(), wide, product, total, between, rest, key, *sizes, left, right, out
    )
    return out

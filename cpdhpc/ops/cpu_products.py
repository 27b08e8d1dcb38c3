"""Matrix products whose roundings are chosen, compiled; a part of ops.cpu."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, get_args

import numpy as np

from .. import _cpu
from ..formats import RANDOM_BITS, Cast
from ..randomness import Key
from .products import FLOAT32, Arithmetic, Inputs, Products
from .threads import kernel_threads

Array = np.ndarray[Any, np.dtype[Any]]
_INF, _NAN = 0x7F800000, 0x7FC00000
# Ways of rounding, as products_how.h has them.
TO_NEAREST, TO_FLOOR, AT_RANDOM, TO_ODD = range(1, 5)
# The way of each rounding, and of what: of |x| or x, of -x or x.
WAYS = {
    "nearest": (TO_NEAREST, 0, 0),
    "zero": (TO_FLOOR, 1, 0),
    "down": (TO_FLOOR, 0, 0),
    "up": (TO_FLOOR, 0, 1),
    "odd": (TO_ODD, 1, 0),
    "stochastic": (AT_RANDOM, 1, 0),
}
Numbers = tuple[int, ...]


@lru_cache(maxsize=256)
def rounding_numbers(cast: Cast | None, single: bool) -> Numbers:
    """Return the numbers of the kernels' struct Rounding; single: float32 is rounded to as well."""
    if cast is None or (single and cast.fmt == FLOAT32):
        return (0,) * 11
    fmt = cast.float_format
    by_code = {fmt.max_code: _bits(fmt.max), fmt.inf_code: _INF, fmt.nan_code: _NAN}
    if fmt.special == "none":  # NaN and infinity become the largest number
        by_code = dict.fromkeys(by_code, _bits(fmt.max))
    elif fmt.special == "nan":
        by_code[fmt.inf_code] = _NAN
    elif not fmt.man:
        by_code[fmt.nan_code] = _INF
    most = RANDOM_BITS - fmt.man
    random_bits = min(cast.random_bits or most, most) if cast.rounding == "stochastic" else 0
    return (
        fmt.man,
        *WAYS[cast.rounding],
        random_bits,
        (fmt.emin + 127) << 23,
        _bits(fmt.max),
        *(by_code[code] for code in cast.overflow_codes),
        by_code[fmt.inf_code],
        by_code[fmt.nan_code],
    )


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def product_numbers(
    how: Products, arithmetic: Arithmetic
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return the numbers of the kernels' struct Products, of each rounding and of the rest."""
    product, total, between = (
        rounding_numbers(cast, arithmetic == "float32") for cast in how.casts
    )
    number = get_args(Arithmetic).index(arithmetic)
    return product, total, between, (number, how.order == "pairwise", int(how.kahan), how.chunk)


def matmul(
    a: Array, b: Array, how: Products, key: Key = (0, 0), inputs: Inputs = (FLOAT32, FLOAT32)
) -> Array:
    """Return the products of the rows of a and the columns of b, rounded as how says.

    a: float32[batch, m, k]; b: float32[batch, k, n]; returns float32[batch, m, n]
    inputs: formats that hold all values of a and of b: less precise arithmetic may be enough then
    """
    batch, m, k = a.shape
    out = np.empty((batch, m, b.shape[2]), np.float32)
    left, right = np.ascontiguousarray(a), np.ascontiguousarray(b)
    numbers = product_numbers(how, how.arithmetic(*inputs))
    _cpu.matmul(kernel_threads(), *numbers, key, batch, m, k, b.shape[2], left, right, out)
    return out

"""Products of matrices with each product and each partial sum rounded to a format."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...arrays import check_floats, flat_floats, is_tensor
from ...formats import Cast, Format, Overflow, Rounding, TableFormat, overflow_shows, parse_format
from ...methods import said_by
from ...ops import backend_of, type_name
from ...ops.products import FLOAT32, Inputs, Order, Products
from ...randomness import random_key

Name = str | Format


def matmul(
    a: Any,
    b: Any,
    *,
    inputs: Name | tuple[Name, Name] | None = None,
    products: Name | None = None,
    accumulate: Name = "fp32",
    order: Order = "ascending",
    rounding: Rounding = "nearest",
    random_bits: int = 0,
    overflow: Overflow | None = None,
    chunk: int = 0,
    between: Name | None = None,
    kahan: bool = False,
    seed: int = 0,
) -> Any:
    """Return a @ b, with each product and each partial sum rounded to a format.

    a: float32[..., m, k]; b: float32[..., k, n]; NumPy or CuPy arrays or torch tensors on the CPU,
        not changed; leading axes are broadcast; a single axis is a row of a, a column of b
    inputs: both are first rounded to nearest in this format, or each in its own of two; a table is
        allowed, too; None: no rounding
    products: the format of each product; None: accumulate's; "exact": products are not rounded,
        only once with the sum, as by a fused multiply-add
    accumulate: the format of each partial sum; order: of the sums, see ops.products.Products
    rounding, random_bits: of products and sums; overflow: the result for a finite number that is
        too large; see Cast
    chunk: this many products are summed, then the sums of chunks in the format between, by default
        accumulate's; 0: all are one chunk
    kahan: sums are compensated; every operation of the compensation is rounded like sums
    seed: selects the random bits of rounding "stochastic"
    Returns float32[..., m, n] of a's kind, the same bits for any number of threads. A sum begins
    with +0. NaN, of a and b too, becomes infinity in formats that have no NaN, and the largest
        number in those that have neither.
    Gradients of tensors are two such products, (gradient) @ b.T and a.T @ (gradient), with a and b
        after the rounding of inputs, which they pass through unchanged; only sums over broadcast
        axes are torch's, in float32. With rounding "stochastic" each draws bits of its own.
    Raises TypeError if an argument has another type; ValueError for shapes that do not fit each
    other, an unknown format or word, and chunk, between and kahan that do not fit order.
    Source: of rounded products and sums Han et al., arXiv 1911.08907; of chunks Wang et al., arXiv
    1812.08011.
    """
    how = _products(
        products, accumulate, between, order, chunk, kahan, (rounding, overflow, random_bits)
    )
    for name, each in (("a", a), ("b", b)):
        check_floats("matmul", name, each)
    if is_tensor(a) != is_tensor(b):
        raise TypeError(
            f"matmul: a is {type_name(a)}, b is {type_name(b)}: should be of one library"
        )
    held = _held(inputs)
    if inputs is not None:
        a, b = (
            _rounded(name, each, Cast(fmt, "nearest", overflow if overflow_shows(fmt) else None))
            for name, each, fmt in zip("ab", (a, b), held, strict=True)
        )
    x, y, shape = _matrices(a, b)

    def multiply(x: Any, y: Any, held: Inputs, number: int) -> Any:
        left, restore = flat_floats("matmul", "a", x)
        right, _ = flat_floats("matmul", "b", y)
        key = random_key(seed, number) if number else random_key(seed)
        left, right = left.reshape(x.shape), right.reshape(y.shape)
        found = backend_of(left).matmul(left, right, how, key, held)
        return restore(found, found.shape)

    if not is_tensor(a):
        return multiply(x, y, held, 0).reshape(shape)
    from ...ops.tensors import product

    return product(x, y, multiply, held, FLOAT32).reshape(shape)


def _rounded(name: str, x: Any, cast: Cast) -> Any:
    """Return an operand rounded, including NaN; its gradient passes through."""

    def rounded(x: Any) -> Any:
        flat, restore = flat_floats("matmul", name, x)
        backend = backend_of(flat)
        return restore(backend.decode(backend.encode(flat, cast), cast.fmt))

    if not is_tensor(x):
        return rounded(x)
    from ...ops.tensors import straight_through

    return straight_through(x, rounded)


def _held(inputs: Name | tuple[Name, Name] | None) -> Inputs:
    """Return formats that contain all numbers of a and of b."""
    if inputs is None:
        return FLOAT32, FLOAT32
    both = inputs if isinstance(inputs, tuple) else (inputs, inputs)
    if len(both) != 2:
        raise ValueError(f"matmul: inputs={inputs!r}: must be one format, or one of a and one of b")
    return _format("inputs", both[0]), _format("inputs", both[1])


def _format(argument: str, name: Name) -> Format:
    """Return the format of a name. Raises the errors of parse_format, naming the argument."""
    try:
        return parse_format(name)
    except (TypeError, ValueError) as error:
        raise said_by(f"matmul: {argument}", error) from None


def _products(
    products: Name | None,
    accumulate: Name,
    between: Name | None,
    order: Order,
    chunk: int,
    kahan: bool,
    rounding: tuple[Rounding, Overflow | None, int],
) -> Products:
    if between is not None and not chunk:
        raise ValueError(f"matmul: between={between!r}: needs chunk, of 1 or more")

    def cast(argument: str, name: Name) -> Cast:
        given = _format(argument, name)
        if isinstance(given, TableFormat):
            raise ValueError(
                f"matmul: {argument}: {given.name}: products and sums are rounded to eXmY formats"
            )
        return Cast(given, *rounding)

    total = cast("accumulate", accumulate)
    each = None if products == "exact" else total
    if products not in (None, "exact"):
        each = cast("products", products)
    wider = None if between is None else cast("between", between)
    return Products(total, each, order, chunk, wider, kahan)


def _matrices(a: Any, b: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """Return float32[batch, m, k], float32[batch, k, n], and the shape of their product."""
    if not a.ndim or not b.ndim:
        raise ValueError(f"matmul: a of {a.shape}, b of {b.shape}: each needs an axis")
    x = a[None, :] if a.ndim == 1 else a
    y = b[:, None] if b.ndim == 1 else b
    try:
        front = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError:
        front = None
    if front is None or x.shape[-1] != y.shape[-2]:
        raise ValueError(
            f"matmul: a of {a.shape}, b of {b.shape}: the last axis of a and the last but one of b "
            "must be equal, and the axes in front go together by NumPy's rules"
        )
    shape = (*front, *(x.shape[-2:-1] if a.ndim > 1 else ()), *(y.shape[-1:] if b.ndim > 1 else ()))
    batch = math.prod(front)

    def spread(v: Any) -> Any:
        whole = (*front, *v.shape[-2:])
        wide = v.expand(whole) if is_tensor(v) else np.broadcast_to(v, whole)
        return wide.reshape(batch, *v.shape[-2:])

    return spread(x), spread(y), shape

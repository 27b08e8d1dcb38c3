"""Formats of use for each layer's gradients on the wire, operands and sums, by recordings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...collectives.checks import NonFiniteGradient
from ...compress import Aggregator, Context, LowBit, State
from ...compress.bucket import Bucket
from ...formats import TILE, parse_format
from ...torch.precision.recording import Recorded
from ...torch.precision.tensors import TensorFormat
from ...world.ranks import Loopback
from ..train.gradients import Gradients, load
from .evidence import OPERANDS, RAW, SUMS, Place, width
from .measures import LOWEST, error, exponents, product_error
from .replay import operands, tensor_of

Array = npt.NDArray[Any]

BITS = (16, 12, 10, 8, 7, 6, 5, 4, 3)
FORMATS = (  # bf16, and of each width all that have 2 to 5 exponent bits
    "bf16",
    *(f"e{e}m{bits - 1 - e}" for bits in BITS for e in range(2, min(5, bits - 1) + 1)),
)


ACCUMULATORS = (  # wider ranges too: nothing scales a sum
    "bf16",
    *(f"e{e}m{bits - 1 - e}" for bits in (24, 20, 16, 14, 12, 10, 9, 8) for e in range(4, 8)),
)
SCALED = "aps"  # operands have a power of two each, so that only their spread counts
SATURATED = {"overflow": "saturate"}  # sums
USED = {  # by products, as replay names them
    "weights": ("forward", "input gradient"),
    "activations": ("forward", "weight gradient"),
    "errors": ("input gradient", "weight gradient"),
}


def modules_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters of each module, by its name; one of the model itself stands alone."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return found


def proposed(
    name: str, parameters: Sequence[str], method: LowBit, recorded: Sequence[Gradients]
) -> Place:
    """Return a layer's gradients with float32 and the formats of use.

    These have fewer bits than float32, whole tiles counted; none has fewer bits than another and no
    larger error; and some of the gradient arrives.
    """
    shapes = [recorded[0].layers[each].shape[1:] for each in parameters]
    bucket = Bucket(tuple(parameters), tuple(shapes), TILE)
    rows = [
        [bucket.flatten([each.layers[p][rank] for p in parameters]) for rank in range(each.ranks)]
        for each in recorded
    ]
    norms = [sum(float(np.sum(np.square(v.mean(0, np.float64)))) for v in each.layers.values())
             for each in recorded]  # fmt: skip
    owns = [float(np.sum(np.square(np.mean(row, axis=0, dtype=np.float64)))) for row in rows]
    own = math.sqrt(math.fsum(o / (n or 1.0) for o, n in zip(owns, norms, strict=True)) / len(rows))
    sizes = tuple(int(np.prod(shape)) for shape in shapes)
    plain = Place(name, sizes, *span([row for each in rows for row in each]), (RAW,), (0.0,))

    def lost(wire: str) -> float:
        if plain.bits(wire) >= plain.bits(RAW):  # few values, whose tiles are mostly empty
            return math.inf
        try:
            squares = [
                squared_error(replace(method, wire=wire), bucket, row) / (norm or 1.0)
                for row, norm in zip(rows, norms, strict=True)
            ]
        except (ValueError, NonFiniteGradient):  # what the options do not take, or overflows
            return math.inf
        return math.sqrt(math.fsum(squares) / len(squares))

    return laddered(plain, FORMATS, lost, own or 1.0)  # own: nothing would arrive


def laddered(
    plain: Place, names: Iterable[str], lost: Callable[[str], float], most: float
) -> Place:
    """Return a place with float32 and those formats of which none has fewer bits and less error.

    lost: error of a format; most: what it must be below
    """
    ladder: list[tuple[str, float]] = []  # from the fewest bits on
    for name in sorted(names, key=lambda name: parse_format(name).bits):
        found = lost(name)
        if not found < (ladder[-1][1] if ladder else most):  # NaN: it overflows
            continue
        if ladder and width(ladder[-1][0]) == width(name):
            ladder.pop()
        ladder.append((name, found))
    formats, errors = zip(*[(RAW, 0.0), *reversed(ladder)], strict=True)
    return replace(plain, formats=formats, errors=errors)


def span(arrays: Iterable[Array]) -> tuple[int, int]:
    """Return the least and the largest exponent of values; of zeros alone 0 and 0."""
    (there,) = np.nonzero(np.sum([exponents(each).counts for each in arrays], axis=0))
    return (int(there[0]) + LOWEST, int(there[-1]) + LOWEST) if there.size else (0, 0)


def in_products(recorded: Recorded, name: str) -> list[Place]:
    """Return a layer's operands, weight gradients and sums with float32 and the formats of use.

    Errors are those of its three products against float64, root mean squares over those that a
    tensor is used in and over iterations; of weight gradients that of rounding.
    Raises replay.Missing where a tensor was not recorded whole, or its products are not known.
    """
    layer = recorded.layers[name]
    tensors = {i: {kind: tensor_of(recorded, i, name, kind) for kind in OPERANDS}
               for i in recorded.iterations}  # fmt: skip
    whole = {i: operands(layer, each.__getitem__) for i, each in tensors.items()}
    exact = {(i, product): a.astype(np.float64) @ b.astype(np.float64)
             for i, each in whole.items() for product, (a, b) in each.items()}  # fmt: skip
    gradients = [exact[i, "weight gradient"].astype(np.float32) for i in whole]
    sizes = {kind: values.size for kind, values in next(iter(tensors.values())).items()}

    def of_operand(kind: str, fmt: str) -> float:
        how, found = scaled(fmt), []
        for i, each in tensors.items():
            some = operands(layer, {**each, kind: how.round(each[kind])}.__getitem__)
            for product in USED[kind]:
                a, b = (each.astype(np.float64) for each in some[product])
                found.append(error(a @ b, exact[i, product]).relative)
        return _mean_square(found)

    def of_gradients(fmt: str) -> float:
        return _mean_square([error(scaled(fmt).round(g), g).relative for g in gradients])

    def of_sums(fmt: str) -> float:
        how = {"accumulate": fmt} | SATURATED
        return _mean_square([product_error(a, b, **how).relative
                             for each in whole.values() for a, b in each.values()])  # fmt: skip

    def plain(kind: str, size: int, arrays: Sequence[Array]) -> Place:
        return Place(name, (size,), *span(arrays), (RAW,), (0.0,), kind)

    found = [
        laddered(
            plain(kind, size, [each[kind] for each in tensors.values()]),
            FORMATS,
            partial(of_operand, kind),
            1.0,
        )
        for kind, size in sizes.items()
    ]
    weights = plain("weight_gradients", sizes["weights"], gradients)
    sums = plain(SUMS, sum(sizes.values()), [x.astype(np.float32) for x in exact.values()])
    return [*found, laddered(weights, FORMATS, of_gradients, 1.0),
            laddered(sums, ACCUMULATORS, of_sums, 1.0)]  # fmt: skip


def scaled(fmt: str) -> TensorFormat:
    """Return how a tensor is rounded to a format that the search has found."""
    return TensorFormat(format=fmt, scaling=SCALED)


def _mean_square(found: Sequence[float]) -> float:
    return math.sqrt(math.fsum(each * each for each in found) / len(found))


def squared_error(method: Aggregator, bucket: Bucket, rows: list[Array]) -> float:
    """Return ||mean - exact||**2 of gradients of all ranks, float32[bucket.size], in float64."""
    world = Loopback(len(rows))
    found = method.aggregate(rows, bucket, Context(world, State(world.hosted, world.ranks)))
    exact = np.mean(rows, axis=0, dtype=np.float64)
    return float(np.sum(np.square(found.flat - exact)))


def mean_error(method: Aggregator, files: Sequence[Path]) -> float:
    """Return the error of recorded mean gradients relative to float64 ones, over all layers."""
    squares = []
    for path in files:
        each = load(path)
        shapes = tuple(values.shape[1:] for values in each.layers.values())
        bucket = Bucket(tuple(each.layers), shapes, TILE)
        rows = [bucket.flatten([v[r] for v in each.layers.values()]) for r in range(each.ranks)]
        norm = float(np.sum(np.square(np.mean(rows, axis=0, dtype=np.float64))))
        squares.append(squared_error(method, bucket, rows) / (norm or 1.0))
    return math.sqrt(math.fsum(squares) / len(squares))

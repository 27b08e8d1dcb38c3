"""Formats that the gradients of each layer may travel in, by gradients that were recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..collectives.checks import NonFiniteGradient
from ..compress import Aggregator, Context, LowBit, State
from ..compress.bucket import Bucket
from ..formats import TILE, parse_format
from ..train.gradients import Gradients, load
from ..world.ranks import Loopback
from .evidence import RAW, Layer
from .measures import LOWEST, exponents

Array = npt.NDArray[Any]

BITS = (16, 12, 10, 8, 7, 6, 5, 4, 3)
FORMATS = (  # bf16, and of each width all that have 2 to 5 exponent bits
    "bf16",
    *(f"e{e}m{bits - 1 - e}" for bits in BITS for e in range(2, min(5, bits - 1) + 1)),
)


def modules_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters of each module, by its name; one of the model itself stands alone."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return found


def proposed(
    name: str, parameters: Sequence[str], method: LowBit, recorded: Sequence[Gradients]
) -> Layer:
    """Return a layer with float32 and the formats of use.

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
    plain = Layer(name, sizes, 0, 0, (RAW,), (0.0,))
    ladder: list[tuple[str, float]] = []  # from the fewest bits on
    for wire in sorted(FORMATS, key=lambda wire: parse_format(wire).bits):
        if plain.bits(wire) >= plain.bits(RAW):  # few values, whose tiles are mostly empty
            continue
        try:
            squares = [
                squared_error(replace(method, wire=wire), bucket, row) / (norm or 1.0)
                for row, norm in zip(rows, norms, strict=True)
            ]
        except (ValueError, NonFiniteGradient):  # what the options do not take, or overflows
            continue
        error = math.sqrt(math.fsum(squares) / len(squares))
        if error >= (ladder[-1][1] if ladder else own or 1.0):  # own: nothing would arrive
            continue
        if ladder and parse_format(ladder[-1][0]).bits == parse_format(wire).bits:
            ladder.pop()
        ladder.append((wire, error))
    counts = np.sum([exponents(row).counts for each in rows for row in each], axis=0)
    (there,) = np.nonzero(counts)
    low, high = (int(there[0]) + LOWEST, int(there[-1]) + LOWEST) if there.size else (0, 0)
    wires, errors = zip(*[(RAW, 0.0), *reversed(ladder)], strict=True)
    return Layer(name, sizes, low, high, wires, errors)


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

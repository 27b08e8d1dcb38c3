"""Shifts that all ranks share: none, static, and APS, one for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formats import SHIFT_BIAS, TILE, FloatFormat, tiles
from ..ops.reference import fitting_shift

Array = npt.NDArray[Any]

HEADROOMS = {"n": 2, "sqrt": 1, "none": 0}  # H = ranks ** (half of this)
SCALINGS = ("none", "static:K", "aps", "tile")


class Segment(NamedTuple):
    """A named part of an array, as a layer: values start..stop."""

    name: str
    start: int
    stop: int


class Scaling(NamedTuple):
    """A way to choose shifts; shift is static's."""

    kind: str
    shift: int


def parse_scaling(text: str, fmt: FloatFormat | None) -> Scaling:
    """Return the meaning of a scaling's name; static's shift must suit the format, if any.

    Raises ValueError for unknown names and shifts out of range.
    """
    kind, colon, number = text.partition(":")
    if kind not in ("none", "static", "aps", "tile") or (kind == "static") != bool(colon):
        raise ValueError(f"allreduce: scaling={text!r}: known are {', '.join(SCALINGS)}")
    if kind != "static":
        return Scaling(kind, 0)
    try:
        shift = int(number)
    except ValueError:
        raise ValueError(f"allreduce: scaling={text!r}: static:K needs an integer K") from None
    if fmt is not None and not fmt.shift_min <= shift <= fmt.shift_max:
        raise ValueError(
            f"allreduce: scaling={text!r}: K for {fmt.name} is {fmt.shift_min}..{fmt.shift_max}"
        )
    return Scaling(kind, shift)


def check_segments(segments: Sequence[Segment], n: int, on_tiles: bool) -> None:
    """Raise ValueError unless segments lie in order in n values, and on_tiles: cover all tiles.

    A tile belongs to one segment, so each starts on the tile after the last one of the previous.
    """
    end = 0
    for name, start, stop in segments:
        expected = f"{end}" if on_tiles else f"{end} or more"
        if not (start == end if on_tiles else start >= end) or not start <= stop <= n:
            raise ValueError(
                f"allreduce: segment {name!r} is {start}..{stop} of {n} values: must start at "
                f"{expected}"
            )
        end = min(tiles(stop) * TILE, n) if on_tiles else stop
    if on_tiles and end != n:
        raise ValueError(f"allreduce: segments end at {end} of {n} values: must cover all")


def tile_span(segment: Segment) -> slice:
    """Return which tiles belong to a segment that starts on a tile."""
    return slice(tiles(segment.start), tiles(segment.stop))


def aps_shift(amax_bits: int, fmt: FloatFormat, ranks: int, headroom: str) -> int:
    """Return k = emax - ceil(log2(H * amax)), so that H * amax * 2**k fits the format.

    amax_bits: float32 bits of max|g| over all ranks, finite; zero gives k = 0
    headroom: H is ranks ("n"), its square root ("sqrt") or 1 ("none")
    With H = ranks**(h/2), the logarithm is half of that of ranks**h * amax**2, an integer times
    a power of four, whose ceiling is exact; ceil(y / 2) = ceil(ceil(y) / 2).
    k stays within fmt.shift_min .. fmt.shift_max.
    Source: Han, Demmel, You: Auto-Precision Scaling, arXiv 1911.08907.
    """
    if amax_bits == 0:
        return 0
    amax = float(np.uint32(amax_bits).view(np.float32))
    mantissa, exponent = math.frexp(amax)
    whole = int(mantissa * 2**24)
    square: int = ranks ** HEADROOMS[headroom] * whole**2
    twice = (square - 1).bit_length() + 2 * (exponent - 24)
    k = fmt.emax - -(-twice // 2)
    return max(fmt.shift_min, min(k, fmt.shift_max))


def integer_shift(amax_bits: int, fmt: FloatFormat) -> int:
    """Return the largest k with amax * 2**k <= fmt.max, so that no integer saturates.

    amax_bits: as for aps_shift; k stays within fmt.shift_min .. fmt.shift_max
    """
    return int(fitting_shift(np.array([amax_bits]), fmt)[0]) - SHIFT_BIAS


def shift_bytes(shifts: Sequence[int], segments: Sequence[Segment], n: int, like: Array) -> Array:
    """Return the shift byte of each tile, uint8[tiles(n)], from the shift of each segment."""
    out = np.empty_like(like, shape=(tiles(n),), dtype=np.uint8)
    for shift, segment in zip(shifts, segments, strict=True):
        out[tile_span(segment)] = shift + SHIFT_BIAS
    return out

"""What rounding does to arrays, counted: exponents, what formats lose, errors of sums and products.

All compare with float64, in NumPy, on one process. Formats, scalings and algorithms are those of
gradients that travel: kernels and simulator are the ones of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...collectives.allreduce import Allreduce
from ...collectives.checks import NonFiniteGradient
from ...collectives.method import Segment, aps_shift
from ...collectives.schedules import SCHEDULES
from ...formats import SHARED, SHIFT_BIAS, Cast, TableFormat, packed_bytes, shift_count, tiles
from ...methods import EXACT, suggest
from ...ops import cpu, type_name
from ...randomness import random_key
from ...torch.precision.products import matmul
from ...world.ranks import Loopback

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

LOWEST, HIGHEST = -126, 127  # exponents of float32's normal numbers
SCALINGS = ("none", "aps", *SHARED)  # of one array, by name


@dataclass(frozen=True)
class Exponents:
    """How often each exponent comes, and apart from them what has none.

    counts: int64[254], of normal numbers by floor(log2|x|), from LOWEST to HIGHEST
    subnormals: of float32: non-zero, below 2**LOWEST
    """

    counts: npt.NDArray[np.int64]
    zeros: int
    subnormals: int
    infinities: int
    nans: int

    @property
    def values(self) -> int:
        """Number of values, of all kinds."""
        apart = self.zeros + self.subnormals + self.infinities + self.nans
        return int(self.counts.sum()) + apart


def exponents(x: Floats) -> Exponents:
    """Return the histogram of exponents of float32 values, of any shape."""
    bits = _floats("exponents", x).view(np.uint32)
    counts = np.bincount(bits >> 23 & 0xFF, minlength=256)
    no_fraction = bits << 9 == 0
    zeros, infinities = (int((no_fraction & (bits >> 23 & 0xFF == e)).sum()) for e in (0, 255))
    others = int(counts[0]) - zeros, infinities, int(counts[255]) - infinities
    return Exponents(counts[1:255].astype(np.int64), zeros, *others)


class Error(NamedTuple):
    """How far values are from exact ones; all NaN where there is nothing to compare with.

    relative: ||found - exact|| / ||exact||; largest: max|found - exact| / max|exact|
    """

    relative: float
    largest: float

    @property
    def snr_db(self) -> float:
        """Power of the exact values over that of the differences, in dB; infinite if equal."""
        return -20 * math.log10(self.relative) if self.relative else math.inf


UNKNOWN = Error(math.nan, math.nan)


def error(found: Array, exact: Array) -> Error:
    """Return the error of values in float64, of any shape: UNKNOWN for zeros, NaN and infinity.

    found, exact: of one shape. Raises ValueError for others.
    """
    if found.shape != exact.shape:
        raise ValueError(f"error: found of {found.shape}, exact of {exact.shape}: must be the same")
    whole = exact.astype(np.float64).reshape(-1)
    with np.errstate(invalid="ignore"):
        wrong = found.astype(np.float64).reshape(-1) - whole
    largest = float(np.abs(whole).max(initial=0.0))
    if not (0 < largest < math.inf) or not np.isfinite(wrong).all():
        return UNKNOWN
    wrong /= largest  # so that squares neither overflow nor vanish
    whole /= largest
    # By pairs, which is the same for any number of threads
    relative = math.sqrt(np.square(wrong).sum() / np.square(whole).sum())
    return Error(relative, float(np.abs(wrong).max()))


@dataclass(frozen=True)
class Rounded:
    """Values of a format, and how many became what.

    values: float32, of the shape of what was rounded
    nonzero: how many of these were finite and not zero, of which are
    saturated: beyond the largest number after rounding; underflowed: zero after it
    subnormal: below the format's smallest normal number, and not zero
    nonfinite: were NaN or infinity
    """

    values: Floats
    nonzero: int
    saturated: int
    underflowed: int
    subnormal: int
    nonfinite: int

    def share(self, count: int) -> float:
        """Return a count over nonzero; NaN where that is 0."""
        return count / self.nonzero if self.nonzero else math.nan


def rounded(x: Floats, cast: Cast, scaling: str | int = "none", seed: int = 0) -> Rounded:
    """Return x rounded to a format after scaling, and scaled back.

    x: float32, any shape, taken flat for tiles and blocks
    scaling: of SCALINGS: "aps": a power of two by the largest exponent; "tile", "block32",
        "block16": one for so many values, the largest that fits; or the k of 2**k for all values
    seed: picks the random bits of rounding "stochastic"
    Raises TypeError for other values, ValueError for another scaling or k.
    """
    flat, fmt = _floats("rounded", x), cast.fmt
    shared = SHARED.get(scaling) if isinstance(scaling, str) else None
    if shared is None:
        shifts = np.full(tiles(flat.size), _shift(flat, cast, scaling) + SHIFT_BIAS, np.uint8)
    else:
        shifts = np.empty(shift_count(flat.size, shared), np.uint8)
    words = np.empty(packed_bytes(flat.size, fmt.bits), np.uint8)
    counts = np.zeros((tiles(flat.size), 3), np.uint32)
    key = random_key(seed)
    cpu.encode_tiles(flat, cast, words, shifts, fit=shared is not None, key=key, counts=counts)
    values = np.empty(flat.size, np.float32)
    cpu.decode_tiles(words, shifts, fmt, values)
    magnitudes = cpu.unpack(words, fmt.bits, flat.size) & np.uint32((1 << (fmt.bits - 1)) - 1)
    least_normal = 0 if isinstance(fmt, TableFormat) else 1 << fmt.man  # tables have none
    subnormal = (magnitudes > 0) & (magnitudes < least_normal)
    saturated, underflowed, nonfinite = (int(each) for each in counts.sum(0, dtype=np.int64))
    return Rounded(
        values.reshape(x.shape),
        int(np.count_nonzero(flat)) - nonfinite,
        saturated,
        underflowed,
        int(subnormal.sum()),
        nonfinite,
    )


def _shift(flat: Floats, cast: Cast, scaling: str | int) -> int:
    """Return the k of all values."""
    fmt = cast.fmt
    if isinstance(scaling, int):
        if not fmt.shift_min <= scaling <= fmt.shift_max:
            raise ValueError(
                f"rounded: scaling={scaling}: {fmt.name} allows {fmt.shift_min}..{fmt.shift_max}"
            )
        return scaling
    if scaling not in SCALINGS:
        raise ValueError(f"rounded: scaling={scaling!r}: {suggest(scaling, SCALINGS)}")
    finite = flat[np.isfinite(flat)]
    largest = int(cpu.amax_tiles(finite).max(initial=0))
    return aps_shift(largest, fmt, 1, "none") if scaling == "aps" else 0


class Way(NamedTuple):
    """A way to sum over ranks: an algorithm of the all-reduce, and how partial sums are kept."""

    algorithm: str
    accumulate: str


ANY = "any"  # algorithm: exact sums are the same in all
WAYS = (
    *(Way(name, each) for name, row in SCHEDULES.items() for each in row.accumulates),
    Way(ANY, EXACT),
)


def sum_error(
    rows: Sequence[Floats],
    wire: str,
    way: Way,
    scaling: str,
    segments: Sequence[Segment] | None = None,
    **options: Any,
) -> Error:
    """Return the error of the sum over ranks, as training on so many ranks would have it.

    rows: float32, of one shape, a contribution for each rank
    wire, scaling, segments, options: as of cpdhpc.allreduce
    UNKNOWN where a value is not finite, or overflows. Raises ValueError for what does not go
    together, as exact sums of too wide a range.
    """
    algorithm = "ring" if way.algorithm == ANY else way.algorithm
    method = Allreduce(wire, algorithm, scaling, way.accumulate, **options)
    if not all(np.isfinite(row).all() for row in rows):
        return UNKNOWN
    exact = np.asarray(np.sum(rows, axis=0, dtype=np.float64))
    try:
        done = method.run(Loopback(len(rows)), list(rows), segments=segments)
    except NonFiniteGradient:  # it is too large for the wire
        return UNKNOWN
    return error(done.arrays[0], exact)


def product_error(a: Floats, b: Floats, **how: Any) -> Error:
    """Return the error of cpdhpc.torch.precision.matmul(a, b, **how) against a @ b in float64."""
    return error(matmul(a, b, **how), a.astype(np.float64) @ b.astype(np.float64))


def _floats(function: str, x: Array) -> Floats:
    """Return x flat. Raises TypeError unless it is a float32 array."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        came = f"{type_name(x)} of {getattr(x, 'dtype', None)}"
        raise TypeError(f"{function}: x is {came}: a NumPy array of float32 is allowed")
    return np.ascontiguousarray(x).reshape(-1)

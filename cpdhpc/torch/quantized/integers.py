"""Integer forms of networks and of their batch norms.

Batch norm and the following quantiser in integers: clip((A x + B) >> n, 0, 2^k - 1).

x is an integer, a sum of products of codes. The reference is clip(floor(a x + b + 1/2), 0, 2^k - 1)
in exact arithmetic of the float64 numbers a and b: round to nearest, ties up. (Ties to even have
no such form: a = 1/2, b = 0 gives 0 0 1 2 2 2 3 4, which no line gives.)
Source: Lin et al., Optimal Quantization for Batch Normalization in Neural Network Deployments and
Beyond, arXiv 2008.13128. The search for A, B and the smallest n here differs from it, see _slopes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from math import ceil, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import store
from ...errors import UserError

Array = npt.NDArray[Any]

MOST_BITS = 8  # of codes
SUMS = 2**31  # sums of products are smaller, so that they fit int32
_MOST_SHIFT = 54  # so that level << shift fits int64
_BOUND = 2**62  # for A and B without another bound


def fold(
    gamma: Array, beta: Array, mean: Array, variance: Array, eps: float, bits: int
) -> tuple[Array, Array]:
    """Return a and b, float64[channels]: a x + b is the norm of x in units of a code's step.

    Codes 0..2^bits - 1 represent values 0..1. Both are multiples of a power of two so large that
    float64 computes a x + b + 1/2 without rounding for all |x| <= 2^31.
    Raises ValueError, naming the channel, if one is too large for this, or not finite.
    """
    steps = 2**bits - 1
    a = steps * gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + eps)
    b = steps * beta.astype(np.float64) - a * mean
    largest = 2 * (np.abs(a) * SUMS + np.abs(b) + 1)
    if not (largest < 2.0**52).all():  # NaN too
        at = int(np.argmin(largest < 2.0**52))
        raise ValueError(
            f"fold: channel {at}: a={a[at]:g}, b={b[at]:g}: |a| 2^31 + |b| must be below 2^51"
        )
    unit = np.ldexp(1.0, np.frexp(largest)[1] - 53)
    return np.rint(a / unit) * unit, np.rint(b / unit) * unit


@dataclass(frozen=True)
class IntegerNorm:
    """clip((multiplier x + offset) >> shift, 0, 2^bits - 1) of each channel.

    multiplier, offset, shift: int64[channels]; low, high: the same, the range of x it is valid for
    """

    multiplier: Array
    offset: Array
    shift: Array
    low: Array
    high: Array
    bits: int

    def __call__(self, x: Array) -> Array:
        """Return the codes, int32[n, channels, ...], of integers of that shape."""
        a, b, n = (
            each.reshape(-1, *[1] * (x.ndim - 2))
            for each in (self.multiplier, self.offset, self.shift)
        )
        return np.clip((a * x + b) >> n, 0, 2**self.bits - 1).astype(np.int32)

    def widths(self) -> dict[str, Array]:
        """Return the bits, sign included, of each channel's numbers for x in low..high."""
        given = (self.multiplier, self.offset, self.low, self.high)
        columns = zip(*(each.tolist() for each in given), strict=True)
        sums = [max(_width(a * x + b) for x in ends) for a, b, *ends in columns]
        return {
            "multiplier": np.array([_width(a) for a in self.multiplier.tolist()]),
            "offset": np.array([_width(b) for b in self.offset.tolist()]),
            "sum": np.array(sums),
        }


def _width(value: int) -> int:
    return (value if value >= 0 else ~value).bit_length() + 1


def integer_norm(
    a: Array, b: Array, low: npt.ArrayLike, high: npt.ArrayLike, bits: int
) -> IntegerNorm:
    """Return integers with the same result as a and b for every integer x in low..high.

    a, b: float64[channels]; low, high: one for all, or int64[channels]; the shift of each channel
    is the smallest possible. A channel of negative a falls, one of a = 0 is constant.
    Raises ValueError, naming argument or channel, for values that are not finite, more than 8 bits,
    and ranges so wide that int64 overflows.
    """
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"integer_norm: bits={bits}: must be 1..{MOST_BITS}")
    forms = []
    lows, highs = (np.broadcast_to(np.asarray(each, np.int64), a.shape) for each in (low, high))
    rows = zip(*(each.tolist() for each in (a, b, lows, highs)), strict=True)
    for channel, (slope, start, least, most) in enumerate(rows):
        given = f"channel {channel}: a={slope!r}, b={start!r}, x={least}..{most}"
        if not isfinite(slope) or not isfinite(start) or least > most:
            raise ValueError(f"integer_norm: {given}: must be finite, and the range not empty")
        form = _form(steps(slope, start, least, most, 2**bits - 1))
        if form is None or any(_width(form[0] * x + form[1]) > 64 for x in (least, most)):
            raise ValueError(f"integer_norm: {given}: is so wide that A x + B overflows int64")
        forms.append(form)
    multiplier, offset, shift = np.array(forms, np.int64).reshape(-1, 3).T
    return IntegerNorm(multiplier, offset, shift, lows.copy(), highs.copy(), bits)


class LevelSteps(NamedTuple):
    """The x at which levels are reached as x rises: x at_least[i] has level reached[i] or more, and
    x at_most[i] less than missed[i]; sign: -1 if -x rises instead.
    """

    at_least: Array
    reached: Array
    at_most: Array
    missed: Array
    sign: int


def steps(a: float, b: float, low: int, high: int, top: int) -> LevelSteps:
    """Return the facts that fix clip(floor(a x + b + 1/2), 0, top) on low..high: at most 2 top."""
    if a < 0:
        return steps(-a, b, -high, -low, top)._replace(sign=-1)
    levels = range(1, top + 1)
    half = Fraction(b) + Fraction(1, 2)
    if a:
        found = [ceil((level - half) / Fraction(a)) for level in levels]
    else:
        found = [low if half >= level else high + 1 for level in levels]
    first = np.array([min(max(x, low), high + 1) for x in found], np.int64)
    level = np.array(levels, np.int64)
    reached, missed = first <= high, first > low
    return LevelSteps(first[reached], level[reached], first[missed] - 1, level[missed], 1)


def _slopes(facts: LevelSteps, shift: int) -> tuple[int, int]:
    """Return the least and the largest A for which some integer B satisfies all facts.

    A x + B >= i << n at x, and A y + B <= (j << n) - 1 at y. For A and each such pair
    A (x - y) >= (i - j << n) + 1; if all pairs hold, the largest of the lower bounds on B is not
    above the smallest of the upper ones, and these are integers. So this is exact, not a search.
    """
    run = facts.at_least[:, None] - facts.at_most
    rise = (facts.reached[:, None] - facts.missed << shift) + 1
    rising, falling = run > 0, run < 0
    least = (-(-rise[rising] // run[rising])).max(initial=-_BOUND)
    most = (rise[falling] // run[falling]).min(initial=_BOUND)
    return int(least), int(most)


def _form(facts: LevelSteps) -> tuple[int, int, int] | None:
    """Return A, B and the smallest n; None if none up to 54 is enough.

    If n is enough so is n + 1, with 2 A and 2 B.
    """

    def enough(shift: int) -> bool:
        least, most = _slopes(facts, shift)
        return least <= most

    n = bisect_left(range(_MOST_SHIFT + 1), True, key=enough)
    if n > _MOST_SHIFT:
        return None
    a = _nearest_to_zero(*_slopes(facts, n))
    reached = zip(facts.at_least.tolist(), facts.reached.tolist(), strict=True)
    missed = zip(facts.at_most.tolist(), facts.missed.tolist(), strict=True)
    lower = max(((level << n) - a * x for x, level in reached), default=-_BOUND)
    upper = min(((level << n) - 1 - a * x for x, level in missed), default=_BOUND)
    return a * facts.sign, _nearest_to_zero(lower, upper), n


def _nearest_to_zero(least: int, most: int) -> int:
    return min(max(least, 0), most)


TOGETHER = 250  # images that pass through the layers at once
KIND = "integer network"


@dataclass(frozen=True)
class Input:
    """The codes of images of values 0..1, to nearest, 0..2^bits - 1; integers are taken as codes.

    Images without channels get one. Raises UserError for values outside.
    """

    bits: int

    def __call__(self, images: Array) -> Array:
        """Return int32[n, channels, height, width]."""
        codes = np.issubdtype(images.dtype, np.integer)
        top = 2**self.bits - 1
        low, high = images.min(initial=0), images.max(initial=0)
        if not 0 <= low <= high <= (top if codes else 1):
            raise UserError(
                f"Input: images: values {low:g}..{high:g}: must be 0..{top if codes else 1}"
            )
        x = images.astype(np.int32) if codes else np.rint(images * np.float32(top)).astype(np.int32)
        return x[:, None] if x.ndim == 3 else x


@dataclass(frozen=True)
class IntegerConvolution:
    """Sums of products, zero-padded. weight: int8[outputs, inputs, rows, columns]."""

    weight: Array
    stride: int
    padding: int

    def __call__(self, x: Array) -> Array:
        """Return int32[n, outputs, height, width] of codes int32[n, inputs, height, width]."""
        around, kernel = (self.padding, self.padding), self.weight.shape[2:]
        padded = np.pad(x, ((0, 0), (0, 0), around, around))
        windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(2, 3))
        windows = windows[:, :, :: self.stride, :: self.stride]
        sums = np.tensordot(windows, self.weight.astype(np.int32), axes=((1, 4, 5), (1, 2, 3)))
        return np.moveaxis(sums, 3, 1)


@dataclass(frozen=True)
class IntegerLinear:
    """Sums of products and a bias. weight: int8[outputs, inputs], bias: int32[outputs]."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        """Return int32[n, outputs] of codes int32[n, inputs]."""
        return x @ self.weight.T.astype(np.int32) + self.bias


@dataclass(frozen=True)
class MaxPool:
    """The largest code of each square of size x size; a remainder at the border is left out."""

    size: int

    def __call__(self, x: Array) -> Array:
        """Return int32[n, channels, height // size, width // size]."""
        n, channels, rows, columns = *x.shape[:2], *(m // self.size for m in x.shape[2:])
        whole = x[:, :, : rows * self.size, : columns * self.size]
        return whole.reshape(n, channels, rows, self.size, columns, self.size).max(axis=(3, 5))


@dataclass(frozen=True)
class Flatten:
    """All axes but the first as one."""

    def __call__(self, x: Array) -> Array:
        """Return int32[n, values]."""
        return x.reshape(len(x), -1)


Layer = Input | IntegerConvolution | IntegerNorm | MaxPool | Flatten | IntegerLinear
LAYERS: dict[str, type[Any]] = {
    "input": Input,
    "convolution": IntegerConvolution,
    "norm": IntegerNorm,
    "maxpool": MaxPool,
    "flatten": Flatten,
    "linear": IntegerLinear,
}
_NAMES = {layer: name for name, layer in LAYERS.items()}


@dataclass(frozen=True)
class IntegerNetwork:
    """Layers of LAYERS, one after the other."""

    layers: Sequence[Layer]

    def __call__(self, images: Array) -> Array:
        """Return the scores int32[n, classes] of images float[n, height, width] in 0..1, or codes.

        Images may have channels, [n, channels, height, width]. Raises UserError for other values.
        """
        parts = [images[at : at + TOGETHER] for at in range(0, len(images), TOGETHER)] or [images]
        return np.concatenate([self._scores(part) for part in parts])

    def _scores(self, x: Array) -> Array:
        for layer in self.layers:
            x = layer(x)
        return x

    def classes(self, images: Array) -> Array:
        """Return int64[n], each image's class of the largest score, the first of equal ones."""
        return np.asarray(self(images).argmax(axis=1))

    def save(self, path: Path | str, about: store.Attributes) -> None:
        """Write all layers; about: attributes of the file. Raises StoreError if that fails."""
        groups = {
            f"{number:03}.{_NAMES[type(layer)]}": {
                each.name: np.asarray(getattr(layer, each.name)) for each in fields(layer)
            }
            for number, layer in enumerate(self.layers)
        }
        store.write(path, groups, {"kind": KIND, **about})


def load(path: Path | str) -> IntegerNetwork:
    """Return the network of a file of save. Raises StoreError if it is not one."""
    groups, attributes = store.read(path)
    if attributes.get("kind") != KIND:
        raise store.StoreError(f"{path}: is not a file of cpdhpc export")
    layers = []
    for name in sorted(groups):
        kind = name.partition(".")[2]
        if kind not in LAYERS:
            raise store.StoreError(f"{path}: layer {name}: is of a later version of cpdhpc")
        values = {key: a if a.ndim else int(a) for key, a in groups[name].items()}
        layers.append(LAYERS[kind](**values))
    return IntegerNetwork(layers)

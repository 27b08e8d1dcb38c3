"""The rounding of one tensor: its format, its scale, and the scale's state. Needs only NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator, model_validator

from ...compress.bucket import NEVER
from ...compress.flexpoint import autoflex
from ...config import Section, Share
from ...formats import (
    IN_BLOCKS,
    INTEGERS,
    NAMED_WIRES,
    NVFP4_BLOCK,
    SHARED,
    SHIFT_BIAS,
    SHIFT_NONFINITE,
    TILE,
    Cast,
    FloatFormat,
    Format,
    Microscaling,
    Overflow,
    Rounding,
    TwoScales,
    nvfp4_blocks,
    packed_bytes,
    wire_format,
    wire_scaling,
)
from ...methods import suggest
from ...ops import backend_of
from ...ops.common import MAGNITUDE, NONFINITE_BITS, fitting_shift
from ...randomness import Key

Array = npt.NDArray[Any]

FAR = 2.0**64  # beyond it, or its inverse, a factor or its inverse may be subnormal in float32


class TensorFormat(Section):
    """One tensor of a policy: a format's name, or a table.

    format: a name of parse_format; int2 .. int16 or ternary, which need a scaling, by default
        "aps"; mxfp8, mxfp8-e5m2, mxfp6, mxfp6-e3m2, mxfp4 with scaling "block32"; or nvfp4 with
        "block16", whose scales are e4m3 times a float32 of the tensor (ops/two_scales.py)
    scaling: the factor on the tensor before it is rounded, which is divided out afterwards
        "none": no factor
        "amax": the largest number of the format / amax / 2^margin in float32, of this tensor now
        "delayed": the same, of the last history calls: expect = "max" of them, or the "recent" one
        "aps": the largest power of two with which the tensor fits
        "block32", "block16": a power of two for each 32 or 16 values along an axis: emax of the
            format less floor(log2(amax)), so that values may saturate
        "fixed": a power of two that follows how often values overflow: every history calls it is
            halved if the share is above overflow_rate, and doubled if the share would still be at
            most that; numbers up to 2^exponent fit at first, by default the first tensor; or those
            of the first warmup calls, which are not rounded
        "flexpoint": a power of two for the value predicted from the last history amax:
            2 (m + 3 s), with their mean m and standard deviation s
    rounding, overflow, random_bits: see Cast, but overflow is "saturate" by default if the scaling
        allows values that are too large: blocks, delayed, fixed, flexpoint
    history: calls; margin: a power of two; expect: of the history
    exponent, overflow_rate, warmup: see "fixed"
    Source: amax, delayed: Micikevicius et al., arXiv 2209.05433, as in NVIDIA's Transformer
    Engine; aps: Han et al., arXiv 1911.08907; blocks: OCP Microscaling Formats v1.0, section 6.3;
    fixed: Courbariaux et al., arXiv 1412.7024, section 5; flexpoint: Koester et al., NIPS 2017.
    """

    format: str = "fp32"
    scaling: str = "none"
    rounding: Rounding = "nearest"
    overflow: Overflow | None = None
    random_bits: Annotated[int, Field(ge=0, le=31)] = 0
    history: Annotated[int, Field(ge=1, le=65536)] = 16
    margin: Annotated[int, Field(ge=0, le=64)] = 0
    expect: Literal["max", "recent"] = "max"
    exponent: Annotated[int, Field(ge=-126, le=127)] | None = None
    overflow_rate: Share = 1e-4
    warmup: Annotated[int, Field(ge=0, lt=2**24)] = 0

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        table = {"format": raw} if isinstance(raw, str) else raw
        name = table.get("format") if isinstance(table, dict) else None
        if not isinstance(table, dict) or not isinstance(name, str) or name not in NAMED_WIRES:
            return table
        own = "aps" if name in INTEGERS else wire_scaling(name)
        given = table.get("scaling", own)
        if name in IN_BLOCKS and given != own:
            fmt = IN_BLOCKS[name].element.name
            raise ValueError(f"scaling={given!r}: {name} has {own}: for another one use {fmt}")
        if given == "none":
            raise ValueError(f"scaling='none': {name} is integers times a power of two: set one")
        return {"scaling": own} | table

    @field_validator("format")
    @classmethod
    def _known_format(cls, name: str) -> str:
        try:
            known = wire_format(name)
        except ValueError as error:
            also = f"; with a scale also {', '.join(NAMED_WIRES)}"
            raise ValueError(f"{error}{also * ('known are' in str(error))}") from None
        if known is None:
            raise ValueError(f"{name!r} is not a format: for unchanged float32 use 'fp32'")
        return name

    @field_validator("scaling")
    @classmethod
    def _known_scaling(cls, name: str) -> str:
        if name not in SCALINGS:
            raise ValueError(suggest(name, SCALINGS))
        return name

    @model_validator(mode="after")
    def _keys_of_the_scaling(self) -> TensorFormat:
        of_some = {key for each in SCALINGS.values() for key in each.keys}
        for key in sorted(self.model_fields_set & of_some - {*SCALINGS[self.scaling].keys}):
            having = [name for name, each in SCALINGS.items() if key in each.keys]
            raise ValueError(f"{key} needs scaling {' or '.join(having)}, but it is {self.scaling}")
        _ = (
            self.cast
        )  # raises for random_bits out of range, or that do not suit the format or the rounding
        if self.scaling != "none" and not self.rounds:
            raise ValueError(
                f"scaling={self.scaling!r}: {self.format} is not rounded: must be none"
            )
        if self.warmup and self.exponent is not None:
            raise ValueError("warmup and exponent: set only one of them")
        return self

    @property
    def cast(self) -> Cast:
        """The rounding of numbers."""
        fmt = wire_format(self.format)
        assert fmt is not None, "a validator has checked it"
        if isinstance(
            fmt, Microscaling | TwoScales
        ):  # blocks lie along an axis, padded by themselves
            if self.overflow == "inf":
                Cast(fmt, self.rounding, "inf")  # raises
            fmt = fmt.element
        own = self.by_blocks or self.learns  # these allow values that are too large
        overflow = "saturate" if own and self.overflow is None else self.overflow
        return Cast(fmt, self.rounding, overflow, self.random_bits)

    @property
    def rounds(self) -> bool:
        """Whether anything changes: fp32 leaves float32 unchanged."""
        return self.cast.fmt != FloatFormat(8, 23)

    @property
    def by_blocks(self) -> bool:
        """Whether there is a scale for each block along an axis."""
        return SCALINGS[self.scaling].scale is None

    @property
    def learns(self) -> bool:
        """Whether the scale follows from earlier calls."""
        return SCALINGS[self.scaling].learn is not None

    def state(self) -> Array:
        """Return the state of the scale before the first call: float32[n], first the call count."""
        return np.array([0, *[NEVER] * SCALINGS[self.scaling].numbers(self.history)], np.float32)

    def round(
        self,
        x: Array,
        key: Key = (0, 0),
        axis: int = -1,
        state: Array | None = None,
        learns: bool = False,
    ) -> Array:
        """Return x scaled, rounded and divided again, as a new array.

        x: float32, any shape; axis: the axis of blocks
        key: element i of x, of blocks in their order, draws random31(key, i)
        state: as from state(): the scale's record of earlier calls; None or without a record: the
            scale is this tensor's. learns: add x to it
        NaN and infinity stay unchanged, or become one another if the format has only one of them,
        and NaN if it has neither; a block with one of them is NaN. Scales depend on finite values;
        that of zeros is 1.
        """
        if not self.rounds:
            return x.copy()
        scaling, flat = SCALINGS[self.scaling], x.reshape(-1)
        if isinstance(wire_format(self.format), TwoScales):
            return _by_two_scales(x, self.cast, axis, key)
        if scaling.scale is None:
            return _in_blocks(x, self.cast, SHARED[self.scaling], axis, key)
        amax, finite = amax_of(flat)
        known = self.state() if state is None else state
        if state is not None and known[0] < self.warmup:
            if learns:
                known[0] += 1
                _learn_range(known, amax)
            return x.copy()
        scale = scaling.scale(self, known, amax)
        if learns and scaling.learn:
            known[0] += 1
            scaling.learn(self, known, flat, amax, scale)
        rounded = _scaled(flat, self.cast, scale, key, amax)
        if not finite and not self.cast.fmt.carries_nonfinite:
            rounded[~np.isfinite(flat)] = np.nan
        return rounded.reshape(x.shape)


class UpdateFormat(TensorFormat):
    """update: the format of weights after each step of an optimiser, and its options.

    master: steps go to a float32 copy of the weights, which is then rounded; false: no copy
    kahan: the rounding error of a step is kept in the same format, and added to the next step
    the other keys: as for any tensor
    """

    master: bool = True
    kahan: bool = False

    @model_validator(mode="after")
    def _kahan_alone(self) -> UpdateFormat:
        if self.kahan and (self.master or self.scaling != "none"):
            raise ValueError('kahan=true: needs master=false and scaling="none"')
        return self


Scale = int | float  # the exponent of a power of two, or a factor: float32 times 1 or FAR


def amax_of(x: Array) -> tuple[float, bool]:
    """Return the largest finite |x| of float32[n], and whether all are finite."""
    bits = int(backend_of(x).amax_tiles(x).max(initial=0))
    if bits < NONFINITE_BITS:
        return float(np.uint32(bits).view(np.float32)), True
    finite = x[np.isfinite(x)]
    return float(abs(finite).max(initial=0)), False


def factor_of(amax: float, fmt: Format, margin: int = 0) -> float:
    """Return fmt.max / amax / 2^margin, rounded like float32 at any exponent; for zeros 1."""
    if amax == 0:
        return 1.0
    near = amax * _near(1 / amax)
    factor = np.float32(fmt.max) / np.float32(near) / np.float32(2.0**margin)
    return float(factor) * _near(1 / amax)


def _near(factor: float) -> float:
    """Return the power of two by which x is multiplied first; exact except for underflow."""
    return FAR if factor > FAR else 1 / FAR if factor < 1 / FAR else 1.0


def shift_of(amax: float, fmt: Format) -> int:
    """Return the largest k with amax * 2^k <= fmt.max, within the format's limits; for zeros 0."""
    bits = np.array([amax], np.float32).view(np.uint32)
    return int(fitting_shift(bits, fmt)[0]) - SHIFT_BIAS


def _scaled(x: Array, cast: Cast, scale: Scale, key: Key, amax: float) -> Array:
    backend = backend_of(x)
    if isinstance(scale, int):
        return backend.decode(backend.encode(x, cast, scale, key), cast.fmt, scale)
    most, first, largest = np.finfo(np.float32).max, np.float32(_near(scale)), cast.fmt.max
    factor = np.float32(scale / float(first))
    with np.errstate(over="ignore"):
        product = x * first * factor
        if amax * scale > float(most):  # far above the prediction: too large, not infinite
            product = np.where(np.isfinite(x), np.clip(product, -most, most), x)
        elif largest < amax * scale < largest * (1 + 2.0**-21):  # by the rounding of the factor
            product = np.where(np.isfinite(x), np.clip(product, -largest, largest), x)
        return (
            backend.decode(backend.encode(product, cast, 0, key), cast.fmt) * (1 / factor) / first
        )


def _in_blocks(x: Array, cast: Cast, block: int, axis: int, key: Key) -> Array:
    """Round blocks along an axis, each with the power of two of OCP's section 6.3."""
    rows = np.moveaxis(x, axis, -1)
    count = -(-rows.shape[-1] // block) * block  # the last block of a row may be shorter
    padded = np.zeros((*rows.shape[:-1], count), np.float32)
    padded[..., : rows.shape[-1]] = rows
    blocks = padded.reshape(-1, block)
    # The kernels' blocks are columns of tiles of 32 lanes: a tile has 1024 / block of them.
    each = TILE // block
    tiles = np.zeros((-(-len(blocks) // each) * each, block), np.float32)
    tiles[: len(blocks)] = blocks
    bits = (tiles.view(np.uint32) & MAGNITUDE).max(1).astype(np.int64)
    k = np.clip(cast.fmt.emax + 127 - (bits >> 23), cast.fmt.shift_min, cast.fmt.shift_max)
    stored = np.where(bits == 0, 0, k) + SHIFT_BIAS
    shifts = np.where(bits >= NONFINITE_BITS, SHIFT_NONFINITE, stored).astype(np.uint8)
    columns = np.ascontiguousarray(tiles.reshape(-1, 32, block).transpose(0, 2, 1))
    values, backend = columns.reshape(-1), backend_of(columns)
    words = np.empty(packed_bytes(values.size, cast.fmt.bits), np.uint8)
    backend.encode_tiles(values, cast, words, shifts, key=key)
    out = np.empty_like(values)
    backend.decode_tiles(words, shifts, cast.fmt, out)
    back = out.reshape(-1, block, 32).transpose(0, 2, 1).reshape(-1, block)
    kept = back[: len(blocks)].reshape(padded.shape)[..., : rows.shape[-1]]
    return np.ascontiguousarray(np.moveaxis(kept, -1, axis))


def _by_two_scales(x: Array, cast: Cast, axis: int, key: Key) -> Array:
    """Round blocks along an axis to NVFP4, with one float32 scale for the tensor."""
    rows = np.moveaxis(x, axis, -1)
    padded = np.zeros((*rows.shape[:-1], nvfp4_blocks(rows.shape[-1]) * NVFP4_BLOCK), np.float32)
    padded[..., : rows.shape[-1]] = rows
    flat, out, backend = padded.reshape(-1), np.empty(padded.size, np.float32), backend_of(padded)
    words, scales = np.empty(flat.size // 2, np.uint8), np.empty(flat.size // 16, np.uint8)
    scale = np.empty(1, np.float32)
    backend.encode_two_scales(flat, cast, words, scales, scale, key=key)
    backend.decode_two_scales(words, scales, scale, out)
    kept = out.reshape(padded.shape)[..., : rows.shape[-1]]
    return np.ascontiguousarray(np.moveaxis(kept, -1, axis))


# States: float32, the first counts the calls; unknown values are NEVER.


def _known(state: Array) -> list[float]:
    return [each for each in state[1:].tolist() if each != NEVER]


def _append(state: Array, value: float) -> None:
    state[1:-1], state[-1] = state[2:].copy(), value


def _amax(how: TensorFormat, state: Array, amax: float) -> Scale:
    return factor_of(amax, how.cast.fmt, how.margin)


def _delayed(how: TensorFormat, state: Array, amax: float) -> Scale:
    known = _known(state)
    largest = max(known, default=0.0) if how.expect == "max" else (known or [0.0])[-1]
    return factor_of(largest or amax, how.cast.fmt, how.margin)


def _learn_amax(how: TensorFormat, state: Array, x: Array, amax: float, scale: Scale) -> None:
    _append(state, amax)


def _flexpoint(how: TensorFormat, state: Array, amax: float) -> Scale:
    known = _known(state)
    return shift_of(autoflex(known) if any(known) else amax, how.cast.fmt)


def _learn_saturated(how: TensorFormat, state: Array, x: Array, amax: float, scale: Scale) -> None:
    """Learn from integers, which show at most the largest of them."""
    _append(state, min(amax, _largest(how, scale)))


def _fixed(how: TensorFormat, state: Array, amax: float) -> Scale:
    """state: calls; 2^e, below which numbers fit; shares of overflow by call, there and at half.

    Source: Courbariaux et al., arXiv 1412.7024, section 5.
    """
    exponent = math.frexp(amax if state[1] == NEVER else state[1])[1]
    if state[1] != NEVER:
        exponent -= 1
    elif how.exponent is not None:
        exponent = how.exponent
    shares = state[2:].reshape(2, how.history).astype(np.float64)
    if NEVER not in shares:
        above, above_half = (math.fsum(each) / how.history for each in shares)
        rate = how.overflow_rate
        exponent += 1 if above > rate else -1 if above_half <= rate else 0
    fmt = how.cast.fmt
    exponent = min(max(exponent, fmt.emax + 1 - fmt.shift_max, -126), 127)
    return max(fmt.emax + 1 - exponent, fmt.shift_min)


def _learn_range(state: Array, amax: float) -> None:
    """Let "fixed" begin at the range of the largest number in the warm-up."""
    if amax:
        state[1] = max(float(state[1]), 2.0 ** min(math.frexp(amax)[1], 127))


def _learn_shares(how: TensorFormat, state: Array, x: Array, amax: float, scale: Scale) -> None:
    if amax == 0 and state[1] == NEVER:
        return  # zeros give no starting point
    shares = state[2:].reshape(2, how.history)
    if NEVER not in shares:
        shares[:] = NEVER
    state[1] = 2.0 ** (how.cast.fmt.emax + 1 - int(scale))
    column = int((shares[0] != NEVER).sum())
    largest, size = _largest(how, scale), abs(x)
    for row, limit in zip(shares, (largest, largest / 2), strict=True):
        row[column] = (size > np.float32(limit)).sum() / max(1, x.size)


def _largest(how: TensorFormat, scale: Scale) -> float:
    return float(how.cast.fmt.max) * 2.0 ** -int(scale)


@dataclass(frozen=True)
class TensorScaling:
    """scale: of a tensor, by its state and amax; None: blocks have one each

    keys: of TensorFormat that only some scalings have
    learn: adds a tensor, its amax and its scale to the state, whose length depends on history
    """

    scale: Callable[[TensorFormat, Array, float], Scale] | None
    keys: tuple[str, ...] = ()
    learn: Callable[[TensorFormat, Array, Array, float, Scale], None] | None = None
    numbers: Callable[[int], int] = lambda history: 0


SCALINGS: dict[str, TensorScaling] = {
    "none": TensorScaling(lambda how, state, amax: 0),
    "amax": TensorScaling(_amax, ("margin",)),
    "delayed": TensorScaling(_delayed, ("history", "margin", "expect"), _learn_amax, lambda n: n),
    "aps": TensorScaling(lambda how, state, amax: shift_of(amax, how.cast.fmt)),
    "block32": TensorScaling(None),
    "block16": TensorScaling(None),
    "fixed": TensorScaling(
        _fixed,
        ("history", "exponent", "overflow_rate", "warmup"),
        _learn_shares,
        lambda n: 2 * n + 1,
    ),
    "flexpoint": TensorScaling(_flexpoint, ("history",), _learn_saturated, lambda n: n),
}

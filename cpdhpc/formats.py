"""Small floating-point formats: their names, their codes, and the limits of scaling them."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from .methods import suggest

Special = Literal["ieee", "nan", "none"]
Rounding = Literal["nearest", "zero", "stochastic"]
Overflow = Literal["saturate", "inf"]

TILE = 1024  # values in a tile; chunks and layers start on tiles
LANES = 32  # value row * 32 + lane of a tile belongs to a lane
SHARED = {"tile": TILE, "block32": 32, "block16": 16}  # scalings whose shifts travel: values of one
SHIFT_BIAS = 127  # a shift k is stored as the byte k + 127
SHIFT_NONFINITE = 255  # stored instead of a shift: the tile holds NaN or infinity
TRIT_BYTES = 205  # of a tile of ternary values, five in a byte


@dataclass(frozen=True)
class FloatFormat:
    """A sign, exp exponent bits and man mantissa bits, with subnormals and signed zeros.

    special: what the top of the code range holds.
        "ieee": the top exponent is infinity and NaN (only infinity when man = 0);
        "nan": all ones is NaN and there is no infinity (OCP e4m3fn);
        "none": every code is a number (OCP e2m1fn, e2m3fn, e3m2fn).
    Raises ValueError where exp or man is out of range or no finite number but zero is left.
    Source: IEEE 754-2019 section 3.4; OCP Microscaling Formats v1.0 section 5.3.
    """

    exp: int
    man: int
    special: Special = "ieee"

    def __post_init__(self) -> None:
        if not (1 <= self.exp <= 8 and 0 <= self.man <= 23):
            raise ValueError(
                f"FloatFormat: exp={self.exp}, man={self.man}: exp is 1..8 and man is 0..23"
            )
        if self.special not in get_args(Special):
            raise ValueError(
                f"FloatFormat: special={self.special!r}: {suggest(self.special, get_args(Special))}"
            )
        if self.exp == 8 and self.special != "ieee":
            raise ValueError(f"FloatFormat: {self.name}: numbers above float32's range")
        if self.max_code < 1:
            raise ValueError(f"FloatFormat: {self.name}: has no number but zero")

    @property
    def name(self) -> str:
        """The name that parse_format reads back; formats without one show their special."""
        fn = "fn" if self.special == _fn_special(self.bits) else f"-{self.special}"
        return f"e{self.exp}m{self.man}" + ("" if self.special == "ieee" else fn)

    @cached_property
    def bits(self) -> int:
        """Width of a code, sign included."""
        return 1 + self.exp + self.man

    @property
    def bias(self) -> int:
        """The exponent field of the number 1."""
        return (1 << (self.exp - 1)) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number, and of the subnormals."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        top = 1 << (self.exp + self.man)
        return {"ieee": top - (1 << self.man) - 1, "nan": top - 2, "none": top - 1}[self.special]

    @property
    def nan_code(self) -> int:
        """Code that NaN takes: NaN, where the format has none infinity, else the largest number."""
        if self.special == "ieee":
            half = (1 << self.man) >> 1  # the quiet bit
            return self.max_code + 1 + half
        return self.max_code + (self.special == "nan")

    @property
    def inf_code(self) -> int:
        """Code that infinity takes: infinity, else NaN, else the largest number."""
        return self.max_code + (self.special != "none")

    @property
    def has_nan(self) -> bool:
        """Whether a code stands for NaN."""
        return self.special == "nan" or (self.special == "ieee" and self.man > 0)

    @property
    def carries_nonfinite(self) -> bool:
        """Whether NaN and infinity leave a trace in the codes, be it as one another."""
        return self.special != "none"

    @cached_property
    def max(self) -> float:
        """The largest finite number."""
        field, mantissa = divmod(self.max_code, 1 << self.man)
        whole = mantissa + ((1 << self.man) if field else 0)
        return float(whole * 2.0 ** (max(field, 1) - self.bias - self.man))

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal where man > 0."""
        return float(2.0 ** (self.emin - self.man))

    @cached_property
    def max_integer(self) -> int:
        """The largest finite number as a multiple of the smallest positive one."""
        return int(self.max / self.smallest)

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return (_float32_bits(self.max) >> 23) - 127

    @property
    def max_significand(self) -> int:
        """The 23 fraction bits of the largest finite number, as float32 holds them."""
        return _float32_bits(self.max) & 0x7FFFFF

    @property
    def shift_min(self) -> int:
        """The smallest k for which x * 2**k is encoded exactly as if it had been formed.

        Below it 2**-k times the largest number, or a power of two that the kernels add,
        would leave float32.
        """
        return max(self.emin - 104 - self.man, self.emax - 127)

    @property
    def shift_max(self) -> int:
        """The largest k of use: float32's smallest normal number becomes the format's own.

        The IEEE formats with exp = 1 have no normal numbers: there the largest is just above.
        """
        return min(self.emin, self.emax) + 126


def _float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _fn_special(bits: int) -> Special:
    """The "fn" formats: as in OCP, all ones is NaN from 8 bits on; narrower ones have none."""
    return "nan" if bits >= 8 else "none"


NAMED = {"bf16": FloatFormat(8, 7), "fp16": FloatFormat(5, 10), "fp32": FloatFormat(8, 23)}


# Uniform grids: with one exponent bit and no special codes all numbers are equally far apart, so
# intK is a sign and K - 1 bits of an integer, times a power of two. Ternary is -1, 0 and 1.
INTEGERS = {
    **{f"int{bits}": FloatFormat(1, bits - 2, "none") for bits in range(2, 17)},
    "ternary": FloatFormat(1, 0, "none"),
}


def parse_format(name: str) -> FloatFormat:
    """Return the format of a name: eXmY (IEEE style), eXmYfn (OCP style), bf16, fp16 or fp32.

    Raises ValueError for any other name.
    """
    if name in NAMED:
        return NAMED[name]
    match = re.fullmatch(r"e(\d{1,2})m(\d{1,2})(fn)?", name)
    if match is None:
        raise ValueError(
            f"parse_format: {name!r}: known are eXmY and eXmYfn (as e4m3, e5m2, e3m0, e2m1fn) "
            f"with X 1..8 and Y 0..23, and {', '.join(NAMED)}"
        )
    exp, man = int(match[1]), int(match[2])
    return FloatFormat(exp, man, _fn_special(1 + exp + man) if match[3] else "ieee")


# OCP Microscaling Formats v1.0: a power of two for 32 values of one of these. As wires they name
# the scaling too.
MICROSCALING = {
    "mxfp8": FloatFormat(4, 3, "nan"),
    "mxfp8-e5m2": FloatFormat(5, 2),
    "mxfp6": FloatFormat(2, 3, "none"),
    "mxfp6-e3m2": FloatFormat(3, 2, "none"),
    "mxfp4": FloatFormat(2, 1, "none"),
}
NAMED_WIRES = {**INTEGERS, **MICROSCALING}


def wire_format(wire: str) -> FloatFormat | None:
    """Return the format of a wire's name, None for "raw". Raises ValueError for an unknown name."""
    if wire in NAMED_WIRES:
        return NAMED_WIRES[wire]
    return None if wire == "raw" else parse_format(wire)


def wire_scaling(wire: object) -> str:
    """Return the scaling of a packed wire, given by name or format, of those in SHARED."""
    return "block32" if isinstance(wire, str) and wire in MICROSCALING else "tile"


@dataclass(frozen=True)
class Cast:
    """How float32 becomes a format.

    rounding: "nearest" (ties to even; where man = 0 and both neighbours are odd, to the larger
        magnitude, IEEE 754-2019 4.3.1), "zero", or "stochastic" (up with the probability of the
        part cut off, to 31 - man bits).
    overflow: what a finite number too large becomes, tested after rounding: "saturate" (the
        largest finite number) or "inf" (infinity, else NaN, else the largest number). With
        rounding "zero" it is always the largest number. Infinity itself stays infinity.
    Raises ValueError for other words.
    """

    fmt: FloatFormat
    rounding: Rounding = "nearest"
    overflow: Overflow = "saturate"

    def __post_init__(self) -> None:
        if self.rounding not in get_args(Rounding):
            raise ValueError(
                f"Cast: rounding={self.rounding!r}: {suggest(self.rounding, get_args(Rounding))}"
            )
        if self.overflow not in get_args(Overflow):
            raise ValueError(
                f"Cast: overflow={self.overflow!r}: {suggest(self.overflow, get_args(Overflow))}"
            )

    @property
    def overflow_code(self) -> int:
        """Code of a finite number that is too large."""
        saturates = self.overflow == "saturate" or self.rounding == "zero"
        return self.fmt.max_code if saturates else self.fmt.inf_code


def tiles(n: int) -> int:
    """Number of tiles that hold n values."""
    return -(-n // TILE)


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of n values packed at a width, without shifts: whole tiles."""
    return tiles(n) * (TILE // 8) * bits


def shift_count(n: int, shared: int) -> int:
    """Number of shifts, a byte each, of n values of which so many share one: of whole tiles.

    shared: from SHARED; 32 and 16 are rows of a lane's column
    """
    return tiles(n) * (TILE // shared)


def sum_bits(fmt: FloatFormat, terms: int) -> int:
    """Bits of a two's-complement integer that holds any sum of so many numbers of a format.

    ceil(log2(2 m + 1)), where m = terms * fmt.max_integer and the unit is the smallest number.
    """
    return (terms * fmt.max_integer).bit_length() + 1

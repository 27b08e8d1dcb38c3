"""Small number formats: their names, their codes, rounding, and the limits of scaling them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from .errors import ArgumentError
from .methods import check_integer, suggest
from .table_formats import FAMILIES, TableFormat, spelled_out, table_format

__all__ = [  # for users of the package; the package itself imports names one by one
    "INTEGERS",
    "MICROSCALING",
    "NAMED",
    "Cast",
    "FloatFormat",
    "Format",
    "Microscaling",
    "TableFormat",
    "parse_format",
    "wire_format",
]

Special = Literal["ieee", "nan", "none"]
Rounding = Literal["nearest", "zero", "stochastic", "up", "down", "odd"]
Overflow = Literal["saturate", "inf"]  # default: "inf" if the format has a code for it

TILE = 1024  # values in a tile; chunks and layers start on tiles
LANES = 32  # value row * 32 + lane of a tile belongs to a lane
SHARED = {"tile": TILE, "block32": 32, "block16": 16}  # scaling -> values that share a sent shift
SHIFT_BIAS = 127  # a shift k is stored as the byte k + 127
SHIFT_NONFINITE = 255  # stored instead of a shift: the tile holds NaN or infinity
TRIT_BYTES = 205  # of a tile of ternary values, five in a byte
RANDOM_BITS = 31  # of a draw


@dataclass(frozen=True)
class FloatFormat:
    """A sign, exp exponent bits and man mantissa bits, with subnormals and signed zeros.

    special: the meaning of the largest codes.
        "ieee": the top exponent is infinity and NaN (only infinity when man = 0);
        "nan": all ones is NaN and there is no infinity (OCP e4m3fn);
        "none": every code is a number (OCP e2m1fn, e2m3fn, e3m2fn).
    Raises ValueError if exp or man is out of range or no finite number but zero is left.
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
            known = suggest(self.special, get_args(Special))
            raise ArgumentError("FloatFormat", "special", self.special, known)
        if self.exp == 8 and self.special != "ieee":
            raise ValueError(f"FloatFormat: {self.name}: numbers above float32's range")
        if self.max_code < 1:
            raise ValueError(f"FloatFormat: {self.name}: has no number but zero")

    @property
    def name(self) -> str:
        """The name that parse_format reads back; formats without a name show their special."""
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

    @cached_property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        top = 1 << (self.exp + self.man)
        return {"ieee": top - (1 << self.man) - 1, "nan": top - 2, "none": top - 1}[self.special]

    @property
    def nan_code(self) -> int:
        """Code for NaN: NaN's, if the format has none infinity's, else the largest number's."""
        if self.special == "ieee":
            half = (1 << self.man) >> 1  # the quiet bit
            return self.max_code + 1 + half
        return self.max_code + (self.special == "nan")

    @property
    def inf_code(self) -> int:
        """Code for infinity: infinity's, else NaN's, else the largest number's."""
        return self.max_code + (self.special != "none")

    @property
    def has_nan(self) -> bool:
        """Whether a code represents NaN."""
        return self.special == "nan" or (self.special == "ieee" and self.man > 0)

    @property
    def carries_nonfinite(self) -> bool:
        """Whether NaN and infinity are visible in the codes, maybe one as the other."""
        return self.special != "none"

    @cached_property
    def max(self) -> float:
        """The largest finite number."""
        field, mantissa = divmod(self.max_code, 1 << self.man)
        whole = mantissa + ((1 << self.man) if field else 0)
        return float(whole * 2.0 ** (max(field, 1) - self.bias - self.man))

    @property
    def smallest(self) -> float:
        """The smallest positive number, a subnormal if man > 0."""
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
    def top(self) -> int:
        """The same; for tables the two differ: scalings move values below their largest number."""
        return self.emax

    @property
    def max_significand(self) -> int:
        """The 23 fraction bits of the largest finite number in float32."""
        return _float32_bits(self.max) & 0x7FFFFF

    @property
    def shift_min(self) -> int:
        """The smallest k: 2**-k times the largest number is still a float32."""
        return self.emax - 127

    @property
    def shift_max(self) -> int:
        """The largest k: OCP's scales end at 2**-127, and float32 at its smallest number.

        With 7 or 8 bits of exponent the range moves only as far as numbers are normal: that covers
        a tile's values beside its largest one, and kernels can use their fast path.
        """
        whole = self.exp > 6 or self.emax == 0  # also formats with exp = 1 of IEEE style
        return self.near_max if whole else min(127, self.emin - self.man + 149)

    @property
    def near_min(self) -> int:
        """The smallest k for which a power of two that kernels add is a float32."""
        return max(self.emin - 104 - self.man, self.shift_min)

    @property
    def near_max(self) -> int:
        """The largest k for which the smallest normal number times 2**-k is normal in float32.

        The IEEE formats with exp = 1 have no normal numbers: there the largest is just above.
        Shifts beyond near_min and near_max are exact too: kernels move such values first.
        """
        return min(self.emin, self.emax) + 126


@dataclass(frozen=True)
class Microscaling(FloatFormat):
    """Elements of a format in blocks of 32 neighbours, which share a power of two.

    Its exponent is that of the block's largest magnitude less emax, at least -127; elements that
    are then above the largest number saturate. Payloads are whole tiles of elements in order, each
    bits wide, the lowest bit first; then a byte E8M0 for each block, 127 more than the exponent;
    255 is NaN.
    Source: OCP Microscaling Formats v1.0, sections 5 and 6.3.
    """

    @property
    def name(self) -> str:
        """The name of the wire and of tensors, from MICROSCALING."""
        return next(
            (name for name, fmt in MICROSCALING.items() if fmt == self), "mx-" + super().name
        )

    @property
    def element(self) -> FloatFormat:
        """The format of an element by itself."""
        return FloatFormat(self.exp, self.man, self.special)

    @property
    def max_significand(self) -> int:
        """That of all numbers with the largest exponent: they do not move the scale."""
        return 0x7FFFFF


NVFP4_BLOCK = 16  # neighbours that share a scale


@dataclass(frozen=True)
class TwoScales(FloatFormat):
    """NVFP4: e2m1 in blocks of 16 neighbours, which share a scale e4m3, and all a float32.

    Payloads are elements in order, two in a byte, the first in its lower half; a byte for the scale
    of each block, a code of e4m3fn; zeros up to a whole word; the float32. ops/two_scales.py says
    how scales are chosen.
    Source: NVIDIA, arXiv 2509.25149.
    """

    @property
    def name(self) -> str:
        """The name of the wire and of tensors."""
        return "nvfp4"

    @property
    def element(self) -> FloatFormat:
        """The format of an element by itself."""
        return FloatFormat(self.exp, self.man, self.special)


def nvfp4_blocks(n: int) -> int:
    """Number of blocks that hold n values."""
    return -(-n // NVFP4_BLOCK)


def _float32_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _fn_special(bits: int) -> Special:
    """The "fn" formats, as in OCP: all ones is NaN from 8 bits on; narrower ones have no NaN."""
    return "nan" if bits >= 8 else "none"


NAMED = {"bf16": FloatFormat(8, 7), "fp16": FloatFormat(5, 10), "fp32": FloatFormat(8, 23)}


# Uniform grids: with one exponent bit and no special codes all numbers are equally far apart, so
# intK is a sign and K - 1 bits of an integer, times a power of two. Ternary is -1, 0 and 1.
INTEGERS = {
    **{f"int{bits}": FloatFormat(1, bits - 2, "none") for bits in range(2, 17)},
    "ternary": FloatFormat(1, 0, "none"),
}


Format = FloatFormat | TableFormat


def parse_format(name: str | Format) -> Format:
    """Return the format of a name: eXmY (IEEE style), eXmYfn (OCP style), bf16, fp16, fp32, or of
    a family of tables: positN, positNesE, takumN, lnsEmF; a format is returned unchanged.

    Raises ValueError for any other name, TypeError for other types. Names of formats whose numbers
    need a scale, intN, ternary and mxfp*, are refused: see wire_format.
    """
    scaled = name if isinstance(name, str) else getattr(name, "name", "")
    if scaled in IN_BLOCKS:
        raise ValueError(
            f"parse_format: {scaled!r}: {SHARED[wire_scaling(scaled)]} neighbours share a scale, "
            "which a single value does not have: precision.quantize, tensors of policies and wires "
            f"take it; its elements are {IN_BLOCKS[scaled].element.name}"
        )
    if scaled in INTEGERS:
        raise ValueError(
            f"parse_format: {scaled!r}: integers times a power of two that is chosen for a tensor: "
            "precision.quantize, tensors of policies and wires take it; a fixed grid is "
            "formats.FloatFormat(1, bits - 2, 'none')"
        )
    if not isinstance(name, str):
        if not isinstance(name, Format):
            raise TypeError(f"parse_format: {name!r}: should be a format or its name")
        return name
    if name in NAMED:
        return NAMED[name]
    table = table_format(name)
    if table is not None:
        return table
    match = re.fullmatch(r"e(\d{1,2})m(\d{1,2})(fn)?", name)
    if match is None:
        if near := _near(name, _is_format):
            raise ValueError(f"parse_format: {name!r}: did you mean {near}?")
        raise ValueError(
            f"parse_format: {name!r}: known are eXmY and eXmYfn (as e4m3, e5m2, e3m0, e2m1fn) "
            f"with X 1..8 and Y 0..23, {', '.join((*FAMILIES, *NAMED))}"
        )
    exp, man = int(match[1]), int(match[2])
    return FloatFormat(exp, man, _fn_special(1 + exp + man) if match[3] else "ieee")


def named(wire: str | Format) -> str:
    """Return the name of a format for messages: the one that was passed, else its own."""
    return wire if isinstance(wire, str) else wire.name


# OCP Microscaling Formats v1.0.
MICROSCALING = {
    "mxfp8": Microscaling(4, 3, "nan"),
    "mxfp8-e5m2": Microscaling(5, 2),
    "mxfp6": Microscaling(2, 3, "none"),
    "mxfp6-e3m2": Microscaling(3, 2, "none"),
    "mxfp4": Microscaling(2, 1, "none"),
}
NVFP4 = TwoScales(2, 1, "none")
IN_BLOCKS: dict[str, Microscaling | TwoScales] = {**MICROSCALING, "nvfp4": NVFP4}
NAMED_WIRES = {**INTEGERS, **IN_BLOCKS}


def wire_format(wire: str) -> Format | None:
    """Return the format of a wire's name, None for "raw". Raises ValueError for an unknown name."""
    if wire in NAMED_WIRES:
        return NAMED_WIRES[wire]
    if near := _near(wire, (*NAMED_WIRES, "raw").__contains__):
        raise ValueError(f"parse_format: {wire!r}: did you mean {near}?")
    return None if wire == "raw" else parse_format(wire)


def _near(name: object, is_known: Callable[[str], bool]) -> str | None:
    """Return a known name that another one may mean: in other case, or in torch's spelling."""
    if not isinstance(name, str):
        return None
    lower = name.strip().lower()
    meant = (lower, re.sub(r"^(float8|fp8)_", "", lower), NAMES_OF_TORCH.get(lower))
    return next((each for each in meant if each and each != name and is_known(each)), None)


def _is_format(name: str) -> bool:
    try:
        parse_format(name)
    except ValueError:
        return False
    return True


NAMES_OF_TORCH = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}


def with_own_formats(raw: Any) -> Any:
    """Return the tables of a file with the names of its table [formats] spelled out, see OWN.

    So a reader of a value, on another machine or years later, needs no other file. The values of
    keys "name" stay; quoted names within other texts, such as constraints, are spelled out too.
    Raises ValueError for tables that are not formats, and for the name of an existing format.
    """
    tables = raw.get("formats") if isinstance(raw, dict) else None
    if not isinstance(tables, dict):
        return raw
    names = {}
    for name, table in tables.items():
        if _is_wire(name):
            raise ValueError(f"formats.{name}: is the name of a format already")
        values = table.get("values") if isinstance(table, dict) and len(table) == 1 else None
        numbers = isinstance(values, list) and all(type(v) in (int, float) for v in values)
        if not values or not numbers:
            raise ValueError(f"formats.{name}: the form is [formats.{name}] values = [NUMBER, ...]")
        names[name] = spelled_out(name, [float(v) for v in values])
        try:
            table_format(names[name])
        except ValueError as error:
            text = re.sub(r"^\w+: (\S+: )?", "", str(error))
            raise ValueError(f"formats.{name}: {text}") from None
    quoted = re.compile(rf"(['\"])({'|'.join(map(re.escape, names))})\1") if names else None

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: v if k == "name" else replaced(v) for k, v in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        if not isinstance(value, str) or not quoted or value in names:
            return names.get(value, value) if isinstance(value, str) else value
        return quoted.sub(lambda found: found[1] + names[found[2]] + found[1], value)

    return replaced({key: value for key, value in raw.items() if key != "formats"})


def _is_wire(name: str) -> bool:
    try:
        wire_format(name)
    except ValueError:
        return False
    return True


def wire_scaling(wire: object) -> str:
    """Return the scaling of a packed wire, a name or format: one of SHARED."""
    if not isinstance(wire, str) or wire not in IN_BLOCKS:
        return "tile"
    return "block32" if wire in MICROSCALING else "block16"


def overflow_shows(fmt: Format) -> bool:
    """Whether a finite number that is too large can become infinity or NaN, visible to all.

    Formats without either saturate. So do posits, takums and logarithmic numbers by their standard,
    and OCP's blocks, whose scale lets values just below a power of two saturate.
    """
    if isinstance(fmt, TableFormat):
        return None not in fmt.infinities
    return fmt.carries_nonfinite and not isinstance(fmt, Microscaling | TwoScales)


@dataclass(frozen=True)
class Cast:
    """How float32 is rounded to a format.

    rounding: "nearest" (ties to even; if man = 0 and both neighbours are odd, to the larger
        magnitude, IEEE 754-2019 4.3.1; for a table to the even code, or if both or neither are even
        to the lower one), "zero", "up" (towards infinity), "down" (towards -infinity), "odd" (of
        the two neighbours the one whose code is odd), or "stochastic" (up with the probability of
        the part cut off, to 31 - man bits).
    overflow: the result for a finite number that is too large after rounding: "saturate" (the
        largest finite number) or "inf" (infinity, or NaN if the format has no infinity). None:
        "inf" if overflow_shows(fmt), else "saturate"; the attribute is then one of these words. By
        IEEE 754-2019 7.4 the result is always the largest number if rounding is "zero", "odd", or
        in the other direction: "up" below, "down" above zero. Infinity itself stays infinity.
    random_bits: the number of bits of the part cut off and of the draw that "stochastic" uses. It
        is then biased towards zero (for a table downwards) by less than 2**-random_bits of the
        spacing; 0: all bits
    Raises ValueError for other words, "inf" if the format has no code for it, and random_bits out
    of range or with another rounding.
    """

    fmt: Format
    rounding: Rounding = "nearest"
    overflow: Overflow | None = None
    random_bits: int = 0

    def __post_init__(self) -> None:
        if self.rounding not in get_args(Rounding):
            known = suggest(self.rounding, get_args(Rounding))
            raise ArgumentError("Cast", "rounding", self.rounding, known)
        if self.overflow is None:
            shows = overflow_shows(self.fmt)
            object.__setattr__(self, "overflow", "inf" if shows else "saturate")
        if self.overflow not in get_args(Overflow):
            known = suggest(self.overflow, get_args(Overflow))
            raise ArgumentError("Cast", "overflow", self.overflow, known)
        if self.overflow == "inf" and not overflow_shows(self.fmt):
            why = "has neither infinity nor NaN for it"
            if isinstance(self.fmt, TableFormat):
                why = "has no infinity and no minus infinity"
            if isinstance(self.fmt, Microscaling):
                why = "saturates by OCP's rule"
            allowed = f"{self.fmt.name} {why}: must be 'saturate', or left out"
            raise ArgumentError("Cast", "overflow", "inf", allowed)
        check_integer("Cast", "random_bits", self.random_bits)
        most = RANDOM_BITS - (self.fmt.man if isinstance(self.fmt, FloatFormat) else 0)
        if not 0 <= self.random_bits <= (most if self.rounding == "stochastic" else 0):
            allowed = (
                f"{self.fmt.name} allows 0..{most} with rounding='stochastic', and 0 with others"
            )
            raise ArgumentError("Cast", "random_bits", self.random_bits, allowed)

    @property
    def float_format(self) -> FloatFormat:
        """The format, if it is not a table; raises ValueError if it is."""
        if isinstance(self.fmt, TableFormat):
            raise ValueError(f"Cast: {self.fmt.name}: a floating-point format is needed here")
        return self.fmt

    @property
    def random_mask(self) -> int:
        """The bits of a draw of 31 that are used."""
        return (1 << RANDOM_BITS) - (1 << (RANDOM_BITS - (self.random_bits or RANDOM_BITS)))

    @property
    def overflow_code(self) -> int:
        """Code of a finite number that is too large."""
        return self.overflow_codes[0]

    @property
    def overflow_codes(self) -> tuple[int, int]:
        """Codes of finite numbers that are too large: of one above zero, and of one below.

        For a FloatFormat both without sign.
        """
        fmt = self.fmt
        if isinstance(fmt, TableFormat):
            ends, beyond = fmt.ends, fmt.infinities
        else:
            ends, beyond = (fmt.max_code, fmt.max_code), (fmt.inf_code, fmt.inf_code)
        outward = [self.rounding in ("nearest", "stochastic", way) for way in ("up", "down")]
        above, below = (
            end if code is None or self.overflow == "saturate" or not out else code
            for end, code, out in zip(ends, beyond, outward, strict=True)
        )
        return above, below


def tiles(n: int) -> int:
    """Number of tiles that hold n values."""
    return -(-n // TILE)


def packed_bytes(n: int, bits: int) -> int:
    """Bytes of n values packed at a width, without shifts: whole tiles."""
    return tiles(n) * (TILE // 8) * bits


def shift_count(n: int, shared: int) -> int:
    """Number of shifts, a byte each, for n values, of which so many share one: in whole tiles.

    shared: from SHARED; 32 and 16 are rows of a lane's column
    """
    return tiles(n) * (TILE // shared)


def sum_bits(fmt: Format, terms: int) -> int:
    """Bits of a two's-complement integer that holds any sum of so many numbers of a format.

    Raises ValueError for a table, whose numbers need not be multiples of one.
    ceil(log2(2 m + 1)), with m = terms * fmt.max_integer and the smallest number as the unit.
    """
    if isinstance(fmt, TableFormat):
        raise ValueError(f"{fmt.name} is a table: exact sums are of floating-point formats")
    return (terms * fmt.max_integer).bit_length() + 1

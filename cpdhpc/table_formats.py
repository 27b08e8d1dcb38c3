"""Formats given by a table of numbers: posits, takums, logarithmic numbers and your own."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

LEAST_MAGNITUDE = 2.0**-125  # of a nonzero number: half of it is still a normal float32
MOST_MAGNITUDE = float(np.finfo(np.float32).max)


class TableFormat:
    """Numbers of at most 16 bits, with values[c] for code c.

    name: of the format
    values: 2**bits numbers, rounded to float32: 0, or magnitudes of 2**-125 or more; NaN, infinity
        and equal numbers are allowed, and -0 is 0. If several codes have the same number, the
        lowest is written.
    midpoints: the borders of rounding to nearest between neighbouring numbers, in order; None: half
        way. target: the magnitude to which scalings move the largest value; None: the
        largest that both signs have. nan: the code for NaN, None: the lowest one that represents
        it.
    Raises ValueError for another count, magnitudes out of range, and less than two numbers.
    """

    def __init__(
        self,
        name: str,
        values: Sequence[float] | npt.NDArray[np.float32],
        midpoints: Sequence[float] | None = None,
        target: float | None = None,
        nan: int | None = None,
    ) -> None:
        self.name = name
        with np.errstate(over="ignore"):
            table = np.array(values, np.float64).astype(np.float32)
        self.bits = table.size.bit_length() - 1
        if table.ndim != 1 or not 1 <= self.bits <= 16 or table.size != 1 << self.bits:
            raise ValueError(
                f"TableFormat: {name}: has {table.size} values: must be 2**bits, bits 1..16"
            )
        table[table == 0] = 0  # not -0
        table.flags.writeable = False
        self.values: npt.NDArray[np.float32] = table
        numbers, codes = np.unique(table, return_index=True)
        finite = np.isfinite(numbers)
        self.numbers: npt.NDArray[np.float64] = numbers[finite].astype(np.float64)  # in order
        self.codes: npt.NDArray[np.uint32] = codes[finite].astype(np.uint32)  # of these
        magnitudes = np.abs(self.numbers[self.numbers != 0])
        if self.numbers.size < 2 or magnitudes.min() < LEAST_MAGNITUDE:
            raise ValueError(
                f"TableFormat: {name}: must have two numbers or more, each 0 or of a magnitude "
                "from 2**-125 on"
            )
        self.midpoints = _means(self.numbers) if midpoints is None else np.array(midpoints)
        ends = [float(end) for end in (self.numbers[-1], -self.numbers[0]) if end > 0]
        self.target = min(ends) if target is None else target
        self.largest = float(magnitudes.max())
        self._nan = self._first(np.isnan(table)) if nan is None else nan
        self._digest = hashlib.sha256(
            table.tobytes() + self.midpoints.tobytes() + np.float64(self.target).tobytes()
        ).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableFormat) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash((self.name, self._digest))

    def __repr__(self) -> str:
        return f"TableFormat({self.name!r}, {self.bits} bits, {self._digest[:16]})"

    def _first(self, which: npt.NDArray[np.bool_]) -> int | None:
        places = np.flatnonzero(which)
        return int(places[0]) if places.size else None

    @cached_property
    def infinities(self) -> tuple[int | None, int | None]:
        """Codes of infinity and of -infinity, None if there is none."""
        return self._first(self.values == np.inf), self._first(self.values == -np.inf)

    @cached_property
    def ends(self) -> tuple[int, int]:
        """Codes of the largest number and of the smallest, which may be negative."""
        return int(self.codes[-1]), int(self.codes[0])

    @cached_property
    def nan_code(self) -> int:
        """Code for NaN: NaN's, if the format has none infinity's, else the largest number's."""
        found = (self._nan, self.infinities[0], self.ends[0])
        return next(code for code in found if code is not None)

    @cached_property
    def inf_codes(self) -> tuple[int, int]:
        """Codes for infinity and -infinity: their own, else NaN's, else those of ends."""
        one, other = (
            next(code for code in (own, self._nan, end) if code is not None)
            for own, end in zip(self.infinities, self.ends, strict=True)
        )
        return one, other

    @property
    def has_nan(self) -> bool:
        """Whether a code represents NaN."""
        return self._nan is not None

    @property
    def carries_nonfinite(self) -> bool:
        """Whether NaN and infinity are visible in the codes, maybe one as the other."""
        return self.has_nan or None not in self.infinities

    @property
    def max(self) -> float:
        """The magnitude to which scalings move the largest value."""
        return self.target

    @property
    def smallest(self) -> float:
        """The smallest nonzero magnitude."""
        return float(np.abs(self.numbers[self.numbers != 0]).min())

    @property
    def emin(self) -> int:
        """Exponent of the smallest magnitude: none is subnormal."""
        return math.frexp(self.smallest)[1] - 1

    @property
    def top(self) -> int:
        """Exponent of the largest magnitude."""
        return math.frexp(self.largest)[1] - 1

    @property
    def emax(self) -> int:
        """Exponent of max."""
        return math.frexp(self.max)[1] - 1

    @property
    def max_significand(self) -> int:
        """The 23 fraction bits of max in float32."""
        return int(np.float32(self.max).view(np.uint32)) & 0x7FFFFF

    @property
    def shift_min(self) -> int:
        """The smallest k for which the largest number times 2**-k stays within float32."""
        return self.top - 127

    @property
    def shift_max(self) -> int:
        """The largest k of use: float32's smallest normal number becomes max."""
        return min(self.emax + 126, 127)

    near_min, near_max = -127, 127  # kernels have one path for all


def _means(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the means of neighbours, rounded to odd if float64 cannot hold them.

    So none is mistaken for a tie: no float32, scaled by a power of two, is odd there.
    The error of a float64 sum is computed as by D. Knuth, TAOCP 2, section 4.2.2.
    """
    a, b = numbers[:-1], numbers[1:]
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)
    even = total.view(np.int64) % 2 == 0
    moved = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    return np.where((rest != 0) & even, moved, total) / 2


def posit_magnitude(bits: int, es: int, code: int) -> float:
    """Return the number of a posit's code without sign, 0 < code < 2**(bits - 1).

    Source: Standard for Posit Arithmetic (2022), section 3, which fixes es to 2; before, it was
    free.
    """
    digits = f"{code:0{bits - 1}b}"
    run = len(digits) - len(digits.lstrip(digits[0]))
    regime = run - 1 if digits[0] == "1" else -run
    exponent = digits[run + 1 :][:es].ljust(es, "0")
    fraction = digits[run + 1 + es :]
    significand = 1 + int(fraction or "0", 2) / 2 ** len(fraction)
    return math.ldexp(significand, regime * 2**es + int(exponent or "0", 2))


def takum_magnitude(bits: int, code: int) -> float:
    """Return the number of a linear takum's code without sign, 0 < code < 2**(bits - 1).

    Source: L. Hunhold, "Beating Posits at Their Own Game: Takum Arithmetic", arXiv 2404.18603,
    section 3; linear takums have a fraction in place of the others' continued logarithm.
    """
    digits = f"{code:0{bits - 1}b}".ljust(11, "0")  # missing digits are 0
    count = int(digits[1:4], 2)
    if digits[0] == "1":
        exponent = 2**count - 1
    else:
        count = 7 - count
        exponent = 1 - 2 ** (count + 1)
    exponent += int(digits[4 : 4 + count] or "0", 2)
    fraction = digits[4 + count :]
    return math.ldexp(1 + int(fraction or "0", 2) / 2 ** len(fraction), exponent)


@lru_cache(maxsize=32)
def _roots(fraction_bits: int) -> list[float]:
    """Return 2**(i / 2**fraction_bits) for all i, by integer square roots of 100 bits."""
    root, powers = 2 << 100, [1 << 100]
    for _ in range(fraction_bits):
        root = math.isqrt(root << 100)
        powers = [part for power in powers for part in (power, power * root >> 100)]
    return [power / 2**100 for power in powers]


def lns_magnitude(exp: int, fraction_bits: int, code: int) -> float:
    """Return the number of a logarithmic code without sign, 0 < code < 2**(exp + fraction_bits).

    It is 2**(code / 2**fraction_bits - 2**(exp - 1)): of exp bits before the point and
    fraction_bits after it, with 1 in the middle of the codes.
    """
    whole, part = divmod(code, 2**fraction_bits)
    return math.ldexp(_roots(fraction_bits)[part], whole - 2 ** (exp - 1))


def _mirrored(
    name: str,
    bits: int,
    magnitude: Callable[[int, int], float],
    beside_zero: float | None,
    target: float | None,
) -> TableFormat:
    """Return a format whose codes in two's complement are in the order of their numbers.

    0 is zero and 100...0 NaN. The border of rounding to nearest between two codes is the number
    that one more bit puts between them; between zero and the smallest it is beside_zero, None:
    half of the smallest. Numbers outside float32 are NaN if they are too large and 0 if too small.
    """
    half = 1 << (bits - 1)
    known = np.array([magnitude(bits, code) for code in range(1, half)])
    known = np.where(known < LEAST_MAGNITUDE, 0, np.where(known > MOST_MAGNITUDE, np.nan, known))
    values = np.concatenate([[0], known, [np.nan], -known[::-1]])
    codes = 1 + np.flatnonzero(known > 0)
    between = np.array([magnitude(bits + 1, 2 * int(code) + 1) for code in codes[:-1]])
    zero = known[codes[0] - 1] / 2 if beside_zero is None else beside_zero
    midpoints = np.concatenate([-between[::-1], [-zero, zero], between])
    return TableFormat(name, values, midpoints.tolist(), target, nan=half)


def _posit(bits: int, es: int) -> TableFormat:
    if not 2 <= bits <= 16 or (bits - 2) * 2**es > 125:
        raise ValueError(
            f"parse_format: posit{bits}es{es}: has 2..16 bits, and (bits - 2) * 2**es up to 125, "
            "so that float32 has its numbers"
        )
    target = min(2.0**2**es, 2.0 ** ((bits - 2) * 2**es))
    return _mirrored(
        f"posit{bits}es{es}", bits, lambda n, code: posit_magnitude(n, es, code), 0.0, target
    )


def _takum(bits: int) -> TableFormat:
    if not 2 <= bits <= 16:
        raise ValueError(f"parse_format: takum{bits}: has 2..16 bits")
    return _mirrored(f"takum{bits}", bits, takum_magnitude, 0.0, 2.0 if bits > 3 else 1.0)


def _lns(exp: int, fraction_bits: int) -> TableFormat:
    bits = 1 + exp + fraction_bits
    if not (1 <= exp <= 7 and 3 <= bits <= 16):
        raise ValueError(
            f"parse_format: lns{exp}m{fraction_bits}: lnsEmF has E 1..7 and 3..16 bits, 1 + E + F"
        )

    def magnitude(n: int, code: int) -> float:
        return lns_magnitude(exp, n - 1 - exp, code)

    return _mirrored(f"lns{exp}m{fraction_bits}", bits, magnitude, None, None)


FAMILIES: dict[str, tuple[str, Callable[..., TableFormat]]] = {
    "positNesE": (r"posit(\d{1,2})es(\d)", _posit),
    "positN": (r"posit(\d{1,2})", lambda bits: _posit(bits, 2)),
    "takumN": (r"takum(\d{1,2})", _takum),
    "lnsEmF": (r"lns(\d)m(\d{1,2})", _lns),
}


OWN = "NAME=[NUMBER, ...]"


def _family(name: str) -> tuple[Callable[..., TableFormat], list[int]] | None:
    for pattern, make in FAMILIES.values():
        if match := re.fullmatch(pattern, name):
            return make, [int(each) for each in match.groups()]
    return None


def spelled_out(name: str, values: list[float]) -> str:
    """Return the name by which parse_format finds a table of numbers, see OWN."""
    return f"{name}={values}".replace(" ", "")


def spelled(fmt: TableFormat) -> str:
    """Return the name by which parse_format finds a table, as OWN if it is of no family.

    Raises ValueError if midpoints, target or nan were set, which no such name can express.
    """
    values = fmt.values.tolist()
    if ("=" in fmt.name or _family(fmt.name)) and table_format(fmt.name) == fmt:
        return fmt.name
    if fmt != TableFormat(fmt.name, values):
        raise ValueError(f"TableFormat: {fmt.name}: no name can express its midpoints or target")
    return spelled_out(fmt.name, values)


@lru_cache(maxsize=64)
def table_format(name: str) -> TableFormat | None:
    """Return the table of a family's name, or of one that lists its numbers (OWN); else None.

    Raises ValueError for numbers out of a family's range, or that form no table.
    """
    label, equals, text = name.partition("=")
    if equals:
        try:
            values = [float(each) for each in text.removeprefix("[").removesuffix("]").split(",")]
        except ValueError:
            raise ValueError(f"parse_format: {name!r}: must have the form {OWN}") from None
        TableFormat(label, values)  # errors are better with the short name
        return TableFormat(name, values)
    found = _family(name)
    return found and found[0](*found[1])

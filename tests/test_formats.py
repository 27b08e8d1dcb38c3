"""Formats: names, limits, and every code of every format up to 16 bits."""

from fractions import Fraction
from typing import Any

import numpy as np
import oracles
import pytest
from every import every
from gfloat.decode_ndarray import decode_ndarray
from refusing import refused

from cpdhpc.formats import Cast, FloatFormat, packed_bytes, parse_format, tiles, wire_format

SPECIALS = ("ieee", "nan", "none")
SWEEP = [(e, s) for e in range(1, 9) for s in SPECIALS if e < 8 or s == "ieee"]


@every(("exp", "special"), SWEEP)
def test_every_code_decodes_as_gfloat_and_encodes_back(ops: Any, exp: int, special: str) -> None:
    for fmt in oracles.formats_up_to(16, exp, special):
        codes = np.arange(1 << fmt.bits, dtype=np.uint32)
        got = ops.decode(codes, fmt)
        expected = decode_ndarray(oracles.gfloat_info(fmt), codes.astype(np.int64))
        oracles.assert_same_values(got, expected, codes)
        kept = ~np.isnan(got)
        for rounding in ("nearest", "zero", "stochastic"):
            back = ops.encode(got, Cast(fmt, rounding))  # type: ignore[arg-type]
            assert np.array_equal(back[kept], codes[kept]), (fmt, rounding)


@every(("exp", "special"), SWEEP)
def test_every_code_of_narrow_formats_by_rationals(ops: Any, exp: int, special: str) -> None:
    for fmt in oracles.formats_up_to(10, exp, special):
        got = ops.decode(np.arange(fmt.max_code + 1, dtype=np.uint32), fmt)
        assert [Fraction(float(v)) for v in got] == [
            oracles.exact_number(fmt, c) for c in range(fmt.max_code + 1)
        ], fmt


@every(("exp", "special"), SWEEP)
def test_limits_are_those_of_the_numbers(exp: int, special: str) -> None:
    for fmt in oracles.formats_up_to(16, exp, special):
        grid = oracles.number_grid(fmt)
        assert fmt.max_code == len(grid) - 2
        assert fmt.max == grid[-2] and fmt.smallest == grid[1]
        assert Fraction(2) ** fmt.emax <= Fraction(fmt.max) < Fraction(2) ** (fmt.emax + 1)
        significand = Fraction(fmt.max) / Fraction(2) ** fmt.emax
        assert fmt.max_significand == (significand - 1) * 2**23
        assert -127 <= fmt.shift_min <= 0 <= fmt.shift_max <= 127  # bytes 0..254


def test_known_limits() -> None:
    known = {
        "e5m2": (8, 57344.0, 2.0**-16),
        "e4m3": (8, 240.0, 2.0**-9),
        "e4m3fn": (8, 448.0, 2.0**-9),
        "e3m0": (4, 8.0, 2.0**-2),
        "e2m1fn": (4, 6.0, 0.5),
        "e2m3fn": (6, 7.5, 0.125),
        "e3m2fn": (6, 28.0, 0.0625),
        "fp16": (16, 65504.0, 2.0**-24),
        "bf16": (16, float.fromhex("0x1.fep127"), 2.0**-133),
        "fp32": (32, float.fromhex("0x1.fffffep127"), 2.0**-149),
    }
    for name, limits in known.items():
        fmt = parse_format(name)
        assert (fmt.bits, fmt.max, fmt.smallest) == limits, name


def test_names_are_read_back() -> None:
    for exp in range(1, 9):
        for man in range(24):
            for suffix in ("", "fn"):
                name = f"e{exp}m{man}{suffix}"
                if name == "e1m0" or (name.startswith("e8") and suffix):
                    with pytest.raises(ValueError, match=r"^FloatFormat: "):
                        parse_format(name)
                    continue
                fmt = parse_format(name)
                assert fmt.name == name and parse_format(fmt.name) == fmt
    assert parse_format("bf16") == FloatFormat(8, 7)
    assert parse_format("fp16") == FloatFormat(5, 10)
    assert parse_format("fp32") == FloatFormat(8, 23)


OTHERS = [FloatFormat(5, 2, "none").name, FloatFormat(2, 1, "nan").name]


@every("name", [*OTHERS, "", "e4", "m3", "e4m3x", "fp8", "e4m3fnuz", "e-1m3", "INT8"])
def test_unknown_names_are_errors(name: str) -> None:
    assert OTHERS == ["e5m2-none", "e2m1-nan"]
    with pytest.raises(ValueError, match="known are"):
        parse_format(name)


SPELLED = {"E4M3": "e4m3", "e4m3 ": "e4m3", "float8_e4m3fn": "e4m3fn", "bfloat16": "bf16",
           "Posit8": "posit8"}  # fmt: skip
WIRES = {"INT8": "int8", "Raw": "raw", "MXFP8-E5M2": "mxfp8-e5m2"}


@every("name, meant", [*SPELLED.items(), *WIRES.items()])
def test_other_spellings_are_told_the_name(name: str, meant: str) -> None:
    for parse in (wire_format,) if name in WIRES else (parse_format, wire_format):
        with pytest.raises(ValueError, match=rf"^parse_format: '{name}': did you mean {meant}\?$"):
            parse(name)


@every(("exp", "man"), [(0, 3), (9, 3), (4, 24), (4, -1)])
def test_parameters_out_of_range(exp: int, man: int) -> None:
    with pytest.raises(ValueError, match=f"exp={exp}, man={man}"):
        FloatFormat(exp, man)


def test_unknown_words_are_errors() -> None:
    fmt: Any = FloatFormat(4, 3)
    for make, given, word, known in (
        (FloatFormat, (4, 3), {"special": "fn"}, "known are ieee, nan, none"),
        (Cast, (fmt,), {"rounding": "upwards"}, "known are down, nearest, odd"),
        (Cast, (fmt, "nearest"), {"overflow": "nan"}, "known are inf, saturate"),
    ):
        with refused(make.__name__, *word) as caught:
            make(*given, **word)
        assert known in caught.value.allowed


def test_sizes() -> None:
    assert [tiles(n) for n in (0, 1, 1023, 1024, 1025)] == [0, 1, 1, 1, 2]
    assert [packed_bytes(n, 4) for n in (0, 1, 1024, 1025)] == [0, 512, 512, 1024]

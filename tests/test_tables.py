"""Formats by tables: independent decoders and rounding, kernels, all-reduce."""

from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import gmpy2
import numpy as np
import oracles
import pytest
from allreduce_oracle import expected
from every import every
from refusing import refused

import cpdhpc
from cpdhpc.collectives.allreduce import simulate
from cpdhpc.config import ConfigError, dump_toml
from cpdhpc.formats import Cast, Rounding, TableFormat, parse_format
from cpdhpc.lab.study.cases import expand, load_study
from cpdhpc.lab.train.job import load
from cpdhpc.lab.verify.outcomes import differing, of_tiles
from cpdhpc.ops import reference
from cpdhpc.table_formats import spelled

NF4 = TableFormat(  # Dettmers et al., QLoRA, arXiv 2305.14314, appendix E
    "nf4",
    [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0]
    + [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1],
)
ODDS = TableFormat("odds", [0, 7, np.inf, -3, 2, -np.inf, 2, np.nan])  # in no order, one twice
SIGNS = TableFormat("signs", [1, -1])


def table(name: str) -> TableFormat:
    fmt = parse_format(name)
    assert isinstance(fmt, TableFormat)
    return fmt


def posit_number(code: int, bits: int, es: int) -> Fraction | None:
    """(1 - 3 s + f) 2**((1 - 2 s) (4 r + e + s)) of the 2022 standard, with 2**es for 4."""
    if code == 0:
        return Fraction(0)
    text = f"{code:0{bits}b}"
    if code == 1 << (bits - 1):
        return None
    s, rest = int(text[0]), text[1:]
    run = len(rest) - len(rest.lstrip(rest[0]))
    r = run - 1 if rest[0] == "1" else -run
    rest = rest[run + 1 :]
    e = int(rest[:es].ljust(es, "0") or "0", 2)
    f = Fraction(int(rest[es:] or "0", 2), 2 ** len(rest[es:]))
    return (1 - 3 * s + f) * Fraction(2) ** ((1 - 2 * s) * (2**es * r + e + s))


def takum_number(code: int, bits: int) -> Fraction | None:
    """((1 - 3 S) + f) 2**((-1)**S (c + S)), c by direction, regime, characteristic bits."""
    if code == 0:
        return Fraction(0)
    if code == 1 << (bits - 1):
        return None
    text = f"{code:0{bits}b}".ljust(12, "0")
    s, d, r = int(text[0]), int(text[1]), int(text[2:5], 2)
    r = r if d else 7 - r
    c = int(text[5 : 5 + r] or "0", 2) + (2**r - 1 if d else 1 - 2 ** (r + 1))
    mantissa = text[5 + r :]
    f = Fraction(int(mantissa or "0", 2), 2 ** len(mantissa))
    return (1 - 3 * s + f) * Fraction(2) ** ((-1) ** s * (c + s))


def held(number: Fraction | None) -> float:
    """A number as float32 has it: NaN where it is too large, 0 below 2**-125."""
    if number is None or abs(number) > Fraction(float(np.finfo(np.float32).max)):
        return float("nan")
    return 0.0 if abs(number) < Fraction(2) ** -125 else float(number)


NUMBERS = {
    **{f"posit{n}es{es}": (n, lambda c, n=n, es=es: posit_number(c, n, es))
       for n, es in ((2, 0), (3, 0), (5, 1), (6, 2), (8, 0), (8, 1), (8, 2), (8, 3), (12, 1))},
    **{f"takum{n}": (n, lambda c, n=n: takum_number(c, n)) for n in (3, 5, 8, 12)},
}  # fmt: skip


@every("name", NUMBERS)
def test_every_code_is_the_number_of_its_definition(ops: Any, name: str) -> None:
    bits, number = NUMBERS[name]
    codes = np.arange(1 << bits, dtype=np.uint32)
    want = np.array([held(number(int(c))) for c in codes], np.float32)
    oracles.assert_same_values(ops.decode(codes, parse_format(name)), want, codes)
    assert parse_format(name).bits == bits and parse_format(name).name == name


def test_posits_without_es_are_the_standard_s() -> None:
    assert parse_format("posit16").name == "posit16es2" and parse_format("posit16").bits == 16


# name: where fitting scalings move the largest magnitude to
TARGETS = {"posit2es0": 1, "posit3es0": 2, "posit8es2": 16, "takum3": 1, "takum4": 2, "takum8": 2}


@every("fmt", [NF4, ODDS, SIGNS, *map(table, [*TARGETS, "lns4m3"])])
def test_limits_are_those_of_the_numbers(fmt: TableFormat) -> None:
    magnitudes = sorted(abs(Fraction(float(v))) for v in fmt.values if np.isfinite(v) and v)
    target, most = Fraction(fmt.max), Fraction(float(np.finfo(np.float32).max))
    assert (fmt.smallest, fmt.largest) == (magnitudes[0], magnitudes[-1])
    assert target == TARGETS.get(fmt.name, {"odds": 3}.get(fmt.name, fmt.largest))
    assert Fraction(2) ** fmt.emin <= magnitudes[0] < Fraction(2) ** (fmt.emin + 1)
    scaled = magnitudes[-1] / Fraction(2) ** fmt.shift_min
    assert scaled <= most < 2 * scaled
    normal = Fraction(2) ** (fmt.shift_max - 126)  # what float32's smallest normal number becomes
    assert fmt.shift_max == 127 or normal <= target < 2 * normal


def bit_string(x: Fraction, name: str, es: int) -> tuple[int, int]:
    """A positive number as an endless posit or takum without sign, cut at so many bits."""
    exponent = 0
    while x >= 2:
        x, exponent = x / 2, exponent + 1
    while x < 1:
        x, exponent = x * 2, exponent - 1
    if name.startswith("posit"):
        regime, e = divmod(exponent, 2**es)
        text = ("1" * (regime + 1) + "0") if regime >= 0 else ("0" * -regime + "1")
        text += f"{e:0{es}b}" if es else ""
    else:
        c = exponent
        r = (c + 1 if c >= 0 else -c).bit_length() - 1
        low = c - (2**r - 1) if c >= 0 else c - (1 - 2 ** (r + 1))
        text = (f"1{r:03b}" if c >= 0 else f"0{7 - r:03b}") + (f"{low:0{r}b}" if r else "")
    fraction = 60
    text += f"{int((x - 1) * 2**fraction):0{fraction}b}"  # exact: 24 bits of float32
    return int(text, 2), len(text)


def standard_code(x: float, name: str, bits: int, es: int) -> int:
    """Round the endless string to nearest, ties to even, never to zero nor beyond the largest."""
    if x == 0:
        return 0
    whole, length = bit_string(Fraction(abs(x)), name, es)
    cut = length - (bits - 1)
    code, rest = whole >> cut, whole & ((1 << cut) - 1)
    half = 1 << (cut - 1)
    code += rest > half or (rest == half and code % 2)
    code = min(max(code, 1), (1 << (bits - 1)) - 1)
    return code if x > 0 else (1 << bits) - code


@every("name", ["posit5es1", "posit8es0", "posit8es2", "posit8es3", "posit16es1",
                                  "takum8", "takum14"])  # fmt: skip
def test_nearest_is_that_of_the_standard(ops: Any, name: str) -> None:
    fmt, es = table(name), int(name[-1]) if "es" in name else 0
    around = fmt.midpoints[:: max(1, fmt.midpoints.size // 150)].astype(np.float32)
    around = around[(around != 0) & (np.abs(around) < 2.0**60) & (np.abs(around) > 2.0**-60)]
    random = np.ldexp(np.random.default_rng(1).standard_normal(200), np.arange(200) % 60 - 30)
    x = np.concatenate([around, np.nextafter(around, np.float32(0)),
                        np.nextafter(around, np.float32(np.inf)), random.astype(np.float32),
                        np.float32([0, 1e-30, -1e-30, 1e30])])  # fmt: skip
    if name.startswith("takum"):  # whose ends float32 does not have
        x = x[np.abs(x) < fmt.numbers[-2]]
    want = [standard_code(float(v), name, fmt.bits, es) for v in x]
    assert ops.encode(x, Cast(fmt)).tolist() == want
    specials = ops.encode(np.float32([np.nan, np.inf, -np.inf]), Cast(fmt))
    assert specials.tolist() == [1 << (fmt.bits - 1)] * 3  # NaR


@every(("name", "exp", "part"), [("lns4m3", 4, 3), ("lns2m0", 2, 0),
                                                   ("lns6m9", 6, 9)])  # fmt: skip
def test_logarithmic_numbers_by_mpfr(name: str, exp: int, part: int) -> None:
    fmt, half = table(name), 1 << (exp + part)
    with gmpy2.context(precision=24):
        want = [float(gmpy2.exp2(gmpy2.mpfr(c) / 2**part - 2 ** (exp - 1))) for c in range(1, half)]
    assert fmt.values[1:half].tolist() == want
    assert fmt.values[half + 1 :].tolist() == [-v for v in want[::-1]]
    assert fmt.values[0] == 0 and np.isnan(fmt.values[half])


def by_hand(x: float, fmt: TableFormat, rounding: str, draw: int) -> Fraction:
    """The number that a finite x rounds to, from the definitions, in rationals."""
    finite = sorted({Fraction(float(v)) for v in fmt.values if np.isfinite(v)})
    exact = min(max(Fraction(x), finite[0]), finite[-1])
    if exact in finite:
        return exact
    above = next(v for v in finite if v > exact)
    below = finite[finite.index(above) - 1]

    def code(v: Fraction) -> int:
        return next(c for c, w in enumerate(fmt.values.tolist()) if w == v)

    def of_parity(parity: int) -> Fraction:
        fits = [v for v in (below, above) if code(v) % 2 == parity]
        return fits[0] if len(fits) == 1 else min(below, above, key=code)

    middle = (below + above) / 2
    nearest = of_parity(0) if exact == middle else above if exact > middle else below
    inwards = above if above <= 0 else below if below >= 0 else nearest
    # The specification compares in float64: beside a number, 2**-53 of the gap may be rounded off.
    share = Fraction(float(exact - below)) / (above - below)
    return {
        "nearest": nearest, "up": above, "down": below, "zero": inwards, "odd": of_parity(1),
        "stochastic": above if share + Fraction(draw, 2**31) >= 1 else below,
    }[rounding]  # fmt: skip


@every("fmt", [NF4, ODDS, SIGNS])
def test_own_tables_round_as_defined(ops: Any, fmt: TableFormat) -> None:
    ends = np.append(fmt.numbers, (fmt.numbers[1:] + fmt.numbers[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ends, np.float32(s)) for s in (np.inf, -np.inf)]
    few = np.random.default_rng(2).uniform(-4, 8, 60).astype(np.float32)
    x = np.concatenate([ends, *near, few, np.float32([1e30, -1e30, 1e-40])])
    draws = reference.random31((3, 4), np.arange(x.size, dtype=np.uint64))
    for rounding in get_args(Rounding):
        for bits in (0, 2) if rounding == "stochastic" else (0,):
            cast = Cast(fmt, rounding, "saturate", bits)
            used = draws & np.uint32(cast.random_mask)
            got = ops.decode(ops.encode(x, cast, key=(3, 4)), fmt)
            want = [float(by_hand(float(v), fmt, rounding, int(u)))
                    for v, u in zip(x, used, strict=True)]  # fmt: skip
            assert got.tolist() == want, rounding


def test_overflow_and_special_values_of_own_tables(ops: Any) -> None:
    x = np.float32([8, -4, np.inf, -np.inf, np.nan])
    beyond = {"nearest": (np.inf, -np.inf), "up": (np.inf, -3), "down": (7, -np.inf),
              "zero": (7, -3), "odd": (7, -3), "stochastic": (np.inf, -np.inf)}  # fmt: skip
    for rounding, ends in beyond.items():
        got = ops.decode(ops.encode(x, Cast(ODDS, rounding, "inf")), ODDS)  # type: ignore[arg-type]
        assert got[:4].tolist() == [*ends, np.inf, -np.inf] and np.isnan(got[4])
    assert ops.encode(x, Cast(NF4)).tolist() == [15, 0, 15, 0, 15]
    with pytest.raises(ValueError, match=r"^quantize: x holds NaN, and nf4 has no code for it"):
        cpdhpc.quantize(x, NF4)


def test_means_that_float64_cannot_hold_are_no_ties(ops: Any) -> None:
    """0.5 is below the mean of 2**-100 and 1, which float64 rounds to 0.5."""
    fmt = TableFormat("far", [2.0**-100, 1])
    x = np.nextafter(np.float32([0.5, 0.5, 0.5]), np.float32([0, 0.5, 1]))
    assert ops.encode(x, Cast(fmt)).tolist() == [0, 0, 1]


@every("fmt", [table("posit8es1"), table("takum12"), NF4, ODDS, SIGNS])  # fmt: skip
@every("shared", [1024, 32, 16])
def test_tiles_equal_the_reference(fast_ops: Any, fmt: TableFormat, shared: int) -> None:
    n, rng = 2100, np.random.default_rng(shared)
    odd = oracles.awkward(n, 3)
    odd[5], odd[1500], odd[1600] = np.nan, np.inf, 1e-42
    plain = (rng.standard_normal(n) * 2.0**-9).astype(np.float32)
    for number, rounding in enumerate(get_args(Rounding)):
        overflow: Any = oracles.overflows(fmt)[number % 2 - 1]
        cast, fit = Cast(fmt, rounding, overflow), number % 3 > 0
        for x in (plain, odd):
            got, want = (
                of_tiles(ops, x, plain, cast, shared, fit=fit, shift=130)
                for ops in (fast_ops, reference)
            )
            assert not differing(got, want, any_nan=True), rounding


@every(("algorithm", "accumulate"), [("ring", "requantise"),
                                                       ("direct", "float32")])  # fmt: skip
@every("scaling", ["none", "static:3", "aps", "tile", "block32"])
def test_allreduce_by_the_oracle(algorithm: str, accumulate: str, scaling: str) -> None:
    rng = np.random.default_rng(4)
    xs = [(rng.standard_normal(2100) * 2.0**-6).astype(np.float32) for _ in range(3)]
    for rounding in ("nearest", "up", "stochastic"):
        how: dict[str, Any] = {"rounding": rounding, "seed": 3}
        got = simulate(xs, "posit6es1", algorithm, scaling, accumulate, **how)
        want = expected(xs, "posit6es1", algorithm, scaling, accumulate, **how)
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), rounding


def test_what_tables_refuse() -> None:
    x = [np.zeros(4, np.float32)] * 2
    with refused("allreduce", "accumulate", "wire='posit8es1': exact sums are of floating"):
        simulate(x, "posit8es1", accumulate="exact")
    with pytest.raises(ValueError, match=r"^parse_format: posit16es4: has 2\.\.16 bits, and"):
        parse_format("posit16es4")
    for name, said in (("takum17", "2..16 bits"), ("lns8m0", "E 1..7"), ("lns7m9", "3..16 bits")):
        with pytest.raises(ValueError, match=rf"^parse_format: {name}: .*{said}"):
            parse_format(name)
    for values, said in (([1, 2, 3], "has 3 values"), ([1, 1], "two numbers"),
                         ([0, 2.0**-126], "two numbers"), ([np.nan, 1], "two n")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^TableFormat: mine: .*{said}"):
            TableFormat("mine", values)


def test_files_of_jobs_and_studies_name_their_own_formats(tmp_path: Path) -> None:
    """What is read says the numbers themselves, so that a record or a checkpoint needs no more."""
    path, rest = tmp_path / "own.toml", '[data]\nname = "digits"\n[model]\nname = "mlp"\n'
    wire = '[gradient]\naggregator = "lowbit"\nwire = "quarters"\nlayers = {"0*" = "quarters"}\n'
    own = "[formats.quarters]\nvalues = [-1, -0.25, 0, 0.25]\n"
    path.write_text(own + wire + rest)
    (job,) = load(path)
    method = job.gradient._allreduce(0, 0)  # type: ignore[attr-defined]
    assert isinstance(method.fmt, TableFormat) and method.fmt.bits == 2
    assert method.fmt.values.tolist() == [-1, -0.25, 0, 0.25]
    path.write_text(job.toml())
    assert load(path) == [job] and "quarters=[-1.0,-0.25,0.0,0.25]" in job.toml()
    for values, said in (("[1, 2, 3]", "quarters: has 3 values"), ("7", "formats.quarters: the")):
        path.write_text(f"[formats.quarters]\nvalues = {values}\n" + wire + rest)
        with pytest.raises(ConfigError, match=said):
            load(path)
    path.write_text("[formats.e4m3]\nvalues = [0, 1]\n" + rest)
    with pytest.raises(ConfigError, match=r"formats\.e4m3: is the name of a format already"):
        load(path)
    study, sizes = tmp_path / "study.toml", {"ranks": [1], "size_bytes": [4096]}
    for kind, key, work in (
        ("allreduce", "wire", {"algorithm": ["ring"]}),
        ("codec", "format", {"operation": ["hop"]}),
    ):
        tables: dict[str, Any] = {"kind": kind, "sweep": {key: ["e4m3", "quarters"]} | sizes | work}
        study.write_text(dump_toml(tables) + own)
        found = load_study(study)
        assert [case.factors[key] for case in expand(found).cases] == ["e4m3", method.fmt.name]
        study.write_text(found.toml())
        assert load_study(study) == found
        tables["constraints"] = [f"{key} != 'quarters'"]
        study.write_text(dump_toml(tables) + own)
        assert [case.factors[key] for case in expand(load_study(study)).cases] == ["e4m3"]
    study.write_text(dump_toml(tables) + "[formats.e4m3]\nvalues = [0, 1]\n")
    with pytest.raises(ConfigError, match=r"formats\.e4m3: is the name of a format already"):
        load_study(study)
    assert parse_format(spelled(NF4)).values.tolist() == NF4.values.tolist()  # type: ignore[union-attr]
    assert spelled(table("takum8")) == "takum8" and spelled(method.fmt) == method.fmt.name
    with pytest.raises(ValueError, match=r"^TableFormat: posit: no name can express its midpoints"):
        spelled(TableFormat("posit", [0, 1], target=0.5))
    with pytest.raises(ValueError, match=r"^parse_format: 'q=\[1,x\]': must have the form NAME="):
        parse_format("q=[1,x]")

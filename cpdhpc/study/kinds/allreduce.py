"""All-reduces: what may be varied, and what goes together, as plain data for login nodes."""

from __future__ import annotations

from ...config import ConfigError
from ...formats import INTEGERS, parse_format, sum_bits
from ..factors import ABSENT, Factor, Factors, Kind, Value, one_of

_REQUANTISE = ("requantise",)
ALGORITHMS = {  # algorithm: how partial sums may be kept, the algorithm's own way first
    "ring": _REQUANTISE,
    "rhd": _REQUANTISE,
    "tree": _REQUANTISE,
    "dbtree": _REQUANTISE,
    "direct": ("float32", "requantise", "kahan"),
    "hier": ("float32", "requantise", "kahan"),
    "gather": ("requantise", "float32", "kahan"),
}
BASELINES = {  # algorithm: the wires it knows, and how it sums in them
    "mpi": {"raw": "float32"},
    "gloo": {"raw": "float32", "bf16": "requantise"},
}
ACCUMULATES = ("requantise", "float32", "kahan", "exact")
SCALINGS = ("none", "static:K", "aps", "tile")
MAX_BITS = 32  # of an integer that travels
GUESS = 1e-9  # s per byte and rank: a slow all-reduce, as the estimate is an upper one


def check_size(size_bytes: int) -> None:
    if size_bytes < 4 or size_bytes % 4:
        raise ConfigError("should be a positive multiple of 4 bytes, one float32")


def _check_wire(wire: str) -> None:
    if wire != "raw" and wire not in INTEGERS:
        parse_format(wire)


def _check_scaling(scaling: str) -> None:
    kind, _, number = scaling.partition(":")
    if kind == "static" and number.lstrip("-").isdigit():
        return
    if scaling not in ("none", "aps", "tile"):
        raise ConfigError(f"known are {', '.join(SCALINGS)}, with an integer K")


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors as the method has them; see Kind.used."""
    algorithm, wire = str(given["algorithm"]), str(given["wire"])
    found: dict[str, Value] = {
        "size_bytes": given["size_bytes"],
        "algorithm": algorithm,
        "wire": wire,
    }
    if algorithm in BASELINES:
        wires = BASELINES[algorithm]
        if wire not in wires:
            raise ValueError(f"{algorithm} has no wire {wire}, only {', '.join(wires)}")
        return found
    if wire == "raw":  # which neither scaling nor rounding touches
        return found
    accumulate = _accumulate(algorithm, wire, str(given["accumulate"]))
    scaling = _scaling(wire, accumulate, str(given["value_scaling"]))
    return found | {"value_scaling": scaling, "accumulate": accumulate}


def _accumulate(algorithm: str, wire: str, given: str) -> str:
    own = ("exact",) if wire in INTEGERS else (*ALGORITHMS[algorithm], "exact")
    if given == ABSENT:
        return own[0]
    if given not in own:
        what = f"wire {wire}" if wire in INTEGERS else algorithm
        raise ValueError(f"{what} does not accumulate by {given}, only by {', '.join(own)}")
    return given


def _scaling(wire: str, accumulate: str, given: str) -> str:
    scaling = given or ("aps" if accumulate == "exact" else "tile")
    kind, _, number = scaling.partition(":")
    if accumulate == "exact":
        allowed = ("aps",) if wire in INTEGERS else ("aps", "static", "none")
        if kind not in allowed:
            what = f"wire {wire}" if wire in INTEGERS else "an exact sum"
            raise ValueError(f"{what} is scaled by {' or '.join(allowed)}, not by {kind}")
    if kind == "static":
        fmt = INTEGERS[wire] if wire in INTEGERS else parse_format(wire)
        if not fmt.shift_min <= int(number) <= fmt.shift_max:
            raise ValueError(f"{scaling}: K of {wire} is {fmt.shift_min}..{fmt.shift_max}")
    return scaling


def _fits(used: Factors, ranks: int) -> str | None:
    if used.get("accumulate") != "exact":
        return None
    wire = str(used["wire"])
    fmt = INTEGERS[wire] if wire in INTEGERS else parse_format(wire)
    bits = sum_bits(fmt, ranks)
    if bits <= MAX_BITS:
        return None
    return f"exact sums of {ranks} ranks in {wire} take {bits} bits, more than {MAX_BITS}"


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    return repeats * (1e-3 + GUESS * float(used["size_bytes"]) * ranks)


ALLREDUCE = Kind(
    factors={
        "size_bytes": Factor("float32 data of a rank", int, "byte", None, check_size),
        "algorithm": Factor(
            "algorithm; mpi and gloo are those libraries' own",
            str,
            default="ring",
            check=one_of([*ALGORITHMS, *BASELINES]),
        ),
        "wire": Factor("what travels: raw float32 or a format", str, "1", "raw", _check_wire),
        "value_scaling": Factor("scaling of values before encoding", str, check=_check_scaling),
        "accumulate": Factor("how partial sums are kept", str, check=one_of(ACCUMULATES)),
    },
    work="size_bytes",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="one all-reduce, from a barrier to its end on the slowest rank",
    measuring="cpdhpc.measure.allreduce",
)

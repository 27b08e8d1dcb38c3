"""Exchanges of halos: what may be varied, and what goes together, as plain data for login nodes."""

from __future__ import annotations

from ...config import ConfigError
from ...formats import INTEGERS, parse_format
from ..factors import Factor, Factors, Kind, Value, at_least, one_of

TRANSFERS = ("exchange", "accumulate")
OURS = ("cpdhpc", "cpdhpc, copied")
BY_MPI = ("subarray", "subarray, persistent", "alltoallw", "packed")
SPLITS = ("rows", "columns", "grid")
BOUNDARIES = ("none", "zero", "wrap", "reflect", "symmetric", "edge")
BY_DATATYPES = ("none", "zero", "wrap")  # of these: nothing is shown backwards or many times
BYTES = {"float32": 4, "float64": 8, "float16": 2, "int8": 1, "int32": 4, "int64": 8}
GUESS = (
    2e-9  # s per byte of a window, to prepare and to copy: slow, as the estimate is an upper one
)


def _check_wire(wire: str) -> None:
    if wire in INTEGERS:
        raise ConfigError("integers are for sums: should be raw or a format")
    if wire != "raw":
        parse_format(wire)


def _positive(text: str, default: int | None) -> Factor:
    return Factor(text, int, default=default, check=at_least(1))


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors. Raises ValueError for what does not go together. See Kind.used."""
    way, wire, boundary = str(given["way"]), str(given["wire"]), str(given["boundary"])
    if way in BY_MPI and wire != "raw":
        raise ValueError(f"{way} has no wire {wire}, only raw")
    if way in BY_MPI and boundary not in BY_DATATYPES:
        raise ValueError(f"{way} cannot show cells as {boundary} does")
    if wire != "raw" and given["dtype"] != "float32":
        raise ValueError(f"wire {wire} takes float32, not {given['dtype']}")
    if wire != "raw" and boundary == "edge" and given["transfer"] == "accumulate":
        raise ValueError(f"sums of many cells, rounded to {wire}, cannot be checked exactly")
    if boundary == "reflect" and min(int(given["rows"]), int(given["columns"])) < 2:
        raise ValueError("reflect needs 2 rows and columns or more")
    return dict(given)


def _fits(used: Factors, ranks: int) -> str | None:
    cells = int(used["rows"]) * int(used["columns"])
    lines = {"rows": used["rows"], "columns": used["columns"], "grid": cells}[str(used["split"])]
    return None if ranks <= int(lines) else f"{lines} {used['split']} are fewer than {ranks} ranks"


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    cells = int(used["rows"]) * int(used["columns"]) * int(used["values"])
    return repeats * (1e-4 + GUESS * cells * BYTES[str(used["dtype"])] / ranks)


HALO = Kind(
    factors={
        "rows": _positive("cells of the domain along axis 0", None),
        "columns": _positive("cells of the domain along axis 1", 1024),
        "values": _positive("values of a cell, which lie together", 1),
        "halo": _positive("cells around the box of a rank, along the axes that are split", 1),
        "split": Factor("axes that are split", str, default="rows", check=one_of(SPLITS)),
        "boundary": Factor(
            "what lies beyond the domain along them", str, default="none", check=one_of(BOUNDARIES)
        ),
        "dtype": Factor("numbers", str, default="float32", check=one_of(BYTES)),
        "wire": Factor("what travels: raw numbers or a format", str, "1", "raw", _check_wire),
        "transfer": Factor(
            "exchange, or accumulation of halos", str, default="exchange", check=one_of(TRANSFERS)
        ),
        "way": Factor(
            "ours, in place or copied, or MPI's own",
            str,
            default="cpdhpc",
            check=one_of([*OURS, *BY_MPI]),
        ),
    },
    work="rows",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="one exchange, from a barrier to its end on the slowest rank",
    measuring="cpdhpc.measure.halo",
)

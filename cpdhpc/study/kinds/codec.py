"""The codec: float32 to packed codes and back, all ranks at once, as plain data."""

from __future__ import annotations

from ...formats import parse_format
from ..factors import ABSENT, Factor, Factors, Kind, Value, one_of
from .allreduce import check_size

OPERATIONS = (
    "memcpy",
    "encode",
    "encode tile",
    "stochastic",
    "decode",
    "decode_add",
    "hop",
    "hop tile",
)
GUESS = 1e-9  # s per byte: a slow codec, as the estimate is an upper one


def _used(given: Factors) -> dict[str, Value]:
    """Return the factors; memcpy has no format. See Kind.used."""
    operation, name = str(given["operation"]), str(given["format"])
    found: dict[str, Value] = {"size_bytes": given["size_bytes"], "operation": operation}
    if operation == "memcpy":
        return found
    if name == ABSENT:
        raise ValueError(f"operation {operation} needs a format")
    return found | {"format": name}


def _time_s(used: Factors, ranks: int, repeats: int) -> float:
    return repeats * (1e-4 + GUESS * float(used["size_bytes"]))


def _fits(used: Factors, ranks: int) -> str | None:
    values = int(used["size_bytes"]) // 4
    return None if values >= ranks else f"{values} values are fewer than {ranks} ranks"


CODEC = Kind(
    factors={
        "size_bytes": Factor("float32 data of all ranks together", int, "byte", None, check_size),
        "operation": Factor(
            "operation of the codec", str, default="encode tile", check=one_of(OPERATIONS)
        ),
        "format": Factor("format of the codec", str, check=parse_format),
    },
    work="size_bytes",
    used=_used,
    fits=_fits,
    time_s=_time_s,
    sample="one operation on a rank's share of the data, all ranks at once; the slowest rank",
    measuring="cpdhpc.measure.codec",
)

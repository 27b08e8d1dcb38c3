"""Names of methods, their valid combinations, suggestions for typos; imports no heavy package."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from numbers import Integral
from typing import NamedTuple

from .errors import ArgumentError, ArgumentTypeError, Refused, reworded

GROW = "grow"  # partial sums use the bits that they need
ACCUMULATES = ("requantise", "float32", "kahan", GROW)
USUAL = "usual"  # algorithm: one whose error does not grow with ranks
EXACT = "exact"  # the way to accumulate that every algorithm has
SCALINGS = ("none", "static:K", "aps", "tile", "block32", "block16")
MAX_SUM_BITS = 32  # of an integer that travels


class Accumulation(NamedTuple):
    """The ways to accumulate partial sums in an algorithm; default: one of them.

    fixed: the default if the format, for example a table, cannot have more bits
    """

    ways: tuple[str, ...]
    default: str
    fixed: str


_REQUANTISE = Accumulation(("requantise",), "requantise", "requantise")
_GROW = Accumulation(("requantise", GROW), GROW, "requantise")
_HELD = ("requantise", "float32", "kahan")
ALGORITHMS = {  # of the all-reduce; collectives.schedules has their rounds
    "ring": _GROW,
    "biring": _GROW,
    "torus": _GROW,
    "rhd": _GROW,
    "tree": _REQUANTISE,
    "dbtree": _REQUANTISE,
    "direct": Accumulation(_HELD, "float32", "float32"),
    "hier": Accumulation(ACCUMULATES, GROW, "float32"),
    "gather": Accumulation(_HELD, "requantise", "requantise"),
}

_OWNED = "ring", "biring", "torus", "rhd", "direct", "hier"  # whose chunks have owners
COLLECTIVES = {  # beside the all-reduce: the algorithms of each
    "reduce_scatter": _OWNED,
    "all_gather": _OWNED,
    "all_to_all": ("direct",),
    "broadcast": ("tree", *_OWNED),
    "reduce": ("tree", *_OWNED),
    "gather": ("direct",),
    "scatter": ("direct",),
}
SUMMING = "reduce_scatter", "reduce"  # collectives that add

BASELINES = {  # all-reduces of other libraries: their wires, and how they sum in them
    "mpi": {"raw": "float32"},
    "gloo": {"raw": "float32", "bf16": "requantise"},
    "nccl": {"raw": "float32", "bf16": "requantise", "fp16": "requantise"},
}
BASELINE_DEVICES = {"mpi": ("cpu", "gpu"), "gloo": ("cpu",), "nccl": ("gpu",)}  # of their arrays

MEMCPY = "memcpy"
CODEC_OPERATIONS = (  # run by kinds.codec_cases
    "encode",
    "encode tile",
    "stochastic",
    "decode",
    "decode_add",
    "hop",
    "hop tile",
    "encode block32",
    "decode_add block32",
    "hop block32",
    "encode block16",
    "decode_add block16",
    "hop block16",
)
SPARSE_OPERATIONS = (  # of sparse methods, on the largest values
    "one pass",
    "kth_magnitude",
    "select_magnitude",
    "select_above",
    "gather",
    "scatter_add",
    "clear",
    "encode_sparse",
    "decode_sparse",
)

HALO_OURS = "cpdhpc"
HALO_COPIED = "cpdhpc, copied"  # owned cells lie elsewhere and are copied too
HALO_MPI_TYPES = ("subarray", "subarray, persistent", "alltoallw")  # MPI's methods without packing
HALO_PACKED = "packed"


def nearest(word: object, known: Iterable[str], likeness: float = 0.6) -> list[str]:
    """Return the names that an unknown one may mean, the nearest first; case does not matter.

    likeness: the least ratio of difflib, 1 for the same letters
    If none reaches it, names that contain the word (size for size_bytes), or that have it as
    initials (lr for learning_rate).
    """
    by_case = {name.lower(): name for name in sorted(known)}
    lower = str(word).lower()
    found = (
        [lower] if lower in by_case else difflib.get_close_matches(lower, by_case, cutoff=likeness)
    )
    for each in () if found else by_case:
        words = each.split("_")
        if len(words) > 1 and lower in (*words, "".join(part[:1] for part in words)):
            found.append(each)
    return [by_case[each] for each in found]


def suggest(word: object, known: Collection[str]) -> str:
    """Return advice for an unknown name: similar known ones, else all known ones."""
    if close := nearest(word, known):
        return f"did you mean {' or '.join(close)}?"
    listed = ", ".join(repr(n) if "," in n else n for n in sorted(known))
    return f"known are {listed}" if listed else "none is known"


def reason(text: object, value: object) -> str:
    """Return an error's text about a value, without the function and value at its beginning."""
    return re.sub(rf"^([\w.]+: )?(\w+=)?{re.escape(repr(value))}: ", "", str(text))


def check_integer(function: str, argument: str, value: object) -> None:
    """Raise TypeError unless value, an argument of a function, is an integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(function, argument, value, "must be an integer")


def check_whole(
    function: str, argument: str, value: object, least: int, below: int = 2**63
) -> None:
    """Raise TypeError unless value is an integer, ValueError unless it is least .. below - 1."""
    check_integer(function, argument, value)
    if value < least:  # type: ignore[operator]
        raise ArgumentError(function, argument, value, f"must be {least} or more", str(value))
    if value >= below:  # type: ignore[operator]
        raise ArgumentError(function, argument, value, f"must be below {below}", str(value))


def check_bool(function: str, argument: str, value: object) -> None:
    """Raise TypeError unless value, an argument of a function, is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(function, argument, value, "must be True or False")


def said_by(function: str, error: Exception, words: str | None = None) -> Exception:
    """Return an error whose text begins with the function that the user called."""
    said = str(error) if words is None else words
    try:
        other = reworded(error, re.sub(r"^[\w.]+(?=: )", function, said))
    except TypeError:  # its constructor takes other arguments
        return error
    if isinstance(other, Refused):
        other.function = function
    return other

"""What points, series and panels are called: by the factors that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from . import text
from .study_file import PLACES, Value

Factors = Mapping[str, Value]
ORDER = (  # of factors in names, of columns and rows
    "nodes",
    "ppn",
    "ranks",
    "size_bytes",
    "operation",
    "format",
    "algorithm",
    "wire",
    "value_scaling",
    "accumulate",
    "gradient.aggregator",
    "gradient.wire",
    "gradient.scaling",
)
HEADINGS = {"size_bytes": "size", "value_scaling": "scaling", "gradient.aggregator": "gradients"}
COUNTED = {"ranks": "rank", "nodes": "node"}
DERIVED = ("accumulate", "gradient.accumulate")  # said only where other factors leave it open
SAID = {  # factor: value: what a name says of it
    "gradient.aggregator": {"none": "float32", "lowbit": ""},
}


def in_order(names: Iterable[str]) -> list[str]:
    """Return names, each once, the well-known ones first."""
    found = list(dict.fromkeys(names))
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def varying(of: Sequence[Factors], without: Iterable[str] = PLACES) -> list[str]:
    """Return the factors that are not the same in all, without those that others decide."""
    names = [
        name
        for name in in_order(name for factors in of for name in factors)
        if name not in without and len({factors.get(name) for factors in of}) > 1
    ]
    return [name for name in names if name not in DERIVED or not _decided(name, names, of)]


def _decided(name: str, names: Sequence[str], of: Sequence[Factors]) -> bool:
    others = [other for other in names if other not in DERIVED]
    rest = {tuple(factors.get(other) for other in others) for factors in of}
    all_of = {tuple(factors.get(other) for other in (*others, name)) for factors in of}
    return len(rest) == len(all_of)


def constant(of: Sequence[Factors], without: Iterable[str] = ()) -> dict[str, Value]:
    """Return the factors that are the same in all."""
    names = in_order(name for factors in of for name in factors)
    return {
        name: of[0][name]
        for name in names
        if name not in without and len({factors.get(name) for factors in of}) == 1
    }


def is_number(name: str, of: Iterable[Factors]) -> bool:
    """Return whether no value of a factor is a word."""
    return not any(isinstance(factors.get(name), str) for factors in of)


def label(factors: Factors, names: Iterable[str]) -> str:
    """Return the values of factors as a name for people, without those that are not used."""
    used = [name for name in names if name in factors]
    words = [said(name, factors[name]) for name in used if isinstance(factors[name], str)]
    numbers = [said(name, factors[name]) for name in used if not isinstance(factors[name], str)]
    return ", ".join([*numbers, " ".join(filter(None, words))]).removesuffix(", ")


def said(name: str, value: Value) -> str:
    """Return a factor's value for people, numbers with what they are of."""
    if name in COUNTED:
        return text.count(int(value), COUNTED[name])
    bare = cell(name, value)
    if isinstance(value, str) or name.endswith("bytes"):
        return bare
    return f"{heading(name)} {bare}"


def cell(name: str, value: Value) -> str:
    """Return a factor's value below its heading."""
    if isinstance(value, str):
        return SAID.get(name, {}).get(value, value)
    if name.endswith("bytes"):
        return text.size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def heading(name: str) -> str:
    """Return what a factor is called at the head of a column."""
    return HEADINGS.get(name, name.rpartition(".")[2].replace("_", " "))

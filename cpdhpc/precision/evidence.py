"""What a search of bits has found so far: layers with their formats, trainings, verdicts; HDF5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import store
from ..formats import packed_bytes, wire_format
from ..store import Variable

Array = npt.NDArray[Any]
KIND, FILE = "precision search", "search.h5"
RAW = "raw"  # float32


WIRE, SUMS = "wire", "accumulators"
OPERANDS = "weights", "activations", "errors"
OVER = "wire", "arithmetic", "both"  # what a search is over


def width(name: str) -> int:
    """Return the bits of a value in a format."""
    fmt = wire_format(name)
    return 32 if fmt is None else fmt.bits


@dataclass(frozen=True)
class Place:
    """A tensor of a layer, or its sums, and the formats that it may have.

    name: of the layer; tensor: WIRE: its gradients as they travel; SUMS: partial sums of its three
        products; else a key of a policy
    sizes: values: of its parameters; of a batch; SUMS: of all that is summed up to
    low, high: exponents between which its values are
    formats, errors: from float32 to the fewest bits, so from no error to the largest. WIRE: part of
        the error of the whole gradient, relative to that; else error of the layer's products
    """

    name: str
    sizes: tuple[int, ...]
    low: int
    high: int
    formats: tuple[str, ...]
    errors: tuple[float, ...]
    tensor: str = WIRE

    @property
    def label(self) -> str:
        """What it is called."""
        return self.name if self.tensor == WIRE else f"{self.name} {self.tensor}"

    @property
    def values(self) -> int:
        """Number of values."""
        return sum(self.sizes)

    def bits(self, name: str) -> int:
        """Return the bits of its values in a format; WIRE: of whole tiles as they travel."""
        if self.tensor != WIRE:
            return self.values * width(name)
        whole = [8 * packed_bytes(n, width(name)) for n in self.sizes]
        last = 32 * self.sizes[-1] if name == RAW else whole[-1]  # nothing follows, alone at least
        return sum(whole[:-1]) + last


@dataclass(frozen=True)
class Trial:
    """A training with some format for each place, all seeds together.

    formats: by place; seeds: of its runs; scores: of the test samples, by seed, NaN: none
    sent_bytes: in a step, of the rank that sends most; error: of the mean gradient, NaN: not known
    what: why it was done; verdict: "within" the budget, "beyond" it, or why it failed
    """

    formats: tuple[str, ...]
    seeds: tuple[int, ...]
    what: str
    scores: tuple[float, ...]
    sent_bytes: float
    error: float
    verdict: str

    @property
    def score(self) -> float:
        """Mean over seeds, NaN where one has none."""
        return math.fsum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class Evidence:
    """A search as its file holds it; asked: the job and what is searched for, TOML.

    found: the format of each place, () while it goes on
    """

    asked: str
    places: tuple[Place, ...] = ()
    trials: tuple[Trial, ...] = ()
    found: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def trial(self, formats: Sequence[str], seeds: Sequence[int]) -> Trial | None:
        """Return the training with these formats and seeds, None where there was none."""
        wanted = tuple(formats), tuple(seeds)
        return next((t for t in self.trials if (t.formats, t.seeds) == wanted), None)

    def widths(self, formats: Sequence[str]) -> dict[str, float]:
        """Return the bits of a value in these formats, by tensor: means over its places."""
        pairs = list(zip(self.places, formats, strict=True))
        found = {}
        for tensor in dict.fromkeys(place.tensor for place in self.places):
            some = [(place, name) for place, name in pairs if place.tensor == tensor]
            bits = sum(p.bits(n) for p, n in some)
            for place in [p for p, n in some if n == RAW and tensor == WIRE][:-1]:
                last = place.sizes[-1]  # others in float32 follow it, behind a whole tile
                bits += 8 * packed_bytes(last, 32) - 32 * last
            found[tensor] = bits / sum(p.values for p, _ in some)
            if tensor == WIRE and all(name == RAW for _, name in some):
                found[tensor] = 32.0  # without lowbit no tile is filled up
        return found

    def write(self, path: Path) -> None:
        """Write it. Raises StoreError where it cannot be written."""
        attributes = {"kind": KIND, "asked": self.asked, "found": "\n".join(self.found)}
        store.write(path, self._groups(), self.provenance | attributes)

    def _groups(self) -> dict[str, dict[str, Variable]]:
        places, trials = self.places, self.trials
        formats = list(dict.fromkeys(name for place in places for name in place.formats))
        errors = np.full((len(places), len(formats)), np.nan)
        for row, place in zip(errors, places, strict=True):
            row[[formats.index(name) for name in place.formats]] = place.errors
        of, sizes = _ragged([place.sizes for place in places])
        runs = max((len(t.seeds) for t in trials), default=0)
        scores = np.full((len(trials), runs), np.nan)
        seeds = np.full((len(trials), runs), -1, np.int64)
        for i, t in enumerate(trials):
            scores[i, : len(t.seeds)], seeds[i, : len(t.seeds)] = t.scores, t.seeds
        at, by = ("place",), ("trial",)
        number = _ints(at, range(len(places)), "tensor of a layer")
        return {
            "places": {
                "place": number,
                "format": _texts(("format",), formats, "format"),
                "layer": _texts(at, [x.name for x in places], "module"),
                "tensor": _texts(at, [x.tensor for x in places], "wire, or what is rounded"),
                "exponent_low": _ints(at, [x.low for x in places], "least exponent"),
                "exponent_high": _ints(at, [x.high for x in places], "largest exponent"),
                "error": Variable(
                    ("place", "format"),
                    errors,
                    "wire: part of the whole gradient's error; else error of the layer's products",
                ),
            },
            "parameters": {
                "parameter": _ints(("parameter",), range(len(sizes)), "parameter tensor"),
                "place": _ints(("parameter",), of, "place that it belongs to"),
                "values": _ints(("parameter",), sizes, "number of values"),
            },
            "trials": {
                "trial": _ints(by, range(len(trials)), "training"),
                "place": number,
                "run": _ints(("run",), range(runs), "run of a training"),
                "format": Variable(
                    (*by, "place"),
                    np.array([t.formats for t in trials], dtype=str).reshape(-1, len(places)),
                    "format of the place",
                ),
                "seed": Variable((*by, "run"), seeds, "seed, -1: there is no such run"),
                "score": Variable((*by, "run"), scores, "score of the test samples"),
                "sent_bytes": Variable(
                    by,
                    np.array([t.sent_bytes for t in trials], float),
                    "payload of a step, of the rank that sends most",
                    "byte",
                ),
                "error": Variable(
                    by, np.array([t.error for t in trials], float), "error of the mean gradient"
                ),
                "what": Variable(by, np.array([t.what for t in trials], dtype=str), "why"),
                "verdict": Variable(
                    by, np.array([t.verdict for t in trials], dtype=str), "verdict"
                ),
            },
        }

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Return what write wrote. Raises StoreError for any other file."""
        groups, attributes = store.read(path)
        if attributes.get("kind") != KIND:
            raise store.StoreError(f"{path}: is no evidence of a search of precision")
        if "places" not in groups:
            raise store.StoreError(f"{path}: is a search of another version: begin anew")
        of, parameters, trials = groups["places"], groups["parameters"], groups["trials"]
        places = []
        for i, name in enumerate(of["layer"].tolist()):
            (known,) = np.nonzero(~np.isnan(of["error"][i]))
            order = known[np.argsort(of["error"][i][known], kind="stable")]
            sizes = parameters["values"][parameters["place"] == i]
            places.append(
                Place(
                    name,
                    tuple(sizes.tolist()),
                    int(of["exponent_low"][i]),
                    int(of["exponent_high"][i]),
                    tuple(of["format"][order].tolist()),
                    tuple(of["error"][i][order].tolist()),
                    str(of["tensor"][i]),
                )
            )
        rows = [
            Trial(
                tuple(trials["format"][i].tolist()),
                tuple(seeds[seeds >= 0].tolist()),
                str(trials["what"][i]),
                tuple(trials["score"][i][seeds >= 0].tolist()),
                float(trials["sent_bytes"][i]),
                float(trials["error"][i]),
                str(trials["verdict"][i]),
            )
            for i, seeds in enumerate(trials["seed"])
        ]
        found = tuple(attributes["found"].split("\n")) if attributes["found"] else ()
        return cls(attributes["asked"], tuple(places), tuple(rows), found)


def _ints(dims: tuple[str, ...], values: Sequence[int], long_name: str) -> Variable:
    return Variable(dims, np.array(values, np.int64), long_name)


def _texts(dims: tuple[str, ...], values: Sequence[str], long_name: str) -> Variable:
    return Variable(dims, np.array(values, dtype=str), long_name)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return which row each value is of, and the values."""
    return [i for i, row in enumerate(rows) for _ in row], [value for row in rows for value in row]

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


@dataclass(frozen=True)
class Layer:
    """A module with parameters, and the formats that its gradients may travel in.

    sizes: values of its parameters; low, high: exponents between which its gradients are
    formats, errors: from float32 to the fewest bits, so from no error to the largest: parts of the
        error of the whole gradient, relative to that
    """

    name: str
    sizes: tuple[int, ...]
    low: int
    high: int
    formats: tuple[str, ...]
    errors: tuple[float, ...]

    @property
    def values(self) -> int:
        """Number of values."""
        return sum(self.sizes)

    def bits(self, wire: str) -> int:
        """Return the bits of its gradient in a format, of whole tiles as it travels."""
        fmt = wire_format(wire)
        return sum(32 * n if fmt is None else 8 * packed_bytes(n, fmt.bits) for n in self.sizes)


@dataclass(frozen=True)
class Trial:
    """A training with some format for each layer, all seeds together.

    formats: by layer; seeds: of its runs; scores: of the test samples, by seed, NaN: none
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

    found: the format of each layer, () while it goes on
    """

    asked: str
    layers: tuple[Layer, ...] = ()
    trials: tuple[Trial, ...] = ()
    found: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def trial(self, formats: Sequence[str], seeds: Sequence[int]) -> Trial | None:
        """Return the training with these formats and seeds, None where there was none."""
        wanted = tuple(formats), tuple(seeds)
        return next((t for t in self.trials if (t.formats, t.seeds) == wanted), None)

    def write(self, path: Path) -> None:
        """Write it. Raises StoreError where it cannot be written."""
        attributes = {"kind": KIND, "asked": self.asked, "found": "\n".join(self.found)}
        store.write(path, self._groups(), self.provenance | attributes)

    def _groups(self) -> dict[str, dict[str, Variable]]:
        layers, trials = self.layers, self.trials
        formats = list(dict.fromkeys(name for layer in layers for name in layer.formats))
        errors = np.full((len(layers), len(formats)), np.nan)
        for row, layer in zip(errors, layers, strict=True):
            row[[formats.index(name) for name in layer.formats]] = layer.errors
        of, sizes = _ragged([layer.sizes for layer in layers])
        runs = max((len(t.seeds) for t in trials), default=0)
        scores = np.full((len(trials), runs), np.nan)
        seeds = np.full((len(trials), runs), -1, np.int64)
        for i, t in enumerate(trials):
            scores[i, : len(t.seeds)], seeds[i, : len(t.seeds)] = t.scores, t.seeds
        names = _texts(("layer",), [x.name for x in layers], "module")
        by = ("trial",)
        return {
            "layers": {
                "layer": names,
                "format": _texts(("format",), formats, "format"),
                "exponent_low": _ints(("layer",), [x.low for x in layers], "least exponent"),
                "exponent_high": _ints(("layer",), [x.high for x in layers], "largest exponent"),
                "error": Variable(
                    ("layer", "format"), errors, "error of the layer over the whole gradient"
                ),
            },
            "parameters": {
                "parameter": _ints(("parameter",), range(len(sizes)), "parameter tensor"),
                "layer": _ints(("parameter",), of, "layer that it belongs to"),
                "values": _ints(("parameter",), sizes, "number of values"),
            },
            "trials": {
                "trial": _ints(by, range(len(trials)), "training"),
                "layer": names,
                "run": _ints(("run",), range(runs), "run of a training"),
                "format": Variable(
                    (*by, "layer"),
                    np.array([t.formats for t in trials], dtype=str).reshape(-1, len(layers)),
                    "format of the layer's gradients",
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
        of, parameters, trials = groups["layers"], groups["parameters"], groups["trials"]
        layers = []
        for i, name in enumerate(of["layer"].tolist()):
            (known,) = np.nonzero(~np.isnan(of["error"][i]))
            order = known[np.argsort(of["error"][i][known], kind="stable")]
            sizes = parameters["values"][parameters["layer"] == i]
            layers.append(
                Layer(
                    name,
                    tuple(sizes.tolist()),
                    int(of["exponent_low"][i]),
                    int(of["exponent_high"][i]),
                    tuple(of["format"][order].tolist()),
                    tuple(of["error"][i][order].tolist()),
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
        return cls(attributes["asked"], tuple(layers), tuple(rows), found)


def _ints(dims: tuple[str, ...], values: Sequence[int], long_name: str) -> Variable:
    return Variable(dims, np.array(values, np.int64), long_name)


def _texts(dims: tuple[str, ...], values: Sequence[str], long_name: str) -> Variable:
    return Variable(dims, np.array(values, dtype=str), long_name)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return which row each value is of, and the values."""
    return [i for i, row in enumerate(rows) for _ in row], [value for row in rows for value in row]

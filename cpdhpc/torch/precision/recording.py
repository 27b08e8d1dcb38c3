"""Recorded tensors of layers in training, as an HDF5 file and as the table of a job file.

/ITERATION/KIND/NAME are the arrays, float32; KINDS describes them. Reading needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from ... import store
from ...config import Above0, Positive, Section, Whole

Array = npt.NDArray[Any]
KindName = Literal["gradients", "mean", "weights", "updates", "activations", "errors"]
KIND, GRADIENTS = "recording", "gradients"  # of files; the latter of train.record_gradients


class TensorKind(NamedTuple):
    """A kind of recorded tensors; of_ranks: by each rank, else by process 0."""

    long_name: str
    of_ranks: bool


KINDS: dict[KindName, TensorKind] = {
    "gradients": TensorKind("gradient of a parameter on each rank, times loss_scale", True),
    "mean": TensorKind("mean gradient over ranks, as used by the step", False),
    "weights": TensorKind("parameter before the step", False),
    "updates": TensorKind("change of a parameter by the step", False),
    "activations": TensorKind("input of a layer, samples of all ranks", True),
    "errors": TensorKind(
        "gradient of a layer's output, of the same samples, times loss_scale", True
    ),
}


class Recording(Section):
    """[record]: gradients, activations, errors and weights go to a file (precision replay).

    layers: patterns of the names of modules that have parameters; "*" matches any
    tensors: kinds of tensors to record
    every: distance of recorded iterations, from 0; count: most iterations to record
    iterations: iterations to record, instead of every
    max_mib: largest size of all arrays, before compression; a run that needs more ends with an
        error in its first iteration
    thin: keep only the rows of each array that fit, with their number, instead of an error
    seed: selects the rows; file: path of the recording; default: beside the record of the run
    """

    layers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("*",)
    tensors: Annotated[tuple[KindName, ...], Field(strict=False, min_length=1)] = tuple(KINDS)
    every: Whole = 0
    count: Positive = 20
    iterations: Annotated[tuple[Whole, ...], Field(strict=False)] = ()
    max_mib: Above0 = 256.0
    thin: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    file: str = ""

    @model_validator(mode="after")
    def _one_way_to_choose(self) -> Recording:
        if self.every and self.iterations:
            raise ValueError("every and iterations: set only one of them")
        return self

    @property
    def number(self) -> int:
        """The largest number of recorded iterations; 0: none."""
        return self.count if self.every else len(set(self.iterations))

    def wants(self, iteration: int) -> bool:
        """Return whether an iteration is recorded."""
        if self.every:
            return iteration % self.every == 0 and iteration // self.every < self.count
        return iteration in self.iterations


def kept_rows(seed: int, rows: int, most: int) -> Array:
    """Return the indices of the rows of an array to be kept: int64[min(rows, most)], ascending."""
    if rows <= most:
        return np.arange(rows)
    return np.sort(np.random.default_rng([seed, rows]).permutation(rows)[:most])


@dataclass(frozen=True)
class Tensor:
    """An array of a recording.

    shape: of gradients [ranks, ...]; rows: number along the first axis (of gradients the second),
        on each rank, before thinning
    loss_scale: the factor in gradients of ranks and in errors
    """

    file: Path
    dataset: str
    iteration: int
    kind: KindName
    name: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    loss_scale: float

    @property
    def is_thinned(self) -> bool:
        """Whether rows were left out."""
        if self.kind == "gradients":
            return self.shape[1:2] != self.rows[:1]
        return self.shape[0] != sum(self.rows)

    def read(self) -> Array:
        """Return the values, float32. Raises StoreError if they cannot be read."""
        return store.read_box(self.file, self.dataset, ())


@dataclass(frozen=True)
class Recorded:
    """tensors: by iteration, in the order of the model; layers: type and geometry, by name."""

    file: Path
    tensors: tuple[Tensor, ...]
    layers: dict[str, dict[str, Any]]

    @property
    def iterations(self) -> list[int]:
        """The recorded iterations, ascending."""
        return sorted({each.iteration for each in self.tensors})

    @cached_property
    def by_name(self) -> dict[tuple[int, str, str], Tensor]:
        """The tensors by iteration, kind and name."""
        return {(each.iteration, each.kind, each.name): each for each in self.tensors}


def load(file: Path | str) -> Recorded:
    """Return a Recorder's or train.record_gradients' data. Raises StoreError for other files."""
    file = Path(file)
    notes = store.read_attributes(file)  # and check its checksum
    if notes.get("kind") == GRADIENTS:
        return Recorded(file, tuple(_gradients(file, notes)), {})
    if notes.get("kind") != KIND:
        raise store.StoreError(f"{file}: is not a recording: precision record makes one")
    try:
        layers = json.loads(notes["layers"])
        found = [_tensor(file, *each) for each in store.contents(file)[1].items()]
    except (KeyError, TypeError, ValueError) as error:
        raise store.StoreError(f"{file}: is not a recording of this version: {error!r}") from None
    order = {name: place for place, name in enumerate(layers)}
    kinds = list(KINDS)

    def place(each: Tensor) -> tuple[int, int, int, str]:
        layer = each.name if each.name in order else each.name.rpartition(".")[0]
        return each.iteration, kinds.index(each.kind), order.get(layer, len(order)), each.name

    return Recorded(file, tuple(sorted(found, key=place)), layers)


def _gradients(file: Path, notes: dict[str, Any]) -> Iterator[Tensor]:
    iteration, scale = int(notes["iteration"]), float(notes["loss_scale"])
    rooms = store.contents(file)[1]
    for name in json.loads(notes["layers"]):
        dataset = f"{GRADIENTS}/{name.replace('/', ':')}"
        shape = rooms[dataset].shape
        rows = shape[1:2] * shape[0]
        yield Tensor(file, dataset, iteration, "gradients", name, shape, rows, scale)


def _tensor(file: Path, dataset: str, room: store.Room) -> Tensor:
    iteration, kind, _ = dataset.split("/")
    notes = room.attributes
    if kind not in KINDS or room.dtype != np.float32:
        raise ValueError(f"dataset {dataset}")
    rows = tuple(int(each) for each in np.atleast_1d(notes["rows"]))
    of = int(iteration), kind, str(notes["name"]), room.shape, rows, float(notes["loss_scale"])
    return Tensor(file, dataset, *of)

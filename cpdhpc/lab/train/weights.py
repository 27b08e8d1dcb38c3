"""A run's weights after some of its epochs, a file each: for what looks back at the whole run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import store
from ...compress.base import Array
from ...ops.tensors import values_of
from .data import Samples

if TYPE_CHECKING:
    import torch

KIND = "weights"
LOOKED_AT = 128  # samples of training and of the test that tell one data set from another
FEW = 8  # of them, where each run has to wait for them


@dataclass(frozen=True)
class Kept:
    """Where a run stood whose weights were kept.

    learning_rate: of the last step before; data: see data_digest; job: as TOML text
    """

    epoch: int
    iteration: int
    learning_rate: float
    data: str
    job: str


def path_of(record: Path, epoch: int | str) -> Path:
    """Return where the weights after an epoch, counted from 1, are: beside the run's record."""
    return record.with_name(f"{record.stem}.{KIND}-{epoch}.h5")


def data_digest(train: Samples, test: Samples, looked_at: int = LOOKED_AT) -> str:
    """Return what tells data sets apart: how many samples there are, and some from everywhere."""
    digest = hashlib.sha256()
    for samples in (train, test):
        some = np.unique(np.linspace(0, len(samples) - 1, looked_at).astype(np.int64))
        digest.update(f"{len(samples)} samples".encode())
        for tensor in samples.take(some, 0):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def size_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def save(path: Path, model: torch.nn.Module, here: Kept) -> None:
    """Write parameters and buffers to a file that takes path's place when it is complete.

    Raises StoreError where it cannot be written.
    """
    tensors = {name: values_of(tensor) for name, tensor in model.state_dict().items()}
    store.write(path, {"model": tensors}, {"kind": KIND, **asdict(here)})


def read(path: Path) -> Kept:
    """Return where the run stood. Raises StoreError for any other file."""
    return _kept(path, store.read_attributes(path))


def load(path: Path) -> tuple[dict[str, Array], Kept]:
    """Return parameters and buffers by name, and where the run stood. Raises as read."""
    groups, attributes = store.read(path)
    kept = _kept(path, attributes)
    return groups["model"], kept


def _kept(path: Path, attributes: Mapping[str, object]) -> Kept:
    if attributes.get("kind") != KIND:
        raise store.StoreError(f"{path}: has no weights of a run: train.keep_every keeps them")
    return Kept(**{name: attributes[name] for name in Kept.__dataclass_fields__})  # type: ignore[arg-type]

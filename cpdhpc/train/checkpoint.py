"""Checkpoints: one HDF5 file with everything that a run needs to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from .. import store
from ..config import UserError, difference, value_of
from .job import DO_NOT_CHANGE_BITS

Array = npt.NDArray[Any]
Groups = dict[str, dict[str, Array]]


class CheckpointError(UserError):
    """A checkpoint that does not belong to this job."""


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Groups:
    """Return the state of model and optimizer as groups of arrays."""
    moments = optimizer.state_dict()["state"]
    return {
        "model": {name: tensor.numpy() for name, tensor in model.state_dict().items()},
        "optimizer": {
            f"{index}.{name}": tensor.numpy()
            for index, state in moments.items()
            for name, tensor in state.items()
            if tensor is not None  # SGD has no buffer where there is no momentum
        },
    }


def load_tensors(groups: Groups, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set model and optimizer to what tensors returned.

    Raises CheckpointError, naming the tensor, where the model has other ones.
    """
    own = model.state_dict()
    for name in sorted(own.keys() | groups["model"].keys()):
        here = tuple(own[name].shape) if name in own else None
        there = groups["model"][name].shape if name in groups["model"] else None
        if here != there:
            raise CheckpointError(f"tensor {name} is {there} there and {here} here")
    model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in groups["model"].items()})
    state = optimizer.state_dict()
    for key, values in groups["optimizer"].items():
        index, _, name = key.partition(".")
        state["state"].setdefault(int(index), {})[name] = torch.from_numpy(values.copy())
    optimizer.load_state_dict(state)


def save(path: Path, groups: Groups, *, iteration: int, ranks: int, toml: str) -> None:
    """Write a checkpoint that takes path's place when it is complete."""
    attributes = {"kind": "checkpoint", "iteration": iteration, "ranks": ranks, "toml": toml}
    store.write(path, groups, attributes)


def check_job(path: Path, there: str, here: str) -> None:
    """Raise CheckpointError where a file's job is another than this one; both as TOML text."""
    key = difference(here, there, DO_NOT_CHANGE_BITS)
    if key is not None:
        values = value_of(there, key), value_of(here, key)
        raise CheckpointError(f"{path}: {key} is {values[0]!r} there and {values[1]!r} here")


def load(path: Path, *, ranks: int, toml: str) -> tuple[Groups, int]:
    """Return a checkpoint's groups and its iteration.

    Raises CheckpointError, naming what differs, where it is another job's; StoreError where it
    cannot be read.
    """
    groups, attributes = store.read(path)
    if attributes.get("kind") != "checkpoint":
        raise CheckpointError(f"{path}: is no checkpoint")
    if attributes["ranks"] != ranks:
        raise CheckpointError(f"{path}: ranks is {attributes['ranks']} there and {ranks} here")
    check_job(path, attributes["toml"], toml)
    return groups, attributes["iteration"]

"""Files of a run: the record of its iterations, and checkpoints that any number of ranks takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import provenance, store
from ...config import UserError, difference, value_of
from ...store import Variable
from ..checkpoint import CheckpointError
from .job import DO_NOT_CHANGE_BITS
from .training import Stack, Step
from .whole import collect, deal

SCHEMA = 1
COLUMNS = {  # of a Step: what it is, its units
    "layer": ("layer that is trained", "1"),
    "iteration": ("iteration of the layer", "1"),
    "loss": ("objective, mean over images", "1"),
    "error": ("squared error of the reconstruction, mean over images", "1"),
    "sparsity": ("sum of pooled responses, mean over images", "1"),
    "energy": ("squares of the layer's input, mean over images", "1"),
    "time_s": ("time of an iteration on the slowest rank", "s"),
    "exchange_s": ("time in exchanges, waits included, on the rank with most", "s"),
    "sent_bytes": ("bytes that the rank which sent most sent", "byte"),
}


def save(path: Path, stack: Stack) -> None:
    """Write a checkpoint. Collective; rank 0 gathers and writes, layer by layer in memory."""
    groups: dict[str, dict[str, Any]] = {}
    for number, (layer, optimizer) in enumerate(zip(stack.layers, stack.optimizers, strict=True)):
        momentum = optimizer.state[layer.weight].get("momentum_buffer")
        parts = {"weight": layer.weight, "momentum": momentum}
        found = {
            name: collect(stack.world, layer, values)
            for name, values in parts.items()
            if values is not None
        }
        groups[f"layer{number}"] = found
    error: UserError | None = None
    if stack.world.rank == 0:
        attributes = {
            "kind": "autoencoder checkpoint",
            "schema": SCHEMA,
            "layer": stack.layer,
            "iteration": stack.iteration,
            "toml": stack.job.toml(),
        }
        try:
            store.write(path, groups, attributes)
        except OSError as problem:
            error = UserError(f"{path}: cannot be written: {problem.strerror or problem}")
    stack.world.agree(error, "checkpoint")


def resume(path: Path, stack: Stack) -> bool:
    """Take over a checkpoint, made by any number of ranks; False where there is none. Collective.

    Raises CheckpointError or StoreError on all ranks alike.
    """
    groups: dict[str, Any] = {}
    here: Any = None
    if stack.world.rank == 0:
        groups, here = _read(path, stack.job.toml())
    here = stack.world.gather(here, "resume")[0]
    if here is None:
        return False
    if isinstance(here, UserError):
        raise here
    stack.layer, stack.iteration, names = here
    for number, (layer, optimizer) in enumerate(zip(stack.layers, stack.optimizers, strict=True)):
        key = f"layer{number}"
        of = groups.get(key, {})
        with torch.no_grad():
            layer.weight.copy_(deal(stack.world, layer, of.get("weight")))
        if "momentum" in names[key]:
            found = deal(stack.world, layer, of.get("momentum"))
            optimizer.state[layer.weight]["momentum_buffer"] = found
    return True


def _read(path: Path, toml: str) -> tuple[dict[str, Any], Any]:
    """Return the groups, and (layer, iteration, names of arrays), None or an error."""
    if not path.exists():
        return {}, None
    try:
        groups, attributes = store.read(path)
        if attributes.get("kind") != "autoencoder checkpoint":
            raise CheckpointError(f"{path}: is no checkpoint of an autoencoder")
        there = str(attributes["toml"])
        key = difference(toml, there, DO_NOT_CHANGE_BITS)
        if key is not None:
            values = value_of(there, key), value_of(toml, key)
            raise CheckpointError(f"{path}: {key} is {values[0]!r} there and {values[1]!r} here")
    except UserError as error:
        return {}, error
    names = {name: list(group) for name, group in groups.items()}
    return groups, (attributes["layer"], attributes["iteration"], names)


def save_record(path: Path, stack: Stack, steps: list[Step], status: str) -> None:
    """Write the record from rank 0; provenance is collective."""
    about = provenance.attributes(stack.world)
    if stack.world.rank:
        return
    order = {"step": Variable(("step",), np.arange(len(steps)), "iteration, from 0")}
    columns = {
        name: Variable(("step",), np.array([getattr(step, name) for step in steps]), *text)
        for name, text in COLUMNS.items()
    }
    attributes = {
        "kind": "autoencoder",
        "schema": SCHEMA,
        "name": stack.job.name,
        "toml": stack.job.toml(),
        "parameters": sum(layer.geometry.parameters for layer in stack.layers),
        "ranks": stack.world.ranks,
        **about,
        "status": status,
    }
    store.write(path, {"steps": order | columns}, attributes)


def read_steps(path: Path) -> list[Step]:
    """Return the iterations of a record. Raises StoreError where it is none."""
    groups, _ = store.read(path)
    columns = (groups["steps"][name].tolist() for name in COLUMNS)
    return [Step(*row) for row in zip(*columns, strict=True)]

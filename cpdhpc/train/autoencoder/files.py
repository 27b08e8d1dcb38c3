"""Files of a run: the record of its iterations, and checkpoints that any number of ranks takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ... import provenance, store
from ...config import UserError, difference, value_of
from ...darray.files import load, save_all
from ...store import Variable
from ..checkpoint import CheckpointError
from .job import MAY_DIFFER
from .training import Stack, Step

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
    """Write a checkpoint; every rank writes its own blocks of filters. Collective.

    Raises UserError on all ranks alike where it cannot be written.
    """
    arrays = {
        f"layer{number}/{name}": layer.over_blocks(values)
        for number, layer in enumerate(stack.layers)
        for name, values in _state(stack, number).items()
    }
    attributes = {
        "kind": "autoencoder checkpoint",
        "schema": SCHEMA,
        "layer": stack.layer,
        "iteration": stack.iteration,
        "toml": stack.job.toml(),
    }
    parts = {name: (each.layout, each.local) for name, each in arrays.items()}
    save_all(stack.world, path, parts, attributes)


def _state(stack: Stack, number: int) -> dict[str, torch.Tensor]:
    """Return what a layer's training goes on from; momentum once it has begun."""
    weight = stack.layers[number].weight
    if not (stack.begun(number) and stack.job.train.momentum):
        return {"weight": weight}
    of_weight = stack.optimizers[number].state[weight]
    momentum = of_weight.setdefault("momentum_buffer", torch.zeros_like(weight))
    return {"weight": weight, "momentum": momentum}


def resume(path: Path, stack: Stack) -> bool:
    """Take over a checkpoint, made by any number of ranks; False where there is none. Collective.

    Raises CheckpointError or StoreError on all ranks alike.
    """
    here = _position(path, stack.job.toml()) if stack.world.rank == 0 else None
    here = stack.world.gather(here, "resume")[0]
    if here is None:
        return False
    if isinstance(here, UserError):
        raise here
    stack.layer, stack.iteration = here
    for number, layer in enumerate(stack.layers):
        for name, values in _state(stack, number).items():
            found = load(stack.world, path, layer.blocks, f"layer{number}/{name}")
            with torch.no_grad():
                values.copy_(torch.from_numpy(found).flatten(0, 1))
    return True


def _position(path: Path, toml: str) -> tuple[int, int] | UserError | None:
    """Return layer and iteration, None where there is no file, or an error."""
    if not path.exists():
        return None
    try:
        attributes = store.read_attributes(path)
        if attributes.get("kind") != "autoencoder checkpoint":
            raise CheckpointError(f"{path}: is no checkpoint of an autoencoder")
        there = str(attributes["toml"])
        key = difference(toml, there, MAY_DIFFER)
        if key is not None:
            values = value_of(there, key), value_of(toml, key)
            raise CheckpointError(f"{path}: {key} is {values[0]!r} there and {values[1]!r} here")
    except UserError as error:
        return error
    return attributes["layer"], attributes["iteration"]


def save_record(path: Path, stack: Stack, steps: list[Step], status: str) -> None:
    """Write the record from rank 0. Collective.

    Raises UserError on all ranks alike where it cannot be written.
    """
    about = provenance.attributes(stack.world)
    error: UserError | None = None
    try:
        if stack.world.rank == 0:
            _write_record(path, stack, steps, {**about, "status": status})
    except OSError as problem:
        error = UserError(f"{path}: cannot be written: {problem.strerror or problem}")
    stack.world.agree(error, "record")


def _write_record(path: Path, stack: Stack, steps: list[Step], about: store.Attributes) -> None:
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
    }
    store.write(path, {"steps": order | columns}, attributes)


def read_steps(path: Path) -> list[Step]:
    """Return the iterations of a record. Raises StoreError where it is none."""
    groups, _ = store.read(path)
    columns = (groups["steps"][name].tolist() for name in COLUMNS)
    return [Step(*row) for row in zip(*columns, strict=True)]

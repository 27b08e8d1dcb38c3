"""Gradients of every rank in an iteration as an HDF5 file, to be averaged again without training.

Reading needs no torch, so it works on login nodes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ... import store
from ...compress.base import Array
from ...ops import to_host
from ...torch.precision import recording
from ...world import files

if TYPE_CHECKING:
    from ...torch.reducer import GradientReducer

KIND = GROUP = "gradients"


@dataclass(frozen=True)
class Gradients:
    """layers: float32[ranks, *shape] by name, in the model's order, times loss_scale.

    source: their origin
    """

    iteration: int
    ranks: int
    layers: dict[str, Array]
    source: str
    loss_scale: float = 1.0


def path_of(record: Path, iteration: int | str) -> Path:
    """Return the path of the gradients of an iteration, beside the record of their run."""
    return record.with_name(f"{record.stem}.{KIND}-{iteration}.h5")


def size_bytes(reducer: GradientReducer) -> int:
    """Return the size in bytes of the gradients of all ranks."""
    return 4 * reducer.world.ranks * sum(p.numel() for p in reducer.parameters)


def save(reducer: GradientReducer, path: Path | str, iteration: int, source: str = "") -> None:
    """Write all ranks' inputs of the last reduce, float32 as it was averaged. Collective.

    Every process writes its ranks' rows at once; the file replaces path when it is complete.
    source: their origin. Raises UserError on all processes if it cannot be written.
    """
    world, bucket = reducer.world, reducer.bucket
    views = [bucket.views(to_host(flat)) for flat in reducer.flats]
    rooms = {
        _key(name): store.Room(
            (world.ranks, *shape),
            np.float32,
            {"long_name": f"gradient of {name} on each rank", "units": "1"},
        )
        for name, shape in zip(bucket.names, bucket.shapes, strict=True)
    }

    def fill(temporary: Path, offsets: files.Offsets) -> None:
        for layer, (key, room) in enumerate(rooms.items()):
            offset = offsets[key]
            if offset is None:  # it is empty
                continue
            rows = np.stack([each[layer] for each in views])
            start = (world.hosted.start,) + (0,) * (rows.ndim - 1)
            world.write_box(temporary, offset, room.shape, start, rows)

    attributes = {
        "kind": KIND,
        "iteration": iteration,
        "ranks": world.ranks,
        "loss_scale": reducer.loss_scale,
        "source": source,
        "layers": json.dumps(bucket.names),
    }
    files.save(world, Path(path), rooms, attributes, fill)


def _key(name: str) -> str:
    """Return the dataset of a layer; "/" would make groups of HDF5."""
    return f"{GROUP}/{name.replace('/', ':')}"


def load_all(path: Path | str) -> list[Gradients]:
    """Return the gradients of each iteration in a file of save, or of precision record.

    Raises StoreError for any other file, and if none were recorded.
    """
    if store.read_attributes(path).get("kind") != recording.KIND:
        return [load(path)]
    recorded = recording.load(path)
    of = [each for each in recorded.tensors if each.kind == "gradients"]
    if not of:
        raise store.StoreError(f"{path}: has no recorded gradients: --tensors gradients")
    found = []
    for iteration in recorded.iterations:
        tensors = [each for each in of if each.iteration == iteration]
        layers = {each.name: each.read() for each in tensors}
        first = tensors[0]
        found.append(
            Gradients(iteration, first.shape[0], layers, Path(path).stem, first.loss_scale)
        )
    return found


def load(path: Path | str) -> Gradients:
    """Return the gradients written by save. Raises StoreError for any other file."""
    groups, attributes = store.read(path)
    if attributes.get("kind") != KIND:
        raise store.StoreError(f"{path}: has no recorded gradients: train.record_gradients does")
    names = json.loads(attributes["layers"])
    layers = {name: groups[GROUP][_key(name).removeprefix(f"{GROUP}/")] for name in names}
    of = attributes
    return Gradients(of["iteration"], of["ranks"], layers, of["source"], of["loss_scale"])

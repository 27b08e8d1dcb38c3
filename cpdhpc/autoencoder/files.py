"""Files of a run: the record of its iterations, checkpoints that any number of ranks takes, and
the picture of filters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import provenance, store
from ..config import ConfigError
from ..darray.array import read_all, save_all
from ..store import Variable
from ..train.checkpoint import CheckpointError, check_same
from ..world.files import check
from .job import MAY_DIFFER, Geometry
from .layer import MacroLayer
from .training import Stack, Step

Array = npt.NDArray[Any]
MOST = 10  # blocks along an axis that are shown; of more, evenly spaced ones
MOST_MAPS = 64  # filters of a block that are shown: the first


def check_place(path: Path) -> bool:
    """Return True; raise ConfigError where a picture cannot be written, before hours of work."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not path.parent.is_dir():
        raise ConfigError(f"--png {path}: there is no such directory")
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--png {path}: must end in one of .{', .'.join(sorted(known))}")
    return True


def shown(layer: MacroLayer) -> Array:
    """Return the filters that a picture shows, on all ranks. Collective.

    [rows of blocks, columns, maps, inputs]; few, whatever the size of the layer
    """
    array = layer.over_blocks(layer.weight)
    (top, left), (bottom, right) = array.layout.owner(layer.world.rank)
    rows, columns = map(_some, layer.geometry.blocks)
    mine = {
        (i, j): array.local[i - top, j - left, :MOST_MAPS].copy()
        for i in rows
        for j in columns
        if top <= i < bottom and left <= j < right
    }
    everyone = layer.world.gather(mine, "filters of the picture")
    found = {place: block for part in everyone for place, block in part.items()}
    return np.stack([[found[i, j] for j in columns] for i in rows])


def draw(path: Path, weight: Array, geometry: Geometry, steps: list[Step]) -> None:
    """Write a picture of a layer's filters, block beside block, and its curves.

    weight: what shown returns
    Raises StoreError where it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    picture = mosaic(weight, geometry)
    left.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    left.set_axis_off()
    left.set_title(_title(weight, geometry))
    number = [step.iteration for step in steps]
    right.plot(number, [step.error / step.energy for step in steps], label="error / energy")
    ends = max(steps[0].sparsity, 1e-300) if steps else 1.0
    right.plot(number, [step.sparsity / ends for step in steps], label="sparsity term / its first")
    right.set(xlabel="iteration", ylim=(0, None), title="reconstruction and sparsity")
    right.legend()
    with store.replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format=path.suffix[1:])


def _title(weight: Array, geometry: Geometry) -> str:
    layer, (rows, columns, maps, _) = geometry.layer, weight.shape
    some = f"{maps} of {layer.maps}" if maps < layer.maps else str(maps)
    return (
        f"{some} filters of {layer.field} x {layer.field} in each block; "
        f"{rows} x {columns} of {geometry.blocks[0]} x {geometry.blocks[1]} blocks"
    )


def mosaic(weight: Array, geometry: Geometry) -> Array:
    """Return the filters of all blocks as a picture, see tiled."""
    size, channels = geometry.layer.field, geometry.channels
    fields = weight.reshape(*weight.shape[:3], size, size, channels)
    rows = [np.concatenate([tiled(block) for block in row], axis=1) for row in fields]
    return np.concatenate(rows)


def tiled(images: Array) -> Array:
    """Return images [n, height, width, channels] side by side, with white lines between; see grey.

    [height, width], or [height, width, 3] where there are three channels
    """
    n, height, width, channels = images.shape
    side = int(np.ceil(np.sqrt(n)))
    shape = -(-n // side) * (height + 1) + 1, side * (width + 1) + 1
    picture = np.ones((*shape, 3) if channels == 3 else shape)
    for k, image in enumerate(images):
        top, left = k // side * (height + 1), k % side * (width + 1)
        picture[top : top + height, left : left + width] = grey(image)
    return picture


def grey(image: Array) -> Array:
    """Return an image [height, width, channels] in 0..1, zero at 0.5 and its peak at 0 or 1.

    [height, width, 3] of three channels; of other numbers the root of the squares is shown.
    """
    if image.shape[2] != 3:
        image = image[..., 0] if image.shape[2] == 1 else np.linalg.norm(image, axis=2)
    peak = max(float(np.abs(image).max()), 1e-30)
    return np.asarray(0.5 + image / (2 * peak))


def _some(n: int) -> list[int]:
    return np.linspace(0, n - 1, min(n, MOST)).round().astype(int).tolist()


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
    world = stack.world
    if not world.on_first(path.exists, "resume"):
        return False
    check(world, path)
    stack.layer, stack.iteration = world.on_first(lambda: _position(path, stack.job.toml()))
    states = {
        f"layer{number}/{name}": (layer.blocks, values)
        for number, layer in enumerate(stack.layers)
        for name, values in _state(stack, number).items()
    }
    found = read_all(world, path, {name: blocks for name, (blocks, _) in states.items()})
    with torch.no_grad():
        for name, (_, values) in states.items():
            values.copy_(torch.from_numpy(found[name]).flatten(0, 1))
    return True


def _position(path: Path, toml: str) -> tuple[int, int]:
    """Return layer and iteration. Raises CheckpointError where the file is another job's."""
    attributes, _ = store.contents(path)
    if attributes.get("kind") != "autoencoder checkpoint":
        raise CheckpointError(f"{path}: is no checkpoint of an autoencoder")
    check_same(path, str(attributes["toml"]), toml, MAY_DIFFER)
    return attributes["layer"], attributes["iteration"]


def save_record(path: Path, stack: Stack, steps: list[Step], status: str) -> None:
    """Write the record from rank 0. Collective.

    Raises UserError on all ranks alike where it cannot be written.
    """
    about = {**provenance.attributes(stack.world), "status": status}
    stack.world.on_first(lambda: _write_record(path, stack, steps, about), "record")


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

"""python -m cpdhpc autoencoder: the layers of a file, one after the other, and their picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import store
from ...config import ConfigError
from ...world.mpi import World
from ..signals import Caught, Interrupted, catching
from ..train.checkpoint import Files, claimed
from ..train.losses import Diverged
from ..train.progress import Display
from .job import Geometry, load
from .layer import MacroLayer
from .training import Stack, Step, read_steps, resume, save, save_record, set_process

Array = npt.NDArray[Any]
SHOWN = 20  # lines of progress of a layer
MOST = 10  # blocks along an axis that are shown; of more, evenly spaced ones
MOST_MAPS = 64  # filters of a block that are shown: the first


def train(
    world: World,
    path: Path,
    settings: Iterable[str],
    directory: Path,
    resume: bool,
    png: Path | None = None,
) -> Path:
    """Train the layers of a file and return the path of the record. Collective.

    png: for a drawing of the first layer's filters; the others as of train.command.train
    Raises UserError or Interrupted on all ranks.
    """
    job = world.agreed(lambda: load(path, settings))
    own = world.part(range(world.size), timeout_s=job.train.timeout_s)
    assert own is not None, "it contains all processes"
    paths = Files.called(directory, job.name)
    runs = {job.name: (paths.record, paths.checkpoint)}
    with claimed(world, directory, runs, resume), catching() as caught:
        set_process(own, job.train)
        images = world.agreed(job.data.load)
        try:
            stack = Stack(job, own, images)
        except ValueError as error:  # the same on all ranks
            raise ConfigError(f"{path}: {error}") from None
        display = Display(world.process == 0, 1)
        _announce(stack, display)
        steps = _resumed(stack, resume, paths)
        if steps:
            display.line(f"resumed after {len(steps)} iterations, at {_place(stack)}")
        _run(stack, steps, caught, display, paths)
        if png is not None:
            _picture(png, stack, steps)
    return paths.record


def _resumed(stack: Stack, wanted: bool, paths: Files) -> list[Step]:
    """Return the completed iterations. Collective."""
    if not wanted or not resume(paths.checkpoint, stack):
        return []
    found = stack.world.on_first(lambda: read_steps(paths.record), "resume")
    done = stack.layer, stack.iteration
    steps = [step for step in found if (step.layer, step.iteration) < done]
    if len(steps) != stack.layer * stack.job.train.iterations + stack.iteration:
        raise ConfigError(
            f"{paths.record}: has {len(steps)} iterations before {_place(stack)}, "
            f"where {paths.checkpoint.name} stands: it is not of the same run"
        )
    return steps


def _place(stack: Stack) -> str:
    return "the end" if stack.done else f"layer {stack.layer}, iteration {stack.iteration}"


def _announce(stack: Stack, display: Display) -> None:
    for number, layer in enumerate(stack.layers):
        of = layer.geometry
        display.line(
            f"layer {number}: {of.blocks[0]} x {of.blocks[1]} blocks of {of.layer.maps} filters on "
            f"{of.image[0]} x {of.image[1]} x {of.channels}: {of.parameters:,} parameters, "
            f"{of.flop(stack.job.train.batch) / 1e9:.3g} GFLOP an iteration"
        )


def _run(stack: Stack, steps: list[Step], caught: Caught, display: Display, paths: Files) -> None:
    """Train to the end, or to a signal, and write the files. Collective."""
    train = stack.job.train
    if not stack.done:
        display.start(f"layer {stack.layer}", train.iterations, stack.iteration)
    while not stack.done:
        try:
            step = stack.step(stack.batch())
        except Diverged:
            save_record(paths.record, stack, steps, "failed")
            raise
        steps.append(step)
        last = step.iteration + 1 == train.iterations
        _show(step, last, stack, display)
        signal = max(stack.world.gather(caught.number, "signal"))
        if signal or last or stack.iteration % train.checkpoint_every == 0:
            status = "complete" if stack.done else "interrupted" if signal else "running"
            # The record first: after a kill in between it has more than is needed, not less.
            save_record(paths.record, stack, steps, status)
            save(paths.checkpoint, stack)
        if signal and not stack.done:
            display.end(f"stopped at {_place(stack)}: --resume goes on from {paths.checkpoint}")
            raise Interrupted(signal)
        if last:
            display.end(summary(stack, [each for each in steps if each.layer == step.layer]))
            if not stack.done:
                display.start(f"layer {stack.layer}", train.iterations, 0)


def _show(step: Step, last: bool, stack: Stack, display: Display) -> None:
    every = max(1, stack.job.train.iterations // SHOWN)
    error = f"error {step.error / step.energy:.4f}"
    display.step(note=error)
    if not display.has_bar and (step.iteration % every == 0 or last):
        display.line(
            f"layer {step.layer}, iteration {step.iteration}: loss {step.loss:.6g}, "
            f"{error} of the input's energy, "
            f"{1e3 * step.time_s:.1f} ms, {1e3 * step.exchange_s:.1f} ms in exchanges"
        )


def summary(stack: Stack, steps: list[Step]) -> str:
    """Return a line about the training of a layer and the times of its iterations."""
    number, first, last = steps[-1].layer, steps[0], steps[-1]
    time_s, exchange_s = (
        median(getattr(step, name) for step in steps) for name in ("time_s", "exchange_s")
    )
    ranks = stack.world.ranks
    flop = stack.layers[number].geometry.flop(stack.job.train.batch)
    return (
        f"layer {number} on {ranks} rank{'s' * (ranks > 1)}: error "
        f"{first.error / first.energy:.4f} -> {last.error / last.energy:.4f}; "
        f"median iteration {1e3 * time_s:.1f} ms, "
        f"{exchange_s / time_s:.0%} of it in exchanges, {flop / time_s / 1e9:.3g} GFLOP/s, "
        f"{last.sent_bytes / 1024:,.1f} KiB sent by the rank that sends most"
    )


def _picture(path: Path, stack: Stack, steps: list[Step]) -> None:
    """Draw the first layer's filters. Collective."""
    layer = stack.layers[0]
    weight = shown(layer)
    of_layer = [step for step in steps if step.layer == 0]
    stack.world.on_first(lambda: draw(path, weight, layer.geometry, of_layer), "picture")


def shown(layer: MacroLayer) -> Array:
    """Return the filters that a picture shows, on all ranks. Collective.

    [rows of blocks, columns, maps, inputs]; few, for any size of the layer
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

    weight: the result of shown
    Raises StoreError if it cannot be written.
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
    store.put_figure(path, figure, 110)


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

    [height, width], or [height, width, 3] if there are three channels
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

    [height, width, 3] for three channels; for other numbers the root of the squares is shown.
    """
    if image.shape[2] != 3:
        image = image[..., 0] if image.shape[2] == 1 else np.linalg.norm(image, axis=2)
    peak = max(float(np.abs(image).max()), 1e-30)
    return np.asarray(0.5 + image / (2 * peak))


def _some(n: int) -> list[int]:
    return np.linspace(0, n - 1, min(n, MOST)).round().astype(int).tolist()

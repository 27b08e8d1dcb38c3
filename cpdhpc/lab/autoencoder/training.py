"""Greedy training: each layer by gradient descent on the output of the layers before it.

Its files: the record of iterations, and checkpoints that any number of ranks can load.
"""

from __future__ import annotations

import ctypes
import time
from io import BufferedReader
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ... import store
from ...darray.array import read_all, save_all
from ...darray.layout import Layout
from ...ops.tensors import listed
from ...store import Variable
from ...world.files import opened
from ...world.ranks import Ranks
from .. import provenance
from ..train.checkpoint import CheckpointError, check_same
from ..train.losses import Diverged
from ..train.setup import own_device, own_threads
from .descent import Descent
from .job import MAY_DIFFER, Autoencoder, Images, Train, procs_of, stack
from .layer import MacroLayer

Array = npt.NDArray[Any]
Tensor = torch.Tensor
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of glibc's mallopt, malloc.h
NEVER = 2**31 - 1  # free bytes at the end of the heap before malloc returns them


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory of any size; return whether it does, which needs glibc.

    Otherwise every array above 32 MiB is pages that the kernel clears anew: batches, and outputs
    of lower layers for the one that is trained.
    For the whole process and to its end; all threads.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, NEVER))


def set_process(world: Ranks, train: Train) -> None:
    """Set torch's threads and the handling of freed memory for this process, to its end."""
    own_threads(world, train.threads)
    if train.keep_memory:
        keep_freed_memory()


class Step(NamedTuple):
    """The results of an iteration, the same on all ranks; times are those of the slowest rank.

    error, sparsity, energy: as in Terms, of the images; sent_bytes: of the rank that sent most
    """

    layer: int
    iteration: int
    loss: float
    error: float
    sparsity: float
    energy: float
    time_s: float
    exchange_s: float
    sent_bytes: int


class Stack:
    """The layers of a job on a world, and the position of training. Collective.

    layer, iteration: the next one to be done
    Raises UserError or ValueError on all ranks if the job does not suit the images, or a rank has
    no GPU for it.
    """

    def __init__(self, job: Autoencoder, world: Ranks, images: Images) -> None:
        self.job, self.world, self.images = job, world, images
        train = job.train
        cell_procs = procs_of(train.cell_procs, world.ranks, "cell_procs")
        procs = procs_of(train.block_procs, world.ranks, "block_procs")
        geometries = stack(job.layer, images.shape, images.channels)
        self.cells = cells = Layout.grid(images.shape, cell_procs)
        self.dtype: torch.dtype = getattr(torch, train.dtype)
        self.device = own_device(world, train.device, oversubscribe=train.oversubscribe_gpus)
        self.layers: list[MacroLayer] = []
        for number, geometry in enumerate(geometries):
            self.layers.append(
                MacroLayer(
                    world,
                    geometry,
                    cells,
                    procs,
                    seed=train.seed,
                    number=number,
                    dtype=self.dtype,
                    device=self.device,
                )
            )
            cells = self.layers[-1].pools
        self.descent: Descent | None = None
        self.layer = self.iteration = 0

    @property
    def done(self) -> bool:
        """Whether all layers are trained."""
        return self.layer == len(self.layers)

    def begun(self, layer: int) -> bool:
        """Whether a layer has had an iteration."""
        return (self.layer, self.iteration) > (layer, 0)

    def batch(self) -> Tensor:
        """Return the next iteration's images, the part that this rank owns."""
        number = self.layer * self.job.train.iterations + self.iteration
        return self.own(self.images.batch(self.job.train.batch, self.job.train.seed, number))

    def own(self, whole: Array) -> Tensor:
        """Return the cells that this rank owns of images [height, width, channels, n]."""
        box = self.cells.owner(self.world.rank)
        return torch.from_numpy(whole[box.slices((0, 0))].copy()).to(self.device, self.dtype)

    @torch.no_grad()
    def features(self, x: Tensor, layers: int) -> Tensor:
        """Return the output of so many layers for images. Collective."""
        for each in self.layers[:layers]:
            x = each(x)
        return x

    def step(self, x: Tensor) -> Step:
        """Do the next iteration on a batch. Collective.

        x: the result of batch
        Raises Diverged on all ranks if the objective is not finite.
        """
        layer, train = self.layers[self.layer], self.job.train
        x = self.features(x, self.layer)
        if self.descent is None or self.descent.layer is not layer:
            self.descent = Descent(layer, x.shape[-1])
        layer.clock.take()
        began_s = time.perf_counter()
        terms = self.descent.step(x, train.learning_rate, train.momentum)
        told = listed(torch.stack(terms))  # waits for a GPU, whose work is part of the time
        spent_s = time.perf_counter() - began_s
        done = self._agreed(told, spent_s, *layer.clock.take())
        self.iteration += 1
        if self.iteration == self.job.train.iterations:
            self.layer, self.iteration = self.layer + 1, 0
        return done

    def _agreed(
        self, terms: list[float], spent_s: float, exchange_s: float, sent_bytes: int
    ) -> Step:
        """Return the sums over ranks, in their order, and the slowest rank's times. Collective."""
        mine = terms, (spent_s, exchange_s, sent_bytes)
        everyone = self.world.gather(mine, "iteration")
        if not all(np.isfinite(values).all() for values, _ in everyone):
            bad = [r for r, (values, _) in enumerate(everyone) if not np.isfinite(values).all()]
            raise Diverged(
                f"layer {self.layer}, iteration {self.iteration}: the objective is not finite on "
                f"ranks {bad}: train.learning_rate={self.job.train.learning_rate} may be too large"
            )
        sums = [fsum(column) for column in zip(*(values for values, _ in everyone), strict=True)]
        time_s, exchange_s, sent = (
            max(column) for column in zip(*(spent for _, spent in everyone), strict=True)
        )
        loss, error, sparsity, energy = sums
        here = self.layer, self.iteration
        return Step(*here, loss, error, sparsity, energy, time_s, exchange_s, sent)


SCHEMA = 1
COLUMNS = {  # of a Step: description, units
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

    Raises UserError on all ranks if it cannot be written.
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
    """Return the data for resuming a layer's training; momentum once it has begun."""
    weight = stack.layers[number].weight
    if not (stack.begun(number) and stack.job.train.momentum):
        return {"weight": weight}
    return {"weight": weight, "momentum": stack.layers[number].momentum}


def resume(path: Path, stack: Stack) -> bool:
    """Load a checkpoint, made by any number of ranks; False if there is none. Collective.

    Raises CheckpointError or StoreError on all ranks.
    """
    world = stack.world
    if not world.on_first(path.exists, "resume"):
        return False
    with opened(world, path) as (file, _):
        toml = stack.job.toml()
        stack.layer, stack.iteration = world.on_first(lambda: _position(path, file, toml))
        states = {
            f"layer{number}/{name}": (layer.blocks, values)
            for number, layer in enumerate(stack.layers)
            for name, values in _state(stack, number).items()
        }
        found = read_all(world, file, {name: blocks for name, (blocks, _) in states.items()})
    for name, (_, values) in states.items():
        values.copy_(torch.from_numpy(found[name]).flatten(0, 1))
    return True


def _position(path: Path, file: BufferedReader, toml: str) -> tuple[int, int]:
    """Return layer and iteration. Raises CheckpointError if the file is another job's."""
    attributes, _ = store.contents(file)
    if attributes.get("kind") != "autoencoder checkpoint":
        raise CheckpointError(f"{path}: is not a checkpoint of an autoencoder")
    check_same(path, str(attributes["toml"]), toml, MAY_DIFFER)
    return attributes["layer"], attributes["iteration"]


def save_record(path: Path, stack: Stack, steps: list[Step], status: str) -> None:
    """Write the record from rank 0. Collective.

    Raises UserError on all ranks if it cannot be written.
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
    """Return the iterations of a record. Raises StoreError if it is not a record."""
    groups, _ = store.read(path)
    columns = (groups["steps"][name].tolist() for name in COLUMNS)
    return [Step(*row) for row in zip(*columns, strict=True)]

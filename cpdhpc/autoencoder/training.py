"""Greedy training: each layer by gradient descent on what the layers before it give."""

from __future__ import annotations

import time
from math import fsum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..config import UserError
from ..darray.layout import Layout
from ..ops.tensors import listed
from ..train.device import own_device
from ..world.ranks import Ranks
from .job import Autoencoder, Images, procs_of, stack
from .layer import MacroLayer

Array = npt.NDArray[Any]
Tensor = torch.Tensor


class Step(NamedTuple):
    """What an iteration was, the same on all ranks; times are those of the slowest rank.

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
    """The layers of a job on a world, and where training stands. Collective.

    layer, iteration: the next one to be done
    Raises UserError or ValueError on all ranks alike where the job does not go with the images, or
    one has no GPU for it.
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
        self.optimizers = [
            torch.optim.SGD(
                each.parameters(), lr=train.learning_rate, momentum=train.momentum, fused=True
            )
            for each in self.layers
        ]
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
        """Return what so many layers make of images. Collective."""
        for each in self.layers[:layers]:
            x = each(x)
        return x

    def step(self, x: Tensor) -> Step:
        """Do the next iteration on a batch. Collective.

        x: what batch returned
        Raises Diverged on all ranks alike where the objective is not finite.
        """
        layer, optimizer = self.layers[self.layer], self.optimizers[self.layer]
        x = self.features(x, self.layer)
        layer.clock.take()
        began_s = time.perf_counter()
        optimizer.zero_grad()
        terms, _ = layer.objective(x)
        terms.loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        layer.normalise_rows()
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


class Diverged(UserError):
    """The objective is not finite any more."""

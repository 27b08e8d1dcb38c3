"""Iterations of a layer: its objective, its gradient and the step, a few blocks at a time.

A first pass over the blocks computes responses and the reconstruction, a second one the gradient,
which is added directly to the momentum and the filters. So a pass reads filters once, and there is
no array of gradients. Messages travel during the products of blocks that do not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...darray.layout import Box, whole
from ...darray.plan import WindowPlan
from .blocks import most_bytes
from .layer import MacroLayer, TimedHandle
from .memory import in_large_pages
from .passes import COLUMNS, Views, order_of, parts_of
from .pools import pools_of, subtract

Tensor = torch.Tensor
Pair = tuple[int, int]


class Terms(NamedTuple):
    """This rank's part of the objective; the sum over ranks is that of the images.

    error: of the reconstruction, squares; sparsity: sum of the pooled responses, not yet weighted
    energy: squares of the input; all are means over the batch
    """

    loss: Tensor
    error: Tensor
    sparsity: Tensor
    energy: Tensor


class Windowed:
    """Values on a plan's window; own: those of the cells that this rank owns, a view if possible.

    trail: further axes; order: of all axes in memory
    """

    def __init__(
        self, plan: WindowPlan, trail: Pair, like: Tensor, order: Sequence[int] = COLUMNS
    ) -> None:
        def make(shape: tuple[int, ...]) -> Tensor:
            return in_large_pages(like.new_empty([shape[axis] for axis in order])).permute(
                [order.index(axis) for axis in range(len(order))]
            )

        self.window = make(plan.window.shape + trail)
        inside = plan.window.contains(plan.owned)
        self.own = plan.inside(self.window) if inside else make(plan.owned.shape + trail)


def early_and_late(
    plan: WindowPlan, counts: tuple[int, int], size: int, step: int
) -> tuple[list[Box], list[Box]]:
    """Return boxes of a window's outputs, counted from its first: those without messages first."""
    inner, window = plan.interior, plan.window
    starts = (-((a - b) // -step) for a, b in zip(inner.start, window.start, strict=True))
    stops = ((a - b - size) // step + 1 for a, b in zip(inner.stop, window.start, strict=True))
    early = Box(tuple(starts), tuple(stops)).intersect(whole(counts))
    return [] if early.empty else [early], list(whole(counts).without(early))


class Descent:
    """The iterations of a layer on batches of one size. Its arrays are made once. Collective."""

    def __init__(self, layer: MacroLayer, batch: int) -> None:
        of, weight = layer.geometry, layer.weight
        self.layer, self.batch = layer, batch
        self.fields, self.pools = layer.plans["fields"], layer.plans["pools"]
        cells, responses, order = (of.channels, batch), (of.layer.maps, batch), order_of(weight)
        self.x, self.again = (Windowed(self.fields, cells, weight, order) for _ in range(2))
        self.responses, self.slopes = (Windowed(self.pools, responses, weight) for _ in range(2))
        views = Views(
            *(weight, layer.momentum, self.x.window, self.again.window),
            *(self.responses.own, self.slopes.own),
        )
        counts, size, step = layer.own_blocks, of.layer.field, of.layer.step
        boxes = early_and_late(self.fields, counts, size, step)
        self.parts = parts_of(layer.filters, views, boxes, batch)
        most = most_bytes(weight) // (2 * of.layer.maps * batch * weight.element_size())
        near = early_and_late(self.pools, layer.own_pools, of.layer.pool, of.layer.pool_step)
        small = [[part for box in some for part in box.parts(most)] for some in near]
        given = of.layer, self.responses.window, self.slopes.window, of.layer.sparsity / batch
        self.pool_parts = [pools_of(*given, some) for some in small]

    def objective(self, x: Tensor) -> tuple[Terms, Tensor]:
        """Return this rank's terms, and its pooled responses. Collective.

        x: float[owned cells, channels, batch]
        sum over images of |scale W^T W x - x|^2 + sparsity sum_j sqrt(epsilon + V_j (W x)^2)
        """
        pooled = x.new_empty((*self.layer.own_pools, self.layer.geometry.layer.maps, self.batch))
        sparsity, again = self._forward(x, pooled)
        again.finish()
        return self._terms(sparsity), pooled

    def step(self, x: Tensor, rate: float, momentum: float) -> Terms:
        """Return the terms of a batch, and move the filters against their gradient. Collective.

        The momentum is multiplied by a factor, and the gradient added; filters move by the rate
        times the momentum, and are normalised to length 1.
        """
        self.slopes.window.zero_()
        sparsity, again = self._forward(x, None)
        slopes = self.pools.begin_accumulate(self.slopes.window, self.slopes.own)
        again.finish()
        terms = self._terms(sparsity)
        differences = self.fields.begin(self.again.own, self.again.window)
        slopes.finish()
        alpha = 2 * self.layer.geometry.scale**2 / self.batch
        for part in self.parts[0]:
            part.descend(rate, momentum, alpha)
            differences.progress()
        differences.finish()
        for part in self.parts[1]:
            part.descend(rate, momentum, alpha)
        return terms

    def _forward(self, x: Tensor, pooled: Tensor | None) -> tuple[Tensor, TimedHandle]:
        """Return the sum of the pooled responses, and the reconstruction's sum in progress.

        pooled: is filled; if it is None, the slopes are, to which pools are added
        """
        self.x.own.copy_(x)
        cells = self.fields.begin(self.x.own, self.x.window)
        self.again.window.zero_()
        for part in self.parts[0]:
            part.reconstruct()
            cells.progress()
        cells.finish()
        for part in self.parts[1]:
            part.reconstruct()
        again = self.fields.begin_accumulate(self.again.window, self.again.own)
        responses = self.pools.begin(self.responses.own, self.responses.window)
        sums = [x.new_zeros(())]
        for pools in self.pool_parts[0]:
            sums.append(pools.pool(pooled))
            responses.progress()
        responses.finish()
        for pools in self.pool_parts[1]:
            sums.append(pools.pool(pooled))
            again.progress()
        return torch.stack(sums).sum(), again

    def _terms(self, sparsity: Tensor) -> Terms:
        """Return the terms; x / scale is subtracted from the overlaid reconstruction."""
        of = self.layer.geometry
        error, energy = subtract(self.again.own, self.x.own, 1 / of.scale)
        error, sparsity = error * (of.scale**2 / self.batch), sparsity / self.batch
        loss = error + of.layer.sparsity * sparsity
        return Terms(loss, error, sparsity, energy / self.batch)

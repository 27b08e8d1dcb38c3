"""Iterations of a layer: its objective, its gradient and the step, a few blocks at a time.

A first round over the blocks makes responses and the reconstruction, a second one the gradient,
which goes straight into the momentum and the filters. So a round reads filters once, and there is
no array of gradients. Messages travel during the products of blocks that do not wait for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...darray.layout import Box, whole
from ...darray.plan import Handle, WindowPlan
from .blocks import add_fields, fields_of, most_bytes, shaped
from .layer import MacroLayer

Tensor = torch.Tensor
COPIES = 2  # of weights and of fields in a part of the second round


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
    """Values on a plan's window; own: those of the cells that this rank owns, a part if can be."""

    def __init__(self, plan: WindowPlan, trail: tuple[int, ...], like: Tensor) -> None:
        self.window: Tensor = like.new_empty(plan.window.shape + trail)
        has = plan.window.contains(plan.owned)
        self.own: Tensor = (
            plan.inside(self.window) if has else like.new_empty(plan.owned.shape + trail)
        )


def outputs_of(inputs: Box, window: Box, size: int, step: int, counts: tuple[int, int]) -> Box:
    """Return those of a window's outputs, counted from its first, that need these inputs alone."""
    starts = [-((a - b) // -step) for a, b in zip(inputs.start, window.start, strict=True)]
    stops = [(a - b - size) // step + 1 for a, b in zip(inputs.stop, window.start, strict=True)]
    return Box(tuple(starts), tuple(stops)).intersect(whole(counts))


def early_and_late(
    plan: WindowPlan, counts: tuple[int, int], size: int, step: int
) -> list[list[Box]]:
    """Return boxes of the outputs that need no message, and of those that do."""
    early = outputs_of(plan.interior, plan.window, size, step, counts)
    return [[] if early.empty else [early], list(whole(counts).without(early))]


class Descent:
    """The iterations of a layer on batches of one size. Its arrays are made once. Collective."""

    def __init__(self, layer: MacroLayer, batch: int) -> None:
        of, weight, plans = layer.geometry, layer.weight, layer.plans
        self.layer, self.batch = layer, batch
        fields, pools = plans["fields"], plans["pools"]
        cells, responses = (of.channels, batch), (of.layer.maps, batch)
        self.x = Windowed(fields, cells, weight).window
        self.again = Windowed(fields, cells, weight)
        self.responses, self.slopes = (Windowed(pools, responses, weight) for _ in range(2))
        own = early_and_late(fields, layer.own_blocks, of.layer.field, of.layer.step)
        self.parts = [layer.filters.parts(boxes, batch, COPIES) for boxes in own]
        self.scratch = [layer.filters.scratch(sum(self.parts, []), batch) for _ in range(2)]
        near = early_and_late(pools, layer.own_pools, of.layer.pool, of.layer.pool_step)
        most = most_bytes(weight) // (4 * of.layer.maps * batch * weight.element_size())
        self.pool_parts = [[part for box in boxes for part in box.parts(most)] for boxes in near]

    def objective(self, x: Tensor) -> tuple[Terms, Tensor]:
        """Return this rank's terms, and its pooled responses. Collective.

        x: float[owned cells, channels, batch]
        sum over images of |scale W^T W x - x|^2 + sparsity sum_j sqrt(epsilon + V_j (W x)^2)
        """
        pooled = x.new_empty((*self.layer.own_pools, self.layer.geometry.layer.maps, self.batch))
        sparsity, again = self._forward(x, pooled)
        again.finish()
        return self._terms(x, sparsity), pooled

    def step(self, x: Tensor, rate: float, momentum: float) -> Terms:
        """Return the terms of a batch, and move the filters against their gradient. Collective.

        The momentum becomes itself times a factor, plus the gradient; filters move by the rate
        times that, and get length 1.
        """
        self.slopes.window.zero_()
        sparsity, again = self._forward(x, None)
        plans = self.layer.plans
        slopes = plans["pools"].begin_accumulate(self.slopes.window, self.slopes.own)
        again.finish()
        terms = self._terms(x, sparsity)
        differences = plans["fields"].begin(self.again.own, self.again.window)
        slopes.finish()
        early, late = self.parts
        for part in early:
            self._descend(part, rate, momentum)
            differences.progress()
        differences.finish()
        for part in late:
            self._descend(part, rate, momentum)
        return terms

    def _forward(self, x: Tensor, pooled: Tensor | None) -> tuple[Tensor, Handle]:
        """Return the sum of the pooled responses, and the reconstruction's sum under way.

        pooled: is filled; where there is none the slopes are, to which pools are added
        """
        plans = self.layer.plans
        cells = plans["fields"].begin(x, self.x)
        self.again.window.zero_()
        self._each(self.parts[0], self._reconstruct, [cells])
        cells.finish()
        self._each(self.parts[1], self._reconstruct, [])
        again = plans["fields"].begin_accumulate(self.again.window, self.again.own)
        responses = plans["pools"].begin(self.responses.own, self.responses.window)
        sums = []
        for part in self.pool_parts[0]:
            sums.append(self._pool(part, pooled))
            responses.progress()
        responses.finish()
        for part in self.pool_parts[1]:
            sums.append(self._pool(part, pooled))
            again.progress()
        return torch.stack(sums).sum() if sums else x.new_zeros(()), again

    def _each(self, parts, work, handles) -> None:
        for part in parts:
            work(part)
            for handle in handles:
                handle.progress()

    def _reconstruct(self, part: Box) -> None:
        """Make the responses of some blocks, and add what their filters make of these."""
        filters, n, here = self.layer.filters, part.size, part.slices((0, 0))
        (fields, responses), weight = self.scratch[0], filters.chosen(part, filters.weight)
        given = fields_of(self.x, filters.geometry)[here]
        again = fields_of(self.again.window, filters.geometry)[here]
        shaped(fields, given).copy_(given)
        torch.bmm(weight, fields[:n], out=responses[:n])
        torch.bmm(weight.mT, responses[:n], out=fields[:n])
        own = self.responses.own[here]
        own.copy_(shaped(responses, own))
        add_fields(again, shaped(fields, again), filters.geometry)

    def _pool(self, part: Box, pooled: Tensor | None) -> Tensor:
        """Return the sum of some pools; write them, or add what slopes have from them.

        The slope of the pools' sum with respect to a response is that response times the sum of
        1 / pooled over its pools: here the latter.
        """
        layer = self.layer.geometry.layer
        size, step, (rows, columns) = layer.pool, layer.pool_step, part.shape
        (top, left), trail = part.start, self.responses.window.shape[2:]
        across = slice(left * step, (left + columns - 1) * step + size)
        down = [
            (slice(k, k + (rows - 1) * step + 1, step), across)
            for k in range(top * step, top * step + size)
        ]
        along = [slice(k, k + (columns - 1) * step + 1, step) for k in range(size)]
        sums = self.responses.window[down[0]].square()
        for each in down[1:]:
            sums.addcmul_(self.responses.window[each], self.responses.window[each])
        here = (
            sums.new_empty((rows, columns, *trail))
            if pooled is None
            else pooled[part.slices((0, 0))]
        )
        here.copy_(sums[:, along[0]])
        for each in along[1:]:
            here.add_(sums[:, each])
        here.add_(layer.epsilon).sqrt_()
        total = here.sum()
        if pooled is None:
            here.reciprocal_()
            sums.zero_()
            for each in along:
                sums[:, each].add_(here)
            for each in down:
                self.slopes.window[each].add_(sums)
        return total

    def _terms(self, x: Tensor, sparsity: Tensor) -> Terms:
        """Return the terms; the overlaid reconstruction becomes it less x / scale."""
        of = self.layer.geometry
        errors, energies = [], []
        for again, given in zip(self.again.own, x, strict=True):
            again.sub_(given, alpha=1 / of.scale)
            errors.append(again.square().sum())
            energies.append(given.square().sum())
        error, energy = (
            torch.stack(each).sum() / self.batch if each else x.new_zeros(())
            for each in (errors, energies)
        )
        error = error * of.scale**2
        sparsity = sparsity / self.batch
        return Terms(error + of.layer.sparsity * sparsity, error, sparsity, energy)

    def _descend(self, part: Box, rate: float, momentum: float) -> None:
        """Move the filters of some blocks.

        With responses r = W x and the reconstruction's slope g in a field, W's is r g^T + s x^T for
        s = W g + the pools' slope. Of that what turns a filter w of length 1 is the rest without
        its part along w, w . (r g^T + s x^T) = r . (W g + s).
        """
        of, filters, n, here = (
            self.layer.geometry,
            self.layer.filters,
            part.size,
            part.slices((0, 0)),
        )
        (x, responses), (g, s) = self.scratch
        weight = filters.chosen(part, filters.weight)
        moving = filters.chosen(part, self.layer.momentum)
        for window, into in ((self.x, x), (self.again.window, g)):
            given = fields_of(window, of)[here]
            shaped(into, given).copy_(given)
        own = self.responses.own[here]
        shaped(responses, own).copy_(own)
        responses, x, g, s = responses[:n], x[:n], g[:n], s[:n]
        pools = torch.mul(own, self.slopes.own[here]).flatten(0, 1)
        pools.mul_(of.layer.sparsity / self.batch)
        alpha = 2 * of.scale**2 / self.batch
        torch.baddbmm(pools, weight, g, alpha=alpha, out=s)
        moving.baddbmm_(responses, g.mT, beta=momentum, alpha=alpha)
        moving.baddbmm_(s, x.mT)
        along = pools.sub_(s, alpha=2).mul_(responses).sum(2, keepdim=True)  # with the other sign
        moving.addcmul_(weight, along)
        weight.sub_(moving, alpha=rate)
        weight.div_(torch.linalg.vector_norm(weight, dim=2, keepdim=True))

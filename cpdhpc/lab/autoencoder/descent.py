"""Iterations of a layer: its objective, its gradient and the step, a few blocks at a time.

A first pass over the blocks computes responses and the reconstruction, a second one the gradient,
which is added directly to the momentum and the filters. So a pass reads filters once, and there is
no array of gradients. Messages travel during the products of blocks that do not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from ...darray.layout import Box, whole
from ...darray.plan import WindowPlan
from .blocks import fields_of, most_bytes, operands, overlaps
from .layer import MacroLayer, TimedHandle

Tensor = torch.Tensor
COPIES = 2  # of weights and of fields in a part of the second pass
FEW = 16  # images of a batch, below which they are rows of a block's matrices


class Terms(NamedTuple):
    """This rank's part of the objective; the sum over ranks is that of the images.

    error: of the reconstruction, squares; sparsity: sum of the pooled responses, not yet weighted
    energy: squares of the input; all are means over the batch
    """

    loss: Tensor
    error: Tensor
    sparsity: Tensor
    energy: Tensor


def laid(memory: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return the first values of memory as an array with this order of axes."""
    cut = memory[: prod(shape)].view([shape[axis] for axis in order])
    return cut.permute([order.index(axis) for axis in range(len(order))])


class Windowed:
    """Values on a plan's window; own: those of the cells that this rank owns, a view if possible.

    trail: further axes; order: of all axes in memory
    """

    def __init__(
        self, plan: WindowPlan, trail: tuple[int, ...], like: Tensor, order: Sequence[int]
    ) -> None:
        def make(shape: tuple[int, ...]) -> Tensor:
            return laid(like.new_empty(prod(shape)), shape, order)

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


class Part(NamedTuple):
    """Views of the data of some blocks, made once. For two products the operands, see operands.

    x, again: their fields; overlaps: pairs of fields and the values to be added to them
    responses, slopes: their own; the others are scratch memory, twice in two shapes
    """

    weight: Tensor
    moving: Tensor
    x: Tensor
    again: Tensor
    responses: Tensor
    slopes: Tensor
    overlaps: list[tuple[Tensor, Tensor]]
    fields: tuple[Tensor, Tensor]
    errors: tuple[Tensor, Tensor]
    here: tuple[Tensor, Tensor]
    pools: tuple[Tensor, Tensor]
    back: Tensor
    respond: tuple[Tensor, Tensor, Tensor]
    reconstruct: tuple[Tensor, Tensor, Tensor]
    return_: tuple[Tensor, Tensor, Tensor]


class Descent:
    """The iterations of a layer on batches of one size. Its arrays are made once. Collective."""

    def __init__(self, layer: MacroLayer, batch: int) -> None:
        of, weight, columns = layer.geometry, layer.weight, batch >= FEW
        self.layer, self.batch = layer, batch
        self.fields, self.pools = layer.plans["fields"], layer.plans["pools"]
        cells, responses = (of.channels, batch), (of.layer.maps, batch)
        # In both orders of axes, a row of a field is contiguous, for all images or for one.
        order = (0, 1, 2, 3) if columns else (0, 3, 1, 2)
        self.order = (0, 1, 2, 3) if columns else (0, 1, 3, 2)
        self.x, self.again = (Windowed(self.fields, cells, weight, order) for _ in range(2))
        self.responses, self.slopes = (
            Windowed(self.pools, responses, weight, self.order) for _ in range(2)
        )
        boxes = [
            layer.filters.parts(some, batch, COPIES)
            for some in early_and_late(self.fields, layer.own_blocks, of.layer.field, of.layer.step)
        ]
        every = [box for some in boxes for box in some]
        self.scratch = [layer.filters.scratch(every, batch, columns) for _ in range(2)]
        self.back = layer.filters.scratch(every, batch, columns)[1]
        self.parts = [[self._part(box) for box in some] for some in boxes]
        most = most_bytes(weight) // (2 * of.layer.maps * batch * weight.element_size())
        near = early_and_late(self.pools, layer.own_pools, of.layer.pool, of.layer.pool_step)
        self.pool_parts = [[part for box in some for part in box.parts(most)] for some in near]
        shapes = [self._of_pools(box) for some in self.pool_parts for box in some]
        self.pool_scratch = [
            weight.new_empty(max(map(prod, some), default=0)) for some in zip(*shapes, strict=True)
        ]

    def _part(self, box: Box) -> Part:
        filters, at = self.layer.filters, box.slices((0, 0))
        weight = filters.chosen(box, filters.weight)
        x, again = (fields_of(of.window, filters.geometry)[at] for of in (self.x, self.again))
        responses, slopes = self.responses.own[at], self.slopes.own[at]
        (of_fields, of_responses), (of_errors, of_pools) = self.scratch
        fields, errors = of_fields.of(x), of_errors.of(again)
        here, pools = of_responses.or_in_place(responses), of_pools.or_in_place(slopes)
        back = self.back.of(slopes)[0]
        return Part(
            weight, filters.chosen(box, self.layer.momentum), x, again, responses, slopes,
            overlaps(again, fields[1], filters.geometry), fields, errors, here, pools, back,
            operands(weight, fields[0], here[0]),
            operands(weight.mT, here[0], fields[0]),
            operands(weight, errors[0], back),
        )  # fmt: skip

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
        for part in self.parts[0]:
            self._descend(part, rate, momentum)
            differences.progress()
        differences.finish()
        for part in self.parts[1]:
            self._descend(part, rate, momentum)
        return terms

    def _forward(self, x: Tensor, pooled: Tensor | None) -> tuple[Tensor, TimedHandle]:
        """Return the sum of the pooled responses, and the reconstruction's sum in progress.

        pooled: is filled; if it is None, the slopes are, to which pools are added
        """
        self.x.own.copy_(x)
        cells = self.fields.begin(self.x.own, self.x.window)
        self.again.window.zero_()
        for part in self.parts[0]:
            self._reconstruct(part)
            cells.progress()
        cells.finish()
        for part in self.parts[1]:
            self._reconstruct(part)
        again = self.fields.begin_accumulate(self.again.window, self.again.own)
        responses = self.pools.begin(self.responses.own, self.responses.window)
        sums = [x.new_zeros(())]
        for box in self.pool_parts[0]:
            sums.append(self._pool(box, pooled))
            responses.progress()
        responses.finish()
        for box in self.pool_parts[1]:
            sums.append(self._pool(box, pooled))
            again.progress()
        return torch.stack(sums).sum(), again

    def _reconstruct(self, part: Part) -> None:
        """Compute the responses of some blocks, and add their filters' outputs for them."""
        part.fields[1].copy_(part.x)
        *given, out = part.respond
        torch.bmm(*given, out=out)
        part.responses.copy_(part.here[1])
        *given, out = part.reconstruct
        torch.bmm(*given, out=out)
        for to, values in part.overlaps:
            to.add_(values)

    def _of_pools(self, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of some pools' sums along the first axis, and of the pools."""
        layer, (rows, columns) = self.layer.geometry.layer, box.shape
        trail = layer.maps, self.batch
        return (rows, (columns - 1) * layer.pool_step + layer.pool, *trail), (rows, columns, *trail)

    def _pool(self, box: Box, pooled: Tensor | None) -> Tensor:
        """Return the sum of some pools; write them, or add their part to slopes.

        The sparsity term's slope with respect to a response is that response times the sum of
        sparsity / batch / pooled over its pools: here the latter.
        """
        layer, (rows, columns) = self.layer.geometry.layer, box.shape
        size, step = layer.pool, layer.pool_step
        top, left = (first * step for first in box.start)
        across = slice(left, left + (columns - 1) * step + size)
        down = [(slice(k, k + (rows - 1) * step + 1, step), across) for k in range(top, top + size)]
        along = [slice(k, k + (columns - 1) * step + 1, step) for k in range(size)]
        sums, here = (
            laid(memory, shape, self.order)
            for memory, shape in zip(self.pool_scratch, self._of_pools(box), strict=True)
        )
        torch.square(self.responses.window[down[0]], out=sums)
        for each in down[1:]:
            sums.addcmul_(self.responses.window[each], self.responses.window[each])
        here.copy_(sums[:, along[0]])
        for some in along[1:]:
            here.add_(sums[:, some])
        here.add_(layer.epsilon).sqrt_()
        total = here.sum()
        if pooled is not None:
            pooled[box.slices((0, 0))] = here
            return total
        here.reciprocal_().mul_(layer.sparsity / self.batch)
        sums.zero_()
        for some in along:
            sums[:, some].add_(here)
        for each in down:
            self.slopes.window[each].add_(sums)
        return total

    def _terms(self, sparsity: Tensor) -> Terms:
        """Return the terms; x / scale is subtracted from the overlaid reconstruction."""
        of = self.layer.geometry
        error, energy = sparsity.new_zeros(()), sparsity.new_zeros(())
        rows = max(1, most_bytes(sparsity) // (self.x.own[:1].nbytes or 1))
        for again, given in zip(self.again.own.split(rows), self.x.own.split(rows), strict=True):
            again.sub_(given, alpha=1 / of.scale)
            error += again.square().sum()
            energy += given.square().sum()
        error, sparsity = error * (of.scale**2 / self.batch), sparsity / self.batch
        loss = error + of.layer.sparsity * sparsity
        return Terms(loss, error, sparsity, energy / self.batch)

    def _descend(self, part: Part, rate: float, momentum: float) -> None:
        """Move the filters of some blocks.

        With responses r = W x and the reconstruction's slope g in a field, the gradient of W is
        r g^T + s x^T for s = W g + the pools' slope. For filters w of length 1 its part along w,
        w . (r g^T + s x^T) = r . (W g + s), is subtracted.
        """
        of = self.layer.geometry
        (x, x_shaped), (g, g_shaped), (r, r_shaped) = part.fields, part.errors, part.here
        pools, s = part.pools[0], part.back
        x_shaped.copy_(part.x)
        g_shaped.copy_(part.again)
        r_shaped.copy_(part.responses)
        torch.mul(part.slopes, r_shaped, out=part.pools[1])
        alpha = 2 * of.scale**2 / self.batch
        left, right, out = part.return_
        turned = pools if out is s else pools.mT
        torch.baddbmm(turned, left, right, alpha=alpha, out=out)
        part.moving.baddbmm_(r, g.mT, beta=momentum, alpha=alpha)
        part.moving.baddbmm_(s, x.mT)
        along = pools.sub_(s, alpha=2).mul_(r).sum(2, keepdim=True)  # with the opposite sign
        part.moving.addcmul_(part.weight, along)
        part.weight.sub_(part.moving, alpha=rate)
        part.weight.div_(torch.linalg.vector_norm(part.weight, dim=2, keepdim=True))

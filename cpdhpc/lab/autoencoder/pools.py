"""What happens between the passes over the blocks: pools of responses, and the reconstruction less
the image; compiled for a CPU, else by torch.
"""

from __future__ import annotations

from math import prod

import torch

from ... import _cpu
from ...darray.layout import Box
from ...ops.tensors import array_of
from . import passes
from .blocks import most_bytes
from .job import Layer

Tensor = torch.Tensor


class CompiledPools:
    """Some pools, with the loops of kernels/cpu_pools.h, on torch's number of threads."""

    def __init__(
        self, layer: Layer, box: Box, responses: Tensor, slopes: Tensor, by: float
    ) -> None:
        self.layer, self.box, self.by, self.like = layer, box, by, responses
        self.responses, self.slopes = (array_of(each.flatten(2)) for each in (responses, slopes))

    def pool(self, pooled: Tensor | None) -> Tensor:
        """Return the sum of the pools; write them, or add to slopes; see TorchPools.pool."""
        layer, write, out = self.layer, pooled is not None, self.slopes
        if pooled is not None:
            out = array_of(pooled[self.box.slices((0, 0))].flatten(2))
        shape = layer.pool, layer.pool_step, layer.epsilon, self.by, write
        total = _cpu.pool_responses(torch.get_num_threads(), *shape, self.responses, out)
        return self.like.new_full((), total)


class TorchPools:
    """Some pools, by torch.

    memory: for the sums along the first axis, and for the pools
    """

    def __init__(
        self,
        layer: Layer,
        box: Box,
        responses: Tensor,
        slopes: Tensor,
        by: float,
        memory: list[Tensor],
    ) -> None:
        self.box, self.by, self.epsilon = box, by, layer.epsilon
        rows, columns, *trail = responses.shape
        size, step = layer.pool, layer.pool_step
        down, along = (
            [slice(k, n - size + k + 1, step) for k in range(size)] for n in (rows, columns)
        )
        counts = [(n - size) // step + 1 for n in (rows, columns)]
        shapes = (counts[0], columns, *trail), (*counts, *trail)
        self.sums, self.pools = (
            values[: prod(shape)].view(shape) for values, shape in zip(memory, shapes, strict=True)
        )
        self.responses = [responses[each] for each in down]
        self.slopes = [slopes[each] for each in down]
        self.along = [self.sums[:, each] for each in along]

    def pool(self, pooled: Tensor | None) -> Tensor:
        """Return the sum of the pools; write them, or add their part to slopes.

        pooled: of all the pools of the rank, or None for slopes
        The sparsity term's slope with respect to a response is that response times the sum of
        sparsity / batch / pooled over its pools: here the latter.
        """
        sums, pools = self.sums, self.pools
        torch.square(self.responses[0], out=sums)
        for each in self.responses[1:]:
            sums.addcmul_(each, each)
        pools.copy_(self.along[0])
        for each in self.along[1:]:
            pools.add_(each)
        pools.add_(self.epsilon).sqrt_()
        total = pools.sum()
        if pooled is not None:
            pooled[self.box.slices((0, 0))] = pools
            return total
        pools.reciprocal_().mul_(self.by)
        sums.zero_()
        for each in self.along:
            each.add_(pools)
        for each in self.slopes:
            each.add_(sums)
        return total


Pools = CompiledPools | TorchPools


def cells_of(layer: Layer, box: Box) -> tuple[slice, slice]:
    """Return the place of the responses that pools have, along both axes. box: of the pools."""
    size, step = layer.pool, layer.pool_step
    rows, columns = (
        slice(a * step, (b - 1) * step + size) for a, b in zip(box.start, box.stop, strict=True)
    )
    return rows, columns


def pools_of(
    layer: Layer, responses: Tensor, slopes: Tensor, by: float, boxes: list[Box]
) -> list[Pools]:
    """Return the pools of boxes.

    responses, slopes: [rows, columns, maps, batch], of all the pools of a rank
    by: what is divided by a pool for the slopes
    """
    views = [(responses[at], slopes[at]) for at in (cells_of(layer, box) for box in boxes)]
    given = list(zip(boxes, views, strict=True))
    if passes.compiled(responses):
        return [CompiledPools(layer, box, *each, by) for box, each in given]
    most = max((each.numel() for each, _ in views), default=0)
    memory = [responses.new_empty(most) for _ in range(2)]
    return [TorchPools(layer, box, *each, by, memory) for box, each in given]


def subtract(again: Tensor, x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    """Subtract x times a factor; return the sums of the squares of the result and of x.

    again, x: [rows, columns, channels, batch], in memory as passes.order_of
    """
    if passes.compiled(x):
        own, rest = (array_of(each.permute(passes.ROWS).flatten(2)) for each in (x, again))
        sums = _cpu.subtract_cells(torch.get_num_threads(), by, own, rest)
        return x.new_full((), sums[0]), x.new_full((), sums[1])
    error, energy = x.new_zeros(()), x.new_zeros(())
    rows = max(1, most_bytes(x) // (x[:1].nbytes or 1))
    for rest, own in zip(torch.split(again, rows), torch.split(x, rows), strict=True):
        rest.sub_(own, alpha=by)
        error += rest.square().sum()
        energy += own.square().sum()
    return error, energy

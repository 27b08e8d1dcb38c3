"""A macro layer over ranks: filters, L2 pooling, local contrast normalisation, and its objective.

Cells of the input, blocks of filters and pools are each split over ranks by a layout of their
own. Only cells travel: filters, which are untied, stay with their block for good.
Source: Coates et al., Deep learning with COTS HPC systems, ICML 2013, for the distribution of
arrays; Le et al., Building high-level features using large scale unsupervised learning, ICML 2012,
for the objective. Tied filters of length 1 and their factor (Geometry.scale) are ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, NamedTuple

import numpy as np
import torch

from ...darray.array import DistArray
from ...darray.layout import Box, Layout, receptive
from ...darray.plan import WindowPlan
from ...ops.tensors import CPU, values_of
from ...torch.autograd import accumulate, exchange
from ...world.ranks import Ranks
from .job import Geometry


@dataclass
class Clock:
    """Seconds spent in exchanges, waits included, and bytes sent."""

    spent_s: float = 0.0
    sent_bytes: int = 0

    def take(self) -> tuple[float, int]:
        """Return both and begin anew."""
        taken = self.spent_s, self.sent_bytes
        self.spent_s, self.sent_bytes = 0.0, 0
        return taken


class TimedPlan(WindowPlan):
    """A plan that tells a clock of its exchanges and accumulations. Collective."""

    def __init__(self, clock: Clock, *arguments: Any, name: str) -> None:
        super().__init__(*arguments, name=name)
        self.clock = clock

    def exchange(self, x: Any, out: Any = None, *, number: int = 0) -> Any:
        """See WindowPlan.exchange."""
        return self._timed(super().exchange, x, out, number)

    def accumulate(self, y: Any, out: Any = None, *, number: int = 0) -> Any:
        """See WindowPlan.accumulate."""
        return self._timed(super().accumulate, y, out, number)

    def _timed(self, call: Any, given: Any, out: Any, number: int) -> Any:
        began_s, before = time.perf_counter(), int(self.world.bytes_sent[0])
        result = call(given, out, number=number)
        self.clock.spent_s += time.perf_counter() - began_s
        self.clock.sent_bytes += int(self.world.bytes_sent[0]) - before
        return result


Tensor = torch.Tensor
Pair = tuple[int, int]


def gather(window: Tensor, counts: Pair, size: int, step: int) -> Tensor:
    """Return float[blocks, size * size * channels, batch], the receptive field of every block.

    window: [(counts - 1) * step + size along both axes, channels, batch]; empty where there are
        no blocks; its backward is scatter
    counts: of blocks along both axes, which are numbered with the second axis fastest
    """
    fields: Tensor = _gather(window, counts, size, step)
    return fields


def scatter(fields: Tensor, counts: Pair, size: int, step: int, shape: Sequence[int]) -> Tensor:
    """Return the window of that shape in which overlapping fields are added; the transpose."""
    window: Tensor = _scatter(fields, counts, size, step, tuple(shape))
    return window


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, window: Tensor, counts: Pair, size: int, step: int) -> Tensor:
        ctx.arguments = counts, size, step, window.shape
        trail = window.shape[2:]
        blocks, inputs = counts[0] * counts[1], size * size * trail[0]
        if not blocks:
            return window.new_empty((0, inputs, trail[1]))
        fields = window.unfold(0, size, step).unfold(1, size, step)
        return fields.permute(0, 1, 4, 5, 2, 3).reshape(blocks, inputs, trail[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter(gradients[0], *ctx.arguments), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fields: Tensor, counts: Pair, size: int, step: int, shape: Sequence[int]
    ) -> Tensor:
        ctx.arguments = counts, size, step
        if not fields.shape[0]:
            return fields.new_zeros(shape)
        high, wide = counts
        parts = fields.reshape(high, wide, size, size, *shape[2:])
        rows = parts.new_zeros((high, size, *shape[1:]))  # along the second axis first
        for j in range(size):
            rows[:, :, j : j + (wide - 1) * step + 1 : step] += parts[:, :, :, j].transpose(1, 2)
        window = parts.new_zeros(shape)
        for i in range(size):
            window[i : i + (high - 1) * step + 1 : step] += rows[:, i]
        return window

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _gather(gradients[0], *ctx.arguments), None, None, None, None


def slide(window: Tensor, counts: Pair, weights: Sequence[float], step: int = 1) -> Tensor:
    """Return the weighted sums over the squares that a window consists of, counts of them.

    weights: along each axis; the weight of a cell is the product of two
    """
    for axis in (0, 1):
        ends = [(k, k + max(0, (counts[axis] - 1) * step + 1)) for k in range(len(weights))]
        parts = (window[_along(axis, slice(a, b, step))] for a, b in ends)
        window = sum(w * part for w, part in zip(weights, parts, strict=True))  # type: ignore[assignment]
    return window.reshape(*counts, *window.shape[2:])  # empty windows are empty along both axes


def _along(axis: int, cut: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (cut,)


_gather: Callable[..., Any] = _Gather.apply  # torch declares apply without types
_scatter: Callable[..., Any] = _Scatter.apply

_WEIGHTS = 1  # a stream of random numbers


class Terms(NamedTuple):
    """This rank's part of the objective; the sum over ranks is that of the images.

    error: of the reconstruction, squares; sparsity: sum of the pooled responses, not yet weighted
    energy: squares of the input; all are means over the batch
    """

    loss: Tensor
    error: Tensor
    sparsity: Tensor
    energy: Tensor


class MacroLayer(torch.nn.Module):
    """One layer and its plans. Collective.

    cells: the layout of the input; procs: of the grids over which blocks and pools are split
    weight: float[blocks of this rank, maps, inputs], rows of length 1, the same for any ranks
    """

    def __init__(
        self,
        world: Ranks,
        geometry: Geometry,
        cells: Layout,
        procs: tuple[int, int],
        *,
        seed: int,
        number: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        super().__init__()
        layer, self.geometry, self.clock = geometry.layer, geometry, Clock()
        self.world, self.cells = world, cells
        self.blocks = Layout.grid(geometry.blocks, procs)
        self.pools = Layout.grid(geometry.pools, procs)
        block, pool = self.blocks.owner(world.rank), self.pools.owner(world.rank)
        self.own_blocks, self.own_pools = _pair(block.shape), _pair(pool.shape)

        def plan(name: str, layout: Layout, window: Box, boundary: str = "zero") -> TimedPlan:
            given = self.clock, world, layout, window, boundary
            return TimedPlan(*given, name=f"{name} of layer {number}")

        near = receptive(pool, layer.contrast, pad=layer.contrast // 2)
        self.plans = {
            "fields": plan("fields", cells, receptive(block, layer.field, layer.step)),
            "pools": plan("pools", self.blocks, receptive(pool, layer.pool, layer.pool_step)),
            "contrast": plan("contrast", self.pools, near, "symmetric"),
        }
        first = _random_rows(geometry, block, seed, number)
        self.weight = torch.nn.Parameter(first.to(device, dtype))
        self.normalise_rows()

    def rows(self) -> Tensor:
        """Return the filters at length 1, as the objective uses them."""
        rows: Tensor = _unit(self.weight)
        return rows

    def over_blocks(self, values: Tensor) -> DistArray:
        """Return [blocks, blocks, maps, inputs] over ranks in the host's memory, shared on the CPU.

        values: as weight
        """
        local = values_of(values).reshape(*self.own_blocks, *self.weight.shape[1:])
        return DistArray(self.world, self.blocks, local)

    @torch.no_grad()
    def normalise_rows(self) -> None:
        """Set the filters to length 1, as after each update."""
        self.weight.div_(self.weight.norm(dim=2, keepdim=True))

    def objective(self, x: Tensor) -> tuple[Terms, Tensor]:
        """Return this rank's terms, and its pooled responses. Collective.

        x: float[owned cells, channels, batch]
        sum over images of |scale W^T W x - x|^2 + sparsity sum_j sqrt(epsilon + V_j (W x)^2)
        """
        layer, batch = self.geometry.layer, x.shape[-1]
        window, rows = exchange(x, self.plans["fields"]), self.rows()
        cut = self.own_blocks, layer.field, layer.step
        responses = torch.bmm(rows, gather(window, *cut))
        fields = torch.bmm(rows.transpose(1, 2), responses)
        overlaid = scatter(fields, *cut, window.shape)
        again = self.geometry.scale * accumulate(overlaid, self.plans["fields"])
        pooled = self._pooled(responses)
        error, energy = ((again - x) ** 2).sum() / batch, (x.detach() ** 2).sum() / batch
        sparsity = pooled.sum() / batch
        return Terms(error + layer.sparsity * sparsity, error, sparsity, energy), pooled

    def forward(self, x: Tensor) -> Tensor:
        """Return float[owned pools, maps, batch], what the next layer gets. Collective."""
        window = exchange(x, self.plans["fields"])
        cut = self.own_blocks, self.geometry.layer.field, self.geometry.layer.step
        return self.normalised(self._pooled(torch.bmm(self.rows(), gather(window, *cut))))

    def _pooled(self, responses: Tensor) -> Tensor:
        """Return the square roots of sums of squares over pools, map by map."""
        layer, maps = self.geometry.layer, self.geometry.layer.maps
        near = responses.reshape(*self.own_blocks, maps, responses.shape[-1])
        squares = exchange(near, self.plans["pools"]) ** 2
        sums = slide(squares, self.own_pools, [1.0] * layer.pool, layer.pool_step)
        return (layer.epsilon + sums).sqrt()

    def normalised(self, pooled: Tensor) -> Tensor:
        """Return pooled responses less the mean near them, over their deviation. Collective.

        Means are over all maps and a square of pools with weights of a Gaussian, which the border
        reflects; the divisor is floor at least.
        Source: Jarrett et al., What is the best multi-stage architecture, ICCV 2009, section 2.1,
        with a constant floor.
        """
        weights, floor = _gaussian(self.geometry.layer.contrast), self.geometry.layer.floor

        def mean(values: Tensor) -> Tensor:  # over the maps first: so fewer bytes travel
            near = exchange(values.mean(dim=2, keepdim=True), self.plans["contrast"])
            return slide(near, self.own_pools, weights)

        centred = pooled - mean(pooled)
        return centred / mean(centred**2).clamp(min=floor**2).sqrt()


class _Unit(torch.autograd.Function):
    """Rows at length 1. Written out, as torch's own backward goes through the weights 3 times more.

    With r = w / |w| the gradient is (g - r (r . g)) / |w|.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        lengths = weight.norm(dim=2, keepdim=True)
        rows = weight / lengths
        ctx.save_for_backward(rows, lengths)
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        rows, lengths = ctx.saved_tensors
        along = torch.linalg.vecdot(rows, gradients[0])[..., None]
        return torch.addcmul(gradients[0], rows, along, value=-1).div_(lengths)


_unit: Callable[..., Any] = _Unit.apply  # torch declares apply without types


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]


def _gaussian(size: int) -> list[float]:
    """Return weights that sum to 1, with a standard deviation of a quarter of their number."""
    weights = [exp(-(((i - size // 2) / (size / 4)) ** 2) / 2) for i in range(size)]
    return [weight / sum(weights) for weight in weights]


def _random_rows(geometry: Geometry, block: Box, seed: int, number: int) -> Tensor:
    """Return normal float64[blocks, maps, inputs]; each block has a stream of its own."""
    (top, left), (bottom, right) = block.start, block.stop
    shape = geometry.layer.maps, geometry.inputs
    path = [seed, _WEIGHTS, number]
    drawn = [
        np.random.Generator(np.random.Philox(np.random.SeedSequence([*path, i, j])))
        .standard_normal(shape)
        for i in range(top, bottom)
        for j in range(left, right)
    ]  # fmt: skip
    return torch.from_numpy(np.stack(drawn) if drawn else np.empty((0, *shape)))

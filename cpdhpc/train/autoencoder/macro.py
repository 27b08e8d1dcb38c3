"""A macro layer over ranks: filters, L2 pooling, local contrast normalisation, and its objective.

Cells of the input, blocks of filters and pools are each dealt to the ranks by a layout of their
own. Only cells travel: filters, which are untied, stay with their block for good.
Source: Coates et al., Deep learning with COTS HPC systems, ICML 2013, for the distribution of
arrays; Le et al., Building high-level features using large scale unsupervised learning, ICML 2012,
for the objective. Tied filters of length 1 and their factor (Geometry.scale) are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any, NamedTuple

import numpy as np
import torch

from ...comm import Ranks
from ...darray import Box, DistArray, Layout, WindowPlan, receptive
from ...darray.autograd import accumulate, exchange
from .clock import Clock, Timed
from .geometry import Geometry
from .patches import gather, scatter, slide

Tensor = torch.Tensor
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

    cells: the layout of the input; procs: of the grids in which blocks and pools are dealt
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
    ) -> None:
        super().__init__()
        layer, self.geometry, self.clock = geometry.layer, geometry, Clock()
        self.world, self.cells = world, cells
        self.blocks = Layout.grid(geometry.blocks, procs)
        self.pools = Layout.grid(geometry.pools, procs)
        block, pool = self.blocks.owner(world.rank), self.pools.owner(world.rank)
        self.own_blocks, self.own_pools = _pair(block.shape), _pair(pool.shape)

        def plan(name: str, layout: Layout, window: Box, boundary: str = "zero") -> Timed:
            made = WindowPlan(world, layout, window, boundary, name=f"{name} of layer {number}")
            return Timed(made, self.clock)

        near = receptive(pool, layer.contrast, pad=layer.contrast // 2)
        self.plans = {
            "fields": plan("fields", cells, receptive(block, layer.field, layer.step)),
            "pools": plan("pools", self.blocks, receptive(pool, layer.pool, layer.pool_step)),
            "contrast": plan("contrast", self.pools, near, "symmetric"),
        }
        first = _random_rows(geometry, block, seed, number)
        self.weight = torch.nn.Parameter(first.to(dtype))
        self.normalise_rows()

    def rows(self) -> Tensor:
        """Return the filters at length 1, as the objective uses them."""
        rows: Tensor = _unit(self.weight)
        return rows

    def over_blocks(self, values: Tensor) -> DistArray:
        """Return [blocks, blocks, maps, inputs] over ranks, sharing memory; values: as weight."""
        local = values.detach().reshape(*self.own_blocks, *self.weight.shape[1:])
        return DistArray(self.world, self.blocks, local.numpy())

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

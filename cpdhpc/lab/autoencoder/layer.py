"""A macro layer over ranks: filters, L2 pooling, local contrast normalisation, and its objective.

Cells of the input, blocks of filters and pools are each split over ranks by a layout of their
own. Only cells travel: filters, which are untied, always stay with their block.
Source: Coates et al., Deep learning with COTS HPC systems, ICML 2013, for the distribution of
arrays; Le et al., Building high-level features using large scale unsupervised learning, ICML 2012,
for the objective. Tied filters of length 1 and their factor (Geometry.scale) are ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
import torch

from ...darray.array import DistArray
from ...darray.layout import Box, Layout, receptive
from ...darray.plan import Handle, WindowPlan
from ...ops.tensors import CPU, values_of
from ...torch.autograd import exchange
from ...world.ranks import Ranks
from .blocks import Filters, respond
from .job import Geometry
from .memory import in_large_pages


@dataclass
class Clock:
    """Seconds spent in exchanges, waits included, and bytes sent."""

    spent_s: float = 0.0
    sent_bytes: int = 0

    def take(self) -> tuple[float, int]:
        """Return both and reset."""
        taken = self.spent_s, self.sent_bytes
        self.spent_s, self.sent_bytes = 0.0, 0
        return taken


class TimedPlan(WindowPlan):
    """A plan that adds its exchanges and accumulations to a clock. Collective."""

    def __init__(self, clock: Clock, *arguments: Any, name: str) -> None:
        super().__init__(*arguments, name=name)
        self.clock = clock

    def exchange(self, x: Any, out: Any = None, *, number: int = 0) -> Any:
        """See WindowPlan.exchange."""
        return self._timed(super().exchange, x, out, number=number)

    def accumulate(self, y: Any, out: Any = None, *, number: int = 0) -> Any:
        """See WindowPlan.accumulate."""
        return self._timed(super().accumulate, y, out, number=number)

    def begin(self, x: Any, out: Any = None, *, number: int = 0) -> Any:
        """See WindowPlan.begin."""
        return TimedHandle(self._timed, self._timed(super().begin, x, out, number=number))

    def begin_accumulate(self, y: Any, out: Any = None, *, number: int = 0) -> Any:
        """See WindowPlan.begin_accumulate."""
        return TimedHandle(
            self._timed, self._timed(super().begin_accumulate, y, out, number=number)
        )

    def _timed(self, call: Any, *given: Any, **named: Any) -> Any:
        began_s, before = time.perf_counter(), int(self.world.bytes_sent[0])
        result = call(*given, **named)
        self.clock.spent_s += time.perf_counter() - began_s
        self.clock.sent_bytes += int(self.world.bytes_sent[0]) - before
        return result


class TimedHandle:
    """A handle whose calls are added to its plan's clock."""

    def __init__(self, timed: Callable[..., Any], handle: Handle) -> None:
        self._timed, self._handle, self._come = timed, handle, False

    def progress(self) -> None:
        """See Handle.progress."""
        self._come = self._come or self._timed(self._handle.progress)

    def finish(self) -> None:
        """See Handle.finish."""
        self._timed(self._handle.finish)


Tensor = torch.Tensor
Pair = tuple[int, int]


def slide(window: Tensor, counts: Pair, weights: Sequence[float], step: int = 1) -> Tensor:
    """Return weighted sums over the squares in a window, counts of them.

    weights: along each axis; the weight of a cell is the product of two
    """
    for axis in (0, 1):
        ends = [(k, k + max(0, (counts[axis] - 1) * step + 1)) for k in range(len(weights))]
        parts = (window[_along(axis, slice(a, b, step))] for a, b in ends)
        window = sum(w * part for w, part in zip(weights, parts, strict=True))  # type: ignore[assignment]
    return window.reshape(*counts, *window.shape[2:])  # empty windows are empty along both axes


def _along(axis: int, cut: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (cut,)


_WEIGHTS = 1  # a stream of random numbers


class MacroLayer:
    """One layer and its plans. Collective.

    cells: the layout of the input; procs: of the grids over which blocks and pools are split
    weight: float[blocks of this rank, maps, inputs], rows of length 1, the same for any ranks
    momentum: of the weight, zeros at first
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
            "fields": plan("fields", cells, geometry.cells_of(block)),
            "pools": plan("pools", self.blocks, receptive(pool, layer.pool, layer.pool_step)),
            "contrast": plan("contrast", self.pools, near, "symmetric"),
        }
        shape = block.size, layer.maps, geometry.inputs
        self.weight, self.momentum = (
            in_large_pages(torch.empty(shape, dtype=dtype, device=device)) for _ in range(2)
        )
        _draw(self.weight, block, seed, number)
        self.weight.div_(self.weight.norm(dim=2, keepdim=True))
        self.momentum.zero_()
        self.filters = Filters(geometry, self.own_blocks, self.weight)

    def over_blocks(self, values: Tensor) -> DistArray:
        """Return [blocks, blocks, maps, inputs] over ranks in the host's memory, shared on the CPU.

        values: as weight
        """
        local = values_of(values).reshape(*self.own_blocks, *self.weight.shape[1:])
        return DistArray(self.world, self.blocks, local)

    def __call__(self, x: Tensor) -> Tensor:
        """Return float[owned pools, maps, batch], the input of the next layer. Collective.

        x: float[owned cells, channels, batch], to which gradients flow
        """
        responses = respond(exchange(x, self.plans["fields"]), self.filters)
        return self.normalised(self._pooled(responses))

    def _pooled(self, responses: Tensor) -> Tensor:
        """Return the square roots of sums of squares over pools, map by map."""
        layer = self.geometry.layer
        squares = exchange(responses, self.plans["pools"]) ** 2
        sums = slide(squares, self.own_pools, [1.0] * layer.pool, layer.pool_step)
        return (layer.epsilon + sums).sqrt()

    def normalised(self, pooled: Tensor) -> Tensor:
        """Return pooled responses less their local mean, divided by their deviation. Collective.

        Means are over all maps and a square of pools with weights of a Gaussian, reflected at the
        border; the divisor is at least floor.
        Source: Jarrett et al., What is the best multi-stage architecture, ICCV 2009, section 2.1,
        with a constant floor.
        """
        weights, floor = _gaussian(self.geometry.layer.contrast), self.geometry.layer.floor

        def mean(values: Tensor) -> Tensor:  # over the maps first: so fewer bytes travel
            near = exchange(values.mean(dim=2, keepdim=True), self.plans["contrast"])
            return slide(near, self.own_pools, weights)

        centred = pooled - mean(pooled)
        return centred / mean(centred**2).clamp(min=floor**2).sqrt()


def _pair(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]


def _gaussian(size: int) -> list[float]:
    """Return weights that sum to 1, with a standard deviation of a quarter of their number."""
    weights = [exp(-(((i - size // 2) / (size / 4)) ** 2) / 2) for i in range(size)]
    return [weight / sum(weights) for weight in weights]


def _draw(weight: Tensor, block: Box, seed: int, number: int) -> None:
    """Fill [blocks, maps, inputs] with normal numbers; each block has a stream of its own."""
    (top, left), (bottom, right) = block.start, block.stop
    path = [seed, _WEIGHTS, number]
    places = ((i, j) for i in range(top, bottom) for j in range(left, right))
    for of_block, place in zip(weight, places, strict=True):
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*path, *place])))
        of_block.copy_(torch.from_numpy(rng.standard_normal(tuple(of_block.shape))))

"""Convolutions of a rank's own part, computed while the borders of other parts travel.

A convolution is linear. Torch's own kernel convolves the part as if it were surrounded by zeros;
cells from other ranks are convolved in strips and added to the outputs that they affect. Backward
is the transpose: gradients of the strips travel while that of the weight is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ...darray.layout import Box, receptive
from ...darray.plan import WindowPlan
from ..autograd import backward_number, next_number, readable, twice
from .windowed import ImageGrid, Shape, Windowed, check_part, fetch, pair

BOUNDARIES = {"zeros": "zero", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
Place = tuple[Any, ...]  # selects a box of a map [batch, channels, rows, columns]

# For a strip, on the CPU: oneDNN, used by functional.conv2d, needs 142 us for 24 channels of 3 x
# 128 cells, this needs 27; for the gradients it is 265 and 76.
strip_forward = torch.ops.aten._slow_conv2d_forward
strip_backward = torch.ops.aten._slow_conv2d_backward.output_mask


class Strip(NamedTuple):
    """A box of cells around a rank's part, and the outputs that it affects.

    cells: indices into the halo's cells; shape: their rows and columns
    padding: zeros on the left, right, top and bottom that extend the box to the window of these
        outputs, negative if that is smaller; outputs: indices into the owned ones
    """

    cells: slice
    shape: Shape
    padding: tuple[int, ...]
    outputs: Place

    def of(self, around: torch.Tensor) -> torch.Tensor:
        """Return a view [batch, channels, rows, columns] of cells [batch, channels, cells]."""
        return around[..., self.cells].view(*around.shape[:2], *self.shape)


class Conv2d(Windowed):
    """torch.nn.Conv2d. Collective, unless all ranks own their windows.

    padding: of the rank's part, with which torch's kernel makes exactly the rank's own outputs;
        None if such a padding does not exist on some rank: then all fetch windows
    halo: the plan for the cells around parts, None if no rank needs any; strips: its boxes
    """

    def __init__(
        self, layer: torch.nn.Conv2d, grid: ImageGrid, shape: Shape, after: Shape, name: str
    ) -> None:
        size, step, dilation = map(pair, (layer.kernel_size, layer.stride, layer.dilation))
        if layer.padding == "same":  # the odd cell comes last, as in torch
            before = pair([d * (k - 1) // 2 for k, d in zip(size, dilation, strict=True)])
        else:
            before = pair(0 if layer.padding == "valid" else layer.padding)

        def reach(box: Box) -> Box:
            return receptive(box, size, step, before, dilation)

        boundary = BOUNDARIES[layer.padding_mode]
        super().__init__(grid, shape, after, reach, boundary, name)
        self.weight, self.bias = layer.weight, layer.bias
        self.stride, self.dilation, self.groups = step, dilation, layer.groups
        self.size, self.before = size, before
        windows = self.plan.windows.boxes
        if boundary == "zero":  # torch pads with zeros itself
            windows = tuple(window.intersect(self.inputs.domain) for window in windows)
        self.padding: Shape | None = None
        self.halo: WindowPlan | None = None
        self.strips: list[Strip] = []
        found = [self._fitting(rank, window) for rank, window in enumerate(windows)]
        ranks = [each for each in found if each is not None]
        if len(ranks) < len(found):
            return
        self.padding, self.strips = ranks[grid.group.rank]
        if any(strips for _, strips in ranks):
            window = windows[grid.group.rank]
            self.halo = WindowPlan(
                grid.group, self.inputs, window, boundary, halo_only=True, name=f"{name}, halo"
            )

    def _fitting(self, rank: int, window: Box) -> tuple[Shape, list[Strip]] | None:
        """Return a rank's padding and strips, None if torch would make other outputs of its part.

        window: the part of the rank's window that is not zero
        """
        own, box = self.inputs.owner(rank), self.outputs.owner(rank)
        first, last = self.plan.windows.boxes[rank]
        padding = pair([a - b for a, b in zip(own.start, first, strict=True)])
        axes = zip(own.stop, last, padding, self.stride, strict=True)
        if own.empty or box.empty or any(p < 0 or (a + p - b) // s for a, b, p, s in axes):
            return None
        strips, stop = list[Strip](), 0
        for part in window.without(own):
            start, stop = stop, stop + part.size
            reached = self._reached(part).intersect(box)
            if reached.empty:
                return None
            strips.append(self._strip(part, slice(start, stop), reached, box.start))
        return padding, strips

    def _reached(self, box: Box) -> Box:
        """Return the outputs that depend on a box of cells."""
        ends = zip(box.start, box.stop, self.before, self.size, self.dilation, self.stride,
                   strict=True)  # fmt: skip
        axes = [(-((d * (k - 1) - a - p) // s), (b - 1 + p) // s + 1) for a, b, p, k, d, s in ends]
        return Box(*zip(*axes, strict=True))

    def _strip(self, box: Box, cells: slice, reached: Box, origin: Sequence[int]) -> Strip:
        needs = receptive(reached, self.size, self.stride, self.before, self.dilation)
        (top, left), (bottom, right) = needs
        padding = box.start[1] - left, right - box.stop[1], box.start[0] - top, bottom - box.stop[0]
        return Strip(cells, pair(box.shape), padding, (..., *reached.slices(origin)))

    def channels(self, given: int) -> int:
        """Return the channels of the output."""
        return self.weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs float[batch, channels, rows, columns]. Collective."""
        if self.padding is None:
            return super().forward(x)
        check_part(x, self.plan.owned, self.plan)
        if self.halo is None:
            return self.convolved(x, self.weight, self.bias, self.padding)
        given: tuple[torch.Tensor | None, ...] = x, self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            given = tuple(
                each if each is None or each.dtype is torch.float64 else each.to(dtype)
                for each in given
            )
        y: torch.Tensor = _Convolution.apply(*given, self)  # type: ignore[no-untyped-call]
        return y

    def computed(self, window: torch.Tensor) -> torch.Tensor:
        """Return the owned outputs."""
        return self.convolved(window, self.weight, self.bias, (0, 0))

    def convolved(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Shape
    ) -> torch.Tensor:
        """Return the outputs of x."""
        return functional.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def gradients(
        self,
        slope: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        padding: Shape,
        wanted: tuple[bool, ...],
    ) -> list[torch.Tensor | None]:
        """Return the requested gradients of input, weight and bias, by torch's kernel."""
        found = torch.ops.aten.convolution_backward(
            slope, x, weight, [slope.shape[1]], self.stride, padding, self.dilation, False, (0, 0),
            self.groups, wanted,
        )  # fmt: skip
        return list(found)

    def of_strip(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return a strip's contribution to outputs."""
        if self._is_plain(values, weight):
            found: torch.Tensor = strip_forward(
                values, weight, self.size, None, self.stride, (0, 0)
            )
            return found
        return self.convolved(values, weight, None, (0, 0))

    def strip_gradients(
        self, slope: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, *wanted: bool
    ) -> list[torch.Tensor | None]:
        """Return the requested gradients of a strip and of the weight."""
        mask = (*wanted, False)
        if self._is_plain(values, weight):
            return list(strip_backward(slope, values, weight, self.size, self.stride, (0, 0), mask))
        return self.gradients(slope, values, weight, (0, 0), mask)

    def _is_plain(self, values: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the kernels for strips can be used; of channels_last they give wrong results."""
        plain = values.device.type == "cpu" and self.groups == 1 and self.dilation == (1, 1)
        return plain and values.is_contiguous() and weight.is_contiguous()


class _Convolution(torch.autograd.Function):
    """A convolution with a halo. Forward and backward are collective."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: Conv2d
    ) -> torch.Tensor:
        halo, padding = layer.halo, layer.padding
        assert halo is not None and padding is not None, "other layers fetch windows"
        ctx.layer, ctx.number = layer, next_number(halo)
        around = x.new_empty(*x.shape[:2], *halo.shape)
        under_way = halo.begin(
            readable(x).permute(2, 3, 0, 1), around.permute(2, 0, 1), number=ctx.number
        )
        try:
            y = layer.convolved(x, weight, bias, padding)
        finally:
            under_way.finish()
        values = [functional.pad(strip.of(around), strip.padding) for strip in layer.strips]
        for strip, each in zip(layer.strips, values, strict=True):
            y[strip.outputs] += layer.of_strip(each, weight)
        ctx.save_for_backward(x, weight, bias, *values)
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slope,), layer = slopes, ctx.layer
        x, weight, bias, *values = ctx.saved_tensors
        wanted = tuple(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # to be differentiated again

            def made(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
                return layer.convolved(fetch(x, layer.plan), weight, bias, (0, 0))

            return (*twice(made, slope, (x, weight, bias), wanted), None)
        halo, of_x, under_way, of_strips = layer.halo, None, None, []
        around = slope.new_empty(*x.shape[:2], *halo.shape)
        for strip, each in zip(layer.strips, values, strict=True):
            found = layer.strip_gradients(slope[strip.outputs], each, weight, *wanted[:2])
            of_strips.append(found[1])
            if wanted[0]:
                strip.of(around)[...] = functional.pad(found[0], [-n for n in strip.padding])
        if wanted[0]:
            of_x = layer.gradients(slope, x, weight, layer.padding, (True, False, False))[0]
            under_way = halo.begin_accumulate(
                around.permute(2, 0, 1),
                of_x.permute(2, 3, 0, 1),
                number=backward_number(ctx.number),
            )
        try:
            rest = (False, *wanted[1:])
            _, of_weight, of_bias = layer.gradients(slope, x, weight, layer.padding, rest)
        finally:
            if under_way is not None:
                under_way.finish()
        for each in of_strips if wanted[1] else ():
            of_weight += each
        return of_x, of_weight, of_bias, None

"""Filters of a rank's blocks, applied to few blocks at a time, so that their values stay in cache.

Fields overlap in the window that they are cut out of. A part's fields are copied to lie one after
the other, so every product is a torch.bmm of plain matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import torch

from ...darray.layout import Box, whole
from .job import Geometry

Tensor = torch.Tensor
Pair = tuple[int, int]
CPU_BYTES = 2**21  # of a part: few, as a core's cache
GPU_BYTES = 2**28  # many, as a launch takes microseconds


def most_bytes(like: Tensor) -> int:
    """Return how many bytes a part may have, where a tensor is."""
    return GPU_BYTES if like.is_cuda else CPU_BYTES


def parts(boxes: Iterable[Box], width: int, most: int) -> Iterator[Box]:
    """Yield boxes of at most so many blocks, each of which has its filters in one piece.

    boxes: of the rank's blocks, counted from its first; width: of all its blocks
    """
    for box in boxes:
        rows = [box] if box.shape[1] == width else (row for row in box.parts(box.shape[1]))
        for each in rows:
            yield from each.parts(most)


def fields_of(window: Tensor, geometry: Geometry) -> Tensor:
    """Return the receptive field of every block, as a view of the window.

    window: [rows, columns, channels, batch]
    [rows of blocks, columns, field, field, channels, batch]
    """
    size, step = geometry.layer.field, geometry.layer.step
    return window.unfold(0, size, step).unfold(1, size, step).permute(0, 1, 4, 5, 2, 3)


def add_fields(fields: Tensor, values: Tensor, geometry: Geometry) -> None:
    """Add values to fields, a view of a window: first those of blocks that do not overlap."""
    apart = -(-geometry.layer.field // geometry.layer.step)
    rows, columns = (min(apart, n) for n in fields.shape[:2])
    for i in range(rows):
        for j in range(columns):
            fields[i::apart, j::apart].add_(values[i::apart, j::apart])


class Filters:
    """The filters of a rank's blocks.

    counts: of the blocks along both axes, which are numbered with the second axis fastest
    weight: [blocks, maps, inputs]
    """

    def __init__(self, geometry: Geometry, counts: Pair, weight: Tensor) -> None:
        self.geometry, self.counts, self.weight = geometry, counts, weight

    def chosen(self, box: Box, values: Tensor) -> Tensor:
        """Return the values of a part's blocks, as a view. values: as the weight."""
        first = box.start[0] * self.counts[1] + box.start[1]
        return values[first : first + box.size]

    def parts(self, boxes: Iterable[Box], batch: int, copies: int) -> list[Box]:
        """Return parts of boxes. copies: of weights and of fields that are used together."""
        maps, inputs = self.weight.shape[1:]
        values = copies * (maps * inputs + inputs * batch + maps * batch)
        most = most_bytes(self.weight) // (values * self.weight.element_size())
        return list(parts(boxes, self.counts[1], max(1, most)))

    def scratch(self, some: list[Box], batch: int) -> tuple[Tensor, Tensor]:
        """Return memory for the fields and the responses of the largest part."""
        n, (maps, inputs) = max((box.size for box in some), default=0), self.weight.shape[1:]
        make = self.weight.new_empty
        return make((n, inputs, batch)), make((n, maps, batch))

    def respond(self, window: Tensor) -> Tensor:
        """Return the responses [rows of blocks, columns, maps, batch] to a window."""
        batch = window.shape[-1]
        responses = window.new_empty((*self.counts, self.weight.shape[1], batch))
        some = self.parts([whole(self.counts)], batch, 1)
        fields, out = self.scratch(some, batch)
        for box in some:
            here, n = box.slices((0, 0)), box.size
            shaped(fields, fields_of(window, self.geometry)[here]).copy_(
                fields_of(window, self.geometry)[here]
            )
            torch.bmm(self.chosen(box, self.weight), fields[:n], out=out[:n])
            responses[here] = shaped(out, responses[here])
        return responses

    def overlay(self, responses: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the window in which what filters make of responses is added; the transpose."""
        batch = responses.shape[-1]
        window = responses.new_zeros(shape)
        some = self.parts([whole(self.counts)], batch, 1)
        fields, given = self.scratch(some, batch)
        for box in some:
            here, n = box.slices((0, 0)), box.size
            shaped(given, responses[here]).copy_(responses[here])
            torch.bmm(self.chosen(box, self.weight).mT, given[:n], out=fields[:n])
            view = fields_of(window, self.geometry)[here]
            add_fields(view, shaped(fields, view), self.geometry)
        return window


def shaped(scratch: Tensor, like: Tensor) -> Tensor:
    """Return the first blocks of scratch memory, as a view in the shape of a part's values."""
    return scratch[: prod(like.shape[:2])].view(like.shape)


class _Respond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, window: Tensor, filters: Filters) -> Tensor:
        ctx.filters, ctx.shape = filters, window.shape
        return filters.respond(window)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.filters.overlay(gradients[0], ctx.shape), None


respond: Callable[[Tensor, Filters], Tensor] = _Respond.apply  # torch declares apply without types

"""Filters of a rank's blocks, applied to few blocks at a time, so that their values stay in cache.

Fields overlap in the window that contains them. A part's fields are copied one after the other, so
every product is a torch.bmm of plain matrices.
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
CPU_BYTES = 2**21  # of a part: small, to fit a core's cache
GPU_BYTES = 2**28  # large, as a launch takes microseconds


def most_bytes(like: Tensor) -> int:
    """Return the size limit of a part in bytes, for a tensor's device."""
    return GPU_BYTES if like.is_cuda else CPU_BYTES


def parts(boxes: Iterable[Box], width: int, most: int) -> Iterator[Box]:
    """Yield boxes of at most so many blocks, each with contiguous filters.

    boxes: of the rank's blocks, counted from its first; width: of all its blocks
    """
    for box in boxes:
        rows = [box] if box.shape[1] == width else box.parts(box.shape[1])
        for each in rows:
            yield from each.parts(most)


def fields_of(window: Tensor, geometry: Geometry) -> Tensor:
    """Return the receptive field of every block, as a view of the window.

    window: [rows, columns, channels, batch]
    [rows of blocks, columns, field, field, channels, batch]
    """
    size, step = geometry.layer.field, geometry.layer.step
    return window.unfold(0, size, step).unfold(1, size, step).permute(0, 1, 4, 5, 2, 3)


def overlaps(fields: Tensor, values: Tensor, geometry: Geometry) -> list[tuple[Tensor, Tensor]]:
    """Return views of fields, and of values for them, of blocks whose fields do not overlap.

    fields, values: [rows of blocks, columns, ...]
    """
    each = -(-geometry.layer.field // geometry.layer.step)
    rows, columns = (min(each, n) for n in fields.shape[:2])
    places = [
        (slice(i, None, each), slice(j, None, each)) for i in range(rows) for j in range(columns)
    ]
    return [(fields[place], values[place]) for place in places]


class Scratch:
    """Memory for values of the blocks of a part, reused from part to part. like: of the dtype."""

    def __init__(self, like: Tensor, n: int, values: int, batch: int) -> None:
        self.memory = like.new_empty((n, values, batch))

    def of(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a part's matrices [blocks, values, batch], and the same in the shape of like."""
        here = self.memory[: prod(like.shape[:2])]
        return here, here.view(like.shape)

    def or_in_place(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, or [rows, columns, values, batch] themselves, if they are contiguous."""
        return (values.flatten(0, 1), values) if values.is_contiguous() else self.of(values)


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

    def parts(self, boxes: Iterable[Box], batch: int, copies: int, least: int = 1) -> list[Box]:
        """Return parts of boxes.

        copies: of weights and of fields that are used together; least: blocks of a part
        """
        maps, inputs = self.weight.shape[1:]
        values = copies * (maps * inputs + inputs * batch + maps * batch)
        most = most_bytes(self.weight) // (values * self.weight.element_size())
        return list(parts(boxes, self.counts[1], max(least, most)))

    def scratch(self, boxes: list[Box], batch: int) -> list[Scratch]:
        """Return memory for the fields and for the responses of the largest part."""
        n, like = max((box.size for box in boxes), default=0), self.weight
        return [Scratch(like, n, values, batch) for values in (like.shape[2], like.shape[1])]

    def respond(self, window: Tensor) -> Tensor:
        """Return the responses [rows of blocks, columns, maps, batch] to a window."""
        batch = window.shape[-1]
        responses = window.new_empty((*self.counts, self.weight.shape[1], batch))
        boxes = self.parts([whole(self.counts)], batch, 1)
        of_fields, of_responses = self.scratch(boxes, batch)
        for box in boxes:
            fields = fields_of(window, self.geometry)[box.slices((0, 0))]
            given, shaped = of_fields.of(fields)
            shaped.copy_(fields)
            to = responses[box.slices((0, 0))]
            out, shaped = of_responses.of(to)
            torch.bmm(self.chosen(box, self.weight), given, out=out)
            to.copy_(shaped)
        return responses

    def overlay(self, responses: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the window with the filters' outputs for responses added up; the transpose."""
        batch = responses.shape[-1]
        window = responses.new_zeros(shape)
        boxes = self.parts([whole(self.counts)], batch, 1)
        of_fields, of_responses = self.scratch(boxes, batch)
        for box in boxes:
            some = responses[box.slices((0, 0))]
            given, shaped = of_responses.of(some)
            shaped.copy_(some)
            fields = fields_of(window, self.geometry)[box.slices((0, 0))]
            out, shaped = of_fields.of(fields)
            torch.bmm(self.chosen(box, self.weight).mT, given, out=out)
            for to, values in overlaps(fields, shaped, self.geometry):
                to.add_(values)
        return window


class _Respond(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, window: Tensor, filters: Filters) -> Tensor:
        ctx.filters, ctx.shape = filters, window.shape
        return filters.respond(window)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.filters.overlay(gradients[0], ctx.shape), None


respond: Callable[[Tensor, Filters], Tensor] = _Respond.apply  # torch declares apply without types

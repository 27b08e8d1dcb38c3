"""What both passes over the blocks do with a part of them: compiled for a CPU, else by torch.

The compiled loops read a block's filters once for responses and reconstruction, and once for its
gradient, momentum and step, while all of the block's data are in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ... import _cpu
from ...darray.layout import Box
from ...ops.tensors import array_of
from .blocks import Filters, fields_of, overlaps

Tensor = torch.Tensor
COPIES = 2  # of weights and of fields in a part that a pass uses together
SHARED = 8  # blocks for each thread: for fewer, threads are not woken
ROWS, COLUMNS = (0, 3, 1, 2), (0, 1, 2, 3)  # orders of the axes of a window of cells in memory


def compiled(like: Tensor) -> bool:
    """Return whether the passes are compiled for a tensor's device."""
    return like.is_cpu


def order_of(like: Tensor) -> tuple[int, ...]:
    """Return the order in memory of a window's axes [rows, columns, channels, batch].

    In both orders a row of a field is contiguous: for one image, or for all.
    """
    return ROWS if compiled(like) else COLUMNS


class Views(NamedTuple):
    """Views of the data of some blocks.

    weight, moving: float[blocks, maps, inputs], the filters and their momentum
    x, again: [rows of blocks, columns, field, field, channels, batch], see fields_of; of all blocks
        of a rank: the window itself
    responses, slopes: [rows of blocks, columns, maps, batch]
    """

    weight: Tensor
    moving: Tensor
    x: Tensor
    again: Tensor
    responses: Tensor
    slopes: Tensor

    def part(self, filters: Filters, box: Box) -> Views:
        """Return the views of a part of all blocks, counted from the rank's first."""
        own, at = [filters.chosen(box, values) for values in self[:2]], box.slices((0, 0))
        fields = [fields_of(window, filters.geometry) for window in (self.x, self.again)]
        return Views(*own, *(each[at] for each in (*fields, self.responses, self.slopes)))


class CompiledPart:
    """Some blocks, with the loops of kernels/cpu_blocks.h, on torch's number of threads."""

    def __init__(self, views: Views) -> None:
        self.of = Views(*map(array_of, views))

    def reconstruct(self) -> None:
        """Compute the blocks' responses, and add their filters' outputs for them."""
        of = self.of
        _cpu.reconstruct_blocks(torch.get_num_threads(), of.weight, of.x, of.responses, of.again)

    def descend(self, rate: float, momentum: float, alpha: float) -> None:
        """Move the filters; see TorchPart.descend."""
        _cpu.descend_blocks(torch.get_num_threads(), (rate, momentum, alpha), *self.of)


class Memory:
    """Scratch memory for the largest part: for fields and responses twice, and for slopes."""

    def __init__(self, filters: Filters, boxes: list[Box], batch: int) -> None:
        self.x, self.responses = filters.scratch(boxes, batch)
        self.again, self.pools = filters.scratch(boxes, batch)
        self.slopes = filters.scratch(boxes, batch)[1]


class TorchPart:
    """Some blocks, by torch.bmm on copies of their fields, one after the other in memory.

    Copies are held twice, as matrices [blocks, values, batch] and in the shape of the views.
    """

    def __init__(self, views: Views, filters: Filters, memory: Memory) -> None:
        self.of = views
        self.x, self.again = memory.x.of(views.x), memory.again.of(views.again)
        self.responses = memory.responses.or_in_place(views.responses)
        self.pools = memory.pools.or_in_place(views.slopes)
        self.slopes = memory.slopes.of(views.slopes)[0]
        self.overlaps = overlaps(views.again, self.x[1], filters.geometry)

    def reconstruct(self) -> None:
        """Compute the blocks' responses, and add their filters' outputs for them."""
        (x, x_shaped), (responses, shaped) = self.x, self.responses
        x_shaped.copy_(self.of.x)
        torch.bmm(self.of.weight, x, out=responses)
        self.of.responses.copy_(shaped)
        torch.bmm(self.of.weight.mT, responses, out=x)
        for to, values in self.overlaps:
            to.add_(values)

    def descend(self, rate: float, momentum: float, alpha: float) -> None:
        """Move the filters.

        With responses r = W x and the reconstruction's slope alpha g in a field, the gradient of W
        is alpha r g^T + s x^T for s = alpha W g + the pools' slope. For filters w of length 1 its
        part along w, w . (alpha r g^T + s x^T) = r . (alpha W g + s), is subtracted.
        """
        of, s = self.of, self.slopes
        (x, x_shaped), (g, g_shaped), (r, r_shaped) = self.x, self.again, self.responses
        pools, pools_shaped = self.pools
        x_shaped.copy_(of.x)
        g_shaped.copy_(of.again)
        r_shaped.copy_(of.responses)
        torch.mul(of.slopes, r_shaped, out=pools_shaped)
        torch.baddbmm(pools, of.weight, g, alpha=alpha, out=s)
        of.moving.baddbmm_(r, g.mT, beta=momentum, alpha=alpha)
        of.moving.baddbmm_(s, x.mT)
        along = pools.sub_(s, alpha=2).mul_(r).sum(2, keepdim=True)  # with the opposite sign
        of.moving.addcmul_(of.weight, along)
        of.weight.sub_(of.moving, alpha=rate)
        of.weight.div_(torch.linalg.vector_norm(of.weight, dim=2, keepdim=True))


Part = CompiledPart | TorchPart


def parts_of(
    filters: Filters, windows: Views, boxes: Sequence[list[Box]], batch: int
) -> list[list[Part]]:
    """Return the parts of lists of boxes of blocks.

    windows: the views of all blocks of the rank
    """
    threads = torch.get_num_threads()
    is_compiled = compiled(windows.weight)
    least = SHARED * threads if is_compiled and threads > 1 else 1
    small = [filters.parts(some, batch, COPIES, least) for some in boxes]
    views = [[windows.part(filters, box) for box in some] for some in small]
    if is_compiled:
        return [[CompiledPart(each) for each in some] for some in views]
    memory = Memory(filters, [box for some in small for box in some], batch)
    return [[TorchPart(each, filters, memory) for each in some] for some in views]

"""Layers as products of matrices: forward, and for each gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from .arithmetic import LayerOperation

CONVOLUTIONS = functional.conv1d, functional.conv2d, functional.conv3d


class Product(LayerOperation):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> list[Tensor]:
        g = self.rows(g)
        of_x = (g @ weight).reshape(self.x) if mask[0] else g
        of_weight = g.t() @ x.reshape(-1, self.x[-1]) if mask[1] else g
        return [of_x, of_weight, g.sum(0) if mask[2] else g]

    def for_forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x.reshape(1, -1, self.x[-1]), weight.t()[None]

    def output(self, product: Tensor) -> Tensor:
        return product.reshape(*self.x[:-1], self.weight[0])

    def for_input(self, g: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows(g)[None], weight[None]

    def input(self, product: Tensor) -> Tensor:
        return product.reshape(self.x)

    def for_weight(self, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows(g).t()[None], x.reshape(1, -1, self.x[-1])

    def rows(self, g: Tensor) -> Tensor:
        return g.reshape(-1, self.weight[0])


class Convolution(LayerOperation):
    """Of any number of axes; its products are those of columns, the values under a filter."""

    def __init__(
        self, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> None:
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.groups, self.axes = groups, len(stride)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        how = self.stride, self.padding, self.dilation, self.groups
        result: Tensor = CONVOLUTIONS[self.axes - 1](x, weight, bias, *how)
        return result

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> list[Tensor]:
        how = self.stride, self.padding, self.dilation, False, [0] * self.axes, self.groups
        sizes = [len(weight)]  # of bias
        return list(torch.ops.aten.convolution_backward(g, x, weight, sizes, *how, mask))

    def for_forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        around = [(each, each) for each in self.padding]
        return self._columns(x, around, self.stride), self._grouped(weight).flatten(2).mT

    def output(self, product: Tensor) -> Tensor:
        return self._images(product, self._places)

    def for_input(self, g: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Between the pixels of g lie stride - 1 zeros; filters are flipped, in and out swapped."""
        sizes = [(n - 1) * s + 1 for n, s in zip(g.shape[2:], self.stride, strict=True)]
        spread = g.new_zeros(*g.shape[:2], *sizes)
        pixels = tuple(slice(None, None, s) for s in self.stride)
        spread[(slice(None), slice(None), *pixels)] = g
        around = []
        for size, there, kernel, pad, gap in zip(
            *(self.x[2:], spread.shape[2:], self.weight[2:], self.padding, self.dilation),
            strict=True,
        ):
            before = gap * (kernel - 1) - pad
            around.append((before, size - there + gap * (kernel - 1) - before))
        flipped = self._grouped(weight).flip(*range(3, 3 + self.axes)).transpose(1, 2)
        return self._columns(spread, around, [1] * self.axes), flipped.flatten(2).mT

    def input(self, product: Tensor) -> Tensor:
        return self._images(product, self.x[2:])

    def for_weight(self, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.weight[0] // self.groups
        grouped = g.reshape(len(g), self.groups, outputs, prod(g.shape[2:]))
        rows = grouped.permute(1, 2, 0, 3).flatten(2)  # [groups, outputs, batch * places]
        around = [(each, each) for each in self.padding]
        return rows, self._columns(x, around, self.stride)

    def rows(self, g: Tensor) -> Tensor:
        return g.transpose(0, 1).flatten(1).t()

    def biased(self, output: Tensor, bias: Tensor) -> Tensor:
        return output + bias.reshape(-1, *[1] * self.axes)

    @property
    def _places(self) -> list[int]:
        """The size of the output images."""
        sizes = zip(
            *(self.x[2:], self.padding, self.dilation, self.weight[2:], self.stride), strict=True
        )
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes]

    def _grouped(self, weight: Tensor) -> Tensor:
        """Return weight as [groups, outputs, inputs, *kernel]."""
        return weight.reshape(self.groups, -1, *self.weight[1:])

    def _images(self, product: Tensor, size: Sequence[int]) -> Tensor:
        """Return [batch, channels, *size] of [groups, batch * places, channels of a group]."""
        groups, _, channels = product.shape
        places = (groups, self.x[0], prod(size), channels)
        batched = product.reshape(places).permute(1, 0, 3, 2)
        return batched.reshape(self.x[0], groups * channels, *size)

    def _columns(
        self, x: Tensor, around: Sequence[tuple[int, int]], stride: Sequence[int]
    ) -> Tensor:
        """Return the values under a filter by place: [groups, batch * places, inputs * kernel].

        around: zeros before and after each axis; a negative number leaves values out
        """
        x = functional.pad(x, [each for pair in reversed(around) for each in pair]).contiguous()
        kernel = self.weight[2:]
        places = [
            (n - d * (k - 1) - 1) // s + 1
            for n, d, k, s in zip(x.shape[2:], self.dilation, kernel, stride, strict=True)
        ]
        batch, channels, *steps = x.stride()
        inputs = x.shape[1] // self.groups
        seen = x.as_strided(
            (self.groups, x.shape[0], *places, inputs, *kernel),
            (
                *(channels * inputs, batch, *(a * b for a, b in zip(steps, stride, strict=True))),
                *(channels, *(a * b for a, b in zip(steps, self.dilation, strict=True))),
            ),
        )
        return seen.reshape(self.groups, x.shape[0] * prod(places), inputs * prod(kernel))


class BatchedProduct(LayerOperation):
    """Of [batch, m, k] and [batch, k, n]; the second one's gradient is that of a weight."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.matmul(x, weight)

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> list[Tensor]:
        return [g @ weight.mT if mask[0] else g, x.mT @ g if mask[1] else g, g]

    def for_forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x, weight

    def output(self, product: Tensor) -> Tensor:
        return product

    def for_input(self, g: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return g, weight.mT

    def input(self, product: Tensor) -> Tensor:
        return product

    def for_weight(self, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return g.mT, x

    def of_weight(self, product: Tensor) -> Tensor:
        return product.mT

    def rows(self, g: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1])
